// The panel of resources: a chart for each figure of `telemetry/worker_columns.py` that has a curve, over the last minutes, as a stack
// of all members or as a line for each; and a table with the figures at one time.
// Guarantees
// - The end of the time axis is the last sample, so a view always has the same picture, also in a record and in a still.
// - Nothing is drawn of a time without samples: lines and stacks end before it and begin after it.
// - All that a chart shows stands in the table, too, whose rows have the colours of the members.

const TEXT = STRINGS.resources;
const CHARTS = LISTS.resources; // see `telemetry/resource_views.py`
const MINUTES = [1, 5, 15];
const MANY = 12; // members: areas of more have no edges
const NEAR = 4; // times the sum: a limit that is farther away is not in the chart
const EMPTY = 90; // pixels of a panel without samples
const FORMATS = { share: (value) => `${Math.round(100 * value)} %`, bytes: formatBytes, rate: (value) => `${formatBytes(value)}/s` };
const TICKS = { 1: [15, 30, 45], 5: [60, 120, 180, 240], 15: [300, 600] }; // seconds before the end

// ---- pure functions

const endOf = (samples) => Math.max(0, ...Object.values(samples).map(({ at }) => at));

// Returns the samples of the last minutes in the order of time: those of a second for one minute, else means, and behind the last mean
// the samples of seconds.
function samplesOf(samples, minutes) {
  const all = Object.values(samples).sort((a, b) => a.at - b.at || b.step - a.step);
  const from = endOf(samples) - 60 * minutes;
  const recent = all.filter(({ at }) => at > from);
  const lastMean = minutes === 1 ? 0 : Math.max(0, ...recent.filter(({ step }) => step > 1).map(({ at }) => at));
  return recent.filter(({ at, step }) => (minutes === 1 ? step === 1 : step > 1 || at > lastMean));
}

// Returns the fewest minutes that have all samples.
function minutesFor(samples) {
  const begin = Math.min(...Object.values(samples).map(({ at, step }) => at - step));
  return MINUTES.find((minutes) => endOf(samples) - begin <= 60 * minutes) ?? MINUTES.at(-1);
}

const follows = (row, before) => row.at - before.at <= 2 * Math.max(row.step, before.step) + 1;

// Returns the runs of samples without a gap; with `isKnown`, of those that it accepts.
function runsOf(rows, isKnown = () => true) {
  const runs = [];
  let before = null;
  for (const row of rows) {
    if (!isKnown(row)) continue;
    if (before && follows(row, before)) runs.at(-1).push(row);
    else runs.push([row]);
    before = row;
  }
  return runs;
}

const valueOf = (row, key, member) => row.of[key]?.[member] ?? null;
const sumOf = (row, key) => Object.values(row.of[key] ?? {}).reduce((sum, value) => sum + value, 0);

// Returns the value at the top of a chart, and the limit if it is in the chart, else null.
function topOf(rows, key, kind, isStack) {
  const values = rows.flatMap((row) => (isStack ? [sumOf(row, key)] : Object.values(row.of[key] ?? {})));
  const most = Math.max(kind === "share" ? 1 : 0, ...values);
  const limit = isStack ? Math.max(0, ...rows.map((row) => row.limits[key] ?? 0)) : 0;
  const isNear = limit > 0 && limit <= NEAR * most;
  return { top: roundUp(Math.max(most, isNear ? limit : 0) || 1), limit: isNear ? limit : null };
}

// Returns the paths of a chart by member: lines, or areas from the floor to the sum of the member and those before it, so that the
// areas of those before cover all but the member's own part. `x` and `y` give the pixels of a time and a value.
function pathsOf(rows, key, members, isStack, x, y) {
  const point = (row, value) => `${Math.round(x(row.at))} ${+y(value).toFixed(1)}`;
  const joined = (points) => `M${points.join("L")}${points.length === 1 ? "h1.5" : ""}`;
  if (!isStack) {
    const line = (member) => (run) => joined(run.map((row) => point(row, valueOf(row, key, member))));
    return members.map((member) => runsOf(rows, (row) => valueOf(row, key, member) !== null).map(line(member)).join(""));
  }
  const sums = new Map(rows.map((row) => [row, 0]));
  const runs = runsOf(rows);
  const floor = y(0);
  return members.map((member) => {
    for (const row of rows) sums.set(row, sums.get(row) + (valueOf(row, key, member) ?? 0));
    const area = (run) => `${joined(run.map((row) => point(row, sums.get(row))))}V${floor}H${Math.round(x(run[0].at))}Z`;
    return rows.every((row) => !valueOf(row, key, member)) ? "" : runs.map(area).join("");
  });
}

