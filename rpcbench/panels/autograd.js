// The autograd panel: a card for each context, with workers as columns.
// Arcs are the recorded send/recv pairs: those to the right are above the line, those to the left below it. A bar shows the
// gradients that a worker still waits for in a backward pass. The squares below a bar are the regions of the worker's graph;
// a region that has run is filled. The foot of a card shows the gradients that each worker holds.
// Guarantees: a card keeps its place when other contexts come and go (see `Slots`). After all are released, the last one stays.

const [ARCS, PASS, FOOT, LEAF, GAP] = [96, 34, 28, 14, 10];
const BASE = 50;
const [MAX_CARDS, MAX_PASSES, MAX_LEAVES, MAX_CHOICES] = [12, 6, 4, 100];
const SQUARE = 8;
const LEAF_MIN_STEP = 57; // narrower columns have no room for names

function arcs(links, cols) {
  const crowded = cols.step < 22 || links.length > 60;
  return links.map((link) => {
    const [a, b] = [cols.x(link.from), cols.x(link.to)];
    const up = link.from < link.to ? 1 : -1;
    const rise = up * Math.min(30, 8 + Math.abs(b - a) / 9);
    const data = { "data-link": `${link.from}>${link.to}`, "data-sent": link.sent, "data-received": link.received };
    const node = svg("g", { class: "rb-link", ...data, "data-state": link.state });
    const strokeWidth = 1.2 + Math.log2(1 + Math.max(link.sent, link.received)) / 2.5;
    node.append(
      svg("title", {}, `from id ${link.from} to id ${link.to}: ${link.sent} sent, ${link.received} received`),
    );
    node.append(set(arrow(a, b, BASE, rise, `rb-way rb-${link.state}`), { "stroke-width": strokeWidth }));
    if (!crowded)
      node.append(
        label((a + b) / 2, BASE - rise + (up > 0 ? -4 : 12), Math.max(link.sent, link.received), "rb-arc-count"),
      );
    return node;
  });
}

// Draws a node for each worker: a large one for members of the context, with a tooltip, and a dot for the others.
function nodes(members, cols) {
  const byWorker = new Map(members.map((member) => [member.worker, member]));
  return cols.list.map(({ id, name }) => {
    const member = byWorker.get(id);
    if (!member) return svg("circle", { class: "rb-away", cx: cols.x(id), cy: BASE, r: 2.5 });
    const text = `${name}: ${member.sends} sends, ${member.recvs} recvs, gradients of ${member.gradients} parameters`;
    return svg(
      "g",
      { "data-member": id, "data-sends": member.sends, "data-recvs": member.recvs },
      tip(text),
      svg("circle", { class: "rb-node", cx: cols.x(id), cy: BASE, r: 5 }),
    );
  });
}

// Returns the text in a bar: the number of gradients that are still to come, then whether the regions run or have run. It is
// empty if the context is released, as nothing more will come.
function barText(part, wide, released) {
  if (part.state !== "discovering" && !part.left) return part.ran === part.regions ? "✓" : released ? "" : "runs";
  if (released) return "";
  if (part.state === "discovering") return wide > 72 ? "discovering" : "…";
  return wide > 56 ? `${part.left} to come` : part.left;
}

// Draws one worker's part of a backward pass: the bar fills as gradients arrive, and the number counts down.
function bar(part, cols, y, released) {
  const wide = Math.min(96, cols.step - 6);
  const x = cols.x(part.worker) - wide / 2;
  const share = part.needed ? Math.min(1, part.arrived / part.needed) : 1;
  const discovering = part.state === "discovering";
  const progress = part.regions === null ? "graph not cut yet" : `${part.ran} of ${plural(part.regions, "region")} run`;
  const data = { "data-pass": part.pass, "data-worker": part.worker, "data-left": part.left, "data-ran": part.ran };
  return svg(
    "g",
    { class: `rb-part rb-${part.state}`, ...data, "data-arrived": part.arrived, "data-regions": part.regions },
    tip(`${part.state}: ${part.arrived} of ${part.needed} gradients arrived, ${part.waiting} replies awaited; ${progress}`),
    svg("rect", { class: "rb-track", x, y: y - 8, width: wide, height: 16, rx: 4 }),
    svg("rect", { class: "rb-fill", x, y: y - 8, width: discovering ? 0 : wide * share, height: 16, rx: 4 }),
    label(x + wide / 2, y + 4, barText(part, wide, released), "rb-count-down"),
    ...regions(part, x, y + 12, wide),
  );
}

// Draws a square for each region of the worker's graph; without room for all of them, only the numbers.
function regions({ regions: count, ran }, x, y, wide) {
  if (count === null || wide < 30) return [];
  if (count * SQUARE > wide) return [label(x + wide / 2, y + 6, `${ran}/${count}`, "rb-note rb-center")];
  const left = x + (wide - count * SQUARE) / 2 + 1;
  const kind = (i) => `rb-region ${i < ran ? "rb-ran" : ""}`;
  return Array.from({ length: count }, (_, i) =>
    svg("rect", { class: kind(i), x: left + i * SQUARE, y, width: SQUARE - 2, height: SQUARE - 3 }),
  );
}

