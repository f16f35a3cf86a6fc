// Shared by all panels: Python puts this text in front of a panel's own file, so browsers load one module.
// Strings from workers only ever become text nodes or attribute values; nothing here parses markup.
// The module is evaluated once per widget model, so its `live` state belongs to one panel.

const SVG = "http://www.w3.org/2000/svg";
const natural = new Intl.Collator("en", { numeric: true }).compare;

// ---- nodes

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

const label = (x, y, words, kind, more = {}) => svg("text", { x, y, class: kind, ...more }, String(words));
const tip = (words) => svg("title", {}, words);
const short = (words, most) => (words.length > most ? words.slice(0, Math.max(1, most - 1)) + "…" : words);
const tally = (count, noun, kind) => [count, count === 1 ? noun : `${noun}s`, kind];
const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

const fill = (node, words) => {
  if (node.textContent !== words) node.textContent = words;
};

function bytes(count) {
  if (count === null || count === undefined) return "–";
  const power = count < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(count) / 3));
  const value = count / 1000 ** power;
  return `${value.toFixed(power && value < 99.95 ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

// One child per key, in the order of the items, kept as long as its key is: nodes of unchanged rows are not touched.
// `parts` are the row objects a child is drawn from; patches keep unchanged rows identical.
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

// Places that stay: a key keeps its slot while it lives, a new key takes the first free one.
class Slots {
  constructor() {
    this.slots = [];
  }

  place(keys, most) {
    const wanted = new Set(keys);
    this.slots = this.slots.map((key) => (wanted.has(key) ? key : null));
    const used = this.slots.filter((key) => key !== null);
    if (this.slots.length - used.length > Math.max(8, used.length)) this.slots = used;
    for (const key of this.slots) wanted.delete(key);
    for (const key of wanted) {
      const free = this.slots.indexOf(null);
      if (free >= 0) this.slots[free] = key;
      else if (this.slots.length < most) this.slots.push(key);
      else break;
    }
    while (this.slots.length && this.slots.at(-1) === null) this.slots.pop();
    return this.slots.map((key, slot) => [key, slot]).filter(([key]) => key !== null);
  }
}

// ---- the view and its deltas

function patched(view, delta) {
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

// Follows one model: whole states that are newer than what is known, deltas that fit it exactly.
// After a gap it stands still until the next whole state.
class Live {
  constructor(model) {
    this.version = -1;
    this.view = {};
    this.ears = new Set();
    model.on("change:state", () => this.whole(model.get("state")));
    model.on("change:problem", () => this.tell());
    model.on("msg:custom", (message) => this.heard(message));
    this.whole(model.get("state"));
  }

  whole({ version, view }) {
    if (version <= this.version) return;
    this.version = version;
    this.view = view;
    this.tell();
  }

  heard({ kind, version, delta }) {
    if (kind !== "delta" || version !== this.version + 1) return;
    this.version = version;
    this.view = patched(this.view, delta);
    this.tell();
  }

  tell() {
    for (const ear of this.ears) ear();
  }
}

// ---- the frame around a picture

const MOST_HIGH = 460; // of its body, as in the style sheet

// Keys pressed in a panel are not the notebook's, where Enter would open the cell and a letter may delete it.
function keep(event) {
  const { key, ctrlKey, metaKey, altKey, shiftKey } = event;
  if (key !== "Escape" && !ctrlKey && !metaKey && !altKey && !shiftKey) event.stopPropagation();
}

class Frame {
  constructor(name, title) {
    this.stats = html("span", { class: "rb-stats" });
    this.legend = html("div", { class: "rb-legend" });
    this.head = html("div", { class: "rb-head" }, html("strong", {}, title), this.stats);
    this.problem = html("p", { class: "rb-problem", role: "alert", hidden: "" });
    this.hint = html("p", { class: "rb-hint" });
    this.text = svg("desc");
    this.top = svg("svg", { class: "rb-top", "aria-hidden": "true" });
    this.picture = svg("svg", { class: "rb-picture", role: "img" }, tip(title), this.text);
    this.body = html("div", { class: "rb-body", role: "group", tabindex: "0", "aria-label": `${title}, picture` });
    this.body.append(this.top, this.picture, this.hint);
    this.root = html("section", { class: `rb-panel rb-${name}`, "aria-label": title });
    this.root.append(this.head, this.problem, this.body, this.legend);
    this.root.addEventListener("keydown", keep);
    this.tallest = 0;
    this.ends = []; // called when the view goes
  }

  // [value, what, kind] each, in fixed places
  say(...stats) {
    const items = stats.map((stat, key) => ({ key, parts: stat, stat }));
    join(this.stats, items, (_, { stat: [value, what, kind = ""] }) =>
      html("span", { class: `rb-stat ${kind}` }, html("b", {}, String(value)), ` ${what}`),
    );
  }

  explain(items) {
    const draw = (mark) => svg("svg", { width: 18, height: 18, viewBox: "-9 -9 18 18", "aria-hidden": "true" }, mark);
    this.legend.replaceChildren(...items.map(([mark, word]) => html("span", {}, draw(mark), word)));
  }

  // Size of the picture; the panel grows and never shrinks, so what stands below it stays where it is. `exact`: the
  // picture itself may shrink inside.
  size(width, height, head = 0, exact = false) {
    this.tallest = Math.max(this.tallest, height);
    const tall = exact ? height : this.tallest;
    if (exact) set(this.body, { style: `min-height: ${Math.min(MOST_HIGH, this.tallest + head)}px` });
    set(this.top, { width, height: head, viewBox: `0 0 ${width} ${head}`, style: head ? null : "display:none" });
    set(this.picture, { width, height: tall, viewBox: `0 0 ${width} ${tall}` });
  }

  describe(words) {
    if (this.text.textContent !== words) this.text.textContent = words;
  }

  // What to do when there is nothing to draw: [text, code]
  empty(words) {
    const content = words ? [words[0], html("code", {}, words[1])] : [];
    if (Boolean(words) !== this.hint.childNodes.length > 0) this.hint.replaceChildren(...content);
  }
}

// The module's default export: `build(frame, model)` gives `draw(view, width)`, called at most once per animation frame.
const panel = (name, title, build) => () => {
  let live;
  return {
    initialize({ model }) {
      live = new Live(model);
    },
    render({ model, el }) {
      const eye = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
      const frame = new Frame(name, title);
      const draw = build(frame, model);
      let due = 0;
      const paint = () => {
        due = 0;
        const problem = model.get("problem");
        frame.problem.hidden = !problem;
        frame.problem.textContent = problem ? `This panel stopped: ${problem}. Run its cell again.` : "";
        if (live.version > 0 && frame.body.clientWidth > 0) draw(live.view, Math.max(360, frame.body.clientWidth));
      };
      const soon = () => (due ||= requestAnimationFrame(paint));
      const watch = new ResizeObserver(soon);
      const closed = () => {
        try {
          model.send({ kind: "closed", eye });
        } catch (error) {
          console.debug("nobody is told that a panel is closed, as its kernel has gone", error);
        }
      };
      frame.redraw = soon; // for what a reader chooses
      el.append(frame.root);
      live.ears.add(soon);
      watch.observe(frame.body);
      window.addEventListener("pagehide", closed);
      model.send({ kind: "opened", eye });
      soon();
      return () => {
        live.ears.delete(soon);
        watch.disconnect();
        cancelAnimationFrame(due);
        window.removeEventListener("pagehide", closed);
        closed();
        for (const end of frame.ends) end();
      };
    },
  };
};

// ---- workers as columns, the same in every panel that has them

const LEFT = 176;
const RIGHT = 76;

function columns(workers, width) {
  const list = Object.values(workers).sort((a, b) => a.id - b.id);
  const step = Math.min(230, Math.max(20, (width - LEFT - RIGHT) / Math.max(1, list.length)));
  const places = new Map(list.map((worker, i) => [worker.id, LEFT + step * (i + 0.5)]));
  const longest = Math.max(0, ...list.map((worker) => worker.name.length));
  const slanted = step < 16 + 6.8 * Math.min(longest, 14);
  return {
    list,
    step,
    slanted,
    x: (id) => places.get(id),
    head: slanted ? 78 : 44,
    width: Math.max(width, LEFT + step * list.length + RIGHT),
    key: `${width} ${list.map((worker) => `${worker.id} ${worker.name} ${worker.state}`).join()}`,
  };
}

// Worker names over their columns; `note` gives the small words below a name.
function drawHead(frame, cols, note) {
  const items = cols.list.map((worker) => ({ key: worker.id, parts: [cols.key, note(worker)], worker }));
  join(frame.top, items, (id, { worker }) => {
    const name = short(worker.name, cols.slanted ? 12 : Math.floor((cols.step - 8) / 6.8));
    const state = worker.state === "up" ? "" : ` · ${worker.state}`;
    const words = `${worker.name} (id ${id})${state} · ${note(worker)}`;
    const [x, kind] = [cols.x(id), `rb-worker rb-is-${worker.state}`];
    if (cols.slanted) {
      const at = { transform: `translate(${x - 2} ${cols.head - 8}) rotate(-48)` };
      return svg("g", {}, tip(words), label(0, 0, name + state, kind, at));
    }
    const below = label(x, 35, state ? worker.state : note(worker), `rb-note ${state ? kind : ""}`);
    return svg("g", { class: "rb-middle" }, tip(words), label(x, 19, name, kind), below);
  });
}

const leftOut = (workers) => {
  const count = Object.values(workers).reduce((sum, worker) => sum + worker.left_out, 0);
  return count ? [[count, "left out", "rb-warn"]] : [];
};

// A curve from one column to another with its arrow head drawn by hand: marker ids would clash between panels.
function arrow(x1, x2, y, rise, kind, room = 9) {
  const way = Math.sign(x2 - x1);
  const gap = Math.min(room, Math.abs(x2 - x1) / 4);
  const [from, to] = [x1 + way * gap, x2 - way * (gap + 2)];
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
