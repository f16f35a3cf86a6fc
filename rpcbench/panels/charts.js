// Charts over one axis, side by side, with a cursor that all share and a table of the values at it: the panels of resources and of
// metrics. Python puts this text between `common.js` and theirs.
// Guarantees
// - The cursor stands at a position of the data, never between two. Until the user chooses one it follows the end.
// - Pointer, arrow keys, Home, End and Escape do the same in all panels; a chosen position is told to screen readers.

const PLOT = { left: 76, right: 14, head: 26, tall: 84, low: 30, narrow: 330, tick: 64 }; // pixels; `narrow`: the least width of a chart
const SHADES = 8; // colours; the next members have the same ones, and other dashes

// Returns how many charts stand side by side: three do not leave one alone.
function chartColumns(count, width) {
  const columns = Math.max(1, Math.min(3, count, Math.floor(width / PLOT.narrow)));
  return count === 3 && columns === 2 ? 1 : columns;
}

// Returns the places of charts, { x, y, wide, tall } each, and the height of all.
function placeCharts(count, width) {
  const columns = chartColumns(count, width);
  const [wide, tall] = [Math.floor(width / columns), PLOT.head + PLOT.tall + PLOT.low];
  const places = Array.from({ length: count }, (_, i) => ({ x: (i % columns) * wide, y: Math.floor(i / columns) * tall, wide, tall }));
  return { places, height: tall * Math.ceil(count / columns) };
}

// Returns the edges of the plot in a place: `begin` and `stop` from left to right, `high` and `low` from top to bottom.
function edgesOf({ x, y, wide }) {
  return { begin: x + PLOT.left, stop: x + wide - PLOT.right, high: y + PLOT.head, low: y + PLOT.head + PLOT.tall };
}

// Returns the position nearest to a value; null where there is none.
const nearestStop = (stops, value) =>
  stops.length ? stops.reduce((best, stop) => (Math.abs(stop - value) < Math.abs(best - value) ? stop : best)) : null;

// ---- marks

// Returns the class of a member's colour, by its id: so it has the same one in all charts, and keeps it while others come and go.
const shadeOf = (member) => `rb-shade-${member % SHADES} rb-dash-${Math.min(2, Math.floor(member / SHADES))}`;

// Draws what lies behind the curves of a chart: its name, a text, the ground, the values at its floor and top, and lines at `ticks`.
function groundMarks(place, name, told, [least, most], ticks) {
  const { begin, stop, high, low } = edgesOf(place);
  return [
    label(begin, high - 8, name, "rb-name"),
    label(stop, high - 8, told, "rb-note rb-end"),
    svg("rect", { class: "rb-ground", x: begin, y: high, width: Math.max(0, stop - begin), height: PLOT.tall }),
    label(begin - 6, high + 11, most, "rb-note rb-end"),
    label(begin - 6, low, least, "rb-note rb-end"),
    ...ticks.map((x) => svg("line", { class: "rb-rule", x1: x, x2: x, y1: high, y2: low })),
  ];
}

// ---- the cursor

class ChartCursor {
  // `words()`: those of the present position, for screen readers.
  constructor(frame, words) {
    [this.frame, this.words, this.at, this.isKept] = [frame, words, null, false]; // `at`: null while it follows the end
    [this.stops, this.range, this.places] = [[], [0, 1], []];
    this.node = svg("g", { class: "rb-cursor" });
    this.said = html("p", { class: "rb-hidden", role: "status" });
    frame.root.insertBefore(this.said, frame.legend);
    frame.picture.addEventListener("pointermove", (event) => this.point(this.under(event)));
    frame.picture.addEventListener("pointerleave", () => this.point(null));
    frame.picture.addEventListener("click", (event) => {
      const value = this.under(event);
      if (value !== null) this.moveTo(value, !this.isKept || nearestStop(this.stops, value) !== this.at);
    });
    frame.body.addEventListener("keydown", (event) => this.press(event));
  }

