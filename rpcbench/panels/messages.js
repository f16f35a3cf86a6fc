// The messages panel: a lifeline for each member and an arrow for each message, in the order of sending.
// An arrow is level if nothing else happened before the message arrived; otherwise it slopes down to the row of its arrival, but
// only behind the last lifeline that it passes, so it touches no end of another message. A collective is a row of dots (see
// `meetings.js`). The words of a message are made in Python (`telemetry.message_views.describe_message`), as stills and texts use them
// too.
// Guarantees
// - Only rows in sight are drawn. A live panel begins at the end, and stays there when messages are added or its frame changes,
//   unless the user has scrolled up: then the rows in sight stay where they are.
// - The list of a live panel stands still while the pointer or the keyboard's focus is on it, and while a row is chosen. A line at
//   its end says how much has come or changed meanwhile.

const TEXT = STRINGS.messages;
const STEP = 24; // pixels from one slot to the next
const MARGIN = 3; // slots drawn above and below those in sight
const BEND = 0.6; // of the last gap, in which a long line slopes
const STATES = LISTS.messages.states; // the words of states of what has not arrived
const FAMILIES = LISTS.messages.families; // the name of each family of kinds, see `telemetry/message_views.py`
const [USUAL, ALL] = ["", "all"]; // choices of the select beside groups; usual: all but notices
// Long words and their shorter forms, the shortest last. A value between stages is named by the operation that it is for, as in a
// schedule: 1B0 is the backward of micro-batch 0 in stage 1.
const SHORTER = [
  [/^activations of micro-batch (\d+) → stage (\d+)$/, "act $2F$1", "$2F$1"],
  [/^gradient of micro-batch (\d+) → stage (\d+)$/, "grad $2B$1", "$2B$1"],
  [/^gradient of tied weight (\d+) → stage (\d+)$/, "tied $1 → $2", "$1→$2"],
  [/^(?:call|result of|error of) (?:pipeline )?(.+)$/, "$1"], // which of them the colour and the arrow say
];
// Pixels of a picture: beside its columns, and the end of the times and the begin of the words there.
const geometry = (width) =>
  width < NARROW_FRAME
    ? { side: Math.round((width < TINY_FRAME ? 0.4 : 0.43) * width), right: 76, time: 62, words: 68 }
    : { side: Math.min(330, Math.max(190, Math.round(0.335 * width))), right: RIGHT, time: 66, words: 76 };

