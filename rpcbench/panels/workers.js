// The workers panel: a table with a row for each worker. A second row, which the user can open, has all figures of the first one,
// the bytes for each peer, the stacks of its threads if they were asked for, and the end of the log.
// Guarantees
// - Rows are updated in place, so the focus and a button that waits for confirmation stay. There are buttons only if the panel
//   can act, which the trait `acts` of the model says. Where they have no room one button offers them in a menu.
// - The columns are those of `telemetry/worker_columns.py`. A column that is optional exists while a worker has its figure.
// - Columns that do not fit are folded, a name at a time, and a line below the table names them. What they show is in the open row.
// - The curves of the last minute are made of the rows that come anyway, so they begin when the panel is opened. That of a rate
//   is in the panel of resources only.

const TEXT = STRINGS.workers;
const COLUMNS = LISTS.workers;
const CURVES = COLUMNS.filter(({ curve, is_rate: isRate }) => curve && !isRate);
// Parts of cells that fold like columns, with their places in that order. `of`: memory of the machine or GPU; `buttons`: they stand
// in a menu; `note`: the process; `line`: names and activities are cut.
const PARTS = { of: 30, buttons: 35, note: 70, curves: 80, line: 90 };
const FOLDS = [...COLUMNS.map(({ key, fold }) => [key, fold]), ...Object.entries(PARTS)]
  .filter(([, fold]) => fold)
  .sort(([, a], [, b]) => a - b)
  .map(([key]) => key);
const MAX_SQUARES = 6;
const CONFIRM_MS = 5000; // how long a button waits for the second press
const RETRY_MS = 5000; // how long a column that is folded stays so at least
const DENSE = 12; // with more workers than this the rows are closer together
const MINUTE = 60_000; // milliseconds that a curve shows
const [WIDE, HIGH] = [64, 20]; // of a curve, in pixels

const FORMATS = { share: (share) => `${Math.round(100 * share)} %`, bytes: formatBytes, count: String, text: String };

// Returns an amount of bytes as text and, in the same unit if it fits, the whole of which it is a part: ["1.2", "of 25 GB"].
function partTexts(part, whole) {
  const own = formatBytes(part);
  if (part === null || !whole) return [own, ""];
  const [, unit] = formatBytes(whole).split(" ");
  const all = `of ${formatBytes(whole).replace(/\.\d+/, "")}`;
  return [own.endsWith(` ${unit}`) ? own.slice(0, -unit.length - 1) : own, all];
}

// ---- the last minute

// The figures of each process in the last minute, taken from the rows of the view. A process that is started again begins anew.
class History {
  constructor() {
    this.byWorker = new Map(); // id: { life, row, samples: [{ at, and each figure with a curve }] }
  }

  add(workers, now) {
    for (const id of this.byWorker.keys()) if (!(id in workers)) this.byWorker.delete(id);
    for (const [id, row] of Object.entries(workers)) {
      const figures = Object.fromEntries(CURVES.map(({ key }) => [key, row[key] ?? null]));
      if (Object.values(figures).every((value) => value === null)) continue;
      const life = `${row.incarnation} ${row.pid}`;
      if (this.byWorker.get(id)?.life !== life) this.byWorker.set(id, { life, row: null, samples: [] });
      const one = this.byWorker.get(id);
      if (one.row !== row) one.samples.push({ at: now, ...figures });
      one.row = row;
      while (one.samples.length > 1 && one.samples[1].at <= now - MINUTE) one.samples.shift(); // one before the minute stays
    }
  }

  of(id, name) {
    const samples = this.byWorker.get(id)?.samples ?? [];
    return samples.filter((sample) => sample[name] !== null).map((sample) => [sample.at, sample[name]]);
  }

  // The value at the upper edge of all curves of a figure; 0 if none has come.
  top(name) {
    const most = Math.max(0, ...[...this.byWorker.keys()].flatMap((id) => this.of(id, name).map(([, value]) => value)));
    return most && roundUp(most);
  }
}

const curveY = (value, top) => (1 + (HIGH - 2) * (1 - Math.min(1, value / (top || 1)))).toFixed(1);

