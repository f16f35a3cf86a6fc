// The messages panel: a lifeline for each member and an arrow for each message, in the order of sending.
// An arrow is level if nothing else happened before the message arrived; otherwise it slopes down to the row of its arrival. A
// collective is a row of dots (see `meetings.js`).
// Guarantees: only rows in sight are drawn. A user who has scrolled to the end stays at the end when messages are added.

const STEP = 22; // pixels from one slot to the next
const MARGIN = 3; // slots drawn above and below those in sight
// Groups of kinds with one colour each: the text in the legend, and the kinds.
const GROUPS = {
  call: ["calls", ["Call", "Create", "Fetch", "Parcel"]],
  answer: ["answers", ["Result"]],
  failure: ["failures, cancelled calls", ["Failure", "Cancel", "BackwardFailed", "CancelDelivery", "DeliveryReport"]],
  rref: ["RRefs", ["ForkRequest", "ForkAccept", "ChildAccept", "UserDelete", "CreateFailed"]],
  autograd: ["autograd", ["Discover", "Discovered", "Gradients", "Settled", "ReleaseContext", "ContextParticipant"]],
  collective: ["collectives", ["Collective"]],
};
const GROUP_OF_KIND = new Map(Object.entries(GROUPS).flatMap(([group, [, kinds]]) => kinds.map((kind) => [kind, group])));
const DEFAULT_KINDS = "all but notices";
const ALL_KINDS = "all kinds";

const formatSeconds = (seconds) =>
  seconds >= 1
    ? `${seconds.toFixed(2)} s`
    : seconds >= 1e-3
      ? `${(seconds * 1e3).toFixed(1)} ms`
      : `${Math.round(seconds * 1e6)} µs`;

// ---- pure functions: which messages are shown, and where

// Returns a test for messages. All words of `text` must match: `call:0.17`, `rref:0.4`, `context:…`, `from:…`, `to:…`, `at:…`
// (sender or receiver), or a part of the kind, the label, or the name of the sender or receiver.
function messageFilter(text, kind, names) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map((word) => {
    const [, field, value] = /^(call|rref|context|from|to|at):(.*)$/.exec(word) ?? [];
    if (field === "rref") return (row) => row.rrefs.includes(value);
    if (field === "call" || field === "context") return (row) => row[field] === value;
    if (field === "at") return (row) => endsOf(row, names).includes(value);
    if (field) return (row) => !row.entered && names(row[field]) === value;
    const part = word.toLowerCase();
    return (row) => `${row.kind} ${row.label} ${row.group ?? ""} ${endsOf(row, names).join(" ")}`.toLowerCase().includes(part);
  });
  const hasKind = kind === ALL_KINDS ? () => true : kind === DEFAULT_KINDS ? (row) => row.kind !== "Notice" : (row) => row.kind === kind;
  return (row) => hasKind(row) && tests.every((test) => test(row));
}

// Gives each event a slot, in the order of time: one for the sending of a message, and one for its arrival, unless nothing else
// happened in between. `keep` is the test for messages to show.
function layOut(messages, keep) {
  const places = [];
  const events = [];
  for (const [key, row] of Object.entries(messages)) {
    if (!keep(row)) continue;
    const sent = row.sent ?? row.received;
    const place = { key, row, sent, from: 0, to: 0 };
    places.push(place);
    events.push({ at: sent, place, first: true });
    if (row.sent !== null && row.received !== null) {
      events.push({ at: Math.max(sent, row.received), place, first: false });
    }
  }
  events.sort((a, b) => a.at - b.at || Number(b.first) - Number(a.first));
  let slot = -1;
  let before = null;
  for (const { place, first } of events) {
    if (first) place.from = place.to = ++slot;
    else place.to = before === place ? slot : ++slot;
    before = place;
  }
  places.sort((a, b) => a.from - b.from);
  return { places, slots: slot + 1 };
}

