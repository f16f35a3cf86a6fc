// One value of a comparison: its verdict, its error on each rank, and where it differs; below the picture of all values.
// Guarantees
// - All that bars and maps show of a rank is said in words too, in the tooltip of its part.

const VERDICTS = LISTS.compare.words; // see `telemetry/compare_view.py`
const MOST_PARTS = 32; // ranks that are drawn
const HEAT = 10; // percent of the largest difference in one level of a map
const KEY = { tall: 18, cell: 9 }; // lines below the ranks that say what bars and maps show
// Paths of signs: all verdicts but an empty outline have one.
const SIGNS = {
  wrong: "M-3 -3 L3 3 M3 -3 L-3 3", right: "M-3.5 0.2 L-1 2.8 L3.5 -2.6",
  "cannot tell": "M-2.2 -1.6 a2.2 2.2 0 1 1 3.4 1.8 q-1.2 0.8 -1.2 1.6 M0 4 v0.3",
};
const PART = { wide: 138, bar: 132, head: 46, gap: 14, map: 132, low: 12, left: 12 };

// Returns a number as 2.6 or 3.1e-7; null stands for one that is not finite.
function shortNumber(number) {
  if (number === null) return TEXT.infinite;
  const isPlain = number === 0 || (Math.abs(number) >= 0.001 && Math.abs(number) < 100_000);
  return isPlain ? String(Number(number.toPrecision(2))) : number.toExponential(1);
}

const kindOf = (word) => `rb-is-${word.replace(" ", "-")}`;
const rankNames = (ranks) => (ranks.length === 1 ? TEXT.rank(ranks[0]) : TEXT.ranks(ranks.join(", ")));

// Returns a value's name among those of its module and phase: the part of an output, the number of a call.
const partName = ({ part, call }) => [part, call === null ? "" : TEXT.call(call)].filter(Boolean).join(" ") || TEXT.value;

// Returns how many times larger an error is, as 460,000.
function timesOf(error, allowed) {
  const times = Number((error / allowed).toPrecision(2));
  return times < 1e9 ? String(times).replace(/\B(?=(\d{3})+$)/g, ",") : times.toExponential(1);
}

const isOver = (error, allowed) => error === null || error > allowed;

// Returns on which ranks a wrong value differs, in words.
function wrongRanks({ errors, allowed, ranks }) {
  const over = errors.filter(([, error]) => isOver(error, allowed)).map(([rank]) => rank);
  if (!over.length) return "";
  return over.length === ranks.length && over.length > 1 ? TEXT.onAll(over.length) : TEXT.on(rankNames(over));
}

// Returns a value in phrases: what it is with its verdict, its size and error, and how the ranks have it. `first` is the
// key of the first difference.
function valuePhrases(row, first) {
  const part = partName(row) === TEXT.value ? "" : ` ${partName(row)}`;
  const isWrong = row.word === "wrong";
  const place = row.key === first ? (isWrong ? TEXT.isFirst : TEXT.isFirstRight) : isWrong && first ? TEXT.isLater : "";
  const what = `${row.phase} ${row.name || TEXT.model}${part}: ${VERDICTS[row.word] ?? row.word}${isWrong ? wrongRanks(row) : ""}${place}`;
  const about = `${row.dtype} ${sizeText(row.shape)}, ${TEXT.norm(shortNumber(row.norm))}`;
  const times = isWrong && row.error !== null && row.allowed > 0 ? TEXT.times(timesOf(row.error, row.allowed)) : "";
  const errors = row.ranks.length ? TEXT.error(shortNumber(row.error), shortNumber(row.allowed)) + times : "";
  const layout = !row.words ? "" : isWrong ? TEXT.nearest(row.words) : TEXT.layout(row.words);
  const scale = row.factor !== null && row.factor !== 1 ? TEXT.scale(shortNumber(row.factor)) : "";
  return [what, [about, errors].filter(Boolean).join(", "), layout, scale].filter(Boolean);
}

// Returns what is drawn for each rank: its `ranks` (several, if their summands were added up), `error`, `note`, and `map`.
function partsOf(row) {
  const found = row.maps.map(([ranks, shape, cells]) => ({ ranks, map: { shape, cells } }));
  const mapped = new Set(found.flatMap(({ ranks }) => ranks));
  const errors = new Map(row.errors);
  for (const [rank] of row.errors) if (!mapped.has(rank)) found.push({ ranks: [rank] });
  for (const part of found) part.error = errors.get(part.ranks[0]) ?? null;
  for (const rank of row.missing) found.push({ ranks: [rank], error: null, note: TEXT.missing });
  return found.sort((a, b) => a.ranks[0] - b.ranks[0]);
}

// Returns the numbers of cells down and across, and the width and height of one.
function mapSides(cells) {
  const [down, across] = [cells.length, cells[0]?.length ?? 0];
  const side = Math.max(2, Math.min(PART.low, Math.floor(PART.map / Math.max(1, down, across))));
  return [down, across, side, down === 1 ? PART.low : side];
}

// Draws the map of a rank: a cell for a number, or for a block of numbers, as red as the largest difference in it.
function mapNode({ cells }) {
  const [down, across, wide, tall] = mapSides(cells);
  const levels = new Map(); // one path for all cells of a level: stills are small then
  const levelAt = (x, y) => Math.ceil((cells[y][x] ?? 0) / HEAT);
  for (let y = 0; y < down; y++)
    for (let x = 0, end; x < across; x = end) {
      const level = levelAt(x, y);
      for (end = x + 1; end < across && levelAt(end, y) === level; end++);
      const width = (end - x) * wide;
      if (level) levels.set(level, `${levels.get(level) ?? ""}M${x * wide} ${y * tall}h${width}v${tall}h-${width}z`);
    }
  return svg("g", { class: "rb-map" },
    svg("rect", { class: "rb-ground", width: across * wide, height: down * tall }),
    ...[...levels].map(([level, d]) => svg("path", { class: "rb-heat", d, "fill-opacity": (level * HEAT) / 100 })),
    svg("rect", { class: "rb-outline", width: across * wide, height: down * tall }));
}

