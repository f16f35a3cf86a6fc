// Tests of the RRefs panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { grouping, linesOf, sumUp, older, TypeColours, COLOURS } =
  load("rrefs", "grouping", "linesOf", "sumUp", "older", "TypeColours", "COLOURS");

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

test("RRefs stand in the order of their creation, those of unknown age last", () => {
  const list = [{ rref: "0.10", made: null }, { rref: "0.9", made: 5 }, { rref: "0.11", made: 5 }, { rref: "0.2", made: 4 }];
  assert.deepEqual(plain(list.sort(older).map((one) => one.rref)), ["0.2", "0.9", "0.11", "0.10"]);
});

test("a type keeps its colour, whatever comes later", () => {
  const colours = new TypeColours();
  const of = (type) => colours.of({ type });
  assert.equal(of("A (N=2)"), of("A"), "a class has one colour, whatever the names of its dimensions");
  assert.equal(new TypeColours().of({ type: "A" }), of("A"), "the first choice depends on the name alone");
  const all = [..."ABCDEFG"].map(of);
  assert.equal(new Set(all.slice(0, COLOURS)).size, COLOURS, "no two types share a colour while one is free");
  assert.equal(new Set(all).size, COLOURS);
});
