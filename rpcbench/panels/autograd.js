// The autograd panel: the graph of one context, with a lane for each worker that takes part.
//
//     notebook  │ (x)─╮                    ╭─▸[Sub─Pow─Mean]        x, a leaf, is sent to worker1, and so on
//     worker1   │     ╰─▸[Linear─Relu]─╮   │                        ─▸  a message, from its send to its recv
//     worker2   │                      ╰─▸[Linear]                  ◂─  its gradient, beside it, once it is sent back
//
// Blocks, arrows and their places are in `lanes.js`, words in `strings.js`.
// Guarantees
// - A context that is released stays, with its last numbers and times, until a later one is shown.
// - While contexts come and go, as in training, the panel shows one that has ended, and changes it seldom (see `Choice`).
// - The legend names only what is drawn.

const [LIVE_AFTER, STAYS] = [400, 2000]; // milliseconds, see `Choice`
const [MAX_CHOICES, MANY_LEVELS] = [100, 8];
// Pixels: a picture below this has so many for the gradients held, in which words on them have no room.
const [HELD_FRAME, HELD_TIGHT, HELD_WORDS] = [440, 62, 100];
const LEAST_GRAPH = 320; // width in pixels, in a narrower frame it scrolls

// ---- the context to show

// Returns the open contexts that their creator holds: other workers report a context a moment earlier and later than its
// creator, and would make the panel flicker. If no creator holds any, all are returned.
function heldContexts({ contexts, members }) {
  const open = Object.values(contexts).filter(({ ended }) => ended === null);
  const held = open.filter(({ context }) => `${context}/${BigInt(context) >> 48n}` in members);
  return held.length ? held : open;
}

// Returns the ends of a link, or of a message, that have no report of its context.
const silentEnds = ({ context, from, to }, { members }) => [from, to].filter((end) => !(`${context}/${end}` in members));

// Chooses a context. One that is open is shown if nothing else is there, or after it has been there for LIVE_AFTER; it stays
// until its end. Otherwise the last one that has ended is shown, and at least for STAYS, so that a reader can follow. Those of
// pipelines, which train, are shown only once they have ended. One that lacks the report of a worker is shown after STAYS: then
// that worker was lost.
class Choice {
  constructor() {
    this.key = null;
    this.since = 0;
    this.firstSeen = new Map();
    this.tornSince = new Map();
  }

  // Returns the key, null if there is none, and the milliseconds after which to ask again, or null.
  pick(view, now) {
    const order = (time) => (a, b) => (a[time] ?? 0) - (b[time] ?? 0) || natural(a.context, b.context);
    const isWhole = (link) => !silentEnds(link, view).length;
    const torn = new Set(Object.values(view.links).filter((link) => !isWhole(link)).map(({ context }) => context));
    this.tornSince = new Map([...torn].map((context) => [context, this.tornSince.get(context) ?? now]));
    const isReported = (context) => !torn.has(context) || now - this.tornSince.get(context) >= STAYS;
    const ended = Object.values(view.contexts).filter(({ context, ended }) => ended !== null && isReported(context));
    const last = ended.sort(order("ended")).at(-1);
    const open = heldContexts(view).filter(({ step }) => step === null || !last).sort(order("made"));
    this.firstSeen = new Map(open.map(({ context }) => [context, this.firstSeen.get(context) ?? now]));
    if (this.firstSeen.has(this.key)) return [this.key, null];
    const newest = open.at(-1);
    const age = newest ? now - this.firstSeen.get(newest.context) : 0;
    if (newest && (age >= LIVE_AFTER || !last)) return this.take(newest.context, now, null);
    const wait = newest ? LIVE_AFTER - age : null;
    const left = STAYS - (now - this.since);
    if (!last || last.context === this.key) return [last ? this.key : null, wait];
    if (this.key in view.contexts && left > 0) return [this.key, wait === null ? left : Math.min(left, wait)];
    return this.take(last.context, now, wait);
  }

  take(key, now, wait) {
    [this.key, this.since] = [key, now];
    return [key, wait];
  }
}

