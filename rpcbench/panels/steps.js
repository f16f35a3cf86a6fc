// The steps of a pipeline, worked out without drawing: those seen so far, the one to show, the ideal schedule, and the causes
// of the bubble, which is the share of the workers' time in which no operation ran. All functions here are pure.

const [MAX_STEPS, MAX_OPS] = [300, 60_000]; // that a panel remembers
const WINDOW = 6; // steps that a narrower time axis must suit

const durationOf = ({ begin, end }) => end - begin; // of a step, or of an operation that has ended
const total = (rows, of) => rows.reduce((sum, row) => sum + of(row), 0);
const opsOf = (step) => step.rows.map(([, op]) => op);

// Returns the ended operations of each worker in the order of their begin, by id: [[id, ops]].
function lanesInOrder(ops) {
  const lanes = new Map();
  for (const op of ops.filter((op) => op.end !== null).sort((a, b) => a.begin - b.begin)) {
    if (!lanes.has(op.worker)) lanes.set(op.worker, []);
    lanes.get(op.worker).push(op);
  }
  return [...lanes].sort(([a], [b]) => a - b);
}

// ---- needs, as in `rpcbench.pipeline.ops`: a whole backward gives the same result as its first half

const resultKey = (stage, kind, microbatch) => `${stage}${kind === "B" ? "I" : kind}${microbatch}`;
const resultOf = ({ stage, op, microbatch }) => resultKey(stage, op, microbatch);

// Returns the keys of the results that an operation needs; the one from another stage comes last.
function needsOf({ stage, op, microbatch }, stages) {
  const of = (at, kind) => resultKey(at, kind, microbatch);
  if (op === "F") return stage ? [of(stage - 1, "F")] : [];
  if (op === "W") return [of(stage, "I")];
  if (op === "R") return [of(stage, "F")];
  if (op === "B" || op === "I") return [of(stage, "F"), ...(stage + 1 < stages ? [of(stage + 1, "I")] : [])];
  return [];
}

const stageCount = (ops) => 1 + ops.reduce((most, op) => Math.max(most, op.stage), 0);

// ---- the ideal schedule

const COSTS = { F: 1, B: 2, I: 1, W: 1, R: 1 }; // as `rpcbench.pipeline.simulate`: other operations take no time

// Returns the same operations in the same order on equally fast stages, with transfers that take no time and as much work in
// all: `spans` ([begin, end] of each operation, in seconds) and `seconds`. Null if an operation waits for a missing one.
function idealOf(ops) {
  const [lanes, stages, ended, spans] = [lanesInOrder(ops), stageCount(ops), new Map(), new Map()];
  const [next, clock] = [lanes.map(() => 0), lanes.map(() => 0)];
  for (let progress = true; progress; ) {
    progress = false;
    lanes.forEach(([, own], lane) => {
      for (let op = own[next[lane]]; op; op = own[++next[lane]]) {
        const came = needsOf(op, stages).map((key) => ended.get(key));
        if (came.includes(undefined)) return;
        const begin = Math.max(clock[lane], ...came);
        clock[lane] = begin + (COSTS[op.op] ?? 0);
        spans.set(op, [begin, clock[lane]]);
        ended.set(resultOf(op), clock[lane]);
        progress = true;
      }
    });
  }
  if (lanes.some(([, own], lane) => next[lane] < own.length)) return null;
  const timed = [...spans.keys()].filter((op) => COSTS[op.op]);
  const cost = total(timed, (op) => COSTS[op.op]);
  const unit = cost ? total(timed, durationOf) / cost : 0;
  for (const [op, [begin, end]] of spans) spans.set(op, [begin * unit, end * unit]);
  return { spans, seconds: Math.max(0, ...clock) * unit };
}

// ---- the bubble

const latestOf = (ops) => ops.reduce((a, b) => (a && a.end >= b.end ? a : b), null);

// Returns for each operation the last one of other workers that it depends on, null if there is none.
function sourcesOf(lanes, ops) {
  const [stages, made, arrived] = [stageCount(ops), new Map(), new Map()];
  for (const [, own] of lanes) {
    own.forEach((op, i) => {
      made.set(resultOf(op), op);
      if (op.op !== "A" || !i) return; // an all-reduce begins when all replicas of the stage have come to it
      if (!arrived.has(op.stage)) arrived.set(op.stage, []);
      arrived.get(op.stage).push(own[i - 1]);
    });
  }
  const given = (op) => (op.op === "A" ? (arrived.get(op.stage) ?? []) : needsOf(op, stages).map((key) => made.get(key)));
  return new Map(ops.map((op) => [op, latestOf(given(op).filter((source) => source && source.worker !== op.worker))]));
}

