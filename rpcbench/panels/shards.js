// The sharding panel: a table with a column for each rank and a row for each parameter. In a cell, a box stands for the whole
// parameter, and the filled part is the piece that the rank holds. While fully_shard has the parameter gathered, the gathered
// part lights up; a flash marks one that was gathered since the last picture. Above the table stand the meshes.
// Guarantees
// - A row is drawn anew only when something in it has changed. At most `MOST_ROWS` rows are drawn; a line below has the rest.
// - All that the boxes and bars show is said in words too: in the tooltip of a cell, which screen readers read.

const TEXT = STRINGS.shards;
const MOST_ROWS = 300;
const [WIDE, NARROW, TALL] = [44, 14, 26]; // a box for a matrix, the width of one for a vector, the height of both
const ROOM = 128; // a column that is at least as wide has texts beside the boxes
const WIDE_ROOM = 200; // one that has bytes beside the shapes
const NAMES = 280; // of the first column
const { parts: PART_NAMES, ways: WAYS } = LISTS.shards; // see `telemetry/shard_views.py`
const PARTS = Object.keys(PART_NAMES);
const LEAST_SEAT = 76; // width of a rank of a mesh that has its name
const MESH = { wide: 92, tall: 22, gap: 14, left: 64, top: 18, small: 30, many: 16 };

const sumOf = (row) => PARTS.reduce((sum, part) => sum + row[part], 0);
const percentOf = (part, all) => (all ? `${Math.round((100 * part) / all)} %` : "–");
const byRank = (a, b) => (a.rank ?? a.worker) - (b.rank ?? b.worker) || a.worker - b.worker;

// `isUp`: whether the worker with an id is there.
function meshPicture(mesh, nameOf, isUp, room) {
  const { cells, down, across, grids } = meshCells(mesh);
  const seat = Math.min(MESH.wide, Math.floor((room / grids - MESH.gap - MESH.left / grids) / across));
  const [wide, tall] = [mesh.ranks.length > MESH.many || seat < LEAST_SEAT ? MESH.small : seat, MESH.tall];
  const [last, before] = [mesh.names.at(-1), mesh.names.at(-2)];
  const width = MESH.left + grids * (across * wide + MESH.gap);
  const height = MESH.top + down * tall;
  const words = TEXT.mesh(mesh.names.map((name, i) => `${name}=${mesh.shape[i]}`).join(", "));
  const axes = [label(MESH.left, 12, `${last} →`, "rb-note")];
  if (before) axes.push(label(MESH.left - 8, MESH.top + 14, `${before} ↓`, "rb-note rb-end"));
  const boxes = cells.map(({ rank, worker, column, row, grid }) => {
    const [x, y] = [MESH.left + grid * (across * wide + MESH.gap) + column * wide, MESH.top + row * tall];
    const name = worker === null ? "?" : nameOf(worker);
    const text = wide === MESH.small ? rank : shorten(`${rank} ${name}`, Math.floor((wide - 4) / LETTER));
    const kind = `rb-seat${worker === null || !isUp(worker) ? " rb-empty" : ""}`;
    return svg("g", { class: kind, "data-rank": rank }, tip(TEXT.seat(rank, name)),
      svg("rect", { x, y, width: wide - 3, height: tall - 3, rx: 3 }),
      label(x + wide / 2 - 1, y + tall - 7, text, "rb-center"));
  });
  const picture = svg("svg", { width, height, role: "img", "aria-label": words }, ...axes, ...boxes);
  return html("figure", { class: "rb-mesh" }, html("figcaption", {}, words), picture);
}

// ---- cells

