// The panel of traffic: a matrix of the bytes that members send to one another, a row for each sender, a column for each receiver.
// Guarantees
// - A figure is that of the sender. A sender that has not reported has no squares, and one that is silent has dashed ones.
// - All figures of a pair stand in words below the picture: of the pair that was clicked, or under the pointer, or the busiest one.

const TEXT = STRINGS.traffic;
const [SECOND, TEN, ALL, SHARED] = [0, 1, 2, 3]; // places in a flow, see `telemetry/resource_views.py`
const CELL = { least: 11, most: 96, number: 66, tall: 32, flat: 22, line: 15 }; // pixels; `number`: the width from which on it has one
const EDGE = { least: 92, sum: 104, tight: 86, letters: 14, gap: 4 }; // beside the squares; `least` of the names at the left
const DECADES = 3; // powers of ten from the palest square to the darkest
const LEVELS = 12;
const DARKEST = 0.66; // opacity
const MOST_SECONDS = 10; // of the mean; fewer while the figures have only begun
const EMPTY = 90; // pixels of a panel without figures

// ---- pure functions

// Returns the members of the matrix, in order: all that are there, and those that have sent something.
function membersOf(workers, flows) {
  const isThere = (id) => !["left", "starts"].includes(workers[id].state) || Object.keys(flows[id]?.to ?? {}).length > 0;
  return Object.keys(workers).filter(isThere).sort(natural);
}

// Returns whether a member has gone: what the others have sent it, they no longer report.
const isGone = (workers, id) => ["left", "lost"].includes(workers[id].state);

// Returns the figure of a pair; 0 if nothing was sent, null if the sender has not reported.
const figureOf = (flows, from, to, span) => (flows[from] ? (flows[from].to[to]?.[span] ?? 0) : null);

// Returns the level of a figure, 0 to LEVELS, by powers of ten below the largest one.
function levelOf(value, top) {
  if (!value) return 0;
  return Math.max(1, Math.min(LEVELS, Math.round(LEVELS * (1 + Math.log10(value / top) / DECADES))));
}

// Returns the opacity of a level: also on the darkest square a number can be read.
const depthOf = (level) => (level && 0.06 + (DARKEST - 0.06) * (level / LEVELS)).toFixed(2);

// Returns the sums of a matrix: sent by each member, received by each, all, and the largest figure.
function sumsOf(members, flows, span) {
  const [sent, received] = [new Map(), new Map()];
  let [all, top] = [0, 0];
  for (const from of members)
    for (const to of members) {
      const value = from === to ? 0 : (figureOf(flows, from, to, span) ?? 0);
      sent.set(from, (sent.get(from) ?? 0) + value);
      received.set(to, (received.get(to) ?? 0) + value);
      all += value;
      top = Math.max(top, value);
    }
  return { sent, received, all, top };
}

// Returns the pairs that have sent something, the busiest first.
function busiest(members, flows, span) {
  const pairs = members.flatMap((from) => members.filter((to) => to !== from).map((to) => ({ from, to, value: figureOf(flows, from, to, span) ?? 0 })));
  return pairs.filter(({ value }) => value).sort((a, b) => b.value - a.value);
}

// Returns the geometry of the matrix in a panel of this width.
function gridOf(members, names, width) {
  const count = members.length;
  const longest = Math.max(0, ...members.map((member) => names(member).length));
  const left = Math.max(EDGE.least, 20 + Math.ceil(LETTER * Math.min(longest, EDGE.letters)));
  const right = width < TINY_FRAME ? EDGE.tight : EDGE.sum;
  const wide = Math.max(CELL.least, Math.min(CELL.most, Math.floor((width - left - right) / Math.max(1, count))));
  const tall = wide >= CELL.number ? CELL.tall : Math.min(CELL.flat, wide);
  const isSlanted = wide < 12 + LETTER * Math.min(longest, EDGE.letters);
  return {
    left, right, wide, tall, isSlanted, hasNumbers: wide >= CELL.number,
    every: [Math.ceil(CELL.line / wide), Math.ceil(CELL.line / tall)], // of columns and rows with a name
    head: isSlanted ? 26 + Math.round(0.75 * LETTER * Math.min(longest, EDGE.letters)) : 30,
    edge: left + count * wide + EDGE.gap,
    width: Math.max(width, left + count * wide + right),
    x: (i) => left + i * wide,
    y: (i) => i * tall,
    height: (count + 1) * tall + EDGE.gap + 8,
  };
}

