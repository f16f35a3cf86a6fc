// Tests of the messages panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { messageFilter, layOut, sentence, formatSeconds, filterTerms, totals, waypoints, collectiveRows, wordsFor } = load(
  "messages", "messageFilter", "layOut", "sentence", "formatSeconds", "filterTerms", "totals", "waypoints", "collectiveRows",
  "wordsFor",
);

const FAMILIES = { Call: "call", Result: "answer", Notice: "notice", Parcel: "gradient" };
const message = (kind, words, from, to, sent, received, more = {}) => ({
  kind, words, family: FAMILIES[kind], from, to, sent, received, label: "", call: "", rrefs: [], context: "", bytes: 0, tries: 1,
  state: received === null ? "under way" : "received", ...more,
});
const names = (id) => ["notebook", "worker1", "worker2"][id];
const talk = {
  a: message("Call", "call train", 0, 1, 1, 4, { label: "train", call: "0.1", rrefs: ["1.5"] }),
  b: message("Call", "call train", 0, 2, 2, 3, { label: "train", call: "0.2", context: "281" }),
  c: message("Notice", "output of a cell", 1, 0, 5, 6, { label: "cell" }),
  d: message("Result", "result of train", 1, 0, 7, null, { label: "train", call: "0.1", bytes: 2000 }),
};
const keep = (words, group = "", from = talk) =>
  Object.keys(from).filter((key) => messageFilter(words, group, names)(from[key])).join("");

test("all words of a filter must match a message", () => {
  assert.deepEqual(["", "call:0.1", "rref:1.5", "context:281"].map((words) => keep(words)), ["abd", "ad", "a", "b"]);
  assert.deepEqual(["from:worker1", "to:worker2", "at:worker1"].map((words) => keep(words)), ["d", "b", "ad"]);
  assert.equal(keep("TRAIN at:worker1 from:notebook"), "a");
  assert.equal(keep("call:0.1 rref:9"), "");
  assert.equal(keep("call:0"), "", "an id must match as a whole");
});

test("where words have no room, those of a value name its operation, and others lose what the arrow says", () => {
  const forms = (words) => [40, 12, 5].map((room) => wordsFor(room, words));
  assert.deepEqual(forms("activations of micro-batch 3 → stage 1"), ["activations of micro-batch 3 → stage 1", "act 1F3", "1F3"]);
  assert.deepEqual(forms("gradient of micro-batch 12 → stage 0"), ["gradient of micro-batch 12 → stage 0", "grad 0B12", "0B12"]);
  assert.deepEqual(forms("call train"), ["call train", "call train", "train"]);
  assert.deepEqual(forms("result of pipeline step"), ["result of pipeline step", "step", "step"]);
  assert.deepEqual(forms("release context"), ["release context", "release con…", "rele…"]);
});

test("the search finds the plain words, and still the kinds", () => {
  const gradient = message("Parcel", "gradient of micro-batch 2 → stage 0", 2, 1, 8, 9, { label: "B2 for stage 0" });
  const all = { ...talk, e: gradient };
  assert.deepEqual(["gradient stage 0", "micro-batch", "parcel", "result"].map((words) => keep(words, "", all)), ["e", "e", "e", "d"]);
});