// Returns the path of a curve, or "": each value holds until the next one, the last until `now`. `top` is the value at the upper
// edge.
function curvePath(samples, now, top) {
  if (!samples.length) return "";
  const x = (at) => Math.max(0, WIDE * (1 - (now - at) / MINUTE)).toFixed(1);
  const y = (value) => curveY(value, top);
  const [[at, first], ...rest] = samples;
  return `M${x(at)} ${y(first)}${rest.map(([at, value]) => `H${x(at)}V${y(value)}`).join("")}H${WIDE}`;
}

const curveStyle = ({ curve }) => ({ class: "rb-curves", style: `--rb-curve: var(--rb-${curve})` });

// Cells have `words`, their content for the open row, or "" if it is unknown.

// A table cell with a figure as text, and its curve if the column has one, which screen readers skip.
class Figure {
  constructor(column) {
    this.column = column;
    this.words = "";
    this.text = html("span", { class: column.curve ? "rb-value" : "" });
    this.more = html("span", { class: "rb-of" });
    this.cell = html("td", { class: `rb-figure rb-is-${column.kind} rb-${column.key}` }, this.text, this.more);
    if (column.curve) this.cell.prepend(this.makeCurve());
  }

  makeCurve() {
    [this.level, this.area, this.line] = ["level", "area", "line"].map((name) => svg("path", { class: `rb-${name}` }));
    const size = { width: WIDE, height: HIGH, "aria-hidden": "true" };
    return svg("svg", { ...curveStyle(this.column), ...size }, this.level, this.area, this.line);
  }

  show(worker, { history, now, tops, onOneHost }) {
    const { key, kind, whole, is_of_host: isOfHost, is_optional: isOptional } = this.column;
    const [value, format] = [worker[key] ?? null, FORMATS[kind]];
    const texts = value === null ? [isOptional ? "" : "–", ""] : whole ? partTexts(value, worker[`${key}_whole`]) : [format(value), ""];
    const [text, more] = isOfHost && onOneHost && value !== null ? [format(value), ""] : texts; // the whole stands above the table
    this.words = value === null ? "" : texts.join(" ").trim();
    setText(this.text, text);
    setText(this.more, more && ` ${more}`);
    if (this.line) this.showCurve(history.of(String(worker.id), key), now, tops[key], format);
  }

  showCurve(samples, now, top, format) {
    const path = curvePath(samples, now, top);
    set(this.line, { d: path || null });
    set(this.level, { d: path && this.column.level !== null ? `M0 ${curveY(this.column.level, top)}H${WIDE}` : null });
    set(this.area, { d: path ? `${path}V${HIGH}H${path.slice(1, path.indexOf(" "))}Z` : null });
    const most = Math.max(...samples.map(([, value]) => value));
    set(this.cell, { title: samples.length ? `${this.words}; ${TEXT.minute(format(most))}` : null });
  }
}

// A table cell with a worker's threads as squares: full squares run, hollow squares wait. Screen readers read a text instead.
class Threads {
  constructor() {
    this.words = "";
    this.squares = html("span", { class: "rb-squares", "aria-hidden": "true" });
    this.text = html("span", { class: "rb-hidden" });
    this.cell = html("td", { class: "rb-threads" }, this.squares, this.text);
  }

  show({ busy, waiting }) {
    const marks = [...Array(busy ?? 0).fill("rb-full"), ...Array(waiting ?? 0).fill("rb-hollow")];
    const items = marks.slice(0, MAX_SQUARES).map((kind, key) => ({ key, parts: [kind], kind }));
    const more = marks.length - items.length;
    if (more > 0) items.push({ key: "more", parts: [more], kind: "rb-more", text: `+${more}` });
    join(this.squares, items, (_, { kind, text = "" }) => html("i", { class: kind }, text));
    this.words = busy === null ? "" : TEXT.threads(busy, waiting);
    setText(this.text, this.words || TEXT.unknown);
    set(this.cell, { title: this.text.textContent });
  }
}

// A table cell with the bytes sent and received.
class Traffic {
  constructor() {
    this.words = "";
    this.cell = html("td", { class: "rb-bytes" });
  }

  show({ busy, sent, received }) {
    this.words = busy === null ? "" : TEXT.bytes(formatBytes(sent), formatBytes(received));
    setText(this.cell, this.words || "–");
    set(this.cell, { title: TEXT.bytesTip(sent, received) });
  }
}