// Returns the picture of a context to keep until after its release. Workers report the release one after the other, so a later
// picture may have fewer of them: then the earlier one is kept.
const moreComplete = (before, now) =>
  before?.key === now.key && before.pieces.members.length > now.pieces.members.length ? before : now;

// Adds the choice of a context below the picture: the latest, or one. A context stays chosen after its release.
function contextChoice(frame) {
  const select = html("select", { class: "rb-choose", "aria-label": WORDS.shown });
  frame.foot = html("div", { class: "rb-foot" }, select);
  frame.fold(select);
  frame.body.after(frame.foot);
  select.addEventListener("change", () => frame.redraw());
  return (contexts, latest) => {
    const [chosen, keys] = [select.value, Object.keys(contexts).sort(natural)];
    const values = ["", ...keys.slice(-MAX_CHOICES)];
    if (chosen && !values.includes(chosen)) values.push(chosen);
    const named = (key) => WORDS.named(key, contexts[key]?.step ?? null, contexts[key]?.ended !== null);
    const text = (key) => (key ? named(key) : latest === null ? WORDS.latest : `${WORDS.latest}: ${named(latest)}`);
    join(select, values.map((key) => ({ key, parts: [text(key)] })), (key) => html("option", { value: key }, text(key)));
    select.value = chosen;
    return chosen;
  };
}

// ---- drawing

const HEAD = "M0 0 l-8 -4.5 v9 Z";
const head = (x, y, turn) => svg("path", { class: "rb-tip", d: HEAD, transform: `translate(${x} ${y}) rotate(${turn})` });

// Returns the counts of an arrow's messages. Once the context has ended no gradient is in flight.
function countsOf(messages, isEnded) {
  const [sent, received, fired, back] = ["sent", "received", "fired", "back"].map((name) => sum(messages, name));
  const isUntold = messages.some((one) => one.isUntold);
  return { sent, received: isUntold ? sent : received, isUntold, fired: isEnded ? back : fired, back };
}

function drawArrow(arrow, geometry, blocks, at, isEnded, names) {
  const counts = countsOf(arrow.messages, isEnded);
  const { sent, received, isUntold, fired, back } = counts;
  const path = (shift) => (at === null ? pathOf(arrow, shift, geometry, blocks) : straight(arrow, at + shift));
  const [there, home] = [path(at === null ? -4 : 0), path(at === null ? 5 : 9)];
  const isOpen = received < sent;
  const text = WORDS.message(arrow, counts, isEnded, names);
  const ends = { "data-from": arrow.from.worker, "data-to": arrow.to.worker };
  const numbers = Object.fromEntries(Object.entries({ sent, received, fired, back }).map(([name, count]) => [`data-${name}`, count]));
  const node = svg("g", { class: "rb-message", "data-item": `m${arrow.key}`, ...ends, ...numbers }, tip(text));
  node.append(svg("path", { class: "rb-grip", d: there.d }));
  const forward = svg("g", { class: `rb-forward ${isOpen ? (isEnded ? "rb-lost" : "rb-flight") : ""}` });
  forward.append(svg("path", { class: "rb-curve", d: there.d }), head(there.x2, there.y2, there.turn ?? 0));
  node.append(forward);
  const of = (count) => (count < sent ? `${count} / ${sent}` : sent);
  if (sent > 1) node.append(label(there.x, there.y - 7, isUntold ? sent : of(received), "rb-count rb-count-there"));
  if (fired) {
    const gradient = svg("g", { class: `rb-back ${back < fired ? "rb-flight" : ""}` });
    gradient.append(svg("path", { class: "rb-curve", d: home.d }), head(home.x1, home.y1, (home.turn ?? 0) + 180));
    node.append(gradient);
    if (sent > 1 && arrow.messages.every((one) => one.isListed !== false))
      node.append(label(home.x, home.y + 17, of(back), "rb-count rb-count-back"));
  }
  return node;
}

const isLeafPart = ({ ops, count }) => count === 1 && ops[0].startsWith("leaf");

