// The pipeline panel: the last finished training step, whole; its bubble in a sentence, curves over the steps seen so far, and
// the controls that choose a step, zoom, and light one micro-batch. The cursor that follows a running step is there on request:
// then the pale blocks to the right of the moving front are those of the step before, so the picture is never empty.

const LONG = 112; // characters of a sentence with three causes and the rest
const BOLD_LETTER = 7; // pixels, with what a line's end loses
const MOST_LINES = 4;
const REST = 1000; // milliseconds without a new step, after which the step shown is fitted exactly

// Returns the sentence on the bubble of a step: what it is, the least it can be, and the points that each cause takes.
function bubbleText({ minimum, parts }, nameOf) {
  const [least, ...points] = wholePercents(parts.map(([, share]) => share));
  const causes = parts.slice(1).map(([cause], i) => [cause, points[i]]);
  const [told, rest] = [causes.slice(0, 3), causes.slice(3)].map((some) => some.filter(([, count]) => count > 0));
  const other = total(rest, ([, count]) => count);
  const all = least + total(causes, ([, count]) => count);
  const texts = [...told, ...(other ? [["other", other]] : [])].map(([cause, count], i) => {
    const amount = i ? String(count) : `${count} ${WORDS.points(count)}`;
    return typeof cause === "number" ? WORDS.causes.worker(amount, nameOf(cause)) : WORDS.causes[cause](amount);
  });
  const head = WORDS.bubble(all, minimum === null ? null : causes.length ? least : Math.round(100 * minimum));
  if (texts.length) return `${head}: ${texts.join(", ")}`;
  return minimum === null ? head : `${head}: ${WORDS.least}`;
}

// Returns a sentence on one micro-batch.
function microbatchText(ops, microbatch) {
  const own = ops.filter((op) => op.microbatch === microbatch && op.op !== "A" && op.end !== null);
  if (!own.length) return "";
  let [busy, at] = [0, own[0].begin];
  for (const op of [...own].sort((a, b) => a.begin - b.begin)) {
    busy += Math.max(0, op.end - Math.max(at, op.begin));
    at = Math.max(at, op.end);
  }
  const whole = at - Math.min(...own.map((op) => op.begin));
  return WORDS.microbatch(microbatch, plural(own.length, "operation"), formatDuration(whole), formatDuration(whole - busy));
}

// Adds the controls below the head line. `act` has a function for each; returns a function that shows the state of all.
function controls(frame, act) {
  const text = WORDS.controls;
  const button = (name, words, onClick, more = {}) => {
    const node = html("button", { type: "button", class: "rb-button", title: words, ...more }, name);
    node.addEventListener("click", onClick);
    return node;
  };
  const select = (name, onChange) => {
    const node = html("select", { "aria-label": name }); // the text of a label would have the options in it
    node.addEventListener("change", () => onChange(node.value));
    return [node, html("label", {}, `${name} `, node)];
  };
  const range = html("input", { type: "range", class: "rb-slider", min: 0, step: 1, "aria-label": text.slider });
  range.addEventListener("input", () => act.slide(Number(range.value)));
  const latest = button(text.latest, text.latestTip, act.latest);
  const live = button(text.live, text.liveTip, act.live, { "aria-pressed": false });
  const [colour, colourLabel] = select(text.colour, act.colour);
  for (const [value, name] of Object.entries(text.colours)) colour.append(html("option", { value }, name));
  const [microbatch, microbatchLabel] = select(text.microbatch, (value) => act.light(value === "" ? null : Number(value)));
  const ideal = button(text.ideal, text.idealTip, act.ideal, { "aria-pressed": true });
  const out = button("−", text.out, () => act.zoom(1.5), { "aria-label": text.out });
  const fit = button(text.fit, text.fitTip, act.fit);
  const closer = button("+", text.in, () => act.zoom(1 / 1.5), { "aria-label": text.in });
  for (const node of [out, fit, closer]) node.classList.add("rb-stays"); // in a menu
  const group = (...parts) => html("span", { class: "rb-group" }, ...parts);
  const [choice, zoom] = [group(range, latest, live), group(out, closer, fit)];
  const files = group(button(text.trace, text.traceTip, act.trace), button(text.svg, text.svgTip, act.svg));
  const bar = html("div", { class: "rb-bar", role: "group", "aria-label": text.bar, hidden: "" });
  bar.append(choice, colourLabel, microbatchLabel, ideal, zoom, files);
  frame.problem.before(bar);
  frame.fold(bar);
  let numbers = null;
  return ({ steps, shown, state, isLatest }) => {
    bar.hidden = !shown;
    if (!shown) return;
    const own = [...new Set(opsOf(shown).filter((op) => op.op !== "A").map((op) => op.microbatch))].sort((a, b) => a - b);
    if (numbers !== own.join()) {
      const options = own.map((number) => html("option", { value: number }, String(number)));
      microbatch.replaceChildren(html("option", { value: "" }, text.none), ...options);
      numbers = own.join();
    }
    microbatch.value = state.lit === null ? "" : String(state.lit);
    range.hidden = latest.hidden = steps.length < 2 && isLatest;
    range.max = Math.max(0, steps.length - 1);
    range.value = steps.indexOf(shown);
    set(range, { "aria-valuetext": `step ${shown.step}${state.live ? ", live" : isLatest ? ", latest" : ""}` });
    latest.disabled = isLatest && !state.live && !state.part;
    out.disabled = fit.disabled = !state.part;
    set(live, { "aria-pressed": state.live });
    set(ideal, { "aria-pressed": state.ghosts });
  };
}

