// The picture of one pipeline step: a row for each worker and a block for each operation. Forwards are at the top of a row and
// backwards at its bottom, so a user can tell them apart without colours. A dashed line is time in which the worker waits; the
// area below the blocks is the memory that its stages hold, and the pale strip below that is the ideal schedule.

const WORDS = STRINGS.pipeline;
const AXIS = 24; // pixels above the rows
// Pixels: beside the rows, the highest row, and all rows. A narrow picture has no room for the main cause of a worker's waits.
const ROOMY = { left: 150, right: 116, pitch: 84, all: 424 };
const TIGHT = { left: 96, right: 50, pitch: 52, all: 208 };
const BLOCK_LETTER = 7.8; // pixels, the width of a character on a block
const kindOf = (op) => (op in WORDS.kinds ? op : "other");
const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);
const stateOf = (op) => (op.failed ? "failed" : op.end === null ? "runs" : "ended");

// Returns the positions of rows and times in one picture; `key` changes with anything that moves all of them. `part`: that of
// the time axis that is shown, null for all.
function geometry(lanes, width, span, part, ghosts) {
  const isTight = width < NARROW_FRAME;
  const { left, right, pitch: most, all } = isTight ? TIGHT : ROOMY;
  const pitch = Math.max(16, Math.min(most, Math.floor(all / lanes.length)));
  const edge = pitch > 30 ? 4 : pitch > 18 ? 2 : 1;
  const memory = pitch >= 70 ? 11 : pitch >= 50 ? 8 : 0;
  const ghost = !ghosts || pitch < 24 ? 0 : pitch >= 70 ? 12 : pitch >= 40 ? 8 : 5;
  const tops = new Map(lanes.map((lane, i) => [lane.id, i * pitch]));
  const [wide, { from, to }] = [width - left - right, part ?? { from: 0, to: span }];
  const tall = pitch - 2 * edge - memory - ghost;
  return {
    pitch, memory, ghost, tall, wide, from, to, left, right, isTight,
    bottom: lanes.length * pitch,
    scale: (seconds) => (wide * (seconds - from)) / (to - from), // from the left edge of the rows
    top: (id) => tops.get(id),
    y: (id) => tops.get(id) + edge,
    key: `${width} ${from} ${to} ${ghosts} ${lanes.map((lane) => lane.id).join()}`,
  };
}

// The part of a row's height that each kind of operation takes: [from, to]; the others take the middle.
const VERTICAL_SPAN = { F: [0, 0.78], R: [0, 0.5], B: [0.22, 1], I: [0.22, 1], W: [0.5, 1], A: [0.3, 0.7] };
const verticalSpan = (kind) => VERTICAL_SPAN[kind] ?? [0.22, 0.78];

// Returns the place of an operation's block: [x, y, width, height].
function placeOf(op, step, at) {
  const [from, to] = [op.begin, op.end ?? step.end].map((time) => at.scale(time - step.begin));
  const [high, low] = verticalSpan(op.op);
  return [from, at.y(op.worker) + high * at.tall, Math.max(1.5, to - from - 0.8), (low - high) * at.tall];
}

// Returns the longest text that fits on a block, or "". `staged`: its worker has several stages.
function labelOf({ op, stage, microbatch, failed }, wide, tall, staged) {
  const [number, mark] = [op === "A" ? "" : microbatch, failed ? "!" : ""]; // an all-reduce belongs to no micro-batch
  const texts = [...(staged ? [`${mark}${stage}${op}${number}`] : []), `${mark}${op}${number}`, `${mark || number}`];
  return tall < 12 ? "" : (texts.find((text) => wide >= 4 + BLOCK_LETTER * text.length) ?? "");
}