// Describes a message or a collective in one sentence.
function sentence(row, began, names) {
  if (row.entered) return collectiveSentence(row, began, names);
  const details = [row.call && `call ${row.call}`, ...row.rrefs.map((rref) => `RRef ${rref}`)];
  details.push(row.context && `context ${row.context}`, row.bytes && `${formatBytes(row.bytes)} of data`);
  if (row.tries > 1) details.push(`sent ${row.tries} times`);
  const when = row.sent === null ? "" : ` at ${formatSeconds(row.sent - began)}`;
  const outcome =
    row.state === "received" && row.sent !== null
      ? `received ${formatSeconds(Math.max(0, row.received - row.sent))} later`
      : row.state === "untold"
        ? "its receiver did not report whether it arrived"
        : row.state;
  const label = row.label ? ` ${row.label}` : "";
  return [`${row.kind}${label}, ${names(row.from)} → ${names(row.to)}${when}, ${outcome}`, ...details.filter(Boolean)].join(", ");
}

// ---- marks

function arrowHead(x, y, angle) {
  return svg("path", { class: "rb-tip", d: "M1 0 L-7 -3.5 L-7 3.5 Z", transform: `translate(${x} ${y}) rotate(${angle})` });
}

// Draws a message of a member to itself.
function loop(x, y1, y2) {
  const low = Math.max(y2, y1 + 9);
  const line = svg("path", { class: "rb-line", d: `M${x} ${y1 - 4} h16 V${low} H${x + 2}` });
  return [line, arrowHead(x + 1, low, 180)];
}

// Draws a message from one lifeline to the other. The line of a message that has not arrived ends before the receiver.
function messageArrow({ row, from, to }, cols) {
  const [x1, x2] = [cols.x(row.from), cols.x(row.to)];
  const [y1, y2] = [STEP / 2, (to - from) * STEP + STEP / 2];
  if (row.from === row.to) return loop(x1, y1, y2);
  const arrived = row.state === "received";
  const end = arrived ? x2 - Math.sign(x2 - x1) : x1 + (x2 - x1) * 0.72;
  const line = svg("line", { class: "rb-line", x1, y1, x2: end, y2 });
  if (row.state === "lost") return [line, svg("path", { class: "rb-cross", d: "M-4 -4 L4 4 M-4 4 L4 -4", transform: `translate(${end} ${y2})` })];
  return [line, arrowHead(end, y2, (Math.atan2(y2 - y1, end - x1) * 180) / Math.PI)];
}

// Returns the text at the end of a row: the state of a message if it is unusual, or the duration of a collective.
function rowNote(row) {
  if (row.entered) return row.state === "done" ? formatSeconds(row.end - row.begin) : row.state;
  return row.state === "received" ? (row.tries > 1 ? `${row.tries} tries` : "") : row.state;
}

// Draws the row of one message or collective.
function messageRow(place, cols, began, names, chosen) {
  const { key, row, from } = place;
  const room = Math.floor((LEFT + cols.step / 2 - 84) / 6.4);
  const name = row.entered ? row.label : row.label ? `${row.kind} ${row.label}` : row.kind;
  const note = rowNote(row);
  return svg(
    "g",
    {
      class: `rb-message rb-${GROUP_OF_KIND.get(row.kind) ?? "other"} rb-is-${row.state.replace(" ", "-")}${chosen ? " rb-chosen" : ""}`,
      transform: `translate(0 ${from * STEP})`,
      "data-message": key,
      "data-state": row.state,
    },
    tip(sentence(row, began, names)),
    svg("rect", { class: "rb-band", width: cols.width, height: STEP }),
    label(66, 15, formatSeconds(place.sent - began), "rb-note rb-end"),
    label(76, 15, shorten(name, room), "rb-what"),
    ...(row.entered ? memberMarks(row, cols) : messageArrow(place, cols)),
    label(cols.width - 10, 15, note || (row.bytes ? formatBytes(row.bytes) : ""), `rb-note rb-end${note ? " rb-more" : ""}`),
  );
}

