// Draws a panel once, where no browser is: the part of a document that the panels' drawing code uses while it draws, and
// markup of the result, for the `foreignObject` of an SVG image. Evaluated before a panel's own code; see telemetry/svg.py.
// Guarantees
// - The markup is well-formed XML. Only this file escapes text.
// - It has no controls, tooltips, attributes for readers of the live page, or more than `MOST` rows of a table.
// - The height is the one that a browser will need or a little more, by the widths of the letters of a wide font.

globalThis.still = (() => {
  const [WIDE, ROOM] = [800, 760]; // widths of the picture and of its text, in pixels
  const [MOST, TALLEST] = [60, 1480]; // rows of a table; height of a drawing
  const [LETTER, THIN, GAP, LINE, ROW, DENSE] = [8.2, 5, 16, 20, 46, 30]; // widths; heights of a line, and of rows in still.css
  const [THIN_ONES, BOLD] = [/[\s!'(),.:;I[\]fijlrt|]/g, 1.15];
  const CONTROLS = ["title", "desc", "caption", "button", "input", "select", "label"];
  // Of no use without a pointer, a screen reader, or a past minute.
  const UNSHOWN = ["rb-hidden", "rb-detail", "rb-grip", "rb-band", "rb-curves", "rb-ear", "rb-face", "rb-stripe"];
  const WITHOUT = /^(data-|aria-|role$|tabindex$|title$|type$|scope$)/;
  const BLOCKS = ["div", "p", "ul", "li", "pre", "figure", "table", "section"];

  class Element {
    constructor(name) {
      Object.assign(this, { name, nodes: [], attributes: {}, parentNode: null, value: "", dataset: {} });
    }

    // ---- attributes
    getAttribute(name) {
      return this.attributes[name] ?? null;
    }

    setAttribute(name, value) {
      this.attributes[name] = String(value);
    }

    removeAttribute(name) {
      delete this.attributes[name];
    }

    get classes() {
      return (this.attributes.class ?? "").split(" ").filter((name) => name && name !== "rb-new");
    }

    get classList() {
      const write = (names) => this.setAttribute("class", [...new Set(names)].join(" "));
      const remove = (name) => write(this.classes.filter((one) => one !== name));
      const add = (name) => write([...this.classes, name]);
      return { add, remove, toggle: (name, isOn) => (isOn ? add : remove)(name) };
    }

    get hidden() {
      return "hidden" in this.attributes;
    }

    set hidden(isHidden) {
      if (isHidden) this.setAttribute("hidden", "");
      else this.removeAttribute("hidden");
    }

    // ---- the tree
    get children() {
      return this.nodes.filter((node) => node instanceof Element);
    }

    get firstChild() {
      return this.nodes[0] ?? null;
    }

    get nextSibling() {
      const all = this.parentNode?.nodes ?? [];
      return all[all.indexOf(this) + 1] ?? null;
    }

    get textContent() {
      return this.nodes.map((node) => node.textContent ?? node).join("");
    }

    set textContent(text) {
      this.replaceChildren(...(text === "" ? [] : [text]));
    }

    insertBefore(node, next) {
      if (node === next) return;
      node.remove?.();
      this.nodes.splice(next ? this.nodes.indexOf(next) : this.nodes.length, 0, node instanceof Element ? node : String(node));
      if (node instanceof Element) node.parentNode = this;
    }

    append(...nodes) {
      for (const node of nodes) this.insertBefore(node, null);
    }

    prepend(...nodes) {
      const first = this.firstChild;
      for (const node of nodes) this.insertBefore(node, first);
    }

    before(...nodes) {
      for (const node of nodes) this.parentNode.insertBefore(node, this);
    }

    after(...nodes) {
      const next = this.nextSibling;
      for (const node of nodes) this.parentNode.insertBefore(node, next);
    }

    replaceWith(...nodes) {
      this.before(...nodes);
      this.remove();
    }

    replaceChildren(...nodes) {
      for (const node of this.children) node.parentNode = null;
      this.nodes = [];
      this.append(...nodes);
    }

    remove() {
      const all = this.parentNode?.nodes;
      all?.splice(all.indexOf(this), 1);
      this.parentNode = null;
    }

    // ---- what only a browser has: a size that is enough for all rows, and a user
    get clientWidth() {
      return WIDE;
    }

    get clientHeight() {
      return TALLEST;
    }

    querySelectorAll() {
      return [];
    }

    contains() {
      return false;
    }

    addEventListener() {}
  }
  Object.assign(Element.prototype, { scrollTop: 0, scrollHeight: TALLEST, offsetWidth: 0 });

  const make = (name) => new Element(name);
  const frames = [];
  const idle = () => 0;
  class ResizeObserver {
    observe() {}
    disconnect() {}
  }
  Object.assign(globalThis, {
    ResizeObserver,
    document: { createElementNS: (_, name) => make(name), createElement: make, activeElement: null },
    window: { isStill: true, addEventListener: idle, removeEventListener: idle },
    performance: { now: () => 0 },
    requestAnimationFrame: (draw) => frames.push(draw),
    ...{ setTimeout: idle, clearTimeout: idle, setInterval: idle, clearInterval: idle, cancelAnimationFrame: idle },
    Intl: { Collator: class { compare = byNumbers } },
  });

  // Compares texts as `Intl.Collator` does with `numeric`, which this engine lacks.
  function byNumbers(a, b) {
    const padded = (text) => String(text).toLowerCase().replace(/\d+/g, (digits) => digits.padStart(20, "0"));
    const [one, other] = [padded(a), padded(b)];
    return one < other ? -1 : Number(one > other);
  }

  // ---- markup
  const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  const escape = (text) => text.replace(/[^\t\n\x20-\ud7ff\ue000-\ufffd]/g, " ").replace(/[&<>"]/g, (sign) => SIGNS[sign]);

  const isOpener = (node) => node.classes.some((name) => ["rb-opener", "rb-step"].includes(name)); // a button whose text is a name

  function isShown(node) {
    const [first] = node.children; // an entry of the legend is not shown if its mark is not
    if (node.name === "span" && first?.name === "svg" && !first.children.some(isShown)) return false;
    if (node.hidden || node.attributes.style === "display:none" || (node.name === "svg" && !node.attributes.height)) return false;
    return (isOpener(node) || !CONTROLS.includes(node.name)) && !node.classes.some((name) => UNSHOWN.includes(name));
  }

  function markup(node, inSvg = false) {
    if (!(node instanceof Element)) return escape(node);
    if (!isShown(node)) return "";
    const inside = node.nodes.map((one) => markup(one, inSvg || node.name === "svg")).join("");
    if (!inside && ["div", "p", "span", "ul"].includes(node.name)) return "";
    const namespace = node.name === "svg" && !inSvg ? { xmlns: "http://www.w3.org/2000/svg" } : {};
    const all = { ...namespace, ...node.attributes, class: node.classes.join(" ") || null };
    const shown = Object.entries(all).filter(([name, value]) => value !== null && !WITHOUT.test(name));
    const name = isOpener(node) ? "b" : node.name;
    const start = `<${name}${shown.map(([key, value]) => ` ${key}="${escape(value)}"`).join("")}`;
    return inSvg && !inside ? `${start}/>` : `${start}>${inside}</${name}>`;
  }

  const isBold = (node) => ["strong", "b"].includes(node.name) || node.classes.includes("rb-sentence");

  // Returns the width of a line with all that a node shows.
  function widthOf(node) {
    if (!(node instanceof Element)) return LETTER * node.length - (LETTER - THIN) * (node.match(THIN_ONES)?.length ?? 0);
    if (!isShown(node)) return 0;
    if (node.name === "svg") return Number(node.getAttribute("width")) + 4;
    const each = node.nodes.map(widthOf).filter(Boolean);
    const gaps = node.name === "span" && typeof node.nodes.at(-1) === "string" ? 0 : GAP * Math.max(0, each.length - 1);
    return each.reduce((all, one) => all + one, gaps) * (isBold(node) ? BOLD : 1);
  }

  // Returns how many lines the parts of a node take, one after the other.
  function linesOf(node) {
    let [lines, left] = [0, 0];
    for (const width of node.nodes.map((one) => widthOf(one) * (isBold(node) ? BOLD : 1)).filter(Boolean)) {
      if (!lines || width > left) [lines, left] = [lines + Math.ceil(width / ROOM), ROOM];
      left -= width + GAP;
    }
    return lines;
  }

  // Returns the height of the head of a column: its parts stand below each other.
  const headHeight = ({ children }) => LINE * (children.filter(isShown).length || 1) + 10;

  const paddingOf = ({ name, classes }) =>
    classes.includes("rb-head") ? 24 : classes.includes("rb-legend") ? 10 : ["li", "figcaption"].includes(name) ? 0 : 14;

  // Returns the height that a node will have.
  function heightOf(node) {
    if (!isShown(node)) return 0;
    const { name, parentNode: parent } = node;
    if (name === "svg") return Number(node.getAttribute("height"));
    if (name === "thead") return Math.max(...node.children[0].children.map(headHeight));
    if (name === "tr") return parent.parentNode.classes.includes("rb-dense") && !widths(node).length ? DENSE : ROW;
    const kids = node.children.filter(isShown);
    if (name === "li" && kids.length) return ROW;
    if (kids.some((kid) => ["svg", "thead", "tbody", "tr", ...BLOCKS].includes(kid.name)))
      return kids.reduce((sum, one) => sum + heightOf(one), name === "ul" ? 12 : 0);
    const lines = linesOf(node);
    return lines && LINE * lines + paddingOf(node);
  }

  // ---- limits
  const labelled = (name, kind, text) => Object.assign(new Element(name), { attributes: { class: kind }, nodes: [text] });
  const cut = (parent, text) => parent.append(labelled("p", "rb-cut", text));
  const widths = (node) =>
    !isShown(node) ? [] : node.name === "svg" ? [Number(node.attributes.width)] : node.children.flatMap(widths);

  function limit(root) {
    for (const node of root.children) {
      if (node.name === "tbody" && node.nodes.length > MOST) {
        cut(node.parentNode.parentNode, `… and ${node.nodes.length - MOST} more, not drawn`);
        node.nodes = node.nodes.slice(0, MOST);
      } else if (node.name === "svg" && Number(node.getAttribute("height")) > TALLEST) {
        cut(node.parentNode, "… the rest is not drawn");
        const { width } = node.attributes;
        Object.assign(node.attributes, { height: String(TALLEST), viewBox: `0 0 ${width} ${TALLEST}`, style: "overflow:hidden" });
      } else if (node.classes.includes("rb-hint") && node.nodes.length) node.textContent = "Nothing is here.";
      else limit(node);
    }
  }

  function section(makeWidget, view, key) {
    const traits = { state: { version: 1, view }, problem: "", phase: { name: "record" } };
    const model = { get: (name) => traits[name], on: idle, send: idle };
    const el = make("div");
    const widget = makeWidget();
    widget.initialize({ model });
    widget.render({ model, el });
    while (frames.length) frames.shift()();
    const [root] = el.children;
    if (key) root.firstChild.firstChild.after(labelled("span", "rb-key", key));
    limit(root);
    return root;
  }

  // Returns [markup, width, height] as JSON: one drawing, or one for each row of the section `each` of the view.
  return (makeWidget, view, each) => {
    const rows = Object.entries(view[each] ?? {}).slice(0, MOST);
    const views = rows.length > 1 ? rows.map(([key, row]) => [{ ...view, [each]: { [key]: row } }, key]) : [[view, rows[0]?.[0]]];
    const roots = views.map(([one, key]) => section(makeWidget, one, key));
    const width = Math.max(WIDE, ...roots.flatMap((root) => widths(root)));
    const height = roots.reduce((sum, root) => sum + heightOf(root), 0);
    return JSON.stringify([roots.map((root) => markup(root)).join(""), width, height]);
  };
})();
