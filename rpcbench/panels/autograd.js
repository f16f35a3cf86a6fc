// Autograd contexts: a card each, workers as columns. Arcs are the recorded send/recv pairs (to the right above the
// line, to the left below), bars the gradients that a backward pass still waits for, the squares below a bar the regions
// of that worker's graph, filled once they have run; at the foot, whose gradients each worker holds.

const [ARCS, PASS, FOOT, LEAF, GAP] = [96, 34, 28, 14, 10];
const BASE = 50;
const [MOST_CARDS, MOST_PASSES, MOST_LEAVES, MOST_CHOICES] = [12, 6, 4, 100];
const SQUARE = 8;
const LEAF_WIDE = 57; // narrower columns have no room for names

function arcs(links, cols) {
  const close = cols.step < 22 || links.length > 60;
  return links.map((link) => {
    const [a, b] = [cols.x(link.from), cols.x(link.to)];
    const up = link.from < link.to ? 1 : -1;
    const rise = up * Math.min(30, 8 + Math.abs(b - a) / 9);
    const data = { "data-link": `${link.from}>${link.to}`, "data-sent": link.sent, "data-received": link.received };
    const node = svg("g", { class: "rb-link", ...data, "data-state": link.state });
    const thick = 1.2 + Math.log2(1 + Math.max(link.sent, link.received)) / 2.5;
    node.append(
      svg("title", {}, `from id ${link.from} to id ${link.to}: ${link.sent} sent, ${link.received} received`),
    );
    node.append(set(arrow(a, b, BASE, rise, `rb-way rb-${link.state}`), { "stroke-width": thick }));
    if (!close)
      node.append(
        label((a + b) / 2, BASE - rise + (up > 0 ? -4 : 12), Math.max(link.sent, link.received), "rb-arc-count"),
      );
    return node;
  });
}

function nodes(members, cols) {
  const here = new Map(members.map((member) => [member.worker, member]));
  return cols.list.map(({ id, name }) => {
    const member = here.get(id);
    if (!member) return svg("circle", { class: "rb-away", cx: cols.x(id), cy: BASE, r: 2.5 });
    const words = `${name}: ${member.sends} sends, ${member.recvs} recvs, gradients of ${member.gradients} parameters`;
    return svg(
      "g",
      { "data-member": id, "data-sends": member.sends, "data-recvs": member.recvs },
      tip(words),
      svg("circle", { class: "rb-node", cx: cols.x(id), cy: BASE, r: 5 }),
    );
  });
}

// What a bar says: how many gradients are still to come, unless the context is gone and none will; then, that they run.
function countDown(part, wide, gone) {
  if (part.state !== "discovering" && !part.left) return part.ran === part.regions ? "✓" : gone ? "" : "runs";
  if (gone) return "";
  if (part.state === "discovering") return wide > 72 ? "discovering" : "…";
  return wide > 56 ? `${part.left} to come` : part.left;
}

// One worker's part of a pass: the bar fills as gradients arrive, the number counts down.
function bar(part, cols, y, gone) {
  const wide = Math.min(96, cols.step - 6);
  const x = cols.x(part.worker) - wide / 2;
  const share = part.needed ? Math.min(1, part.arrived / part.needed) : 1;
  const finding = part.state === "discovering";
  const cut = part.regions === null ? "graph not cut yet" : `${part.ran} of ${many(part.regions, "region")} run`;
  const data = { "data-pass": part.pass, "data-worker": part.worker, "data-left": part.left, "data-ran": part.ran };
  return svg(
    "g",
    { class: `rb-part rb-${part.state}`, ...data, "data-arrived": part.arrived, "data-regions": part.regions },
    tip(`${part.state}: ${part.arrived} of ${part.needed} gradients arrived, ${part.waiting} answers awaited; ${cut}`),
    svg("rect", { class: "rb-track", x, y: y - 8, width: wide, height: 16, rx: 4 }),
    svg("rect", { class: "rb-fill", x, y: y - 8, width: finding ? 0 : wide * share, height: 16, rx: 4 }),
    label(x + wide / 2, y + 4, countDown(part, wide, gone), "rb-count-down"),
    ...regions(part, x, y + 12, wide),
  );
}