// Returns the critical path of a step, from its end to its begin: [operation, cause, lag] each. The lag is the time between the
// operation and the one that it could not begin before: "transfer" after one of another worker, else "overhead".
function criticalPath(lanes, sources, first) {
  const before = new Map(lanes.flatMap(([, own]) => own.map((op, i) => [op, own[i - 1] ?? null])));
  const path = [];
  for (let op = latestOf([...before.keys()]); op; ) {
    const [own, source] = [before.get(op), sources.get(op)];
    const last = latestOf([source, own].filter(Boolean));
    path.push([op, last && last === source ? "transfer" : "overhead", Math.max(0, op.begin - (last?.end ?? first))]);
    op = last;
  }
  return path;
}

const largestFirst = (sums) => [...sums].filter(([, sum]) => sum > 0).sort(([, a], [, b]) => b - a);

// Returns the bubble of a step that has ended, as a share, and its causes. `parts` are [cause, share] whose sum is the bubble:
// "minimum", which the schedule cannot avoid, and the causes that made the step longer than the ideal one, by the time that
// each takes on the critical path beyond the ideal: the id of a slow worker, "transfer" or "overhead". `waits`: how much longer
// than the minimum each worker was idle, and the largest of those causes, [cause, share of the step], or null.
function bubbleOf(ops) {
  const ended = ops.filter((op) => op.end !== null);
  if (!ended.length) return null;
  const [lanes, ideal] = [lanesInOrder(ended), idealOf(ended)];
  const sources = sourcesOf(lanes, ended);
  const first = Math.min(...ended.map((op) => op.begin));
  const seconds = Math.max(...ended.map((op) => op.end)) - first;
  const share = (time) => time / (lanes.length * seconds || 1);
  const bubble = seconds ? 1 - share(total(ended, durationOf)) : 0;
  const work = total(ended.filter((op) => COSTS[op.op]), durationOf);
  const minimum = ideal?.seconds ? 1 - work / (lanes.length * ideal.seconds) : null;
  const sums = new Map();
  const add = (cause, time) => sums.set(cause, (sums.get(cause) ?? 0) + time);
  for (const [op, cause, lag] of criticalPath(lanes, sources, first)) {
    const [begin, end] = ideal?.spans.get(op) ?? [0, 0];
    if (COSTS[op.op]) add(op.worker, durationOf(op) - (end - begin));
    add(cause, lag);
  }
  const lost = largestFirst(sums);
  const all = total(lost, ([, time]) => time);
  const above = all ? Math.max(0, bubble - (minimum ?? 0)) : 0;
  const least = bubble - above;
  const parts = [["minimum", least], ...lost.map(([cause, time]) => [cause, (above * time) / all])];
  const waits = lanes.map(([worker, own]) => {
    const others = lost.filter(([cause]) => cause !== worker);
    const idle = seconds ? 1 - total(own, durationOf) / seconds : 0;
    const most = others.length ? (idle - least) * (others[0][1] / total(others, ([, time]) => time)) : 0;
    return [worker, most > 0 ? [others[0][0], most] : null];
  });
  return { bubble, minimum, ideal, parts, waits: new Map(waits) };
}

// Returns whole percentages of shares whose sum is that of the sum: the largest remainders are rounded up.
function wholePercents(shares) {
  const exact = shares.map((share) => 100 * share);
  const whole = exact.map(Math.floor);
  let left = Math.round(total(exact, (each) => each)) - total(whole, (each) => each);
  const order = exact.map((each, i) => [each - whole[i], i]).sort(([a], [b]) => b - a);
  for (const [, i] of order) if (left-- > 0) whole[i] += 1;
  return whole;
}

// Returns the measures of a complete step, worked out once; null of any other.
const measuresOf = (step) => (step.state === "complete" ? (step.measures ??= bubbleOf(opsOf(step))) : null);

// ---- one micro-batch

// Returns the ways of a micro-batch through the stages: [operation, the operation that uses its result] each.
function flowOf(ops, microbatch) {
  const own = ops.filter((op) => op.microbatch === microbatch && op.op !== "A");
  const [stages, made] = [stageCount(ops), new Map(own.map((op) => [resultOf(op), op]))];
  return own
    .map((op) => [made.get(needsOf(op, stages).at(-1)), op])
    .filter(([source, op]) => source && source !== op && source.end !== null);
}

