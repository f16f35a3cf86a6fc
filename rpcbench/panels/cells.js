// The part of the progress panel that shows cells: a row for each, the latest first, with the cell's code, workers, time and end.
// Guarantees: “run again” is offered only where a front end answers the event `rpcbench:rerun`, as the JupyterLab extension does
// for a cell that still has its code. Such an event with `isQuestion` in its detail asks, and runs nothing.

const TEXT = STRINGS.progress;
const CELLS_SHOWN = 8; // before a click on “more”
const ENDED = ["ok", "error", "interrupted", "stopped", "lost"]; // states of cells that do not run
const RUNNING = ["runs", "waits"]; // states of jobs and cells that have not ended
const UNTOLD = "untold"; // state of a row that ran in the last picture: nothing tells whether it has ended
const WAITED = 1; // seconds of a wait that are told

// Returns a row as it is told under a picture that is the last one: one that ran then has no time, and may have ended.
function lastKnown(row) {
  if (!RUNNING.includes(row.state)) return row;
  const [open, ended] = [true, false].map((runs) => (row.parts ?? []).filter(([, , state]) => RUNNING.includes(state) === runs));
  const ends = ended.map(([, name, state, error]) => `${error || (LISTS.progress.cells[state] ?? state)} on ${name}`);
  const how = ends.length ? [`${TEXT.untold} on ${open.map(([, name]) => name).join(", ")}`, ...ends].join(", ") : TEXT.untold;
  return { ...row, state: UNTOLD, running: 0, rate: null, how };
}

// Returns a time that passes as text: "7.2 s" once it is over, "7 s" while it runs, "1:05 min", "2:03 h".
function formatTime(seconds, isExact = false) {
  if (seconds < 60) return isExact && seconds < 10 ? formatDuration(Number(seconds.toPrecision(2))) : `${Math.floor(seconds)} s`;
  return formatMinutes(seconds);
}

// Asks front ends to run a cell again, or whether they can. Returns whether one has, or can.
function askToRun(panel, { cell, number, code, where }, isQuestion) {
  if (!cell || window.isStill) return false;
  const detail = { cell, number, code, where, isQuestion };
  return !panel.dispatchEvent(new CustomEvent("rpcbench:rerun", { bubbles: true, cancelable: true, detail }));
}

// Copies a text, also where the page was not loaded securely. Returns whether that worked.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = html("textarea", { style: "position:fixed;opacity:0" });
    field.value = text;
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}

// Returns how long a cell has run, in words; `now`: seconds since 1970, null where there is no present.
function cellTime({ state, began, since, lasted, ran }, now) {
  if (lasted !== null) {
    const own = ran ?? lasted;
    if (own === 0) return TEXT.unbegun(formatTime(lasted, true));
    return [formatTime(own, true), lasted - own > WAITED ? TEXT.waited(formatTime(lasted - own)) : ""].filter(Boolean).join(", ");
  }
  const from = since ?? began; // a cell that waits counts its wait
  return now === null || from === null || state === UNTOLD ? "" : formatTime(Math.max(0, now - from));
}

class CellRow {
  constructor(frame, reveal) {
    const button = ([text, help], kind, act) => {
      const node = html("button", { type: "button", class: `rb-do-cell ${kind}`, title: help }, text);
      node.addEventListener("click", (event) => (event.stopPropagation(), act()));
      return node;
    };
    this.frame = frame;
    this.code = html("button", { type: "button", class: "rb-opener rb-source", title: TEXT.reveal });
    this.place = html("span", { class: "rb-note" });
    [this.where, this.time] = ["where", "time"].map((kind) => html("td", { class: `rb-${kind}` }));
    this.state = html("span");
    this.copy = button(TEXT.copy, "", async () => frame.say((await copyText(this.row.code)) ? TEXT.copied : TEXT.notCopied));
    this.again = button(TEXT.again, "rb-kernel", () => frame.say(askToRun(frame.root, this.row, false) ? "" : TEXT.changed));
    const acts = html("td", { class: "rb-acts-of" }, this.copy, this.again);
    this.node = html("tr", {}, html("th", { scope: "row", class: "rb-cell" }, this.code, this.place), this.where, this.time, html("td", { class: "rb-state" }, this.state), acts);
    this.code.addEventListener("click", (event) => (event.stopPropagation(), reveal(this.row)));
    this.node.addEventListener("click", () => reveal(this.row));
  }

