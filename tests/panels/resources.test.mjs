// Tests of the pure functions of the panel of resources, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { chartColumns, marksOf, minutesFor, pathsOf, runsOf, sampleAt, samplesOf, topOf } =
  load("resources", "chartColumns", "marksOf", "minutesFor", "pathsOf", "runsOf", "sampleAt", "samplesOf", "topOf");
const row = (at, cpu, step = 1, more = {}) => ({ at, step, began: [], limits: { cpu: 4 }, of: { cpu }, ...more });
const table = (...rows) => Object.fromEntries(rows.map((one) => [`${one.step}/${one.at}`, one]));
const times = (rows) => plain(rows.map(({ at }) => at));

test("a minute has the samples of seconds, more minutes means and the latest seconds", () => {
  const seconds = Array.from({ length: 60 }, (_, i) => row(1001 + i, { 1: 1 }));
  const means = Array.from({ length: 30 }, (_, i) => row(909 + 5 * i, { 1: 1 }, 5));
  const all = table(...seconds, ...means);
  assert.equal(samplesOf(all, 1).length, 60);
  const five = samplesOf(all, 5);
  assert.ok(five.filter(({ step }) => step === 5).length === 30 && five.at(-1).at === 1060);
  assert.deepEqual(times(five.filter(({ step }) => step === 1)), [1055, 1056, 1057, 1058, 1059, 1060]);
  assert.deepEqual([minutesFor(all), minutesFor(table(...seconds)), minutesFor(table(row(1, {}, 5), row(2000, {})))], [5, 1, 15]);
});

test("a time without samples ends a run, a late sample does not", () => {
  const rows = [1, 2, 4, 5, 30, 31].map((at) => row(at, { 1: 1 }));
  assert.deepEqual(plain(runsOf(rows).map(times)), [[1, 2, 4, 5], [30, 31]]);
  assert.deepEqual(plain(runsOf([5, 10, 20, 60].map((at) => row(at, {}, 5))).map(times)), [[5, 10, 20], [60]]);
});

test("a stack ends at the sum, and the limit is in the chart if it is near", () => {
  assert.deepEqual(plain(topOf([row(1, { 0: 0.5, 1: 1.1 })], "cpu", "share", true)), { top: 4, limit: 4 });
  assert.deepEqual(plain(topOf([row(1, { 0: 0.1, 1: 0.2 })], "cpu", "share", true)), { top: 4, limit: 4 });
  assert.deepEqual(plain(topOf([row(1, { 0: 0.1 }, 1, { limits: { cpu: 64 } })], "cpu", "share", true)), { top: 1, limit: null });
  assert.deepEqual(plain(topOf([row(1, { 0: 0.5, 1: 1.1 })], "cpu", "share", false)), { top: 1.2, limit: null });
});

test("areas end at sums, lines end where a member has no figure", () => {
  const rows = [row(1, { 0: 1, 1: 2 }), row(2, { 0: 1 }), row(3, { 0: 1, 1: 2 }), row(40, { 0: 1, 1: 2 })];
  const [x, y] = [(at) => at, (value) => value];
  const [low, high] = pathsOf(rows, "cpu", ["0", "1"], true, x, y);
  assert.equal(low, "M1 1L2 1L3 1V0H1ZM40 1h1.5V0H40Z");
  assert.equal(high, "M1 3L2 1L3 3V0H1ZM40 3h1.5V0H40Z");
  assert.equal(pathsOf(rows, "cpu", ["1"], false, x, y)[0], "M1 2L3 2M40 2h1.5");
});

test("the nearest sample is read, the last one without a time", () => {
  const rows = [row(1, {}), row(10, {}), row(20, {})];
  assert.deepEqual([sampleAt(rows, 4).at, sampleAt(rows, 6).at, sampleAt(rows, null).at, sampleAt([], 3)], [1, 10, 20, null]);
});

test("restarts and losses have a mark", () => {
  const rows = [row(1, { 1: 1, 2: 1 }), row(2, { 1: 1 }, 1, { began: [1] })];
  assert.deepEqual(plain(marksOf(rows, ["1", "2"], { 1: { state: "up" }, 2: { state: "lost" } })), [
    { at: 2, member: "1", kind: "began" }, { at: 1, member: "2", kind: "lost" },
  ]);
});

test("three charts stand in one row or below one another", () => {
  assert.deepEqual([chartColumns(3, 700), chartColumns(3, 1100), chartColumns(5, 700), chartColumns(5, 1100), chartColumns(3, 320)], [1, 3, 2, 3, 1]);
});
