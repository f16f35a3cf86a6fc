// Tests of the pure functions of the pipeline panel: steps, the ideal schedule, causes of the bubble, the axis, zoom, curves.

import assert from "node:assert/strict";
import { test } from "node:test";

import { load, plain } from "./load.mjs";

const {
  StepHistory, axisSpan, bubbleOf, bubbleText, chromeTrace, curvePath, curveRange, curveSteps, flowOf, formatDuration,
  idealOf, labelOf, microbatchText, panned, roundUp, stepToShow, waitsFor, wholePercents, zoomed,
} = load(
  "pipeline", "StepHistory", "axisSpan", "bubbleOf", "bubbleText", "chromeTrace", "curvePath", "curveRange", "curveSteps",
  "flowOf", "formatDuration", "idealOf", "labelOf", "microbatchText", "panned", "roundUp", "stepToShow", "waitsFor",
  "wholePercents", "zoomed",
);

const close = (value, wanted, about) => assert.ok(Math.abs(value - wanted) < 1e-9, `${value} is not ${wanted} ${about ?? ""}`);
const nameOf = (id) => `worker${id}`;

// An operation "0F3": stage 0, forward, micro-batch 3.
const op = (worker, word, begin, end, more = {}) => {
  const [, stage, kind, microbatch] = word.match(/(\d+)(\D)(\d+)/);
  const numbers = { stage: Number(stage), microbatch: Number(microbatch) };
  return { step: 1, worker, op: kind, ...numbers, begin, end, bytes: 4, held: 8, failed: false, ...more };
};

// The operations of a plan, a line for each worker, as they run where a stage's forward takes `costs[stage]`, a backward twice
// that, and a result is `transfer` on its way to another worker.
function run(plan, costs = [], transfer = 0) {
  const lines = plan.trim().split("\n").map((line) => line.trim().split(/\s+/));
  const [next, clock, ended, ops] = [lines.map(() => 0), lines.map(() => 0), new Map(), []];
  const stages = 1 + Math.max(...lines.flat().map((word) => Number.parseInt(word, 10)));
  for (let left = lines.flat().length; left; ) {
    const before = left;
    lines.forEach((words, lane) => {
      while (next[lane] < words.length) {
        const made = op(lane + 1, words[next[lane]], 0, 0);
        const { stage, microbatch } = made;
        const from = made.op === "F" ? stage - 1 : stage + 1;
        const need = from >= 0 && from < stages && `${from}${made.op}${microbatch}`;
        if (need && !ended.has(need)) return;
        const came = need ? ended.get(need).end + (ended.get(need).worker === lane + 1 ? 0 : transfer) : 0;
        made.begin = Math.max(clock[lane], came);
        made.end = clock[lane] = made.begin + (costs[stage] ?? 1) * (made.op === "F" ? 1 : 2);
        ended.set(words[next[lane]++], made);
        ops.push(made);
        left -= 1;
      }
    });
    assert.ok(left < before, "the plan can run");
  }
  return ops;
}
const range = (count) => Array.from({ length: count }, (_, i) => i);
const forwardsFirst = (stages, count) =>
  range(stages).map((stage) => ["F", "B"].flatMap((kind) => range(count).map((m) => `${stage}${kind}${m}`)).join(" ")).join("\n");
const PLANS = [
  ["one forward, one backward", "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2", 0.25],
  ["two workers", forwardsFirst(2, 4), 1 / 5],
  ["eight workers", forwardsFirst(8, 8), 7 / 15],
  ["two stages on each worker", "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1", 0.2],
];

// ---- the bubble

test("the ideal schedule of each plan has the bubble that the literature gives it", () => {
  for (const [name, plan, bubble] of PLANS) {
    const ops = run(plan);
    close(bubbleOf(ops).minimum, bubble, name);
    close(bubbleOf(ops).bubble, bubble, name);
    const { spans, seconds } = idealOf(ops);
    for (const each of ops) assert.deepEqual(plain(spans.get(each)), [each.begin, each.end], "as it ran");
    close(seconds, Math.max(...ops.map((each) => each.end)));
  }
});

test("the ideal has as much work as the step, and half as much for a forward as for a backward", () => {
  const slow = run(PLANS[0][1], [1, 3]);
  const { spans } = idealOf(slow);
  const length = (each) => spans.get(each)[1] - spans.get(each)[0];
  close(slow.reduce((sum, each) => sum + length(each), 0), slow.reduce((sum, each) => sum + each.end - each.begin, 0));
  for (const each of slow) close(length(each), each.op === "F" ? 2 : 4);
});

