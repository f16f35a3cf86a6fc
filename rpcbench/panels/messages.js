// Messages: a lifeline per member, an arrow per message, in the order in which they were sent. Only what is in sight
// is drawn. A message that has come before anything else happened is level; the others slope down to where they came.
// A collective is a row of dots, one for each member that has come; the one that came last is told apart.

const STEP = 22;
const MARGIN = 3; // slots drawn beyond the edges of what is in sight
const GROUPS = {
  call: ["calls", ["Call", "Create", "Fetch", "Parcel"]],
  answer: ["answers", ["Result"]],
  failure: ["failures, calls given up", ["Failure", "Cancel", "WalkFailed", "Forget", "Fate"]],
  rref: ["RRefs", ["ForkRequest", "ForkAccept", "ChildAccept", "UserDelete", "Uncreated"]],
  autograd: ["autograd", ["Discover", "Discovered", "Gradients", "Settled", "ReleaseContext", "Attending"]],
  collective: ["collectives", ["Collective"]],
};
const GROUP = new Map(Object.entries(GROUPS).flatMap(([group, [, kinds]]) => kinds.map((kind) => [kind, group])));
const USUAL = "all but notices";
const ALL = "all kinds";

const took = (seconds) =>
  seconds >= 1
    ? `${seconds.toFixed(2)} s`
    : seconds >= 1e-3
      ? `${(seconds * 1e3).toFixed(1)} ms`
      : `${Math.round(seconds * 1e6)} µs`;

// ---- which messages, and where: pure

// Words that must all be true of a message: `call:0.17`, `rref:0.4`, `context:…`, `from:…`, `to:…`, `at:…` (one of the
// ends), or part of its kind, label or the names of its ends.
function wanted(words, kind, names) {
  const tests = words.trim().split(/\s+/).filter(Boolean).map((word) => {
    const [, field, value] = /^(call|rref|context|from|to|at):(.*)$/.exec(word) ?? [];
    if (field === "rref") return (row) => row.rrefs.includes(value);
    if (field === "call" || field === "context") return (row) => row[field] === value;
    if (field === "at") return (row) => endsOf(row, names).includes(value);
    if (field) return (row) => !row.came && names(row[field]) === value;
    const part = word.toLowerCase();
    return (row) => `${row.kind} ${row.label} ${row.group ?? ""} ${endsOf(row, names).join(" ")}`.toLowerCase().includes(part);
  });
  const meant = kind === ALL ? () => true : kind === USUAL ? (row) => row.kind !== "Notice" : (row) => row.kind === kind;
  return (row) => meant(row) && tests.every((test) => test(row));
}

// A slot for each moment: where a message was sent and, unless nothing happened in between, where it came.
function laidOut(messages, keep) {
  const places = [];
  const moments = [];
  for (const [key, row] of Object.entries(messages)) {
    if (!keep(row)) continue;
    const sent = row.sent ?? row.received;
    const place = { key, row, sent, from: 0, to: 0 };
    places.push(place);
    moments.push({ at: sent, place, first: true });
    if (row.sent !== null && row.received !== null) {
      moments.push({ at: Math.max(sent, row.received), place, first: false });
    }
  }
  moments.sort((a, b) => a.at - b.at || Number(b.first) - Number(a.first));
  let slot = -1;
  let before = null;
  for (const { place, first } of moments) {
    if (first) place.from = place.to = ++slot;
    else place.to = before === place ? slot : ++slot;
    before = place;
  }
  places.sort((a, b) => a.from - b.from);
  return { places, slots: slot + 1 };
}

function sentence(row, began, names) {
  if (row.came) return meetingSentence(row, began, names);
  const about = [row.call && `call ${row.call}`, ...row.rrefs.map((rref) => `RRef ${rref}`)];
  about.push(row.context && `context ${row.context}`, row.bytes && `${bytes(row.bytes)} of data`);
  if (row.tries > 1) about.push(`sent ${row.tries} times`);
  const when = row.sent === null ? "" : ` at ${took(row.sent - began)}`;
  const how =
    row.state === "received" && row.sent !== null
      ? `received ${took(Math.max(0, row.received - row.sent))} later`
      : row.state === "untold"
        ? "its receiver left out whether it came"
        : row.state;
  const label = row.label ? ` ${row.label}` : "";
  return [`${row.kind}${label}, ${names(row.from)} → ${names(row.to)}${when}, ${how}`, ...about.filter(Boolean)].join(", ");
}

// ---- marks

function head(x, y, angle) {
  return svg("path", { class: "rb-tip", d: "M1 0 L-7 -3.5 L-7 3.5 Z", transform: `translate(${x} ${y}) rotate(${angle})` });
}

function loop(x, y1, y2) {
  const low = Math.max(y2, y1 + 9);
  const line = svg("path", { class: "rb-line", d: `M${x} ${y1 - 4} h16 V${low} H${x + 2}` });
  return [line, head(x + 1, low, 180)];
}

