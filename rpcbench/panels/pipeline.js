// The pipeline panel: a timeline with a lane for each worker and a block for each operation, with its letter and micro-batch.
// Forwards are at the top of a lane and backwards at the bottom, so a user can tell them apart without colours. A dashed line
// is time in which the worker waits; the area below the blocks is the memory that its stages hold.
// While a step runs, the pale blocks to the right of the moving front are those of the step before: the picture is never empty
// and keeps its scale. The slider goes back to earlier steps.

const [START, END, AXIS, LANES_HEIGHT] = [150, 84, 30, 424]; // pixels: left and right of the lanes, the axis, all lanes
const [MAX_STEPS, MEMORY] = [64, 11];
const NAMES = {
  F: "forward",
  B: "backward",
  I: "input gradient",
  W: "weight gradient",
  R: "recompute",
  U: "update",
  A: "all-reduce",
};
const kindOf = (op) => (op in NAMES ? op : "other");
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);
const stateOf = (op) => (op.failed ? "failed" : op.end === null ? "runs" : "ended");

// Rounds up to 1, 1.2, 1.5, 2 … times a power of ten, so that the scale of the time axis rarely changes.
function roundUp(seconds) {
  const power = 10 ** Math.floor(Math.log10(seconds));
  return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= seconds * 0.999) * power;
}

// Returns a time as text, in the unit that fits `unit`: ticks of one axis have one unit.
function formatDuration(seconds, unit = seconds) {
  if (unit >= 1) return `${+seconds.toPrecision(3)} s`;
  return unit >= 1e-3 ? `${+(seconds * 1e3).toPrecision(3)} ms` : `${+(seconds * 1e6).toPrecision(3)} µs`;
}

// The part of a lane's height that each kind of operation takes: [from, to].
const VERTICAL_SPAN = { F: [0, 0.78], R: [0, 0.5], B: [0.22, 1], I: [0.22, 1], W: [0.5, 1], A: [0.3, 0.7], other: [0.22, 0.78] };

// Draws the block of an operation; `at` is the geometry.
function block(key, op, step, at, pale) {
  const [from, to] = [op.begin - step.begin, (op.end ?? step.end) - step.begin];
  const [x, wide] = [at.scale(from), Math.max(1.5, at.scale(to) - at.scale(from) - 0.8)];
  const [high, low] = VERTICAL_SPAN[kindOf(op.op)];
  const [y, tall] = [at.y(op.worker) + high * at.tall, (low - high) * at.tall];
  const number = op.op === "A" ? "" : op.microbatch; // an all-reduce belongs to no micro-batch
  const of = op.op === "A" ? "" : ` of micro-batch ${number}`;
  const text = `${NAMES[op.op] ?? op.op}${of}, stage ${op.stage}, step ${op.step}`;
  const time = op.end === null ? "runs" : `${formatDuration(to - from)}; then the stage holds ${formatBytes(op.held)}`;
  const state = stateOf(op);
  const node = svg("g", {
    class: `rb-op rb-op-${kindOf(op.op)} ${pale ? "rb-pale" : ""} rb-${state}`,
    "data-op": key,
    "data-state": state,
  });
  node.append(tip(`${text}: ${state === "failed" ? "failed after " : ""}${time}`));
  node.append(svg("rect", { x, y, width: wide, height: tall, rx: Math.min(3, wide / 3) }));
  const mark = state === "failed" ? "!" : "";
  const fitting = [`${mark}${op.op}${number}`, `${mark || number}`].find(
    (each) => wide >= 5 + 7 * each.length && tall >= 12,
  );
  if (fitting && !pale) node.append(label(x + wide / 2, y + tall / 2 + 4, fitting, "rb-number"));
  return node;
}

// Returns the lanes: each worker's part of the step `shown`, and how busy it was in the step `measured`.
function lanesOf(view, shown, measured) {
  const ids = new Set([...shown.lanes, ...(measured?.lanes ?? [])].map((lane) => lane.worker));
  return [...ids]
    .sort((a, b) => a - b)
    .map((id) => {
      const [now, full] = [shown, measured].map((step) => step?.lanes.find((lane) => lane.worker === id) ?? null);
      const worker = view.workers[id] ?? { id, name: `id ${id}`, state: "unknown" };
      const { stages, replica } = (now?.stages.length ? now : full) ?? { stages: [] };
      return { id, worker, now, stages, replica: replica ?? null, busy: full?.busy ?? null };
    });
}

// Returns the text of the operation that an idle worker waits for. A worker with one stage needs no stage number here.
const waitsFor = ({ now, stages }) =>
  now?.next ? `, waits for ${stages.length > 1 ? now.next : now.next.replace(/^\d+/, "")}` : "";

