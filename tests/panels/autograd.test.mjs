// Tests of the autograd panel's pure functions, without a browser.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const { heldContexts, Choice, moreComplete, leafText, leafLines } =
  load("autograd", "heldContexts", "Choice", "moreComplete", "leafText", "leafLines");
const { connect, setLevels, graphOf, chipsOf, progressOf, layOut, formatTime } =
  load("autograd", "connect", "setLevels", "graphOf", "chipsOf", "progressOf", "layOut", "formatTime");

const part = (worker, place, sends, recvs, more = {}) => ({
  worker, place, sends: sends.map(String), recvs: recvs.map(String), ops: ["Linear net.0", "Relu"], count: 2, stage: null,
  state: "", seconds: null, ran: [], done: 0, times: 1, ...more,
});
const message = (name, from, to, more = {}) => ({
  message: String(name), from, to, label: "f", shape: "[3]", bytes: 12, stage: null, sent: 1, received: 1, fired: 0, back: 0,
  ...more,
});
const link = (from, to, sent) => ({ from, to, sent, received: sent, open: 0 });
const levels = ({ blocks }) => Object.fromEntries(blocks.map(({ key, level }) => [key, level]));

// ---- the choice of a context

const context = (key, made, ended = null, step = null) => ({ context: key, made, ended, step });
const world = (...contexts) => ({
  contexts: Object.fromEntries(contexts.map((one) => [one.context, one])),
  members: Object.fromEntries(contexts.map(({ context: key }) => [`${key}/0`, {}])),
  links: {},
});

test("contexts that their creator holds are shown; without any, all are", () => {
  const big = String((1n << 48n) + 7n);
  const contexts = Object.fromEntries(["9", "10", big].map((key) => [key, context(key, 0)]));
  const keys = (members) => plain(heldContexts({ contexts, members }).map(({ context: key }) => key));
  assert.deepEqual(keys({ "10/0": {}, "9/1": {}, [`${big}/1`]: {} }), ["10", big]);
  assert.deepEqual(keys({ "9/1": {} }), ["9", "10", big]);
});

test("an open context is shown at once if there is nothing else, and stays until it has ended", () => {
  const choice = new Choice();
  assert.equal(choice.pick(world(), 0)[0], null);
  assert.deepEqual(plain(choice.pick(world(context("1", 1)), 0)), ["1", null]);
  assert.deepEqual(plain(choice.pick(world(context("1", 1), context("2", 2)), 9000)), ["1", null]);
  const over = world(context("1", 1, 3), context("2", 2));
  assert.deepEqual(plain(choice.pick(over, 9100)), ["1", 300], "2 may be one of many");
  assert.deepEqual(plain(choice.pick(over, 9400)), ["2", null]);
});

test("while contexts come and go, one that has ended is shown for a while", () => {
  const choice = new Choice();
  assert.equal(choice.pick(world(context("1", 1, 2)), 0)[0], "1");
  assert.deepEqual(plain(choice.pick(world(context("1", 1, 2), context("2", 2, 3)), 500)), ["1", 1500]);
  assert.deepEqual(plain(choice.pick(world(context("2", 2, 3), context("3", 3)), 600)), ["2", 400], "1 is no longer known");
  assert.deepEqual(plain(choice.pick(world(context("2", 2, 3), context("3", 3)), 1000)), ["3", null], "3 is there to stay");
});

test("a step of a pipeline is shown when it has ended", () => {
  const choice = new Choice();
  assert.equal(choice.pick(world(context("1", 1, 2, 7)), 0)[0], "1");
  const running = world(context("1", 1, 2, 7), context("2", 2, null, 8));
  choice.pick(running, 100);
  assert.equal(choice.pick(running, 9000)[0], "1");
  assert.equal(choice.pick(world(context("1", 1, 2, 7), context("2", 2, 3, 8)), 9100)[0], "2");
});

test("a context is not chosen before all its workers have told of it", () => {
  const torn = { ...world(context("1", 1, 2)), links: { "1/0>1": { context: "1", from: 0, to: 1 } } };
  assert.equal(new Choice().pick(torn, 0)[0], null);
  torn.members["1/1"] = {};
  assert.equal(new Choice().pick(torn, 0)[0], "1");
});