function drawBlock(block, isWide, names) {
  const { parts, x, y, w, chips } = block;
  const data = { "data-item": `b${block.key}`, "data-worker": block.worker };
  if (!parts.length) {
    const circle = svg("circle", { class: "rb-end-of", cx: x + 5, cy: y + BOX / 2, r: 5 });
    return svg("g", { class: "rb-block rb-empty", ...data }, tip(WORDS.end(names(block.worker))), circle);
  }
  const { state, share, text } = progressOf(block);
  const kind = `rb-block ${state ? `rb-${state}` : ""}`;
  const node = svg("g", { class: kind, ...data, "data-state": state, "data-count": sum(parts, "count") });
  node.append(
    tip(WORDS.block(block, { state, text }, names)),
    svg("rect", { class: "rb-box", x, y, width: w, height: BOX, rx: 5 }),
    svg("rect", { class: "rb-fill", x, y, width: w * share, height: BOX, rx: 5 }),
    svg("rect", { class: "rb-edge", x, y, width: w, height: BOX, rx: 5 }),
  );
  const ink = `rb-chip-text ${parts.every(isLeafPart) ? "rb-leaf" : ""}`;
  node.append(label(x + w / 2, y + BOX / 2 + 4.5, textOf(chips), ink));
  if (text && isWide) node.append(label(x + w - 8, y + BOX / 2 + 4.5, text, "rb-chip-text rb-end"));
  else if (text) node.append(label(x + w / 2, y + BOX + 14, text, "rb-time"));
  return node;
}

// Draws a lane: the worker's name, the gradients that it still waits for, and those that it holds.
function drawLane({ y, height, pad }, worker, { member, passes, leaves }, { width, left: names, right }, stripe) {
  const left = sum(passes, "left");
  // A worker may have a lane before it takes part: a message to it is in flight.
  const numbers = member ? { "data-member": worker.id, "data-sends": member.sends, "data-recvs": member.recvs } : {};
  const state = worker.state === "up" ? "" : ` · ${STRINGS.common.members[worker.state] ?? worker.state}`;
  const waits = left ? WORDS.left(left) : passes.some(({ state: one }) => one === "discovering") ? WORDS.discovering : "";
  const node = svg("g", { class: `rb-lane ${stripe ? "rb-odd" : ""}`, ...numbers });
  node.append(
    svg("rect", { class: "rb-plate", x: 0, y, width, height }),
    label(12, y + pad + 16, shorten(worker.name, Math.floor((names - 20) / 8)) + state, `rb-worker rb-is-${worker.state}`),
    svg("rect", { class: "rb-ear", x: 0, y, width: names, height }, tip(WORDS.lane(worker, member, passes))),
  );
  for (const part of passes) {
    const data = { "data-pass": part.pass, "data-worker": part.worker, "data-left": part.left, "data-arrived": part.arrived };
    node.append(svg("g", { class: "rb-part", ...data, "data-regions": part.regions, "data-ran": part.ran }));
  }
  if (waits) node.append(label(12, y + pad + 32, waits, "rb-left"));
  if (member) node.append(drawHeld(member, leaves, width - right + 10, { y, height, pad }, right - 16));
  return node;
}

const leafText = ({ name, shape }) => (name ? `${name} ${shape}` : shape);

// Returns the lines below the number of gradients: one for each leaf; the last one also has the number of those without room.
function leafLines(leaves, count, most) {
  const shown = leaves.slice(0, most).map(leafText);
  const rest = count - shown.length;
  return rest && shown.length ? [...shown.slice(0, -1), `+${rest} · ${shown.at(-1)}`] : shown;
}

function drawHeld(member, leaves, x, { y, height, pad }, room) {
  const own = leaves.slice().sort((a, b) => a.place - b.place);
  const count = member.gradients;
  const unlisted = count > own.length ? [WORDS.more(count - own.length)] : [];
  const isTight = room < HELD_WORDS; // then the number alone
  const lines = isTight ? [] : leafLines(own, count, Math.floor((height - pad - 20) / 15));
  const most = Math.floor((room - 16) / 7); // characters
  const data = { class: "rb-held", "data-holder": member.worker, "data-gradients": count };
  const node = svg("g", data, tip([WORDS.held(count), ...own.map(leafText), ...unlisted].join("\n")));
  if (!count) return node;
  node.append(svg("rect", { class: "rb-ear", x, y, width: room, height }));
  node.append(svg("circle", { class: "rb-mark", cx: x + 5, cy: y + pad + 11, r: 4.5 }));
  node.append(label(x + 14, y + pad + 15, isTight ? count : WORDS.held(count), "rb-gradients"));
  lines.forEach((line, i) => node.append(label(x + 14, y + pad + 30 + i * 15, shorten(line, most), "rb-leaf-line")));
  return node;
}

