// The metrics panel: a chart for each name that ranks log, with a line for each rank and the spread of all; and a table with the values at
// one step.
// Guarantees
// - All charts have one axis of steps, so the cursor stands at the same step in each.
// - Ranks that diverge are red in every mode, and do not decide the range of a chart: their lines end at its edge.
// - A value that is not finite has no place on a line: a cross in the colour of the rank marks the first one, with the rank's name.
// - A line and a row of the table are of one process. Those of one that was lost or started again stay; its line ends with a bar.

const TEXT = STRINGS.metrics;
const EMPTY = 90; // pixels of a panel without metrics
const LONG_NAMES = 480; // pixels of a panel, from which on a rank's name is followed by those of the metrics in which it diverges
const BIN = 4; // pixels: the spread is that of all points in so many
const SENTENCES = 4; // on ranks that diverge
const [CROSS, STOP] = ["M-4 -4L4 4M4 -4L-4 4", "M0 -6V6"];

// ---- pure functions

// Returns the curves with their points, in the order of processes: { key, process, worker, name, state, words, value, isBehind, steps,
// values, odd, odds }. One that is behind has no value at the last step of its metric.
function gatherCurves(curves, points, metrics) {
  const found = Object.fromEntries(Object.entries(curves).map(([key, row]) => {
    const isBehind = row.ended === "restarted" || row.step < metrics[row.name].step;
    return [key, { key, process: key.slice(0, key.indexOf("/")), isBehind, ...row, steps: [], values: [], odd: null, odds: [], rows: [] }];
  }));
  for (const row of Object.values(points).sort((a, b) => a.order - b.order)) {
    const curve = found[row.curve];
    if (!curve) continue;
    curve.rows.push(row);
    curve.steps.push(...row.steps);
    curve.values.push(...row.values);
    curve.odds.push(...row.odds);
    if (row.odd) curve.odd = curve.odd ? [curve.odd[0], curve.odd[1], curve.odd[2] + row.odd[2]] : [...row.odd];
  }
  return Object.values(found).sort((a, b) => a.worker - b.worker || a.incarnation - b.incarnation);
}

// Returns the curves of a metric without those of former processes, but all of them where there are no others.
function latestCurves(curves) {
  const found = curves.filter(({ ended }) => ended !== "restarted");
  return found.length ? found : curves;
}

// Returns the first and the last step of all curves.
function stepRange(curves) {
  const ends = curves.flatMap(({ steps, odd, step }) => [...(steps.length ? [steps[0]] : []), ...(odd ? [odd[0]] : []), step]);
  return [Math.min(...ends), Math.max(...ends)];
}

// Returns the least and the largest value of a chart: those of the ranks that do not diverge, if there are any. A log scale has no
// place for a value that is not positive.
function valueRange(curves, isLog) {
  const steady = curves.filter(({ state }) => !state);
  const values = (steady.some(({ values: own }) => own.length) ? steady : curves).flatMap(({ values: own }) => own);
  const known = values.filter((value) => !isLog || value > 0);
  if (!known.length) return [isLog ? 0.1 : 0, 1];
  const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  if (low < high) return [low, high];
  return isLog ? [low / 2, low * 2] : [low - (Math.abs(low) || 1) / 2, low + (Math.abs(low) || 1) / 2];
}

// Returns the line of a curve as the data of an SVG path; `y` gives null for a value without a place.
function linePath({ steps, values }, x, y) {
  let [path, pen] = ["", "M"];
  steps.forEach((step, i) => {
    const at = y(values[i]);
    if (at !== null) path += `${pen}${+x(step).toFixed(1)} ${+at.toFixed(1)}`;
    pen = at === null ? "M" : "L";
  });
  return path && !path.includes("L") ? `${path}h1.5` : path;
}

// Returns the spread of curves in bins of the axis where two or more ranks have a point: [x, y of the lowest value, of the median, of the highest].
function spreadOf(curves, x, y) {
  const bins = new Map();
  for (const { worker, steps, values } of curves) {
    steps.forEach((step, i) => {
      const [bin, at] = [Math.floor(x(step) / BIN), y(values[i])];
      if (at === null) return;
      if (!bins.has(bin)) bins.set(bin, { of: new Set(), ys: [] });
      bins.get(bin).of.add(worker);
      bins.get(bin).ys.push(at);
    });
  }
  return [...bins].filter(([, { of }]) => of.size > 1).sort(([a], [b]) => a - b).map(([bin, { ys }]) => {
    ys.sort((a, b) => b - a); // a larger value is higher up
    return [BIN * bin + BIN / 2, ys[0], ys[ys.length >> 1], ys.at(-1)];
  });
}

