// The plan panel: each layout of a plan is a point, its memory to the right and its step time upwards, with the memory of the
// hardware as an upright line. Layouts that do not fit stand behind that line, and those on which the program fails below
// the picture. Below stands the layout that was clicked, at first the best one: its figures, and the timeline of its step.
// Guarantees
// - Whether a layout fits is told by the form of its point, not only by its colour; all figures are in its tooltip, too.
// - No name covers another one: a name moves down until it is free, and a line leads to its point.

const TEXT = STRINGS.plan;
const [FITS, TOO_LARGE, FAILS] = ["fits", "does not fit", "fails"]; // as in `telemetry/plan_view.py`
const PLOT = { left: 74, right: 14, top: 34, tall: 236, low: 40 }; // pixels
const NAME = { letter: 7.6, aside: 14, most: 30 }; // of layouts beside their points
const LANE = { left: 112, right: 12, head: 22, tall: 26, gap: 4, letter: 7.6 }; // of the timeline
const FAR = 2; // times the memory: points of larger layouts stand at the edge
const WIDE_RANGE = 12; // the slowest step in units of the fastest, from which on the axis is logarithmic
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

// ---- pure functions

const powerOf = (count) => (count < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(count) / 10)));

// Returns bytes in the unit that fits `unit`: 54.2 GiB.
const binaryBytes = (count, unit = count) => `${(count / 1024 ** powerOf(unit)).toFixed(powerOf(unit) ? 1 : 0)} ${UNITS[powerOf(unit)]}`;

// Returns the ticks of an axis from 0 to `end`, with about `room` pixels between two; they are round in units of `one`.
function ticksOf(end, wide, room, one = 1) {
  const unit = roundUp(end / one / Math.max(1, Math.floor(wide / room))) * one;
  return Array.from({ length: Math.floor(end / unit + 1e-6) + 1 }, (_, n) => n * unit);
}

const shareOf = (part, all) => `${(100 * part / (all || 1)).toFixed(1)} %`;
const slug = (phase) => `rb-phase-${phase.replace(" ", "-")}`;

// Returns the end of the memory axis, `wide` pixels long, whether the memory of the hardware is before it, and `most`, where larger
// layouts stand. There is room for a name behind all points. Where all layouts need far less than there is, the axis ends before.
function memoryAxis(rows, memory, wide) {
  const largest = Math.max(...rows.map(({ bytes }) => bytes));
  const most = rows.some(({ state }) => state === FITS) ? Math.min(FAR * memory, largest) : largest;
  const room = Math.min(wide / 2, NAME.aside + Math.max(...rows.map((row) => widthOf(nameOf(row, most)))));
  const hasLimit = most >= memory / 3;
  return { end: Math.max((most * wide) / (wide - room), hasLimit ? 1.05 * memory : 0), hasLimit, most };
}

// Returns the place of a step time between the bottom (0) and the top (1) of the picture, as a function, and the ticks.
function timeAxis(rows) {
  const times = rows.map(({ seconds }) => seconds);
  const [least, most] = [Math.min(...times), Math.max(...times)];
  if (most <= WIDE_RANGE * least) {
    const end = 1.08 * most;
    return { at: (seconds) => seconds / end, ticks: ticksOf(end, PLOT.tall, 46), isLog: false };
  }
  const [begin, end] = [Math.log10(least) - 0.2, Math.log10(most) + 0.1];
  const ticks = [];
  for (let power = Math.floor(begin); power <= end; power++) ticks.push(10 ** power);
  return { at: (seconds) => (Math.log10(seconds) - begin) / (end - begin), ticks: ticks.filter((tick) => Math.log10(tick) >= begin), isLog: true };
}

// Returns the base lines of the names at the right of points ({ key, x, y, name }), by key: a name moves down until it covers no
// other name, no point, and not the upright line at `limit`, if it can pass that.
function placeNames(points, limit) {
  const taken = points.map(({ x, y }) => [x - 8, y - 8, x + 8, y + 8]);
  const isFree = ([left, top, right, bottom]) => taken.every(([a, b, c, d]) => right <= a || left >= c || bottom <= b || top >= d);
  const places = new Map();
  for (const { key, x, y, name } of [...points].sort((a, b) => a.y - b.y)) {
    const wide = widthOf(name);
    const isAcross = x < limit && limit < x + NAME.aside + wide;
    const left = isAcross && x - NAME.aside - wide > PLOT.left ? x - NAME.aside - wide : x + NAME.aside;
    const boxAt = (base) => [left, base - 11, left + wide, base + 3];
    let base = y + 4;
    while (!isFree(boxAt(base))) base += 3;
    taken.push(boxAt(base));
    places.set(key, { x: left < x ? x - NAME.aside : left, y: base, side: left < x ? -1 : 1 });
  }
  return places;
}

