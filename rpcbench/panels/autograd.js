// Autograd contexts: a card each, workers as columns. Arcs are the recorded send/recv pairs (to the right above the
// line, to the left below), bars the gradients that a backward pass still waits for, the last line who holds gradients.

const [ARCS, PASS, FOOT, GAP] = [96, 24, 28, 10];
const BASE = 50;
const [MOST_CARDS, MOST_PASSES] = [12, 6];

function arcs(links, cols) {
  const close = cols.step < 22 || links.length > 60;
  return links.map((link) => {
    const [a, b] = [cols.x(link.from), cols.x(link.to)];
    const up = link.from < link.to ? 1 : -1;
    const rise = up * Math.min(30, 8 + Math.abs(b - a) / 9);
    const node = svg("g", { class: "rb-link", "data-link": `${link.from}>${link.to}` });
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
      { "data-member": id },
      tip(words),
      svg("circle", { class: "rb-node", cx: cols.x(id), cy: BASE, r: 5 }),
    );
  });
}

// What a bar says: how many gradients are still to come, unless the context is gone and none will.
function countDown(part, wide, gone) {
  if (part.state !== "discovering" && !part.left) return "✓";
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
  return svg(
    "g",
    { class: `rb-part rb-${part.state}`, "data-left": part.left },
    tip(`${part.state}: ${part.arrived} of ${part.needed} gradients arrived, ${part.waiting} answers awaited`),
    svg("rect", { class: "rb-track", x, y: y - 8, width: wide, height: 16, rx: 4 }),
    svg("rect", { class: "rb-fill", x, y: y - 8, width: finding ? 0 : wide * share, height: 16, rx: 4 }),
    label(x + wide / 2, y + 4, countDown(part, wide, gone), "rb-count-down"),
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

function gradients(members, cols, y) {
  const numbers = members.map((member) =>
    label(cols.x(member.worker), y, member.gradients || "–", member.gradients ? "rb-gradients" : "rb-note rb-center"),
  );
  return [label(14, y, "gradients held", "rb-note"), ...numbers];
}

function card(context, parts, y, cols, rows, gone) {
  const height = ARCS + rows * PASS + FOOT;
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
    ...gradients(parts.members, cols, height - 11),
  );
}

const sample = (kind) => arrow(-8, 8, 3, 5, kind, 0);
const legend = () => [
  [sample("rb-way rb-paired"), "send/recv pair"],
  [sample("rb-way rb-open"), "in flight"],
  [svg("rect", { class: "rb-fill", x: -8, y: -5, width: 16, height: 10, rx: 3 }), "gradients arrived"],
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

export default panel("autograd", "Autograd contexts", (frame) => {
  const slots = new Slots();
  const [cards, rest] = [svg("g"), label(14, 0, "", "rb-note")];
  frame.picture.append(cards, rest);
  frame.explain(legend());
  let last = null;
  let rows = 0;

  return (view, width) => {
    const cols = columns(view.workers, width);
    const [members, links, parts] = [view.members, view.links, view.passes].map(byContext);
    const keys = settled(view);
    const drawn = slots.place(keys, MOST_CARDS).map(([key, slot]) => {
      const pieces = { members: members(key), links: links(key), passes: parts(key) };
      return { key, slot, context: view.contexts[key], pieces, gone: false };
    });
    if (drawn.length) last = fuller(last, drawn.at(-1), cols);
    else if (last && stands(last.pieces, cols)) drawn.push({ ...last, slot: 0, gone: true });
    for (const { context } of drawn) rows = Math.min(MOST_PASSES, Math.max(rows, context.passes));
    const tall = ARCS + rows * PASS + FOOT + GAP;
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
      parts: [cols.key, slot, rows, gone, context, ...pieces.members, ...pieces.links, ...pieces.passes],
      make: () => card(context, pieces, slot * tall, cols, rows, gone),
    }));
    join(cards, items, (_, { make }) => make());
    set(rest, { y: deepest * tall + 12 }).textContent = hidden ? `… and ${hidden} more, not drawn` : "";
  };
});
