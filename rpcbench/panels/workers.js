// The workers panel: a table with a row for each worker. A second row, which the user can open, has all figures of the first one,
// the bytes for each peer, the stacks of its threads if they were asked for, and the end of the log.
// Guarantees
// - Rows are updated in place, so the focus and a button that waits for confirmation stay. There are buttons only if the panel
//   can act, which the trait `acts` of the model says.
// - Columns that do not fit are folded, a name at a time, and a line below the table names them. What they show is in the open row.
// - Columns for GPUs exist while a worker has one of its own.
// - The curves of the last minute are made of the rows that come anyway, so they begin when the panel is opened.

const TEXT = STRINGS.workers;
const GPU = ["gpu", "gpuMemory", "gpuUse"];
const COLUMNS = ["name", "now", "cpu", "memory", ...GPU, "threads", "queue", "bytes", "log", "acts"];
// In this order. `of`: memory of the machine or GPU; `note`: the process; `line`: each row has one line.
const FOLDS = ["log", "bytes", "of", "queue", "threads", "gpu", "note", "curves", "line"];
const MAX_SQUARES = 6;
const CONFIRM_MS = 5000; // how long a button waits for the second press
const DENSE = 12; // with more workers than this the rows are closer together
const MINUTE = 60_000; // milliseconds that a curve shows
const [WIDE, HIGH] = [64, 20]; // of a curve, in pixels

const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);

// Returns the memory of a process as text and, in the same unit if it fits, that of its machine or GPU: ["1.2", "of 25 GB"].
function memoryTexts(memory, ram) {
  const own = formatBytes(memory);
  if (memory === null || !ram) return [own, ""];
  const [, unit] = formatBytes(ram).split(" ");
  const all = `of ${formatBytes(ram).replace(/\.\d+/, "")}`;
  return [own.endsWith(` ${unit}`) ? own.slice(0, -unit.length - 1) : own, all];
}

// ---- the last minute

// Returns the figures that have curves; null for unknown ones. Recordings of earlier versions have none of GPUs.
const figuresOf = ({ cpu, memory, gpu_memory = null, gpu_use = null }) =>
  ({ cpu, memory, gpuMemory: gpu_memory, gpuUse: gpu_use });

// The figures of each process in the last minute, taken from the rows of the view. A process that is started again begins anew.
class History {
  constructor() {
    this.byWorker = new Map(); // id: { life, row, samples: [{ at, cpu, memory, gpuMemory, gpuUse }] }
  }

