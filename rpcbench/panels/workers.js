// The workers panel: a table with a row for each worker. A second row, which the user can open, shows the bytes for each peer
// and the end of the log.
// Guarantees: rows are updated in place, so the focus and a button that waits for confirmation stay. There are buttons only if
// the panel can act, which the trait `acts` of the model says.

const HEADS = ["worker", "now", "cpu", "memory", "threads", "queue", "bytes", "last output", ""];
const MAX_SQUARES = 6;
const CONFIRM_MS = 5000; // how long a button waits for the second press
const DENSE = 12; // with more workers than this the rows are closer together

const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);

// A table cell with a number as text, and a bar that screen readers skip.
class Bar {
  constructor() {
    this.level = html("i");
    this.text = html("span");
    this.cell = html("td", { class: "rb-bar" }, html("b", { "aria-hidden": "true" }, this.level), this.text);
  }

  show(share, text) {
    set(this.level, { style: `width: ${Math.round(100 * Math.min(1, share || 0))}%` });
    setText(this.text, text);
  }
}

// A table cell with a worker's threads as squares: full squares run, hollow squares wait. Screen readers read a text instead.
class Threads {
  constructor() {
    this.squares = html("span", { class: "rb-squares", "aria-hidden": "true" });
    this.text = html("span", { class: "rb-hidden" });
    this.cell = html("td", {}, this.squares, this.text);
  }

  show(busy, waiting) {
    const marks = [...Array(busy ?? 0).fill("rb-full"), ...Array(waiting ?? 0).fill("rb-hollow")];
    const items = marks.slice(0, MAX_SQUARES).map((kind, key) => ({ key, parts: [kind], kind }));
    const more = marks.length - items.length;
    if (more > 0) items.push({ key: "more", parts: [more], kind: "rb-more", text: `+${more}` });
    join(this.squares, items, (_, { kind, text = "" }) => html("i", { class: kind }, text));
    setText(this.text, busy === null ? "not known" : `${busy} busy, ${waiting} waiting`);
    set(this.cell, { title: this.text.textContent });
  }
}

// Makes a button. With a `warning`, its action cannot be undone, and the button asks for a second press. `name` is the label for
// screen readers.
function button(text, help, warning, act, name = text) {
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
    set(node, { "data-sure": "asked", title: warning, "aria-label": `${name}: ${warning}. Press again to do it.` });
    setText(node, "sure?");
    timer = setTimeout(reset, CONFIRM_MS);
  });
  node.addEventListener("blur", reset);
  return node;
}

const LOSS = "everything it holds is lost";

// Returns the text of a worker's activity and its CSS class; `action` is the running action on the worker, if any.
function activity(worker, action) {
  const ongoing = { restart: "starts again …", interrupt: "is interrupted …", stop: "stops …" };
  if (action) return [ongoing[action.action] ?? "…", "rb-wait"];
  if (worker.state === "lost") return [worker.ended ? `lost: ${worker.ended}` : "lost", "rb-bad"];
  if (worker.state !== "up") return [worker.state, worker.state === "left" ? "" : "rb-wait"];
  const cells = worker.cells > 1 ? `runs a cell, ${worker.cells - 1} wait` : "runs a cell";
  const texts = { cell: cells, busy: "runs a call", waits: "waits", silent: `silent for ${worker.silent} s` };
  return [texts[worker.doing] ?? (worker.doing || "no report yet"), worker.doing === "silent" ? "rb-wait" : ""];
}

// The two rows of one worker: `node`, and `more` below it, which the button `opener` opens.
class Row {
  constructor(worker, act) {
    const cell = (kind) => html("td", { class: kind });
    this.opener = html("button", { type: "button", class: "rb-opener", "aria-expanded": "false" });
    this.note = html("span", { class: "rb-note" });
    const head = html("th", { scope: "row" }, this.opener, this.note);
    this.now = cell("rb-now");
    [this.cpu, this.memory, this.threads] = [new Bar(), new Bar(), new Threads()];
    [this.queue, this.bytes, this.log] = [cell("rb-number"), cell("rb-bytes"), cell("rb-log")];
    this.buttons = cell("rb-acts");
    if (act && worker.id !== 0) {
      const starts = (action) => () => act(action, this.name);
      this.interrupt = button("interrupt", "stop the running cell", "", starts("interrupt"), `interrupt ${worker.name}`);
      this.restart = button("restart", `end it and start it again: ${LOSS}`, LOSS, starts("restart"), `restart ${worker.name}`);
      this.buttons.append(this.interrupt, this.restart);
    }
    const figures = [this.now, this.cpu.cell, this.memory.cell, this.threads.cell, this.queue, this.bytes, this.log];
    this.node = html("tr", {}, head, ...figures, this.buttons);
    this.peers = html("ul", { class: "rb-peers" });
    this.tail = html("pre", { tabindex: "0" });
    const inside = html("td", { colspan: HEADS.length }, this.peers, this.tail);
    this.more = html("tr", { class: "rb-more-of", hidden: "" }, inside);
    this.opener.addEventListener("click", () => this.toggle(this.more.hidden));
  }

  toggle(isOpen) {
    this.more.hidden = !isOpen;
    set(this.opener, { "aria-expanded": isOpen });
  }

