// The RRefs panel: a column for each worker and a row for each RRef, or for a group of RRefs of one type or one cell.
// The square marks the owner and the circles the users; each type has a colour. A line joins the users that the owner has
// confirmed; a dashed arrow is a message that is still on its way. In a row of a group the marks have numbers.
// Guarantees: only rows in sight are drawn. RRefs that live long stand first, so a row seldom moves while others come and go.

const TEXT = STRINGS.rrefs;
const ROW = 40; // pixels
const MIDDLE = 20;
const SIDE = 200; // pixels beside the columns, for the texts of a row
const OVERSCAN = 4; // rows drawn above and below those in sight
const STATES = LISTS.rrefs.states; // in words, see `telemetry/views.py`
const NAMED = 3; // types of one colour in the legend
const MANY_WORKERS = 8; // with more workers or RRefs than these, rows are grouped unless the user decides
const MANY_RREFS = 50;
const STACKED = 46; // in narrower columns the two marks of a group stand one above the other
const ORDER = ["confirmed", "pending", "deleting", "listed"];

function ownerMark(state) {
  const mark = svg("g", { class: `rb-owner rb-${state}` });
  mark.append(svg("rect", { x: -7, y: -7, width: 14, height: 14, rx: 3 }));
  const sign = { failed: "!", lost: "×", unlisted: "?" }[state];
  if (sign) mark.append(label(0, 4.5, sign, "rb-sign"));
  return mark;
}

function forkMark(state, count) {
  const mark = svg("g", { class: `rb-fork rb-${state}` });
  const r = state === "listed" ? 3.5 : count > 1 ? 10 : 6;
  mark.append(svg("circle", { r }));
  if (state === "deleting") mark.append(svg("path", { d: "M-2.5 -2.5 L2.5 2.5 M-2.5 2.5 L2.5 -2.5" }));
  if (count > 1 && state !== "listed") mark.append(label(0, 4.5, count > 99 ? "99" : count, "rb-count"));
  return mark;
}

const put = (mark, x, y = MIDDLE) => set(mark, { transform: `translate(${x} ${y})` });

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
const className = (rref) => rref.type.split(" ")[0] || TEXT.unknown;

// Describes an RRef as text, for the tooltip, for screen readers and for the search.
function description(rref, forks, names) {
  const users = forks.map((fork) => `${fork.fork} at ${names(fork.holder)}: ${TEXT.forks[fork.state]}`);
  const type = rref.type ? ` (${rref.type})` : "";
  const size = rref.size === null ? [] : [`${formatBytes(rref.size)} in tensors when it was made`];
  const cell = rref.number === null ? [] : [`made by cell [${rref.number}] on ${names(rref.by)}`];
  const what = `RRef ${rref.rref}${type}, ${STATES[rref.state]}, owned by ${names(rref.owner)}`;
  return [what, ...users, ...size, ...cell].join("\n");
}