const CELLS = { threads: Threads, traffic: Traffic, share: Figure, bytes: Figure, count: Figure, text: Figure }; // by kind of column

// The marks of the legend: a curve, and a thread.
const sample = (column) => {
  const shapes = Object.entries({ level: column.level === null ? "" : "M-8 -7H8", area: "M-8 7V2H0V-4H8V7Z", line: "M-8 2H0V-4H8" });
  return svg("g", curveStyle(column), ...shapes.map(([kind, d]) => svg("path", { class: `rb-${kind}`, d })));
};
const square = (kind) => svg("rect", { class: `rb-square rb-${kind}`, x: -4, y: -4, width: 9, height: 9, rx: 2 });

// Makes a button of the name of its texts. With a `warning`, its action cannot be undone, and the button asks for a second press.
// `whose` names the worker to screen readers.
function button(kind, warning, act, whose = "") {
  const [text, help] = TEXT.buttons[kind];
  const name = `${text} ${whose}`.trim();
  const node = html("button", { type: "button", class: "rb-kernel", title: help, "aria-label": name }, text);
  let timer = 0;
  const reset = () => {
    clearTimeout(timer);
    set(node, { "data-sure": null, title: help, "aria-label": name });
    setText(node, text);
  };
  node.addEventListener("click", () => {
    if (node.getAttribute("aria-disabled") === "true") return;
    if (!warning || node.dataset.sure) {
      reset();
      act();
      return;
    }
    set(node, { "data-sure": "asked", title: warning, "aria-label": TEXT.again(name, warning) });
    setText(node, TEXT.sure);
    timer = setTimeout(reset, CONFIRM_MS);
  });
  node.addEventListener("blur", reset);
  return node;
}

// ---- rows

// Returns the text of a worker's activity and its CSS class; `action` is the running action on the worker, if any.
function activity({ now, state, doing, under_way: calls }, action) {
  if (action) return [TEXT.acting[action.action], "rb-wait"];
  if (state === "lost") return [now, "rb-bad"];
  if (!["up", "left"].includes(state) || doing === "silent") return [now, "rb-wait"];
  return [now, state === "up" && doing === "idle" && !calls ? "rb-idle" : ""];
}

// What the row of a worker has as attributes, beside its figures.
const DATA = ["incarnation", "pid", "state", "doing", "busy", "waiting", "cells", "calls", "sent", "received"];

// The two rows of one worker: `node`, and `more` below it, which the button `opener` opens.
class Row {
  constructor(worker, act, root) {
    this.opener = html("button", { type: "button", class: "rb-opener", "aria-expanded": "false" });
    this.note = html("span", { class: "rb-note" });
    const head = html("th", { scope: "row", class: "rb-name" }, this.opener, this.note);
    [this.now, this.log, this.buttons] = ["now", "log", "acts"].map((kind) => html("td", { class: `rb-${kind}` }));
    this.words = html("span", { class: "rb-words" });
    this.now.append(this.words);
    this.shown = COLUMNS.filter(({ kind }) => kind in CELLS).map((column) => [column, new CELLS[column.kind](column)]);
    this.cells = { name: head, now: this.now, log: this.log, acts: this.buttons };
    for (const [{ key }, { cell }] of this.shown) this.cells[key] = cell;
    if (act && worker.id !== 0) {
      const starts = (action) => () => act(action, this.name);
      const asks = () => (this.toggle(true), act("stacks", this.name));
      this.off = {}; // by kind of button: whether it can do nothing at present
      this.kinds = [];
      const make = () => {
        const made = {
          stack: button("stack", "", asks, worker.name),
          interrupt: button("interrupt", "", starts("interrupt"), worker.name),
          restart: button("restart", TEXT.loss, starts("restart"), worker.name),
        };
        this.kinds.push(...Object.entries(made));
        this.enable({});
        return Object.values(made);
      };
      this.menu = new Menu(root, TEXT.menu(worker.name), make, true);
      this.menu.opener.classList.add("rb-kernel");
      this.buttons.append(html("span", { class: "rb-buttons" }, ...make()), this.menu.opener);
    }
    this.node = html("tr");
    this.figures = html("div", { class: "rb-figures" }); // no list: Jupyter has styles of its own for those
    this.peers = html("ul", { class: "rb-peers" });
    this.stacks = html("pre", { class: "rb-stacks", tabindex: "0", "aria-label": TEXT.stacks, hidden: "" });
    this.tail = html("pre", { class: "rb-tail", tabindex: "0", "aria-label": TEXT.log });
    const inside = html("td", { colspan: COLUMNS.length }, this.figures, this.peers, this.stacks, this.tail);
    this.more = html("tr", { class: "rb-more-of", hidden: "" }, inside);
    this.opener.addEventListener("click", () => this.toggle(this.more.hidden));
  }