// A square for each region of the worker's graph, as far as there is room; else how many have run.
function regions({ regions: count, ran }, x, y, wide) {
  if (count === null || wide < 30) return [];
  if (count * SQUARE > wide) return [label(x + wide / 2, y + 6, `${ran}/${count}`, "rb-note rb-center")];
  const left = x + (wide - count * SQUARE) / 2 + 1;
  const kind = (i) => `rb-region ${i < ran ? "rb-ran" : ""}`;
  return Array.from({ length: count }, (_, i) =>
    svg("rect", { class: kind(i), x: left + i * SQUARE, y, width: SQUARE - 2, height: SQUARE - 3 }),
  );
}

function passes(parts, cols, rows, gone) {
  const names = [...new Set(parts.map((part) => part.pass))].sort(natural);
  return names.slice(0, rows).flatMap((name, i) => {
    const y = ARCS + 12 + i * PASS;
    const more = i === rows - 1 && names.length > rows ? ` and ${names.length - rows} more` : "";
    const bars = parts.filter((part) => part.pass === name).map((part) => bar(part, cols, y, gone));
    return [label(14, y + 4, `backward ${short(name, more ? 4 : 12)}${more}`, "rb-note"), ...bars];
  });
}

const leafWords = ({ name, shape }) => (name ? `${name} ${shape}` : shape);

// How many gradients each worker holds, and below the number of which leaves.
function gradients(members, leaves, cols, y, lines) {
  const held = members.map((member) => {
    const own = leaves.filter((leaf) => leaf.worker === member.worker).sort((a, b) => a.place - b.place);
    const [x, count] = [cols.x(member.worker), member.gradients];
    const unlisted = count > own.length ? [`… and ${count - own.length} more`] : [];
    const words = [`${many(count, "gradient")} held`, ...own.map(leafWords), ...unlisted].join("\n");
    return svg(
      "g",
      { class: "rb-held", "data-holder": member.worker, "data-gradients": count },
      tip(words),
      svg("rect", { class: "rb-ear", x: x - cols.step / 2, y: y - 13, width: cols.step, height: 18 + lines * LEAF }),
      label(x, y, count || "–", count ? "rb-gradients" : "rb-note rb-center"),
      ...leafLines(own, count, lines, cols).map((line, i) => label(x, y + (i + 1) * LEAF, line, "rb-leaf")),
    );
  });
  return [label(14, y, "gradients held", "rb-note"), ...held];
}

// What stands below the number: a leaf each, the last line for those there is no room for.
function leafLines(own, count, lines, cols) {
  if (cols.step < LEAF_WIDE) return [];
  const room = Math.floor((cols.step - 8) / 6.1);
  const fits = count <= lines ? count : Math.max(0, lines - 1);
  const shown = own.slice(0, fits).map((leaf) => short(leafWords(leaf), room));
  return count > shown.length && shown.length ? [...shown, `+ ${count - shown.length} more`] : shown;
}

