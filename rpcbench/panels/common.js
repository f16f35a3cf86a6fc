// The part that all panels share. Python puts this text in front of a panel's own file, so a browser loads one module.
// Guarantees
// - Strings from workers only become text nodes or attribute values; no code here parses markup.
// - A node is kept while its key and its rows stay the same, so focus and a button that is pressed are not lost.
// - A browser evaluates the module once per widget model, so variables at module level belong to one panel.

const SVG = "http://www.w3.org/2000/svg";
const natural = new Intl.Collator("en", { numeric: true }).compare;

// ---- nodes

// Sets attributes; null and undefined remove them.
function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) node.removeAttribute(name);
    else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
  }
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = set(document.createElementNS(SVG, name), attributes);
  node.append(...children);
  return node;
}

function html(name, attributes = {}, ...children) {
  const node = set(document.createElement(name), attributes);
  node.append(...children);
  return node;
}

const label = (x, y, text, kind, more = {}) => svg("text", { x, y, class: kind, ...more }, String(text));
const tip = (text) => svg("title", {}, text);
const shorten = (text, limit) => (text.length > limit ? text.slice(0, Math.max(1, limit - 1)) + "…" : text);
const countStat = (count, noun, kind) => [count, count === 1 ? noun : `${noun}s`, kind];
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