// Draws the box of one piece.
function boxOf(piece, dims) {
  const [wide, tall] = [dims > 1 ? WIDE : NARROW, dims ? TALL : NARROW];
  const lit = piece.lit ? [areaOf(piece.lit, wide, tall, "rb-lit")] : [];
  return svg(
    "svg",
    { class: "rb-box", width: WIDE + 4, height: TALL + 4, viewBox: `-2 -2 ${WIDE + 4} ${TALL + 4}`, "aria-hidden": "true" },
    ...lit,
    areaOf(piece.block, wide, tall, "rb-held"),
    svg("rect", { class: "rb-outline", width: wide, height: tall, rx: 1.5 }),
  );
}

// Draws a bar of bytes, whose whole width is `all`; at the head of a column also what is gathered.
function barOf(row, all) {
  const names = row.gathered ? [...PARTS, "gathered"] : PARTS;
  const parts = names.map((part) => html("i", { class: `rb-part rb-part-${part}`, style: `width:${((100 * row[part]) / (all || 1)).toFixed(2)}%` }));
  return html("span", { class: "rb-bar", "aria-hidden": "true" }, ...parts);
}

// Returns what a cell shows as text.
function pieceWords(piece, param, name) {
  const bytes = PARTS.filter((part) => piece[part]).map((part) => `${formatBytes(piece[part])} ${PART_NAMES[part]}`);
  const gathers = piece.lit === null ? [] : [piece.now ? TEXT.whole(piece.times) : TEXT.gathered(piece.times)];
  const what = `${name}: ${piece.words}, ${sizeText(piece.size)} of ${sizeText(piece.shape)} ${piece.dtype}`;
  const where = piece.device === "cpu" ? [] : [TEXT.device(piece.device)];
  return [what, WAYS[param.way], bytes.join(", ") || TEXT.nothing, ...where, ...gathers].join("\n");
}

function cellOf(piece, param, { name, most, isFlash }) {
  if (!piece) return html("td", { class: "rb-missing", title: TEXT.missing(name) }, html("span", { class: "rb-dim" }, "–"));
  const words = pieceWords(piece, param, name);
  const kind = `rb-piece${piece.now ? " rb-now" : isFlash ? " rb-flash" : ""}`;
  const text = html("span", { class: "rb-texts" },
    html("span", { class: "rb-size" }, piece.parameter ? sizeText(piece.size) : piece.words,
      html("span", { class: "rb-dim rb-bytes" }, piece.parameter ? ` ${formatBytes(sumOf(piece))}` : "")),
    barOf(piece, most));
  const data = { "data-worker": piece.worker, "data-now": piece.now, "data-times": piece.times, "data-bytes": piece.parameter };
  return html("td", { class: kind, title: words, ...data },
    html("span", { class: "rb-cell" }, boxOf(piece, piece.shape.length), text, html("span", { class: "rb-hidden" }, words)));
}

function rowOf(param, cells) {
  const placed = param.placed || WAYS[param.way];
  const also = param.also.length ? ` ${TEXT.also(param.also.join(", "))}` : "";
  const head = html("th", { scope: "row", title: `${param.name}${also}\n${sizeText(param.shape)} ${param.dtype}\n${placed}` },
    html("span", { class: "rb-param" }, param.name),
    html("span", { class: "rb-note" }, `${sizeText(param.shape)} ${placed}${also}`));
  return html("tr", { class: `rb-way-${param.way}${param.differs ? " rb-differs" : ""}`, "data-param": param.name }, head, ...cells);
}

// ---- the table

