// The RRefs panel: a column for each worker and a row for each RRef.
// The square marks the owner and the circles the users. A line joins the users that the owner has confirmed; a dashed arrow is
// a message that is still on its way.
// Guarantees: only rows in sight are drawn. With no filter and no order, a row keeps its place while other RRefs come and go
// (see `Slots`).

const ROW = 36; // pixels
const MIDDLE = 18;
const OVERSCAN = 4; // rows drawn above and below those in sight
const ORDER = ["confirmed", "pending", "deleting", "listed"];
const MEANING = {
  confirmed: "confirmed by the owner",
  pending: "waits for the owner's confirmation",
  deleting: "being deleted",
  listed: "known to the owner only",
};

function ownerMark(state) {
  const mark = svg("g", { class: `rb-owner rb-${state}` });
  mark.append(svg("rect", { x: -7, y: -7, width: 14, height: 14, rx: 3 }));
  const sign = { failed: "!", lost: "×", unlisted: "?" }[state];
  if (sign) mark.append(label(0, 4, sign, "rb-sign"));
  return mark;
}

function forkMark(state, count) {
  const mark = svg("g", { class: `rb-fork rb-${state}` });
  const r = state === "listed" ? 3.5 : count > 1 ? 8 : 6;
  mark.append(svg("circle", { r }));
  if (state === "deleting") mark.append(svg("path", { d: "M-2.5 -2.5 L2.5 2.5 M-2.5 2.5 L2.5 -2.5" }));
  if (count > 1 && state !== "listed") mark.append(label(0, 3.5, count > 99 ? "99" : count, "rb-count"));
  return mark;
}

const put = (mark, x) => set(mark, { transform: `translate(${x} ${MIDDLE})` });

// Draws the marks of one row: the owner's square and, for each holder and state, one circle with the number of forks. Several
// marks in a column are side by side.
function marks(rref, forks, cols) {
  const cells = new Map([[rref.owner, [ownerMark(rref.state)]]]);
  const counts = new Map();
  for (const fork of forks) {
    const key = `${fork.holder} ${fork.state}`;
    counts.set(key, { fork, count: (counts.get(key)?.count ?? 0) + 1 });
  }
  const groups = [...counts.values()].sort((a, b) => ORDER.indexOf(a.fork.state) - ORDER.indexOf(b.fork.state));
  for (const { fork, count } of groups) {
    if (!cells.has(fork.holder)) cells.set(fork.holder, []);
    cells.get(fork.holder).push(forkMark(fork.state, count));
  }
  return [...cells].flatMap(([id, cell]) => {
    const distance = Math.min(19, (cols.step - 2) / cell.length);
    return cell.map((mark, i) => put(mark, cols.x(id) + (i - (cell.length - 1) / 2) * distance));
  });
}

// Draws the messages that are on their way. That of a pending fork goes from the parent to the holder, or from the holder to the
// owner; that of a deletion goes to the owner.
function transitArrows(rref, forks, cols) {
  const seen = new Set();
  const arrows = [];
  for (const { state, parent, holder, owner } of forks) {
    const fromParent = state === "pending" && parent !== null && parent !== holder;
    const [from, to] = fromParent ? [parent, holder] : [holder, owner];
    const key = `${state} ${from} ${to}`;
    if (!["pending", "deleting"].includes(state) || from === to || seen.has(key)) continue;
    seen.add(key);
    arrows.push(arrow(cols.x(from), cols.x(to), MIDDLE, state === "pending" ? 6 : -6, `rb-way rb-${state}`));
  }
  return arrows;
}

// Draws the line that joins the owner and the confirmed users.
function confirmedLine(rref, forks, cols) {
  const users = forks.filter((fork) => fork.state === "confirmed").map((fork) => cols.x(fork.holder));
  const [low, high] = [Math.min(cols.x(rref.owner), ...users), Math.max(cols.x(rref.owner), ...users)];
  return svg("line", { class: "rb-wire", x1: low, x2: high, y1: MIDDLE, y2: MIDDLE });
}

// Returns the class of a type such as `Tensor (N=32, C=3)`.
const className = (rref) => rref.type.split(" ")[0];