// Returns the name beside a point; of a layout that is larger than `most`, with its bytes.
const nameOf = ({ name, bytes }, most) => shorten(bytes > most ? TEXT.beyond(name, binaryBytes(bytes)) : name, NAME.most);
const widthOf = (name) => NAME.letter * name.length;

// Returns the sentence at the top.
function verdict(plan, rows) {
  const sized = rows.filter(({ state }) => state !== FAILS);
  const fitting = sized.find(({ state }) => state === FITS);
  const smallest = sized.reduce((least, row) => (least && least.bytes <= row.bytes ? least : row), null);
  const of = (row) => TEXT.of(binaryBytes(row.bytes, plan.memory), binaryBytes(plan.memory));
  if (fitting) return TEXT.best(fitting.name, formatDuration(fitting.seconds), of(fitting));
  return smallest ? TEXT.noneFits(smallest.name, of(smallest)) : TEXT.allFail;
}

// Returns a layout in phrases: its time, its memory, and where its time goes.
function layoutPhrases(row, plan) {
  if (row.state === FAILS) return [`${row.name}: ${row.error}`];
  const rate = row.tokens === null ? [] : [TEXT.tokens(Math.round(row.tokens).toLocaleString("en"))];
  const time = [TEXT.step(formatDuration(row.seconds)), TEXT.peak(shareOf(row.peak, 1)), ...rate].join(", ");
  const parts = row.parts.map(([name, bytes]) => `${name} ${binaryBytes(bytes, plan.memory)}`).join(", ");
  const memory = `${TEXT.of(binaryBytes(row.bytes, plan.memory), binaryBytes(plan.memory))}${row.state === FITS ? "" : `, ${TEXT.tooLarge}`}`;
  const causes = row.causes.filter(([, seconds]) => seconds > 0.0005 * row.seconds);
  const spent = causes.map(([cause, seconds]) => `${shareOf(seconds, row.seconds)} ${cause}`).join(", ");
  return [`${row.name}: ${time}`, `${memory} (${parts}); ${TEXT.reserved(binaryBytes(row.reserved, plan.memory))}`, spent];
}

// ---- marks

const cross = "M-5 -5 L5 5 M5 -5 L-5 5";
const pointMark = (state) => (state === FITS ? svg("circle", { class: "rb-fits", r: 6 }) : svg("path", { class: "rb-too-large", d: cross }));

function pointNode({ key, row, name, x, y }, place, plan, isBest, isChosen) {
  const shift = place.y - 4 - y;
  const leader = Math.abs(shift) > 2 ? [svg("line", { class: "rb-leader", x1: 0, y1: 0, x2: place.x - x - 2 * place.side, y2: shift })] : [];
  return svg("g", { class: `rb-point${isBest ? " rb-best" : ""}${isChosen ? " rb-chosen" : ""}`, transform: `translate(${x} ${y})`, "data-layout": key, role: "button", "aria-label": layoutPhrases(row, plan).join(". ") },
    tip(layoutPhrases(row, plan).join("\n")), ...leader,
    svg("rect", { class: "rb-face", x: -10, y: -10, width: 20, height: 20 }),
    ...(isChosen ? [svg("circle", { class: "rb-ring", r: 10 })] : []),
    pointMark(row.state),
    label(place.x - x, place.y - y, name, place.side > 0 ? "rb-name" : "rb-name rb-end"));
}