// Returns the sample at a time, or the nearest one; the last one for null.
function sampleAt(rows, at) {
  if (at === null || !rows.length) return rows.at(-1) ?? null;
  return rows.reduce((best, row) => (Math.abs(row.at - at) < Math.abs(best.at - at) ? row : best));
}

// Returns the members that were started again or lost in these samples: { at, member, kind }.
function marksOf(rows, members, workers) {
  const began = rows.flatMap((row) => row.began.map((id) => ({ at: row.at, member: String(id), kind: "began" })));
  const lost = members.filter((member) => workers[member]?.state === "lost").flatMap((member) => {
    const last = rows.findLast((row) => CHARTS.some(({ key }) => valueOf(row, key, member) !== null));
    return last ? [{ at: last.at, member, kind: "lost" }] : [];
  });
  return [...began, ...lost];
}


// ---- marks

const MARKS = { began: "M-5 9L0 1L5 9Z", lost: "M-4 1L4 9M4 1L-4 9" };

// Draws one chart. `place` has its left edge, width and top.
function chartNode({ key, short, kind }, { rows, members, workers, minutes, isStack, end }, place) {
  const format = FORMATS[kind];
  const { top, limit } = topOf(rows, key, kind, isStack);
  const { begin, stop, high, low } = edgesOf(place);
  const x = (at) => stop - ((stop - begin) * (end - at)) / (60 * minutes);
  const y = (value) => low - (PLOT.tall * Math.min(value, top)) / top;
  const name = (member) => workers[member]?.name ?? `id ${member}`;
  const paths = pathsOf(rows, key, members, isStack, x, y).map((d, index) =>
    d && svg("path", { class: `rb-member ${shadeOf(members[index])}`, d, "data-member": members[index] }, tip(name(members[index])))).filter(Boolean);
  const last = rows.at(-1);
  const whole = last.limits[key] ? ` ${TEXT.of(format(last.limits[key]))}` : "";
  const most = TEXT.most(format(Math.max(...rows.map((row) => sumOf(row, key)))));
  const now = `${isStack ? "" : `${TEXT.all} `}${format(sumOf(last, key))}${whole}`;
  const sparse = (stop - begin) / (TICKS[minutes].length + 1) < PLOT.tick ? 2 : 1;
  const fits = (text) => LETTER * (short.length + text.length + 2) < stop - begin;
  const told = [`${now}, ${most}`, now].find(fits) ?? format(sumOf(last, key));
  const ticks = TICKS[minutes].filter((_, i) => sparse === 1 || i % 2 === 1).map((ago) => [x(end - ago), TEXT.ago(ago), "rb-center"]);
  return svg("g", { class: `rb-chart rb-of-${key} ${isStack ? "rb-is-stack" : "rb-is-lines"}${members.length > MANY ? " rb-many" : ""}`, "data-chart": key },
    ...groundMarks(place, short, told, [format(0), format(top)], ticks.map(([at]) => at)),
    ...(isStack ? paths.reverse() : paths),
    ...(limit === null ? [] : [svg("line", { class: "rb-limit", x1: begin, x2: stop, y1: y(limit), y2: y(limit) })]),
    svg("line", { class: "rb-floor", x1: begin, x2: stop, y1: low, y2: low }),
    ...marksOf(rows, members, workers).map(({ at, member, kind: what }) =>
      svg("g", { class: `rb-${what} ${shadeOf(member)}`, transform: `translate(${x(at).toFixed(1)} ${low})` },
        tip(TEXT[what](name(member), secondsTime(at))), svg("path", { d: MARKS[what] }))),
    ...[...ticks, [stop, TEXT.now, "rb-end"]].map(([at, text, side]) => label(at, low + 22, text, `rb-note ${side}`)));
}