// Returns the area between the lowest and the highest values, and the line through the medians, as data of SVG paths.
function spreadPaths(spread) {
  if (spread.length < 2) return ["", ""];
  const joined = (points) => points.map(([x, y]) => `${x} ${+y.toFixed(1)}`).join("L");
  const [high, low] = [spread.map(([x, , , top]) => [x, top]), spread.map(([x, bottom]) => [x, bottom]).reverse()];
  return [`M${joined(high)}L${joined(low)}Z`, `M${joined(spread.map(([x, , middle]) => [x, middle]))}`];
}

// Returns round steps between two, at most `most`.
function roundSteps([from, to], most) {
  if (to <= from || most < 1) return [];
  const size = Math.max(1, Math.ceil(roundUp((to - from) / most)));
  const first = Math.ceil(from / size) * size;
  return Array.from({ length: Math.floor((to - first) / size) + 1 }, (_, i) => first + i * size);
}

// Returns the value of a curve at a step: that of its last point there or before, its last one for null; null where there is none, and
// after the end of a curve that is behind. One that is not finite is a text.
function valueAt({ steps, values, odds, value, step: last, isBehind }, step) {
  if (step === null) return value;
  if (isBehind && step > last) return null;
  const i = steps.findLastIndex((one) => one <= step);
  const odd = odds.findLast(([first]) => first <= step);
  if (odd && (step <= odd[1] || (i === steps.length - 1 && !(steps[i] > odd[1])))) return odd[2];
  return i < 0 ? null : values[i];
}

const valueText = (value) => (value === null ? "–" : typeof value === "string" ? value : formatFigure(value));
const formatCount = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");

// Returns the last values of a metric in words: "0.31", or "0.30 to 0.33".
function lastWords(curves) {
  const known = curves.map(({ value }) => value).filter(isNumber);
  if (!known.length) return curves.map(({ value }) => value)[0] ?? "–";
  const [low, high] = [Math.min(...known), Math.max(...known)].map(formatFigure);
  return low === high ? low : TEXT.between(low, high);
}

// Returns the head of a chart: the last values, and the ranks that are left out; in few words if there is no `room` for more.
function headWords(curves, names, room) {
  const latest = latestCurves(curves);
  const [steady, far] = [latest.filter(({ state }) => !state), latest.filter(({ state }) => state)];
  if (!steady.length || !far.length) return lastWords(steady.length ? steady : far);
  const told = lastWords(steady);
  const words = `${told} ${TEXT.without(far.map(names))}`;
  return words.length <= room ? words : `${told} ${TEXT.few(steady.length, latest.length)}`;
}

// Returns crosses with the texts beside them, [{ x, of, text }], from left to right: a text names the ranks whose crosses are at one
// place, and is left out where that of the cross before has no end yet.
function crossTexts(curves, x, names) {
  const places = new Map();
  for (const curve of curves.filter(({ odd }) => odd)) {
    const at = Math.round(x(curve.odd[0]));
    places.set(at, [...(places.get(at) ?? []), curve]);
  }
  let end = -Infinity;
  return [...places].sort(([a], [b]) => a - b).map(([at, of]) => {
    const text = of.length > 1 ? plural(of.length, TEXT.stats.rank) : names(of[0]);
    const isFree = at > end;
    if (isFree) end = at + 12 + LETTER * text.length;
    return { x: at, of, text: isFree ? text : "" };
  });
}

// ---- marks