// From one lifeline to the other; what has not come ends on the way.
function way({ row, from, to }, cols) {
  const [x1, x2] = [cols.x(row.from), cols.x(row.to)];
  const [y1, y2] = [STEP / 2, (to - from) * STEP + STEP / 2];
  if (row.from === row.to) return loop(x1, y1, y2);
  const came = row.state === "received";
  const end = came ? x2 - Math.sign(x2 - x1) : x1 + (x2 - x1) * 0.72;
  const line = svg("line", { class: "rb-line", x1, y1, x2: end, y2 });
  if (row.state === "lost") return [line, svg("path", { class: "rb-cross", d: "M-4 -4 L4 4 M-4 4 L4 -4", transform: `translate(${end} ${y2})` })];
  return [line, head(end, y2, (Math.atan2(y2 - y1, end - x1) * 180) / Math.PI)];
}

// What stands at the end of a row: of a message how it is, if that is unusual, of a collective how long it took.
function moreOf(row) {
  if (row.came) return row.state === "done" ? took(row.end - row.begin) : row.state;
  return row.state === "received" ? (row.tries > 1 ? `${row.tries} tries` : "") : row.state;
}

function arrowOf(place, cols, began, names, chosen) {
  const { key, row, from } = place;
  const room = Math.floor((LEFT + cols.step / 2 - 84) / 6.4);
  const told = row.came ? row.label : row.label ? `${row.kind} ${row.label}` : row.kind;
  const more = moreOf(row);
  return svg(
    "g",
    {
      class: `rb-message rb-${GROUP.get(row.kind) ?? "other"} rb-is-${row.state.replace(" ", "-")}${chosen ? " rb-chosen" : ""}`,
      transform: `translate(0 ${from * STEP})`,
      "data-message": key,
      "data-state": row.state,
    },
    tip(sentence(row, began, names)),
    svg("rect", { class: "rb-band", width: cols.width, height: STEP }),
    label(66, 15, took(place.sent - began), "rb-note rb-end"),
    label(76, 15, short(told, room), "rb-what"),
    ...(row.came ? dots(row, cols) : way(place, cols)),
    label(cols.width - 10, 15, more || (row.bytes ? bytes(row.bytes) : ""), `rb-note rb-end${more ? " rb-more" : ""}`),
  );
}

function swatches() {
  const tipOf = (group) => (group === "collective" ? svg("circle", { class: "rb-dot", r: 5 }) : head(8, 0, 0));
  const mark = (group) => svg("g", { class: `rb-message rb-${group}` }, svg("line", { class: "rb-line", x1: -8, x2: 4 }), tipOf(group));
  const dashed = svg("g", { class: "rb-message rb-is-under-way rb-call" }, svg("line", { class: "rb-line", x1: -8, x2: 8 }));
  const lost = svg("g", { class: "rb-message rb-is-lost" }, svg("path", { class: "rb-cross", d: "M-4 -4 L4 4 M-4 4 L4 -4" }));
  const last = svg("circle", { class: "rb-dot rb-last", r: 5 });
  const marks = Object.entries(GROUPS).map(([group, [words]]) => [mark(group), words]);
  return [...marks, [last, "came last"], [dashed, "under way"], [lost, "lost"]];
}

// ---- what the reader asks for

function tools(frame, changed) {
  const words = html("input", { type: "search", placeholder: "call:0.17  rref:0.4  at:worker1  name", "aria-label": "Show only messages that match" });
  const kinds = html("select", { "aria-label": "Kinds of messages" });
  const detail = html("p", { class: "rb-detail", role: "status" });
  const only = html("span", { class: "rb-only" });
  frame.head.append(html("span", { class: "rb-tools" }, words, kinds));
  frame.root.insertBefore(html("div", { class: "rb-below" }, detail, only), frame.legend);
  words.addEventListener("input", changed);
  kinds.addEventListener("change", changed);
  const offer = (found) => {
    const [value, options] = [kinds.value || USUAL, [USUAL, ALL, ...found]];
    if (kinds.dataset.all === options.join()) return;
    kinds.dataset.all = options.join();
    kinds.replaceChildren(...options.map((kind) => html("option", { value: kind }, kind)));
    kinds.value = options.includes(value) ? value : USUAL;
  };
  const button = (term) => {
    const made = html("button", { type: "button" }, term);
    made.addEventListener("click", () => {
      words.value = words.value === term ? "" : term;
      changed();
    });
    return made;
  };
  const show = (text, terms) => {
    if (detail.textContent === text) return;
    detail.textContent = text;
    only.replaceChildren(...terms.map(button));
  };
  return { words: () => words.value, kind: () => kinds.value || USUAL, offer, show };
}

const termsOf = (row) => [
  ...(row.call ? [`call:${row.call}`] : []),
  ...row.rrefs.slice(0, 8).map((rref) => `rref:${rref}`),
  ...(row.context ? [`context:${row.context}`] : []),
];

