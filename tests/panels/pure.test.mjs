// Tests of the panels' pure functions, without a browser. Node's test runner runs them: `node --test`.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import vm from "node:vm";

const PARTS = { messages: ["meetings"] };

// Returns names of a panel's module, loaded as a browser loads it: behind the common part.
function load(panel, ...names) {
  const read = (stem) => readFileSync(new URL(`../../rpcbench/panels/${stem}.js`, import.meta.url), "utf8");
  const parts = ["common", ...(PARTS[panel] ?? []), panel];
  const text = parts.map(read).join("\n").replace("export default ", "const made = ");
  return vm.runInNewContext(`${text}\n;({ ${names.join()} })`);
}

const plain = (value) => JSON.parse(JSON.stringify(value));
const { formatDuration, roundUp, formatBytes, StepHistory, waitsFor } =
  load("pipeline", "formatDuration", "roundUp", "formatBytes", "StepHistory", "waitsFor");
const { shownContexts, moreComplete, leafText } = load("autograd", "shownContexts", "moreComplete", "leafText");
const { messageFilter, layOut, sentence, formatSeconds, filterTerms, totals, collectiveRows } =
  load("messages", "messageFilter", "layOut", "sentence", "formatSeconds", "filterTerms", "totals", "collectiveRows");
const { Slots, applyDelta } = load("pipeline", "Slots", "applyDelta");