// Draws one chart. `shade` gives the class of a member's colour.
function chartNode(name, curves, { range, isLog, isSpread, shade, names }, place) {
  const { begin, stop, high, low } = edgesOf(place);
  const [least, most] = valueRange(curves, isLog);
  const scale = isLog ? Math.log : (value) => value;
  const x = (step) => begin + ((stop - begin) * (step - range[0])) / (range[1] - range[0] || 1);
  const y = (value) => {
    if (isLog && value <= 0) return null;
    const share = (scale(value) - scale(least)) / (scale(most) - scale(least));
    return low - 3 - (PLOT.tall - 6) * Math.max(-0.03, Math.min(1.03, share));
  };
  const [steady, far] = [curves.filter(({ state }) => !state), curves.filter(({ state }) => state)];
  const [area, middle] = spreadPaths(spreadOf(steady, x, y));
  const line = (curve) => {
    const kind = `rb-member ${curve.state ? "rb-far" : shade(curve.worker)}`;
    return svg("path", { class: kind, d: linePath(curve, x, y), "data-member": curve.process }, tip(`${names(curve)} ${curve.words}`.trim()));
  };
  const cross = (curve) => {
    const [step, text, count] = curve.odd;
    return svg("path", { class: `rb-odd ${shade(curve.worker)}`, d: CROSS, transform: `translate(${x(step).toFixed(1)} ${high + 7})` }, tip(TEXT.odd(names(curve), text, formatCount(step), count)));
  };
  const crosses = ({ x: at, of, text }) => {
    const isLeft = at + 8 + LETTER * text.length > stop; // there is no room at the right
    return [...of.map(cross), label(at + (isLeft ? -8 : 8), high + 11, text, `rb-note rb-whose${isLeft ? " rb-end" : ""}`)];
  };
  const bar = (curve) => {
    const { worker, steps, values } = curve;
    const at = y(values.at(-1));
    return at !== null && svg("path", { class: `rb-stop ${shade(worker)}`, d: STOP, transform: `translate(${x(steps.at(-1)).toFixed(1)} ${at.toFixed(1)})` }, tip(TEXT.endsAt(names(curve), formatCount(curve.step))));
  };
  const drawn = (isSpread && area ? [] : steady).concat(far);
  const last = TEXT.step(formatCount(range[1]));
  const ticks = roundSteps(range, Math.floor((stop - begin) / (1.6 * PLOT.tick))).map((step) => [x(step), formatCount(step)]);
  const marked = ticks.filter(([at]) => stop - at > LETTER * (last.length + 3));
  const letters = Math.floor((stop - begin) / LETTER);
  const told = headWords(curves, names, letters - Math.min(name.length, 24) - 3);
  const title = shorten(name, Math.max(8, letters - told.length - 3));
  return svg("g", { class: "rb-chart rb-is-lines", "data-chart": name },
    ...groundMarks(place, title, told, [formatFigure(least), formatFigure(most)], ticks.map(([at]) => at)),
    ...(area ? [svg("path", { class: "rb-spread", d: area })] : []),
    ...(isSpread && area ? [svg("path", { class: "rb-median", d: middle }, tip(TEXT.median))] : []),
    ...drawn.map(line),
    svg("line", { class: "rb-floor", x1: begin, x2: stop, y1: low, y2: low }),
    ...drawn.filter(({ ended, values }) => ended && values.length).map(bar).filter(Boolean),
    ...crossTexts(curves, x, names).flatMap(crosses),
    ...marked.map(([at, text]) => label(at, low + 18, text, "rb-note rb-center")), label(stop, low + 18, last, "rb-note rb-end"));
}

const LEGEND = {
  spread: () => svg("rect", { class: "rb-spread", x: -8, y: -5, width: 16, height: 10 }),
  far: () => svg("path", { class: "rb-member rb-far", d: "M-8 4L0 -2L8 -4" }),
  odd: () => svg("path", { class: "rb-odd", d: CROSS }),
  ended: () => svg("g", {}, svg("path", { class: "rb-stop", d: "M-8 0H0" }), svg("path", { class: "rb-stop", d: STOP })),
};