function card(context, parts, y, cols, { rows, lines }, gone) {
  const height = ARCS + rows * PASS + FOOT + lines * LEAF;
  const counts = `${context.sends} sends, ${context.recvs} recvs`;
  return svg(
    "g",
    { class: `rb-card ${gone ? "rb-gone" : ""}`, transform: `translate(0 ${y})`, "data-context": context.context },
    svg("rect", { class: "rb-plate", x: 6, y: 0, width: cols.width - 12, height, rx: 6 }),
    label(14, 24, gone ? "context, released" : "context", "rb-note"),
    label(14, 42, context.context, "rb-code"),
    label(14, 60, counts, "rb-kind"),
    context.open ? label(14, 78, `${context.open} in flight`, "rb-open-count") : "",
    ...arcs(parts.links, cols),
    ...nodes(parts.members, cols),
    ...passes(parts.passes, cols, rows, gone),
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
  const sums = ["send", "recv", "gradient"].map((noun) => tally(total(contexts, `${noun}s`), noun));
  frame.say(tally(count, "context"), ...sums, [left, "to come", left ? "rb-wait" : ""], ...leftOut(workers));
  const size = `${many(count, "autograd context")} on ${many(Object.keys(workers).length, "worker")}`;
  frame.describe(`${size}, ${left} gradients to come.`);
}

function sendsOf(members) {
  const sums = {};
  for (const one of Object.values(members)) sums[one.worker] = (sums[one.worker] ?? 0) + one.sends;
  return ({ id }) => many(sums[id] ?? 0, "send");
}

// The contexts that get a card: those their maker holds. Workers speak of a context a moment before or after its maker
// does, and the panel would grow and flicker whenever one step follows another. Alone, what lingers is drawn.
function settled({ contexts, members }) {
  const keys = Object.keys(contexts).sort(natural);
  const held = keys.filter((key) => `${key}/${BigInt(key) >> 48n}` in members);
  return held.length ? held : keys;
}

// Whether all workers of a released context still have a column.
const stands = ({ members, links }, cols) =>
  [...members.map((one) => one.worker), ...links.flatMap((link) => [link.from, link.to])].every((id) => cols.x(id));

// The picture to keep of a context for when it is released. Its workers speak of the end one after the other, so one
// that has fewer of them is not kept; unless a worker is gone, and could not be drawn.
const fuller = (before, now, cols) =>
  before?.key === now.key && before.pieces.members.length > now.pieces.members.length && stands(before.pieces, cols)
    ? before
    : now;

// The chooser in the head line: all contexts, or one. A chosen one stays chosen after its release.
function chooser(frame) {
  const select = html("select", { class: "rb-choose", "aria-label": "Contexts shown" });
  frame.head.append(select);
  select.addEventListener("change", () => frame.redraw());
  return (keys) => {
    const chosen = select.value;
    const named = ["", ...keys.slice(-MOST_CHOICES)];
    if (chosen && !named.includes(chosen)) named.push(chosen);
    const words = (key) => (!key ? "all contexts" : keys.includes(key) ? `context ${key}` : `context ${key}, released`);
    const items = named.map((key) => ({ key, parts: [words(key)] }));
    join(select, items, (key) => html("option", { value: key }, words(key)));
    select.value = chosen;
    return { one: Boolean(chosen), keys: chosen ? keys.filter((key) => key === chosen) : keys };
  };
}

export default panel("autograd", "Autograd contexts", (frame) => {
  const slots = new Slots();
  const choose = chooser(frame);
  const [cards, rest] = [svg("g"), label(14, 0, "", "rb-note")];
  frame.picture.append(cards, rest);
  frame.explain(legend());
  let last = null;
  const room = { rows: 0, lines: 0 }; // in each card; it grows only, so that nothing jumps

  return (view, width) => {
    const cols = columns(view.workers, width);
    const [members, links, parts, leaves] = [view.members, view.links, view.passes, view.leaves].map(byContext);
    const { one, keys } = choose(settled(view));
    const drawn = (one ? keys.map((key) => [key, 0]) : slots.place(keys, MOST_CARDS)).map(([key, slot]) => {
      const pieces = { members: members(key), links: links(key), passes: parts(key), leaves: leaves(key) };
      return { key, slot, context: view.contexts[key], pieces, gone: false };
    });
    if (drawn.length) last = fuller(last, drawn.at(-1), cols);
    else if (last && stands(last.pieces, cols)) drawn.push({ ...last, slot: 0, gone: true });
    for (const { context, pieces } of drawn) {
      const most = Math.max(0, ...pieces.members.map((member) => member.gradients));
      room.rows = Math.min(MOST_PASSES, Math.max(room.rows, context.passes));
      if (pieces.leaves.length && cols.step >= LEAF_WIDE) room.lines = Math.min(MOST_LEAVES, Math.max(room.lines, most));
    }
    const { rows, lines } = room;
    const tall = ARCS + rows * PASS + FOOT + lines * LEAF + GAP;
    const deepest = Math.max(0, ...drawn.map(({ slot }) => slot)) + 1;
    const hidden = Math.max(0, keys.length - MOST_CARDS);

    headline(frame, view);
    frame.empty(
      drawn.length ? null : ["No autograd context yet. Open one: ", "with dist_autograd.context() as context_id:"],
    );
    frame.size(cols.width, deepest * tall + (hidden ? 24 : 0), cols.head);
    drawHead(frame, cols, sendsOf(view.members));
    const items = drawn.map(({ key, slot, context, pieces, gone }) => ({
      key,
      parts: [cols.key, slot, rows, lines, gone, context, ...Object.values(pieces).flat()],
      make: () => card(context, pieces, slot * tall, cols, room, gone),
    }));
    join(cards, items, (_, { make }) => make());
    set(rest, { y: deepest * tall + 12 }).textContent = hidden ? `… and ${hidden} more, not drawn` : "";
  };
});