// Draws the head of a column: a rank, and its bytes against those of the unsharded model.
function headOf(rank, model, name) {
  const [own, all] = [sumOf(rank), sumOf(model)];
  const where = [rank.rank === null ? [] : TEXT.rank(rank.rank), rank.places, ...rank.stages.map(TEXT.stage)].flat().filter(Boolean);
  const shares = PARTS.filter((part) => model[part]).map((part) =>
    `${formatBytes(rank[part])} of ${formatBytes(model[part])} ${PART_NAMES[part]} (${percentOf(rank[part], model[part])})`);
  const gathers = rank.most ? [TEXT.most(formatBytes(rank.gathered), formatBytes(rank.most))] : [];
  const words = [`${name}, ${where.join(", ")}`, ...shares, ...gathers].join("\n");
  const data = { "data-worker": rank.worker, "data-own": own, "data-gathered": rank.gathered, "data-steps": rank.steps };
  const gathered = html("span", { class: "rb-plus" }, rank.gathered ? `+ ${formatBytes(rank.gathered)}` : "");
  return html("th", { scope: "col", title: words, ...data },
    html("span", { class: "rb-name" }, name, gathered), html("span", { class: "rb-note" }, where.join(" · ")),
    barOf(rank, all),
    html("span", { class: "rb-note rb-share" }, TEXT.share(formatBytes(own), percentOf(own, all), formatBytes(all))),
    html("span", { class: "rb-note rb-percent" }, percentOf(own, all)),
    html("span", { class: "rb-hidden" }, words));
}

// Remembers how often each piece was gathered when it was drawn last: one that was gathered since then flashes.
class Flashes {
  constructor() {
    this.times = new Map();
  }

  isNew(key, piece) {
    const before = this.times.get(key);
    this.times.set(key, piece.times);
    return before !== undefined && piece.times > before && !piece.now;
  }
}

const mark = (part) => svg("g", { class: `rb-mark rb-part rb-part-${part}` }, svg("rect", { x: -8, y: -6, width: 16, height: 12, rx: 1 }));
const markOf = (way) => svg("g", { class: `rb-way-${way}` },
  svg("rect", { class: "rb-held", x: -8, y: -6, width: way === "sharded" ? 7 : 16, height: 12 }),
  svg("rect", { class: "rb-outline", x: -8, y: -6, width: 16, height: 12, rx: 1.5 }));
const litMark = () => svg("g", { class: "rb-now" }, svg("rect", { class: "rb-lit", x: -8, y: -6, width: 16, height: 12 }),
  svg("rect", { class: "rb-outline", x: -8, y: -6, width: 16, height: 12, rx: 1.5 }));

// Returns the legend of what is shown: [mark, text] each.
function legendOf(params, ranks) {
  const ways = [...new Set(params.map(({ way }) => way))];
  const lit = ranks.some((rank) => rank.most) ? [[litMark(), TEXT.lit]] : [];
  return [...ways.map((way) => [markOf(way), WAYS[way]]), ...lit, ...PARTS.map((part) => [mark(part), PART_NAMES[part]])];
}

function headline(frame, view, model, params, ranks) {
  const gathered = Math.max(0, ...ranks.map((rank) => rank.gathered));
  const most = Math.max(0, ...ranks.map((rank) => rank.most));
  const steps = Math.max(0, ...ranks.map((rank) => rank.steps));
  const stats = [countStat(params.length, TEXT.stats.parameter), [formatBytes(sumOf(model)), TEXT.stats.unsharded]];
  if (most) stats.push([formatBytes(gathered), TEXT.stats.gathered(formatBytes(most)), gathered ? "rb-wait" : ""]);
  if (steps) stats.push(countStat(steps, TEXT.stats.step));
  frame.showStats(...stats, ...leftOutStats(view.workers));
  const own = ranks.map((rank) => percentOf(sumOf(rank), sumOf(model)));
  frame.describe(TEXT.describe(model.model, plural(params.length, TEXT.stats.parameter), plural(ranks.length, "rank"), own.join(", ")));
}