// Calls `act` for the wheel with a modifier, keys, and dragging in the picture; a click calls `act.light` for its micro-batch.
function gestures(frame, plot, ground, state, act) {
  const share = (event) => {
    const { left, width } = ground.getBoundingClientRect();
    return (event.clientX - left) / (width || 1);
  };
  const numberOf = (event) => {
    const found = event.target.closest?.("[data-microbatch]:not(.rb-pale)");
    return found ? Number(found.dataset.microbatch) : null;
  };
  const wheel = (event) => {
    const turn = event.deltaY || event.deltaX;
    if (event.ctrlKey || event.metaKey || event.altKey) act.zoom(1.0015 ** turn, share(event));
    else if (state.part && (event.shiftKey || event.deltaX)) act.pan((event.deltaX || event.deltaY) / 1000);
    else return;
    event.preventDefault();
  };
  frame.body.addEventListener("wheel", wheel, { passive: false });
  const keys = {
    "+": () => act.zoom(1 / 1.5),
    "=": () => act.zoom(1 / 1.5),
    "-": () => act.zoom(1.5),
    0: act.fit,
    ArrowLeft: () => act.pan(-0.2),
    ArrowRight: () => act.pan(0.2),
    Escape: () => act.light(null),
  };
  frame.body.addEventListener("keydown", (event) => {
    const moves = event.key.startsWith("Arrow");
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key] || (moves && !state.part)) return;
    keys[event.key]();
    event.preventDefault();
    if (event.key !== "Escape") event.stopPropagation();
  });
  let drag = null; // { x, moved } while a button is down
  plot.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { x: event.clientX, moved: false };
  });
  plot.addEventListener("pointermove", (event) => {
    const by = drag && state.part ? event.clientX - drag.x : 0;
    if (!drag?.moved && Math.abs(by) < 4) return act.hover(numberOf(event));
    if (!drag.moved) plot.setPointerCapture(event.pointerId);
    act.pan(-by / ground.getBoundingClientRect().width);
    drag = { x: event.clientX, moved: true };
  });
  plot.addEventListener("pointerup", (event) => {
    const number = numberOf(event);
    if (drag && !drag.moved) act.light(number === state.lit ? null : number);
    drag = null;
  });
  plot.addEventListener("pointerleave", () => {
    if (!drag?.moved) drag = null;
    act.hover(null);
  });
}

