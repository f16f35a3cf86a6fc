// Tests of the pure functions of the metrics panel, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { crossTexts, gatherCurves, headWords, lastWords, latestCurves, linePath, nearestStop, placeCharts, roundSteps, spreadOf, spreadPaths, stepRange, valueAt, valueRange } = load(
  "metrics", "crossTexts", "gatherCurves", "headWords", "lastWords", "latestCurves", "linePath", "nearestStop", "placeCharts", "roundSteps", "spreadOf", "spreadPaths", "stepRange", "valueAt", "valueRange");
const curve = (values, more = {}) => ({ key: `${values}`, worker: 1, state: "", step: values.length - 1, odd: null, odds: [], steps: values.map((_, i) => i), values, value: values.at(-1), ...more });
const [x, y] = [(step) => 4 * step, (value) => 100 - value];

test("a curve is that of its blocks in order, with its first odd value and how many there are", () => {
  const row = (order, steps, odd = null) => ({ curve: "1/loss", order, steps, values: steps.map((step) => step / 2), odd, odds: odd ? [[odd[0], odd[0], odd[1]]] : [] });
  const points = { "1/0.10": row(10, [4, 5], [6, "nan", 3]), "1/0.9": row(9, [2, 3], [3, "inf", 1]), "1/1.0": { ...row(0, [1]), curve: "1/gone" } };
  const [found] = gatherCurves({ "1/loss": { worker: 1, name: "loss", value: "nan", step: 9 } }, points, { loss: { step: 9 } });
  assert.deepEqual(plain([found.steps, found.values, found.odd]), [[2, 3, 4, 5], [1, 1.5, 2, 2.5], [3, "inf", 4]]);
});

test("ranks that diverge do not decide the range, unless all do", () => {
  const [steady, far] = [curve([1, 3]), curve([1, 900], { state: "far" })];
  assert.deepEqual(plain(valueRange([steady, far], false)), [1, 3]);
  assert.deepEqual(plain(valueRange([far], false)), [1, 900]);
  assert.deepEqual(plain(valueRange([curve([2, 2])], false)), [1, 3]);
  assert.deepEqual(plain(valueRange([curve([0, 0])], false)), [-0.5, 0.5]);
  assert.deepEqual(plain(valueRange([curve([-1, 0, 4, 2])], true)), [2, 4]);
  assert.deepEqual(plain(valueRange([curve([])], true)), [0.1, 1]);
});

test("a line has a gap where a value has no place, and one point is a dot", () => {
  assert.equal(linePath(curve([1, -1, 2, 3]), x, (value) => (value < 0 ? null : 100 - value)), "M0 99M8 98L12 97");
  assert.equal(linePath(curve([1]), x, y), "M0 99h1.5");
  assert.equal(linePath(curve([]), x, y), "");
});

test("the spread is from the lowest to the highest of two ranks or more", () => {
  const spread = spreadOf([curve([1, 2, 3]), curve([3, 4], { worker: 2 }), curve([2, 9], { worker: 3 })], x, y);
  assert.deepEqual(plain(spread), [[2, 99, 98, 97], [6, 98, 96, 91]], "the last step has one rank alone");
  assert.deepEqual(plain(spreadPaths(spread)), ["M2 97.0L6 91.0L6 98.0L2 99.0Z".replaceAll(".0", ""), "M2 98L6 96"]);
  assert.deepEqual(plain(spreadPaths(spreadOf([curve([1, 2])], x, y))), ["", ""]);
  assert.deepEqual(plain(spreadOf([curve([1, 2]), curve([3, 4])], x, y)), [], "two processes of one rank are no spread");
});

