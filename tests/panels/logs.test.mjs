// What the logs panel works out, without a browser.
import { deepEqual, equal } from "node:assert/strict";
import { test } from "node:test";
import { load, plain } from "./load.mjs";

const { countWorkers, splitLine, lastBlocks, shownLines, sumLevels, remarksOf } = load(
  "logs", "countWorkers", "splitLine", "lastBlocks", "shownLines", "sumLevels", "remarksOf",
);

const block = (lines, levels, more = {}) => ({ worker: 1, kind: "", first: 0, order: 1, at: null, lines, levels, ...more });

test("a line is split at its matches, whatever their case", () => {
  deepEqual(plain(splitLine("Loss: loss", "loss")), [["Loss", true], [": ", false], ["loss", true]]);
  deepEqual(plain(splitLine("aaa", "aa")), [["aa", true], ["a", false]]);
  deepEqual(plain(splitLine("a.c abc", "a.c")), [["a.c", true], [" abc", false]]);
  deepEqual(plain(splitLine("nothing", "x")), [["nothing", false]]);
  deepEqual(plain(splitLine("nothing", "")), [["nothing", false]]);
  deepEqual(plain(splitLine("İx", "x")), [["İx", true]]);
});

test("levels choose lines, and the panel's own lines always stay", () => {
  const one = block(["a", "b", "c"], " we", { first: 7 });
  deepEqual(plain(shownLines(one, "we")), [[8, "b", "w"], [9, "c", "e"]]);
  deepEqual(plain(shownLines(block(["worker1 was restarted"], " ", { kind: "event" }), "e")), [[0, "worker1 was restarted", " "]]);
  deepEqual(plain(sumLevels([one, one, block(["lost"], "e", { kind: "event" })])), { " ": 2, w: 2, v: 0, e: 2, f: 0 });
});

test("the last blocks have at least as many lines as are wanted, if there are", () => {
  const all = ["a", "b", "c"].map((key) => [key, block(["x", "y"], "  ")]);
  deepEqual(plain(lastBlocks(all, 3).map(([key]) => key)), ["b", "c"]);
  equal(lastBlocks(all, 100).length, 3);
  deepEqual(plain(lastBlocks([], 5)), []);
});

test("a sentence says where earlier lines are", () => {
  const file = (name, skipped) => ({ name, path: `/${name}.log`, missing: "", skipped });
  deepEqual(plain(remarksOf({ 1: file("a", 0), 2: file("b", 9) }).map(({ words }) => words)), [
    "Earlier lines of b are not shown. Its log has them: /b.log",
  ]);
  equal(remarksOf(Object.fromEntries(["a", "b", "c"].map((name) => [name, file(name, 1)]))).length, 1);
});

test("workers that were stopped are counted apart, while others go on", () => {
  const view = (...states) => ({
    files: Object.fromEntries(states.map((_, i) => [i + 1, {}])),
    workers: Object.fromEntries(states.map((state, i) => [i + 1, { state }])),
  });
  deepEqual(plain(countWorkers(view("up", "left", "lost"))), [2, 1]);
  deepEqual(plain(countWorkers(view("left", "left"))), [2, 0]);
});
