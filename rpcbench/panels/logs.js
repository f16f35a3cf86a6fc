// The logs panel: the lines that workers write outside cells, of one worker or of all, by the order in which they were seen.
// Guarantees
// - Lines are text nodes. The level of each comes from Python; what is shown is chosen here: worker, levels, search.
// - The list follows the end until the user scrolls up; then it stands still, and a button says how many lines have come since.
// - It has at most MOST_LINES lines, the last ones, so that a flood does not make the page slow.

const TEXT = STRINGS.logs;
const MOST_LINES = 2000;
const WANTED = { all: " wvef", warnings: "wvef", errors: "ef" }; // levels by choice; v and f go on with the line above
const KINDS = { w: "w", v: "w", e: "e", f: "e" }; // of levels, in names of classes
const AT_END = 24; // pixels from the end up to which the list follows
const COLOURS = 6; // of workers' names
const [LAST, ROW, WIDEST, PER_LETTER] = [20, 19, 780, 7.9]; // lines of a still picture, their height, width, and width of a letter

const counts = new WeakMap(); // blocks do not change

// Returns the numbers of lines of a block by level.
function countLevels(block) {
  if (!counts.has(block)) {
    const found = { " ": 0, w: 0, v: 0, e: 0, f: 0 };
    if (!block.kind) for (const level of block.levels) found[level] += 1;
    counts.set(block, found);
  }
  return counts.get(block);
}

function sumLevels(blocks) {
  const sum = { " ": 0, w: 0, v: 0, e: 0, f: 0 };
  for (const block of blocks) for (const [level, count] of Object.entries(countLevels(block))) sum[level] += count;
  return sum;
}

// Returns the last blocks with about `most` lines; `all` are in order.
function lastBlocks(all, most) {
  let [begin, lines] = [all.length, 0];
  while (begin > 0 && lines < most) lines += all[--begin][1].lines.length;
  return all.slice(begin);
}

// Returns the lines of a block that are shown, as [number, line, level] each. What the panel says itself always is.
const shownLines = (block, wanted) =>
  block.lines.map((line, i) => [block.first + i, line, block.levels[i]]).filter(([, , level]) => block.kind || wanted.includes(level));

// Returns a line in parts, [text, whether it matches] each; `query` is in lower case.
function splitLine(line, query) {
  const low = line.toLowerCase();
  if (!query || !low.includes(query)) return [[line, false]];
  if (low.length !== line.length) return [[line, true]]; // a letter whose lower case is longer: places differ
  const parts = [];
  let at = 0;
  for (let next = low.indexOf(query); next >= 0; next = low.indexOf(query, at)) {
    parts.push([line.slice(at, next), false], [line.slice(next, next + query.length), true]);
    at = next + query.length;
  }
  return [...parts, [line.slice(at), false]].filter(([text]) => text);
}

function lineNode(line, level, makeTag, query) {
  const parts = splitLine(line, query).map(([text, isMatch]) => (isMatch ? html("mark", {}, text) : text));
  return html("div", { class: `rb-line rb-level-${KINDS[level] ?? "plain"}` }, ...makeTag(), html("span", { class: "rb-said" }, ...parts));
}

const seenAt = ({ at }) => (at === null ? null : TEXT.read(secondsTime(at)));

// Draws a block of lines; `name` is that of its worker, or "" where all lines are of one.
function blockNode(block, name, wanted, query) {
  if (block.kind) return html("div", { class: `rb-event rb-level-${KINDS[block.levels] ?? "plain"}`, title: seenAt(block) }, block.lines[0]);
  const makeTag = () => (name ? [html("span", { class: `rb-who rb-who-${block.worker % COLOURS}` }, name)] : []);
  const lines = shownLines(block, wanted).map(([, line, level]) => lineNode(line, level, makeTag, query));
  return html("div", { class: "rb-block", title: seenAt(block) }, ...lines);
}

