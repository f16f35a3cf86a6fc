// Autograd contexts: a card each, workers as columns. Arcs are the recorded send/recv pairs (to the right above the
// line, to the left below), bars the gradients that a backward pass still waits for, the last line who holds gradients.

const [ARCS, PASS, FOOT, GAP] = [96, 24, 28, 10];
const BASE = 50;
const MOST_CARDS = 12;

function arcs(links, cols) {
  const close = cols.step < 22 || links.length > 60;
  return links.map((link) => {
    const [a, b] = [cols.x(link.from), cols.x(link.to)];
    const up = link.from < link.to ? 1 : -1;
    const rise = up * Math.min(30, 8 + Math.abs(b - a) / 9);
    const node = svg("g", { class: "rb-link", "data-link": `${link.from}>${link.to}` });
    const thick = 1.2 + Math.log2(1 + Math.max(link.sent, link.received)) / 2.5;
    node.append(svg("title", {}, `from id ${link.from} to id ${link.to}: ${link.sent} sent, ${link.received} received`));
    node.append(set(arrow(a, b, BASE, rise, `rb-way rb-${link.state}`), { "stroke-width": thick }));
    if (!close) node.append(label((a + b) / 2, BASE - rise + (up > 0 ? -4 : 12), Math.max(link.sent, link.received), "rb-arc-count"));
    return node;
  });
}

function nodes(members, cols) {
  const here = new Map(members.map((member) => [member.worker, member]));
  return cols.list.map(({ id, name }) => {
    const member = here.get(id);
    if (!member) return svg("circle", { class: "rb-away", cx: cols.x(id), cy: BASE, r: 2.5 });
    const words = `${name}: ${member.sends} sends, ${member.recvs} recvs, gradients of ${member.gradients} parameters`;
    return svg("g", { "data-member": id }, tip(words), svg("circle", { class: "rb-node", cx: cols.x(id), cy: BASE, r: 5 }));
  });
}

// One worker's part of a pass: the bar fills as gradients arrive, the number counts down.
function bar(part, cols, y) {
  const wide = Math.min(96, cols.step - 6);
  const x = cols.x(part.worker) - wide / 2;
  const share = part.needed ? Math.min(1, part.arrived / part.needed) : 1;
  const finding = part.state === "discovering";
  const rest = finding ? (wide > 72 ? "discovering" : "…") : part.left ? (wide > 56 ? `${part.left} to come` : part.left) : "✓";
  return svg(
    "g",
    { class: `rb-part rb-${part.state}`, "data-left": part.left },
    tip(`${part.state}: ${part.arrived} of ${part.needed} gradients arrived, ${part.waiting} roots wait`),
    svg("rect", { class: "rb-track", x, y: y - 8, width: wide, height: 16, rx: 4 }),
    svg("rect", { class: "rb-fill", x, y: y - 8, width: finding ? 0 : wide * share, height: 16, rx: 4 }),
    label(x + wide / 2, y + 4, rest, "rb-count-down"),
  );
}

function passes(parts, cols, rows) {
  const names = [...new Set(parts.map((part) => part.pass))].sort(natural).slice(0, rows);
  const out = [label(14, ARCS + 16, names.length ? `backward ${short(names[0], 12)}` : "no backward pass", "rb-note")];
  names.forEach((name, i) => {
    const y = ARCS + 12 + i * PASS;
    if (i) out.push(label(14, y + 4, `backward ${short(name, 12)}`, "rb-note"));
    out.push(...parts.filter((part) => part.pass === name).map((part) => bar(part, cols, y)));
  });
  return out;
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
    ...passes(parts.passes, cols, rows),
    ...gradients(parts.members, cols, height - 11),
  );
}

const sample = (kind) => arrow(-8, 8, 3, 5, kind, 0);
const LEGEND = [
  [sample("rb-way rb-paired"), "send/recv pair"],
  [sample("rb-way rb-open"), "in flight"],
  [svg("rect", { class: "rb-fill", x: -8, y: -5, width: 16, height: 10, rx: 3 }), "gradients arrived"],
];

function byContext(rows) {
  const groups = new Map();
  for (const one of Object.values(rows)) {
    if (!groups.has(one.context)) groups.set(one.context, []);
    groups.get(one.context).push(one);
  }
  return (context) => groups.get(context) ?? [];
}

export default panel("autograd", "Autograd contexts", (frame) => {
  const slots = new Slots();
  const cards = svg("g");
  const rest = label(14, 0, "", "rb-note");
  frame.picture.append(cards, rest);
  frame.explain(LEGEND);
  let last = null;
  let rows = 1;

  return ({ workers, contexts, members, links, passes: parts }, width) => {
    const cols = columns(workers, width);
    const [inMembers, inLinks, inPasses] = [byContext(members), byContext(links), byContext(parts)];
    const keys = Object.keys(contexts).sort(natural);
    for (const key of keys) rows = Math.min(6, Math.max(rows, contexts[key].passes));
    const tall = ARCS + rows * PASS + FOOT + GAP;
    const drawn = slots.place(keys, MOST_CARDS).map(([key, slot]) => {
      const pieces = { members: inMembers(key), links: inLinks(key), passes: inPasses(key) };
      return { key, slot, context: contexts[key], pieces, gone: false };
    });
    if (drawn.length) last = drawn.at(-1);
    else if (last) drawn.push({ ...last, slot: 0, gone: true });
    const deepest = drawn.length ? Math.max(...drawn.map(({ slot }) => slot)) + 1 : 1;
    const sum = (name) => Object.values(contexts).reduce((total, context) => total + context[name], 0);
    const left = Object.values(parts).reduce((total, part) => total + part.left, 0);

    frame.say(
      tally(keys.length, "context"),
      tally(sum("sends"), "send"),
      tally(sum("recvs"), "recv"),
      tally(sum("gradients"), "gradient"),
      [left, "to come", left ? "rb-wait" : ""],
      ...leftOut(workers),
    );
    frame.size(cols.width, deepest * tall + (keys.length > MOST_CARDS ? 24 : 0), cols.head);
    frame.empty(drawn.length ? null : ["No autograd context yet. Open one: ", "with dist_autograd.context() as context_id:"]);
    frame.describe(`${many(keys.length, "autograd context")} on ${many(cols.list.length, "worker")}, ${left} gradients to come.`);
    const recorded = {};
    for (const one of Object.values(members)) recorded[one.worker] = (recorded[one.worker] ?? 0) + one.sends;
    drawHead(frame, cols, ({ id }) => many(recorded[id] ?? 0, "send"));
    const items = drawn.map(({ key, slot, context, pieces, gone }) => ({
      key,
      parts: [cols.key, slot, rows, gone, context, ...pieces.members, ...pieces.links, ...pieces.passes],
      make: () => card(context, pieces, slot * tall, cols, rows, gone),
    }));
    join(cards, items, (_, { make }) => make());
    set(rest, { y: deepest * tall + 12 });
    rest.textContent = keys.length > MOST_CARDS ? `… and ${keys.length - MOST_CARDS} more, not drawn` : "";
  };
});
