// Curves over the steps of a pipeline that the panel has seen, and the files that it saves.

const [CURVE_HEIGHT, CURVE_LOW, CURVE_TOP, CURVE_EDGE] = [58, 46, 24, 8]; // pixels: a curve, one in two rows, the top of its line, the room beside it
const NARROWEST = 130; // pixels of a curve, for its name and value

// Returns the samples in a second of wall time, from the end of the step seen before to that of this one; null in the first one.
// Steps between the two that the panel has not seen count as this one.
function rateOf(step, i, steps) {
  const before = steps[i - 1];
  const [count, seconds] = before ? [step.step - before.step, step.end - before.end] : [0, 0];
  return step.samples && count > 0 && seconds > 0 ? (step.samples * count) / seconds : null;
}
// All begin at 0 but the loss. `value` is called as by `Array.map`, on the steps of the curve.
const CURVES = [
  { key: "loss", value: (step) => step.loss, text: formatFigure },
  { key: "time", value: durationOf, text: (value) => formatDuration(value), least: 0, most: 3 },
  { key: "bubble", value: (step) => step.bubble, text: percent, least: 0, floor: (step) => step.minimum },
  { key: "rate", value: rateOf, text: (value) => Math.round(value).toLocaleString("en"), least: 0 },
];

// Returns the steps that curves have a point for.
const curveSteps = (steps) => steps.filter((step) => step.state === "complete" && step.trains);
const curveX = (i, count, width) => CURVE_EDGE + ((width - 2 * CURVE_EDGE) * (count > 1 ? i / (count - 1) : 1));

