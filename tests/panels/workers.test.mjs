// Tests of the workers panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { History, curvePath, partTexts, activity, WIDE, MINUTE } =
  load("workers", "History", "curvePath", "partTexts", "activity", "WIDE", "MINUTE");

const row = (more = {}) => ({ now: "text", state: "up", doing: "idle", under_way: 0, incarnation: 0, pid: 7, cpu: 0.5, memory: 100, ...more });

test("the memory of a process has the unit of the machine's once, where it is the same", () => {
  assert.deepEqual(plain(partTexts(1.2e9, 24e9)), ["1.2", "of 24 GB"]);
  assert.deepEqual(plain(partTexts(132e6, 25.2e9)), ["132 MB", "of 25 GB"]);
  assert.deepEqual([null, 5e6].map((memory) => plain(partTexts(memory, null))), [["–", ""], ["5.0 MB", ""]]);
});

test("figures of the last minute are kept, and one before it, so that the curve begins at its edge", () => {
  const history = new History();
  for (let second = 0; second <= 90; second++) history.add({ 1: row({ cpu: second / 100 }) }, 1000 * second);
  const samples = history.of("1", "cpu");
  assert.deepEqual(plain(samples[0]), [30_000, 0.3]);
  assert.equal(samples.length, 61);
  assert.deepEqual([history.top("cpu"), new History().top("cpu")], [1, 0], "rounded up from 0.9");
});

test("figures of a GPU are kept too, and are unknown in rows of earlier versions", () => {
  const history = new History();
  history.add({ 1: row(), 2: row({ gpu: "0 H100", gpu_memory: 7e9, gpu_use: 0.25 }) }, 1000);
  const of = (id) => ["gpu_memory", "gpu_use"].map((name) => plain(history.of(id, name)));
  assert.deepEqual([of("1"), of("2")], [[[], []], [[[1000, 7e9]], [[1000, 0.25]]]]);
});

test("a row that has not changed is no new figure", () => {
  const history = new History();
  const same = row();
  for (let second = 0; second < 5; second++) history.add({ 1: same }, 1000 * second);
  assert.equal(history.of("1", "cpu").length, 1);
});

test("a process that is started again, and one that has gone, begin anew", () => {
  const history = new History();
  history.add({ 1: row(), 2: row({ id: 2 }) }, 0);
  history.add({ 1: row({ incarnation: 1, memory: 5 }) }, 1000);
  assert.deepEqual(plain([history.of("1", "memory"), history.of("2", "memory")]), [[[1000, 5]], []]);
  history.add({ 1: row({ cpu: null, memory: null }) }, 2000);
  assert.equal(history.of("1", "memory").length, 1, "one that does not report now keeps its curve");
});

test("a curve holds each value until the next one, and the last until now", () => {
  assert.equal(curvePath([], 0, 1), "");
  const path = curvePath([[0, 0], [MINUTE / 2, 1]], MINUTE, 1);
  assert.equal(path, `M0.0 19.0H${(WIDE / 2).toFixed(1)}V1.0H${WIDE}`);
});

test("the activity of a worker has the colour of its state", () => {
  const kinds = [{}, { under_way: 1 }, { doing: "cell" }, { doing: "silent" }, { state: "stopped" }, { state: "left" }, { state: "lost" }];
  assert.deepEqual(kinds.map((more) => activity(row(more))[1]), ["rb-idle", "", "", "rb-wait", "rb-wait", "", "rb-bad"]);
  assert.deepEqual([activity(row())[0], activity(row(), { action: "restart" })[0]], ["text", "starts again …"]);
});