test("the value at a step is that of the last point there or before, without a step the last", () => {
  const one = curve([5, 6, 7], { steps: [0, 10, 20], value: "nan" });
  assert.deepEqual([valueAt(one, 0), valueAt(one, 19), valueAt(one, 99), valueAt(one, -1), valueAt(one, null)], [5, 6, 7, null, "nan"]);
  const behind = { ...one, step: 20, isBehind: true };
  assert.deepEqual([valueAt(behind, 20), valueAt(behind, 21), valueAt(behind, null)], [7, null, "nan"], "others have gone on");
  const odd = { ...one, odds: [[12, 14, "nan"], [30, 31, "inf"]] };
  assert.deepEqual([10, 12, 14, 15, 20, 30, 99].map((step) => valueAt(odd, step)), [6, "nan", "nan", 6, 7, "inf", "inf"]);
  assert.equal(valueAt(curve([], { odds: [[3, 3, "nan"]] }), 5), "nan");
  assert.deepEqual([lastWords([one]), lastWords([curve([0.5]), curve([0.25])]), lastWords([curve([2]), curve([2])])], ["nan", "0.250 to 0.500", "2.00"]);
});

test("the axis has all steps, and round ones between", () => {
  assert.deepEqual(plain(stepRange([curve([1, 2]), curve([], { odd: [7, "nan", 1], step: 9 })])), [0, 9]);
  assert.deepEqual(plain(roundSteps([0, 599], 3)), [0, 200, 400]);
  assert.deepEqual(plain(roundSteps([95, 120], 2)), [105, 120]);
  assert.deepEqual(plain([roundSteps([5, 5], 3), roundSteps([0, 9], 0)]), [[], []]);
});

test("charts have places without a hole, and the cursor the nearest position", () => {
  const { places, height } = placeCharts(5, 700);
  assert.deepEqual([places.length, places[1].x, places[2].y, height], [5, 350, 140, 420]);
  assert.deepEqual([nearestStop([0, 10, 20], 14), nearestStop([0, 10, 20], 16), nearestStop([], 3)], [10, 20, null]);
});

test("crosses at one place have one text, and none where there is no room", () => {
  const at = (worker, step) => curve([1], { worker, odd: [step, "nan", 1] });
  const texts = crossTexts([at(1, 40), at(2, 10), at(3, 10), at(4, 13), curve([1])], (step) => 10 * step, ({ worker }) => `worker${worker}`);
  assert.deepEqual(plain(texts.map((one) => [one.x, one.of.length, one.text])), [[100, 2, "2 ranks"], [130, 1, ""], [400, 1, "worker1"]]);
});

test("the head says whose the values are not", () => {
  const name = ({ worker }) => `worker${worker}`;
  const [steady, far] = [[curve([2]), curve([3])], [curve([9], { worker: 3, state: "far" })]];
  assert.equal(headWords([...steady, ...far], name, 40), "2.00 to 3.00 without worker3");
  assert.equal(headWords([...steady, ...far], name, 20), "2.00 to 3.00 (2 of 3)");
  assert.deepEqual([headWords(steady, name, 9), headWords(far, name, 9)], ["2.00 to 3.00", "9.00"]);
});

test("the latest values are not those of former processes, unless there are no others", () => {
  const [former, next] = [curve([1, 9], { ended: "restarted" }), curve([2], { ended: "" })];
  assert.deepEqual(plain(latestCurves([former, next])), plain([next]));
  assert.deepEqual(plain(latestCurves([former])), plain([former]));
  assert.equal(headWords([former, next], () => "", 40), "2.00");
});

test("a row of the table and a curve are of one process", () => {
  const row = (worker, incarnation, step, ended) => ({ worker, incarnation, name: "a/b", step, ended });
  const rows = { "2.1/a/b": row(2, 1, 3, ""), "1/a/b": row(1, 0, 9, ""), "2/a/b": row(2, 0, 20, "restarted") };
  const found = gatherCurves(rows, {}, { "a/b": { step: 9 } });
  assert.deepEqual(plain(found.map(({ process, isBehind }) => [process, isBehind])), [["1", false], ["2", true], ["2.1", true]]);
});
