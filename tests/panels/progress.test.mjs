// The pure functions of the progress panel.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { barParts, cellTime, countWords, formatCount, formatRate, formatTime, isHeldBack, lastKnown, secondsLeft, secondsPassed } = load(
  "progress", "barParts", "cellTime", "countWords", "formatCount", "formatRate", "formatTime", "isHeldBack", "lastKnown", "secondsLeft", "secondsPassed"
);
const job = { total: 20, done: 8, failed: 2, running: 2, cancelled: 0, ended: 10, state: "runs", began: 100, counted: 110, lasted: null, rate: 2 };

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

test("of what ran in the last picture it is not known whether it has ended", () => {
  const last = lastKnown({ ...job, unit: "item" });
  assert.equal(last.how, "not known to have ended");
  assert.deepEqual([secondsLeft(last, 112), secondsPassed(last, 112), last.rate], [null, null, null]);
  assert.equal(countWords(last), "8 of 20 items done, 2 failed, 10 not known to be done");
  assert.deepEqual(plain(barParts({ ...last, total: null })), [], "of unknown length, not full");
  const parts = [[1, "worker1", "error", "KeyError: 'x'"], [2, "worker2", "waits", ""], [3, "worker3", "runs", ""], [4, "worker4", "ok", ""]];
  assert.equal(lastKnown({ state: "runs", parts }).how, "not known to have ended on worker2, worker3, KeyError: 'x' on worker1, ok on worker4");
  const done = { ...job, state: "done" };
  assert.equal(lastKnown(done), done);
});

test("the counts of a job add up to the whole", () => {
  const sum = (one) => [...countWords(one).replace(/ of \d+/, "").matchAll(/\d+/g)].reduce((all, [count]) => all + Number(count), 0);
  for (const state of ["runs", "untold"]) assert.equal(sum({ ...job, unit: "item", state }), 20, state);
  const failed = { ...job, unit: "item", state: "failed", running: 0, cancelled: 3 };
  assert.equal(sum(failed), 20);
  assert.equal(countWords(failed), "8 of 20 items done, 2 failed, 3 cancelled, 7 not begun", "what was cancelled may have done its work");
  assert.equal(countWords({ ...job, unit: "item", total: 1, done: 1, ended: 1, failed: 0, running: 0, state: "done" }), "1 of 1 item done");
});

test("a cell that waits counts its wait, one that runs only its run, and one that never began says so", () => {
  const cell = { state: "waits", began: 100, since: null, lasted: null, ran: null };
  assert.equal(cellTime(cell, 130), "30 s");
  assert.equal(cellTime({ ...cell, state: "runs", since: 125 }, 130), "5 s");
  assert.equal(cellTime({ ...cell, state: "interrupted", lasted: 7.2, ran: 0 }, 130), "never began, waited 7.2 s");
  assert.equal(cellTime({ ...cell, state: "ok", lasted: 7.2, ran: 2.1 }, 130), "2.1 s, waited 5 s");
});

test("a bar never has more than its length", () => {
  assert.deepEqual(plain(barParts(job)), [["done", 0, 0.4], ["failed", 0.4, 0.1], ["running", 0.5, 0.1]]);
  assert.deepEqual(plain(barParts({ ...job, done: 30 })), [["done", 0, 1]], "its loader gave more than it had said");
  assert.deepEqual(plain(barParts({ ...job, total: null })), [], "of unknown length");
  assert.deepEqual(plain(barParts({ ...job, total: null, state: "done", failed: 0, running: 0 })), [["done", 0, 1]]);
});
