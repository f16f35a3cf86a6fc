// Tests of the plan panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { binaryBytes, memoryAxis, placeNames, ticksOf, timeAxis } =
  load("plan", "binaryBytes", "memoryAxis", "placeNames", "ticksOf", "timeAxis");
const GIB = 2 ** 30;
const row = (gib, state = "fits", seconds = 1) => ({ name: "dp 8", bytes: gib * GIB, state, seconds });

test("bytes have binary units", () => {
  assert.deepEqual([0, 1000, 1536, 54.23 * GIB].map((count) => binaryBytes(count)), ["0 B", "1000 B", "1.5 KiB", "54.2 GiB"]);
  assert.equal(binaryBytes(GIB / 2, GIB), "0.5 GiB");
});

test("the axis has the memory of the hardware, unless all layouts need far less", () => {
  const near = memoryAxis([row(50)], 80 * GIB, 800);
  assert.ok(near.hasLimit && near.end > 80 * GIB);
  const far = memoryAxis([row(2)], 80 * GIB, 800);
  assert.ok(!far.hasLimit && far.end < 3 * GIB);
});

test("a layout far too large stands at twice the memory, unless none fits", () => {
  assert.equal(memoryAxis([row(50), row(900, "does not fit")], 80 * GIB, 800).most, 160 * GIB);
  assert.equal(memoryAxis([row(900, "does not fit")], 80 * GIB, 800).most, 900 * GIB);
});

test("steps of very different times have a logarithmic axis", () => {
  const linear = timeAxis([row(1, "fits", 1), row(1, "fits", 2)]);
  assert.ok(!linear.isLog && linear.at(0) === 0 && Math.abs(linear.at(2) / linear.at(1) - 2) < 1e-9);
  const log = timeAxis([row(1, "fits", 0.01), row(1, "fits", 10)]);
  assert.ok(log.isLog && log.at(0.01) > 0 && log.at(10) < 1);
  assert.deepEqual(plain(log.ticks), [0.01, 0.1, 1, 10]);
});

test("ticks are round in their unit", () => {
  assert.deepEqual(plain(ticksOf(45 * GIB, 400, 100, GIB).map((tick) => tick / GIB)), [0, 12, 24, 36]);
});

test("names move down until they cover no other one", () => {
  const points = [0, 1, 2].map((n) => ({ key: String(n), x: 300 + n, y: 50 + n, name: "dp 8, tp 8" }));
  const bases = [...placeNames(points, Infinity).values()].map(({ y }) => y).sort((a, b) => a - b);
  assert.ok(bases[1] - bases[0] >= 14 && bases[2] - bases[1] >= 14);
  assert.equal(placeNames(points.slice(0, 1), 350).get("0").side, -1, "a name does not cross the line of the memory");
});