// Returns the legend of what is drawn, [mark, text] each.
function legendOf({ blocks, arrows }, pieces, isEnded) {
  const counts = arrows.map(({ messages }) => countsOf(messages, isEnded));
  const states = new Set(blocks.map((block) => progressOf(block).state));
  const way = (kind, turn) =>
    svg("g", { class: kind }, svg("path", { class: "rb-curve", d: "M-8 0 H8" }), head(turn ? -9 : 9, 0, turn));
  const rect = (part) => svg("rect", { class: part, x: -8, y: -6, width: 16, height: 12, rx: 3 });
  const box = (kind) => svg("g", { class: `rb-block ${kind}` }, ...["rb-box", "rb-fill", "rb-edge"].map(rect));
  const { legend } = WORDS;
  const isCounted = blocks.some(({ chips }) => /^\d+$/.test(chips[0]));
  return [
    [blocks.some(({ chips }) => chips.length), box("rb-sample"), isCounted ? legend.count : legend.block],
    [blocks.some(({ chips }) => chips[0] === WORDS.passedOn), label(0, 4, WORDS.passedOn, "rb-chip-text"), legend.passedOn],
    [blocks.some(({ parts }) => !parts.length), svg("circle", { class: "rb-end-of", cx: 0, cy: 0, r: 5 }), legend.end],
    [blocks.some(({ parts }) => parts.some(isLeafPart)), label(-4, 4, "x", "rb-leaf"), legend.leaf],
    [states.has("runs"), box("rb-runs"), legend.runs],
    [states.has("ran") || states.has("partly"), box("rb-ran"), legend.ran],
    [states.has("failed"), box("rb-failed"), legend.failed],
    [arrows.length, way("rb-forward", 0), legend.forward],
    [!isEnded && counts.some(({ sent, received }) => received < sent), way("rb-forward rb-flight", 0), legend.flight],
    [isEnded && counts.some(({ sent, received }) => received < sent), way("rb-forward rb-lost", 0), legend.lost],
    [counts.some(({ back }) => back), way("rb-back", 180), legend.back],
    [counts.some(({ fired, back }) => back < fired), way("rb-back rb-flight", 180), legend.backFlight],
    [pieces.members.some(({ gradients }) => gradients), svg("circle", { class: "rb-mark", cx: 0, cy: 0, r: 4.5 }), legend.held],
  ].filter(([isDrawn]) => isDrawn).map(([, mark, text]) => [mark, text]);
}

// ---- the panel

// Returns when backward has begun and ended in the parts, in seconds, or null.
function backwardTime(parts) {
  const times = parts.flatMap(({ ran }) => ran);
  return times.length > 1 ? Math.max(...times) - Math.min(...times) : null;
}

function headline(frame, view, { context, pieces, isEnded }) {
  const { sends, recvs, gradients } = context;
  const [back, time] = [sum(pieces.messages, "back"), backwardTime(pieces.parts)];
  const [left, flight] = [sum(pieces.passes, "left"), isEnded ? 0 : context.open];
  const others = heldContexts(view).filter(({ context: key }) => key !== context.context).length;
  frame.showStats(
    [context.step === null ? WORDS.context : WORDS.step(context.step), WORDS.state(isEnded)],
    [`${recvs} of ${sends}`, pieces.messages.some((one) => one.isUntold) ? WORDS.stats.told : WORDS.stats.received],
    ...(flight ? [[flight, WORDS.stats.flight, "rb-wait"]] : []),
    ...(back || left ? [[back, WORDS.stats.back]] : []),
    [gradients, isEnded ? WORDS.stats.heldLast : WORDS.stats.held],
    ...(time === null ? [] : [[formatTime(time), WORDS.stats.time]]),
    ...(others ? [[others, WORDS.stats.others(others)]] : []),
    ...leftOutStats(view.workers),
  );
  const all = Object.keys(view.contexts).length;
  frame.describe(WORDS.describe(plural(all, "autograd context"), context, isEnded, back, pieces));
}