// The buttons that choose a worker. `changed` is called after a choice.
class Tabs {
  constructor(changed) {
    this.chosen = "";
    this.changed = changed;
    this.node = html("div", { class: "rb-tabs", role: "tablist", "aria-label": TEXT.tabs });
    this.node.addEventListener("keydown", (event) => this.onKey(event));
  }

  offer(names, errors) {
    if (!(this.chosen in names)) this.chosen = "";
    const items = [["", TEXT.all, 0], ...Object.keys(names).sort(natural).map((id) => [id, names[id], errors.get(Number(id)) ?? 0])];
    const rows = items.map(([key, name, count]) => ({ key, parts: [name, count, key === this.chosen], name, count }));
    const focused = this.node.contains(document.activeElement);
    join(this.node, rows, (key, { name, count }) => {
      const isOn = key === this.chosen;
      const kind = `rb-tab ${count ? "rb-has-errors" : ""}`;
      const more = { "aria-selected": isOn, "aria-label": TEXT.tab(name, count), title: TEXT.tab(name, count), tabindex: isOn ? 0 : -1 };
      const node = html("button", { type: "button", role: "tab", class: kind, "data-worker": key, ...more }, name);
      node.addEventListener("click", () => this.choose(key));
      return node;
    });
    if (focused && !this.node.contains(document.activeElement)) this.node.querySelector("[aria-selected=true]")?.focus();
  }

  choose(key) {
    this.chosen = key;
    this.changed();
  }

  onKey({ key }) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    const all = this.node.children;
    const at = [...all].findIndex((one) => one.getAttribute("aria-selected") === "true");
    if (step && all.length) all[(at + step + all.length) % all.length].click();
  }
}

// The search: its field, the matches in the list, and which of them is lit.
class Search {
  constructor(list, changed) {
    this.list = list;
    this.field = html("input", { type: "search", placeholder: TEXT.find, "aria-label": TEXT.findTip, title: TEXT.findTip });
    this.status = html("span", { class: "rb-found", role: "status" });
    this.lit = null;
    this.field.addEventListener("input", () => {
      this.lit = null;
      changed();
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.go(event.shiftKey ? -1 : 1);
    });
  }

  get query() {
    return this.field.value.toLowerCase();
  }

  get matches() {
    return [...this.list.querySelectorAll("mark")];
  }

  // Lights the next match, or the one before. The first is the first at or below the top of what is in sight.
  go(step) {
    const all = this.matches;
    if (!all.length) return;
    const body = this.list.parentNode;
    const top = body.getBoundingClientRect().top;
    const inSight = all.findIndex((mark) => mark.getBoundingClientRect().top >= top);
    const at = all.indexOf(this.lit);
    const next = at >= 0 ? at + step : inSight < 0 ? 0 : step > 0 ? inSight : inSight - 1;
    this.lit?.classList.remove("rb-lit");
    this.lit = all[(next + all.length) % all.length];
    this.lit.classList.add("rb-lit");
    this.lit.scrollIntoView({ block: "nearest" });
    this.show();
  }

  show() {
    const all = this.query ? this.matches : [];
    setText(this.status, this.query ? TEXT.found(all.indexOf(this.lit) + 1, all.length) : "");
  }
}

// Whether the list follows its end. Once the user has scrolled up it stands still, and a button says how many lines have come.
class Follower {
  constructor(body, list) {
    this.body = body;
    this.list = list;
    this.follows = true;
    this.seen = new Map(); // by worker: the number of its lines when the list last stood at the end
    this.button = html("button", { type: "button", class: "rb-fresh", hidden: "" });
    this.button.addEventListener("click", () => {
      this.follows = true;
      this.toEnd();
      this.body.focus();
    });
    this.top = 0; // of the list, at the last look
    body.addEventListener("scroll", () => {
      const isAtEnd = body.scrollHeight - body.scrollTop - body.clientHeight <= AT_END;
      if (isAtEnd || body.scrollTop < this.top) this.follows = isAtEnd; // only a move up ends it: lines may be laid out anew
      this.top = body.scrollTop;
      if (isAtEnd) this.remember();
    });
  }