test("while operations are missing there is no ideal, and a bubble without a minimum", () => {
  const late = [op(2, "1F0", 1, 2), op(2, "1B0", 2, 4)];
  assert.equal(idealOf(late), null);
  const found = bubbleOf([...late, op(1, "0B0", 4, 5)]);
  assert.equal(found.minimum, null);
  close(found.parts.reduce((sum, [, share]) => sum + share, 0), found.bubble);
  assert.equal(bubbleOf([]), null);
  assert.equal(bubbleOf([op(1, "0F0", 0, null)]), null);
});

test("the parts of a bubble sum to it exactly, and name the slow worker or the transfers", () => {
  for (const [name, plan] of PLANS) {
    for (const [costs, transfer] of [[[], 0], [[1, 3], 0], [[3, 1], 0], [[], 0.5], [[1, 1.2], 0.1]]) {
      const { bubble, minimum, parts } = bubbleOf(run(plan, costs, transfer));
      const where = `${name}, ${costs} ${transfer}`;
      close(parts.reduce((sum, [, share]) => sum + share, 0), bubble, where);
      assert.ok(parts.every(([, share]) => share >= -1e-12), where);
      const [[first, least], [cause, most] = []] = parts;
      assert.equal(first, "minimum");
      close(least, Math.min(minimum, bubble), where);
      if (costs[1] === 3) assert.equal(cause, 2, where);
      if (costs[0] === 3) assert.equal(cause, 1, where);
      if (transfer === 0.5) assert.equal(cause, "transfer", where);
      if (!costs.length && !transfer) assert.equal(cause, undefined, where);
      else assert.ok(most > 0, where);
    }
  }
});

test("a worker waits for what made the step late, for so long as it was idle beyond the minimum", () => {
  // worker3 waits for worker2, which waits until its input has come from worker1
  const { waits, parts } = bubbleOf([op(1, "0F0", 0, 1), op(2, "1F0", 5, 6), op(3, "2F0", 6, 7)]);
  const [[, least], ...causes] = parts;
  close(least, 2 / 3, "the minimum of three stages with one micro-batch");
  assert.deepEqual(causes.map(([cause]) => cause), ["transfer"]);
  for (const worker of [1, 2, 3]) {
    assert.equal(waits.get(worker)[0], "transfer");
    close(waits.get(worker)[1], 6 / 7 - 2 / 3);
  }
  const slow = bubbleOf(run(forwardsFirst(4, 8), [1, 3]));
  assert.deepEqual([1, 3, 4].map((worker) => slow.waits.get(worker)[0]), [2, 2, 2]);
  assert.equal(slow.waits.get(2), null, "the slow one itself waits for nobody");
  assert.equal(bubbleOf(run(forwardsFirst(4, 8))).waits.get(4), null, "the minimum has no cause");
});

test("time between operations that need nothing from elsewhere is overhead", () => {
  const { parts, waits } = bubbleOf([op(1, "0F0", 0, 1), op(1, "0F1", 2, 3), op(1, "0B0", 3, 5), op(1, "0B1", 6, 8)]);
  assert.deepEqual(plain(parts), [["minimum", 0], ["overhead", 0.25]]);
  assert.deepEqual(plain([...waits]), [[1, ["overhead", 0.25]]]);
});

test("before an all-reduce a replica waits for the one that comes last", () => {
  const ops = [
    op(1, "0F0", 0, 1), op(1, "0B0", 1, 3), op(1, "0A0", 8, 9), op(2, "0F1", 0, 3), op(2, "0B1", 3, 8), op(2, "0A0", 8, 9),
  ];
  assert.deepEqual(plain([...bubbleOf(ops).waits]), [[1, [2, 5 / 9]], [2, null]]);
});

test("a step of eight workers and 64 micro-batches is measured", () => {
  const { bubble, minimum, parts, waits } = bubbleOf(run(forwardsFirst(8, 64), [1, 1, 1, 1, 1.5]));
  close(minimum, 7 / 71);
  assert.deepEqual(plain(parts.map(([cause]) => cause)), ["minimum", 5], "the slow worker alone");
  assert.deepEqual([1, 4, 6, 8].map((worker) => waits.get(worker)[0]), [5, 5, 5, 5], "all wait for it, however far away");
  assert.ok(bubble > minimum);
});

test("percentages are whole, and sum to the whole", () => {
  assert.deepEqual(plain(wholePercents([0.114, 0.305, 0.095])), [11, 31, 9]);
  for (const shares of [[1 / 3, 1 / 3, 1 / 3], [0.005, 0.005], [0.999], [0.1249, 0.1249, 0.1249], []]) {
    const whole = wholePercents(shares);
    assert.equal(whole.reduce((sum, each) => sum + each, 0), Math.round(100 * shares.reduce((sum, each) => sum + each, 0)));
  }
});