// Returns a function from a context to its rows.
function byContext(rows) {
  const groups = new Map();
  for (const one of Object.values(rows)) {
    if (!groups.has(one.context)) groups.set(one.context, []);
    groups.get(one.context).push(one);
  }
  return (context) => groups.get(context) ?? [];
}

// Shows the text of the block or arrow under the pointer, or that a click or the arrow keys have chosen, below the picture.
function details(frame) {
  const line = html("p", { class: "rb-detail", role: "status" });
  frame.foot.prepend(line);
  const state = { chosen: null, hovered: null, rest: "" };
  const items = () => [...frame.picture.querySelectorAll("[data-item]")];
  const titleOf = (key) => items().find((node) => node.dataset.item === key)?.querySelector("title").textContent;
  const show = () => {
    for (const node of items()) node.classList.toggle("rb-chosen", node.dataset.item === state.chosen);
    setText(line, titleOf(state.hovered) ?? titleOf(state.chosen) ?? state.rest);
  };
  const keyAt = (event) => event.target.closest("[data-item]")?.dataset.item ?? null;
  const change = (name) => (event) => {
    state[name] = keyAt(event);
    show();
  };
  frame.picture.addEventListener("pointerover", change("hovered"));
  frame.picture.addEventListener("pointerleave", change("hovered"));
  frame.picture.addEventListener("click", change("chosen"));
  frame.body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    const keys = items().map((node) => node.dataset.item);
    const at = keys.indexOf(state.chosen);
    state.chosen = keys[at < 0 ? (step > 0 ? 0 : keys.length - 1) : Math.max(0, Math.min(keys.length - 1, at + step))] ?? null;
    event.preventDefault();
    show();
  });
  return (rest) => {
    state.rest = rest;
    show();
  };
}