  // Has the cursor move over these sorted positions, in charts at these places whose plots go from `range[0]` to `range[1]`.
  follow(stops, range, places) {
    [this.stops, this.range, this.places] = [stops, range, places];
    if (this.at !== null && !(stops[0] <= this.at)) [this.at, this.isKept] = [null, false];
    const [from, to] = range;
    const lines = this.at === null ? [] : places.map((place) => {
      const { begin, stop, high, low } = edgesOf(place);
      const x = begin + ((stop - begin) * (this.at - from)) / (to - from || 1);
      return svg("line", { x1: x, x2: x, y1: high, y2: low });
    });
    this.node.replaceChildren(...lines);
  }

  // Returns the value on the axis under the pointer, or null.
  under({ clientX, clientY }) {
    const { left, top } = this.frame.picture.getBoundingClientRect();
    const [x, y] = [clientX - left, clientY - top];
    const place = this.places.find((one) => x >= one.x && x < one.x + one.wide && y >= one.y && y < one.y + one.tall);
    if (!place || !this.stops.length) return null;
    const { begin, stop } = edgesOf(place);
    const [from, to] = this.range;
    return x < begin - 8 || x > stop + 8 ? null : from + ((x - begin) / (stop - begin)) * (to - from);
  }

  point(value) {
    if (this.stops.length && !this.isKept) this.moveTo(value, false);
  }

  moveTo(value, keep) {
    [this.at, this.isKept] = [value === null ? null : nearestStop(this.stops, value), keep];
    this.frame.redraw();
  }

  press(event) {
    const { key } = event;
    const { stops, at } = this;
    if (!stops.length || !["ArrowLeft", "ArrowRight", "Home", "End", "Escape"].includes(key)) return;
    if (key === "Escape" && at === null) return; // then it is the notebook's
    event.preventDefault();
    event.stopPropagation();
    const index = at === null ? stops.length - 1 : stops.indexOf(nearestStop(stops, at));
    const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: stops.length - 1 }[key];
    if (key === "Escape") this.moveTo(null, false);
    else this.moveTo(stops[Math.max(0, Math.min(stops.length - 1, next))], true);
    setText(this.said, this.words());
  }
}

// ---- the table

// Returns a row of the table: the member with its colour, and its figures.
const rowNode = (member, name, kind, figures) =>
  html("tr", { "data-member": member }, html("th", { scope: "row", title: name }, html("i", { class: `rb-swatch ${kind}` }), html("span", { class: "rb-words" }, name)),
    ...figures.map((text) => html("td", {}, text)));

// The table below the charts. The member whose row is under the pointer is lit in the charts, whose curves have `data-member`.
class ChartTable {
  constructor(frame, title, charts) {
    [this.heads, this.list, this.charts, this.lit] = [html("tr"), html("tbody"), charts, null];
    const table = html("table", { class: "rb-dense", "aria-label": title }, html("thead", {}, this.heads), this.list);
    this.node = html("div", { class: "rb-below" }, table);
    frame.root.insertBefore(this.node, frame.legend);
    this.list.addEventListener("pointerover", ({ target }) => this.light(target.closest("tr")?.dataset.member ?? null));
    this.list.addEventListener("pointerleave", () => this.light(null));
  }

  toggle(isShown) {
    this.node.hidden = !isShown;
    set(this.node, { style: isShown ? null : "display:none" });
  }

  // Shows heads and rows, { key, name, kind, figures } each. `kind`: the class of the row's colour.
  show(heads, rows) {
    join(this.heads, heads.map((text, key) => ({ key, parts: [text], text })), (key, { text }) => html("th", { scope: "col", class: key ? null : "rb-time" }, text));
    const items = rows.map((row) => ({ key: row.key, parts: [row.name, row.kind, ...row.figures], row }));
    join(this.list, items, (key, { row: { name, kind, figures } }) => rowNode(key, name, kind, figures));
    this.light(this.lit);
  }

  light(member) {
    this.lit = member;
    for (const chart of this.charts.children) {
      const paths = [...chart.querySelectorAll(".rb-member")];
      for (const path of paths) path.classList.toggle("rb-lit", path.dataset.member === member);
      chart.classList.toggle("rb-some", paths.some((path) => path.dataset.member === member));
    }
  }
}
