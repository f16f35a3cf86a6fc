// Tests of the comparison panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { miniSize, partsOf, shortNumber, squaresOf, timesOf, visibleRows, wrongRanks } =
  load("compare", "miniSize", "partsOf", "shortNumber", "squaresOf", "timesOf", "visibleRows", "wrongRanks");

test("numbers are short", () => {
  assert.deepEqual([0, 2.04, 0.00123, 3.14e-7, 120_000, null].map(shortNumber), ["0", "2", "0.0012", "3.1e-7", "1.2e+5", "infinite"]);
});

test("an error is so many times what is allowed, on these ranks", () => {
  assert.deepEqual([[3, 1], [2.34, 1e-3], [0.92, 2e-5], [1, 1e-12]].map(([one, other]) => timesOf(one, other)), ["3", "2,300", "46,000", "1.0e+12"]);
  const on = (...errors) => wrongRanks({ errors: errors.map((error, rank) => [rank, error]), allowed: 0.1, ranks: errors.map((_, rank) => rank) });
  assert.deepEqual([on(0, 1), on(1, null, 0), on(1, 1), on(0, 0)], [" on rank 1", " on ranks 0, 1", " on all 2 ranks", ""]);
});

test("a layout is drawn where there are few ranks", () => {
  const of = (...sizes) => miniSize({ sizes, boxes: Array(sizes.reduce((all, size) => all * size, 1)).fill([]) });
  assert.deepEqual([of(4).width, of(2, 2).width, of(2, 2).height, of(2, 2, 2).width], [72, 36, 22, 78]);
  assert.equal(of(32), null);
  assert.equal(of(8, 2), null, "too high");
});

test("up to three values of a module are squares of their own, and more are the worst of them", () => {
  const rows = (...words) => words.map((word, n) => ({ key: String(n), name: "up", word }));
  assert.equal(squaresOf(rows("right", "wrong", "right")).length, 3);
  assert.deepEqual(plain(squaresOf(rows("right", "not there", "right", "cannot tell")).map(({ key, word }) => [key, word])), [["0", "right"]]);
  assert.deepEqual(plain(squaresOf([...rows("right"), { key: "9", name: "up.bias", word: "wrong" }]).map(({ key }) => key)), ["9"]);
  assert.deepEqual(plain(squaresOf([])), []);
});

test("the ranks of a value: maps, errors, and those that lack it", () => {
  const row = { maps: [[[0, 2], [4, 4], [[1]]]], errors: [[0, 1.5], [1, 0], [2, 1.5]], missing: [3] };
  assert.deepEqual(plain(partsOf(row).map(({ ranks, error }) => [ranks, error])), [[[0, 2], 1.5], [[1], 0], [[3], null]]);
});

test("a folded module stands for all values that it holds", () => {
  const names = ["", "a", "a.b", "a.b.c", "d"];
  const modules = Object.fromEntries(names.map((name, order) => [name, { name, order, parent: name ? name.split(".").slice(0, -1).join(".") : null }]));
  const values = names.map((name) => ({ name }));
  const shown = (folded) => plain(visibleRows(modules, values, ({ name }) => name === folded).map(({ row, values: own }) => [row.name, own.length]));
  assert.deepEqual(shown("a"), [["", 1], ["a", 3], ["d", 1]]);
  assert.deepEqual(shown("a.b"), [["", 1], ["a", 1], ["a.b", 2], ["d", 1]]);
  assert.deepEqual(shown("none").length, 5);
});