  toEnd() {
    this.body.scrollTop = this.body.scrollHeight;
    this.top = this.body.scrollTop;
    this.remember();
  }

  remember() {
    this.seen = new Map(Object.entries(this.files ?? {}).map(([id, { lines }]) => [Number(id), lines]));
    this.button.hidden = true;
  }

  show(files, blocks, wanted) {
    this.files = files;
    if (this.follows) {
      this.toEnd();
      return;
    }
    const isNew = ({ worker }, number) => number >= (this.seen.get(worker) ?? 0);
    const fresh = blocks.reduce((sum, block) => sum + shownLines(block, wanted).filter(([number]) => isNew(block, number)).length, 0);
    setText(this.button, fresh ? TEXT.fresh(fresh) : TEXT.end);
    this.button.hidden = false;
  }
}

// Draws the last lines, for a still picture.
function drawStill(frame, blocks, nameOf) {
  const lines = blocks.flatMap((block) => shownLines(block, WANTED.all).map(([, line, level]) => [block, line, level])).slice(-LAST);
  const names = Math.max(0, ...lines.map(([{ kind, worker }]) => (kind ? 0 : nameOf(worker).length))) * PER_LETTER + 22;
  const items = lines.map(([block, line, level], i) => {
    const y = ROW * i + 20;
    const kind = `rb-mono rb-level-${KINDS[level] ?? "plain"}`;
    const room = Math.floor((WIDEST - names) / PER_LETTER);
    const own = block.kind ? [label(12, y, line, `${kind} rb-told`)] : [label(12, y, nameOf(block.worker), "rb-mono rb-note"), label(names, y, shorten(line, room), kind)];
    return svg("g", {}, ...own);
  });
  frame.picture.replaceChildren(...items);
  frame.resize(WIDEST + 20, items.length ? ROW * items.length + 20 : 0);
}

// Returns the number of workers with a log, and of those that have been stopped since while others go on.
function countWorkers({ files, workers }) {
  const ids = Object.keys(files);
  const stopped = ids.filter((id) => workers[id]?.state === "left").length;
  return stopped < ids.length ? [ids.length - stopped, stopped] : [ids.length, 0];
}

const hintOf = (state, files) =>
  state === "record" ? [TEXT.record, ""] : Object.keys(files).length ? [TEXT.nothing, ""] : TEXT.noWorkers;

// Returns sentences above the lines: why a worker has none here, and where earlier ones are.
function remarksOf(files) {
  const rows = Object.values(files);
  const cut = rows.filter(({ skipped, path }) => skipped && path);
  const gone = rows.filter(({ missing }) => missing).map(({ missing }) => ({ words: `${missing[0].toUpperCase()}${missing.slice(1)}.` }));
  if (cut.length <= 2) return [...gone, ...cut.map(({ name, path }) => ({ words: TEXT.earlier(name, path) }))];
  return [...gone, { words: TEXT.earlierOfMany(cut.map(({ name }) => name).join(", "), cut[0].path) }];
}