test("the bubble in a sentence", () => {
  const text = (minimum, ...parts) => bubbleText({ minimum, parts }, nameOf);
  assert.equal(
    text(0.11, ["minimum", 0.11], [2, 0.31], ["transfer", 0.09]),
    "Bubble 51 %, minimum 11 %: 31 points waiting for worker2, 9 transfer",
  );
  assert.equal(text(0.2, ["minimum", 0.2], [1, 0.01]), "Bubble 21 %, minimum 20 %: 1 point waiting for worker1");
  assert.equal(text(0.2, ["minimum", 0.2]), "Bubble 20 %, minimum 20 %: as small as the schedule allows");
  assert.equal(text(null, ["minimum", 0], ["overhead", 0.3]), "Bubble 30 %: 30 points overhead between operations");
  const many = [[1, 0.1], [2, 0.08], ["transfer", 0.06], [3, 0.04], [4, 0.03], [5, 0.02]];
  assert.match(text(0.1, ["minimum", 0.1], ...many), /8 waiting for worker2, 6 transfer, 9 other$/);
});

// ---- one micro-batch

test("the way of a micro-batch goes forward through all stages and back", () => {
  const ops = run(forwardsFirst(3, 2));
  const word = (each) => `${each.stage}${each.op}${each.microbatch}`;
  assert.deepEqual(
    plain(flowOf(ops, 1).map(([from, to]) => `${word(from)}>${word(to)}`)).sort(),
    ["0F1>1F1", "1B1>0B1", "1F1>2F1", "2B1>1B1", "2F1>2B1"],
  );
  const halves = [op(1, "0F0", 0, 1), op(1, "0I0", 1, 2), op(1, "0W0", 2, 3), op(1, "0A0", 3, 4)];
  assert.deepEqual(plain(flowOf(halves, 0).map(([from, to]) => `${word(from)}>${word(to)}`)), ["0F0>0I0", "0I0>0W0"]);
});

test("a micro-batch in a sentence: how long it was on its way, and how much of it between operations", () => {
  const ops = [op(1, "0F0", 0, 1), op(2, "1F0", 3, 4), op(2, "1B0", 4, 6), op(1, "0B0", 8, 10), op(1, "0F1", 1, 2)];
  assert.equal(microbatchText(ops, 0), "Micro-batch 0: 4 operations in 10 s, of which it waited 4 s between operations.");
  assert.equal(microbatchText(ops, 7), "");
});

test("a label is the longest text that fits, or none", () => {
  const texts = [60, 30, 14, 6].map((wide) => labelOf(op(1, "2F12", 0, 1), wide, 20, true));
  assert.deepEqual(plain(texts), ["2F12", "F12", "", ""]);
  assert.equal(labelOf(op(1, "2F1", 0, 1), 60, 10, true), "", "too low");
  assert.equal(labelOf(op(1, "0F1", 0, 1, { failed: true }), 60, 20, false), "!F1");
  assert.equal(labelOf(op(1, "0A0", 0, 1), 60, 20, false), "A");
});

test("the next operation is shown with its stage if the worker has several", () => {
  assert.equal(waitsFor({ next: "12B3", stages: [12] }), ", waits for B3");
  assert.equal(waitsFor({ next: "2B3", stages: [0, 2] }), ", waits for 2B3");
  assert.equal(waitsFor({ next: "", stages: [0] }), "");
});

// ---- steps

