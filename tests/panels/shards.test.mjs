// Tests of the sharding panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { Flashes, byRank, coordinates, meshCells, percentOf, pieceWords, sizeText, sumOf } =
  load("shards", "Flashes", "byRank", "coordinates", "meshCells", "percentOf", "pieceWords", "sizeText", "sumOf");

test("a mesh runs across by its last dimension, down by the one before, and in grids by the others", () => {
  assert.deepEqual(plain(coordinates(5, [2, 2, 2])), [1, 0, 1]);
  const at = (mesh) => plain(meshCells(mesh).cells.map(({ rank, grid, row, column }) => [rank, grid, row, column]));
  assert.deepEqual(at({ shape: [3], ranks: [4, 5, 6], workers: [1, 2, 3] }), [[4, 0, 0, 0], [5, 0, 0, 1], [6, 0, 0, 2]]);
  assert.deepEqual(at({ shape: [2, 2], ranks: [0, 1, 2, 3], workers: [] }).at(2), [2, 0, 1, 0]);
  const deep = { shape: [2, 2, 2], ranks: [0, 1, 2, 3, 4, 5, 6, 7], workers: [] };
  assert.deepEqual(at(deep).at(6), [6, 1, 1, 0]);
  assert.deepEqual([meshCells(deep).grids, meshCells(deep).down, meshCells(deep).across], [2, 2, 2]);
});

test("ranks stand in their order, and members without a rank in that of their ids", () => {
  const sorted = [{ rank: 1, worker: 1 }, { rank: 0, worker: 2 }].sort(byRank);
  assert.deepEqual(plain(sorted.map(({ worker }) => worker)), [2, 1]);
  assert.deepEqual(plain([{ rank: null, worker: 3 }, { rank: null, worker: 0 }].sort(byRank).map(({ worker }) => worker)), [0, 3]);
});

test("shapes, sums and shares", () => {
  assert.deepEqual([sizeText([4, 2]), sizeText([]), sizeText([7])], ["[4, 2]", "scalar", "[7]"]);
  assert.equal(sumOf({ parameter: 1, gradient: 2, state: 4 }), 7);
  assert.deepEqual([percentOf(1, 4), percentOf(1, 0)], ["25 %", "–"]);
});

test("a piece flashes when it was gathered since the picture before, and is not whole now", () => {
  const flashes = new Flashes();
  assert.equal(flashes.isNew("a", { times: 3, now: false }), false, "the first picture flashes nothing");
  assert.equal(flashes.isNew("a", { times: 3, now: false }), false);
  assert.equal(flashes.isNew("a", { times: 5, now: false }), true);
  assert.equal(flashes.isNew("a", { times: 6, now: true }), false, "it is lit instead");
});

test("the words of a piece", () => {
  const piece = {
    words: "rows 0 to 3 of 8", size: [4, 2], shape: [8, 2], dtype: "float32", parameter: 32, gradient: 32, state: 0,
    device: "cpu", lit: [0, 0, 1, 1], now: false, times: 2,
  };
  assert.deepEqual(pieceWords(piece, { way: "sharded" }, "worker1").split("\n"), [
    "worker1: rows 0 to 3 of 8, [4, 2] of [8, 2] float32", "a piece", "32 B parameters, 32 B gradients", "gathered 2 times since it is watched",
  ]);
  const meta = { ...piece, words: "no memory yet", parameter: 0, gradient: 0, device: "meta", lit: null };
  assert.deepEqual(pieceWords(meta, { way: "plain" }, "worker1").split("\n").slice(2), ["no memory", "on the device meta"]);
  assert.match(pieceWords({ ...piece, now: true }, { way: "sharded" }, "worker1"), /whole now; gathered 2 times since it is watched$/);
});