export default panel("resources", TEXT.title, (frame) => {
  const choose = (about, options) => html("select", { "aria-label": about }, ...options.map(([value, text]) => html("option", { value }, text)));
  const mode = choose(TEXT.mode, Object.entries(TEXT.modes));
  const span = choose(TEXT.span, MINUTES.map((count) => [count, TEXT.minutes(count)]));
  const charts = svg("g");
  let shown = null;
  const cursor = new ChartCursor(frame, () => {
    const row = sampleAt(shown.rows, cursor.at);
    return [timeWords(row), ...sumWords(row)].join(", ");
  });
  const table = new ChartTable(frame, TEXT.title, charts);
  frame.head.append(html("span", { class: "rb-tools" }, mode, span));
  frame.fold(mode);
  frame.picture.append(charts, cursor.node);
  set(frame.body, { "aria-label": TEXT.pictureTip });
  for (const node of [mode, span]) node.addEventListener("change", () => frame.redraw());

  const timeWords = (row) => (cursor.at === null ? TEXT.latest(secondsTime(row.at)) : TEXT.at(secondsTime(row.at), shown.end - row.at, row.step));
  const chartsOf = (rows) => CHARTS.filter(({ key }) => rows.some((row) => row.of[key]));
  const sumWords = (row) => chartsOf([row]).map(({ key, title, kind }) => `${title} ${FORMATS[kind](sumOf(row, key))}`);

  function showTable(drawn, members, names) {
    const row = sampleAt(shown.rows, cursor.at);
    const figure = (value, kind) => (value === null ? "–" : FORMATS[kind](value));
    const each = members.map((member, index) => {
      const figures = drawn.map(({ key, kind }) => figure(valueOf(row, key, member), kind));
      return { key: member, name: names(member), kind: shadeOf(member), figures };
    });
    const sums = drawn.map(({ key, kind }) => figure(row.of[key] ? sumOf(row, key) : null, kind));
    table.show([timeWords(row), ...drawn.map(({ short }) => short)], [{ key: "all", name: TEXT.all, kind: "rb-none", figures: sums }, ...each]);
  }

  return ({ workers, samples }, width) => {
    const all = Object.values(workers);
    const count = (state) => all.filter((worker) => worker.state === state && worker.id !== 0).length;
    frame.showStats([count("up"), TEXT.stats.ready], ...(count("lost") ? [[count("lost"), TEXT.stats.lost, "rb-warn"]] : []), ...leftOutStats(workers));
    const hasAny = Object.keys(samples).length > 0;
    frame.showHint(hasAny ? null : all.length ? TEXT.wait : STRINGS.workers.hint);
    table.toggle(hasAny);
    for (const node of [mode, span]) node.hidden = !hasAny;
    if (!hasAny) {
      join(charts, [], null);
      cursor.follow([], [0, 1], []);
      frame.describe(TEXT.wait[0]);
      return frame.resize(width, roomFor(0, EMPTY), 0, true);
    }
    const minutes = window.isStill ? minutesFor(samples) : Number(span.value) || 1;
    const rows = samplesOf(samples, minutes);
    const isStack = mode.value !== "lines";
    const drawn = chartsOf(rows);
    const known = new Set(rows.flatMap((row) => Object.values(row.of).flatMap(Object.keys)));
    const members = [...known].sort(natural);
    const names = (member) => workers[member]?.name ?? `id ${member}`;
    shown = { rows, minutes, end: rows.at(-1).at };
    const { places, height } = placeCharts(drawn.length, width);
    cursor.follow(rows.map(({ at }) => at), [shown.end - 60 * minutes, shown.end], places);
    const about = { rows, members, workers, minutes, isStack, end: shown.end };
    const states = members.map((member) => `${names(member)} ${workers[member]?.state}`).join();
    const parts = [rows.at(-1), rows[0], rows.length, states, minutes, isStack, width];
    join(charts, drawn.map((chart, i) => ({ key: chart.key, parts, chart, place: places[i] })), (_, { chart, place }) => chartNode(chart, about, place));
    frame.resize(width, height, 0, true);
    frame.describe(TEXT.describe(TEXT.minutes(minutes), sumWords(rows.at(-1))));
    showTable(drawn, members, names);
  };
});