  add(workers, now) {
    for (const id of this.byWorker.keys()) if (!(id in workers)) this.byWorker.delete(id);
    for (const [id, row] of Object.entries(workers)) {
      if (row.cpu === null) continue;
      const life = `${row.incarnation} ${row.pid}`;
      if (this.byWorker.get(id)?.life !== life) this.byWorker.set(id, { life, row: null, samples: [] });
      const one = this.byWorker.get(id);
      if (one.row !== row) one.samples.push({ at: now, ...figuresOf(row) });
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

// A table cell with a curve, which screen readers skip, and a figure as text. `mark` is a value that a faint line shows, if any.
class Figure {
  constructor(name, mark = null) {
    this.mark = mark;
    this.line = svg("path", { class: "rb-line" });
    this.area = svg("path", { class: "rb-area" });
    this.level = svg("path", { class: "rb-level" });
    const size = { width: WIDE, height: HIGH, "aria-hidden": "true" };
    const curve = svg("svg", { class: "rb-curves", ...size }, this.level, this.area, this.line);
    this.text = html("span", { class: "rb-value" });
    this.more = html("span", { class: "rb-of" });
    this.cell = html("td", { class: `rb-figure rb-${name}` }, curve, this.text, this.more);
  }

  show(samples, now, top, format, text, more = "", tip = `${text} ${more}`) {
    const path = curvePath(samples, now, top);
    set(this.line, { d: path || null });
    set(this.level, { d: path && this.mark !== null ? `M0 ${curveY(this.mark, top)}H${WIDE}` : null });
    set(this.area, { d: path ? `${path}V${HIGH}H${path.slice(1, path.indexOf(" "))}Z` : null });
    setText(this.text, text);
    setText(this.more, more && ` ${more}`);
    const most = Math.max(...samples.map(([, value]) => value));
    set(this.cell, { title: samples.length ? `${tip}; ${TEXT.minute(format(most))}` : null });
  }
}

// A table cell with a worker's threads as squares: full squares run, hollow squares wait. Screen readers read a text instead.
class Threads {
  constructor() {
    this.squares = html("span", { class: "rb-squares", "aria-hidden": "true" });
    this.text = html("span", { class: "rb-hidden" });
    this.cell = html("td", { class: "rb-threads" }, this.squares, this.text);
  }

  show(busy, waiting) {
    const marks = [...Array(busy ?? 0).fill("rb-full"), ...Array(waiting ?? 0).fill("rb-hollow")];
    const items = marks.slice(0, MAX_SQUARES).map((kind, key) => ({ key, parts: [kind], kind }));
    const more = marks.length - items.length;
    if (more > 0) items.push({ key: "more", parts: [more], kind: "rb-more", text: `+${more}` });
    join(this.squares, items, (_, { kind, text = "" }) => html("i", { class: kind }, text));
    setText(this.text, busy === null ? TEXT.unknown : TEXT.threads(busy, waiting));
    set(this.cell, { title: this.text.textContent });
  }
}

// The marks of the legend: a curve, and a thread.
const sample = (name) => {
  const shapes = Object.entries({ level: name === "cpu" ? "M-8 -7H8" : "", area: "M-8 7V2H0V-4H8V7Z", line: "M-8 2H0V-4H8" });
  return svg("g", { class: `rb-curves rb-${name}` }, ...shapes.map(([kind, d]) => svg("path", { class: `rb-${kind}`, d })));
};
const square = (kind) => svg("rect", { class: `rb-square rb-${kind}`, x: -4, y: -4, width: 9, height: 9, rx: 2 });

// Makes a button of the name of its texts. With a `warning`, its action cannot be undone, and the button asks for a second press.
// `whose` names the worker to screen readers.
function button(kind, warning, act, whose = "") {
  const [text, help] = TEXT.buttons[kind];
  const name = `${text} ${whose}`.trim();
  const node = html("button", { type: "button", title: help, "aria-label": name }, text);
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
function activity(worker, action) {
  if (action) return [TEXT.acting[action.action], "rb-wait"];
  const { state, doing, awaits, cells, silent, under_way: calls = 0 } = worker;
  if (state === "lost") return [worker.ended ? TEXT.lost(worker.ended) : TEXT.doing.lost, "rb-bad"];
  if (state === "starts") return [TEXT.doing.starts, "rb-wait"];
  if (state !== "up") return [STRINGS.common.members[state] ?? state, state === "left" ? "" : "rb-wait"];
  if (doing === "silent") return [TEXT.silent(silent), "rb-wait"];
  if (doing === "waits") return [awaits ? TEXT.waits(awaits) : TEXT.doing.waits, ""];
  if (doing === "idle" && calls) return [TEXT.underWay(calls), ""];
  const text = doing === "cell" && cells > 1 ? TEXT.cells(cells - 1) : TEXT.doing[doing || "none"];
  return [awaits && doing !== "idle" ? TEXT.alsoWaits(text, awaits) : text, doing === "idle" ? "rb-idle" : ""];
}

// The two rows of one worker: `node`, and `more` below it, which the button `opener` opens.
class Row {
  constructor(worker, act) {
    const cell = (kind) => html("td", { class: `rb-${kind}` });
    this.opener = html("button", { type: "button", class: "rb-opener", "aria-expanded": "false" });
    this.note = html("span", { class: "rb-note" });
    const head = html("th", { scope: "row", class: "rb-name" }, this.opener, this.note);
    [this.cpu, this.memory, this.threads] = [new Figure("cpu", 1), new Figure("memory"), new Threads()];
    [this.gpu, this.gpuMemory, this.gpuUse] = [cell("gpu"), new Figure("gpuMemory"), new Figure("gpuUse")];
    this.gpuCells = [this.gpu, this.gpuMemory.cell, this.gpuUse.cell]; // in the row while `showGpus(true)`
    [this.now, this.queue, this.bytes, this.log, this.buttons] = ["now", "queue", "bytes", "log", "acts"].map(cell);
    if (act && worker.id !== 0) {
      const starts = (action) => () => act(action, this.name);
      const asks = () => (this.toggle(true), act("stacks", this.name));
      this.stack = button("stack", "", asks, worker.name);
      this.interrupt = button("interrupt", "", starts("interrupt"), worker.name);
      this.restart = button("restart", TEXT.loss, starts("restart"), worker.name);
      this.buttons.append(this.stack, this.interrupt, this.restart);
    }
    const cells = [this.now, this.cpu.cell, this.memory.cell, this.threads.cell, this.queue, this.bytes, this.log];
    this.node = html("tr", {}, head, ...cells, this.buttons);
    this.figures = html("div", { class: "rb-figures" }); // no list: Jupyter has styles of its own for those
    this.peers = html("ul", { class: "rb-peers" });
    this.stacks = html("pre", { class: "rb-stacks", tabindex: "0", "aria-label": TEXT.stacks, hidden: "" });
    this.tail = html("pre", { class: "rb-tail", tabindex: "0", "aria-label": TEXT.log });
    const inside = html("td", { colspan: COLUMNS.length }, this.figures, this.peers, this.stacks, this.tail);
    this.more = html("tr", { class: "rb-more-of", hidden: "" }, inside);
    this.opener.addEventListener("click", () => this.toggle(this.more.hidden));
  }

  showGpus(areThere) {
    if (areThere === Boolean(this.gpu.parentNode)) return;
    if (areThere) this.memory.cell.after(...this.gpuCells);
    else this.gpuCells.forEach((cell) => cell.remove());
  }

  toggle(isOpen) {
    this.more.hidden = !isOpen;
    set(this.opener, { "aria-expanded": isOpen });
  }

  show(worker, { action, stacks, history, now, tops, onOneHost, ...details }) {
    this.name = worker.name;
    const numbers = ["incarnation", "pid", "cpu", "memory", "busy", "waiting", "queued", "cells", "calls"];
    const data = [...numbers, "state", "doing", "sent", "received"].map((part) => [`data-${part}`, worker[part] ?? ""]);
    set(this.node, { "data-worker": worker.id, ...Object.fromEntries(data) });
    setText(this.opener, worker.name);
    const process = TEXT.process(worker.pid, worker.incarnation).filter(Boolean).join(" · ");
    setText(this.note, process);
    const [text, kind] = activity(worker, action);
    setText(this.now, text);
    set(this.now, { class: `rb-now ${kind}`, title: text });
    const id = String(worker.id);
    this.cpu.show(history.of(id, "cpu"), now, tops.cpu, percent, percent(worker.cpu));
    const memory = memoryTexts(worker.memory, worker.ram);
    const shown = onOneHost ? [formatBytes(worker.memory), ""] : memory; // the machine's memory stands above the table
    this.memory.show(history.of(id, "memory"), now, tops.memory, formatBytes, ...shown, memory.join(" "));
    const onGpu = this.showGpu(worker, history, now, tops);
    this.threads.show(worker.busy, worker.waiting);
    setText(this.queue, worker.queued === null ? "–" : String(worker.queued));
    const both = [formatBytes(worker.sent), formatBytes(worker.received)];
    setText(this.bytes, worker.busy === null ? "–" : TEXT.bytes(...both));
    set(this.bytes, { title: TEXT.bytesTip(worker.sent, worker.received) });
    setText(this.log, details.log.slice(details.log.lastIndexOf("\n") + 1));
    this.showMore(worker, { process, memory: memory.join(" "), ...onGpu }, stacks, details);
    for (const node of [this.interrupt, this.restart]) {
      const idle = node === this.interrupt && worker.state !== "up" && worker.state !== "stopped";
      if (node) set(node, { "aria-disabled": action || idle ? "true" : null });
    }
  }

  // Fills the cells for the worker's GPU, and returns their texts, by the name of the column; none without a GPU.
  showGpu(worker, history, now, tops) {
    const { gpu = null, gpu_memory = null, gpu_total = null, gpu_use = null } = worker;
    const memory = gpu ? memoryTexts(gpu_memory, gpu_total) : ["", ""];
    const [id, use] = [String(worker.id), gpu ? percent(gpu_use) : ""];
    setText(this.gpu, gpu ?? "");
    this.gpuMemory.show(history.of(id, "gpuMemory"), now, tops.gpuMemory, formatBytes, ...memory);
    this.gpuUse.show(history.of(id, "gpuUse"), now, tops.gpuUse, percent, use);
    return gpu ? { gpu, gpuMemory: memory.join(" "), gpuUse: use } : {};
  }

  // Fills the row below: what folded columns show stands there too. Stacks stay until others are asked for.
  showMore(worker, known, stacks, { log, links, name }) {
    const figures = {
      ...known,
      threads: this.threads.text.textContent,
      queue: this.queue.textContent,
      bytes: this.bytes.textContent,
    };
    const items = Object.entries(figures).filter(([, value]) => value).map(([key, value]) => ({ key, parts: [value], value }));
    join(this.figures, items, (key, { value }) => html("span", {}, html("span", { class: "rb-dim" }, TEXT.details[key] ?? ""), ` ${value}`));
    const traffic = links.map((link) => TEXT.link(name(link.peer), formatBytes(link.sent), formatBytes(link.received)));
    join(this.peers, traffic.map((text) => ({ key: text, parts: [], text })), (_, { text }) => html("li", {}, text));
    setText(this.tail, log || TEXT.noLog);
    if (stacks?.text) setText(this.stacks, stacks.text);
    this.stacks.hidden = !this.stacks.textContent;
    const mayAsk = stacks?.state !== "runs" && ["up", "suspect", "stopped"].includes(worker.state);
    if (this.stack) set(this.stack, { "aria-disabled": mayAsk ? null : "true" });
  }
}

// Returns the workers whose memory is known, if all are on one host; else none.
function onOneHost(workers) {
  const here = Object.values(workers).filter((worker) => worker.ram);
  return new Set(here.map((worker) => worker.host)).size === 1 ? here : [];
}

// Shows the figures above the table. Returns the number of workers, whether they are being scaled, and a summary as text.
function headline(frame, workers, actions) {
  const list = Object.values(workers).filter((worker) => worker.id !== 0);
  const count = (name) => list.filter((worker) => worker.state === name).length;
  const total = (name, all = list) => all.reduce((sum, worker) => sum + (worker[name] ?? 0), 0);
  const [ready, lost, suspended] = [count("up"), count("lost"), count("stopped")];
  const more = [];
  if (lost) more.push([lost, TEXT.stats.lost, "rb-warn"]);
  if (suspended) more.push([suspended, TEXT.stats.suspended, "rb-warn"]);
  const work = [countStat(total("cells"), TEXT.stats.cell), [total("queued"), TEXT.stats.queued, total("queued") ? "rb-wait" : ""]];
  const here = onOneHost(workers);
  const memory = here.length ? [[memoryTexts(total("memory", here), here[0].ram).join(" "), TEXT.stats.memory]] : [];
  frame.showStats([ready, TEXT.stats.ready], ...more, ...work, ...memory, ...leftOutStats(workers));
  const scaling = Object.values(actions).some(({ action, state }) => action === "scale" && state === "runs");
  const present = list.filter((worker) => worker.state !== "left").length;
  return { count: present, scaling, text: TEXT.summary(ready, list.length) };
}

// Folds columns until the table fits. Those that are folded come back only in another width, or with other workers.
class Folds {
  constructor(table, note) {
    [this.table, this.note, this.count, this.key, this.names] = [table, note, 0, "", FOLDS];
  }

  fit(room, key, hasGpus) {
    if (key !== this.key) this.fold(0);
    this.key = key;
    this.names = FOLDS.filter((name) => hasGpus || !GPU.includes(name));
    while (this.count < this.names.length && this.table.offsetWidth > room) this.fold(this.count + 1);
    const names = this.names.slice(0, this.count).filter((name) => name in TEXT.heads).map((name) => TEXT.heads[name]);
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

// Returns the legend of the columns that are shown, with the scale of the curves, which all rows share: [mark, text] each.
function legendOf(folds, tops) {
  const curve = (name, format) => [sample(name), TEXT.legend[name](format(tops[name]))];
  const all = [curve("cpu", percent), curve("memory", formatBytes)];
  if (tops.gpuMemory) all.push(curve("gpuMemory", formatBytes), curve("gpuUse", percent));
  const curves = folds.isFolded("curves") || !tops.memory ? [] : all;
  return [...curves, ...(folds.isFolded("threads") ? [] : ["full", "hollow"].map((kind) => [square(kind), TEXT.legend[kind]]))];
}

export default panel("workers", "Workers", (frame, model) => {
  const act = model.get("acts") ? (action, target) => model.send({ kind: "act", action, target }) : null;
  const rows = new Map();
  const history = new History();
  let [size, now, legend] = [0, 0, ""];
  const caption = html("caption", { class: "rb-hidden" }, "Workers");
  const status = html("p", { class: "rb-hidden", role: "status" });
  const heads = COLUMNS.map((name) => {
    const text = name === "acts" ? html("span", { class: "rb-hidden" }, TEXT.heads.acts) : TEXT.heads[name];
    return html("th", { scope: "col", class: `rb-${name}` }, text);
  });
  const headsOf = (withGpus) => heads.filter((_, i) => withGpus || !GPU.includes(COLUMNS[i]));
  const top = html("tr", {}, ...headsOf(false));
  const showGpus = (areThere) => {
    if (areThere !== (top.children.length > headsOf(false).length)) top.replaceChildren(...headsOf(areThere));
    for (const row of rows.values()) row.showGpus(areThere);
  };
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
  if (act) frame.head.append(html("span", { class: "rb-scale" }, fewer, more));

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
    const tops = { cpu: Math.max(1, history.top("cpu")), memory: history.top("memory"), gpuUse: 1 };
    tops.gpuMemory = Math.max(0, ...ids.map((id) => workers[id].gpu_total ?? 0));
    const hasGpus = ids.some((id) => workers[id].gpu);
    const isOneHost = onOneHost(workers).length > 0;
    const name = (id) => workers[id]?.name ?? `id ${id}`;
    const byWorker = new Map(ids.map((id) => [Number(id), []]));
    for (const link of Object.values(links)) byWorker.get(link.worker)?.push(link);
    for (const [id, row] of rows) {
      if (id in workers) continue;
      row.node.remove();
      row.more.remove();
      rows.delete(id);
    }
    let last = null;
    for (const id of ids) {
      if (!rows.has(id)) rows.set(id, new Row(workers[id], act));
      const row = rows.get(id);
      const place = last ? last.nextSibling : list.firstChild;
      if (place !== row.node) list.insertBefore(row.node, place), list.insertBefore(row.more, row.node.nextSibling);
      last = row.more;
      const concerns = ({ target }) => target === workers[id].name || (target === "all" && id !== "0");
      const running = Object.values(actions).find((one) => one.state === "runs" && one.action in TEXT.acting && concerns(one));
      const stacks = actions[`stacks ${workers[id].name}`];
      const details = { log: logs[id]?.text ?? "", links: byWorker.get(Number(id)), name };
      row.show(workers[id], { action: running, stacks, history, now, tops, onOneHost: isOneHost, ...details });
    }
    showGpus(hasGpus);
    folds.fit(frame.body.clientWidth, `${frame.body.clientWidth} ${ids.map(name)} ${hasGpus}`, hasGpus);
    const marks = table.hidden ? [] : legendOf(folds, tops);
    const words = marks.map(([, text]) => text).join();
    if (words !== legend) frame.showLegend(marks);
    legend = words;
    const failed = Object.entries(actions).filter(([, { state }]) => state === "failed");
    const errors = failed.map(([key, one]) => ({ key, parts: [one], text: `${key}: ${one.error}` }));
    join(failures, errors, (_, { text }) => html("li", {}, text));
  };
});