// Returns a time as text. The column of times has no room for 1000 s: from there on its texts are of minutes, and exact ones of
// hundredths of a second too.
function formatSeconds(seconds, isExact = false) {
  if (seconds >= 999.995) return formatMinutes(seconds, isExact);
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  return seconds >= 0.9995e-3 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e6)} µs`;
}

// ---- pure functions: which messages are shown, and where

// Returns a test for messages. All words of `text` must match: `call:0.17`, `rref:0.4`, `context:…`, `from:…`, `to:…`, `at:…`
// (sender or receiver), or a part of its words, its kind, its label, its state (lost, in flight), or the name of the sender or receiver. `chosen` is a key of
// `FAMILIES`, or USUAL, or ALL.
function messageFilter(text, chosen, names) {
  const tests = text.trim().split(/\s+/).filter(Boolean).map((word) => {
    const [, field, value] = /^(call|rref|context|from|to|at):(.*)$/.exec(word) ?? [];
    if (field === "rref") return (row) => row.rrefs.includes(value);
    if (field === "call" || field === "context") return (row) => row[field] === value;
    if (field === "at") return (row) => endsOf(row, names).includes(value);
    if (field) return (row) => !row.entered && names(row[field]) === value;
    const part = word.toLowerCase();
    const wordsOf = (row) => [row.words, row.kind, row.label, row.group, STATES[row.state], ...endsOf(row, names)].join(" ").toLowerCase();
    return (row) => wordsOf(row).includes(part);
  });
  const isOf = ({ family }) => chosen === ALL || (chosen === USUAL ? family !== "notice" : family === chosen);
  return (row) => isOf(row) && tests.every((test) => test(row));
}

// When a message was sent; received or lost, if its sending was not reported.
function timeOf(row) {
  return row.sent ?? row.received ?? row.lost;
}

// Gives each event a slot, in the order of time: one for the sending of a message, and one for its arrival, unless nothing else
// happened in between. `keep` is the test for messages to show.
function layOut(messages, keep) {
  const places = [];
  const events = [];
  for (const [key, row] of Object.entries(messages)) {
    if (!keep(row)) continue;
    const sent = timeOf(row);
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
  details.push(row.context && `context ${row.context}`, row.bytes && TEXT.bytes(formatBytes(row.bytes)));
  if (row.tries > 1) details.push(TEXT.sentTimes(row.tries));
  details.push(TEXT.kind(row.kind)); // the name that `%%step --hold` and the lessons use
  const when = row.sent === null ? "" : ` ${TEXT.at(formatSeconds(row.sent - began, true))}`;
  const hasBoth = row.state === "received" && row.sent !== null;
  const outcome = hasBoth ? TEXT.later(formatSeconds(Math.max(0, row.received - row.sent), true)) : TEXT.outcomes[row.state];
  return [`${row.words}, ${names(row.from)} → ${names(row.to)}${when}, ${outcome}`, ...details.filter(Boolean)].join(", ");
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

// Returns the points of the line of a message that has arrived. A line over several gaps is level, in its own row, until it has
// passed the last lifeline before the receiver: each row is that of one event, so no other message begins or ends on its way. It
// bends between two lifelines: at one it would look as if that member had passed the message on.
function waypoints(x1, y1, x2, y2, step) {
  const bend = x2 - Math.sign(x2 - x1) * BEND * step;
  const isFar = y1 !== y2 && Math.abs(x2 - x1) > 1.5 * step;
  return [[x1, y1], ...(isFar ? [[bend, y1]] : []), [x2, y2]];
}

// Draws a message from one lifeline to the other. The line of a message that has not arrived ends before the receiver.
function messageArrow({ row, from, to }, cols) {
  const [x1, x2] = [cols.x(row.from), cols.x(row.to)];
  const [y1, y2] = [STEP / 2, (to - from) * STEP + STEP / 2];
  if (row.from === row.to) return loop(x1, y1, y2);
  const arrived = row.state === "received";
  const end = arrived ? x2 - Math.sign(x2 - x1) : x1 + (x2 - x1) * 0.72;
  if (row.state === "lost") {
    const cross = svg("path", { class: "rb-cross", d: "M-4 -4 L4 4 M-4 4 L4 -4", transform: `translate(${end} ${y2})` });
    return [svg("line", { class: "rb-line", x1, y1, x2: end, y2 }), cross];
  }
  const points = arrived ? waypoints(x1, y1, end, y2, cols.step) : [[x1, y1], [end, y2]];
  const [[x, y]] = points.slice(-2);
  const line = points.length === 2
    ? svg("line", { class: "rb-line", x1, y1, x2: end, y2 })
    : svg("path", { class: "rb-line", d: `M${points.map((point) => point.join(" ")).join("L")}` });
  return [line, arrowHead(end, y2, (Math.atan2(y2 - y, end - x) * 180) / Math.PI)];
}

// Returns the text at the end of a row: the state of a message if it is unusual, or the duration of a collective.
function rowNote(row) {
  if (row.entered) return row.state === "done" ? formatSeconds(row.end - row.begin) : TEXT.states[row.state];
  return row.state === "received" ? (row.tries > 1 ? TEXT.tries(row.tries) : "") : TEXT.states[row.state];
}

// Returns the words of a row for a room of so many letters; where they are too long a shorter form, so that it is whole if it can.
function wordsFor(room, words) {
  const [pattern, ...forms] = SHORTER.find(([pattern]) => pattern.test(words)) ?? [/$/];
  const all = [words, ...forms.map((form) => words.replace(pattern, form))];
  return all.find((text) => text.length <= room) ?? shorten(all.at(-1), room);
}

// Draws the row of one message or collective.
function messageRow(place, cols, began, names, chosen, at) {
  const { key, row, from } = place;
  const room = Math.floor((cols.x(cols.list[0].id) - at.words - 10) / 6.9);
  const note = rowNote(row);
  return svg(
    "g",
    {
      class: `rb-message rb-${row.family} rb-is-${row.state.replace(" ", "-")}${chosen ? " rb-chosen" : ""}`,
      transform: `translate(0 ${from * STEP})`,
      "data-message": key,
      "data-state": row.state,
      "data-kind": row.kind,
    },
    tip(sentence(row, began, names)),
    svg("rect", { class: "rb-band", width: cols.width, height: STEP }),
    label(at.time, 16, formatSeconds(place.sent - began), "rb-note rb-end"),
    label(at.words, 16, wordsFor(room, row.words), "rb-what"),
    ...(row.entered ? memberMarks(row, cols) : messageArrow(place, cols)),
    label(cols.end, 16, note || (row.bytes ? formatBytes(row.bytes) : ""), `rb-note rb-end${note ? " rb-more" : ""}`),
  );
}

// Returns the entries of the legend: what is drawn, and nothing else. `states` and `families` have the keys of those there;
// `hasLast`: a member came last to a collective.
function legend(families, states, hasLast) {
  const end = (family) => (family === "collective" ? svg("circle", { class: "rb-dot", r: 5 }) : arrowHead(8, 0, 0));
  const mark = (family) => svg("g", { class: `rb-message rb-${family}` }, svg("line", { class: "rb-line", x1: -8, x2: 4 }), end(family));
  const marks = Object.entries(FAMILIES).filter(([key]) => families.includes(key)).map(([key, name]) => [mark(key), name]);
  const dashed = svg("g", { class: "rb-message rb-is-under-way rb-call" }, svg("line", { class: "rb-line", x1: -8, x2: 8 }));
  const lost = svg("g", { class: "rb-message rb-is-lost" }, svg("path", { class: "rb-cross", d: "M-4 -4 L4 4 M-4 4 L4 -4" }));
  if (hasLast) marks.push([svg("circle", { class: "rb-dot rb-last", r: 5 }), TEXT.cameLast]);
  const ring = svg("circle", { class: "rb-dot rb-missing", r: 5 });
  if (families.includes("collective") && states.includes("open")) marks.push([ring, TEXT.missing]);
  if (states.includes("under way")) marks.push([dashed, TEXT.states["under way"]]);
  if (states.includes("lost")) marks.push([lost, TEXT.states.lost]);
  return marks;
}

// ---- the user's controls

// Adds a search field and a choice of groups, and below the picture the details of the chosen message. `changed` is called after
// each change of the filter, and `closed` where the user closes the details.
function controls(frame, changed, closed) {
  const field = html("input", { type: "search", placeholder: TEXT.find, "aria-label": TEXT.findTip, title: TEXT.findTip });
  const groups = html("select", { "aria-label": TEXT.groupTip });
  const detail = html("p", { class: "rb-detail", role: "status" });
  const only = html("span", { class: "rb-only" });
  const close = html("button", { type: "button", "aria-label": TEXT.close, title: TEXT.close }, "×");
  close.addEventListener("click", closed);
  frame.head.append(html("span", { class: "rb-tools" }, field, groups));
  frame.fold(field);
  frame.root.insertBefore(html("div", { class: "rb-below" }, detail, only), frame.legend);
  field.addEventListener("input", changed);
  groups.addEventListener("change", changed);
  const offer = (found) => {
    const options = [USUAL, ALL, ...Object.keys(FAMILIES).filter((key) => found.includes(key))];
    if (groups.dataset.all === options.join()) return;
    const value = groups.value;
    groups.dataset.all = options.join();
    groups.replaceChildren(...options.map((key) => html("option", { value: key }, FAMILIES[key] ?? TEXT.choices[key])));
    groups.value = options.includes(value) ? value : USUAL;
  };
  const button = (term) => {
    const node = html("button", { type: "button", title: TEXT.only }, term);
    node.addEventListener("click", () => typeSearch(field, field.value === term ? "" : term));
    return node;
  };
  const showDetail = (text, terms) => {
    if (detail.textContent === text) return;
    detail.textContent = text;
    only.replaceChildren(...terms.map(button), close);
  };
  return { text: () => field.value, group: () => groups.value, offer, showDetail };
}

// Returns the filters that a message's ids suggest; each becomes a button.
const filterTerms = (row) => [
  ...(row.call ? [`call:${row.call}`] : []),
  ...row.rrefs.slice(0, 8).map((rref) => `rref:${rref}`),
  ...(row.context ? [`context:${row.context}`] : []),
];

// Returns how many rows that the filter keeps are `now` there and were not `before`, and how many have another state.
function newsOf(before, now, keep) {
  let [added, changed] = [0, 0];
  for (const [key, row] of Object.entries(now)) {
    if (before[key]?.state === row.state || !keep(row)) continue;
    if (key in before) changed += 1;
    else added += 1;
  }
  return { added, changed };
}

// Counts all messages, shown or not, by state. `began` is the zero of times: when the first one was reported, which may have been
// dropped since; else the first one here.
function totals(messages, first) {
  const rows = Object.values(messages);
  const states = {};
  for (const { state } of rows) states[state] = (states[state] ?? 0) + 1;
  const began = rows.reduce((least, row) => Math.min(least, timeOf(row)), first?.at ?? (rows.length ? Infinity : 0));
  return { all: rows.length, states, began, families: [...new Set(rows.map(({ family }) => family))].sort() };
}

// Returns the lines of the head of times. `first`: when the first message was reported, in seconds since 1970, if that is known.
const secondsAfter = (first) => (first ? [TEXT.zero, secondsTime(first)] : TEXT.zeroOfFirst);

function headline(frame, view, places, { all, states }) {
  const [underWay, lost, { stats }] = [states["under way"] ?? 0, states.lost ?? 0, TEXT];
  const skew = Math.max(0, ...Object.values(view.clocks).map((clock) => clock.error));
  const collectives = places.filter(({ row }) => row.entered).length;
  const shown = places.length - collectives;
  const last = (section) => {
    const all = view.counts?.[section]?.all;
    return all ? TEXT.last(Object.keys(view[section]).length.toLocaleString("en"), all.toLocaleString("en")) : "";
  };
  const [lastMessages, lastCollectives] = [last("messages"), last("collectives")];
  frame.showStats(
    lastMessages ? [lastMessages, stats.messages] : countStat(shown, stats.message),
    ...(collectives ? [lastCollectives ? [lastCollectives, stats.collectives] : countStat(collectives, stats.collective)] : []),
    ...(all > places.length ? [[(all - places.length).toLocaleString("en"), stats.hidden]] : []),
    [underWay, stats.underWay, underWay ? "rb-wait" : ""],
    ...(lost ? [[lost, stats.lost, "rb-warn"]] : []),
    ...(states.open ? [[states.open, stats.open, "rb-wait"]] : []),
    ...(skew ? [[`± ${formatSeconds(skew)}`, stats.skew]] : []),
    ...leftOutStats(view.workers),
  );
  const empty = Object.keys(view.workers).length ? TEXT.hint : STRINGS.workers.hint;
  frame.showHint(places.length ? null : all ? [TEXT.allHidden(all), ""] : empty);
  frame.describe(TEXT.describe(plural(shown, stats.message), underWay, lost, collectives && plural(collectives, stats.collective)));
}

export default panel("messages", "Messages", (frame) => {
  const [lifelines, rows, corner] = [svg("g"), svg("g"), svg("g")];
  frame.picture.append(lifelines, rows);
  set(frame.body, { "aria-label": TEXT.pictureTip });
  const late = html("p", { class: "rb-late", hidden: "" });
  frame.problem.before(late);
  const news = html("button", { type: "button", title: TEXT.newsTip, hidden: "" });
  frame.body.append(html("div", { class: "rb-news" }, news));
  let [view, latest, width, chosen] = [null, null, 0, null]; // `view` is drawn; it is an earlier one than `latest` while it is held
  const held = { pointer: false, keys: false };
  let [layout, inputs, summary, all, legendOf] = [{ places: [], slots: 0 }, [], null, {}, null];
  const filter = controls(frame, () => view && paint(), () => choose(null));
  let [follows, top] = [null, 0]; // whether the list stays at its end, null before the first picture; where it was at the last look
  const isHeld = () => frame.isLive && frame.state.kind !== "paused" && (held.pointer || held.keys || chosen !== null);

  // Looks where the user has scrolled to. Only a move up leaves the end: a lower frame or a longer list is none.
  function look() {
    const { scrollTop, clientHeight, scrollHeight } = frame.body;
    const atEnd = scrollTop + clientHeight >= scrollHeight - 4;
    if (atEnd || scrollTop < top) follows = atEnd;
    top = scrollTop;
  }

  function scrollToEnd() {
    frame.body.scrollTop = frame.body.scrollHeight;
    top = frame.body.scrollTop;
  }

  // Updates the layout if the messages or the filter have changed. Returns a function that scrolls to where the body should be: to
  // the end, or to where the uppermost row in sight was.
  function updateLayout(names) {
    const current = [view.messages, view.collectives, view.entries, view.workers, filter.text(), filter.group()];
    if (current.every((part, i) => part === inputs[i])) return () => follows && !isHeld() && scrollToEnd();
    all = { ...view.messages, ...collectiveRows(view) };
    summary = totals(all, view.zero?.first);
    filter.offer(summary.families);
    if (follows === null) follows = frame.isLive; // a live panel begins at the end, a record at its begin
    else look();
    const { scrollTop } = frame.body;
    const anchor = layout.places.find(({ from }) => from * STEP >= scrollTop);
    layout = layOut(all, messageFilter(filter.text(), filter.group(), names));
    inputs = current;
    const shown = layout.places.map(({ row }) => row);
    const hasLast = shown.some(({ entered, last }) => entered && last !== null);
    const drawn = [[...new Set(shown.map(({ family }) => family))].sort(), Object.keys(summary.states).sort(), hasLast];
    if (legendOf !== String(drawn)) frame.showLegend(legend(...drawn));
    legendOf = String(drawn);
    frame.tallest = 0; // a filter may leave few rows, so this picture may shrink
    if (follows) return scrollToEnd;
    const place = anchor && layout.places.find(({ key }) => key === anchor.key);
    const by = place ? (place.from - anchor.from) * STEP : 0;
    return () => by && (frame.body.scrollTop = scrollTop + by);
  }

  // Says what has come and changed since the list stands still.
  function showNews() {
    const names = (id) => latest.workers[id].name;
    const keep = messageFilter(filter.text(), filter.group(), names);
    const isOld = view !== latest;
    const { added, changed } = isOld ? newsOf(all, { ...latest.messages, ...collectiveRows(latest) }, keep) : { added: 0, changed: 0 };
    news.hidden = !added && !changed;
    setText(news, TEXT.news(added, changed));
  }

  function paint() {
    const names = (id) => view.workers[id].name;
    const at = geometry(width);
    const cols = columns(view.workers, width, at.side, at.right);
    const scroll = updateLayout(names);
    const { places, slots } = layout;
    frame.showRemarks(view.remarks);
    headline(frame, view, places, summary);
    frame.resize(cols.width, roomFor(slots, 5) * STEP + 6, cols.head);
    scroll();
    const { began } = summary;
    drawHead(frame, cols, () => "");
    const zero = places.length ? secondsAfter(view.zero?.first?.since_1970) : [];
    join(corner, zero.map((text, i) => ({ key: i, parts: [text, at.time, cols.head] })), (i) =>
      svg("g", {}, tip(TEXT.zeroTip), label(at.time, cols.head - 25 + 16 * i, zero[i], "rb-note rb-end")));
    if (corner.parentNode !== frame.top) frame.top.append(corner);
    const top = Math.floor(frame.body.scrollTop / STEP) - MARGIN;
    const bottom = top + Math.ceil(frame.body.clientHeight / STEP) + 2 * MARGIN;
    const visible = places.filter(({ from, to }) => from <= bottom && to >= top);
    const tall = places.length ? roomFor(slots, 5) * STEP : 0; // no lifelines behind a hint
    join(
      lifelines,
      cols.list.map((worker) => ({ key: worker.id, parts: [cols.key, tall], worker })),
      (id, { worker }) => svg("line", { class: `rb-life rb-is-${worker.state}`, x1: cols.x(id), x2: cols.x(id), y1: 0, y2: tall }),
    );
    const items = visible.map((place) => ({ key: place.key, parts: [cols.key, place.row, place.from, place.to, began, place.key === chosen], place }));
    join(rows, items, (key, { place }) => messageRow(place, cols, began, names, key === chosen, at));
    const row = chosen !== null ? all[chosen] : null;
    filter.showDetail(row ? sentence(row, began, names) : "", row ? filterTerms(row) : []);
    const words = view.stragglers?.collectives?.words ?? "";
    late.hidden = !words;
    setText(late, words);
    set(late, { title: words });
    showNews();
  }

  // Draws the latest view, or the one that is held.
  function show() {
    if (!latest) return;
    if (!view || !isHeld()) view = latest;
    paint();
  }

  function hold(reason, isOn) {
    if (held[reason] === isOn) return;
    held[reason] = isOn;
    if (!isOn) show();
  }

  function choose(key) {
    chosen = key;
    show();
  }

  // Shows what has come; the list stands still again if the pointer or the focus stay.
  function goOn() {
    chosen = null;
    view = latest;
    scrollToEnd();
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
    look();
    choose(next.key);
  }

  let pending = 0;
  frame.body.addEventListener("scroll", () => {
    look();
    pending ||= requestAnimationFrame(() => {
      pending = 0;
      if (view) paint();
    });
  });
  frame.body.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && chosen !== null) {
      event.stopPropagation();
      held.keys = false;
      choose(null);
    }
    if (!view || !by) return;
    event.preventDefault();
    held.keys = true;
    stepBy(by);
  });
  rows.addEventListener("click", (event) => {
    const key = event.target.closest("[data-message]").dataset.message;
    choose(key === chosen ? null : key);
  });
  news.addEventListener("click", goOn);
  frame.body.addEventListener("pointerenter", () => hold("pointer", true));
  frame.body.addEventListener("pointerleave", () => hold("pointer", false));
  frame.body.addEventListener("focusin", () => hold("keys", frame.body.matches(":focus-visible")));
  frame.body.addEventListener("focusout", () => hold("keys", false));

  return (nextView, nextWidth) => {
    [latest, width] = [nextView, nextWidth];
    show();
  };
});