export default panel("autograd", WORDS.title, (frame) => {
  const [choice, choose] = [new Choice(), contextChoice(frame)];
  const group = (kind) => svg("g", { class: kind });
  const [lanesAt, waysAt, blocksAt, top] = ["rb-lanes", "rb-ways", "rb-blocks", "rb-axis"].map(group);
  const card = svg("g", { class: "rb-card" }, lanesAt, top, waysAt, blocksAt);
  const detail = details(frame);
  let [last, timer, legend] = [null, 0, ""];
  frame.cleanups.push(() => clearTimeout(timer));

  // Returns the context to show with its rows; the last one that was shown if the view no longer has it; null if none was.
  function shown(view) {
    const [picked, wait] = choice.pick(view, performance.now());
    const chosen = choose(view.contexts, picked ?? last?.key ?? null);
    clearTimeout(timer);
    if (wait !== null) timer = setTimeout(frame.redraw, wait + 20);
    const key = chosen || picked;
    const context = view.contexts[key];
    if (!context) {
      const isThere = last && last.pieces.members.every(({ worker }) => worker in view.workers);
      return isThere && (!chosen || chosen === last.key) ? { ...last, isEnded: true } : null;
    }
    const rows = (name) => byContext(view[name])(key);
    const names = ["members", "links", "messages", "parts", "passes", "leaves"];
    const pieces = Object.fromEntries(names.map((name) => [name, rows(name)]));
    for (const name of ["messages", "links"])
      pieces[name] = pieces[name].map((one) => ({ ...one, isUntold: silentEnds(one, view).includes(one.to) }));
    last = moreComplete(last, { key, context, pieces });
    return { ...last, isEnded: context.ended !== null };
  }

  return (view, room) => {
    const width = Math.max(LEAST_GRAPH, room);
    const picture = shown(view);
    frame.showHint(picture ? null : WORDS.hint);
    if (!picture) {
      card.remove();
      const open = heldContexts(view).length;
      frame.showStats([open, WORDS.stats.others(open)], ...leftOutStats(view.workers));
      frame.describe(plural(Object.keys(view.contexts).length, "autograd context"));
      frame.showLegend([]);
      legend = "";
      detail("");
      return;
    }
    const { pieces, context, isEnded } = picture;
    const nameOf = (id) => view.workers[id]?.name ?? `id ${id}`;
    const longest = Math.max(...pieces.members.map(({ worker }) => nameOf(worker).length));
    const left = Math.min(190, 28 + 8 * Math.max(8, longest));
    const graph = graphOf(pieces, width * 0.86 - left);
    const isNarrow = width < HELD_FRAME;
    const share = graph.blocks.some(({ level }) => level > MANY_LEVELS) ? 0.14 : 0.22;
    const held = isNarrow ? HELD_TIGHT : Math.min(HELD, width * share);
    const right = pieces.members.some(({ gradients }) => gradients) ? held : 12;
    const holders = pieces.members.filter(({ gradients, sends, recvs }) => gradients || sends || recvs);
    const rows = [...graph.blocks, ...holders];
    const ids = [...new Set((rows.length ? rows : pieces.members).map(({ worker }) => worker))].sort((a, b) => a - b);
    const geometry = { ...layOut(graph, ids, width, left, right), left, right };
    const of = (rows, id) => rows.filter(({ worker }) => worker === id);

    frame.picture.append(card);
    set(card, { "data-context": picture.key, class: `rb-card ${isEnded ? "rb-gone" : ""}` });
    headline(frame, view, picture);
    frame.resize(geometry.width, geometry.height + 4);
    const hasRun = pieces.parts.some(({ ran }) => ran.length) || pieces.messages.some(({ fired }) => fired);
    const isBackward = hasRun || pieces.passes.length > 0;
    const places = { forward: left, back: left + 96, held: geometry.width - right + 10 };
    const axis = WORDS.axis(isBackward, right > 12, isNarrow).map(([key, text, kind]) => ({ key, parts: [places[key]], text, kind }));
    join(top, axis, (key, { text, kind }) => label(places[key], 20, text, kind));
    join(lanesAt, ids.map((id, i) => {
      const own = { member: of(pieces.members, id)[0], passes: of(pieces.passes, id), leaves: of(pieces.leaves, id) };
      const place = geometry.places.get(id);
      const worker = view.workers[id] ?? { id, name: nameOf(id), state: "unknown" };
      const size = [place.y, place.height, geometry.width, left, right, i % 2];
      const parts = [...size, worker, own.member, ...own.passes, ...own.leaves];
      return { key: id, parts, make: () => drawLane(place, worker, own, geometry, i % 2) };
    }), (_, { make }) => make());
    const layout = `${graph.blocks.map(({ key, x, y, w }) => `${key} ${x} ${y} ${w}`)} ${geometry.width}`;
    const feedNode = (feed) => () => drawFeed(feed, geometry, graph.blocks);
    const ways = graph.feeds.map((feed) => ({ key: feed.key, parts: [layout], make: feedNode(feed) }));
    graph.arrows.forEach((arrow, i) => {
      const at = graph.isWide ? left + (i + 1) * ((width - left - right) / (graph.arrows.length + 1)) : null;
      const make = () => drawArrow(arrow, geometry, graph.blocks, at, isEnded, nameOf);
      ways.push({ key: arrow.key, parts: [layout, at, isEnded, JSON.stringify(countsOf(arrow.messages, isEnded))], make });
    });
    join(waysAt, ways, (_, { make }) => make());
    join(blocksAt, graph.blocks.map((block) => {
      const parts = [block.x, block.y, block.w, graph.isWide, block.chips.join(), ...block.parts];
      return { key: block.key, parts, make: () => drawBlock(block, graph.isWide, nameOf) };
    }), (_, { make }) => make());
    const items = legendOf(graph, pieces, isEnded);
    const words = items.map(([, text]) => text).join();
    if (legend !== words) frame.showLegend(items);
    legend = words;
    detail(WORDS.rest(isEnded, isBackward, pieces.parts.length > 0, context.step));
  };
});

const drawFeed = (feed, geometry, blocks) =>
  svg("g", { class: "rb-feed" }, svg("path", { class: "rb-curve", d: pathOf(feed, 0, geometry, blocks).d }));