// Draws the axes, and behind the line of the memory the ground of all that does not fit.
function axesNode(width, plan, memory, time) {
  const [begin, end, top, low] = [PLOT.left, width - PLOT.right, PLOT.top, PLOT.top + PLOT.tall];
  const x = (bytes) => begin + ((end - begin) * bytes) / memory.end;
  const one = 1024 ** powerOf(memory.end);
  const across = ticksOf(memory.end, end - begin, 84, one).slice(1);
  const limit = x(plan.memory);
  const words = binaryBytes(plan.memory);
  const line = memory.hasLimit
    ? [svg("rect", { class: "rb-behind", x: limit, y: top, width: Math.max(0, end - limit), height: PLOT.tall }),
       svg("line", { class: "rb-limit", x1: limit, x2: limit, y1: top - 8, y2: low }),
       label(limit - 5, top - 12, TEXT.limit(words), `rb-note ${limit > width / 2 ? "rb-end" : "rb-start"}`)]
    : [label(end, top - 12, TEXT.far(words), "rb-note rb-end")];
  return svg("g", { class: "rb-axes" }, ...line,
    ...time.ticks.map((tick) => [low - time.at(tick) * PLOT.tall, tick]).flatMap(([y, tick]) => [
      svg("line", { class: "rb-rule", x1: begin, x2: end, y1: y, y2: y }), label(begin - 8, y + 4, tick ? formatDuration(tick) : "0", "rb-note rb-end")]),
    ...across.map((tick) => label(x(tick), low + 16, `${+(tick / one).toPrecision(3)} ${UNITS[powerOf(memory.end)]}`, "rb-note rb-center")),
    label(4, top - 12, time.isLog ? TEXT.timeLog : TEXT.time, "rb-note"), label(end, low + 32, TEXT.memory, "rb-note rb-end"));
}

// Draws the step of one layout: a lane for compute, and one for each group's collectives. Returns the node and its height.
function timelineNode({ lanes, bars }, seconds, width) {
  const wide = width - LANE.left - LANE.right;
  const x = (time) => LANE.left + (wide * time) / seconds;
  const y = (lane) => LANE.head + lane * (LANE.tall + LANE.gap);
  const nodes = ticksOf(seconds, wide, 90).map((tick) => label(x(tick), 14, formatDuration(tick, seconds), "rb-note rb-center"));
  lanes.forEach((name, lane) => nodes.push(label(LANE.left - 8, y(lane) + 17, shorten(name, 14), "rb-end"),
    svg("rect", { class: "rb-track", x: LANE.left, y: y(lane), width: wide, height: LANE.tall, rx: 2 })));
  for (const [lane, begin, end, phase, words] of bars) {
    const length = Math.max(1, x(end) - x(begin) - 0.6);
    const fits = words && length > LANE.letter * words.length + 4;
    nodes.push(svg("g", { class: `rb-bar ${slug(phase)}` }, tip(`${[words, phase].filter(Boolean).join(", ")}: ${formatDuration(end - begin)}`),
      svg("rect", { x: x(begin).toFixed(1), y: y(lane) + 2, width: length.toFixed(1), height: LANE.tall - 4, rx: Math.min(2, length / 3).toFixed(1) }),
      ...(fits ? [label(x(begin) + length / 2, y(lane) + 17, words, "rb-center rb-words-on")] : [])));
  }
  return [svg("g", {}, ...nodes), y(lanes.length) + 2];
}

const phaseMark = (phase) => svg("g", { class: `rb-bar ${slug(phase)}` }, svg("rect", { x: -8, y: -6, width: 16, height: 12, rx: 2 }));
function legendOf(rows, bars) {
  const states = [[FITS, TEXT.fits], [TOO_LARGE, TEXT.tooLarge]].filter(([state]) => rows.some((row) => row.state === state));
  const phases = LISTS.plan.phases.filter((phase) => bars.some((bar) => bar[3] === phase));
  return [...states.map(([state, words]) => [pointMark(state), words]), ...phases.map((phase) => [phaseMark(phase), phase])];
}