export default panel("shards", TEXT.title, (frame) => {
  const flashes = new Flashes();
  const status = html("p", { class: "rb-hidden", role: "status" });
  const choose = html("select", { "aria-label": TEXT.shown, class: "rb-choose" });
  const find = html("input", { type: "search", placeholder: TEXT.find, "aria-label": TEXT.findTip });
  const tools = html("span", { class: "rb-tools" }, choose, find);
  const meshes = html("div", { class: "rb-meshes" });
  const [heads, rows] = [html("tr"), html("tbody")];
  const corner = html("th", { scope: "col", class: "rb-corner" }, TEXT.corner);
  const table = html("table", {}, html("caption", { class: "rb-hidden" }, TEXT.title), html("thead", {}, heads), rows);
  const rest = html("p", { class: "rb-rest" });
  let legend = "";
  frame.text = status; // this panel has no one picture with a description
  frame.body.before(status);
  frame.top.remove();
  frame.picture.replaceWith(meshes, table, rest);
  frame.head.append(tools);
  frame.fold(find);
  for (const [node, event] of [[choose, "change"], [find, "input"]]) node.addEventListener(event, () => frame.redraw());

  function showHeads(ranks, model, names, step) {
    const columns = ranks.map((rank) => ({ key: rank.worker, parts: [rank, model, names(rank.worker)], rank }));
    join(heads, [{ key: "corner", parts: [] }, ...columns], (key, { rank }) => (rank ? headOf(rank, model, names(key)) : corner));
    table.classList.toggle("rb-dense", step < ROOM);
    table.classList.toggle("rb-wide", step >= WIDE_ROOM);
  }

  function showRows(view, params, ranks, names) {
    const most = Math.max(1, ...Object.values(view.pieces).map(sumOf));
    const columns = ranks.map((rank) => `${rank.worker} ${names(rank.worker)}`).join();
    const items = params.slice(0, MOST_ROWS).map(([key, param]) => {
      const pieces = ranks.map(({ worker }) => view.pieces[`${key}/${worker}`]);
      return { key, parts: [param, columns, most, ...pieces], param, pieces };
    });
    join(rows, items, (key, { param, pieces }) => rowOf(param, pieces.map((piece, i) => {
      const isFlash = piece ? flashes.isNew(`${key}/${piece.worker}`, piece) : false;
      return cellOf(piece, param, { name: names(ranks[i].worker), most, isFlash });
    })));
    setText(rest, params.length > MOST_ROWS ? TEXT.more(params.length - MOST_ROWS) : "");
  }

  function chosenModel(models) {
    const all = Object.keys(models).sort(natural);
    join(choose, all.map((name) => ({ key: name, parts: [name] })), (name) => html("option", { value: name }, name));
    choose.hidden = all.length < 2;
    return models[choose.value] ?? models[all[0]];
  }

  return (view, width) => {
    const { workers, models } = view;
    const model = chosenModel(models);
    const of = (section) => Object.entries(view[section]).filter(([, row]) => row.model === model?.model);
    const names = (id) => workers[id]?.name ?? `id ${id}`;
    const ranks = of("ranks").map(([, row]) => row).sort(byRank);
    const all = of("params").sort(([, a], [, b]) => a.order - b.order);
    const wanted = find.value.trim().toLowerCase();
    const params = all.filter(([, { name }]) => name.toLowerCase().includes(wanted));
    frame.showHint(model ? null : Object.keys(workers).length ? TEXT.hint : STRINGS.workers.hint);
    for (const node of [table, tools]) node.hidden = !model;
    if (model) headline(frame, view, model, all.map(([, param]) => param), ranks);
    else frame.showStats(...leftOutStats(workers)), frame.describe(TEXT.none);
    const isUp = (id) => workers[id]?.state === "up";
    const drawn = of("meshes").map(([key, mesh]) => ({ key, parts: [JSON.stringify(mesh), mesh.workers.map((id) => [names(id), isUp(id)]).join(), width], mesh }));
    join(meshes, drawn, (_, { mesh }) => meshPicture(mesh, names, isUp, width - 24));
    frame.showRemarks(Object.values(view.remarks).filter((row) => !row.model || row.model === model?.model));
    showHeads(ranks, model, names, (width - NAMES) / Math.max(1, ranks.length));
    showRows(view, params, ranks, names);
    const marks = model ? legendOf(all.map(([, param]) => param), ranks) : [];
    const words = marks.map(([, text]) => text).join();
    if (words !== legend) frame.showLegend(marks);
    legend = words;
  };
});