// Draws the block of an operation. Hues by micro-batch are far apart for neighbours, however many there are.
function block(key, op, step, at, pale, staged) {
  const [x, y, width, height] = placeOf(op, step, at);
  const of = op.op === "A" ? "" : ` of micro-batch ${op.microbatch}`;
  const text = `${WORDS.kinds[op.op] ?? op.op}${of}, stage ${op.stage}, step ${op.step}`;
  const held = op.held === null ? "" : `; then the stage holds ${formatBytes(op.held)}`;
  const time = op.end === null ? "runs" : `${formatDuration(durationOf(op))}${held}`;
  const state = stateOf(op);
  const node = svg("g", {
    class: `rb-op rb-op-${kindOf(op.op)} ${pale ? "rb-pale" : ""} rb-${state}`,
    style: `--rb-hue: ${Math.round(op.microbatch * 137.5) % 360}`,
    "data-op": key,
    "data-state": state,
    "data-microbatch": op.op === "A" ? null : op.microbatch,
  });
  node.append(tip(`${text}: ${state === "failed" ? "failed after " : ""}${time}`));
  node.append(svg("rect", { x, y, width, height, rx: Math.min(3, width / 3) }));
  const fitting = pale ? "" : labelOf(op, width, height, staged);
  if (fitting) node.append(label(x + width / 2, y + height / 2 + 4.5, fitting, "rb-number"));
  return node;
}

// Draws the blocks of one step, those for which `keep` is true.
function drawStep(parent, step, at, pale, keep) {
  const staged = new Set(step.lanes.filter((lane) => lane.stages.length > 1).map((lane) => lane.worker));
  const items = step.rows
    .filter(([, op]) => keep(op))
    .map(([key, op]) => ({ key, parts: [at.key, op, step.begin, op.end ?? step.end, staged.has(op.worker)], op }));
  join(parent, items, (key, { op }) => block(key, op, step, at, pale, staged.has(op.worker)));
}

// Returns the rows: each worker's part of the step shown, how busy it was, and the cause of its longest waits. While a step runs a
// worker that has not begun it has an empty row, as in the step `before`.
function lanesOf(view, shown, measures, before) {
  const empty = { done: null, planned: null, next: null, held: 0, peak: 0, busy: null };
  const there = new Set(shown.lanes.map((lane) => lane.worker));
  const absent = (before?.lanes ?? []).filter((lane) => !there.has(lane.worker)).map((lane) => ({ ...lane, ...empty }));
  return [...shown.lanes, ...absent]
    .sort((a, b) => a.worker - b.worker)
    .map((now) => {
      const worker = view.workers[now.worker] ?? { id: now.worker, name: `id ${now.worker}`, state: "unknown" };
      const [cause, share] = measures?.waits.get(now.worker) ?? [null, 0];
      return { id: now.worker, worker, now, cause, share, busy: shown.state === "complete" ? now.busy : null };
    });
}

// Returns the text of the operation that an idle worker waits for. A worker with one stage needs no stage number here.
const waitsFor = ({ next, stages }) => (next ? `, waits for ${stages.length > 1 ? next : next.replace(/^\d+/, "")}` : "");

// Draws a row's background, the worker's name and stages, how busy it was, and the main cause of its waits.
function laneHead(lane, at, width, nameOf) {
  const { id, worker, busy, now, cause, share } = lane;
  const [y, { pitch }] = [at.top(id), at];
  const [roomy, lines] = [pitch >= 34, pitch >= 70 ? 3 : pitch >= 34 ? 2 : 1];
  const stageText = now.stages.length ? `${now.stages.length === 1 ? "stage" : "stages"} ${now.stages.join(", ")}` : WORDS.noOperation;
  const role = typeof now.replica === "number" ? `${stageText}, replica ${now.replica}` : stageText;
  const first = lines === 1 ? y + pitch / 2 + 4.5 : y + (pitch - at.ghost - 16 * lines) / 2 + 13;
  const source = cause === null ? "" : typeof cause === "number" ? nameOf(cause) : cause;
  const data = { worker: id, replica: now.replica, done: now.done, planned: now.planned, next: now.next, held: now.held };
  const attributes = Object.entries({ ...data, peak: now.peak }).map(([name, value]) => [`data-${name}`, value]);
  const right = width - at.right + 12;
  const letters = at.isTight ? 11 : 16;
  const lost = cause === null ? "" : `, idle beyond the minimum most for ${source}: ${percent(share)}`;
  const memory = now.held === null ? "" : `, holds ${formatBytes(now.held)}, ${formatBytes(now.peak)} at most`;
  return svg(
    "g",
    { class: `rb-lane rb-is-${worker.state}`, ...Object.fromEntries(attributes) },
    tip(`${worker.name} (${worker.state}), ${role}${waitsFor(now)}, busy ${percent(busy)}${lost}${memory}`),
    svg("rect", { class: "rb-track", x: at.left, y: y + 1, width: at.wide, height: pitch - 2, rx: 3 }),
    label(12, first, shorten(worker.name, roomy ? letters : Math.min(12, letters)), "rb-worker"),
    roomy
      ? label(12, first + 16, shorten(role + waitsFor(now), at.isTight ? 12 : 20), "rb-note")
      : label(at.left - 6, first, shorten(now.stages.join(","), 5), "rb-note rb-end"),
    lines === 3 && now.peak !== null ? label(12, first + 32, `peak ${formatBytes(now.peak)}`, "rb-note") : "",
    at.ghost >= 12 ? label(at.left - 6, y + pitch - 4, "ideal", "rb-note rb-end") : "",
    at.isTight ? "" : svg("rect", { class: "rb-bar-whole", x: right, y: first - 8, width: 40, height: 7, rx: 3 }),
    at.isTight ? "" : svg("rect", { class: "rb-busy", x: right, y: first - 8, width: 40 * Math.min(1, busy ?? 0), height: 7, rx: 3 }),
    label(width - 8, first, percent(busy), "rb-end"),
    roomy && !at.isTight && source && Math.round(100 * share) > 0
      ? label(width - 8, first + 16, `${percent(share)} ${shorten(source, 9)}`, "rb-note rb-end")
      : "",
  );
}