test("a context of a lost worker is shown after a while", () => {
  const choice = new Choice();
  choice.pick(world(context("1", 1, 2)), 0);
  const torn = { ...world(context("1", 1, 2), context("2", 3, 4)), links: { "2/0>1": { context: "2", from: 0, to: 1 } } };
  assert.equal(choice.pick(torn, 100)[0], "1");
  assert.equal(choice.pick(torn, 2000)[0], "1");
  assert.equal(choice.pick(torn, 2100)[0], "2");
});

test("the picture with most workers is kept of a context", () => {
  const picture = (key, ...workers) => ({ key, pieces: { members: workers.map((worker) => ({ worker })), links: [] } });
  const [whole, some] = [picture("5", 0, 1, 2), picture("5", 0)];
  assert.equal(moreComplete(whole, some), whole);
  assert.equal(moreComplete(some, whole), whole);
  assert.equal(moreComplete(picture("4", 0, 1, 2), some), some);
});

// ---- the graph

// The notebook sends x to worker1, its result to worker2, and makes the loss of what that returns.
const parts = [
  part(0, 0, [1], [], { ops: ["leaf x"], count: 1 }), part(0, 1, [3], [2], { count: 0, ops: [] }), part(1, 0, [2], [1]),
  part(2, 0, [4], [3]),
];
const messages = [message(1, 0, 1), message(2, 1, 0), message(3, 0, 2), message(4, 2, 0)];

test("a block stands behind all that it needs, and an end without operations has an empty block", () => {
  const graph = connect(parts, messages);
  assert.ok(setLevels(graph));
  assert.deepEqual(levels(graph), { "0/0": 0, "1/0": 1, "0/1": 2, "2/0": 3, "4>": 4 });
  const after = connect([...parts, part(0, 2, [-1], [4])], messages);
  setLevels(after);
  assert.deepEqual(levels(after), { "0/0": 0, "1/0": 1, "0/1": 2, "2/0": 3, "0/2": 4 });
});

test("operations that lead to two messages are a block before those that lead to one", () => {
  const own = [part(1, 0, [8, 9], [7]), part(1, 1, [8], []), part(1, 2, [9], [])];
  const graph = connect(own, [message(7, 0, 1), message(8, 1, 0), message(9, 1, 0)]);
  setLevels(graph);
  assert.deepEqual(plain(graph.feeds.map(({ key }) => key)), ["1/0~1/1", "1/0~1/2"]);
  assert.deepEqual(levels(graph), { "7<": 0, "1/0": 1, "1/1": 2, "1/2": 2, "8>": 3, "9>": 3 });
  assert.deepEqual(plain(graph.arrows.map(({ from }) => from.key)), ["7<", "1/1", "1/2"]);
});

const many = (count) => ({
  parts: Array.from({ length: count }, (_, i) => [part(1, i, [i], []), part(2, i, [100 + i], [i])]).flat(),
  messages: Array.from({ length: count }, (_, i) => [message(i, 1, 2), message(100 + i, 2, 3)]).flat(),
  links: [link(1, 2, count), link(2, 3, count)],
  members: [],
});

test("a few parts are drawn one by one, and many of one worker between its messages as one block", () => {
  assert.equal(graphOf(many(3), 1000).blocks.length, 9);
  const folded = graphOf(many(8), 1000);
  assert.deepEqual(levels(folded), { "1/0": 0, "2/1": 1, "3/2": 2 });
  assert.deepEqual(plain(folded.arrows.map(({ key, messages: all }) => [key, all.length])), [["1/0>2/1", 8], ["2/1>3/2", 8]]);
  assert.deepEqual(plain(chipsOf(folded.blocks[0], 8)), ["Linear", "Relu", "×8"]);
});

test("a graph that is too long, or not listed in full, folds to one block for each worker", () => {
  const calls = Array.from({ length: 40 }, (_, i) => i);
  const long = {
    parts: calls.map((i) => part(i % 2, i, [i + 1], [i])),
    messages: calls.slice(1).map((i) => message(i, (i + 1) % 2, i % 2)),
    links: [link(0, 1, 20), link(1, 0, 19)],
    members: [],
  };
  const graph = graphOf(long, 1000);
  assert.deepEqual([graph.blocks.length, graph.arrows.length, graph.isWide], [2, 2, true]);
  const part_ = graphOf({ ...many(4), links: [link(1, 2, 70), link(2, 3, 4)] }, 1000);
  assert.deepEqual([part_.isWide, plain(levels(part_))], [false, { 1: 0, 2: 1, 3: 2 }]);
  assert.equal(part_.arrows[0].messages[0].sent, 70);
});