export default panel("plan", TEXT.title, (frame) => {
  const sentence = html("p", { class: "rb-sentence", role: "status" });
  const fails = html("div", { class: "rb-fails", role: "group", "aria-label": TEXT.failing });
  const words = html("div", { class: "rb-words", role: "status" });
  const [axes, points] = [svg("g"), svg("g")];
  const timeline = svg("svg", { class: "rb-timeline", role: "img" });
  const below = html("div", { class: "rb-below" }, words, timeline);
  let [chosen, order, legend] = [null, [], ""];
  frame.head.after(sentence);
  frame.picture.append(axes, points);
  frame.root.insertBefore(fails, frame.legend);
  frame.root.insertBefore(below, frame.legend);
  set(frame.body, { "aria-label": TEXT.pictureTip });
  const choose = (key) => {
    chosen = key;
    frame.redraw();
  };
  points.addEventListener("click", ({ target }) => {
    const found = target.closest("[data-layout]");
    if (found) choose(found.dataset.layout);
  });
  frame.body.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(order[Math.max(0, Math.min(order.length - 1, order.indexOf(chosen) + by))]);
  });

  function showPoints(sized, plan, width) {
    const [wide, all] = [width - PLOT.left - PLOT.right, sized.map(([, row]) => row)];
    const [memory, time] = [memoryAxis(all, plan.memory, wide), timeAxis(all)];
    const x = (bytes) => PLOT.left + (wide * bytes) / memory.end;
    const places = sized.map(([key, row]) => ({
      key, row, name: nameOf(row, memory.most),
      x: x(Math.min(memory.most, row.bytes)),
      y: PLOT.top + PLOT.tall * (1 - time.at(row.seconds)),
    }));
    const names = placeNames(places, memory.hasLimit ? x(plan.memory) : Infinity);
    axes.replaceChildren(axesNode(width, plan, memory, time));
    const items = places.map((place) => ({ key: place.key, parts: [place.row, width, place.key === chosen], place }));
    join(points, items, (key, { place }) => pointNode(place, names.get(key), plan, key === order[0], key === chosen));
    const lowest = Math.max(PLOT.top + PLOT.tall + PLOT.low, ...[...names.values()].map(({ y }) => y + 6));
    frame.resize(width, lowest, 0, true);
  }

  function showFails(failing) {
    join(fails, failing.map(([key, row]) => ({ key, parts: [row, key === chosen], row })), (key, { row }) => {
      const node = html("button", { type: "button", class: "rb-step", "aria-pressed": key === chosen, title: row.error }, TEXT.fails(row.name));
      node.addEventListener("click", () => choose(key));
      return node;
    });
    fails.hidden = !failing.length;
  }

  function showChosen(row, drawn, plan, width) {
    join(words, layoutPhrases(row, plan).map((phrase) => ({ key: phrase, parts: [] })), (phrase) => html("p", {}, phrase));
    timeline.hidden = !drawn;
    set(timeline, { style: drawn ? null : "display:none" });
    if (!drawn) return timeline.replaceChildren();
    const [node, height] = timelineNode(drawn, row.seconds, width);
    timeline.replaceChildren(tip(TEXT.timeline(row.name, drawn.role)), node);
    set(timeline, { width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": TEXT.timeline(row.name, drawn.role) });
  }

  return (view, width) => {
    const plan = Object.values(view.plans)[0];
    const rows = Object.entries(view.planned).sort(([, a], [, b]) => a.order - b.order);
    order = rows.map(([key]) => key);
    chosen = order.includes(chosen) ? chosen : order[0];
    const sized = rows.filter(([, row]) => row.state !== FAILS);
    const count = (state) => rows.filter(([, row]) => row.state === state).length;
    const counts = [FITS, TOO_LARGE, FAILS].map((state) => [count(state), TEXT.stats[state](count(state)), state === FITS ? "" : "rb-warn"]);
    frame.showStats([plan.ranks.toLocaleString("en"), TEXT.stats.ranks(plan.hardware)], ...counts.filter(([number]) => number));
    setText(sentence, verdict(plan, rows.map(([, row]) => row)));
    frame.describe(`${sentence.textContent} ${rows.map(([, row]) => layoutPhrases(row, plan)[0]).join(". ")}.`);
    if (sized.length) showPoints(sized, plan, width);
    else frame.resize(width, 0, 0, true);
    frame.body.hidden = !sized.length;
    showFails(rows.filter(([, row]) => row.state === FAILS));
    showChosen(view.planned[chosen], view.timelines[chosen], plan, width);
    const marks = legendOf(rows.map(([, row]) => row), view.timelines[chosen]?.bars ?? []);
    const said = marks.map(([, text]) => text).join();
    if (said !== legend) frame.showLegend(marks);
    legend = said;
  };
});