// Draws a lane's background, the worker's name and stages, and how busy it was.
function laneHead(lane, y, at, width) {
  const { id, worker, stages, replica, busy, now } = lane;
  const { pitch } = at;
  const [roomy, memory] = [pitch >= 34, at.memory > 0];
  const stageText = (stages.length === 1 ? "stage" : "stages") + (stages.length ? ` ${stages.join(", ")}` : " –");
  const role = replica === null ? stageText : `${stageText}, replica ${replica}`;
  const middle = y + pitch / 2;
  const barWidth = 34;
  const holds = now ? `holds ${formatBytes(now.held)}, ${formatBytes(now.peak)} at most` : "";
  const data = { "data-worker": id, "data-done": now?.done, "data-planned": now?.planned, "data-next": now?.next };
  return svg(
    "g",
    { class: `rb-lane rb-is-${worker.state}`, "data-replica": replica, ...data, "data-held": now?.held, "data-peak": now?.peak },
    tip(`${worker.name} (${worker.state}), ${role}${waitsFor(lane)}, busy ${percent(busy)}${now ? `, ${holds}` : ""}`),
    svg("rect", { class: "rb-track", x: START, y: y + 1, width: width - START - END, height: pitch - 2, rx: 3 }),
    label(12, memory ? middle - 10 : roomy ? middle - 2 : middle + 4, shorten(worker.name, roomy ? 17 : 12), "rb-worker"),
    roomy
      ? label(12, memory ? middle + 5 : middle + 13, shorten(role + waitsFor(lane), 24), "rb-note")
      : label(108, middle + 4, shorten(stages.join(","), 5), "rb-note"),
    memory && now ? label(12, middle + 19, `peak ${formatBytes(now.peak)}`, "rb-note") : "",
    svg("rect", { class: "rb-track", x: width - 74, y: middle - 3, width: barWidth, height: 6, rx: 3 }),
    svg("rect", {
      class: "rb-busy",
      x: width - 74,
      y: middle - 3,
      width: barWidth * Math.min(1, busy ?? 0),
      height: 6,
      rx: 3,
    }),
    label(width - 6, middle + 4, busy === null ? "–" : `${Math.round(100 * busy)}%`, "rb-note rb-end"),
  );
}

// Draws a worker's time in the step as a line, which blocks cover, and the memory that its stages hold as an area below. `most`
// is the largest such memory of all workers.
function laneTrace(lane, ops, step, at, most) {
  const [from, to] = [at.scale(0), at.scale(step.end - step.begin)];
  const middle = at.y(lane.id) + at.tall / 2;
  const line = svg("line", { class: "rb-waits", x1: from, x2: to, y1: middle, y2: middle });
  if (!at.memory || !most) return svg("g", {}, line);
  const floor = at.y(lane.id) + at.tall + at.memory;
  const stages = new Map();
  let [path, height] = [`M${from} ${floor}`, floor];
  for (const op of ops.filter((op) => op.end !== null).sort((a, b) => a.end - b.end)) {
    stages.set(op.stage, op.held);
    const x = at.scale(op.end - step.begin);
    path += ` L${x} ${height}`;
    height = floor - ((at.memory - 2) * [...stages.values()].reduce((sum, held) => sum + held, 0)) / most;
    path += ` L${x} ${height}`;
  }
  return svg("g", {}, line, svg("path", { class: "rb-memory", d: `${path} L${to} ${height} L${to} ${floor} Z` }));
}

function axis(span, scale, y, width) {
  const unit = roundUp(span / 6);
  const ticks = [];
  for (let at = 0; at <= span * 1.0001; at += unit) ticks.push(at);
  return svg(
    "g",
    { class: "rb-axis" },
    ...ticks.map((at) => svg("line", { x1: scale(at), x2: scale(at), y1: 0, y2: y + 4 })),
    ...ticks.map((at) => label(scale(at), y + 17, formatDuration(at, span), "rb-note rb-center")),
    label(width - 6, y + 17, "busy", "rb-note rb-end"),
  );
}

// Draws the idle share of the latest complete steps as small columns: a full column is a step without any work, the line is the
// ideal share.
function idleColumns(steps) {
  return steps.map((step, i) => {
    const column = (kind, tall) => svg("rect", { class: kind, x: i * 7, y: 18 - tall, width: 5, height: tall });
    const text = `step ${step.step}: idle ${percent(step.idle)}, ideal ${percent(step.ideal)}`;
    const y = 18 - 18 * (step.ideal ?? 0);
    const ideal = svg("line", { class: "rb-ideal", x1: i * 7 - 0.5, x2: i * 7 + 5.5, y1: y, y2: y });
    return svg("g", {}, tip(text), column("rb-track", 18), column("rb-past", 18 * step.idle), ideal);
  });
}

