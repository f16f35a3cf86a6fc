// How the workers are: a row for each, updated in place, so that focus and a button pressed once stay where they are.
// What lies deeper (bytes for each peer, the end of the log) opens below a row. Buttons are there where somebody acts.

const HEADS = ["worker", "now", "cpu", "memory", "threads", "queue", "bytes", "last words", ""];
const MOST_SQUARES = 6;
const SURE_MS = 5000;
const DENSE = 12; // more workers than this stand closer

const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)} %`);

// A number, and a bar beside it for the eye alone.
class Bar {
  constructor() {
    this.level = html("i");
    this.words = html("span");
    this.cell = html("td", { class: "rb-bar" }, html("b", { "aria-hidden": "true" }, this.level), this.words);
  }

  show(share, words) {
    set(this.level, { style: `width: ${Math.round(100 * Math.min(1, share || 0))}%` });
    fill(this.words, words);
  }
}

// Threads as squares: full ones run, hollow ones wait.
class Threads {
  constructor() {
    this.squares = html("span", { class: "rb-squares", "aria-hidden": "true" });
    this.words = html("span", { class: "rb-hidden" });
    this.cell = html("td", {}, this.squares, this.words);
  }

  show(busy, waiting) {
    const marks = [...Array(busy ?? 0).fill("rb-full"), ...Array(waiting ?? 0).fill("rb-hollow")];
    const items = marks.slice(0, MOST_SQUARES).map((kind, key) => ({ key, parts: [kind], kind }));
    const more = marks.length - items.length;
    if (more > 0) items.push({ key: "more", parts: [more], kind: "rb-more", words: `+${more}` });
    join(this.squares, items, (_, { kind, words = "" }) => html("i", { class: kind }, words));
    fill(this.words, busy === null ? "not known" : `${busy} busy, ${waiting} waiting`);
    set(this.cell, { title: this.words.textContent });
  }
}

// A button that may ask once more before it does what cannot be undone. `name`: all of it in words, for who hears it.
function button(words, help, warning, act, name = words) {
  const node = html("button", { type: "button", title: help, "aria-label": name }, words);
  let timer = 0;
  const calm = () => {
    clearTimeout(timer);
    set(node, { "data-sure": null, title: help, "aria-label": name });
    fill(node, words);
  };
  node.addEventListener("click", () => {
    if (node.getAttribute("aria-disabled") === "true") return;
    if (!warning || node.dataset.sure) {
      calm();
      act();
      return;
    }
    set(node, { "data-sure": "asked", title: warning, "aria-label": `${name}: ${warning}. Press again to do it.` });
    fill(node, "sure?");
    timer = setTimeout(calm, SURE_MS);
  });
  node.addEventListener("blur", calm);
  return node;
}

const LOST = "what it holds is lost";

// What a worker does, in words, and how urgent they are.
function now(worker, action) {
  const asked = { restart: "starts again …", interrupt: "is interrupted …", stop: "stops …" };
  if (action) return [asked[action.action] ?? "…", "rb-wait"];
  if (worker.state === "lost") return [worker.ended ? `lost: ${worker.ended}` : "lost", "rb-bad"];
  if (worker.state !== "up") return [worker.state, worker.state === "left" ? "" : "rb-wait"];
  const cells = worker.cells > 1 ? `runs a cell, ${worker.cells - 1} wait` : "runs a cell";
  const words = { cell: cells, busy: "runs a call", waits: "waits", silent: `silent for ${worker.silent} s` };
  return [words[worker.doing] ?? (worker.doing || "not heard of yet"), worker.doing === "silent" ? "rb-wait" : ""];
}

class Row {
  constructor(worker, act) {
    const cell = (kind) => html("td", { class: kind });
    this.opener = html("button", { type: "button", class: "rb-opener", "aria-expanded": "false" });
    this.note = html("span", { class: "rb-note" });
    const head = html("th", { scope: "row" }, this.opener, this.note);
    this.now = cell("rb-now");
    [this.cpu, this.memory, this.threads] = [new Bar(), new Bar(), new Threads()];
    [this.queue, this.bytes, this.log] = [cell("rb-number"), cell("rb-bytes"), cell("rb-log")];
    this.acts = cell("rb-acts");
    if (act && worker.id !== 0) {
      const does = (action) => () => act(action, this.name);
      this.interrupt = button("interrupt", "stop the cell that runs there", "", does("interrupt"), `interrupt ${worker.name}`);
      this.restart = button("restart", `end it and start it again: ${LOST}`, LOST, does("restart"), `restart ${worker.name}`);
      this.acts.append(this.interrupt, this.restart);
    }
    const figures = [this.now, this.cpu.cell, this.memory.cell, this.threads.cell, this.queue, this.bytes, this.log];
    this.node = html("tr", {}, head, ...figures, this.acts);
    this.peers = html("ul", { class: "rb-peers" });
    this.tail = html("pre", { tabindex: "0" });
    const inside = html("td", { colspan: HEADS.length }, this.peers, this.tail);
    this.more = html("tr", { class: "rb-more-of", hidden: "" }, inside);
    this.opener.addEventListener("click", () => this.open(this.more.hidden));
  }

  open(wanted) {
    this.more.hidden = !wanted;
    set(this.opener, { "aria-expanded": wanted });
  }

  show(worker, { log, links, action, name, largest }) {
    this.name = worker.name;
    const numbers = ["incarnation", "pid", "cpu", "memory", "busy", "waiting", "queued", "cells", "calls"];
    const data = [...numbers, "state", "doing", "sent", "received"].map((part) => [`data-${part}`, worker[part] ?? ""]);
    set(this.node, { "data-worker": worker.id, ...Object.fromEntries(data) });
    fill(this.opener, worker.name);
    const again = worker.incarnation ? `, start ${worker.incarnation + 1}` : "";
    fill(this.note, worker.pid === null ? again.slice(2) : `process ${worker.pid}${again}`);
    const [words, urgent] = now(worker, action);
    fill(this.now, words);
    set(this.now, { class: `rb-now ${urgent}`, title: words });
    this.cpu.show(worker.cpu, percent(worker.cpu));
    this.memory.show(worker.memory / largest, bytes(worker.memory));
    this.threads.show(worker.busy, worker.waiting);
    fill(this.queue, worker.queued === null ? "–" : String(worker.queued));
    fill(this.bytes, worker.busy === null ? "–" : `↑ ${bytes(worker.sent)} ↓ ${bytes(worker.received)}`);
    set(this.bytes, { title: `sent ${worker.sent} bytes, received ${worker.received}` });
    fill(this.log, log.slice(log.lastIndexOf("\n") + 1));
    const told = links.map((link) => `${name(link.peer)}: ${bytes(link.sent)} sent, ${bytes(link.received)} received`);
    fill(this.tail, log || "It wrote nothing outside cells and calls.");
    join(this.peers, told.map((text) => ({ key: text, parts: [], text })), (_, { text }) => html("li", {}, text));
    for (const node of [this.interrupt, this.restart]) {
      const idle = node === this.interrupt && worker.state !== "up" && worker.state !== "stopped";
      if (node) set(node, { "aria-disabled": action || idle ? "true" : null });
    }
  }
}

function headline(frame, workers, actions) {
  const list = Object.values(workers).filter((worker) => worker.id !== 0);
  const count = (name) => list.filter((worker) => worker.state === name).length;
  const total = (name) => list.reduce((sum, worker) => sum + (worker[name] ?? 0), 0);
  const [up, lost, stopped] = [count("up"), count("lost"), count("stopped")];
  const more = [];
  if (lost) more.push([lost, "lost", "rb-warn"]);
  if (stopped) more.push([stopped, "stopped", "rb-warn"]);
  const work = [tally(total("cells"), "cell"), [total("queued"), "queued", total("queued") ? "rb-wait" : ""]];
  frame.say([up, "up"], ...more, ...work, ...leftOut(workers));
  const scaling = Object.values(actions).some(({ action, state }) => action === "scale" && state === "runs");
  const there = list.filter((worker) => worker.state !== "left").length;
  return { count: there, scaling, words: `${up} of ${list.length} workers up` };
}

export default panel("workers", "Workers", (frame, model) => {
  const act = model.get("acts") ? (action, target) => model.send({ kind: "act", action, target }) : null;
  const rows = new Map();
  let size = 0;
  const caption = html("caption", { class: "rb-hidden" }, "Workers");
  const said = html("p", { class: "rb-hidden", role: "status" });
  const unseen = html("span", { class: "rb-hidden" }, "buttons");
  const top = html("tr", {}, ...HEADS.map((head) => html("th", { scope: "col" }, head || unseen)));
  const list = html("tbody");
  const table = html("table", {}, caption, html("thead", {}, top), list);
  const failures = html("ul", { class: "rb-failures", role: "alert" });
  const scale = (step) => () => size + step > 0 && act("scale", String(size + step));
  const fewer = button("− worker", "end the last worker", LOST, scale(-1));
  const further = button("+ worker", "start one more", "", scale(1));
  frame.text = said;
  frame.body.before(said);
  frame.top.remove();
  frame.picture.replaceWith(table);
  frame.head.after(failures);
  frame.legend.remove();
  if (act) frame.head.append(html("span", { class: "rb-scale" }, fewer, further));

  return ({ workers, links, logs, actions }) => {
    const found = headline(frame, workers, actions);
    size = found.count;
    for (const node of [fewer, further]) set(node, { "aria-disabled": found.scaling ? "true" : null });
    frame.describe(`Workers: ${found.words}.`);
    frame.empty(Object.keys(workers).length ? null : ["No cluster runs. Start one: ", "%cluster start 2"]);
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
      const means = ({ target }) => target === workers[id].name || (target === "all" && id !== "0");
      const mine = Object.values(actions).find((one) => one.state === "runs" && means(one));
      const own = { log: logs[id]?.text ?? "", links: byWorker.get(Number(id)), action: mine, name, largest };
      row.show(workers[id], own);
    }
    const failed = Object.entries(actions).filter(([, { state }]) => state === "failed");
    const told = failed.map(([key, one]) => ({ key, parts: [one], words: `${key}: ${one.error}` }));
    join(failures, told, (_, { words }) => html("li", {}, words));
  };
});