// Returns a line through values, null where there is none, as the data of an SVG path; `low` is its floor, `high` its top.
function curvePath(values, [low, high], width, height = CURVE_HEIGHT) {
  const tall = height - CURVE_TOP - 5;
  const y = (value) => CURVE_TOP + (high > low ? (tall * (high - Math.min(high, value))) / (high - low) : tall / 2);
  let [path, pen] = ["", "M"];
  values.forEach((value, i) => {
    if (isNumber(value)) path += `${pen}${curveX(i, values.length, width).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = isNumber(value) ? "L" : "M";
  });
  return path;
}

// Draws one curve, with its name, its value in the step shown, and a mark there.
function drawCurve({ key, value, text, floor, least, most }, steps, shown, width, height) {
  const [values, floors] = [steps.map(value), floor ? steps.map(floor) : []];
  const range = curveRange([...values, ...floors], most);
  range[0] = least ?? range[0];
  const [low, high] = curveRange(values).map(text);
  const at = steps.indexOf(shown);
  const now = values[at];
  const told = isNumber(now) ? text(now) : "–";
  const atLeast = isNumber(floors[at]) ? `${WORDS.minimum} ${text(floors[at])}` : "";
  const words = [`${WORDS.curves[key]} ${told}`, atLeast].filter(Boolean).join(", ");
  const all = `${words} in step ${shown.step}; ${low} to ${high} in ${plural(steps.length, "step")}`;
  const span = (kind, content) => svg("tspan", { class: kind }, content);
  const name = [span("rb-name", `${WORDS.curves[key]} `), span("rb-figure", told)];
  // The dashed line is named where there is room for that.
  if (atLeast && width >= 230) name.push(span("rb-name", ` ┄ ${atLeast}`));
  const dot = isNumber(now) ? curvePath(values.map((each, i) => (i === at ? each : null)), range, width, height) : "";
  const x = curveX(at, steps.length, width);
  const [wide, tall] = [width - 2 * CURVE_EDGE + 8, height - CURVE_TOP + 2];
  return svg(
    "svg",
    { class: "rb-line", width, height, role: "img", "aria-label": all },
    tip(all),
    svg("rect", { class: "rb-track", x: CURVE_EDGE - 4, y: CURVE_TOP - 4, width: wide, height: tall, rx: 3 }),
    svg("text", { x: CURVE_EDGE - 2, y: 14 }, ...name),
    dot ? svg("line", { class: "rb-here", x1: x, x2: x, y1: CURVE_TOP - 4, y2: height - 2 }) : "",
    floors.length ? svg("path", { class: "rb-floor", d: curvePath(floors, range, width, height) }) : "",
    svg("path", { class: "rb-run", d: curvePath(values, range, width, height) }),
    dot ? svg("path", { class: "rb-dot", d: `${dot} h0` }) : "",
  );
}

// Adds the curves above the picture. A click on one calls `choose` with the nearest step. Returns a function that draws them.
function curvesAbove(frame, choose) {
  const box = html("div", { class: "rb-curves", hidden: "" });
  frame.body.before(box);
  let steps = [];
  box.addEventListener("click", (event) => {
    const curve = event.target.closest(".rb-line");
    if (!curve) return;
    const { left, width } = curve.getBoundingClientRect();
    const share = (event.clientX - left - CURVE_EDGE) / (width - 2 * CURVE_EDGE);
    choose(steps[Math.round(Math.min(1, Math.max(0, share)) * (steps.length - 1))]);
  });
  return (seen, shown, width) => {
    steps = curveSteps(seen);
    const curves = CURVES.filter(({ value }) => steps.map(value).some(isNumber));
    box.hidden = !curves.length;
    const isNarrow = width < NARROWEST * CURVES.length; // then they stand in two rows, however many there are
    const wide = Math.floor(width / (isNarrow ? Math.ceil(CURVES.length / 2) : Math.max(1, curves.length)));
    const height = isNarrow ? CURVE_LOW : CURVE_HEIGHT;
    set(box, { style: `min-height: ${height * (isNarrow ? 2 : 1)}px` }); // a curve more does not move the picture
    const parts = [wide, shown, steps.length, steps[0], steps.at(-1)];
    const items = curves.map((curve) => ({ key: curve.key, parts, curve }));
    join(box, items, (_, { curve }) => drawCurve(curve, steps, shown, wide, height));
  };
}

// ---- files

const PAINT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "overflow"];
const TYPE = ["font-family", "font-size", "font-weight", "text-anchor"];

// Returns a copy of a shape, and of all in it, with its styles inside, so that it looks the same in a file of its own.
function withStyles(node) {
  if (node.nodeType !== Node.ELEMENT_NODE) return node.cloneNode();
  const copy = node.cloneNode();
  const styles = getComputedStyle(node);
  for (const name of ["class", "style", ...Object.keys(node.dataset).map((key) => `data-${key}`)]) copy.removeAttribute(name);
  const names = isText(node) ? [] : [...PAINT, ...(/^t(ext|span)/.test(node.localName) ? TYPE : [])];
  for (const name of names) copy.style.setProperty(name, styles.getPropertyValue(name));
  copy.append(...[...node.childNodes].filter((child) => !(child instanceof Element) || shows(child)).map(withStyles));
  return copy;
}
const isText = (node) => ["title", "desc"].includes(node.localName);
const shows = (node) => isText(node) || getComputedStyle(node).display !== "none";

// Returns the picture of a frame as the text of an SVG file, with a line of text above it.
function pictureFile(frame, title) {
  const size = (node) => ["width", "height"].map((name) => Number(node.getAttribute(name)));
  const [[width, height], [, head]] = [size(frame.picture), size(frame.top)];
  const styles = getComputedStyle(frame.root);
  const [paper, ink, font] = ["background-color", "color", "font-family"].map((name) => styles.getPropertyValue(name));
  const [axis, rows] = [frame.top, frame.picture].map(withStyles);
  set(axis, { y: 28 });
  set(rows, { y: 28 + head });
  const words = svg("text", { x: 12, y: 19, style: `fill: ${ink}; font: 600 14px ${font}` }, title);
  const [back, all] = [svg("rect", { width, height: height + head + 34, fill: paper }), { width, height: height + head + 34 }];
  const file = svg("svg", all, back, words, axis, rows);
  return new XMLSerializer().serializeToString(file);
}