const swatch = (kind) => {
  const [high, low] = VERTICAL_SPAN[kind];
  const rect = svg("rect", { x: -8, y: 16 * high - 8, width: 16, height: 16 * (low - high), rx: 3 });
  const letter = label(0, 8 * (high + low) - 4, kind === "other" ? "?" : kind, "rb-number");
  return svg("g", { class: `rb-op rb-op-${kind}` }, rect, letter);
};
// The entries of the legend that do not depend on the kinds of operations.
const fixedLegend = () => [
  [svg("line", { class: "rb-waits", x1: -8, x2: 8, y1: 0, y2: 0 }), "waits"],
  [svg("path", { class: "rb-memory", d: "M-8 6 L-8 1 L0 1 L0 -4 L8 -4 L8 6 Z" }), "activations held"],
];

// Returns the positions of lanes and times in one picture; `key` changes with anything that moves all of them.
function geometry(lanes, width, span) {
  const pitch = Math.max(12, Math.min(64, Math.floor(LANES_HEIGHT / lanes.length)));
  const edge = pitch > 30 ? 5 : pitch > 18 ? 3 : 2;
  const memory = pitch >= 50 ? MEMORY : 0;
  const tops = new Map(lanes.map((lane, i) => [lane.id, i * pitch]));
  return {
    pitch,
    memory,
    tall: pitch - 2 * edge - memory,
    bottom: lanes.length * pitch,
    scale: (seconds) => START + ((width - START - END) * seconds) / span,
    top: (id) => tops.get(id),
    y: (id) => tops.get(id) + edge,
    key: `${width} ${span} ${lanes.map((lane) => lane.id).join()}`,
  };
}

const STATES = { running: "so far", complete: "in all", failed: "until it failed" };

function headline(frame, shown, measured, workers) {
  const [idle, ideal] = [percent(measured?.idle ?? null), percent(measured?.ideal ?? null)];
  const when = measured && measured.step !== shown.step ? ` in step ${measured.step}` : "";
  const length = shown ? formatDuration(shown.end - shown.begin) : "–";
  const [state, kind] = [STATES[shown?.state] ?? "", shown?.state === "failed" ? "rb-warn" : ""];
  const figures = [[idle, `idle${when}`, "rb-big"], [ideal, "ideal"]];
  frame.showStats([`step ${shown?.step ?? "–"}`, ""], ...figures, [length, state, kind], ...leftOutStats(workers));
  frame.showHint(
    shown ? null : ["No pipeline step yet. Run one: ", "Pipeline(stages, microbatches=8, loss_fn=…).step(x, y)"],
  );
  const text = shown
    ? `Step ${shown.step}, ${shown.state}: ${plural(shown.ops, "operation")}. Idle ${idle}${when}, ideal ${ideal}.`
    : "No step yet.";
  frame.describe(text);
}

// Draws the blocks of one step, those for which `keep` is true.
function drawStep(parent, step, at, pale, keep) {
  const items = step.rows
    .filter(([, op]) => keep(op))
    .map(([key, op]) => ({ key, parts: [at.key, op, step.begin, op.end ?? step.end], op }));
  join(parent, items, (key, { op }) => block(key, op, step, at, pale));
}

function drawLanes(parent, traces, lanes, step, at, width) {
  const heads = lanes.map((lane) => ({
    key: lane.id,
    parts: [at.key, lane.busy, lane.worker, lane.now, lane.stages.join()],
    lane,
  }));
  join(parent, heads, (id, { lane }) => laneHead(lane, at.top(id), at, width));
  const most = Math.max(0, ...lanes.map(({ now }) => now?.peak ?? 0));
  const lines = lanes
    .filter(({ now }) => now)
    .map((lane) => ({ key: lane.id, parts: [at.key, lane.now, step.begin, step.end, most], lane }));
  join(traces, lines, (id, { lane }) => {
    const own = step.rows.map(([, op]) => op).filter((op) => op.worker === id);
    return laneTrace(lane, own, step, at, most);
  });
}

// Returns a function that shows the legend. It adds each kind of operation when it is first seen, and keeps it.
function legend(frame) {
  const kinds = new Set();
  return (ops) => {
    const before = kinds.size;
    for (const op of ops) kinds.add(kindOf(op));
    if (kinds.size > before)
      frame.showLegend([...[...kinds].map((kind) => [swatch(kind), NAMES[kind] ?? "other"]), ...fixedLegend()]);
  };
}

