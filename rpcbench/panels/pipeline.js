// Pipeline timeline: a lane per worker, a block per operation with its micro-batch's number. While a step runs, the
// step before it stands pale to the right of the moving front, so the picture is never empty and keeps its scale.

const [START, END, AXIS, TALL] = [132, 84, 30, 424];
const NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", R: "recompute" };
const kindOf = (op) => (op in NAMES ? op : "other");
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);

// 1, 1.2, 1.5, 2 … times a power of ten: the scale of the time axis changes seldom
function roundUp(seconds) {
  const power = 10 ** Math.floor(Math.log10(seconds));
  return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= seconds * 0.999) * power;
}

function duration(seconds, unit = seconds) {
  if (unit >= 1) return `${+seconds.toPrecision(3)} s`;
  return unit >= 1e-3 ? `${+(seconds * 1e3).toPrecision(3)} ms` : `${+(seconds * 1e6).toPrecision(3)} µs`;
}

function block(op, step, scale, y, tall, pale) {
  const [from, to] = [op.begin - step.begin, (op.end ?? step.end) - step.begin];
  const [x, wide] = [scale(from), Math.max(1.5, scale(to) - scale(from) - 0.8)];
  const words = `${NAMES[op.op] ?? op.op} of micro-batch ${op.microbatch}, stage ${op.stage}, step ${op.step}`;
  const time = op.end === null ? "runs" : duration(to - from);
  const node = svg("g", {
    class: `rb-op rb-op-${kindOf(op.op)} ${pale ? "rb-pale" : ""} ${op.end === null ? "rb-runs" : ""}`,
  });
  node.append(tip(`${words}: ${time}`));
  node.append(svg("rect", { x, y, width: wide, height: tall, rx: Math.min(3, wide / 3) }));
  const room = wide >= 5 + 7 * String(op.microbatch).length && tall >= 12;
  if (room && !pale) node.append(label(x + wide / 2, y + tall / 2 + 4, op.microbatch, "rb-number"));
  return node;
}

function lanesOf(view, shown, measured) {
  const ids = new Set(Object.values(view.lanes).map((lane) => lane.worker));
  return [...ids]
    .sort((a, b) => a - b)
    .map((id) => {
      const [now, full] = [shown, measured].map((step) => view.lanes[`${step?.step}/${id}`]);
      return { id, worker: view.workers[id], stages: now?.stages ?? full?.stages ?? [], busy: full?.busy ?? null };
    });
}

function laneHead({ id, worker, stages, busy }, y, pitch, width) {
  const roomy = pitch >= 34;
  const run = many(stages.length, "stage").replace(/^\d+ /, "") + (stages.length ? ` ${stages.join(", ")}` : " –");
  const middle = y + pitch / 2;
  const full = 34;
  return svg(
    "g",
    { class: `rb-lane rb-is-${worker.state}`, "data-worker": id },
    tip(`${worker.name} (${worker.state}), ${run}, busy ${percent(busy)}`),
    svg("rect", { class: "rb-track", x: START, y: y + 1, width: width - START - END, height: pitch - 2, rx: 3 }),
    label(12, roomy ? middle - 2 : middle + 4, short(worker.name, roomy ? 14 : 11), "rb-worker rb-start"),
    roomy
      ? label(12, middle + 13, short(run, 18), "rb-note")
      : label(98, middle + 4, short(stages.join(","), 4), "rb-note"),
    svg("rect", { class: "rb-track", x: width - 74, y: middle - 3, width: full, height: 6, rx: 3 }),
    svg("rect", {
      class: "rb-busy",
      x: width - 74,
      y: middle - 3,
      width: full * Math.min(1, busy ?? 0),
      height: 6,
      rx: 3,
    }),
    label(width - 6, middle + 4, busy === null ? "–" : `${Math.round(100 * busy)}%`, "rb-note rb-end"),
  );
}

function axis(span, scale, y, width) {
  const unit = roundUp(span / 6);
  const ticks = [];
  for (let at = 0; at <= span * 1.0001; at += unit) ticks.push(at);
  return svg(
    "g",
    { class: "rb-axis" },
    ...ticks.map((at) => svg("line", { x1: scale(at), x2: scale(at), y1: 0, y2: y + 4 })),
    ...ticks.map((at) => label(scale(at), y + 17, duration(at, span), "rb-note rb-center")),
    label(width - 6, y + 17, "busy", "rb-note rb-end"),
  );
}

// Idle share of the latest complete steps as small columns; a full column is a step without any work.
function history(steps) {
  return steps.map((step, i) => {
    const column = (kind, tall) => svg("rect", { class: kind, x: i * 7, y: 18 - tall, width: 5, height: tall });
    const words = `step ${step.step}: idle ${percent(step.idle)}`;
    return svg("g", {}, tip(words), column("rb-track", 18), column("rb-past", 18 * step.idle));
  });
}