// Draws the backward passes of a context, at most `rows`; the last row also says how many passes are left out.
function passes(parts, cols, rows, released) {
  const names = [...new Set(parts.map((part) => part.pass))].sort(natural);
  return names.slice(0, rows).flatMap((name, i) => {
    const y = ARCS + 12 + i * PASS;
    const more = i === rows - 1 && names.length > rows ? ` and ${names.length - rows} more` : "";
    const bars = parts.filter((part) => part.pass === name).map((part) => bar(part, cols, y, released));
    return [label(14, y + 4, `backward ${shorten(name, more ? 4 : 12)}${more}`, "rb-note"), ...bars];
  });
}

const leafText = ({ name, shape }) => (name ? `${name} ${shape}` : shape);

// Draws the number of gradients that each worker holds, and below it the names of their leaves.
function gradients(members, leaves, cols, y, lines) {
  const held = members.map((member) => {
    const own = leaves.filter((leaf) => leaf.worker === member.worker).sort((a, b) => a.place - b.place);
    const [x, count] = [cols.x(member.worker), member.gradients];
    const unlisted = count > own.length ? [`… and ${count - own.length} more`] : [];
    const text = [`${plural(count, "gradient")} held`, ...own.map(leafText), ...unlisted].join("\n");
    return svg(
      "g",
      { class: "rb-held", "data-holder": member.worker, "data-gradients": count },
      tip(text),
      svg("rect", { class: "rb-ear", x: x - cols.step / 2, y: y - 13, width: cols.step, height: 18 + lines * LEAF }),
      label(x, y, count || "–", count ? "rb-gradients" : "rb-note rb-center"),
      ...leafLines(own, count, lines, cols).map((line, i) => label(x, y + (i + 1) * LEAF, line, "rb-leaf")),
    );
  });
  return [label(14, y, "gradients held", "rb-note"), ...held];
}

// Returns the lines below the number: one for each leaf, and a last one with the number of leaves that have no room.
function leafLines(own, count, lines, cols) {
  if (cols.step < LEAF_MIN_STEP) return [];
  const room = Math.floor((cols.step - 8) / 6.1);
  const limit = count <= lines ? count : Math.max(0, lines - 1);
  const shown = own.slice(0, limit).map((leaf) => shorten(leafText(leaf), room));
  return count > shown.length && shown.length ? [...shown, `+ ${count - shown.length} more`] : shown;
}

// Draws the card of a context. `rows` and `lines` are the room for passes and leaves.
function card(context, parts, y, cols, { rows, lines }, released) {
  const height = ARCS + rows * PASS + FOOT + lines * LEAF;
  const counts = `${context.sends} sends, ${context.recvs} recvs`;
  return svg(
    "g",
    { class: `rb-card ${released ? "rb-gone" : ""}`, transform: `translate(0 ${y})`, "data-context": context.context },
    svg("rect", { class: "rb-plate", x: 6, y: 0, width: cols.width - 12, height, rx: 6 }),
    label(14, 24, released ? "context, released" : "context", "rb-note"),
    label(14, 42, context.context, "rb-code"),
    label(14, 60, counts, "rb-kind"),
    context.open ? label(14, 78, `${context.open} in flight`, "rb-open-count") : "",
    ...arcs(parts.links, cols),
    ...nodes(parts.members, cols),
    ...passes(parts.passes, cols, rows, released),
    ...gradients(parts.members, parts.leaves, cols, height - 11 - lines * LEAF, lines),
  );
}

const sample = (kind) => arrow(-8, 8, 3, 5, kind, 0);
const legend = () => [
  [sample("rb-way rb-paired"), "send/recv pair"],
  [sample("rb-way rb-open"), "in flight"],
  [svg("rect", { class: "rb-fill", x: -8, y: -5, width: 16, height: 10, rx: 3 }), "gradients arrived"],
  [svg("rect", { class: "rb-region", x: -3, y: -3, width: 6, height: 5 }), "region of a worker's graph"],
  [svg("rect", { class: "rb-region rb-ran", x: -3, y: -3, width: 6, height: 5 }), "… that has run"],
];

const total = (rows, name) => Object.values(rows).reduce((sum, one) => sum + one[name], 0);

// Returns a function from a context to its rows.
function byContext(rows) {
  const groups = new Map();
  for (const one of Object.values(rows)) {
    if (!groups.has(one.context)) groups.set(one.context, []);
    groups.get(one.context).push(one);
  }
  return (context) => groups.get(context) ?? [];
}

function headline(frame, { workers, contexts, passes }) {
  const [count, left] = [Object.keys(contexts).length, total(passes, "left")];
  const sums = ["send", "recv", "gradient"].map((noun) => countStat(total(contexts, `${noun}s`), noun));
  frame.showStats(countStat(count, "context"), ...sums, [left, "to come", left ? "rb-wait" : ""], ...leftOutStats(workers));
  const size = `${plural(count, "autograd context")} on ${plural(Object.keys(workers).length, "worker")}`;
  frame.describe(`${size}, ${left} gradients to come.`);
}