  // Disables buttons of these kinds, or enables them: those in the row, and those in its menu.
  enable(off) {
    Object.assign(this.off, off);
    for (const [kind, node] of this.kinds) set(node, { "aria-disabled": this.off[kind] ? "true" : null });
  }

  remove() {
    this.menu?.remove();
    this.node.remove();
    this.more.remove();
  }

  toggle(isOpen) {
    this.more.hidden = !isOpen;
    set(this.opener, { "aria-expanded": isOpen });
  }

  show(worker, { action, stacks, columns, ...details }) {
    this.name = worker.name;
    setChildren(this.node, columns.map(({ key }) => this.cells[key]));
    const data = [...DATA, ...this.shown.map(([{ key }]) => key)].filter((key) => key in worker);
    set(this.node, { "data-worker": worker.id, ...Object.fromEntries(data.map((key) => [`data-${key}`, worker[key] ?? ""])) });
    setText(this.opener, worker.name);
    const process = TEXT.process(worker.pid, worker.incarnation).filter(Boolean).join(" · ");
    setText(this.note, process);
    const [text, kind] = activity(worker, action);
    setText(this.words, text);
    set(this.now, { class: `rb-now ${kind}`, title: text });
    for (const [, cell] of this.shown) cell.show(worker, details);
    setText(this.log, details.log.slice(details.log.lastIndexOf("\n") + 1));
    this.showMore(worker, process, stacks, details);
    const isIdle = worker.state !== "up" && worker.state !== "stopped";
    if (this.menu) this.enable({ interrupt: action || isIdle, restart: action });
  }

  // Fills the row below: what folded columns show stands there too. Stacks stay until others are asked for.
  showMore(worker, process, stacks, { log, links, name }) {
    const figures = this.shown.map(([{ key, head, detail }, { words }]) => [key, detail || head, words]);
    const known = [["now", "", this.words.textContent], ["process", "", process], ...figures].filter(([, , words]) => words);
    const items = known.map(([key, head, words]) => ({ key, parts: [words], head, words }));
    join(this.figures, items, (_, { head, words }) => html("span", {}, html("span", { class: "rb-dim" }, head), ` ${words}`));
    const traffic = links.map((link) => TEXT.link(name(link.peer), formatBytes(link.sent), formatBytes(link.received)));
    join(this.peers, traffic.map((text) => ({ key: text, parts: [], text })), (_, { text }) => html("li", {}, text));
    setText(this.tail, log || TEXT.noLog);
    if (stacks?.text) setText(this.stacks, stacks.text);
    this.stacks.hidden = !this.stacks.textContent;
    const mayAsk = stacks?.state !== "runs" && ["up", "suspect", "stopped"].includes(worker.state);
    if (this.menu) this.enable({ stack: !mayAsk });
  }
}

// Returns the workers that have reported, if all are on one host; else none.
function onOneHost(workers) {
  const here = Object.values(workers).filter((worker) => worker.host);
  return new Set(here.map((worker) => worker.host)).size === 1 ? here : [];
}

const ENDING = ["restart", "stop"]; // actions during which a worker is not ready

// Returns the action that runs on a worker.
function actionOn({ id, name }, actions) {
  const concerns = ({ target }) => target === name || (target === "all" && String(id) !== "0");
  return Object.values(actions).find((one) => one.state === "runs" && one.action in TEXT.acting && concerns(one));
}