// Draws a worker's time in the step as a line, which blocks cover, and the memory that its stages hold as an area below. `most`
// is the largest such memory of all workers.
function laneTrace(lane, ops, step, at, most) {
  const [from, to] = [at.scale(0), at.scale(durationOf(step))];
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
    height = floor - ((at.memory - 2) * total([...stages.values()], (held) => held)) / most;
    path += ` L${x} ${height}`;
  }
  return svg("g", {}, line, svg("path", { class: "rb-memory", d: `${path} L${to} ${height} L${to} ${floor} Z` }));
}

// Draws a worker's row of the ideal schedule: one path for each kind of operation.
function laneGhost(lane, ops, ideal, at) {
  const [y, tall, paths] = [at.top(lane.id) + at.pitch - at.ghost - 1, at.ghost - 1, new Map()];
  for (const op of ops) {
    const [from, to] = ideal.spans.get(op).map(at.scale);
    const d = `M${from} ${y} H${Math.max(from + 1, to - 0.8)} V${y + tall} H${from} Z`;
    paths.set(kindOf(op.op), (paths.get(kindOf(op.op)) ?? "") + d);
  }
  const parts = [...paths].map(([kind, d]) => svg("path", { class: `rb-op-${kind}`, d }));
  return svg("g", {}, tip(`${WORDS.legend.ideal}, ${formatDuration(ideal.seconds)} in all`), ...parts);
}

function drawLanes(layers, lanes, step, at, width, ideal, nameOf) {
  const { heads, traces, ghosts } = layers;
  const most = Math.max(0, ...lanes.map(({ now }) => now.peak));
  const ops = (id) => opsOf(step).filter((op) => op.worker === id);
  const rows = (more) => lanes.map((lane) => ({ key: lane.id, parts: [at.key, ...more(lane)], lane }));
  const heading = ({ worker, now, cause, share, busy }) => [worker, now, cause, share, busy];
  join(heads, rows(heading), (_, { lane }) => laneHead(lane, at, width, nameOf));
  const lines = rows(({ now }) => [now, step.begin, step.end, most]);
  join(traces, lines, (id, { lane }) => laneTrace(lane, ops(id), step, at, most));
  const pale = ideal && at.ghost ? rows(() => [ideal]) : [];
  join(ghosts, pale, (id, { lane }) => laneGhost(lane, ops(id), ideal, at));
}