// Returns a pair in phrases.
function pairPhrases(flows, from, to, names) {
  const [row, flow] = [flows[from], flows[from]?.to[to]];
  if (!row) return [TEXT.noReport(names(from))];
  const seconds = row.seconds ?? MOST_SECONDS;
  const late = row.silent ? [TEXT.silent(names(from))] : [];
  if (!flow) return [TEXT.none(names(from), names(to)), ...late];
  const figures = [SECOND, TEN, ALL].map((span) => formatBytes(flow[span]));
  const isFar = flows[to] && row.host !== flows[to].host;
  const share = `${Math.round((100 * flow[SHARED]) / flow[ALL])} %`;
  const way = isFar ? TEXT.network : flow[SHARED] ? TEXT.shared(formatBytes(flow[SHARED]), share) : TEXT.socket;
  return [`${TEXT.pair(names(from), names(to))}: ${TEXT.figures(...figures, seconds)}`, way, ...late];
}

// ---- marks

const squarePath = (x, y, wide, tall) => `M${x + 0.5} ${y + 0.5}h${wide - 1}v${tall - 1}h${1 - wide}z`;

// Draws the squares of a sender.
function rowNode(from, index, { members, flows, grid, span, sums, say }) {
  const nodes = [];
  const byLevel = new Map(); // one path for the squares of a level: pictures of many members are small then
  members.forEach((to, i) => {
    const value = from === to ? 0 : figureOf(flows, from, to, span);
    const level = levelOf(value, sums.top);
    if (level) byLevel.set(level, (byLevel.get(level) ?? "") + squarePath(grid.x(i), grid.y(index), grid.wide, grid.tall));
    if (level && grid.hasNumbers) {
      nodes.push(label(grid.x(i) + grid.wide / 2, grid.y(index) + grid.tall / 2 + 5, say(value), "rb-center rb-number"));
    }
  });
  const ground = members.map((to, i) => (to === from ? "" : squarePath(grid.x(i), grid.y(index), grid.wide, grid.tall))).join("");
  const sum = flows[from] ? say(sums.sent.get(from)) : "–";
  const hasName = index % grid.every[1] === 0;
  return svg("g", { class: `rb-row${flows[from]?.silent ? " rb-silent" : ""}${flows[from] ? "" : " rb-unknown"}`, "data-sender": from },
    svg("path", { class: "rb-ground", d: ground }),
    ...[...byLevel].map(([level, d]) => svg("path", { class: "rb-square", d, "fill-opacity": depthOf(level) })),
    ...nodes,
    ...(hasName ? [label(grid.edge + grid.right - 12, grid.y(index) + grid.tall / 2 + 5, sum, "rb-end rb-sum")] : []));
}