// Draws what one rank has: its error as a bar, with a tick at what is allowed, and the map.
function partNode(part, allowed, scale, at) {
  const { ranks, error, note, map } = part;
  const over = isOver(error, allowed);
  const said = note ?? (error === null ? TEXT.infinite : TEXT.off(shortNumber(error)));
  const place = map ? TEXT.piece(sizeText(map.shape)) : "";
  const words = [rankNames(ranks), said, place].filter(Boolean).join(", ");
  const tick = (PART.bar * allowed) / scale;
  return svg("g", { class: `rb-part ${kindOf(over ? "wrong" : "right")}`, transform: `translate(${at.x} ${at.y})`, "data-ranks": ranks.join() },
    tip(words),
    label(0, 14, ranks.length === 1 ? rankNames(ranks) : TEXT.sum(ranks.length), "rb-worker"),
    label(PART.bar, 14, note ?? shortNumber(error), "rb-end rb-note"),
    svg("rect", { class: "rb-plate", y: 22, width: PART.bar, height: 8, rx: 2 }),
    svg("rect", { class: "rb-length", y: 22, width: error === null ? PART.bar : (PART.bar * error) / scale, height: 8, rx: 2 }),
    tick > 0 && tick < PART.bar ? svg("line", { class: "rb-tick", x1: tick, x2: tick, y1: 19, y2: 33 }) : "",
    ...(map ? [svg("g", { transform: `translate(0 ${PART.head - 4})` }, mapNode(map))] : []));
}

// Returns a text as lines of at most `most` characters; a longer word has a line of its own.
const wrapWords = (text, most) =>
  text.split(" ").reduce(([...lines], word) => {
    if (lines.length && lines.at(-1).length + word.length < most) lines.push(`${lines.pop()} ${word}`);
    else lines.push(word);
    return lines;
  }, []);

// Says what bars and maps show, in this width. `largest` is the difference of the darkest cell; null if one is not finite.
// Returns a node for each line.
function keyNodes({ allowed, largest }, maps, y, width) {
  const levels = Array.from({ length: 100 / HEAT }, (_, n) => svg("rect", { class: "rb-heat", x: (n + 1) * KEY.cell, width: KEY.cell, height: KEY.cell, "fill-opacity": ((n + 1) * HEAT) / 100 }));
  const wide = KEY.cell * (1 + levels.length);
  const ramp = svg("g", { class: "rb-ramp", transform: "translate(14 1)" }, svg("rect", { class: "rb-ground", width: wide, height: KEY.cell }), ...levels,
    svg("rect", { class: "rb-outline", width: wide, height: KEY.cell }));
  const bar = svg("rect", { class: "rb-length", y: 2, width: 20, height: 6, rx: 2 });
  const parts = [[28, TEXT.bar(shortNumber(allowed)), bar, svg("line", { class: "rb-tick", x1: 6, x2: 6, y1: -2, y2: 12 })]];
  if (maps.length) {
    const sizes = [...new Set(maps.map(({ shape }) => sizeText(shape)))];
    const isPooled = maps.some(({ shape, cells }) => shape[0] > cells.length || shape[1] > (cells[0]?.length ?? 0));
    parts.push([0, TEXT.map(sizes.length === 1 ? sizes[0] : "", isPooled)]);
    parts.push([20 + wide, TEXT.ramp(largest === null ? TEXT.notFinite : shortNumber(largest), isPooled), label(0, 9, "0", "rb-note"), ramp]);
  }
  const lines = parts.flatMap(([x, text, ...marks]) =>
    wrapWords(text, (width - 2 * PART.left - x) / LETTER).map((line, n) => [...(n ? [] : marks), label(x, 9, line, "rb-note")]));
  return lines.map((line, n) => svg("g", { class: `rb-key-line ${kindOf("wrong")}`, transform: `translate(${PART.left} ${y + n * KEY.tall})` }, ...line));
}

// Draws a value's ranks side by side. Returns [node, width, height].
function evidence(row, width) {
  const all = partsOf(row);
  const parts = all.slice(0, MOST_PARTS);
  const allowed = row.allowed ?? 0;
  const scale = Math.max(...parts.map(({ error }) => error ?? 0), allowed) || 1;
  const across = Math.max(1, Math.floor((width - 2 * PART.left) / (PART.wide + PART.gap)));
  const nodes = [];
  let y = 6;
  for (let n = 0; n < parts.length; n += across) {
    const line = parts.slice(n, n + across);
    nodes.push(...line.map((part, i) => partNode(part, allowed, scale, { x: PART.left + i * (PART.wide + PART.gap), y })));
    y += PART.head + Math.max(0, ...line.map(({ map }) => (map ? mapSides(map.cells)[0] * mapSides(map.cells)[3] + 8 : 0)));
  }
  if (all.length > parts.length) nodes.push(label(PART.left, (y += 16), TEXT.moreRanks(all.length - parts.length), "rb-note"));
  const isMeasured = parts.some(({ note }) => !note);
  const lines = isMeasured ? keyNodes(row, parts.flatMap(({ map }) => map ?? []), y + 8, width) : [];
  return [svg("g", {}, ...nodes, ...lines), parts.length ? y + 10 + KEY.tall * lines.length : 0];
}
