// The progress panel: a table with a row for each job, the latest first, and one of cells (`cells.js`).
// Guarantees
// - Rows are updated in place, so the focus stays. Times that pass are counted in the page, once a second, by no message.
// - Where there is no present, as in a record or a still picture, a time ends with the last count that is known. In a late picture
//   it ends when the picture was true.
// - Where the cluster or the kernel is gone, no row runs: of one that ran in the last picture it is not known whether it has ended.

const STATES = LISTS.progress.jobs;
const SHOWN = 5; // jobs that are shown before a click on “more”
const NARROW = 560; // pixels: below this the cells of a row stand below each other
const [WIDE, HIGH] = [180, 10]; // of a bar, in its own units

// ---- pure functions

// Returns a whole number as text, with a comma between thousands.
const formatCount = (count) => String(count).replace(/\B(?=(\d{3})+$)/g, ",");

// Returns a rate as text, with three digits or more.
const formatRate = (rate) => (rate >= 100 ? formatCount(Math.round(rate)) : String(+rate.toPrecision(3)));

const waitingOf = ({ total, ended, running, cancelled }) => (total === null ? 0 : Math.max(0, total - ended - running - cancelled));

// Whether a map waits until its results are taken: nothing runs, and nothing has begun or ended for a second.
const isHeldBack = ({ kind, state, running, ended, counted }, now) =>
  kind === "map" && state === "runs" && !running && ended > 0 && now !== null && counted !== null && now - counted > 1;

// Returns the seconds that the rest of a job takes at its rate; null if that is not known. `now`: seconds since 1970.
function secondsLeft(job, now) {
  if (job.state !== "runs" || isHeldBack(job, now) || job.total === null || !job.rate || job.counted === null) return null;
  return Math.max(0, (job.total - job.ended) / job.rate - (now - job.counted));
}

// Returns how long a job has run. `now`: seconds since 1970, null where there is no present.
function secondsPassed(job, now) {
  if (job.lasted !== null) return job.lasted;
  return job.state === UNTOLD || job.began === null ? null : Math.max(0, (now ?? job.counted) - job.began);
}

// Returns the parts of a bar, [kind, begin, length] each, as shares of its length. A job without a total has one of unknown length.
function barParts({ total, done, failed, running, state }) {
  const all = total ?? (["runs", UNTOLD].includes(state) ? 0 : done + failed);
  if (!all) return [];
  let begin = 0;
  const parts = [["done", done], ["failed", failed], ["running", running]].map(([kind, count]) => {
    const length = Math.min(count / all, 1 - begin);
    begin += length;
    return [kind, begin - length, length];
  });
  return parts.filter(([, , length]) => length > 0);
}

// Returns the counts of a job in words.
function countWords(job) {
  const { done, total, unit, running, failed, cancelled, state } = job;
  const waiting = waitingOf(job);
  const words = { runs: TEXT.waiting, [UNTOLD]: TEXT.unknown }[state] ?? TEXT.unbegunItems;
  const rest = waiting && words(formatCount(waiting));
  const parts = [TEXT.counts(formatCount(done), total === null ? null : formatCount(total), unit)];
  if (failed) parts.push(TEXT.failed(failed));
  if (running) parts.push(TEXT.running(running));
  if (cancelled) parts.push(TEXT.cancelled(cancelled));
  return [...parts, ...(rest ? [rest] : [])].join(", ");
}

// ---- rows

const barMark = (kind, x, width) => svg("rect", { class: `rb-part rb-${kind}`, x, y: 0, width, height: HIGH });