const step = (number, begin, state, more = {}) => ({
  steps: { [number]: { step: number, begin, state, end: begin + 1, trains: true, ...more } },
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

test("a new run, which counts anew, displaces the steps of the one before", () => {
  const seen = new StepHistory();
  seen.add(step(7, 1, "complete", { run: "a" }));
  assert.deepEqual(numbers(seen.add(step(8, 2, "complete", { run: "a" }))), [7, 8]);
  assert.deepEqual(numbers(seen.add(step(1, 3, "complete", { run: "b" }))), [1]);
});

test("a complete step stays the same object, so that it is measured once; a running one is read anew", () => {
  const seen = new StepHistory();
  const [done, runs] = [step(1, 1, "complete"), step(2, 2, "running")];
  assert.equal(seen.add(done)[0], seen.add(done)[0]);
  assert.notEqual(seen.add(runs)[1], seen.add(runs)[1]);
});

test("the number of remembered steps is bounded", () => {
  const seen = new StepHistory();
  let steps = [];
  for (let number = 0; number < 350; number++) steps = seen.add(step(number, number, "complete"));
  assert.deepEqual([steps.length, steps[0].step, steps.at(-1).step, seen.steps.size], [300, 50, 349, 300]);
});

const row = (number, state, trains = true, seconds = 1) =>
  ({ step: number, state, trains, begin: 10 * number, end: 10 * number + seconds });

test("the last finished step that trains is shown; evaluation and a running step do not displace it", () => {
  const shown = (steps, chosen = null, live = false) => stepToShow(steps, chosen, live)?.step;
  const steps = [row(1, "complete"), row(2, "complete"), row(3, "complete", false), row(4, "running")];
  assert.equal(shown(steps), 2);
  assert.equal(shown(steps, null, true), 4, "the live cursor follows the newest");
  assert.equal(shown(steps, 1, true), 1, "a step that was chosen stays");
  assert.equal(shown(steps, 99), 2, "a step that is gone is not shown");
  assert.equal(shown([...steps.slice(0, 2), row(5, "failed")]), 5);
  assert.equal(shown([row(3, "complete", false), row(4, "running")]), 3, "evaluation alone");
  assert.equal(shown([row(1, "running")]), 1, "the first step of all");
  assert.equal(shown([]), undefined);
});

test("the axis grows at once, and shrinks only when several steps have needed far less", () => {
  const seconds = [0.9, ...range(5).map((n) => 0.1 + 0.01 * (n % 3)), 0.1, 0.095, 0.07, 2.1, 0.1];
  const steps = seconds.map((each, n) => row(n, "complete", true, each));
  let span = 0;
  const spans = steps.map((each, n) => (span = axisSpan(span, steps.slice(0, n + 1), each)));
  assert.deepEqual(plain(spans), [...range(6).map(() => 1), 0.12, 0.12, 0.12, 2.5, 2.5]);
});

test("the scale of an axis covers its span, and is round", () => {
  for (const span of [1e-6, 0.0101, 0.0149, 0.097, 1, 7.3]) {
    const scale = roundUp(span);
    assert.ok(scale >= span * 0.999 && scale <= span * 1.35, `${scale} for ${span}`);
  }
  assert.equal(roundUp(0.0101), 0.012);
});

test("times have the unit that fits", () => {
  assert.deepEqual([2, 0.0305, 41e-6].map((time) => formatDuration(time)), ["2 s", "30.5 ms", "41 µs"]);
  assert.equal(formatDuration(0.5, 2), "0.5 s", "all ticks of an axis have one unit");
  assert.deepEqual([1012.3, 30].map((time) => formatDuration(time, 1012.3)), ["16:52 min", "0:30 min"]);
});

test("zoom keeps the time under the pointer, and stays within the step", () => {
  assert.deepEqual(plain(zoomed(null, 0.5, 4, 10)), { from: 2, to: 7 });
  assert.deepEqual(plain(zoomed({ from: 2, to: 7 }, 0.5, 2, 10)), { from: 2, to: 4.5 });
  assert.deepEqual(plain(zoomed({ from: 6, to: 10 }, 2, 10, 10)), { from: 2, to: 10 });
  assert.equal(zoomed({ from: 2, to: 7 }, 4, 5, 10), null, "all of it");
  const { from, to } = zoomed(null, 1e-9, 5, 10);
  close(to - from, 0.01, "not without end");
  assert.deepEqual(plain(panned({ from: 2, to: 4 }, 3, 10)), { from: 5, to: 7 });
  assert.deepEqual([panned({ from: 2, to: 4 }, 30, 10), panned({ from: 2, to: 4 }, -3, 10)].map(({ from: at }) => at), [8, 0]);
  assert.equal(panned(null, 1, 10), null);
});

// ---- curves and files

test("a curve has a point for each complete step that trains, and gaps where a value is missing", () => {
  const steps = [row(1, "complete"), row(2, "complete", false), row(3, "failed"), row(4, "complete"), row(5, "running")];
  assert.deepEqual(plain(curveSteps(steps).map((each) => each.step)), [1, 4]);
  assert.equal(curvePath([1, null, 3, 2], [1, 3], 116), "M8.0 53.0M74.7 24.0L108.0 38.5");
  assert.equal(curvePath([5], [5, 5], 116), "M108.0 38.5");
  assert.deepEqual(plain(curveRange([9, null, 1, 1.2, 1.1], 3)), [1, 3.5999999999999996], "a slow first step does not count");
  assert.deepEqual(plain(curveRange([9, null, 1])), [1, 9]);
});

test("a trace has the names of workers and an event for each operation that has ended", () => {
  const ops = [op(2, "1F0", 11, 11.5), op(1, "0F0", 10, 11), op(1, "0A0", 12, 12.25), op(1, "0B0", 13, null)];
  const { traceEvents, displayTimeUnit } = plain(chromeTrace(ops, nameOf));
  assert.equal(displayTimeUnit, "ms");
  assert.deepEqual(
    traceEvents.filter(({ name }) => name === "process_name").map(({ pid, args }) => [pid, args.name]),
    [[1, "worker1"], [2, "worker2"]],
  );
  assert.deepEqual(
    traceEvents.filter(({ ph }) => ph === "X").map(({ name, pid, ts, dur }) => [name, pid, ts, dur]),
    [["F0", 2, 1e6, 5e5], ["F0", 1, 0, 1e6], ["A", 1, 2e6, 2.5e5]],
  );
});
