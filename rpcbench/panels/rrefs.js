// RRef ownership: a column per worker, a row per RRef. The square stands at the owner, circles at the users; a line
// joins those the owner has confirmed, a dashed arrow is a message still on its way.

const ROW = 28;
const MOST_ROWS = 400;
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

const put = (mark, x) => set(mark, { transform: `translate(${x} ${ROW / 2})` });

// The marks of one row: the owner's square and, per holder and state, one circle; several share a column side by side.
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
    const apart = Math.min(19, (cols.step - 2) / cell.length);
    return cell.map((mark, i) => put(mark, cols.x(id) + (i - (cell.length - 1) / 2) * apart));
  });
}

// A pending fork's message runs from the giver to the holder, or from its maker to the owner; a deletion to the owner.
function ways(rref, forks, cols) {
  const seen = new Set();
  const arrows = [];
  for (const { state, parent, holder, owner } of forks) {
    const given = state === "pending" && parent !== null && parent !== holder;
    const [from, to] = given ? [parent, holder] : [holder, owner];
    const key = `${state} ${from} ${to}`;
    if (!["pending", "deleting"].includes(state) || from === to || seen.has(key)) continue;
    seen.add(key);
    arrows.push(arrow(cols.x(from), cols.x(to), ROW / 2, state === "pending" ? 6 : -6, `rb-way rb-${state}`));
  }
  return arrows;
}

function wire(rref, forks, cols) {
  const held = forks.filter((fork) => fork.state === "confirmed").map((fork) => cols.x(fork.holder));
  const [low, high] = [Math.min(cols.x(rref.owner), ...held), Math.max(cols.x(rref.owner), ...held)];
  return svg("line", { class: "rb-wire", x1: low, x2: high, y1: ROW / 2, y2: ROW / 2 });
}

function words(rref, forks, names) {
  const users = forks.map((fork) => `${fork.fork} at ${names(fork.holder)}: ${MEANING[fork.state]}`);
  const kind = rref.type ? ` (${rref.type})` : "";
  return [`RRef ${rref.rref}${kind}, ${rref.state}, owned by ${names(rref.owner)}`, ...users].join("\n");
}

function row(rref, forks, slot, cols, names) {
  const room = Math.floor((LEFT + cols.step / 2 - 98) / 6.8); // characters, up to the first column's marks
  return svg(
    "g",
    { class: "rb-row", transform: `translate(0 ${slot * ROW})`, "data-rref": rref.rref },
    tip(words(rref, forks, names)),
    svg("rect", { class: "rb-band", width: cols.width, height: ROW }),
    label(12, 18, short(rref.rref, 9), "rb-code"),
    label(78, 18, short(rref.type || "type unknown", room), rref.type ? "rb-kind" : "rb-note"),
    wire(rref, forks, cols),
    ...ways(rref, forks, cols),
    ...marks(rref, forks, cols),
    label(cols.width - 12, 18, rref.state, `rb-state rb-end rb-${rref.state}`),
  );
}

const legend = () => [
  [ownerMark("ready"), "owner"],
  [ownerMark("computing"), "computing"],
  [forkMark("confirmed", 1), "user"],
  [forkMark("pending", 1), "pending"],
  [forkMark("deleting", 1), "deleting"],
  [forkMark("listed", 1), "owner's list only"],
];

// Forks by RRef, and how many RRefs each worker owns, how many forks it holds, how many are in each state.
function count(rrefs, forks) {
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

function headline(frame, workers, forks, total, { pending = 0, deleting = 0 }) {
  const counts = [tally(total, "RRef"), tally(Object.keys(forks).length, "fork")];
  frame.say(...counts, [pending, "pending", pending ? "rb-wait" : ""], [deleting, "deleting"], ...leftOut(workers));
  frame.empty(total ? null : ["No RRef yet. Make one: ", 'rref = rpc.remote("worker1", torch.ones, args=(2,))']);
  frame.describe(`${many(total, "RRef")} on ${many(Object.keys(workers).length, "worker")}, ${pending} forks pending.`);
}

function drawStripes(parent, cols, tall) {
  const items = cols.list.map(({ id }) => ({ key: id, parts: [cols.key, tall], x: cols.x(id) }));
  join(parent, items, (_, { x }) => svg("line", { class: "rb-stripe", x1: x, x2: x, y1: 0, y2: tall }));
}

export default panel("rrefs", "RRefs", (frame) => {
  const slots = new Slots();
  const [stripes, rows, rest] = [svg("g"), svg("g"), label(12, 0, "", "rb-note")];
  frame.picture.append(stripes, rows, rest);
  frame.explain(legend());

  return ({ workers, rrefs, forks }, width) => {
    const cols = columns(workers, width);
    const names = (id) => workers[id].name;
    const { byRref, owned, used, states } = count(rrefs, forks);
    const drawn = slots.place([...byRref.keys()].sort(natural), MOST_ROWS);
    const hidden = byRref.size - drawn.length;
    const deepest = drawn.length ? drawn.at(-1)[1] + 1 : 0;

    headline(frame, workers, forks, byRref.size, states);
    frame.size(cols.width, Math.max(4, deepest) * ROW + (hidden ? 30 : 6), cols.head);
    drawHead(frame, cols, ({ id }) => `owns ${owned[id] ?? 0} · uses ${used[id] ?? 0}`);
    drawStripes(stripes, cols, deepest ? frame.tallest : 0);
    const items = drawn.map(([key, slot]) => ({ key, slot, parts: [cols.key, slot, rrefs[key], ...byRref.get(key)] }));
    join(rows, items, (key, { slot }) => row(rrefs[key], byRref.get(key), slot, cols, names));
    set(rest, { y: deepest * ROW + 18 }).textContent = hidden ? `… and ${hidden} more, not drawn` : "";
  };
});