// Returns an age as text; `now`: seconds since 1970.
function age(made, now) {
  const seconds = Math.max(0, now - made);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} days`;
}

// Draws the second line of a row: size, age, and the cell that created the RRef, to which a click scrolls. The panel updates the
// age every second.
function details(rref, now, names, showCell) {
  const parts = [];
  if (rref.size !== null) parts.push(svg("tspan", {}, formatBytes(rref.size)));
  if (rref.made !== null && now !== null) parts.push(svg("tspan", { class: "rb-age", "data-made": rref.made }, age(rref.made, now)));
  if (rref.number !== null) {
    const cell = svg("tspan", { class: "rb-cell", role: "link", tabindex: 0 }, `cell [${rref.number}]`);
    set(cell, { "aria-label": `show cell ${rref.number}, which made RRef ${rref.rref} on ${names(rref.by)}` });
    cell.addEventListener("click", () => showCell(rref));
    cell.addEventListener("keydown", (event) => event.key === "Enter" && showCell(rref));
    parts.push(cell);
  }
  const separated = parts.flatMap((part, i) => (i ? [" · ", part] : [part]));
  const line = label(12, 33, "", "rb-note");
  line.append(...separated);
  return line;
}

function row(rref, forks, { slot, isInside, colour, now }, cols, names, showCell) {
  const left = isInside ? 30 : 12;
  const room = Math.floor((SIDE + cols.step / 2 - left - 98) / 7.2); // characters, up to the first column's marks
  const text = description(rref, forks, names);
  const data = { "data-rref": rref.rref, "data-owner": rref.owner, "data-state": rref.state, "data-size": rref.size };
  const at = { class: `rb-row rb-type-${colour}`, transform: `translate(0 ${slot * ROW})` };
  return svg(
    "g",
    { ...at, role: "listitem", "aria-label": text, ...data },
    tip(text),
    svg("rect", { class: "rb-band", width: cols.width, height: ROW }),
    svg("g", { transform: `translate(${left - 12} 0)` },
      label(12, 16, shorten(rref.rref, 9), "rb-code"),
      label(88, 16, shorten(rref.type || TEXT.unknown, room), rref.type ? "rb-kind" : "rb-note"),
      details(rref, now, names, showCell)),
    confirmedLine(rref, forks, cols),
    ...transitArrows(rref, forks, cols),
    ...marks(rref, forks, cols),
    label(cols.end, 25, STATES[rref.state], `rb-state rb-end rb-${rref.state}`),
  );
}

const legend = (types) => {
  const swatch = (colour) => svg("rect", { class: `rb-swatch rb-type-${colour}`, x: -5, y: -5, width: 10, height: 10, rx: 2 });
  const marks = [
    [ownerMark("ready"), TEXT.legend.owner],
    [forkMark("confirmed", 1), TEXT.legend.user],
    [forkMark("pending", 1), TEXT.legend.pending],
    [forkMark("deleting", 1), TEXT.legend.deleting],
  ];
  return [...marks, ...types.map(([colour, names]) => [swatch(colour), names])];
};

// Returns the colours of these RRefs, and the names of the types of each: [colour, text].
function coloursIn(rrefs) {
  const byColour = new Map();
  const named = new Map(rrefs.map((rref) => [className(rref), rref.colour]));
  for (const [name, colour] of [...named].sort(([a], [b]) => natural(a, b))) byColour.set(colour, [...(byColour.get(colour) ?? []), name]);
  return [...byColour].map(([colour, names]) => [colour, names.slice(0, NAMED).join(", ") + (names.length > NAMED ? ", …" : "")]);
}

// ---- groups

const GROUPS = {
  type: (rref) => [className(rref), className(rref)],
  cell: ({ by, cell, number }) => (number === null ? ["none", TEXT.noCell] : [`${by} ${cell} ${number}`, `in cell [${number}]`]),
};

// Returns the name of a grouping in `GROUPS`, or null: the user's choice, or by type where there would be too many rows.
function grouping(choice, workers, count) {
  if (choice) return choice in GROUPS ? choice : null;
  const isMuch = Object.keys(workers).filter((id) => id !== "0").length > MANY_WORKERS || count > MANY_RREFS;
  return isMuch ? "type" : null;
}

// Returns the rows to show, in the order of `keys`: a row for each RRef, or with a grouping a row for each group of several,
// and below it the RRefs of the group if it is in `open`. A group stands where its first RRef would.
function linesOf(keys, rrefs, by, open) {
  if (by === null) return keys.map((key) => ({ key, rref: key, isInside: false }));
  const groups = new Map();
  for (const key of keys) {
    const [id, name] = GROUPS[by](rrefs[key]);
    if (!groups.has(id)) groups.set(id, { key: `${by} ${id}`, name, members: [] });
    groups.get(id).members.push(key);
  }
  return [...groups.values()].flatMap((group) => {
    if (group.members.length === 1) return [{ key: group.members[0], rref: group.members[0], isInside: false }];
    const isOpen = open.has(group.key);
    const inside = isOpen ? group.members.map((key) => ({ key, rref: key, isInside: true })) : [];
    return [{ ...group, isOpen }, ...inside];
  });
}

// Sums up the RRefs of a group: how many each worker owns and uses, how many are in each state, and the bytes.
function sumUp(members, rrefs, byRref) {
  const sums = { owned: new Map(), used: new Map(), states: new Map(), types: new Set(), size: 0 };
  const add = (map, key) => map.set(key, (map.get(key) ?? 0) + 1);
  for (const key of members) {
    add(sums.owned, rrefs[key].owner);
    add(sums.states, rrefs[key].state);
    sums.types.add(className(rrefs[key]));
    sums.size += rrefs[key].size ?? 0;
    for (const fork of byRref.get(key)) add(sums.used, fork.holder);
  }
  return sums;
}

function groupMarks({ owned, used }, cols) {
  const mark = (kind, shape, count) => svg("g", { class: kind }, shape, label(0, 4.5, count > 99 ? "99+" : count, "rb-count"));
  const width = Math.min(22, cols.step - 5);
  const box = (rx) => svg("rect", { x: -width / 2, y: -9, width, height: 18, rx });
  const square = (count) => mark("rb-owner rb-ready", box(4), count);
  const circle = (count) => mark("rb-fork rb-confirmed", box(9), count);
  const ids = new Set([...owned.keys(), ...used.keys()]);
  return [...ids].flatMap((id) => {
    const both = [owned.has(id) && square(owned.get(id)), used.has(id) && circle(used.get(id))].filter(Boolean);
    const across = both.length > 1 && cols.step >= STACKED ? 12 : 0;
    const down = both.length > 1 && !across ? 10 : 0;
    return both.map((one, i) => put(one, cols.x(id) + (2 * i - 1) * across, MIDDLE + (2 * i - 1) * down));
  });
}

function groupRow({ key, name, members, isOpen, slot, colour, sums }, cols, names, toggle) {
  const states = [...sums.states].map(([state, count]) => `${count} ${STATES[state]}`);
  const worst = ["lost", "failed", "unlisted", "computing", "ready"].find((state) => sums.states.has(state));
  const of = (map, verb) => [...map].map(([id, count]) => `${names(id)} ${verb} ${count}`);
  const counts = [...of(sums.owned, TEXT.owns), ...of(sums.used, TEXT.uses)];
  const text = [`${members.length} ${name}: ${states.join(", ")}`, ...counts].join("\n");
  const room = Math.floor((SIDE + cols.step / 2 - 48) / 7.6);
  const size = sums.size ? `${formatBytes(sums.size)} ${TEXT.inTensors}` : "";
  const at = { class: `rb-row rb-group rb-type-${colour}`, transform: `translate(0 ${slot * ROW})` };
  const node = svg(
    "g",
    { ...at, role: "listitem", "data-group": key },
    svg("rect", { class: "rb-band", width: cols.width, height: ROW }),
    svg("g", { class: "rb-fold", role: "button", tabindex: 0, "aria-expanded": isOpen, "aria-label": text },
      tip(text),
      svg("rect", { class: "rb-face", x: 2, y: 2, width: cols.width - 4, height: ROW - 4, rx: 4 }),
      label(12, 16, isOpen ? "▾" : "▸", "rb-note"),
      label(28, 16, shorten(`${members.length} ${name}`, room), "rb-strong"),
      label(28, 33, size, "rb-note")),
    ...groupMarks(sums, cols),
    label(cols.end, 25, `${sums.states.get(worst)} ${STATES[worst]}`, `rb-state rb-end rb-${worst}`),
  );
  node.addEventListener("click", () => toggle(key));
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    toggle(key);
  });
  return node;
}

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
  const counts = [countStat(total, "RRef"), countStat(Object.keys(forks).length, TEXT.user)];
  const waits = pending ? [[pending, TEXT.forks.short.pending, "rb-wait"]] : [];
  const ends = deleting ? [[deleting, TEXT.forks.short.deleting]] : [];
  const held = size ? [[formatBytes(size), TEXT.inTensors]] : [];
  frame.showStats(...counts, ...waits, ...ends, ...held, ...leftOutStats(workers));
  frame.showHint(total ? null : Object.keys(workers).length ? TEXT.hint : STRINGS.workers.hint);
  frame.describe(TEXT.describe(plural(total, "RRef"), plural(Object.keys(workers).length, "member"), pending));
}

function drawStripes(parent, cols, tall) {
  const items = cols.list.map(({ id }) => ({ key: id, parts: [cols.key, tall], x: cols.x(id) }));
  join(parent, items, (_, { x }) => svg("line", { class: "rb-stripe", x1: x, x2: x, y1: 0, y2: tall }));
}

// ---- which rows, and in which order

const ORDERS = {
  creation: (births) => older(births),
  newest: (births) => (a, b) => older(births)(b, a),
  size: (births) => (a, b) => (b.size ?? -1) - (a.size ?? -1) || older(births)(a, b),
};
const IN_TRANSIT = ["pending", "deleting"];

// Returns when each RRef was created, by its id, in seconds: no later than those that the same member created after it, as the
// numbers in ids count them. The owner reports when the value came to it, which is not known yet for some, and may be later.
function birthsOf(rrefs) {
  const births = new Map();
  const latest = {};
  for (const { rref, made } of [...rrefs].sort((a, b) => natural(b.rref, a.rref))) {
    const maker = rref.split(".")[0];
    latest[maker] = Math.min(latest[maker] ?? Infinity, made ?? Infinity);
    births.set(rref, latest[maker]);
  }
  return births;
}

const older = (births) => (a, b) => births.get(a.rref) - births.get(b.rref) || natural(a.rref, b.rref);

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
    const words = TEXT.controls;
    for (const name of ["worker", "type", "state"]) this[name] = new Choice(words[name], words.any, changed);
    this.order = new Choice(words.order, words.orders.creation, changed);
    this.order.offer(["newest", "size"].map((name) => [name, words.orders[name]]));
    this.group = new Choice(words.group, words.groups.auto, changed);
    this.group.offer(["type", "cell", "off"].map((name) => [name, words.groups[name]]));
    this.search = html("input", { type: "search", placeholder: words.find, "aria-label": words.findTip });
    this.search.addEventListener("input", changed);
    this.status = html("span", { role: "status" });
    const choices = [this.worker, this.type, this.state, this.order, this.group].map((choice) => choice.node);
    this.node = html("div", { class: "rb-tools" }, ...choices, this.search, this.status);
  }

  offer(workers, rrefs) {
    const all = Object.values(rrefs);
    this.worker.offer(Object.values(workers).map(({ id, name }) => [String(id), name]));
    const named = (values) => [...new Set(values)].filter(Boolean).sort(natural).map((value) => [value, value]);
    this.type.offer(named(all.map((rref) => className(rref))));
    const states = named([...all.map((rref) => rref.state), ...IN_TRANSIT]);
    this.state.offer(states.map(([state]) => [state, STATES[state] ?? TEXT.forks.short[state]]));
  }

  // Returns the keys of the RRefs to show, in order.
  chosen(rrefs, byRref, names) {
    const [worker, type, state, text] = [this.worker.value, this.type.value, this.state.value, this.search.value.trim()];
    const searched = text.toLowerCase();
    const fits = (rref) => {
      const forks = byRref.get(rref.rref);
      if (worker && rref.owner !== Number(worker) && !forks.some((fork) => fork.holder === Number(worker))) return false;
      if (type && className(rref) !== type) return false;
      if (state && rref.state !== state && !forks.some((fork) => fork.state === state)) return false;
      return !searched || description(rref, forks, names).toLowerCase().includes(searched);
    };
    const all = Object.values(rrefs);
    return all.filter(fits).sort(ORDERS[this.order.value || "creation"](birthsOf(all))).map((rref) => rref.rref);
  }
}

export default panel("rrefs", "RRefs", (frame) => {
  const known = new Set(); // rows of earlier draws, in sight or not: they do not fade in when they come into sight
  const open = new Set(); // keys of groups that are unfolded
  const [stripes, rows] = [svg("g"), svg("g", { role: "list", "aria-label": "RRefs" })];
  let last = null;
  let pending = 0;
  let legendOf = null; // the types that the legend names
  const schedule = () => (pending ||= requestAnimationFrame(() => ((pending = 0), last && draw(...last))));
  const controls = new Controls(schedule);
  const showCell = (rref) => frame.say(revealCell(frame.root, rref) ? "" : TEXT.gone(rref.number));
  const toggle = (key) => {
    if (!open.delete(key)) open.add(key);
    schedule();
  };
  frame.picture.append(stripes, rows);
  set(frame.picture, { role: "group" });
  frame.head.after(controls.node);
  frame.fold(controls.node);
  frame.body.addEventListener("scroll", schedule);
  const clock = setInterval(() => {
    if (frame.state.kind !== "live") return; // another picture keeps its ages
    const now = frame.present;
    for (const one of rows.querySelectorAll(".rb-age")) setText(one, age(Number(one.dataset.made), now));
  }, 1000);
  frame.cleanups.push(() => clearInterval(clock), () => cancelAnimationFrame(pending));

  // Draws the lines in sight, each in its slot. A line that is drawn again keeps the focus.
  function drawLines(lines, view, byRref, cols, names) {
    const top = frame.body.scrollTop;
    const first = Math.floor(top / ROW) - OVERSCAN;
    const end = Math.ceil((top + frame.body.clientHeight) / ROW) + OVERSCAN;
    const items = lines.slice(Math.max(0, first), end).map((line, i) => {
      const at = { ...line, slot: Math.max(0, first) + i };
      if (line.rref) {
        const rref = view.rrefs[line.rref];
        return { ...at, colour: rref.colour, parts: [cols.key, at.slot, line.isInside, rref, ...byRref.get(line.rref)] };
      }
      const sums = sumUp(line.members, view.rrefs, byRref);
      const told = JSON.stringify([...sums.owned, ...sums.used, ...sums.states, sums.size]);
      const colour = sums.types.size === 1 ? view.rrefs[line.members[0]].colour : "mixed";
      return { ...at, sums, colour, parts: [cols.key, at.slot, line.isOpen, colour, told] };
    });
    const active = document.activeElement;
    const focused = rows.contains(active) ? active.closest("[data-group]")?.dataset.group : null;
    const redrawn = [];
    const now = frame.present;
    join(rows, items, (key, line) => {
      const node = line.rref
        ? row(view.rrefs[key], byRref.get(key), { ...line, now }, cols, names, showCell)
        : groupRow({ ...line, key }, cols, names, toggle);
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
    if (focused) rows.children_.get(focused)?.node.querySelector(".rb-fold").focus();
  }

  function draw(view, width) {
    last = [view, width];
    const { workers, rrefs, forks } = view;
    const cols = columns(workers, width, SIDE);
    const names = (id) => workers[id]?.name ?? `id ${id}`;
    const { byRref, owned, used, states } = countForks(rrefs, forks);
    controls.offer(workers, rrefs);
    const keys = controls.chosen(rrefs, byRref, names);
    const lines = linesOf(keys, rrefs, grouping(controls.group.value, workers, keys.length), open);
    setText(controls.status, keys.length < byRref.size ? TEXT.shown(keys.length, byRref.size) : "");

    headline(frame, workers, rrefs, forks, states);
    frame.resize(cols.width, roomFor(lines.length, 4) * ROW + 6, cols.head, true);
    const counts = ({ id }) => [owned[id] ?? 0, used[id] ?? 0];
    drawHead(frame, cols, (worker) => TEXT.head.short(...counts(worker)), (worker) => TEXT.head.long(...counts(worker)));
    drawStripes(stripes, cols, lines.length ? roomFor(lines.length, 4) * ROW + 6 : 0);
    drawLines(lines, view, byRref, cols, names);
    const types = coloursIn(Object.values(rrefs));
    if (legendOf !== String(types)) frame.showLegend(legend(types));
    legendOf = String(types);
    known.clear();
    for (const { key } of lines) known.add(key);
    set(rows, { "data-rows": lines.length });
  }
  return draw;
});