// Returns the entries of the legend.
function legend() {
  const end = (group) => (group === "collective" ? svg("circle", { class: "rb-dot", r: 5 }) : arrowHead(8, 0, 0));
  const mark = (group) => svg("g", { class: `rb-message rb-${group}` }, svg("line", { class: "rb-line", x1: -8, x2: 4 }), end(group));
  const dashed = svg("g", { class: "rb-message rb-is-under-way rb-call" }, svg("line", { class: "rb-line", x1: -8, x2: 8 }));
  const lost = svg("g", { class: "rb-message rb-is-lost" }, svg("path", { class: "rb-cross", d: "M-4 -4 L4 4 M-4 4 L4 -4" }));
  const last = svg("circle", { class: "rb-dot rb-last", r: 5 });
  const marks = Object.entries(GROUPS).map(([group, [text]]) => [mark(group), text]);
  return [...marks, [last, "came last"], [dashed, "under way"], [lost, "lost"]];
}

// ---- the user's controls

// Adds a search field and a choice of kinds, and below the picture the details of the chosen message. `changed` is called after
// each change of the filter.
function controls(frame, changed) {
  const search = html("input", { type: "search", placeholder: "call:0.17  rref:0.4  at:worker1  name", "aria-label": "Show only messages that match" });
  const kinds = html("select", { "aria-label": "Kinds of messages" });
  const detail = html("p", { class: "rb-detail", role: "status" });
  const only = html("span", { class: "rb-only" });
  frame.head.append(html("span", { class: "rb-tools" }, search, kinds));
  frame.root.insertBefore(html("div", { class: "rb-below" }, detail, only), frame.legend);
  search.addEventListener("input", changed);
  kinds.addEventListener("change", changed);
  const offerKinds = (found) => {
    const [value, options] = [kinds.value || DEFAULT_KINDS, [DEFAULT_KINDS, ALL_KINDS, ...found]];
    if (kinds.dataset.all === options.join()) return;
    kinds.dataset.all = options.join();
    kinds.replaceChildren(...options.map((kind) => html("option", { value: kind }, kind)));
    kinds.value = options.includes(value) ? value : DEFAULT_KINDS;
  };
  const button = (term) => {
    const node = html("button", { type: "button" }, term);
    node.addEventListener("click", () => {
      search.value = search.value === term ? "" : term;
      changed();
    });
    return node;
  };
  const showDetail = (text, terms) => {
    if (detail.textContent === text) return;
    detail.textContent = text;
    only.replaceChildren(...terms.map(button));
  };
  return { text: () => search.value, kind: () => kinds.value || DEFAULT_KINDS, offerKinds, showDetail };
}

// Returns the filters that a message's ids suggest; each becomes a button.
const filterTerms = (row) => [
  ...(row.call ? [`call:${row.call}`] : []),
  ...row.rrefs.slice(0, 8).map((rref) => `rref:${rref}`),
  ...(row.context ? [`context:${row.context}`] : []),
];

// Counts all messages, shown or not, by state. `began` is the time of the first one.
function totals(messages) {
  const rows = Object.values(messages);
  const states = {};
  for (const { state } of rows) states[state] = (states[state] ?? 0) + 1;
  const began = rows.reduce((least, row) => Math.min(least, row.sent ?? row.received), rows.length ? Infinity : 0);
  return { all: rows.length, states, began, kinds: [...new Set(rows.map((row) => row.kind))].sort() };
}

function headline(frame, view, places, { all, states }) {
  const [underWay, lost] = [states["under way"] ?? 0, states.lost ?? 0];
  const skew = Math.max(0, ...Object.values(view.clocks).map((clock) => clock.error));
  const collectives = places.filter(({ row }) => row.entered).length;
  const shown = places.length - collectives;
  frame.showStats(
    countStat(shown, "message"),
    ...(collectives ? [countStat(collectives, "collective")] : []),
    [all - places.length, "filtered out"],
    [underWay, "under way", underWay ? "rb-wait" : ""],
    ...(lost ? [[lost, "lost", "rb-warn"]] : []),
    ...(states.open ? [[states.open, "open", "rb-wait"]] : []),
    ...(skew ? [[`± ${formatSeconds(skew)}`, "between hosts"]] : []),
    ...leftOutStats(view.workers),
  );
  frame.showHint(all ? null : ["No message yet. Make a call: ", 'rpc.rpc_sync("worker1", torch.add, (1, 2))']);
  const others = collectives ? `, ${plural(collectives, "collective")}` : "";
  frame.describe(`${plural(shown, "message")}, ${underWay} under way, ${lost} lost${others}.`);
}

