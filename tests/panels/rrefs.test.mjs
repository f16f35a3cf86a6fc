// Tests of the RRefs panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { grouping, linesOf, sumUp, birthsOf, older, coloursIn } =
  load("rrefs", "grouping", "linesOf", "sumUp", "birthsOf", "older", "coloursIn");

const rref = (key, type, more = {}) => [
  key, { rref: key, type, state: "ready", owner: 1, size: null, made: 1, number: null, cell: "", by: 0, ...more },
];
const rrefs = Object.fromEntries([
  rref("0.1", "Stage", { size: 10, number: 3, cell: "c" }),
  rref("0.2", "SGD", { number: 3, cell: "c" }),
  rref("0.3", "Stage", { size: 5, owner: 2, state: "failed", number: 4, cell: "d" }),
  rref("0.4", "Tensor (N=2)", {}),
  rref("0.5", "Tensor", {}),
]);
const keys = Object.keys(rrefs);
const shown = (lines) => plain(lines.map((line) => line.rref ?? `${line.members.length} ${line.name}`));
const members = (count) => Object.fromEntries(Array.from({ length: count + 1 }, (_, id) => [id, {}]));

test("rows are grouped above 8 workers or 50 RRefs, unless the user decides", () => {
  assert.deepEqual([[8, 50], [9, 1], [2, 51]].map(([workers, count]) => grouping("", members(workers), count)), [null, "type", "type"]);
  assert.deepEqual(["cell", "off"].map((choice) => grouping(choice, members(9), 100)), ["cell", null]);
});

test("a group has a row where its first RRef would be, and one RRef alone is no group", () => {
  assert.deepEqual(shown(linesOf(keys, rrefs, null, new Set())), keys);
  assert.deepEqual(shown(linesOf(keys, rrefs, "type", new Set())), ["2 Stage", "0.2", "2 Tensor"]);
  assert.deepEqual(shown(linesOf(keys, rrefs, "cell", new Set())), ["2 in cell [3]", "0.3", "2 made outside cells"]);
});

test("a group that is open has its RRefs below it", () => {
  const lines = linesOf(keys, rrefs, "type", new Set(["type Stage"]));
  assert.deepEqual(shown(lines), ["2 Stage", "0.1", "0.3", "0.2", "2 Tensor"]);
  assert.deepEqual(plain(lines.map((line) => line.isInside ?? null)), [null, true, true, false, null]);
});

test("a group counts what each member owns and uses, its states and bytes", () => {
  const byRref = new Map(keys.map((key) => [key, [{ holder: 0 }]]));
  const { owned, used, states, size, types } = sumUp(["0.1", "0.3"], rrefs, byRref);
  assert.deepEqual(plain([[...owned], [...used], [...states], size, [...types]]),
    [[[1, 1], [2, 1]], [[0, 2]], [["ready", 1], ["failed", 1]], 15, ["Stage"]]);
});

const inOrder = (list) => plain([...list].sort(older(birthsOf(list))).map((one) => one.rref));
const ages = (all) => Object.entries(all).map(([rref, made]) => ({ rref, made }));

test("RRefs of one member stand in the order of the numbers in their ids, also if a value came late or is not known", () => {
  assert.deepEqual(inOrder(ages({ "0.18": 5, "0.9": 4, "0.10": 7, "0.100": 9 })), ["0.9", "0.10", "0.18", "0.100"]);
  assert.deepEqual(inOrder(ages({ "0.18": 5, "0.9": null, "0.10": null })), ["0.9", "0.10", "0.18"]);
});

test("RRefs of several members stand in the order of their creation, those of unknown age last", () => {
  assert.deepEqual(inOrder(ages({ "2.1": 6, "0.10": 5, "1.7": 5.5, "0.9": 5 })), ["0.9", "0.10", "1.7", "2.1"]);
  assert.deepEqual(inOrder(ages({ "0.10": null, "0.9": 5, "1.11": 5.1, "0.2": 4 })), ["0.2", "0.9", "1.11", "0.10"]);
});

test("the legend names types that share a colour together", () => {
  const rows = ["Linear", "D", "C", "B", "A", ""].map((type) => ({ type, colour: type === "Linear" ? "teal" : "blue" }));
  assert.deepEqual(plain(coloursIn(rows)), [["blue", "A, B, C, …"], ["teal", "Linear"]]);
});