const swatch = (kind) =>
  svg("g", { class: `rb-op rb-op-${kind}` }, svg("rect", { x: -8, y: -6, width: 16, height: 12, rx: 3 }));

// Where lanes and times lie for one picture; `key` changes with anything that moves them all.
function geometry(lanes, width, span) {
  const pitch = Math.max(12, Math.min(56, Math.floor(TALL / lanes.length)));
  const edge = pitch > 30 ? 5 : pitch > 18 ? 3 : 2;
  const tops = new Map(lanes.map((lane, i) => [lane.id, i * pitch]));
  return {
    pitch,
    tall: pitch - 2 * edge,
    bottom: lanes.length * pitch,
    scale: (seconds) => START + ((width - START - END) * seconds) / span,
    top: (id) => tops.get(id),
    y: (id) => tops.get(id) + edge,
    key: `${width} ${span} ${lanes.map((lane) => lane.id).join()}`,
  };
}

function headline(frame, shown, measured, workers) {
  const [idle, when] = [percent(measured?.idle ?? null), measured ? ` in step ${measured.step}` : ""];
  const took = shown ? duration(shown.end - shown.begin) : "–";
  const state = shown ? (shown.state === "running" ? "so far" : "in all") : "";
  frame.say([`step ${shown?.step ?? "–"}`, ""], [idle, `idle${when}`, "rb-big"], [took, state], ...leftOut(workers));
  frame.empty(
    shown ? null : ["No pipeline step yet. Run one: ", "Pipeline(stages, microbatches=8, loss_fn=…).step(x, y)"],
  );
  const words = shown
    ? `Step ${shown.step}, ${shown.state}: ${shown.ops} operations. Idle ${idle}${when}.`
    : "No step yet.";
  frame.describe(words);
}

// The blocks of one step, those that `wanted` picks.
function drawStep(parent, ops, step, at, pale, wanted) {
  const items = Object.entries(ops)
    .filter(([, op]) => op.step === step.step && wanted(op))
    .map(([key, op]) => ({ key, parts: [at.key, op, step.begin, op.end ?? step.end], op }));
  join(parent, items, (_, { op }) => block(op, step, at.scale, at.y(op.worker), at.tall, pale));
}

function drawLanes(parent, lanes, at, width) {
  const items = lanes.map((lane) => ({
    key: lane.id,
    parts: [at.key, lane.busy, lane.worker, lane.stages.join()],
    lane,
  }));
  join(parent, items, (id, { lane }) => laneHead(lane, at.top(id), at.pitch, width));
}

// The legend: forward and backward, and each other kind from when it is first seen.
function legend(frame) {
  const kinds = new Set();
  return (ops) => {
    const before = kinds.size;
    for (const op of ops) kinds.add(kindOf(op));
    if (kinds.size > before) frame.explain([...kinds].map((kind) => [swatch(kind), NAMES[kind] ?? "other"]));
  };
}

export default panel("pipeline", "Pipeline", (frame) => {
  const [rules, heads, pale, blocks] = Array.from({ length: 4 }, () => svg("g"));
  const front = svg("line", { class: "rb-front" });
  const past = svg("svg", { class: "rb-history", width: 56, height: 18, "aria-hidden": "true" });
  const explain = legend(frame);
  const picture = svg("g", {}, heads, rules, pale, blocks, front);
  frame.picture.append(picture);
  frame.head.append(past);
  explain(["F", "B"]);
  let span = 0;

  return (view, width) => {
    const steps = Object.values(view.steps).sort((a, b) => a.begin - b.begin);
    const complete = steps.filter((step) => step.state === "complete");
    const [shown, before, measured] = [steps.at(-1), steps.at(-2), complete.at(-1)];
    headline(frame, shown, measured, view.workers);
    past.replaceChildren(...history(complete));
    set(picture, { style: shown ? null : "display:none" });
    if (!shown) return frame.size(width, 140);

    const now = shown.end - shown.begin;
    const need = roundUp(Math.max(now, before ? before.end - before.begin : 0, 1e-6));
    if (need > span || need < 0.6 * span) span = need;
    const lanes = lanesOf(view, shown, measured);
    const at = geometry(lanes, width, span);
    const runs = shown.state === "running";
    frame.size(width, at.bottom + AXIS);
    drawLanes(heads, lanes, at, width);
    join(rules, [{ key: "axis", parts: [at.key] }], () => axis(span, at.scale, at.bottom, width));
    drawStep(pale, view.ops, before ?? shown, at, true, (op) => runs && before && op.begin - before.begin > now);
    drawStep(blocks, view.ops, shown, at, false, () => true);
    const x = at.scale(now);
    set(front, { x1: x, x2: x, y1: 0, y2: at.bottom, style: runs ? null : "display:none" });
    explain(Object.values(view.ops).map((op) => op.op));
  };
});