export default panel("messages", "Messages", (frame) => {
  const [lifelines, rows] = [svg("g"), svg("g")];
  frame.picture.append(lifelines, rows);
  frame.showLegend(legend());
  set(frame.body, { "aria-label": "Messages, picture: arrow keys choose a message" });
  let [view, width, chosen] = [null, 0, null];
  let [layout, inputs, summary, all] = [{ places: [], slots: 0 }, [], null, {}];
  const filter = controls(frame, () => view && paint());

  // Updates the layout if the messages or the filter have changed. Returns whether the body should scroll to the end.
  function updateLayout(names) {
    const current = [view.messages, view.collectives, view.entries, view.workers, filter.text(), filter.kind()];
    if (current.every((part, i) => part === inputs[i])) return false;
    all = { ...view.messages, ...collectiveRows(view) };
    summary = totals(all);
    filter.offerKinds(summary.kinds);
    const follows = inputs.length && frame.body.scrollTop + frame.body.clientHeight >= frame.body.scrollHeight - 4;
    layout = layOut(all, messageFilter(filter.text(), filter.kind(), names));
    inputs = current;
    frame.tallest = 0; // a filter may leave few rows, so this picture may shrink
    return follows;
  }

  function paint() {
    const names = (id) => view.workers[id].name;
    const cols = columns(view.workers, width);
    const follows = updateLayout(names);
    const { places, slots } = layout;
    headline(frame, view, places, summary);
    frame.resize(cols.width, Math.max(5, slots) * STEP + 6, cols.head);
    if (follows) frame.body.scrollTop = frame.body.scrollHeight;
    drawHead(frame, cols, () => "");
    const { began } = summary;
    const top = Math.floor(frame.body.scrollTop / STEP) - MARGIN;
    const bottom = top + Math.ceil(frame.body.clientHeight / STEP) + 2 * MARGIN;
    const visible = places.filter(({ from, to }) => from <= bottom && to >= top);
    const tall = Math.max(5, slots) * STEP;
    join(
      lifelines,
      cols.list.map((worker) => ({ key: worker.id, parts: [cols.key, tall], worker })),
      (id, { worker }) => svg("line", { class: `rb-life rb-is-${worker.state}`, x1: cols.x(id), x2: cols.x(id), y1: 0, y2: tall }),
    );
    const items = visible.map((place) => ({ key: place.key, parts: [cols.key, place.row, place.from, place.to, began, place.key === chosen], place }));
    join(rows, items, (key, { place }) => messageRow(place, cols, began, names, key === chosen));
    const row = chosen !== null ? all[chosen] : null;
    filter.showDetail(row ? sentence(row, began, names) : "", row ? filterTerms(row) : []);
  }

  function choose(key) {
    chosen = key;
    paint();
  }

  function stepBy(by) {
    const { places } = layout;
    const at = places.findIndex((place) => place.key === chosen);
    const next = places[Math.min(places.length - 1, Math.max(0, at < 0 ? 0 : at + by))];
    if (!next) return;
    const y = next.from * STEP;
    const low = y + 2 * STEP + frame.top.clientHeight - frame.body.clientHeight;
    frame.body.scrollTop = Math.max(low, Math.min(y, frame.body.scrollTop));
    choose(next.key);
  }

  let pending = 0;
  frame.body.addEventListener("scroll", () => {
    pending ||= requestAnimationFrame(() => {
      pending = 0;
      if (view) paint();
    });
  });
  frame.body.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!view || !by) return;
    event.preventDefault();
    stepBy(by);
  });
  rows.addEventListener("click", (event) => choose(event.target.closest("[data-message]").dataset.message));

  return (nextView, nextWidth) => {
    [view, width] = [nextView, nextWidth];
    paint();
  };
});