test("times and sizes have the unit that fits", () => {
  assert.deepEqual([2, 0.0305, 41e-6].map((time) => formatDuration(time)), ["2 s", "30.5 ms", "41 µs"]);
  assert.equal(formatDuration(0.5, 2), "0.5 s", "all ticks of an axis have one unit");
  assert.deepEqual([0, 999, 1000, 2_400_000, 5e15].map(formatBytes), ["0 B", "999 B", "1.0 kB", "2.4 MB", "5000 TB"]);
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

test("complete steps stay, ordered by begin; a step without an end is dropped", () => {
  const seen = new StepHistory();
  seen.add(step(8, 1, "complete"));
  seen.add(step(9, 2, "running"));
  assert.deepEqual(numbers(seen.add(step(1, 3, "complete"))), [8, 1]);
  assert.deepEqual(numbers(seen.add(step(2, 4, "failed"))), [8, 1, 2]);
  assert.deepEqual(numbers(seen.add({ steps: {}, lanes: {}, ops: {} })), []);
});

test("the number of remembered steps is bounded", () => {
  const seen = new StepHistory();
  let steps = [];
  for (let number = 0; number < 100; number++) steps = seen.add(step(number, number, "complete"));
  assert.deepEqual([steps.length, steps[0].step, steps.at(-1).step, seen.steps.size], [64, 36, 99, 64]);
});

test("the next operation is shown with its stage if the worker has several", () => {
  assert.equal(waitsFor({ now: { next: "12B3" }, stages: [12] }), ", waits for B3");
  assert.equal(waitsFor({ now: { next: "2B3" }, stages: [0, 2] }), ", waits for 2B3");
  assert.equal(waitsFor({ now: { next: "" }, stages: [0] }), "");
  assert.equal(waitsFor({ now: null, stages: [] }), "");
});

test("contexts that their creator holds are shown; without any, all are", () => {
  const big = String((1n << 48n) + 7n);
  const contexts = { 9: {}, 10: {}, [big]: {} };
  assert.deepEqual(plain(shownContexts({ contexts, members: { "10/0": {}, "9/1": {}, [`${big}/1`]: {} } })), ["10", big]);
  assert.deepEqual(plain(shownContexts({ contexts, members: { "9/1": {} } })), ["9", "10", big]);
});

test("the picture with most workers is kept of a context, while these workers have columns", () => {
  const cols = { x: (id) => (id < 3 ? 100 * (id + 1) : undefined) };
  const picture = (key, ...workers) => ({ key, pieces: { members: workers.map((worker) => ({ worker })), links: [] } });
  const [whole, part] = [picture("5", 0, 1, 2), picture("5", 0)];
  assert.equal(moreComplete(whole, part, cols), whole);
  assert.equal(moreComplete(part, whole, cols), whole);
  assert.equal(moreComplete(picture("4", 0, 1, 2), part, cols), part);
  assert.equal(moreComplete(picture("5", 0, 1, 7), part, cols), part, "worker 7 has no column any more");
});

test("a leaf without a name is shown as its shape", () => {
  assert.deepEqual([{ name: "w", shape: "[3]" }, { name: "", shape: "[3]" }].map(leafText), ["w [3]", "[3]"]);
});

test("a delta sets and drops rows, and the other rows stay the same objects", () => {
  const view = { a: { x: { n: 1 }, y: { n: 2 } }, b: {} };
  const next = applyDelta(view, { a: { set: { z: { n: 3 } }, drop: ["x"] }, b: null });
  assert.deepEqual(plain(next), { a: { y: { n: 2 }, z: { n: 3 } } });
  assert.equal(next.a.y, view.a.y);
  assert.deepEqual(Object.keys(view.a), ["x", "y"]);
});

test("a key keeps its slot, and a new key takes the first free slot", () => {
  const slots = new Slots();
  assert.deepEqual(plain(slots.place(["a", "b", "c"], 3)), [["a", 0], ["b", 1], ["c", 2]]);
  assert.deepEqual(plain(slots.place(["c", "d"], 3)), [["d", 0], ["c", 2]]);
  assert.deepEqual(plain(slots.place(["c", "d", "e", "f"], 3)), [["d", 0], ["e", 1], ["c", 2]]);
});

// ---- messages

const message = (kind, from, to, sent, received, more = {}) => ({
  kind, from, to, sent, received, label: "", call: "", rrefs: [], context: "", bytes: 0, tries: 1,
  state: received === null ? "under way" : "received", ...more,
});
const names = (id) => ["notebook", "worker1", "worker2"][id];
const talk = {
  a: message("Call", 0, 1, 1, 4, { label: "train", call: "0.1", rrefs: ["1.5"] }),
  b: message("Call", 0, 2, 2, 3, { label: "train", call: "0.2", context: "281" }),
  c: message("Notice", 1, 0, 5, 6, { label: "output" }),
  d: message("Result", 1, 0, 7, null, { label: "train", call: "0.1", bytes: 2000 }),
};
const keep = (words, kind = "all but notices") =>
  Object.keys(talk).filter((key) => messageFilter(words, kind, names)(talk[key])).join("");

test("all words of a filter must match a message", () => {
  assert.deepEqual(["", "call:0.1", "rref:1.5", "context:281"].map((words) => keep(words)), ["abd", "ad", "a", "b"]);
  assert.deepEqual(["from:worker1", "to:worker2", "at:worker1"].map((words) => keep(words)), ["d", "b", "ad"]);
  assert.equal(keep("TRAIN at:worker1 from:notebook"), "a");
  assert.equal(keep("call:0.1 rref:9"), "");
  assert.equal(keep("call:0"), "", "an id must match as a whole");
});

test("notices are shown only on request", () => {
  assert.deepEqual([keep("", "all kinds"), keep("", "Notice"), keep("out", "all kinds")], ["abcd", "c", "c"]);
});

test("an arrow is level if nothing happened before the arrival; the others slope", () => {
  const { places, slots } = layOut(talk, () => true);
  assert.deepEqual(plain(places.map(({ key, from, to }) => [key, from, to])), [
    ["a", 0, 2], ["b", 1, 1], ["c", 3, 3], ["d", 4, 4],
  ]);
  assert.equal(slots, 5);
  const few = layOut(talk, (row) => row.kind === "Result");
  assert.deepEqual(plain([few.slots, few.places.map(({ key }) => key)]), [1, ["d"]]);
  assert.equal(layOut({}, () => true).slots, 0);
});

test("a message that only its receiver reported is placed at its arrival", () => {
  const { places } = layOut({ ...talk, e: message("Call", 2, 1, null, 2.5) }, () => true);
  assert.deepEqual(places.map(({ key }) => key).join(""), "abecd");
});

test("a message in a sentence", () => {
  assert.equal(
    sentence(talk.a, 1, names),
    "Call train, notebook → worker1 at 0 µs, received 3.00 s later, call 0.1, RRef 1.5",
  );
  assert.equal(
    sentence({ ...talk.d, tries: 3 }, 1, names),
    "Result train, worker1 → notebook at 6.00 s, under way, call 0.1, 2.0 kB of data, sent 3 times",
  );
  assert.match(sentence({ ...talk.d, state: "untold" }, 1, names), /its receiver did not report whether it arrived/);
  assert.deepEqual([2, 0.0305, 41e-6].map(formatSeconds), ["2.00 s", "30.5 ms", "41 µs"]);
});

test("the filters that a message suggests, and the totals of all messages", () => {
  assert.deepEqual(plain(filterTerms(talk.a)), ["call:0.1", "rref:1.5"]);
  assert.deepEqual(plain(filterTerms(talk.b)), ["call:0.2", "context:281"]);
  assert.equal(filterTerms({ ...talk.a, rrefs: Array(20).fill("1.1") }).length, 9);
  const { all, states, began, kinds } = totals(talk);
  assert.deepEqual(plain([all, states, began]), [4, { received: 3, "under way": 1 }, 1]);
  assert.deepEqual(plain(kinds), ["Call", "Notice", "Result"]);
});

// ---- collectives among messages

const together = {
  workers: { 0: { id: 0, name: "notebook" }, 1: { id: 1, name: "worker1" }, 2: { id: 2, name: "worker2" } },
  collectives: {
    k: {
      op: "all_reduce(SUM)", number: 3, group: "world", shape: "float32[4]", bytes: 16, state: "done", begin: 1.5, end: 4,
      members: ["worker1", "worker2"], missing: [], last: 2, waited: 1.5,
    },
    o: {
      op: "barrier", number: 4, group: "world", shape: "", bytes: 0, state: "open", begin: 5, end: null,
      members: ["worker1", "worker2", "elsewhere:7"], missing: ["worker2", "elsewhere:7"], last: null, waited: null,
    },
  },
  entries: {
    "k/1": { collective: "k", worker: 1, waited: 1.5 },
    "k/2": { collective: "k", worker: 2, waited: 0 },
    "o/1": { collective: "o", worker: 1, waited: null },
  },
};

test("a collective is a row among messages, in its order, and is found by its members, its group and its name", () => {
  const rows = collectiveRows(together);
  const { places } = layOut({ ...talk, ...rows }, () => true);
  assert.deepEqual(places.map(({ key }) => key).join(""), "akbcod");
  assert.deepEqual(plain(rows.o.missing), [2], "a process outside this world has no column");
  const found = (words, kind = "all but notices") =>
    Object.keys(rows).filter((key) => messageFilter(words, kind, names)(rows[key])).join("");
  assert.deepEqual(["at:worker2", "reduce", "WORLD", "Collective", "from:worker1"].map((words) => found(words)), ["ko", "k", "ko", "ko", ""]);
  assert.equal(found("", "Call"), "");
});

test("a collective in a sentence: the last member and the others' waits, or the missing members", () => {
  const rows = collectiveRows(together);
  assert.equal(
    sentence(rows.k, 1, names),
    "all_reduce(SUM) of float32[4] in world #3 at 500.0 ms, took 2.50 s, worker2 came last, worker1 waited 1.50 s, 16 B of data",
  );
  assert.equal(sentence(rows.o, 1, names), "barrier in world #4 at 4.00 s, open, entered: worker1, missing: worker2");
  assert.equal(totals(rows).began, 1.5);
});