test("a record without parts shows its workers and links", () => {
  const members = [0, 1, 2].map((worker) => ({ worker }));
  const graph = graphOf({ parts: [], messages: [], links: [link(1, 2, 5)], members }, 1000);
  assert.deepEqual(levels(graph), { 0: 0, 1: 0, 2: 1 });
});

test("a stage of a pipeline is a block, and its messages lead to the stage that they are for", () => {
  const stage = (worker, number, more) => part(worker, number, [], [], { stage: number, ops: ["Linear"], count: 1, ...more });
  const rows = [stage(1, 0), stage(2, 1), stage(1, 2, { done: 3, times: 4, state: "runs" })];
  const between = [message("a", 1, 2, { stage: 1, sent: 4 }), message("b", 2, 1, { stage: 2, sent: 4 })];
  const graph = graphOf({ parts: rows, messages: between, links: [link(1, 2, 4), link(2, 1, 4)], members: [] }, 1000);
  assert.deepEqual(levels(graph), { "1/0": 0, "2/1": 1, "1/2": 2 });
  assert.deepEqual(plain(chipsOf(graph.blocks[2], 8)), ["stage 2", "Linear"]);
  assert.deepEqual(plain(progressOf(graph.blocks[2])), { state: "runs", share: 0.75, text: "3 of 4 back" });
});

// ---- words and places

test("a block says its operations as far as there is room, then their number", () => {
  const block = (ops, count = ops.length) => ({ parts: [part(1, 0, [1], [], { ops, count })] });
  const ops = ["Linear net.0", "Relu", "Linear net.2", "Sum"];
  const texts = [8, 3, 1, 0].map((most) => plain(chipsOf(block(ops), most)));
  assert.deepEqual(texts, [["Linear", "Relu", "Linear", "Sum"], ["Linear", "Relu", "+2"], ["Linear", "+3"], ["4 ops"]]);
  const narrow = (most) => [ops, ["Linear"]].map((names) => chipsOf(block(names), most)[0]);
  assert.deepEqual([-1, -2].map(narrow), [["4", "Lin"], ["4", "1"]]);
  assert.deepEqual(plain(chipsOf(block(["leaf w"]), 0)), ["w"]);
  assert.deepEqual(plain(chipsOf(block([], null), 3)), ["over 1000 ops"]);
  assert.deepEqual(plain(chipsOf(block([]), 3)), ["="]);
});

test("parts that have run keep their time, and a part that stopped in the middle has failed", () => {
  const ran = part(1, 0, [1], [], { state: "ran", seconds: 0.0015 });
  assert.deepEqual(plain(progressOf({ parts: [ran] })), { state: "ran", share: 1, text: "1.5 ms" });
  assert.equal(progressOf({ parts: [ran, part(1, 1, [2], [])] }).text, "1 / 2");
  assert.equal(progressOf({ parts: [ran, part(1, 1, [2], [], { state: "failed" })] }).state, "failed");
  assert.deepEqual([2e-5, 0.0123, 4, 1012.3].map(formatTime), ["20 µs", "12 ms", "4.0 s", "16:52 min"]);
});

test("blocks of one worker never overlap, in a narrow picture too", () => {
  for (const width of [600, 1000, 1440]) {
    const pieces = { parts: [...parts, part(0, 2, [-1], [4])], messages, links: [link(0, 1, 1)], members: [] };
    const graph = graphOf(pieces, width - 170);
    const { places } = layOut(graph, [0, 1, 2], width, 130, 12);
    const own = graph.blocks.filter(({ worker }) => worker === 0).sort((a, b) => a.x - b.x);
    own.slice(1).forEach((block, i) => assert.ok(block.x >= own[i].x + own[i].w, `at ${width}`));
    assert.ok(places.get(1).y >= places.get(0).y + places.get(0).height);
  }
});

test("a leaf without a name is shown as its shape, and leaves without room are counted", () => {
  const leaves = [{ name: "w", shape: "[3]" }, { name: "", shape: "[3]" }];
  assert.deepEqual(leaves.map(leafText), ["w [3]", "[3]"]);
  assert.deepEqual(plain(leafLines(leaves, 2, 2)), ["w [3]", "[3]"]);
  assert.deepEqual(plain(leafLines(leaves, 9, 2)), ["w [3]", "+7 · [3]"]);
});