// A row of a job. Its times are shown anew by `tick`.
class JobRow {
  constructor(reveal) {
    this.name = html("button", { type: "button", class: "rb-opener", title: TEXT.reveal });
    this.place = html("span", { class: "rb-note" });
    this.bar = svg("svg", { class: "rb-bar", width: WIDE, height: HIGH, viewBox: `0 0 ${WIDE} ${HIGH}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    [this.counts, this.time, this.rate, this.state, this.note] = Array.from({ length: 5 }, () => html("span"));
    for (const node of [this.counts, this.rate, this.note]) set(node, { class: "rb-note" });
    const head = html("th", { scope: "row", class: "rb-job" }, this.name, this.place);
    const progress = html("td", { class: "rb-progress-of" }, this.bar, this.counts);
    this.node = html("tr", {}, head, progress, html("td", { class: "rb-time" }, this.time, this.rate), html("td", { class: "rb-state" }, this.state, this.note));
    this.name.addEventListener("click", (event) => (event.stopPropagation(), reveal(this.job)));
    this.node.addEventListener("click", () => reveal(this.job));
  }

  show(job, now) {
    this.job = job;
    set(this.node, { class: `rb-is-${job.state}`, "data-job": job.order, "data-state": job.state, "data-done": job.done, "data-failed": job.failed });
    setText(this.name, job.name);
    setText(this.place, TEXT.place(job.kind, job.number));
    const parts = barParts(job);
    const marks = parts.map(([kind, begin, length]) => barMark(kind, begin * WIDE, length * WIDE));
    this.bar.replaceChildren(barMark(parts.length || job.state !== "runs" ? "waiting" : "unknown", 0, WIDE), ...marks);
    setText(this.counts, countWords(job));
    setText(this.state, job.how ?? STATES[job.state] ?? job.state);
    set(this.note, { class: `rb-note${job.error ? " rb-bad" : ""}`, title: job.error || null });
    this.tick(now);
  }

  tick(now) {
    const { job } = this;
    const [passed, left] = [secondsPassed(job, now), now === null ? null : secondsLeft(job, now)];
    setText(this.note, job.error || job.note || (isHeldBack(job, now) ? TEXT.heldBack : ""));
    const time = passed === null ? "" : formatTime(passed, job.lasted !== null);
    setText(this.time, [time, left === null ? "" : TEXT.left(formatTime(left))].filter(Boolean).join(", "));
    setText(this.rate, job.rate ? TEXT.rate(formatRate(job.rate), job.unit) : "");
  }
}

// Shows the figures above the tables, and tells them to screen readers. A narrow head has room for the first one only, so that is
// one that is not 0.
function headline(frame, jobs, cells, workers, isNarrow) {
  const count = (rows, state) => rows.filter((row) => row.state === state).length;
  const [running, failed, busy] = [count(jobs, "runs"), count(jobs, "failed"), count(cells, "runs")];
  const more = failed ? [[failed, TEXT.stats.failed(failed), "rb-warn"]] : [];
  const [jobsUntold, cellsUntold] = [count(jobs, UNTOLD), count(cells, UNTOLD)];
  const untold = [[plural(jobsUntold, "job"), jobsUntold], [plural(cellsUntold, "cell"), cellsUntold]].filter(([, size]) => size);
  const words = untold.map(([words]) => words).join(" and ");
  const now = words ? [[words, TEXT.untold]] : [[running, TEXT.stats.jobs(running)], [busy, TEXT.stats.cells(busy)]];
  const stats = [...now, ...more, ...leftOutStats(workers)];
  if (isNarrow) stats.sort(([a], [b]) => Number(b !== 0) - Number(a !== 0));
  frame.showStats(...stats);
  frame.describe(words ? `${words} ${TEXT.untold}.` : TEXT.describe(plural(running, "job"), plural(busy, "cell")));
}

const legendMark = (kind) => svg("rect", { class: `rb-part rb-${kind}`, x: -8, y: -5, width: 16, height: 10 });

// The table of jobs.
class JobTable {
  constructor(frame, reveal) {
    [this.frame, this.reveal, this.rows, this.isOpen, this.legend] = [frame, reveal, new Map(), false, ""];
    const heads = Object.entries(TEXT.heads).map(([key, head]) => html("th", { scope: "col", class: `rb-head-${key}` }, head));
    this.list = html("tbody");
    const caption = html("caption", { class: "rb-hidden" }, TEXT.jobs);
    const table = html("table", { class: "rb-jobs" }, caption, html("thead", {}, html("tr", {}, ...heads)), this.list);
    this.more = html("button", { type: "button", class: "rb-more-rows" });
    this.node = html("div", { class: "rb-part-of" }, table, this.more);
    this.more.addEventListener("click", () => ((this.isOpen = !this.isOpen), frame.redraw()));
  }

  show(jobs, now) {
    const keys = Object.keys(jobs).sort((a, b) => jobs[b].order - jobs[a].order);
    for (const key of this.rows.keys()) if (!(key in jobs)) this.rows.delete(key);
    for (const key of keys) {
      if (!this.rows.has(key)) this.rows.set(key, new JobRow(this.reveal));
      this.rows.get(key).show(jobs[key], now);
    }
    // Those that run are always in sight.
    const shown = keys.filter((key, i) => this.isOpen || window.isStill || i < SHOWN || ["runs", UNTOLD].includes(jobs[key].state));
    setChildren(this.list, shown.map((key) => this.rows.get(key).node));
    this.node.hidden = !keys.length;
    this.more.hidden = keys.length <= SHOWN;
    setText(this.more, this.isOpen ? TEXT.fewer("job") : TEXT.more(keys.length - shown.length, "job"));
    const has = (kind) => keys.some((key) => (kind === "waiting" ? waitingOf(jobs[key]) : jobs[key][kind]));
    const kinds = ["done", "running", "failed", "waiting"].filter(has);
    if (this.legend !== kinds.join()) this.frame.showLegend(kinds.map((kind) => [legendMark(kind), TEXT.legend[kind]]));
    this.legend = kinds.join();
  }

  tick(now) {
    for (const row of this.rows.values()) row.tick(now);
  }
}

export default panel("progress", "Progress", (frame) => {
  const status = html("p", { class: "rb-hidden", role: "status" });
  const reveal = (row) => {
    const text = row.number === null ? TEXT.noCell : TEXT.gone(row.number);
    frame.say(row.number !== null && revealCell(frame.root, row) ? "" : text);
  };
  const tables = [new JobTable(frame, reveal), new CellTable(frame, reveal)];
  frame.text = status; // screen readers announce it, as this panel has no picture with a description
  frame.body.before(status);
  frame.top.remove();
  frame.picture.replaceWith(...tables.map(({ node }) => node));
  const isOver = () => ["stopped", "restarted", "gone", "cut", "failed"].includes(frame.state.kind);
  const told = (rows) => (isOver() ? Object.fromEntries(Object.entries(rows).map(([key, row]) => [key, lastKnown(row)])) : rows);
  const clock = setInterval(() => {
    if (frame.state.kind === "live") for (const table of tables) table.tick(frame.present);
  }, 1000);
  frame.cleanups.push(() => clearInterval(clock));

  return ({ workers, ...view }, width) => {
    const [jobs, cells] = [told(view.jobs), told(view.cells)];
    headline(frame, Object.values(jobs), Object.values(cells), workers, width < NARROW);
    const isEmpty = !Object.keys(jobs).length && !Object.keys(cells).length;
    frame.showHint(!isEmpty ? null : Object.keys(workers).length ? TEXT.hint : STRINGS.workers.hint);
    frame.root.classList.toggle("rb-narrow", width < NARROW);
    const now = frame.present;
    tables[0].show(jobs, now);
    tables[1].show(cells, now);
  };
});
