// The pure functions of the progress panel.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { barParts, formatCount, formatRate, formatTime, isHeldBack, secondsLeft, secondsPassed } =
  load("progress", "barParts", "formatCount", "formatRate", "formatTime", "isHeldBack", "secondsLeft", "secondsPassed");
const job = { total: 20, done: 8, failed: 2, running: 2, ended: 10, state: "runs", began: 100, counted: 110, lasted: null, rate: 2 };

test("times are short, and exact once they are over", () => {
  assert.deepEqual([0.0123, 7.26, 59.9].map((one) => formatTime(one, true)), ["12 ms", "7.3 s", "59 s"]);
  assert.deepEqual([0.5, 59.9, 65, 7380].map((one) => formatTime(one)), ["0 s", "59 s", "1:05 min", "2:03 h"]);
});

test("counts have commas, rates three digits", () => {
  assert.deepEqual([0, 999, 1234567].map(formatCount), ["0", "999", "1,234,567"]);
  assert.deepEqual([0.01234, 1, 12.345, 15234.2].map(formatRate), ["0.0123", "1", "12.3", "15,234"]);
});

test("the time left runs down from the last count, and ends at zero", () => {
  assert.equal(secondsLeft(job, 110), 5);
  assert.equal(secondsLeft(job, 112), 3);
  assert.equal(secondsLeft(job, 999), 0);
  for (const unknown of [{ total: null }, { rate: null }, { state: "done" }, { counted: null }]) assert.equal(secondsLeft({ ...job, ...unknown }, 110), null);
});

test("a map of which nothing runs waits for its results to be taken, and has no time left", () => {
  const held = { ...job, kind: "map", running: 0 };
  assert.ok(isHeldBack(held, 112) && secondsLeft(held, 112) === null);
  for (const busy of [{ running: 1 }, { ended: 0 }, { state: "done" }, { kind: "fit" }]) assert.ok(!isHeldBack({ ...held, ...busy }, 112));
  assert.ok(!isHeldBack(held, 110.5) && !isHeldBack(held, null), "between two items");
});

test("time passes until the end, or to the last count where there is no present", () => {
  assert.equal(secondsPassed(job, 130), 30);
  assert.equal(secondsPassed(job, null), 10);
  assert.equal(secondsPassed({ ...job, lasted: 1.5 }, 130), 1.5);
  assert.equal(secondsPassed({ ...job, began: null }, 130), null);
});

test("a bar never has more than its length", () => {
  assert.deepEqual(plain(barParts(job)), [["done", 0, 0.4], ["failed", 0.4, 0.1], ["running", 0.5, 0.1]]);
  assert.deepEqual(plain(barParts({ ...job, done: 30 })), [["done", 0, 1]], "its loader gave more than it had said");
  assert.deepEqual(plain(barParts({ ...job, total: null })), [], "of unknown length");
  assert.deepEqual(plain(barParts({ ...job, total: null, state: "done", failed: 0, running: 0 })), [["done", 0, 1]]);
});