// Returns a function from a worker to the text of its sends, over all contexts.
function sendsOf(members) {
  const sums = {};
  for (const one of Object.values(members)) sums[one.worker] = (sums[one.worker] ?? 0) + one.sends;
  return ({ id }) => plural(sums[id] ?? 0, "send");
}

// Returns the contexts that get a card: those that their creator holds. Other workers report a context a moment earlier and
// later than its creator; with cards for these reports, too, the panel would flicker from step to step. If no creator holds a
// context, all are drawn.
function shownContexts({ contexts, members }) {
  const keys = Object.keys(contexts).sort(natural);
  const held = keys.filter((key) => `${key}/${BigInt(key) >> 48n}` in members);
  return held.length ? held : keys;
}

// Returns whether all workers of a released context still have a column.
const canBeDrawn = ({ members, links }, cols) =>
  [...members.map((one) => one.worker), ...links.flatMap((link) => [link.from, link.to])].every((id) => cols.x(id));

// Returns the picture of a context to keep until after its release. The workers report the release one after the other, so a
// later picture has fewer of them: the earlier one is kept, unless one of its workers has left and cannot be drawn.
const moreComplete = (before, now, cols) =>
  before?.key === now.key && before.pieces.members.length > now.pieces.members.length && canBeDrawn(before.pieces, cols)
    ? before
    : now;

// Adds the choice of contexts to the head line: all, or one. A context stays chosen after its release.
function contextChoice(frame) {
  const select = html("select", { class: "rb-choose", "aria-label": "Contexts shown" });
  frame.head.append(select);
  select.addEventListener("change", () => frame.redraw());
  return (keys) => {
    const chosen = select.value;
    const values = ["", ...keys.slice(-MAX_CHOICES)];
    if (chosen && !values.includes(chosen)) values.push(chosen);
    const text = (key) => (!key ? "all contexts" : keys.includes(key) ? `context ${key}` : `context ${key}, released`);
    const items = values.map((key) => ({ key, parts: [text(key)] }));
    join(select, items, (key) => html("option", { value: key }, text(key)));
    select.value = chosen;
    return { one: Boolean(chosen), keys: chosen ? keys.filter((key) => key === chosen) : keys };
  };
}

export default panel("autograd", "Autograd contexts", (frame) => {
  const slots = new Slots();
  const choose = contextChoice(frame);
  const [cards, rest] = [svg("g"), label(14, 0, "", "rb-note")];
  frame.picture.append(cards, rest);
  frame.showLegend(legend());
  let last = null; // the picture to show after the last context is released
  const room = { rows: 0, lines: 0 }; // for passes and leaves in each card; it only grows, so that cards do not jump

  return (view, width) => {
    const cols = columns(view.workers, width);
    const [members, links, parts, leaves] = [view.members, view.links, view.passes, view.leaves].map(byContext);
    const { one, keys } = choose(shownContexts(view));
    const drawn = (one ? keys.map((key) => [key, 0]) : slots.place(keys, MAX_CARDS)).map(([key, slot]) => {
      const pieces = { members: members(key), links: links(key), passes: parts(key), leaves: leaves(key) };
      return { key, slot, context: view.contexts[key], pieces, released: false };
    });
    if (drawn.length) last = moreComplete(last, drawn.at(-1), cols);
    else if (last && canBeDrawn(last.pieces, cols)) drawn.push({ ...last, slot: 0, released: true });
    for (const { context, pieces } of drawn) {
      const most = Math.max(0, ...pieces.members.map((member) => member.gradients));
      room.rows = Math.min(MAX_PASSES, Math.max(room.rows, context.passes));
      if (pieces.leaves.length && cols.step >= LEAF_MIN_STEP) room.lines = Math.min(MAX_LEAVES, Math.max(room.lines, most));
    }
    const { rows, lines } = room;
    const tall = ARCS + rows * PASS + FOOT + lines * LEAF + GAP;
    const deepest = Math.max(0, ...drawn.map(({ slot }) => slot)) + 1;
    const hidden = Math.max(0, keys.length - MAX_CARDS);

    headline(frame, view);
    frame.showHint(
      drawn.length ? null : ["No autograd context yet. Open one: ", "with dist_autograd.context() as context_id:"],
    );
    frame.resize(cols.width, deepest * tall + (hidden ? 24 : 0), cols.head);
    drawHead(frame, cols, sendsOf(view.members));
    const items = drawn.map(({ key, slot, context, pieces, released }) => ({
      key,
      parts: [cols.key, slot, rows, lines, released, context, ...Object.values(pieces).flat()],
      make: () => card(context, pieces, slot * tall, cols, room, released),
    }));
    join(cards, items, (_, { make }) => make());
    set(rest, { y: deepest * tall + 12 }).textContent = hidden ? `… and ${hidden} more, not drawn` : "";
  };
});
