// Tests of the pure functions of the panel of traffic, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { busiest, figureOf, gridOf, levelOf, membersOf, pairPhrases, sumsOf } =
  load("traffic", "busiest", "figureOf", "gridOf", "levelOf", "membersOf", "pairPhrases", "sumsOf");
const flows = {
  0: { from: 0, host: "h", silent: false, to: { 1: [10, 20, 30, 0] } },
  1: { from: 1, host: "h", silent: true, to: { 0: [0, 0, 400, 100], 2: [5, 6, 7, 0] } },
};
const names = (id) => `w${id}`;

test("a pair has nothing, something, or is not known", () => {
  assert.deepEqual([figureOf(flows, "0", "1", 1), figureOf(flows, "0", "2", 1), figureOf(flows, "2", "0", 1)], [20, 0, null]);
});

test("sums are those of rows and columns", () => {
  const { sent, received, all, top } = sumsOf(["0", "1", "2"], flows, 2);
  assert.deepEqual([...sent.values()], [30, 407, 0]);
  assert.deepEqual([...received.values()], [400, 30, 7]);
  assert.deepEqual([all, top], [437, 400]);
  assert.deepEqual(plain(busiest(["0", "1", "2"], flows, 2)[0]), { from: "1", to: "0", value: 400 });
});

test("a level is a power of ten below the largest figure", () => {
  assert.deepEqual([levelOf(0, 1000), levelOf(1000, 1000), levelOf(100, 1000), levelOf(1, 10 ** 9)], [0, 12, 8, 1]);
});

test("members that have left stand only with what they have sent", () => {
  const workers = { 0: { state: "up" }, 1: { state: "left" }, 2: { state: "lost" }, 3: { state: "left" } };
  assert.deepEqual(plain(membersOf(workers, flows)), ["0", "1", "2"]);
});

test("squares have numbers where there is room, and any number of members fits", () => {
  const grid = (count, width) => gridOf(Array.from({ length: count }, (_, i) => String(i)), names, width);
  assert.ok(grid(3, 700).hasNumbers && !grid(16, 700).hasNumbers);
  for (const count of [1, 2, 16, 64]) assert.ok(grid(count, 1100).width === 1100);
  const many = grid(64, 400);
  assert.ok(many.wide === 11 && many.width > 800 && plain(many.every)[0] === 2);
});

test("a pair is told in words", () => {
  assert.match(pairPhrases(flows, "0", "1", names).join(), /^w0 → w1: 10 B\/s in the last second, 20 B\/s in the last 10 s, 30 B since .*one host$/);
  assert.match(pairPhrases({ 0: { ...flows[0], seconds: 3 } }, "0", "1", names).join(), /20 B\/s in the last 3 s/);
  assert.match(pairPhrases(flows, "1", "0", names).join(), /100 B of it \(25 %\) through shared memory.*w1 has not answered/);
  assert.match(pairPhrases({ ...flows, 0: { ...flows[0], host: "k" } }, "1", "0", names).join(), /between two hosts/);
  assert.match(pairPhrases(flows, "2", "0", names).join(), /w2 has not reported yet/);
  assert.match(pairPhrases(flows, "0", "2", names).join(), /w0 has sent w2 nothing/);
});