// ---- which step to show

// The steps seen so far, by begin, each with its lanes and operations. A running step is dropped if the view no longer has it,
// as its end is unknown. All steps are dropped when the view has none.
class StepHistory {
  constructor() {
    this.steps = new Map();
    this.run = "";
  }

  add({ steps, lanes, ops }) {
    const rows = new Map();
    for (const [key, op] of Object.entries(ops)) {
      if (!rows.has(op.step)) rows.set(op.step, []);
      rows.get(op.step).push([key, op]);
    }
    const run = Object.values(steps)[0]?.run ?? "";
    if (!rows.size || run !== this.run) this.steps.clear(); // a new run counts anew
    this.run = run;
    for (const [number, { state }] of this.steps) if (state === "running" && !rows.has(number)) this.steps.delete(number);
    for (const [number, own] of rows) {
      const before = this.steps.get(number);
      if (before?.state === "complete" && before.row === steps[number]) continue; // so that its measures stay
      const itsLanes = Object.values(lanes).filter((lane) => lane.step === number);
      this.steps.set(number, { ...steps[number], row: steps[number], lanes: itsLanes, rows: own });
    }
    const sorted = [...this.steps.values()].sort((a, b) => a.begin - b.begin);
    let count = total(sorted, (step) => step.rows.length);
    while (sorted.length > MAX_STEPS || (count > MAX_OPS && sorted.length > 1)) {
      const old = sorted.shift();
      count -= old.rows.length;
      this.steps.delete(old.step);
    }
    return sorted;
  }
}

const isOver = (step) => step.state !== "running";

// Returns the step to show: the chosen one; with the live cursor the newest; else the last finished one that trains, or where
// none does the last finished one. While the first step runs there is only that.
function stepToShow(steps, chosen, live) {
  const found = steps.find((step) => step.step === chosen);
  if (found || live) return found ?? steps.at(-1);
  const over = steps.filter(isOver);
  return over.findLast((step) => step.trains) ?? over.at(-1) ?? steps.at(-1);
}

// Returns the new length of the time axis, in seconds: it grows at once, and shrinks when the last few steps need far less.
function axisSpan(span, steps, shown) {
  const latest = steps.filter((step) => step.trains === shown.trains && isOver(step)).slice(-WINDOW);
  const need = roundUp(Math.max(1e-6, ...[...latest, shown].map(durationOf)));
  return need > span || need < 0.5 * span ? need : span;
}

// ---- zoom: the part of the time axis that is shown, { from, to } in seconds; null shows all

function zoomed(part, factor, at, span) {
  const { from, to } = part ?? { from: 0, to: span };
  const wide = Math.max(span / 1000, (to - from) * factor);
  if (wide >= span * 0.999) return null;
  const start = Math.min(span - wide, Math.max(0, at - ((at - from) * wide) / (to - from)));
  return { from: start, to: start + wide };
}

function panned(part, by, span) {
  if (!part) return null;
  const start = Math.min(span - (part.to - part.from), Math.max(0, part.from + by));
  return { from: start, to: start + part.to - part.from };
}

// ---- a trace for Perfetto, as `rpcbench.pipeline.timeline` writes it

const TRACK = 3;

function chromeTrace(ops, names) {
  const ended = ops.filter((op) => op.end !== null);
  const began = ended.reduce((least, op) => Math.min(least, op.begin), Number.POSITIVE_INFINITY);
  const time = (seconds) => Math.round(seconds * 1e9) / 1e3;
  const events = ended.map((op) => {
    const { step, stage, microbatch, bytes, held } = op;
    const at = { pid: op.worker, tid: TRACK, ts: time(op.begin - began), dur: time(op.end - op.begin) };
    const name = op.op === "A" ? "A" : `${op.op}${microbatch}`;
    return { ph: "X", name, cat: "pipeline", ...at, args: { step, stage, op: op.op, microbatch, bytes, held } };
  });
  const heads = [...new Set(ended.map((op) => op.worker))]
    .sort((a, b) => a - b)
    .flatMap((pid) => [
      { ph: "M", name: "process_name", pid, args: { name: names(pid) } },
      { ph: "M", name: "thread_name", pid, tid: TRACK, args: { name: "pipeline" } },
    ]);
  return { traceEvents: [...heads, ...events], displayTimeUnit: "ms" };
}