test("notices are shown only on request", () => {
  assert.deepEqual([keep("", "all"), keep("", "notice"), keep("output", "all"), keep("output")], ["abcd", "c", "c", ""]);
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

// Where a line is at a member between its ends, as multiples of a slot.
const heightAt = (points, x) => {
  const i = points.findIndex(([x1], n) => n + 1 < points.length && (x - x1) * (x - points[n + 1][0]) <= 0);
  const [[x1, y1], [x2, y2]] = points.slice(i, i + 2);
  return y1 + ((x - x1) / (x2 - x1)) * (y2 - y1);
};

test("no line passes through an end of another message", () => {
  const members = 9;
  let seed = 1;
  const random = (below) => (seed = (seed * 48271) % 2147483647) % below;
  const many = Object.fromEntries(Array.from({ length: 400 }, (_, i) => {
    const from = random(members);
    return [i, message("Call", "call f", from, (from + 1 + random(members - 1)) % members, i, i + 1 + random(12))];
  }));
  const { places } = layOut(many, () => true);
  const ends = new Set(places.flatMap(({ row, from, to }) => [`${row.from} ${from}`, `${row.to} ${to}`]));
  let between = 0;
  for (const { row, from, to } of places) {
    const points = waypoints(row.from, from, row.to, to, 1); // a lane at each whole number
    for (let lane = Math.min(row.from, row.to) + 1; lane < Math.max(row.from, row.to); lane++) {
      const height = heightAt(points, lane);
      assert.equal(height, from, "the line is level in its own row");
      assert.ok(!ends.has(`${lane} ${height}`));
      between += 1;
    }
  }
  assert.ok(between > 500);
});

test("a message that only its receiver reported is placed at its arrival", () => {
  const { places } = layOut({ ...talk, e: message("Call", "call f", 2, 1, null, 2.5) }, () => true);
  assert.deepEqual(places.map(({ key }) => key).join(""), "abecd");
});

test("a message in a sentence", () => {
  assert.equal(
    sentence(talk.a, 1, names),
    "call train, notebook → worker1 at 0 µs, received 3.00 s later, call 0.1, RRef 1.5, kind Call",
  );
  assert.equal(
    sentence({ ...talk.d, tries: 3 }, 1, names),
    "result of train, worker1 → notebook at 6.00 s, in flight, call 0.1, 2.0 kB of data, sent 3 times, kind Result",
  );
  assert.match(sentence({ ...talk.d, state: "untold" }, 1, names), /its receiver did not report whether it arrived/);
  const times = [2, 0.0305, 41e-6, 999.99, 1012.3, 7380.25];
  assert.deepEqual(times.map((one) => formatSeconds(one)), ["2.00 s", "30.5 ms", "41 µs", "999.99 s", "16:52 min", "2:03 h"]);
  assert.deepEqual(times.slice(-2).map((one) => formatSeconds(one, true)), ["16:52.30 min", "2:03:00.25 h"]);
  assert.match(sentence({ ...talk.d, sent: 1013.3 }, 1, names), / at 16:52\.30 min, /);
});

test("the filters that a message suggests, and the totals of all messages", () => {
  assert.deepEqual(plain(filterTerms(talk.a)), ["call:0.1", "rref:1.5"]);
  assert.deepEqual(plain(filterTerms(talk.b)), ["call:0.2", "context:281"]);
  assert.equal(filterTerms({ ...talk.a, rrefs: Array(20).fill("1.1") }).length, 9);
  const { all, states, began, families } = totals(talk);
  assert.deepEqual(plain([all, states, began]), [4, { received: 3, "under way": 1 }, 1]);
  assert.deepEqual(plain(families), ["answer", "call", "notice"]);
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
  const found = (words, group = "") => keep(words, group, rows);
  assert.deepEqual(["at:worker2", "reduce", "WORLD", "Collective", "from:worker1"].map((words) => found(words)), ["ko", "k", "ko", "ko", ""]);
  assert.deepEqual([found("", "call"), found("", "collective")], ["", "ko"]);
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

test("a message of which only the loss was reported begins with that", () => {
  const lost = { from: 0, to: 1, kind: "Call", group: "values", state: "lost", sent: null, received: null, lost: 12 };
  const sent = { ...lost, state: "under way", sent: 10, lost: null };
  assert.equal(totals({ a: sent, b: lost }).began, 10);
  const { places } = layOut({ a: sent, b: lost }, () => true);
  assert.deepEqual(plain(places.map(({ key, sent: at }) => [key, at])), [["a", 10], ["b", 12]]);
});