// Draws the time axis: its text above the rows, and its lines in the plot.
function drawAxis(text, lines, at, width) {
  const unit = roundUp((at.to - at.from) / Math.max(2, at.wide / 100));
  const ticks = [];
  for (let tick = Math.ceil(at.from / unit - 1e-6) * unit; tick <= at.to + unit * 1e-3; tick += unit) ticks.push(tick);
  const heads = at.isTight ? WORDS.heads.busy : `${WORDS.heads.busy}, ${WORDS.heads.waits}`;
  const marks = () => {
    const all = ticks.map((tick) => {
      const x = at.left + at.scale(tick);
      const place = x > width - at.right - 20 ? "rb-end" : x < at.left + 20 ? "rb-start" : "rb-center";
      return label(x, 16, formatDuration(tick, at.to), `rb-note ${place}`);
    });
    return svg("g", { class: "rb-axis" }, ...all, label(width - 8, 16, heads, "rb-note rb-end"));
  };
  const line = (tick) => svg("line", { x1: at.scale(tick), x2: at.scale(tick), y1: 0, y2: at.bottom });
  join(text, [{ key: "axis", parts: [at.key] }], marks);
  join(lines, [{ key: "axis", parts: [at.key, at.bottom] }], () => svg("g", {}, ...ticks.map(line)));
}

// Draws the way of a micro-batch: an arrow from the end of each operation to the begin of the one that uses its result.
function drawFlow(parent, step, at, microbatch) {
  const ways = microbatch === null ? [] : flowOf(opsOf(step), microbatch);
  const arrows = ways.map(([source, op]) => {
    const [[x1, y1, wide, tall], [x2, y2, , low]] = [placeOf(source, step, at), placeOf(op, step, at)];
    const [from, to, high, deep] = [x1 + wide, x2, y1 + tall / 2, y2 + low / 2];
    const bend = Math.max(source.worker === op.worker ? 0 : 8, Math.abs(to - from) / 2);
    const curve = `M${from} ${high} C${from + bend} ${high} ${to - bend} ${deep} ${to - 4} ${deep}`;
    const head = svg("path", { class: "rb-tip", d: `M${to + 1} ${deep} l-7 -4 v8 Z` });
    return svg("g", { class: "rb-flow" }, svg("path", { class: "rb-curve", d: curve }), head);
  });
  parent.replaceChildren(...arrows);
}

const swatch = (kind) => {
  const [, low] = verticalSpan(kind);
  const high = Math.min(verticalSpan(kind)[0], low - 0.75); // room for the letter
  const rect = svg("rect", { x: -8, y: 16 * high - 8, width: 16, height: 16 * (low - high), rx: 3 });
  const letter = label(0, 8 * (high + low) - 3.5, kind === "other" ? "?" : kind, "rb-number");
  return svg("g", { class: `rb-op rb-op-${kind}` }, rect, letter);
};

// Returns the entries of the legend: those for the kinds, and the other parts of the picture, that are drawn.
function legendOf(kinds, drawn) {
  const hue = (x, at) => svg("rect", { x, y: -6, width: 7, height: 12, style: `--rb-hue: ${at}` });
  const upright = (kind) => svg("line", { class: kind, x1: 0, x2: 0, y1: -8, y2: 8 });
  const timed = kinds.filter((kind) => COSTS[kind]);
  const wide = 16 / timed.length; // a stripe for each kind that takes time in the ideal
  const stripe = (kind, i) => svg("path", { class: `rb-op-${kind}`, d: `M${i * wide - 8} -4 h${wide} v8 h${-wide} Z` });
  const marks = {
    coloured: () => svg("g", { class: "rb-op" }, hue(-8, 0), hue(1, 137)),
    waits: () => svg("line", { class: "rb-waits", x1: -8, x2: 8, y1: 0, y2: 0 }),
    memory: () => svg("path", { class: "rb-memory", d: "M-8 6 L-8 1 L0 1 L0 -4 L8 -4 L8 6 Z" }),
    ideal: () => svg("g", { class: "rb-ghost" }, ...timed.map(stripe)),
    idealEnd: () => upright("rb-ideal-end"),
    lit: () => arrow(-9, 9, 0, 0, "rb-flow", 0),
    now: () => upright("rb-front"),
    before: () => svg("g", { class: "rb-pale" }, swatch(kinds[0])),
  };
  const others = Object.entries(marks).filter(([name]) => drawn[name]);
  return [
    ...kinds.map((kind) => [swatch(kind), WORDS.kinds[kind]]),
    ...others.map(([name, mark]) => [mark(), WORDS.legend[name]]),
  ];
}