// Shows the figures above the table. Returns the number of workers, whether they are being scaled, and a summary as text.
function headline(frame, workers, actions) {
  const list = Object.values(workers).filter((worker) => worker.id !== 0);
  const count = (name) => list.filter((worker) => worker.state === name).length;
  const total = (name, all = list) => all.reduce((sum, worker) => sum + (worker[name] ?? 0), 0);
  const [lost, suspended] = [count("lost"), count("stopped")];
  const ready = list.filter((worker) => worker.state === "up" && !ENDING.includes(actionOn(worker, actions)?.action)).length;
  const more = [];
  if (lost) more.push([lost, TEXT.stats.lost, "rb-warn"]);
  if (suspended) more.push([suspended, TEXT.stats.suspended, "rb-warn"]);
  const work = [countStat(total("cells"), TEXT.stats.cell), [total("queued"), TEXT.stats.queued, total("queued") ? "rb-wait" : ""]];
  const here = onOneHost(workers);
  const shared = here.length ? COLUMNS.filter((column) => column.is_of_host) : [];
  const sums = shared.map(({ key, head }) => [partTexts(total(key, here), here[0][`${key}_whole`]).join(" "), head]);
  frame.showStats([ready, TEXT.stats.ready], ...more, ...work, ...sums, ...leftOutStats(workers));
  const scaling = Object.values(actions).some(({ action, state }) => action === "scale" && state === "runs");
  const present = list.filter((worker) => worker.state !== "left").length;
  return { count: present, scaling, text: TEXT.summary(ready, list.length) };
}

// Folds columns until the table fits. Those that are folded come back in another width, with other workers, and, if there is
// room, a while later: a figure of a moment, as the CPU of a worker that starts, may have been the wide one.
class Folds {
  constructor(table, note) {
    [this.table, this.note, this.count, this.key, this.names, this.triedAt] = [table, note, 0, "", FOLDS, 0];
  }

  // `columns` are those that are there; those that are folded come back when `key` changes.
  fit(room, columns, key) {
    const isLater = this.count > 0 && Date.now() - this.triedAt > RETRY_MS;
    if (key !== this.key || isLater) this.fold(0), (this.triedAt = Date.now());
    this.key = key;
    const heads = new Map(columns.map((column) => [column.key, column.head]));
    this.names = FOLDS.filter((name) => heads.has(name) || name in PARTS);
    while (this.count < this.names.length && this.table.offsetWidth > room) this.fold(this.count + 1);
    const names = this.names.slice(0, this.count).filter((name) => heads.has(name)).map((name) => heads.get(name));
    const last = names.pop();
    setText(this.note, last ? TEXT.folded(names.length ? `${names.join(", ")} ${TEXT.and} ${last}` : last) : "");
  }

  isFolded(name) {
    return this.names.slice(0, this.count).includes(name);
  }

  fold(count) {
    this.count = count;
    FOLDS.forEach((name) => this.table.classList.toggle(`rb-no-${name}`, this.isFolded(name)));
  }
}

// Returns the values at the upper edges of the curves, by column. GPUs have their memory as the scale, CPU at least one core.
function topsOf(history, workers) {
  const wholes = (key) => Object.values(workers).map((worker) => worker[`${key}_whole`] ?? 0);
  const top = ({ key, kind, whole, is_of_host: isOfHost }) =>
    whole && !isOfHost ? Math.max(0, ...wholes(key)) : Math.max(kind === "share" ? 1 : 0, history.top(key));
  return Object.fromEntries(CURVES.map((column) => [column.key, top(column)]));
}

// Returns the legend of the columns that are shown, with the scale of the curves, which all rows share: [mark, text] each.
function legendOf(columns, folds, tops, isKnown) {
  const curved = folds.isFolded("curves") || !isKnown ? [] : columns.filter((column) => CURVES.includes(column));
  const text = ({ key, kind, head, remark }) => TEXT.legend.curve(head, FORMATS[kind](tops[key]), remark);
  const squares = folds.isFolded("threads") ? [] : ["full", "hollow"].map((kind) => [square(kind), TEXT.legend[kind]]);
  return [...curved.map((column) => [sample(column), text(column)]), ...squares];
}