  show(worker, { log, links, action, name, largest }) {
    this.name = worker.name;
    const numbers = ["incarnation", "pid", "cpu", "memory", "busy", "waiting", "queued", "cells", "calls"];
    const data = [...numbers, "state", "doing", "sent", "received"].map((part) => [`data-${part}`, worker[part] ?? ""]);
    set(this.node, { "data-worker": worker.id, ...Object.fromEntries(data) });
    setText(this.opener, worker.name);
    const again = worker.incarnation ? `, start ${worker.incarnation + 1}` : "";
    setText(this.note, worker.pid === null ? again.slice(2) : `process ${worker.pid}${again}`);
    const [text, kind] = activity(worker, action);
    setText(this.now, text);
    set(this.now, { class: `rb-now ${kind}`, title: text });
    this.cpu.show(worker.cpu, percent(worker.cpu));
    this.memory.show(worker.memory / largest, formatBytes(worker.memory));
    this.threads.show(worker.busy, worker.waiting);
    setText(this.queue, worker.queued === null ? "–" : String(worker.queued));
    setText(this.bytes, worker.busy === null ? "–" : `↑ ${formatBytes(worker.sent)} ↓ ${formatBytes(worker.received)}`);
    set(this.bytes, { title: `sent ${worker.sent} bytes, received ${worker.received}` });
    setText(this.log, log.slice(log.lastIndexOf("\n") + 1));
    const traffic = links.map((link) => `${name(link.peer)}: ${formatBytes(link.sent)} sent, ${formatBytes(link.received)} received`);
    setText(this.tail, log || "It wrote nothing outside cells and calls.");
    join(this.peers, traffic.map((text) => ({ key: text, parts: [], text })), (_, { text }) => html("li", {}, text));
    for (const node of [this.interrupt, this.restart]) {
      const idle = node === this.interrupt && worker.state !== "up" && worker.state !== "stopped";
      if (node) set(node, { "aria-disabled": action || idle ? "true" : null });
    }
  }
}

// Shows the figures above the table. Returns the number of workers, whether they are being scaled, and a summary as text.
function headline(frame, workers, actions) {
  const list = Object.values(workers).filter((worker) => worker.id !== 0);
  const count = (name) => list.filter((worker) => worker.state === name).length;
  const total = (name) => list.reduce((sum, worker) => sum + (worker[name] ?? 0), 0);
  const [up, lost, stopped] = [count("up"), count("lost"), count("stopped")];
  const more = [];
  if (lost) more.push([lost, "lost", "rb-warn"]);
  if (stopped) more.push([stopped, "stopped", "rb-warn"]);
  const work = [countStat(total("cells"), "cell"), [total("queued"), "queued", total("queued") ? "rb-wait" : ""]];
  frame.showStats([up, "up"], ...more, ...work, ...leftOutStats(workers));
  const scaling = Object.values(actions).some(({ action, state }) => action === "scale" && state === "runs");
  const present = list.filter((worker) => worker.state !== "left").length;
  return { count: present, scaling, text: `${up} of ${list.length} workers up` };
}

export default panel("workers", "Workers", (frame, model) => {
  const act = model.get("acts") ? (action, target) => model.send({ kind: "act", action, target }) : null;
  const rows = new Map();
  let size = 0;
  const caption = html("caption", { class: "rb-hidden" }, "Workers");
  const status = html("p", { class: "rb-hidden", role: "status" });
  const hidden = html("span", { class: "rb-hidden" }, "buttons");
  const top = html("tr", {}, ...HEADS.map((head) => html("th", { scope: "col" }, head || hidden)));
  const list = html("tbody");
  const table = html("table", {}, caption, html("thead", {}, top), list);
  const failures = html("ul", { class: "rb-failures", role: "alert" });
  const scale = (step) => () => size + step > 0 && act("scale", String(size + step));
  const fewer = button("− worker", "end the last worker", LOSS, scale(-1));
  const more = button("+ worker", "start one more", "", scale(1));
  frame.text = status; // screen readers announce it, as this panel has no picture with a description
  frame.body.before(status);
  frame.top.remove();
  frame.picture.replaceWith(table);
  frame.head.after(failures);
  frame.legend.remove();
  if (act) frame.head.append(html("span", { class: "rb-scale" }, fewer, more));

  return ({ workers, links, logs, actions }) => {
    const summary = headline(frame, workers, actions);
    size = summary.count;
    for (const node of [fewer, more]) set(node, { "aria-disabled": summary.scaling ? "true" : null });
    frame.describe(`Workers: ${summary.text}.`);
    frame.showHint(Object.keys(workers).length ? null : ["No cluster runs. Start one: ", "%cluster start 2"]);
    table.hidden = !Object.keys(workers).length;
    table.classList.toggle("rb-dense", Object.keys(workers).length > DENSE);

    const ids = Object.keys(workers).sort(natural);
    const largest = Math.max(1, ...ids.map((id) => workers[id].memory ?? 0));
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
      const running = Object.values(actions).find((one) => one.state === "runs" && concerns(one));
      const details = { log: logs[id]?.text ?? "", links: byWorker.get(Number(id)), action: running, name, largest };
      row.show(workers[id], details);
    }
    const failed = Object.entries(actions).filter(([, { state }]) => state === "failed");
    const errors = failed.map(([key, one]) => ({ key, parts: [one], text: `${key}: ${one.error}` }));
    join(failures, errors, (_, { text }) => html("li", {}, text));
  };
});