export default panel("logs", TEXT.title, (frame) => {
  const list = html("div", { class: "rb-lines" });
  const empty = html("p", { class: "rb-none" });
  let last = null; // the view that was drawn
  const repaint = () => last && draw(last);
  const tabs = new Tabs(() => {
    following.follows = true;
    repaint();
  });
  const search = new Search(list, repaint);
  const following = new Follower(frame.body, list);
  const level = html("select", { "aria-label": TEXT.level, title: TEXT.level });
  level.append(...Object.entries(TEXT.levels).map(([value, text]) => html("option", { value }, text)));
  level.addEventListener("change", repaint);
  const save = html("button", { type: "button", class: "rb-save", title: TEXT.saveTip }, TEXT.save);
  save.addEventListener("click", () => {
    const name = tabs.chosen ? last.files[tabs.chosen].name : "workers";
    saveFile(`${name}.log`, "text/plain", shownText());
  });
  const tools = html("span", { class: "rb-tools" }, search.field, search.status, level, save);
  if (!window.isStill) {
    frame.head.after(html("div", { class: "rb-bar" }, tabs.node, tools));
    frame.fold(level, save);
    frame.top.remove();
    frame.picture.replaceWith(list);
    list.after(empty, following.button);
    frame.text = html("span", { class: "rb-hidden" });
    frame.body.before(frame.text);
  }
  const nameOf = (id) => last.files[id]?.name ?? `id ${id}`;

  // Returns the blocks of the chosen workers, [key, block] each, in order.
  const chosenBlocks = (lines) =>
    Object.entries(lines)
      .filter(([, { worker }]) => !tabs.chosen || String(worker) === tabs.chosen)
      .sort(([, a], [, b]) => a.order - b.order);

  const shownText = () =>
    lastBlocks(chosenBlocks(last.lines), MOST_LINES)
      .flatMap(([, block]) => shownLines(block, WANTED[level.value]).map(([, line]) => [block, line]))
      .map(([block, line]) => (block.kind ? `-- ${line} --\n` : tabs.chosen ? `${line}\n` : `${nameOf(block.worker)}: ${line}\n`))
      .join("");

  function draw(view) {
    last = view;
    const { files, lines } = view;
    const sum = sumLevels(Object.values(lines));
    const all = Object.values(sum).reduce((one, other) => one + other);
    const { stats } = TEXT;
    const bad = [["e", "error", "rb-bad"], ["w", "warning", "rb-warn"]].filter(([level]) => sum[level]);
    const first = bad.map(([level, noun, kind]) => countStat(sum[level], stats[noun], kind)); // a narrow head has room for one
    const [here, stopped] = countWorkers(view);
    const gone = stopped ? [[stopped, stats.stopped]] : [];
    frame.showStats(...first, countStat(here, stats.worker), ...gone, countStat(all, stats.line));
    frame.describe(TEXT.describe(all, sum.w, sum.e));
    const hasLines = Object.keys(lines).length > 0;
    if (hasLines || !(frame.isLive || frame.state.kind === "record")) frame.showHint(hasLines ? null : TEXT.noWorkers);
    else frame.hint.replaceChildren(...hintOf(frame.state.kind, files).map((text, i) => (i && text ? html("code", {}, text) : text)));
    if (window.isStill) {
      drawStill(frame, chosenBlocks(lines).map(([, block]) => block), nameOf);
      return;
    }
    frame.showRemarks(remarksOf(files));
    const errors = new Map();
    for (const block of Object.values(lines)) errors.set(block.worker, (errors.get(block.worker) ?? 0) + countLevels(block).e);
    tabs.offer(Object.fromEntries(Object.entries(files).map(([id, { name }]) => [id, name])), errors);
    const wanted = WANTED[level.value || "all"];
    const blocks = lastBlocks(chosenBlocks(lines), MOST_LINES);
    const { query } = search;
    const items = blocks.map(([key, block]) => ({ key, parts: [block, wanted, query, tabs.chosen], block }));
    join(list, items, (_, { block }) => blockNode(block, tabs.chosen ? "" : nameOf(block.worker), wanted, query));
    const inSight = blocks.map(([, block]) => block);
    const found = sumLevels(inSight);
    const isEmpty = hasLines && ![...wanted].some((one) => found[one]);
    setText(empty, isEmpty ? (TEXT.fits[level.value] ?? (tabs.chosen ? TEXT.nothingOf(nameOf(tabs.chosen)) : TEXT.nothing)) : "");
    search.show();
    following.show(files, inSight, wanted);
  }
  return draw;
});