export default panel("pipeline", "Pipeline", (frame) => {
  const layer = (name) => svg("g", { class: name });
  const names = ["rb-axis", "rb-traces", "rb-ghost", "rb-before", "rb-blocks", "rb-flows"];
  const [lines, traces, ghosts, paleBlocks, blocks, flows] = names.map(layer);
  const [heads, front, end] = [layer("rb-heads"), svg("line", { class: "rb-front" }), svg("line", { class: "rb-ideal-end" })];
  const ground = svg("rect", { class: "rb-ground" }); // without it the pointer would be nowhere between blocks
  const plot = svg("svg", { y: 0 }, ground, lines, traces, ghosts, end, paleBlocks, blocks, front, flows);
  const picture = svg("g", {}, heads, plot);
  frame.picture.append(picture);
  const sentence = html("p", { class: "rb-sentence" });
  frame.problem.before(sentence);
  frame.steady.push(sentence);

  const history = new StepHistory();
  // `held`: the step was chosen by zooming into it; `part`: of the time axis, see `zoomed`.
  const state = { chosen: null, held: false, live: false, part: null, lit: null, hovered: null, ghosts: true, coloured: false };
  let [span, rested, newest, timer, legend] = [0, true, null, 0, ""]; // `rested`: no step has come for a while
  let now = {}; // the present picture: { steps, over, shown, at, nameOf, sentence }
  frame.cleanups.push(() => clearTimeout(timer));

  const change = (more) => {
    Object.assign(state, more);
    frame.redraw();
  };
  // A step that is zoomed into stays, whatever comes, until all of it is shown again.
  const look = (part) => {
    const held = part !== null && (state.held || (state.chosen === null && !state.live && isOver(now.shown)));
    const chosen = held ? now.shown.step : state.held ? null : state.chosen;
    change({ part, held, chosen });
  };
  const act = {
    follow: (chosen, live) => change({ chosen, live, held: false, part: null }),
    choose: (step) => step && act.follow(step === stepToShow(now.steps, null, false) ? null : step.step, false),
    slide: (index) => act.choose(now.over[index]),
    latest: () => act.follow(null, false),
    live: () => act.follow(null, !state.live),
    colour: (by) => {
      frame.root.classList.toggle("rb-by-microbatch", by === "microbatch");
      change({ coloured: by === "microbatch" });
    },
    ideal: () => change({ ghosts: !state.ghosts }),
    zoom: (factor, share = 0.5) => {
      if (!now.at) return;
      look(zoomed(state.part, factor, now.at.from + share * (now.at.to - now.at.from), span));
    },
    pan: (share) => state.part && look(panned(state.part, share * (now.at.to - now.at.from), span)),
    fit: () => look(null),
    light: (lit) => change({ lit, hovered: null }),
    hover: (hovered) => {
      if (state.hovered === hovered) return;
      state.hovered = hovered;
      light();
    },
    trace: () => {
      const trace = chromeTrace(now.steps.flatMap(opsOf), now.nameOf);
      saveFile("pipeline-steps.json", "application/json", JSON.stringify(trace));
    },
    svg: () => {
      const title = `Step ${now.shown.step}, ${formatDuration(durationOf(now.shown))}. ${now.sentence}`;
      saveFile(`pipeline-step-${now.shown.step}.svg`, "image/svg+xml", pictureFile(frame, title));
    },
  };
  const showControls = controls(frame, act);
  const drawCurves = curvesAbove(frame, act.choose);
  gestures(frame, plot, ground, state, act);

  // Shows the way of the micro-batch that the pointer is on, or that was chosen, and dims the others.
  function light() {
    const number = state.hovered ?? state.lit;
    blocks.classList.toggle("rb-lit", number !== null);
    for (const node of blocks.querySelectorAll(".rb-on")) node.classList.remove("rb-on");
    const own = number === null ? [] : blocks.querySelectorAll(`[data-microbatch="${number}"]`);
    for (const node of own) node.classList.add("rb-on");
    drawFlow(flows, now.shown, now.at, number);
    const words = (number !== null && microbatchText(opsOf(now.shown), number)) || now.sentence;
    setText(sentence, words);
    set(sentence, { title: frame.isNarrow ? words : null }); // it may be cut there
  }

  // Returns the seconds of the time axis. It suits the last few steps while these come, and then exactly the one that is shown.
  function spanFor(steps, shown) {
    const last = steps.findLast(isOver)?.step ?? null;
    if (last !== newest) {
      rested = newest === null; // the panel was opened with it
      newest = last;
      clearTimeout(timer);
      timer = setTimeout(() => {
        rested = true;
        frame.redraw();
      }, REST);
    }
    const exact = isOver(shown) && (rested || state.chosen !== null);
    return exact ? Math.max(1e-6, durationOf(shown)) : axisSpan(span, steps, shown);
  }

  function headline(shown, steps, workers) {
    const [length, least] = [formatDuration(durationOf(shown)), measuresOf(shown)?.ideal?.seconds];
    const ideal = least ? WORDS.idealTime(formatDuration(least)) : "";
    const about = !shown.trains ? WORDS.evaluation : shown.state === "complete" ? WORDS.finished : "";
    const most = shown.lanes.reduce((one, lane) => (lane.peak > (one?.peak ?? 0) ? lane : one), null);
    const running = steps.at(-1);
    const runs = running !== shown && running.state === "running" && durationOf(running) > 1;
    frame.showStats(
      [`step ${shown.step}`, about, "", WORDS.numberTip],
      [length, `${WORDS.state[shown.state]}${ideal}`, shown.state === "failed" ? "rb-warn" : ""],
      ...(most ? [[formatBytes(most.peak), WORDS.peak(workers[most.worker]?.name ?? `id ${most.worker}`)]] : []),
      ...(runs ? [["", WORDS.runs(running.step), "rb-wait"]] : []),
      ...leftOutStats(workers),
    );
  }

  return (view, width) => {
    frame.showRemarks(view.remarks);
    const steps = history.add(view);
    const nameOf = (id) => view.workers[id]?.name ?? `id ${id}`;
    const shown = stepToShow(steps, state.chosen, state.live);
    if (shown?.step !== state.chosen) state.chosen = null;
    const over = steps.filter(isOver);
    const isLatest = state.chosen === null;
    now = { steps, over: over.includes(shown) ? over : steps, shown, nameOf, sentence: "" };
    showControls({ steps: now.over, shown, state, isLatest });
    frame.showHint(shown ? null : WORDS.hint);
    set(picture, { style: shown ? null : "display:none" });
    sentence.hidden = !shown;
    const count = Math.min(MOST_LINES, Math.ceil((LONG * BOLD_LETTER) / Math.max(1, frame.root.clientWidth - 44)));
    set(frame.root, { style: frame.isNarrow ? `--rb-lines: ${count}` : null });
    drawCurves(shown ? steps : [], shown, width);
    if (!shown) {
      newest = null;
      frame.showStats(["step –", ""], ...leftOutStats(view.workers));
      frame.describe("No step yet.");
      return frame.resize(width, roomFor(0, 140));
    }
    headline(shown, steps, view.workers);
    const measures = measuresOf(shown);
    now.sentence = measures ? bubbleText(measures, nameOf) : WORDS.unmeasured[shown.state];
    span = spanFor(steps, shown);
    const runs = !isOver(shown);
    const before = runs ? steps.filter((step) => isOver(step) && step.trains === shown.trains).at(-1) : undefined;
    if (state.part) state.part = state.part.to - state.part.from < span ? panned(state.part, 0, span) : null;
    const lanes = lanesOf(view, shown, measures, before);
    const at = geometry(lanes, width, span, state.part, state.ghosts && Boolean(measures?.ideal));
    now.at = at;
    frame.resize(width, at.bottom + 6, AXIS);
    set(plot, { x: at.left, width: at.wide, height: at.bottom, class: `rb-plot${state.part ? " rb-zoomed" : ""}` });
    set(ground, { width: at.wide, height: at.bottom });
    drawLanes({ heads, traces, ghosts }, lanes, shown, at, width, measures?.ideal, nameOf);
    drawAxis(frame.top, lines, at, width);
    const elapsed = durationOf(shown);
    drawStep(paleBlocks, before ?? shown, at, true, (op) => before && op.begin - before.begin > elapsed);
    drawStep(blocks, shown, at, false, () => true);
    const mark = (line, x, there) => set(line, { x1: x, x2: x, y1: 0, y2: at.bottom, style: there ? null : "display:none" });
    mark(front, at.scale(elapsed), runs);
    mark(end, at.scale(measures?.ideal?.seconds ?? 0), at.ghost > 0);
    light();
    const kinds = Object.keys(WORDS.kinds).filter((kind) => shown.rows.some(([, op]) => kindOf(op.op) === kind));
    const ideal = at.ghost > 0;
    const hasMemory = at.memory > 0 && shown.lanes.some(({ peak }) => peak !== null); // torch's stages do not say theirs
    const more = { memory: hasMemory, ideal, idealEnd: ideal, coloured: state.coloured, lit: state.lit !== null };
    const entries = { ...more, waits: true, now: runs, before: Boolean(before) };
    if (legend !== (legend = [...kinds, JSON.stringify(entries)].join())) frame.showLegend(legendOf(kinds, entries));
    const about = `Step ${shown.step}, ${shown.state}: ${plural(shown.ops, "operation")} in ${formatDuration(elapsed)}`;
    frame.describe(`${about}. ${now.sentence}.`);
  };
});