export default panel("metrics", TEXT.title, (frame, model) => {
  const choose = (about, options) => html("select", { "aria-label": about }, ...Object.entries(options).map(([value, text]) => html("option", { value }, text)));
  const [mode, scale] = [choose(TEXT.mode, TEXT.modes), choose(TEXT.scale, TEXT.scales)];
  const save = html("button", { type: "button", class: "rb-save rb-kernel", title: TEXT.saveTip }, TEXT.save);
  const charts = svg("g");
  let shown = null; // in the table: { names, curves, memberName }
  const cursor = new ChartCursor(frame, () => `${stepWords()}: ${shown.names.map((name) => `${name} ${lastWords(valuesAt(name))}`).join(", ")}`);
  const table = new ChartTable(frame, TEXT.title, charts);
  const eye = Math.random().toString(36).slice(2);
  let legend = "";
  frame.head.append(html("span", { class: "rb-tools" }, mode, scale, save));
  frame.fold(mode, scale, save);
  frame.picture.append(charts, cursor.node);
  set(frame.body, { "aria-label": TEXT.pictureTip });
  let isChosen = false; // whether the user has chosen the mode
  mode.addEventListener("change", () => ((isChosen = true), frame.redraw()));
  scale.addEventListener("change", () => frame.redraw());
  save.addEventListener("click", () => model.send({ kind: "csv", eye }));
  const hear = (message) => message.kind === "csv" && message.eye === eye && saveFile("metrics.csv", "text/csv", message.text);
  model.on("msg:custom", hear);
  frame.cleanups.push(() => model.off?.("msg:custom", hear));

  const curvesOf = (name) => shown.curves.filter((curve) => curve.name === name);
  const valuesAt = (name) => curvesOf(name).map((curve) => ({ value: valueAt(curve, cursor.at) }));
  const stepWords = () => (cursor.at === null ? TEXT.latest : TEXT.step(formatCount(cursor.at)));

  function rowName({ worker, ended }, bad, width) {
    const name = ended ? `${shown.memberName(worker)} · ${TEXT.isEnded[ended]}` : shown.memberName(worker);
    return bad.length && width >= LONG_NAMES ? TEXT.diverges(name, bad) : name;
  }

  function showTable(width) {
    const rows = [...new Set(shown.curves.map(({ process }) => process))].map((key) => {
      const own = shown.curves.filter(({ process }) => process === key);
      const bad = own.filter(({ state }) => state).map(({ name }) => name);
      const figures = shown.names.map((name) => {
        const curve = own.find((one) => one.name === name);
        return curve ? valueText(valueAt(curve, cursor.at)) : "–";
      });
      return { key, name: rowName(own[0], bad, width), kind: `${shadeOf(own[0].worker)}${bad.length ? " rb-is-far" : ""}`, figures };
    });
    table.show([stepWords(), ...shown.names.map((name) => shorten(name, 24))], rows);
  }

  function showLegend(curves) {
    const kinds = Object.entries({ spread: shown.names.some((name) => new Set(curvesOf(name).map(({ worker }) => worker)).size > 1), far: curves.some(({ state }) => state), odd: curves.some(({ odd }) => odd), ended: curves.some(({ ended }) => ended) });
    const keys = kinds.filter(([, is]) => is).map(([key]) => key);
    if (legend !== keys.join()) frame.showLegend(keys.map((key) => [LEGEND[key](), TEXT.legend[key]]));
    legend = keys.join();
  }

  return ({ workers, metrics, curves: rows, ends, points }, width) => {
    const names = Object.values(metrics).sort((a, b) => a.order - b.order).map(({ name }) => name);
    const memberName = (member) => workers[member]?.name ?? `id ${member}`;
    const nameOf = ({ worker, ended }) => (ended === "restarted" ? TEXT.before(memberName(worker)) : memberName(worker));
    const curves = gatherCurves(rows, points, metrics);
    const members = [...new Set(curves.map(({ worker }) => worker))];
    const bad = curves.filter(({ state }) => state);
    const far = new Set(bad.map(({ worker }) => worker)).size;
    const warning = far ? [[far, TEXT.stats.far(far), "rb-warn"]] : [];
    const ended = Object.values(ends);
    const lost = ended.filter((one) => one.ended === "lost").length;
    const missing = lost ? [[lost, TEXT.stats.lost, "rb-warn"]] : [];
    frame.showStats(...warning, countStat(names.length, TEXT.stats.metric), countStat(members.length, TEXT.stats.rank), ...missing, ...leftOutStats(workers));
    const remarks = bad.slice(0, SENTENCES).map((curve) => ({ words: `${shorten(curve.name, 60)} of ${nameOf(curve)} ${curve.words}.` }));
    const told = ended.filter((one) => one.ended !== "stopped").slice(0, SENTENCES).map((one) => ({ words: `${TEXT.ended[one.ended](memberName(one.worker), formatCount(one.step), shorten(one.name, 60))}.` }));
    frame.showRemarks([...remarks, ...(bad.length > SENTENCES ? [{ words: TEXT.more(bad.length - SENTENCES) }] : []), ...told]);
    frame.showHint(names.length ? null : TEXT.hint);
    table.toggle(names.length > 0);
    for (const node of [mode, scale, save]) node.hidden = !names.length;
    if (!names.length) {
      join(charts, [], null);
      cursor.follow([], [0, 1], []);
      frame.describe(TEXT.hint.join(""));
      return frame.resize(width, roomFor(0, EMPTY), 0, true);
    }
    if (!isChosen && members.length > SHADES) mode.value = "spread";
    shown = { names, curves, memberName };
    const [isLog, isSpread] = [scale.value === "log", mode.value === "spread"];
    const range = stepRange(curves);
    const { places, height } = placeCharts(names.length, width);
    const stops = [...new Set(curves.flatMap(({ steps, odds }) => [...steps, ...odds.flatMap(([first, last]) => [first, last])]))].sort((a, b) => a - b);
    cursor.follow(stops, range, places);
    const about = { range, isLog, isSpread, shade: shadeOf, names: nameOf };
    const all = [...range, isLog, isSpread, width, names.length, members.map(memberName).join()];
    const items = names.map((name, i) => {
      const own = curvesOf(name);
      return { key: name, parts: [...all, own.map(({ state, words, ended }) => state + words + ended).join(), ...own.flatMap((curve) => curve.rows)], own, place: places[i] };
    });
    join(charts, items, (name, { own, place }) => chartNode(name, own, about, place));
    frame.resize(width, height, 0, true);
    frame.describe(names.map((name) => `${name} ${headWords(curvesOf(name), nameOf, Infinity)}`).join(", "));
    showLegend(curves);
    showTable(width);
  };
});