function formatBytes(count) {
  if (count === null || count === undefined) return "–";
  const power = count < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(count) / 3));
  const value = count / 1000 ** power;
  return `${value.toFixed(power && value < 99.95 ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

const twoDigits = (number) => String(number).padStart(2, "0");

// Returns a time of a minute or more as text: "1:05 min", "2:03 h"; exactly "1:05.25 min", "2:03:09.25 h".
function formatMinutes(seconds, isExact = false) {
  const units = isExact ? Math.round(seconds * 100) : Math.floor(seconds) * 100; // hundredths
  const [hours, minutes, rest] = [Math.floor(units / 360_000), Math.floor(units / 6000) % 60, units % 6000];
  const exact = `${twoDigits(Math.floor(rest / 100))}.${twoDigits(rest % 100)}`;
  if (hours) return `${hours}:${twoDigits(minutes)}${isExact ? `:${exact}` : ""} h`;
  return `${minutes}:${isExact ? exact : twoDigits(rest / 100)} min`;
}

// Returns a time as text, in the unit that fits `unit`: ticks of one axis have one unit.
function formatDuration(seconds, unit = seconds) {
  if (unit >= 60) return formatMinutes(seconds);
  if (unit >= 1) return `${+seconds.toPrecision(3)} s`;
  return unit >= 1e-3 ? `${+(seconds * 1e3).toPrecision(3)} ms` : `${+(seconds * 1e6).toPrecision(3)} µs`;
}

// Rounds a positive number up to 1, 1.2, 1.5, 2 … times a power of ten, so that the scale of an axis rarely changes.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

// Returns a number with three digits, so that it has about the same width in each step.
function formatFigure(value) {
  const size = Math.abs(value);
  return size === 0 || (size >= 1e-3 && size < 1e4) ? value.toPrecision(3) : value.toExponential(2);
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Returns the least and the largest value of a curve. With `most` no value counts for more than so many times the median: the
// first step of a training is far slower than the others, which would be a flat line.
function curveRange(values, most = Number.POSITIVE_INFINITY) {
  const known = values.filter(isNumber).sort((a, b) => a - b);
  return [known[0], Math.min(known.at(-1), most * known[known.length >> 1])];
}

// Makes the children of `parent` match `items`: one child per key, in the order of the items. A child is kept, untouched,
// while all its `parts` are the same. `parts` are the row objects that it is drawn from, which deltas keep identical while
// the rows do not change, and other values that it depends on.
function join(parent, items, make) {
  const before = parent.children_ ?? new Map();
  const after = new Map();
  const wanted = new Set(items.map(({ key }) => key));
  for (const [key, { node }] of before) if (!wanted.has(key)) node.remove();
  let last = null;
  for (const { key, parts, ...item } of items) {
    const old = before.get(key);
    const same = old && old.parts.length === parts.length && parts.every((part, i) => part === old.parts[i]);
    const node = same ? old.node : make(key, item);
    if (old && !same) old.node.replaceWith(node);
    if (!old) node.classList.add("rb-new");
    if (last ? last.nextSibling !== node : !old) last ? last.after(node) : parent.prepend(node);
    last = node;
    after.set(key, { node, parts });
  }
  parent.children_ = after;
}

// Makes these nodes the children of `parent`. Those that it has already stay in place, with the focus.
function setChildren(parent, nodes) {
  for (const node of [...parent.children]) if (!nodes.includes(node)) node.remove();
  nodes.forEach((node, i) => parent.children[i] !== node && parent.insertBefore(node, parent.children[i] ?? null));
}

// Scrolls to a cell. A front end that listens to the event, such as the JupyterLab extension, does it and calls preventDefault().
// Otherwise the cell is found by its prompt number, in the panel's notebook or the only one of the page. Returns false if no cell
// has the number any more.
function revealCell(panel, { cell, number }) {
  const event = new CustomEvent("rpcbench:reveal", { bubbles: true, cancelable: true, detail: { cell, number } });
  if (!panel.dispatchEvent(event)) return true;
  const own = panel.closest(".jp-Notebook");
  const isAlone = document.querySelectorAll(".jp-Notebook").length < 2;
  const prompts = own || isAlone ? [...(own ?? document).querySelectorAll(".jp-InputPrompt")] : [];
  const found = prompts.find((one) => one.textContent.trim() === `[${number}]:`)?.closest(".jp-Cell");
  if (!found) return false;
  found.scrollIntoView({ block: "center" });
  found.animate([{ backgroundColor: "rgb(230 159 0 / 35%)" }, {}], 1500);
  return true;
}

// Gives keys slots: a key keeps its slot while it is in use, and a new key takes the first free slot. Keys move
// together only if more than 8 slots, and more slots than are used, are free.
class Slots {
  constructor() {
    this.slots = [];
  }

  // Returns [key, slot] for each key that has a slot; there are at most `limit` slots.
  place(keys, limit) {
    const wanted = new Set(keys);
    this.slots = this.slots.map((key) => (wanted.has(key) ? key : null));
    const used = this.slots.filter((key) => key !== null);
    if (this.slots.length - used.length > Math.max(8, used.length)) this.slots = used;
    for (const key of this.slots) wanted.delete(key);
    for (const key of wanted) {
      const free = this.slots.indexOf(null);
      if (free >= 0) this.slots[free] = key;
      else if (this.slots.length < limit) this.slots.push(key);
      else break;
    }
    while (this.slots.length && this.slots.at(-1) === null) this.slots.pop();
    return this.slots.map((key, slot) => [key, slot]).filter(([key]) => key !== null);
  }
}

// Lets the browser save a file that is made here.
function saveFile(name, type, text) {
  const link = html("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// ---- the view and its deltas

// Returns the view after a delta. Sections and rows that the delta does not change are the same objects as before.
function applyDelta(view, delta) {
  const next = { ...view };
  for (const [section, change] of Object.entries(delta)) {
    if (change === null) {
      delete next[section];
      continue;
    }
    const rows = { ...next[section] };
    for (const key of change.drop) delete rows[key];
    next[section] = Object.assign(rows, change.set);
  }
  return next;
}

const REPORT_MS = 1000;
const LATE_MS = 1000; // lateness of a message that the kernel is told
const DRIFT = 0.01; // by which the least delay grows: in an hour it follows a clock that was set by 36 seconds

// The clock of the kernel, as all panels of a page see it: the least delay of a message so far tells how far the two clocks are
// apart.
class KernelClock {
  constructor(now = Date.now) {
    this.now = now;
    this.offset = Infinity;
    this.askedAt = now();
  }

  // Returns a time of the kernel in milliseconds, that of a message which has just come, by the page's clock.
  pageTime(at) {
    const now = this.now();
    this.offset = Math.min(this.offset + DRIFT * (now - this.askedAt), now - at);
    this.askedAt = now;
    return at + this.offset;
  }
}

const CLOCK = (globalThis.rpcbenchClock ??= new KernelClock());

// Follows the state of one model: accepts whole states that are newer than its own, and the delta of the next version.
// After a gap in the versions it ignores deltas until the next whole state. `heardAt` is when the page last handled a message on
// what the present world is: a whole state, a delta, or a beat, which says that nothing has changed. `truthAt` is the page's time
// at which the kernel knew the picture to be true: a page under load handles messages late. So that the kernel waits for such a
// page, it is sent the version that the page has, how long that took to draw, and how late the last message was: at most once a
// second, after a new picture, or where the lateness begins or ends.
class LiveView {
  constructor(model) {
    this.model = model;
    this.heardAt = this.truthAt = Date.now();
    this.reported = { version: -1, at: 0, late: 0 };
    this.drawing = 0; // milliseconds that the last picture took
    this.late = 0; // milliseconds that the last message with a time was under way
    this.born = model.widget_manager?.kernel?.id; // of the kernel that has the model
    this.version = -1;
    this.view = {};
    this.listeners = new Set();
    model.on("change:state", () => this.onState(model.get("state")));
    model.on("change:problem", () => this.notify());
    model.on("change:phase", () => this.notify());
    model.on("change:cluster", () => this.notify());
    this.isCut = false;
    model.on("comm_live_update", () => {
      this.isCut = true; // JupyterLab says this when the kernel restarts
      this.notify();
    });
    model.on("msg:custom", (message) => this.onMessage(message));
    this.onState(model.get("state"));
  }

  // Notes that the kernel knew the picture to be true `at` a time of its clock.
  confirm(at) {
    this.heardAt = Date.now();
    const sentAt = at === undefined ? this.heardAt : CLOCK.pageTime(1000 * at);
    this.truthAt = Math.max(this.truthAt, sentAt);
    this.late = Math.round(this.heardAt - sentAt);
    this.reportVersion();
  }

  reportVersion() {
    const { version, late } = this;
    const isNews = version > this.reported.version || late > LATE_MS !== this.reported.late > LATE_MS;
    if (!isNews || Date.now() - this.reported.at < REPORT_MS) return;
    this.reported = { version, late, at: Date.now() };
    this.model.send({ kind: "seen", version, milliseconds: Math.round(this.drawing), late });
  }

  onState({ version, view }) {
    if (version >= this.version) this.heardAt = Date.now();
    if (version <= this.version) return;
    this.version = version;
    this.view = view;
    this.notify();
  }

  onMessage({ kind, version, delta, at }) {
    if (kind === "beat" && version === this.version) this.confirm(at);
    if (kind !== "delta" || version !== this.version + 1) return;
    this.version = version;
    this.view = applyDelta(this.view, delta);
    this.confirm(at);
    this.notify();
  }

  notify() {
    for (const listener of this.listeners) listener();
  }
}

// ---- whether a panel is live

// Returns "there", "cut" while there is no connection, "restarted" or "gone": what a front end says of the panel's kernel.
// `manager` is the widget manager; only JupyterLab's and Notebook's have a kernel. `born` is the id of the kernel that made the
// panel, and `isDead` tells whether the panel's comm has lost its kernel.
function kernelState(manager, born, isDead) {
  if (!manager || !("kernel" in manager)) return isDead ? "gone" : "there";
  const { kernel } = manager;
  if (!kernel || kernel.isDisposed || kernel.status === "dead") return "gone";
  if (isDead || (born && kernel.id !== born)) return "restarted";
  return ["connecting", "disconnected"].includes(kernel.connectionStatus) ? "cut" : "there";
}

// The front end's own model that has this state; only JupyterLab's and Notebook's managers list theirs.
const findModel = (manager, state) => [...(manager?._modelsSync?.values() ?? [])].find((one) => one.get("state") === state);

// Whether the model with this state was read from a saved notebook, and never had a kernel. JupyterLab's manager knows.
const isSaved = (manager, state) => findModel(manager, state)?.comm_live === false;

// Has the kernel's messages handled by the front end's base class. anywidget's class refuses them all if the page was kept from
// running for two seconds while it made the model.
function receiveAgain(manager, state) {
  const model = findModel(manager, state);
  const base = model && Object.getPrototypeOf(Object.getPrototypeOf(model));
  if (base?._handle_comm_msg) model.comm?.on_msg((message) => base._handle_comm_msg.call(model, message));
}

// Returns a time of day, of 24 hours: in all panels it has this form.
const clockTime = (seconds) => {
  const at = new Date(1000 * seconds);
  return `${twoDigits(at.getHours())}:${twoDigits(at.getMinutes())}`;
};

const secondsTime = (seconds) => `${clockTime(seconds)}:${twoDigits(new Date(1000 * seconds).getSeconds())}`;

const LATE_SECONDS = 2; // age of a picture from which on the chip says it

const formatAge = (seconds) => (seconds < 120 ? `${Math.floor(seconds)} s` : `${Math.floor(seconds / 60)} min`);

// Returns the state of a panel: its `kind`, the text of its chip, and the chip's tooltip. `phase` is the trait of the model,
// `age` that of the picture in seconds.
function panelState(phase, kernel, problem, isPaused, age = 0) {
  // A kernel that restarts stops its cluster first: its restart tells more.
  const over = problem ? "failed" : isPaused ? "paused" : age > LATE_SECONDS ? "late" : "live";
  const ended = kernel !== "there" ? kernel : phase?.name === "stopped" ? "stopped" : over;
  const kind = ["record", "simulated"].includes(phase?.name) ? phase.name : ended;
  const [text, title] = STRINGS.common.states[kind];
  const more = { stopped: () => ` ${clockTime(phase.at)}`, late: () => ` ${formatAge(age)} ago` }[kind]?.() ?? "";
  return { kind, text: text + more, title };
}

// ---- the frame around a picture

const NARROW_FRAME = 560; // width of a panel in pixels, below which its controls stand in a menu
const TINY_FRAME = 300; // width below which the chip of a live panel is a dot
const LEAST_PICTURE = 240; // of a picture
const MAX_HEIGHT = 460; // of the body in pixels, as in common.css
const NOTE_MS = 6000; // how long a note stays
const FIRST_PATIENCE_MS = 3000; // how long a panel waits for a silent kernel before it asks again
const MOST_PATIENCE_MS = 30000;
// Controls that need the kernel: the frame disables them while the panel is not live. A panel's own have the class rb-kernel.
const REACHES = ".rb-kernel, .rb-do";
const CAMERA = "M2 5h3l1.2-2h3.6L11 5h3v8H2Z M8 6.4a2.4 2.4 0 1 0 .01 0Z";

// Keeps keys that a user presses in a panel from the notebook, where Enter edits the cell and a letter may delete it. Escape
// and keys with a modifier still reach the notebook.
function stopPlainKeys(event) {
  const { key, ctrlKey, metaKey, altKey, shiftKey } = event;
  if (key !== "Escape" && !ctrlKey && !metaKey && !altKey && !shiftKey) event.stopPropagation();
}

// Puts a text into a search field, as if the user had typed it.
function typeSearch(field, text) {
  field.value = text;
  field.dispatchEvent(new Event("input"));
}

// A panel's frame: its head line with a chip, figures and tools, the help, the error that stopped it, the picture, a hint, and
// the legend. `state` is that of `panelState`, and `at`, until when the picture is true, in seconds since 1970; `isLive` tells whether a click on a control of the panel reaches the kernel.
// A narrow frame has one line for its head: figures without room are left out there, and controls are in a menu behind them, which
// has all figures. Its legend is shown with the help.
class Frame {
  constructor(name, title) {
    const words = STRINGS.common;
    this.state = { kind: "live" };
    this.chip = html("button", { type: "button", class: "rb-chip" });
    this.stats = html("span", { class: "rb-stats" });
    this.legend = html("div", { class: "rb-legend" });
    const said = html("span", { "aria-live": "polite" }, this.chip); // screen readers hear that the panel is no longer live
    this.owner = html("span", { class: "rb-cluster", hidden: "" }); // which cluster it is, where there are several
    this.sought = html("button", { type: "button", class: "rb-sought", title: words.clearSearch, hidden: "" });
    this.head = html("div", { class: "rb-head" }, html("strong", {}, title), this.owner, said, this.sought, this.stats);
    const tool = (kind, words, sign) =>
      html("button", { type: "button", class: `rb-tool ${kind}`, "aria-label": words, title: words }, sign);
    const lens = svg("svg", { width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: CAMERA }));
    this.asker = tool("rb-asker", words.help, "?");
    this.camera = tool("rb-camera rb-kernel", words.camera, lens);
    this.tools = html("span", { class: "rb-frame-tools" }, this.asker, this.camera); // `panel` puts them behind the panel's own
    this.help = html("p", { class: "rb-help" }, STRINGS[name]?.help ?? "");
    this.asker.hidden = !this.help.textContent;
    this.remarks = html("ul", { class: "rb-remarks" });
    this.note = html("p", { class: "rb-said-once", "aria-live": "polite" });
    this.problem = html("p", { class: "rb-problem", role: "alert", hidden: "" });
    this.hint = html("p", { class: "rb-hint" });
    this.text = svg("desc");
    this.top = svg("svg", { class: "rb-top", "aria-hidden": "true" });
    this.picture = svg("svg", { class: "rb-picture", role: "img" }, tip(title), this.text);
    this.body = html("div", { class: "rb-body", role: "group", tabindex: "0", "aria-label": `${title}, picture` });
    this.body.append(this.top, this.picture, this.hint);
    this.root = html("section", { class: `rb-panel rb-${name}`, "aria-label": title });
    this.root.append(this.head, this.remarks, this.note, this.help, this.problem, this.body, this.legend);
    this.root.addEventListener("keydown", stopPlainKeys);
    this.asker.addEventListener("click", () => this.toggleHelp());
    this.toggleHelp(false);
    this.figures = html("p", { class: "rb-all-stats" }); // all of them, in the menu
    this.folding = []; // controls that are in the menu while the frame is narrow
    this.searches = []; // search fields among them
    this.sought.addEventListener("click", () => this.searches.forEach((field) => typeSearch(field, "")));
    this.isNarrow = false;
    this.menu = new Menu(this.root, words.menu(title), () => [this.figures]);
    this.menu.opener.hidden = true;
    this.steady = [this.head]; // parts above the picture that grow and never shrink, so that it stands still
    this.tallest = 0;
    this.resize(0, 0);
    this.cleanups = [() => clearTimeout(this.noteTimer), () => this.menu.remove()]; // functions to call when the view is removed
  }

  get isLive() {
    return ["live", "late", "paused"].includes(this.state.kind);
  }

  // The time of the picture, in seconds since 1970, up to which ages and times count: it stands still where the picture does. null
  // where none is known, as in a record.
  get present() {
    const { kind, at } = this.state;
    if (kind === "live") this.shownAt = Date.now() / 1000;
    else if (kind === "late") this.shownAt = at; // it may be of something that has ended
    return kind === "record" ? null : (this.shownAt ?? null);
  }

  // Has controls in the menu while the frame is narrow.
  fold(...nodes) {
    this.folding.push(...nodes);
    for (const field of nodes.flatMap((node) => [node, ...node.querySelectorAll("input")]).filter(({ type }) => type === "search")) {
      this.searches.push(field);
      field.addEventListener("input", () => this.showSought());
    }
  }

  // Shows the text of a search field that is in the menu, as it hides what does not match; a click clears it.
  showSought() {
    const text = (this.isNarrow && this.searches.map(({ value }) => value).find(Boolean)) || "";
    this.sought.hidden = !text;
    setText(this.sought, `${shorten(text, 16)} ×`);
  }

  // Makes the frame narrow or wide. The place of a control that is in the menu is kept by a comment.
  fit(width) {
    const isNarrow = width < NARROW_FRAME;
    if (width > 0 && isNarrow !== this.isNarrow) {
      this.isNarrow = isNarrow;
      this.root.classList.toggle("rb-small", isNarrow);
      this.menu.close(false);
      this.menu.opener.hidden = !isNarrow;
      for (const node of [...this.folding, this.tools]) {
        if (isNarrow) node.replaceWith((node.place_ = document.createComment("")));
        if (isNarrow) this.menu.make().append(node);
        else node.place_.replaceWith(node);
      }
    }
    this.showSought();
    this.root.classList.toggle("rb-tiny", width > 0 && width < TINY_FRAME);
    this.menu.place();
  }

  // Keeps the heights that the steady parts have had in this width.
  settle(width) {
    if (window.isStill) return;
    if (width !== this.settled) for (const node of this.steady) set(node, { style: (node.tall_ = null) });
    this.settled = width;
    for (const node of this.steady) {
      const tall = node.offsetHeight;
      if (tall > (node.tall_ ?? 0)) set(node, { style: `box-sizing: border-box; min-height: ${(node.tall_ = tall)}px` });
    }
  }

  toggleHelp(isOpen = this.help.hidden) {
    this.help.hidden = !isOpen;
    this.root.classList.toggle("rb-helped", isOpen);
    set(this.asker, { "aria-expanded": isOpen });
  }

  // Shows what has come of a click, for a moment.
  say(text) {
    setText(this.note, text);
    clearTimeout(this.noteTimer);
    this.noteTimer = setTimeout(() => setText(this.note, ""), NOTE_MS);
  }

  // Shows the panel's state in the chip, and disables the controls that need the kernel while it is not live.
  showState(state) {
    this.state = state;
    setText(this.chip, state.text);
    const label = `${state.text}. ${state.title}`;
    set(this.chip, { class: `rb-chip rb-chip-${state.kind}`, title: state.title, "aria-label": label });
    set(this.chip, { "aria-pressed": this.isLive ? state.kind === "paused" : null });
    this.chip.disabled = !this.isLive;
  }

  // Says which cluster the panel is of; "" where there is one.
  nameCluster(name) {
    this.owner.hidden = !name;
    setText(this.owner, name && STRINGS.common.ofCluster(name));
    set(this.owner, { title: STRINGS.common.ofClusterTip(name) });
  }

  lock() {
    for (const node of this.root.querySelectorAll(REACHES)) {
      const off = !this.isLive && !(node === this.camera && this.canKeep);
      if (off && !node.disabled) node.disabled = node.isLocked_ = true;
      else if (!off && node.isLocked_) node.disabled = node.isLocked_ = false;
    }
  }

  // Shows figures, [value, text, CSS class] each, in fixed places.
  showStats(...stats) {
    setText(this.figures, stats.map(([value, text]) => `${value} ${text}`.trim()).join(", "));
    const items = stats.map((stat, key) => ({ key, parts: stat, stat }));
    join(this.stats, items, (_, { stat: [value, text, kind = "", title = null] }) =>
      html("span", { class: `rb-stat ${kind}`, title }, html("b", {}, String(value)), ` ${text}`),
    );
  }

  // Shows sentences on what is in the picture, rows with `words`.
  showRemarks(rows) {
    const items = Object.values(rows).map(({ words }) => ({ key: words, parts: [] }));
    join(this.remarks, items, (words) => html("li", {}, words));
  }

  // Shows the legend, [mark, text] each.
  showLegend(items) {
    const draw = (mark) => svg("svg", { width: 18, height: 18, viewBox: "-9 -9 18 18", "aria-hidden": "true" }, mark);
    this.legend.replaceChildren(...items.map(([mark, text]) => html("span", {}, draw(mark), text)));
  }

  // Sets the size of the picture. The panel grows and never shrinks, so the page below it does not move. With `exact` the
  // picture may shrink, and the body keeps its height.
  resize(width, height, head = 0, exact = false) {
    this.tallest = Math.max(this.tallest, height);
    const tall = exact ? height : this.tallest;
    if (exact) set(this.body, { style: `min-height: ${Math.min(MAX_HEIGHT, this.tallest + head)}px` });
    set(this.top, { width, height: head, viewBox: `0 0 ${width} ${head}`, style: head ? null : "display:none" });
    set(this.picture, { width, height: tall, viewBox: `0 0 ${width} ${tall}` });
    set(this.hint, { style: head ? `top: ${head}px` : null }); // the names above the columns stay in sight
  }

  // Sets the picture's description, which screen readers read.
  describe(text) {
    if (this.text.textContent !== text) this.text.textContent = text;
  }

  // Shows a hint, [text, code], if there is nothing to draw; null removes it. A panel that is not live advises nothing.
  showHint(hint) {
    const past = STRINGS.common.nothing[this.state.kind] ?? STRINGS.common.nothing.stopped;
    const [text, code] = !hint ? ["", ""] : this.isLive ? hint : [past, ""];
    if (this.hint.textContent !== text + code) this.hint.replaceChildren(text, ...(code ? [html("code", {}, code)] : []));
  }
}

// Returns the rows or pixels to leave room for: `least` at first, so that the page below does not move as a live panel grows.
const roomFor = (size, least) => (window.isStill ? size : Math.max(least, size));

const WIDGET = "application/vnd.jupyter.widget-view+json";

// Returns the outputs of the notebook's code cells, as lists; none in front ends that do not show pages their model.
const outputsOf = (manager) => [...(manager?.context?.model?.cells ?? [])].map((cell) => cell.outputs).filter(Boolean);

// Adds an output below the panel with this model, or below the last output if no cell shows it. Returns whether that worked.
function leave(manager, id, data) {
  const all = outputsOf(manager).filter(({ length }) => length);
  const shows = (outputs) =>
    Array.from({ length: outputs.length }, (_, i) => outputs.get(i)).some((output) => output.data?.[WIDGET]?.model_id === id);
  const found = all.find(shows) ?? all.at(-1);
  found?.add({ output_type: "display_data", data, metadata: {} });
  return Boolean(found);
}

// Returns the module's default export. `build(frame, model)` runs once per browser view and returns `draw(view, width)`, which
// runs at most once per animation frame.
const panel = (name, title, build) => () => {
  let live;
  return {
    initialize({ model }) {
      live = new LiveView(model);
    },
    render({ model, el }) {
      const viewId = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
      const frame = new Frame(name, title);
      const draw = build(frame, model);
      frame.head.append(frame.menu.opener, frame.tools);
      let pending = 0; // the request of an animation frame
      let paused = null; // the view that is shown while the user has paused the panel
      const state = () => {
        const isDead = live.isCut || isSaved(model.widget_manager, model.get("state"));
        const kernel = kernelState(model.widget_manager, live.born, isDead);
        frame.canKeep = kernel === "there"; // a stopped cluster's panel and a record can still leave a snapshot
        const about = panelState(model.get("phase"), kernel, model.get("problem"), paused !== null, (Date.now() - live.truthAt) / 1000);
        return { ...about, at: live.truthAt / 1000 };
      };
      const paint = () => {
        pending = 0;
        const problem = model.get("problem");
        frame.problem.hidden = !problem;
        frame.problem.textContent = problem ? `This panel stopped: ${problem}. Run its cell again.` : "";
        frame.nameCluster(model.get("cluster") ?? "");
        frame.showState(state());
        const view = frame.state.kind === "paused" ? paused : live.view;
        if (live.version > 0 || problem) frame.root.classList.add("rb-drawn"); // JupyterLab's extension waits for it
        frame.fit(frame.root.clientWidth);
        if (live.version > 0 && frame.body.clientWidth > 0) {
          const began = performance.now();
          draw(view, Math.max(LEAST_PICTURE, frame.body.clientWidth));
          frame.settle(frame.root.clientWidth);
          live.drawing = performance.now() - began;
        }
        frame.lock();
      };
      const schedule = () => (pending ||= requestAnimationFrame(paint));
      const observer = new ResizeObserver(schedule);
      const sendClosed = () => {
        try {
          model.send({ kind: "closed", eye: viewId });
        } catch (error) {
          console.debug("the kernel is gone and cannot be told that a panel was closed", error);
        }
      };
      const open = () => model.send({ kind: "opened", eye: viewId }); // the kernel answers with the whole state
      let [asked, patience] = [Date.now(), FIRST_PATIENCE_MS];
      // Asks the kernel again, more and more rarely, while it is silent.
      const askAgain = () => {
        if (Date.now() - asked < patience) return;
        [asked, patience] = [Date.now(), Math.min(MOST_PATIENCE_MS, 2 * patience)];
        receiveAgain(model.widget_manager, model.get("state"));
        open();
      };
      const watch = setInterval(() => {
        const { kind, text } = state();
        if (el.isConnected && !el.firstChild) el.append(frame.root); // anywidget has emptied it
        if (kind === "live") live.reportVersion(); // else there may be nobody to send to
        if (Date.now() - live.heardAt > 1000 * LATE_SECONDS && kind === "late") askAgain();
        else patience = FIRST_PATIENCE_MS;
        if (text !== frame.state.text || kind !== frame.state.kind) schedule();
      }, 1000);
      const hear = ({ kind, eye, model: id, data }) => {
        if (kind === "snapshot" && eye === viewId && leave(model.widget_manager, id, data)) frame.say(STRINGS.common.kept);
      };
      frame.chip.addEventListener("click", () => {
        paused = paused === null ? live.view : null;
        schedule();
      });
      frame.camera.addEventListener("click", () => {
        const page = outputsOf(model.widget_manager).length > 0;
        model.send({ kind: "snapshot", eye: viewId, page });
        if (!page) frame.say(STRINGS.common.kept); // the kernel adds it to the output of the cell
      });
      frame.redraw = schedule; // for the panel's own controls
      el.replaceChildren(frame.root); // anywidget may draw a view twice
      model.on("msg:custom", hear);
      live.listeners.add(schedule);
      observer.observe(frame.body);
      window.addEventListener("pagehide", sendClosed);
      open();
      schedule();
      return () => {
        live.listeners.delete(schedule);
        model.off?.("msg:custom", hear);
        clearInterval(watch);
        observer.disconnect();
        cancelAnimationFrame(pending);
        window.removeEventListener("pagehide", sendClosed);
        sendClosed();
        for (const cleanup of frame.cleanups) cleanup();
      };
    },
  };
};

// ---- workers as columns, equal in all panels that have them

const LEFT = 176; // pixels beside the columns
const RIGHT = 76;
const LETTER = 7.4; // width of a character of a name, on average

// Returns what stands behind the name of a worker that is not up, and the name with it as a slanted head has it.
const stateAfter = ({ state }) => (state === "up" ? "" : ` · ${STRINGS.common.members[state] ?? state}`);
const slantedName = (worker) => shorten(worker.name, Math.min(12, 18 - stateAfter(worker).length)) + stateAfter(worker);

// Returns the geometry of the columns; `key` changes with anything that moves or redraws all of them.
function columns(workers, width, left = LEFT, right = RIGHT) {
  const list = Object.values(workers).sort((a, b) => a.id - b.id);
  const step = Math.min(230, Math.max(18, (width - left - right) / Math.max(1, list.length)));
  const centers = new Map(list.map((worker, i) => [worker.id, left + step * (i + 0.5)]));
  const longest = Math.max(0, ...list.map((worker) => worker.name.length));
  const slanted = step < 16 + LETTER * Math.min(longest, 14);
  const most = Math.max(0, ...list.map((worker) => slantedName(worker).length)); // 10 characters have room in any case
  return {
    list,
    step,
    slanted,
    x: (id) => centers.get(id),
    head: slanted ? 78 + Math.ceil(Math.max(0, most - 10) * LETTER * 0.82) : 44,
    width: Math.max(width, left + step * list.length + right),
    end: left + step * list.length + right - 12, // of the texts behind the columns
    key: `${width} ${list.map((worker) => `${worker.id} ${worker.name} ${worker.state}`).join()}`,
  };
}

// Draws the workers' names above their columns; `note(worker)` returns the small text below a name, and `more` the tooltip's.
function drawHead(frame, cols, note, more = note) {
  const items = cols.list.map((worker) => ({ key: worker.id, parts: [cols.key, note(worker)], worker }));
  join(frame.top, items, (id, { worker }) => {
    const name = shorten(worker.name, Math.floor((cols.step - 8) / LETTER));
    const state = stateAfter(worker);
    const title = `${worker.name} (id ${id})${state} · ${more(worker)}`;
    const [x, kind] = [cols.x(id), `rb-worker rb-is-${worker.state}`];
    if (cols.slanted) {
      const at = { transform: `translate(${x - 2} ${cols.head - 8}) rotate(-48)` };
      return svg("g", {}, tip(title), label(0, 0, slantedName(worker), kind, at));
    }
    const below = label(x, 35, state ? state.slice(3) : note(worker), `rb-note ${state ? kind : ""}`);
    return svg("g", { class: "rb-middle" }, tip(title), label(x, 19, name, kind), below);
  });
}

// Returns the figure of events that workers dropped and did not report, if there are any.
const leftOutStats = (workers) => {
  const count = Object.values(workers).reduce((sum, worker) => sum + worker.left_out, 0);
  return count ? [[count, "left out", "rb-warn"]] : [];
};

// Draws a curve with an arrow head from one column to another. The head is a path of its own, as the ids of SVG markers would
// clash between the panels of a page.
function arrow(x1, x2, y, rise, kind, room = 9) {
  const direction = Math.sign(x2 - x1);
  const gap = Math.min(room, Math.abs(x2 - x1) / 4);
  const [from, to] = [x1 + direction * gap, x2 - direction * (gap + 2)];
  const curve = `M${from} ${y} Q${(from + to) / 2} ${y - 2 * rise} ${to} ${y}`;
  const angle = (Math.atan2(2 * rise, (to - from) / 2) * 180) / Math.PI;
  const tipAt = `translate(${to} ${y}) rotate(${angle})`;
  return svg(
    "g",
    { class: kind },
    svg("path", { class: "rb-curve", d: curve }),
    svg("path", { class: "rb-tip", d: "M3 0 L-4 -3 L-4 3 Z", transform: tipAt }),
  );
}