export default panel("workers", "Workers", (frame, model) => {
  const act = model.get("acts") ? (action, target) => model.send({ kind: "act", action, target }) : null;
  const rows = new Map();
  const history = new History();
  let [size, now, legend] = [0, 0, ""];
  const caption = html("caption", { class: "rb-hidden" }, "Workers");
  const status = html("p", { class: "rb-hidden", role: "status" });
  const heads = COLUMNS.map(({ key, kind, head, help }) => {
    const text = kind === "buttons" ? html("span", { class: "rb-hidden" }, head) : head;
    return html("th", { scope: "col", class: `rb-${key}`, title: help }, text);
  });
  const top = html("tr");
  const list = html("tbody");
  const table = html("table", {}, caption, html("thead", {}, top), list);
  const failures = html("ul", { class: "rb-failures", role: "alert" });
  const folded = html("p", { class: "rb-folded" });
  const folds = new Folds(table, folded);
  const scale = (step) => () => size + step > 0 && act("scale", String(size + step));
  const fewer = button("fewer", TEXT.loss, scale(-1));
  const more = button("more", "", scale(1));
  frame.text = status; // screen readers announce it, as this panel has no picture with a description
  frame.body.before(status);
  frame.top.remove();
  frame.picture.replaceWith(table);
  frame.body.after(folded);
  frame.head.after(failures);
  frame.fold(folded);
  const scales = html("span", { class: "rb-scale" }, fewer, more);
  if (act) frame.head.append(scales), frame.fold(scales);

  return ({ workers, links, logs, actions }) => {
    if (frame.state.kind === "live" || !now) now = Date.now(); // else the curves would move on without figures
    history.add(workers, now);
    const summary = headline(frame, workers, actions);
    size = summary.count;
    for (const node of [fewer, more]) set(node, { "aria-disabled": summary.scaling ? "true" : null });
    frame.describe(`Workers: ${summary.text}.`);
    frame.showHint(Object.keys(workers).length ? null : TEXT.hint);
    table.hidden = !Object.keys(workers).length;
    table.classList.toggle("rb-dense", Object.keys(workers).length > DENSE);

    const ids = Object.keys(workers).sort(natural);
    const columns = COLUMNS.filter(({ key, is_optional: isOptional }) => !isOptional || ids.some((id) => (workers[id][key] ?? null) !== null));
    setChildren(top, heads.filter((_, i) => columns.includes(COLUMNS[i])));
    const tops = topsOf(history, workers);
    const isOneHost = onOneHost(workers).length > 0;
    const name = (id) => workers[id]?.name ?? `id ${id}`;
    const byWorker = new Map(ids.map((id) => [Number(id), []]));
    for (const link of Object.values(links)) byWorker.get(link.worker)?.push(link);
    for (const [id, row] of rows) {
      if (id in workers) continue;
      row.remove();
      rows.delete(id);
    }
    let last = null;
    for (const id of ids) {
      if (!rows.has(id)) rows.set(id, new Row(workers[id], act, frame.root));
      const row = rows.get(id);
      const place = last ? last.nextSibling : list.firstChild;
      if (place !== row.node) list.insertBefore(row.node, place), list.insertBefore(row.more, row.node.nextSibling);
      last = row.more;
      const running = actionOn(workers[id], actions);
      const stacks = actions[`stacks ${workers[id].name}`];
      const details = { log: logs[id]?.text ?? "", links: byWorker.get(Number(id)), name };
      row.show(workers[id], { action: running, stacks, columns, history, now, tops, onOneHost: isOneHost, ...details });
    }
    folds.fit(frame.body.clientWidth, columns, `${frame.body.clientWidth} ${ids.map(name)} ${columns.map(({ key }) => key)}`);
    for (const { menu } of rows.values()) menu?.place();
    const marks = table.hidden ? [] : legendOf(columns, folds, tops, history.byWorker.size > 0);
    const words = marks.map(([, text]) => text).join();
    if (words !== legend) frame.showLegend(marks);
    legend = words;
    const hasOutcome = ({ state, action }) => state === "failed" || (state === "done" && action === "interrupt");
    const ended = Object.entries(actions).filter(([, one]) => hasOutcome(one));
    const outcomes = ended.map(([key, one]) => {
      const [at, text] = [one.ended ? `${secondsTime(one.ended)} ` : "", one.error ? `${key}: ${one.error}` : one.text];
      return { key, parts: [one], isGood: !one.error, text: at + text };
    });
    join(failures, outcomes, (_, { text, isGood }) => html("li", { class: isGood ? "rb-said" : null }, text));
  };
});