  show(row, now) {
    if (row !== this.row) this.fill(row);
    this.tick(now);
  }

  fill(row) {
    this.row = row;
    set(this.node, { class: `rb-is-${row.state}`, "data-cell": row.order, "data-state": row.state });
    setText(this.code, row.line);
    set(this.code, { title: row.code });
    const at = row.began === null ? "" : secondsTime(row.began);
    setText(this.place, TEXT.cellPlace(row.number, at));
    setText(this.where, row.where);
    setText(this.state, row.how);
    set(this.state, { title: row.how });
    this.copy.hidden = row.is_cut; // the rest is not known
    this.again.hidden = row.is_cut || !ENDED.includes(row.state) || !askToRun(this.frame.root, row, true);
  }

  tick(now) {
    setText(this.time, cellTime(this.row, now));
  }
}

// The table of cells, with a choice of the worker.
class CellTable {
  constructor(frame, reveal) {
    [this.frame, this.reveal, this.rows, this.isOpen] = [frame, reveal, new Map(), false];
    this.choice = html("select", { "aria-label": TEXT.worker });
    const heads = Object.entries(TEXT.cellHeads).map(([key, head]) => {
      const text = key === "acts" ? html("span", { class: "rb-hidden" }, head) : head;
      return html("th", { scope: "col", class: `rb-head-${key}` }, text);
    });
    this.list = html("tbody");
    this.table = html("table", { class: "rb-cells" }, html("caption", { class: "rb-hidden" }, TEXT.cells), html("thead", {}, html("tr", {}, ...heads)), this.list);
    this.more = html("button", { type: "button", class: "rb-more-rows" });
    this.node = html("div", { class: "rb-part-of" }, html("p", { class: "rb-title" }, TEXT.cells, this.choice), this.table, this.more);
    this.choice.addEventListener("change", () => frame.redraw());
    this.more.addEventListener("click", () => ((this.isOpen = !this.isOpen), frame.redraw()));
  }

  // Offers the workers that have run a cell. The one that is chosen stays.
  offer(cells) {
    const names = [...new Set(Object.values(cells).flatMap(({ parts }) => parts.map(([, name]) => name)))].sort(natural);
    const chosen = this.choice.value ?? "";
    const all = ["", ...new Set([...names, ...(chosen ? [chosen] : [])])];
    join(this.choice, all.map((name) => ({ key: name, parts: [] })), (name) => html("option", { value: name }, name || TEXT.all));
    if (this.choice.value !== chosen) this.choice.value = chosen;
    this.choice.hidden = names.length < 2;
    return chosen;
  }

  show(cells, now) {
    const chosen = this.offer(cells);
    const isOf = (key) => !chosen || cells[key].parts.some(([, name]) => name === chosen);
    const keys = Object.keys(cells).filter(isOf).sort((a, b) => cells[b].order - cells[a].order);
    for (const key of this.rows.keys()) if (!(key in cells)) this.rows.delete(key);
    const isShown = (key, i) => this.isOpen || window.isStill || i < CELLS_SHOWN || !ENDED.includes(cells[key].state);
    const shown = keys.filter(isShown);
    for (const key of shown) {
      if (!this.rows.has(key)) this.rows.set(key, new CellRow(this.frame, this.reveal));
      this.rows.get(key).show(cells[key], now);
    }
    setChildren(this.list, shown.map((key) => this.rows.get(key).node));
    this.node.hidden = !Object.keys(cells).length;
    this.more.hidden = keys.length <= CELLS_SHOWN;
    setText(this.more, this.isOpen ? TEXT.fewer("cell") : TEXT.more(keys.length - shown.length, "cell"));
  }

  tick(now) {
    for (const row of this.rows.values()) row.tick(now);
  }
}