// What is said of all messages, whether they are shown or not.
function totals(messages) {
  const rows = Object.values(messages);
  const states = {};
  for (const { state } of rows) states[state] = (states[state] ?? 0) + 1;
  const began = rows.reduce((least, row) => Math.min(least, row.sent ?? row.received), rows.length ? Infinity : 0);
  return { all: rows.length, states, began, kinds: [...new Set(rows.map((row) => row.kind))].sort() };
}

function headline(frame, view, places, { all, states }) {
  const [going, lost] = [states["under way"] ?? 0, states.lost ?? 0];
  const skew = Math.max(0, ...Object.values(view.clocks).map((clock) => clock.error));
  const together = places.filter(({ row }) => row.came).length;
  const kept = places.length - together;
  frame.say(
    tally(kept, "message"),
    ...(together ? [tally(together, "collective")] : []),
    [all - places.length, "filtered out"],
    [going, "under way", going ? "rb-wait" : ""],
    ...(lost ? [[lost, "lost", "rb-warn"]] : []),
    ...(states.open ? [[states.open, "open", "rb-wait"]] : []),
    ...(skew ? [[`± ${took(skew)}`, "between hosts"]] : []),
    ...leftOut(view.workers),
  );
  frame.empty(all ? null : ["No message yet. Make a call: ", 'rpc.rpc_sync("worker1", torch.add, (1, 2))']);
  const besides = together ? `, ${many(together, "collective")}` : "";
  frame.describe(`${many(kept, "message")}, ${going} under way, ${lost} lost${besides}.`);
}

export default panel("messages", "Messages", (frame) => {
  const [lives, rows] = [svg("g"), svg("g")];
  frame.picture.append(lives, rows);
  frame.explain(swatches());
  set(frame.body, { "aria-label": "Messages, picture: arrow keys choose a message" });
  let [view, width, chosen] = [null, 0, null];
  let [plan, planned, sum, all] = [{ places: [], slots: 0 }, [], null, {}];
  const asked = tools(frame, () => view && paint());

  // Where all messages lie; made anew only for other messages, or another wish.
  function arrange(names) {
    const wish = [view.messages, view.collectives, view.entries, view.workers, asked.words(), asked.kind()];
    if (wish.every((part, i) => part === planned[i])) return false;
    all = { ...view.messages, ...meetings(view) };
    sum = totals(all);
    asked.offer(sum.kinds);
    const follows = planned.length && frame.body.scrollTop + frame.body.clientHeight >= frame.body.scrollHeight - 4;
    plan = laidOut(all, wanted(asked.words(), asked.kind(), names));
    planned = wish;
    frame.tallest = 0;
    return follows;
  }

  function paint() {
    const names = (id) => view.workers[id].name;
    const cols = columns(view.workers, width);
    const follows = arrange(names);
    const { places, slots } = plan;
    headline(frame, view, places, sum);
    frame.size(cols.width, Math.max(5, slots) * STEP + 6, cols.head);
    if (follows) frame.body.scrollTop = frame.body.scrollHeight;
    drawHead(frame, cols, () => "");
    const { began } = sum;
    const top = Math.floor(frame.body.scrollTop / STEP) - MARGIN;
    const bottom = top + Math.ceil(frame.body.clientHeight / STEP) + 2 * MARGIN;
    const seen = places.filter(({ from, to }) => from <= bottom && to >= top);
    const tall = Math.max(5, slots) * STEP;
    join(
      lives,
      cols.list.map((worker) => ({ key: worker.id, parts: [cols.key, tall], worker })),
      (id, { worker }) => svg("line", { class: `rb-life rb-is-${worker.state}`, x1: cols.x(id), x2: cols.x(id), y1: 0, y2: tall }),
    );
    const items = seen.map((place) => ({ key: place.key, parts: [cols.key, place.row, place.from, place.to, began, place.key === chosen], place }));
    join(rows, items, (key, { place }) => arrowOf(place, cols, began, names, key === chosen));
    const row = chosen !== null ? all[chosen] : null;
    asked.show(row ? sentence(row, began, names) : "", row ? termsOf(row) : []);
  }

  function choose(key) {
    chosen = key;
    paint();
  }

  function stepBy(by) {
    const { places } = plan;
    const at = places.findIndex((place) => place.key === chosen);
    const next = places[Math.min(places.length - 1, Math.max(0, at < 0 ? 0 : at + by))];
    if (!next) return;
    const y = next.from * STEP;
    const low = y + 2 * STEP + frame.top.clientHeight - frame.body.clientHeight;
    frame.body.scrollTop = Math.max(low, Math.min(y, frame.body.scrollTop));
    choose(next.key);
  }

  let due = 0;
  frame.body.addEventListener("scroll", () => {
    due ||= requestAnimationFrame(() => {
      due = 0;
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

  return (next, wide) => {
    [view, width] = [next, wide];
    paint();
  };
});
