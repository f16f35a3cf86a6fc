// Tests of the panels' pure functions, without a browser. Node's test runner runs them: `node --test`.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { Slots, applyDelta, formatBytes } = load("rrefs", "Slots", "applyDelta", "formatBytes");

test("sizes have the unit that fits", () => {
  assert.deepEqual([0, 999, 1000, 2_400_000, 5e15].map(formatBytes), ["0 B", "999 B", "1.0 kB", "2.4 MB", "5000 TB"]);
});

test("a delta sets and drops rows, and the other rows stay the same objects", () => {
  const view = { a: { x: { n: 1 }, y: { n: 2 } }, b: {} };
  const next = applyDelta(view, { a: { set: { z: { n: 3 } }, drop: ["x"] }, b: null });
  assert.deepEqual(plain(next), { a: { y: { n: 2 }, z: { n: 3 } } });
  assert.equal(next.a.y, view.a.y);
  assert.deepEqual(Object.keys(view.a), ["x", "y"]);
});

test("a key keeps its slot, and a new key takes the first free slot", () => {
  const slots = new Slots();
  assert.deepEqual(plain(slots.place(["a", "b", "c"], 3)), [["a", 0], ["b", 1], ["c", 2]]);
  assert.deepEqual(plain(slots.place(["c", "d"], 3)), [["d", 0], ["c", 2]]);
  assert.deepEqual(plain(slots.place(["c", "d", "e", "f"], 3)), [["d", 0], ["e", 1], ["c", 2]]);
});