// Describes an RRef as text, for the tooltip, for screen readers and for the search.
function description(rref, forks, names) {
  const users = forks.map((fork) => `${fork.fork} at ${names(fork.holder)}: ${MEANING[fork.state]}`);
  const type = rref.type ? ` (${rref.type})` : "";
  const size = rref.size === null ? [] : [`${formatBytes(rref.size)} in tensors when it was made`];
  const cell = rref.number === null ? [] : [`made by cell [${rref.number}] on ${names(rref.by)}`];
  return [`RRef ${rref.rref}${type}, ${rref.state}, owned by ${names(rref.owner)}`, ...users, ...size, ...cell].join("\n");
}

function age(made) {
  const seconds = Math.max(0, Date.now() / 1000 - made);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

// Draws the second line of a row: size, age, and the cell that created the RRef, to which a click scrolls. The panel updates the
// age every second.
function details(rref, names, showCell) {
  const parts = [];
  if (rref.size !== null) parts.push(svg("tspan", {}, formatBytes(rref.size)));
  if (rref.made !== null) parts.push(svg("tspan", { class: "rb-age", "data-made": rref.made }, age(rref.made)));
  if (rref.number !== null) {
    const cell = svg("tspan", { class: "rb-cell", role: "link", tabindex: 0 }, `cell [${rref.number}]`);
    set(cell, { "aria-label": `show cell ${rref.number}, which made RRef ${rref.rref} on ${names(rref.by)}` });
    cell.addEventListener("click", () => showCell(rref));
    cell.addEventListener("keydown", (event) => event.key === "Enter" && showCell(rref));
    parts.push(cell);
  }
  const separated = parts.flatMap((part, i) => (i ? [" · ", part] : [part]));
  const line = label(12, 29, "", "rb-note");
  line.append(...separated);
  return line;
}

function row(rref, forks, slot, cols, names, showCell) {
  const room = Math.floor((LEFT + cols.step / 2 - 98) / 6.8); // characters, up to the first column's marks
  const text = description(rref, forks, names);
  const data = { "data-rref": rref.rref, "data-owner": rref.owner, "data-state": rref.state, "data-size": rref.size };
  return svg(
    "g",
    { class: "rb-row", role: "listitem", "aria-label": text, transform: `translate(0 ${slot * ROW})`, ...data },
    tip(text),
    svg("rect", { class: "rb-band", width: cols.width, height: ROW }),
    label(12, 15, shorten(rref.rref, 9), "rb-code"),
    label(78, 15, shorten(rref.type || "type unknown", room), rref.type ? "rb-kind" : "rb-note"),
    details(rref, names, showCell),
    confirmedLine(rref, forks, cols),
    ...transitArrows(rref, forks, cols),
    ...marks(rref, forks, cols),
    label(cols.width - 12, 22, rref.state, `rb-state rb-end rb-${rref.state}`),
  );
}

const legend = () => [
  [ownerMark("ready"), "owner"],
  [forkMark("confirmed", 1), "user"],
  [forkMark("pending", 1), "pending"],
  [forkMark("deleting", 1), "deleting"],
];

// Groups forks by RRef, and counts RRefs by owner, forks by holder, and forks by state.
function countForks(rrefs, forks) {
  const sums = { byRref: new Map(Object.keys(rrefs).map((key) => [key, []])), owned: {}, used: {}, states: {} };
  const add = (sum, key) => (sum[key] = (sum[key] ?? 0) + 1);
  for (const rref of Object.values(rrefs)) add(sums.owned, rref.owner);
  for (const fork of Object.values(forks)) {
    sums.byRref.get(fork.rref).push(fork);
    add(sums.used, fork.holder);
    add(sums.states, fork.state);
  }
  return sums;
}

function headline(frame, workers, rrefs, forks, { pending = 0, deleting = 0 }) {
  const total = Object.keys(rrefs).length;
  const size = Object.values(rrefs).reduce((sum, rref) => sum + (rref.size ?? 0), 0);
  const counts = [countStat(total, "RRef"), countStat(Object.keys(forks).length, "fork")];
  const held = size ? [[formatBytes(size), "in tensors"]] : [];
  frame.showStats(...counts, [pending, "pending", pending ? "rb-wait" : ""], [deleting, "deleting"], ...held, ...leftOutStats(workers));
  frame.showHint(total ? null : ["No RRef yet. Make one: ", 'rref = rpc.remote("worker1", torch.ones, args=(2,))']);
  frame.describe(`${plural(total, "RRef")} on ${plural(Object.keys(workers).length, "worker")}, ${pending} forks pending.`);
}

function drawStripes(parent, cols, tall) {
  const items = cols.list.map(({ id }) => ({ key: id, parts: [cols.key, tall], x: cols.x(id) }));
  join(parent, items, (_, { x }) => svg("line", { class: "rb-stripe", x1: x, x2: x, y1: 0, y2: tall }));
}

// ---- which rows, and in which order

const ORDERS = { "fixed places": null, "oldest first": older, "biggest first": bigger };
const IN_TRANSIT = ["pending", "deleting"];

function older(a, b) {
  return (a.made ?? Infinity) - (b.made ?? Infinity) || natural(a.rref, b.rref);
}

function bigger(a, b) {
  return (b.size ?? -1) - (a.size ?? -1) || older(a, b);
}

// A select element that keeps the chosen option, and its node, while the options change.
class Choice {
  constructor(name, first, changed) {
    this.first = first;
    this.select = html("select", { "aria-label": name });
    this.node = html("label", {}, `${name} `, this.select);
    this.select.addEventListener("change", changed);
    this.offer([]);
  }

  // Sets the options, [value, text] each. The chosen option stays even if it is not among them.
  offer(options) {
    const chosen = this.value;
    const all = [["", this.first], ...options];
    if (chosen && !options.some(([value]) => value === chosen)) all.push([chosen, this.text]);
    const items = all.map(([value, text]) => ({ key: value, parts: [text], value, text }));
    join(this.select, items, (_, { value, text }) => html("option", { value }, text));
    if (this.select.value !== chosen) this.select.value = chosen;
  }

  get value() {
    return this.select.value ?? "";
  }

  get text() {
    return this.select.selectedOptions[0]?.textContent ?? this.value;
  }
}

// The controls above the picture: filters, the order, and a search field. `changed` is called after each change.
class Controls {
  constructor(changed) {
    this.worker = new Choice("worker", "any", changed);
    this.type = new Choice("type", "any", changed);
    this.state = new Choice("state", "any", changed);
    this.order = new Choice("order", "fixed places", changed);
    this.order.offer(Object.keys(ORDERS).slice(1).map((name) => [name, name]));
    this.search = html("input", { type: "search", placeholder: "find", "aria-label": "find an RRef by its text" });
    this.search.addEventListener("input", changed);
    this.status = html("span", { role: "status" });
    const choices = [this.worker, this.type, this.state, this.order].map((choice) => choice.node);
    this.node = html("div", { class: "rb-tools" }, ...choices, this.search, this.status);
  }

  offer(workers, rrefs) {
    const all = Object.values(rrefs);
    this.worker.offer(Object.values(workers).map(({ id, name }) => [String(id), name]));
    const named = (values) => [...new Set(values)].filter(Boolean).sort(natural).map((value) => [value, value]);
    this.type.offer(named(all.map((rref) => className(rref))));
    this.state.offer(named([...all.map((rref) => rref.state), ...IN_TRANSIT]));
  }

  // Returns the keys to show, in order; null if all are shown, each in its place.
  chosen(rrefs, byRref, names) {
    const order = ORDERS[this.order.value];
    const [worker, type, state, text] = [this.worker.value, this.type.value, this.state.value, this.search.value.trim()];
    if (!(order || worker || type || state || text)) return null;
    const searched = text.toLowerCase();
    const fits = (rref) => {
      const forks = byRref.get(rref.rref);
      if (worker && rref.owner !== Number(worker) && !forks.some((fork) => fork.holder === Number(worker))) return false;
      if (type && className(rref) !== type) return false;
      if (state && rref.state !== state && !forks.some((fork) => fork.state === state)) return false;
      return !searched || description(rref, forks, names).toLowerCase().includes(searched);
    };
    const found = Object.values(rrefs).filter(fits);
    return found.sort(order ?? ((a, b) => natural(a.rref, b.rref))).map((rref) => rref.rref);
  }
}

// Scrolls to the cell that created an RRef. A front end that listens to the event, such as the JupyterLab extension, does it and
// calls preventDefault(). Otherwise the cell is found by its prompt number. Returns false if no cell has the number any more.
function revealCell(panel, { cell, number }) {
  const event = new CustomEvent("rpcbench:reveal", { bubbles: true, cancelable: true, detail: { cell, number } });
  if (!panel.dispatchEvent(event)) return true;
  const notebook = panel.closest(".jp-Notebook") ?? document;
  const prompts = [...notebook.querySelectorAll(".jp-InputPrompt")];
  const found = prompts.find((one) => one.textContent.trim() === `[${number}]:`)?.closest(".jp-Cell");
  if (!found) return false;
  found.scrollIntoView({ block: "center" });
  found.animate([{ backgroundColor: "rgb(230 159 0 / 35%)" }, {}], 1500);
  return true;
}

export default panel("rrefs", "RRefs", (frame) => {
  const slots = new Slots();
  const known = new Set(); // RRefs of earlier draws, in sight or not: they do not fade in when they come into sight
  const [stripes, rows] = [svg("g"), svg("g", { role: "list", "aria-label": "RRefs" })];
  let last = null;
  let pending = 0;
  const schedule = () => (pending ||= requestAnimationFrame(() => ((pending = 0), last && draw(...last))));
  const controls = new Controls(schedule);
  const showCell = (rref) => {
    const text = revealCell(frame.root, rref) ? "" : `Cell [${rref.number}] is no longer there, or has run again since.`;
    setText(controls.status, text);
  };
  frame.picture.append(stripes, rows);
  set(frame.picture, { role: "group" });
  frame.head.after(controls.node);
  frame.showLegend(legend());
  frame.body.addEventListener("scroll", schedule);
  const clock = setInterval(() => {
    for (const one of rows.querySelectorAll(".rb-age")) setText(one, age(Number(one.dataset.made)));
  }, 1000);
  frame.cleanups.push(() => clearInterval(clock), () => cancelAnimationFrame(pending));

  function draw({ workers, rrefs, forks }, width) {
    last = [{ workers, rrefs, forks }, width];
    const cols = columns(workers, width);
    const names = (id) => workers[id]?.name ?? `id ${id}`;
    const { byRref, owned, used, states } = countForks(rrefs, forks);
    controls.offer(workers, rrefs);
    const keys = controls.chosen(rrefs, byRref, names);
    const placed = keys ? keys.map((key, i) => [key, i]) : slots.place([...byRref.keys()].sort(natural), Infinity);
    const deepest = placed.length ? placed.at(-1)[1] + 1 : 0;
    setText(controls.status, keys ? `${placed.length} of ${byRref.size}` : "");

    headline(frame, workers, rrefs, forks, states);
    frame.resize(cols.width, Math.max(4, deepest) * ROW + 6, cols.head, true);
    drawHead(frame, cols, ({ id }) => `owns ${owned[id] ?? 0} · uses ${used[id] ?? 0}`);
    drawStripes(stripes, cols, deepest ? Math.max(4, deepest) * ROW + 6 : 0);
    const top = frame.body.scrollTop;
    const first = Math.floor(top / ROW) - OVERSCAN;
    const end = Math.ceil((top + frame.body.clientHeight) / ROW) + OVERSCAN;
    const items = placed
      .filter(([, slot]) => slot >= first && slot < end)
      .map(([key, slot]) => ({ key, slot, parts: [cols.key, slot, rrefs[key], ...byRref.get(key)] }));
    const redrawn = [];
    join(rows, items, (key, { slot }) => {
      const node = row(rrefs[key], byRref.get(key), slot, cols, names, showCell);
      if (known.has(key)) redrawn.push(node);
      return node;
    });
    let next = rows.firstChild; // the order of the nodes is the order in which screen readers read them
    for (const { key } of items) {
      const { node } = rows.children_.get(key);
      if (node === next) next = next.nextSibling;
      else rows.insertBefore(node, next);
    }
    for (const node of redrawn) node.classList.remove("rb-new");
    for (const key of known) if (!byRref.has(key)) known.delete(key);
    for (const key of byRref.keys()) known.add(key);
    set(rows, { "data-rows": placed.length });
  }
  return draw;
});
