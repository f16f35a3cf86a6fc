// What the drawing code works out before it draws, without a browser: run by node's test runner, `node --test`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import vm from "node:vm";

// Names of a panel's module, loaded as a browser loads it: behind the common part.
function load(panel, ...names) {
  const read = (stem) => readFileSync(new URL(`../../rpcbench/panels/${stem}.js`, import.meta.url), "utf8");
  const text = `${read("common")}\n${read(panel)}`.replace("export default ", "const made = ");
  return vm.runInNewContext(`${text}\n;({ ${names.join()} })`);
}

const plain = (value) => JSON.parse(JSON.stringify(value));
const { duration, roundUp, bytes, Seen, waitsFor } =
  load("pipeline", "duration", "roundUp", "bytes", "Seen", "waitsFor");
const { settled, fuller, leafWords } = load("autograd", "settled", "fuller", "leafWords");
const { Slots, patched } = load("pipeline", "Slots", "patched");

test("times and sizes are said in the unit that fits", () => {
  assert.deepEqual([2, 0.0305, 41e-6].map((time) => duration(time)), ["2 s", "30.5 ms", "41 µs"]);
  assert.equal(duration(0.5, 2), "0.5 s", "all ticks of an axis have one unit");
  assert.deepEqual([0, 999, 1000, 2_400_000, 5e15].map(bytes), ["0 B", "999 B", "1.0 kB", "2.4 MB", "5000 TB"]);
});

test("the scale of an axis covers its span, and is round", () => {
  for (const span of [1e-6, 0.0101, 0.0149, 0.097, 1, 7.3]) {
    const scale = roundUp(span);
    assert.ok(scale >= span * 0.999 && scale <= span * 1.35, `${scale} for ${span}`);
  }
  assert.equal(roundUp(0.0101), 0.012);
});

const step = (number, begin, state) => ({
  steps: { [number]: { step: number, begin, state } },
  lanes: { [`${number}/1`]: { step: number, worker: 1 } },
  ops: { [`s${number}.w1.0`]: { step: number, worker: 1 } },
});
const numbers = (steps) => plain(steps.map(({ step: number }) => number));

test("complete steps stay, by when they began; one whose end was not seen goes", () => {
  const seen = new Seen();
  seen.add(step(8, 1, "complete"));
  seen.add(step(9, 2, "running"));
  assert.deepEqual(numbers(seen.add(step(1, 3, "complete"))), [8, 1]);
  assert.deepEqual(numbers(seen.add(step(2, 4, "failed"))), [8, 1, 2]);
  assert.deepEqual(numbers(seen.add({ steps: {}, lanes: {}, ops: {} })), []);
});

test("what is remembered of steps is bounded", () => {
  const seen = new Seen();
  let steps = [];
  for (let number = 0; number < 100; number++) steps = seen.add(step(number, number, "complete"));
  assert.deepEqual([steps.length, steps[0].step, steps.at(-1).step, seen.steps.size], [64, 36, 99, 64]);
});

test("an operation that is waited for has its stage where the worker has several", () => {
  assert.equal(waitsFor({ now: { next: "12B3" }, stages: [12] }), ", waits for B3");
  assert.equal(waitsFor({ now: { next: "2B3" }, stages: [0, 2] }), ", waits for 2B3");
  assert.equal(waitsFor({ now: { next: "" }, stages: [0] }), "");
  assert.equal(waitsFor({ now: null, stages: [] }), "");
});

test("contexts that their maker holds come first; alone, what lingers is shown", () => {
  const big = String((1n << 48n) + 7n);
  const contexts = { 9: {}, 10: {}, [big]: {} };
  assert.deepEqual(plain(settled({ contexts, members: { "10/0": {}, "9/1": {}, [`${big}/1`]: {} } })), ["10", big]);
  assert.deepEqual(plain(settled({ contexts, members: { "9/1": {} } })), ["9", "10", big]);
});

test("the picture that is kept of a context is the one with most workers, while these are there", () => {
  const cols = { x: (id) => (id < 3 ? 100 * (id + 1) : undefined) };
  const picture = (key, ...workers) => ({ key, pieces: { members: workers.map((worker) => ({ worker })), links: [] } });
  const [whole, part] = [picture("5", 0, 1, 2), picture("5", 0)];
  assert.equal(fuller(whole, part, cols), whole);
  assert.equal(fuller(part, whole, cols), whole);
  assert.equal(fuller(picture("4", 0, 1, 2), part, cols), part);
  assert.equal(fuller(picture("5", 0, 1, 7), part, cols), part, "worker 7 has no column any more");
});

test("a leaf without a name is its shape", () => {
  assert.deepEqual([{ name: "w", shape: "[3]" }, { name: "", shape: "[3]" }].map(leafWords), ["w [3]", "[3]"]);
});

test("a delta sets and drops rows, and leaves the others what they are", () => {
  const view = { a: { x: { n: 1 }, y: { n: 2 } }, b: {} };
  const next = patched(view, { a: { set: { z: { n: 3 } }, drop: ["x"] }, b: null });
  assert.deepEqual(plain(next), { a: { y: { n: 2 }, z: { n: 3 } } });
  assert.equal(next.a.y, view.a.y);
  assert.deepEqual(Object.keys(view.a), ["x", "y"]);
});

test("a key keeps its place, and a new one takes the first that is free", () => {
  const slots = new Slots();
  assert.deepEqual(plain(slots.place(["a", "b", "c"], 3)), [["a", 0], ["b", 1], ["c", 2]]);
  assert.deepEqual(plain(slots.place(["c", "d"], 3)), [["d", 0], ["c", 2]]);
  assert.deepEqual(plain(slots.place(["c", "d", "e", "f"], 3)), [["d", 0], ["e", 1], ["c", 2]]);
});