export default panel("traffic", TEXT.title, (frame) => {
  const choices = [TEN, SECOND, ALL].map((value) => ({ value, option: html("option", { value }) }));
  const span = html("select", { "aria-label": TEXT.span }, ...choices.map(({ option }) => option));
  const [names, rows, sums, ring] = ["rb-names", "rb-rows", "rb-sums", "rb-ring"].map((kind) => svg("g", { class: kind }));
  const words = html("div", { class: "rb-words", role: "status" });
  let [chosen, pointed, shown, legend] = [null, null, null, ""]; // pairs of ids: clicked, and under the pointer
  frame.head.append(html("span", { class: "rb-tools" }, span));
  frame.picture.append(rows, names, sums, ring);
  frame.root.insertBefore(words, frame.legend);
  set(frame.body, { "aria-label": TEXT.pictureTip });
  span.addEventListener("change", () => frame.redraw());

  // Returns the pair under the pointer, or null.
  function pairUnder({ clientX, clientY }) {
    const { left, top } = frame.picture.getBoundingClientRect();
    const { grid, members } = shown;
    const [i, j] = [Math.floor((clientY - top) / grid.tall), Math.floor((clientX - left - grid.left) / grid.wide)];
    return members[i] !== undefined && members[j] !== undefined ? [members[i], members[j]] : null;
  }
  frame.picture.addEventListener("pointermove", (event) => {
    pointed = shown && pairUnder(event);
    frame.redraw();
  });
  frame.picture.addEventListener("pointerleave", () => {
    pointed = null;
    frame.redraw();
  });
  frame.picture.addEventListener("click", (event) => {
    const pair = shown && pairUnder(event);
    chosen = pair && String(pair) !== String(chosen) ? pair : null;
    frame.redraw();
  });
  frame.body.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!shown || !(by || (event.key === "Escape" && chosen))) return; // else Escape is the notebook's
    event.preventDefault();
    event.stopPropagation();
    const { members } = shown;
    const bounded = (place) => members[Math.max(0, Math.min(members.length - 1, place))];
    const [from, to] = chosen ?? shown.busy ?? [members[0], members[0]];
    chosen = by ? [bounded(members.indexOf(from) + by[0]), bounded(members.indexOf(to) + by[1])] : null;
    frame.redraw();
  });

  function showNames({ members, grid, nameOf, workers }) {
    const items = members.map((member, i) => ({ key: member, parts: [nameOf(member), workers[member].state, i, grid.key], i }));
    const kind = (member) => `rb-is-${workers[member].state}`;
    const full = (member) => tip(`${nameOf(member)} (id ${member})`);
    const columnsNamed = items.filter(({ i }) => i % grid.every[0] === 0);
    join(frame.top, [{ key: "corner", parts: [grid.key] }, ...columnsNamed, { key: "sum", parts: [grid.key] }], (key, { i }) => {
      if (key === "corner") return svg("g", {}, label(12, grid.head - 8, `${TEXT.from} ↓  ${TEXT.to} →`, "rb-note"));
      if (key === "sum") return svg("g", {}, label(grid.edge + grid.right - 12, grid.head - 8, TEXT.sum, "rb-end rb-sum"));
      const text = shorten(nameOf(key), grid.isSlanted ? EDGE.letters : Math.floor((grid.wide - 6) / LETTER));
      const x = grid.x(i) + grid.wide / 2;
      if (!grid.isSlanted) return svg("g", {}, full(key), label(x, grid.head - 8, text, `rb-center ${kind(key)}`));
      return svg("g", {}, full(key), label(0, 0, text, kind(key), { transform: `translate(${x + 4} ${grid.head - 4}) rotate(-48)` }));
    });
    const rowsNamed = items.filter(({ i }) => i % grid.every[1] === 0);
    join(names, rowsNamed, (key, { i }) => svg("g", {}, full(key), label(grid.left - 8, grid.y(i) + grid.tall / 2 + 5, shorten(nameOf(key), EDGE.letters), `rb-end ${kind(key)}`)));
  }

  function showSums({ members, workers, grid, sums: found, say, flows }) {
    const y = grid.y(members.length) + EDGE.gap;
    const base = y + Math.max(15, grid.tall / 2 + 5);
    const each = grid.hasNumbers ? members.map((member, i) => label(grid.x(i) + grid.wide / 2, base, isGone(workers, member) ? "–" : say(found.received.get(member)), "rb-center rb-sum")) : [];
    const most = Math.max(0, ...found.received.values());
    // Without room for numbers a sum is a square like the others.
    const squares = grid.hasNumbers ? [] : members.map((member, i) =>
      svg("path", { class: "rb-square", d: squarePath(grid.x(i), y, grid.wide, grid.tall), "fill-opacity": depthOf(levelOf(found.received.get(member), most)) }));
    const all = Object.keys(flows).length ? say(found.all) : "–";
    sums.replaceChildren(label(grid.left - 8, base, TEXT.sum, "rb-end rb-sum"), ...each, ...squares, label(grid.edge + grid.right - 12, base, all, "rb-end rb-sum"));
  }

  function showWords({ members, workers, flows, nameOf, sums: found, say, grid, busy, period }) {
    const there = (pair) => (pair && pair.every((member) => members.includes(member)) ? pair : null);
    chosen = there(chosen);
    const pair = there(pointed) ?? chosen ?? busy;
    const told = (figures, id) => `${say(figures.get(id))} ${period}`;
    const ofMember = (id) => [TEXT.sent(nameOf(id), told(found.sent, id)), ...(isGone(workers, id) ? [] : [TEXT.received(nameOf(id), told(found.received, id))])];
    const phrases = !pair ? [] : pair[0] === pair[1] ? ofMember(pair[0]) : pairPhrases(flows, ...pair, nameOf);
    join(words, phrases.map((phrase) => ({ key: phrase, parts: [] })), (phrase) => html("p", {}, phrase));
    const marked = there(pointed) ?? chosen;
    if (!marked) return ring.replaceChildren();
    const [i, j] = marked.map((member) => members.indexOf(member));
    ring.replaceChildren(svg("rect", { x: grid.x(j), y: grid.y(i), width: grid.wide, height: grid.tall, rx: 2 }));
  }

  return ({ workers, flows }, width) => {
    const all = Object.values(workers);
    const isKnown = Object.keys(flows).length > 0;
    const moment = Number(span.value === "" || span.value === undefined ? TEN : span.value);
    const spans = TEXT.spans(Math.max(1, ...Object.values(flows).map((row) => row.seconds ?? MOST_SECONDS)));
    for (const { value, option } of choices) setText(option, spans[value]);
    const members = membersOf(workers, flows);
    const nameOf = (id) => workers[id]?.name ?? `id ${id}`;
    const isQuiet = isKnown && !busiest(members, flows, ALL).length;
    frame.showHint(!all.length ? STRINGS.workers.hint : !isKnown ? TEXT.wait : isQuiet ? TEXT.quiet : null);
    span.hidden = !isKnown || isQuiet;
    const ready = all.filter(({ id, state }) => id !== 0 && state === "up").length;
    if (!isKnown || isQuiet) {
      shown = null;
      for (const node of [frame.top, names, rows, words]) join(node, [], null);
      for (const node of [sums, ring]) node.replaceChildren();
      if (legend) frame.showLegend([]);
      legend = "";
      frame.showStats([ready, TEXT.stats.ready], ...leftOutStats(workers));
      frame.describe(TEXT.wait[0]);
      return frame.resize(width, roomFor(0, EMPTY), 0, true);
    }
    const say = (value) => (moment === ALL ? formatBytes(value) : TEXT.rate(formatBytes(value)));
    const found = sumsOf(members, flows, moment);
    const grid = gridOf(members, nameOf, width);
    grid.key = `${grid.left} ${grid.wide} ${grid.isSlanted} ${grid.width} ${members.length}`;
    const pairs = busiest(members, flows, moment);
    const most = pairs[0] ?? busiest(members, flows, ALL)[0];
    shown = { members, flows, workers, grid, span: moment, sums: found, say, nameOf, busy: [most.from, most.to], period: spans[moment] };
    frame.showStats([ready, TEXT.stats.ready], [say(found.all), TEXT.stats.sum], countStat(pairs.length, TEXT.stats.pair), ...leftOutStats(workers));
    frame.describe(TEXT.describe(say(found.all), spans[moment], pairs.slice(0, 3).map(({ from, to, value }) => `${TEXT.pair(nameOf(from), nameOf(to))} ${say(value)}`)));
    showNames(shown);
    const key = `${grid.key} ${moment} ${found.top} ${members.join()}`;
    join(rows, members.map((from, index) => ({ key: from, parts: [flows[from], key], index })), (from, { index }) => rowNode(from, index, shown));
    showSums(shown);
    showWords(shown);
    frame.resize(grid.width, grid.height, grid.head, true);
    const ramp = (share) => svg("rect", { class: "rb-square", x: -8, y: -7, width: 16, height: 14, "fill-opacity": depthOf(share * LEVELS) });
    const marks = found.top ? [1, 2 / 3, 1 / 3].map((share) => [ramp(share), TEXT.scale(say(Number((found.top * 10 ** (DECADES * (share - 1))).toPrecision(2))))]) : [];
    if (members.some((member) => flows[member]?.silent)) marks.push([svg("rect", { class: "rb-outline", x: -8, y: -7, width: 16, height: 14 }), TEXT.late]);
    const said = marks.map(([, text]) => text).join();
    if (said !== legend) frame.showLegend(marks);
    legend = said;
  };
});