// The steps seen so far, by begin, each with its lanes and operations; at most `MAX_STEPS`. A running step is dropped if the view
// no longer has it, as its end is unknown. All steps are dropped when the view has none.
class StepHistory {
  constructor() {
    this.steps = new Map();
  }

  add({ steps, lanes, ops }) {
    const rows = new Map();
    for (const [key, op] of Object.entries(ops)) {
      if (!rows.has(op.step)) rows.set(op.step, []);
      rows.get(op.step).push([key, op]);
    }
    if (!rows.size) this.steps.clear();
    for (const [number, { state }] of this.steps) if (state === "running" && !rows.has(number)) this.steps.delete(number);
    for (const [number, own] of rows) {
      const itsLanes = Object.values(lanes).filter((lane) => lane.step === number);
      this.steps.set(number, { ...steps[number], lanes: itsLanes, rows: own });
    }
    const sorted = [...this.steps.values()].sort((a, b) => a.begin - b.begin);
    for (const old of sorted.splice(0, sorted.length - MAX_STEPS)) this.steps.delete(old.step);
    return sorted;
  }
}

// Adds the slider. At its right end it follows the newest step; elsewhere it stays at the step that the user chose.
function slider(frame) {
  const range = html("input", { type: "range", class: "rb-slider", min: 0, step: 1, "aria-label": "Step shown" });
  const newest = html("button", { class: "rb-newest", type: "button" }, "newest");
  const box = html("span", { class: "rb-steps" }, range, newest);
  frame.head.append(box);
  let steps = [];
  let pinned = null;
  const choose = (index) => {
    pinned = index >= steps.length - 1 ? null : steps[index].step;
    frame.redraw();
  };
  range.addEventListener("input", () => choose(Number(range.value)));
  newest.addEventListener("click", () => choose(steps.length));
  return (allSteps) => {
    steps = allSteps;
    const found = steps.findIndex((step) => step.step === pinned);
    if (found < 0) pinned = null;
    const index = found < 0 ? steps.length - 1 : found;
    box.hidden = steps.length < 2;
    range.max = Math.max(0, steps.length - 1);
    range.value = Math.max(0, index);
    set(range, { "aria-valuetext": steps.length ? `step ${steps[index].step}${pinned === null ? ", live" : ""}` : null });
    newest.disabled = pinned === null;
    return { shown: steps[index], live: pinned === null };
  };
}

export default panel("pipeline", "Pipeline", (frame) => {
  const [axisLines, heads, traces, paleBlocks, blocks] = Array.from({ length: 5 }, () => svg("g"));
  const front = svg("line", { class: "rb-front" });
  const idleChart = svg("svg", { class: "rb-history", width: 56, height: 18, "aria-hidden": "true" });
  const addKinds = legend(frame);
  const picture = svg("g", {}, heads, axisLines, traces, paleBlocks, blocks, front);
  const history = new StepHistory();
  frame.picture.append(picture);
  frame.head.append(idleChart);
  const choose = slider(frame);
  addKinds(["F", "B"]);
  let span = 0; // seconds of the time axis; it shrinks only if a step needs less than 60 % of it

  return (view, width) => {
    const steps = history.add(view);
    const complete = steps.filter((step) => step.state === "complete");
    const { shown, live } = choose(steps);
    const before = live ? steps.at(-2) : undefined;
    const measured = live ? complete.at(-1) : shown.state === "complete" ? shown : undefined;
    headline(frame, shown, measured, view.workers);
    idleChart.replaceChildren(...idleColumns(Object.values(view.steps).filter((step) => step.state === "complete")));
    set(picture, { style: shown ? null : "display:none" });
    if (!shown) return frame.resize(width, 140);

    const elapsed = shown.end - shown.begin;
    const need = roundUp(Math.max(elapsed, before ? before.end - before.begin : 0, 1e-6));
    if (need > span || need < 0.6 * span) span = need;
    const lanes = lanesOf(view, shown, measured);
    const at = geometry(lanes, width, span);
    const runs = shown.state === "running";
    frame.resize(width, at.bottom + AXIS);
    drawLanes(heads, traces, lanes, shown, at, width);
    join(axisLines, [{ key: "axis", parts: [at.key] }], () => axis(span, at.scale, at.bottom, width));
    drawStep(paleBlocks, before ?? shown, at, true, (op) => runs && before && op.begin - before.begin > elapsed);
    drawStep(blocks, shown, at, false, () => true);
    const x = at.scale(elapsed);
    set(front, { x1: x, x2: x, y1: 0, y2: at.bottom, style: runs ? null : "display:none" });
    addKinds(Object.values(view.ops).map((op) => op.op));
  };
});
