// The comparison panel: a row for each module and parameter, nested by their names, and a column for each phase of a step.
// A square is a value: its sign and colour are the verdict. Beside a row stands how the ranks share it. Below the picture
// stands the value that was clicked; at first the one that differs first.
// Guarantees
// - The first difference alone is filled in red; values that are wrong after it have an outline, as it may be their cause.
// - All that squares and drawings of layouts show is said in words too: in their tooltips, which screen readers read.
// - A module that is folded shows the worst verdict of all that it holds.

const TEXT = STRINGS.compare;
const WORST = Object.keys(LISTS.compare.words); // the worst first
const ROW = 24;
const SIDE = 13; // of a square
const PITCH = 17; // between squares of one cell
const FEW = 3; // squares in one cell
const INDENT = 14;
const MOST_WORDS = 40; // characters beside the drawing of a layout
const STILL = 1400; // pixels of rows in a still picture
const MINI = { wide: 16, tall: 10, gap: 2, apart: 6, most: 16, high: 4 }; // boxes of ranks in the drawing of a layout
const LEAST = 66; // width of that column, for its head
const [NAMES, FEW_NAMES, TIGHT] = [130, 84, 340]; // least widths of the names, in panels narrower than `TIGHT` the second
const HEAD = 28;
const MARGIN = 14; // beside the last column

const worstOf = (rows) => WORST.find((word) => rows.some((row) => row.word === word)) ?? rows[0].word;

// Returns the size of a layout's drawing, or null if it has too many ranks for one.
function miniSize({ sizes, boxes }) {
  if (!boxes.length || boxes.length > MINI.most) return null;
  const { cells, down, across, grids } = meshCells({ shape: sizes, ranks: boxes.map((_, rank) => rank), workers: [] });
  if (down > MINI.high) return null;
  const grid = across * (MINI.wide + MINI.gap);
  return { cells, grid, width: grids * grid + (grids - 1) * MINI.apart, height: down * (MINI.tall + MINI.gap) - MINI.gap };
}

// Draws how the ranks share a tensor: a box for each rank of the mesh, filled where the rank has the tensor; a dashed one has none.
function miniNode(layout, size, x, y) {
  const boxes = size.cells.map(({ rank, column, row, grid }) => {
    const at = `translate(${x + grid * (size.grid + MINI.apart) + column * (MINI.wide + MINI.gap)} ${y + row * (MINI.tall + MINI.gap)})`;
    return svg("g", { transform: at },
      ...(layout.boxes[rank] ?? []).map((block) => areaOf(block, MINI.wide, MINI.tall, layout.summed ? "rb-summand" : "rb-held")),
      svg("rect", { class: layout.boxes[rank] ? "rb-outline" : "rb-outline rb-without", width: MINI.wide, height: MINI.tall, rx: 1 }));
  });
  return svg("g", { class: "rb-layout" }, tip(layout.words), svg("rect", { class: "rb-face", x, y, width: size.width, height: size.height }), ...boxes);
}

// Returns the sign of a verdict around 0, 0: a path in a square.
const signNodes = (word) => [svg("rect", { class: "rb-fill", x: -SIDE / 2, y: -SIDE / 2, width: SIDE, height: SIDE, rx: 2 }),
  ...(SIGNS[word] ? [svg("path", { class: "rb-sign", d: SIGNS[word] })] : [])];

// Draws one square around a point. `count` is the number of values that it stands for.
function squareNode(key, word, words, [x, y], { count = 1, isFirst, isChosen, follows }) {
  const half = SIDE / 2;
  const kind = [kindOf(isFirst ? "wrong" : word), isFirst && "rb-first", isChosen && "rb-chosen", follows && "rb-follows"].filter(Boolean).join(" ");
  return svg("g", { class: `rb-square ${kind}`, transform: `translate(${x} ${y})`, "data-value": key, role: "button", "aria-label": words },
    tip(words),
    ...(isFirst || isChosen ? [svg("rect", { class: "rb-ring", x: -half - 3, y: -half - 3, width: SIDE + 6, height: SIDE + 6, rx: 4 })] : []),
    svg("rect", { class: "rb-face", x: -half - 2, y: -half - 2, width: SIDE + 4, height: SIDE + 4 }),
    ...signNodes(isFirst ? "wrong" : word),
    ...(count > 1 ? [label(half + 4, 4, `×${count}`, "rb-note")] : []));
}

// Returns the squares of a cell: [key, word, rows] each. More than a few values share one, and so do those of a folded module.
function squaresOf(rows) {
  if (!rows.length) return [];
  if (rows.length <= FEW && rows.every(({ name }) => name === rows[0].name))
    return rows.map((row) => ({ key: row.key, word: row.word, rows: [row] }));
  const word = worstOf(rows);
  return [{ key: rows.find((row) => row.word === word).key, word, rows }];
}

function squareWords({ rows }, first) {
  if (rows.length === 1) return valuePhrases(rows[0], first).join("\n");
  const counts = WORST.map((each) => [rows.filter((row) => row.word === each).length, each]).filter(([count]) => count);
  return `${rows[0].phase}: ${TEXT.several(rows.length)}, ${counts.map(([count, each]) => `${count} ${each}`).join(", ")}`;
}

// Returns the columns and widths for the phases that are there; `said` are the words beside the drawings of layouts.
function geometryOf(width, phases, layouts, said) {
  const step = width >= 900 ? 80 : 66;
  const mini = Math.max(LEAST, ...Object.values(layouts).map((layout) => miniSize(layout)?.width ?? 0));
  const words = width >= 1000 ? 16 + LETTER * Math.min(MOST_WORDS, Math.max(0, ...said.map((text) => text.length))) : 0;
  const names = Math.max(width < TIGHT ? FEW_NAMES : NAMES, Math.min(420, width - phases.length * step - mini - words - 24 - MARGIN));
  const begin = names + mini + words + 24;
  const x = new Map(phases.map((phase, n) => [phase, begin + (n + 0.5) * step]));
  return { step, names, words, mini, x, width: begin + phases.length * step + MARGIN, key: [width, names, mini, words, phases.join()].join() };
}

// Returns the rows in sight, each with the values that its squares stand for.
function visibleRows(modules, values, isFolded) {
  const rows = Object.values(modules).sort((a, b) => a.order - b.order);
  const inside = new Map(rows.map((row) => [row.name, []]));
  const holders = new Set(rows.map(({ parent }) => parent));
  const shown = new Map();
  for (const row of rows) {
    const around = row.parent === null ? null : shown.get(row.parent);
    shown.set(row.name, around && (around.owner !== row.parent || isFolded(modules[row.parent])) ? { ...around } : { owner: row.name });
  }
  for (const value of values) inside.get(shown.get(value.name)?.owner)?.push(value);
  return rows.filter(({ name }) => shown.get(name).owner === name)
    .map((row) => ({ row, holds: holders.has(row.name), isOpen: !isFolded(row), values: inside.get(row.name) }));
}

const besideWords = (layout, nearest) => (layout ? layout.words : nearest ? TEXT.near(nearest) : "");

function rowNode({ row, holds, isOpen, values }, layout, nearest, geometry, tall, marks) {
  const [x, base] = [10 + row.depth * INDENT, tall / 2 + 4];
  const name = row.name ? row.label : TEXT.model;
  const size = layout && miniSize(layout);
  const room = Math.floor((geometry.names - x - 14) / LETTER);
  const fold = !holds || !row.name ? [] : [label(x - 2, base, isOpen ? "▾" : "▸", "rb-note")];
  const fits = layout?.words ?? (nearest === undefined ? "" : TEXT.nearest(nearest));
  const title = [row.name || TEXT.model, fits].filter(Boolean).join("\n");
  const head = svg("g", fold.length ? { class: "rb-fold", role: "button", tabindex: 0, "aria-expanded": isOpen, "aria-label": title, "data-fold": row.name } : { class: "rb-name" },
    tip(title), svg("rect", { class: "rb-face", width: geometry.names, height: tall }), ...fold,
    label(x + 12, base, shorten(name, room), holds ? "rb-strong" : "rb-code"));
  const nodes = [];
  if (layout && size) nodes.push(miniNode(layout, size, geometry.names + 4, (tall - size.height) / 2));
  if (!layout && nearest !== undefined) nodes.push(label(geometry.names + 4, base, TEXT.fitsNone, "rb-note"));
  const beside = besideWords(layout, nearest);
  if (beside && geometry.words) nodes.push(label(geometry.names + geometry.mini + 16, base, shorten(beside, MOST_WORDS), "rb-note"));
  for (const [phase, center] of geometry.x) {
    const squares = squaresOf(values.filter((value) => value.phase === phase));
    squares.forEach((square, n) => {
      const at = center + (n - (squares.length - 1) / 2) * PITCH;
      const isFirst = square.rows.some(({ key }) => key === marks.first);
      const isChosen = square.rows.some(({ key }) => key === marks.chosen);
      const how = { count: square.rows.length, isFirst, isChosen, follows: square.word === "wrong" && marks.first && !isFirst };
      nodes.push(squareNode(square.key, square.word, squareWords(square, marks.first), [at, tall / 2], how));
    });
  }
  return svg("g", { class: "rb-row", role: "listitem", "data-module": row.name },
    svg("rect", { class: "rb-stripe", width: geometry.width, height: tall }), head, ...nodes);
}

// Returns the mark of a verdict; one that is wrong follows from `first`, if that is given.
const markOf = (word, first) => svg("g", { class: kindOf(word) + (word === "wrong" && first ? " rb-follows" : "") }, ...signNodes(word));
const firstMark = () => svg("g", { class: `rb-first ${kindOf("wrong")}`, transform: "scale(0.8)" },
  svg("rect", { class: "rb-ring", x: -SIDE / 2 - 3, y: -SIDE / 2 - 3, width: SIDE + 6, height: SIDE + 6, rx: 4 }), ...signNodes("wrong"));
const miniMark = (kind, width) => svg("g", {}, svg("rect", { class: kind, x: -8, y: -5, width, height: MINI.tall }),
  svg("rect", { class: "rb-outline", x: -8, y: -5, width: MINI.wide, height: MINI.tall, rx: 1 }));

// Returns the legend of what is shown: [mark, text] each. `hasMany`: a square stands for several values.
function legendOf(values, layouts, first, hasMany) {
  const marks = first && values.some(({ key }) => key === first) ? [[firstMark(), TEXT.first]] : [];
  for (const word of WORST) {
    const text = word === "wrong" && first ? TEXT.follows : VERDICTS[word];
    if (values.some((row) => row.word === word && row.key !== first)) marks.push([markOf(word, first), text]);
  }
  if (hasMany) marks.push([label(-8, 4, "×n", "rb-note"), TEXT.many]);
  const all = layouts.filter(Boolean);
  if (all.some(({ summed }) => !summed)) marks.push([miniMark("rb-held", 8), TEXT.held]);
  if (all.some(({ summed }) => summed)) marks.push([miniMark("rb-summand", MINI.wide), TEXT.summand]);
  return marks;
}

// The part below the picture: the chosen value, buttons for the others of its cell, and the ranks.
function below(frame, choose) {
  const words = html("p", { class: "rb-words", role: "status" });
  const others = html("span", { class: "rb-others", role: "group", "aria-label": TEXT.others });
  const ranks = svg("svg", { class: "rb-ranks", role: "group", "aria-label": TEXT.byRank });
  const root = html("div", { class: "rb-below" }, words, others, ranks);
  frame.root.insertBefore(root, frame.legend);
  return (row, rows, width, first) => {
    root.hidden = !row;
    if (!row) return;
    const fitsNone = row.word === "wrong" && !row.errors.length && !row.missing.length;
    setText(words, [...valuePhrases(row, first), ...(fitsNone ? [TEXT.noLayout] : [])].join(" · "));
    const many = rows.length > 1 && rows.length <= 24 ? rows : [];
    join(others, many.map((one) => ({ key: one.key, parts: [one, one.key === row.key], one })), (key, { one }) => {
      const part = partName(one);
      const name = many.every((other) => other.name === row.name) ? part : `${one.name || TEXT.model}${part === TEXT.value ? "" : ` ${part}`}`;
      const node = html("button", { type: "button", class: kindOf(one.word), "aria-pressed": key === row.key }, name);
      node.addEventListener("click", () => choose(key));
      return node;
    });
    const [node, height] = evidence(row, width);
    ranks.replaceChildren(node);
    set(ranks, { width, height, viewBox: `0 0 ${width} ${height}` });
  };
}

export default panel("compare", TEXT.title, (frame) => {
  const sentence = html("p", { class: "rb-sentence", role: "status" });
  const steps = html("div", { class: "rb-steps", role: "group", "aria-label": TEXT.shown });
  const rows = svg("g", { role: "list" });
  const folded = new Map(); // what the user has folded, by name
  let [chosen, step, shownFor, legend, marks, follows, drawnWidth] = [null, null, null, "", [], false, 0];
  frame.picture.append(rows);
  frame.head.after(sentence, steps);
  const choose = (key) => {
    chosen = key;
    frame.redraw();
  };
  const showBelow = below(frame, choose);
  function toggle(node) {
    folded.set(node.dataset.fold, node.getAttribute("aria-expanded") === "true");
    frame.redraw();
  }
  rows.addEventListener("click", ({ target }) => {
    const [square, fold] = [target.closest("[data-value]"), target.closest("[data-fold]")];
    if (square) choose(square.dataset.value);
    else if (fold) toggle(fold);
  });
  // Enter folds; arrow keys choose the next square, or the one below or above.
  frame.body.addEventListener("keydown", (event) => {
    const fold = event.target.closest?.("[data-fold]");
    if (fold && (event.key === "Enter" || event.key === " ")) return event.preventDefault(), toggle(fold);
    const [across, down] = [{ ArrowRight: 1, ArrowLeft: -1 }[event.key], { ArrowDown: 1, ArrowUp: -1 }[event.key]];
    if (!across && !down) return;
    event.preventDefault();
    const at = marks.findIndex(({ keys }) => keys.includes(chosen));
    const { phase } = marks[at] ?? {};
    const from = marks.map((mark, n) => ({ ...mark, n })).filter((mark) => across || mark.phase === phase);
    const next = from[Math.max(0, Math.min(from.length - 1, from.findIndex(({ n }) => n === at) + (across ?? down)))];
    follows = true;
    if (next) choose(next.keys[0]);
  });

  // Scrolls a row into sight, with room around it, and the column of this phase as far as it must.
  function scrollTo(y, tall, room, { x, step: wide }, phase) {
    const low = y + tall + HEAD + room - frame.body.clientHeight;
    frame.body.scrollTop = Math.max(low, Math.min(y - room, frame.body.scrollTop));
    const right = x.get(phase) + wide / 2 - frame.body.clientWidth;
    frame.body.scrollLeft = Math.max(right, Math.min(x.get(phase) - wide / 2, frame.body.scrollLeft));
  }

  // Shows a button for each step, with the worst of its verdicts; one of them has the first difference.
  function showSteps(values, count, first) {
    const items = Array.from({ length: count }, (_, n) => {
      const own = values.filter((row) => row.step === n);
      const about = { hasFirst: own.some(({ key }) => key === first), word: own.length ? worstOf(own) : "" };
      return { key: n, parts: Object.values(about), ...about };
    });
    join(steps, items, (n, { hasFirst, word }) => {
      const mark = svg("svg", { width: 18, height: 18, viewBox: "-9 -9 18 18", "aria-hidden": "true" }, hasFirst ? firstMark() : word ? markOf(word, first) : "");
      const node = html("button", { type: "button" }, mark, TEXT.stepWords(n, hasFirst, word));
      node.addEventListener("click", () => {
        step = n;
        choose(hasFirst ? first : null);
      });
      return node;
    });
    [...steps.children].forEach((node, n) => set(node, { class: n === step ? "rb-step rb-shown" : "rb-step", "aria-pressed": n === step }));
    steps.hidden = count < 2;
  }

  // Returns the rows that are drawn: in a still picture, which nobody can scroll, those around the chosen value.
  function rowsInPicture(visible, tall) {
    const room = window.isStill ? Math.floor(STILL / tall) : visible.length;
    const at = visible.findIndex(({ values }) => values.some(({ key }) => key === chosen));
    const begin = Math.max(0, Math.min(at - Math.floor(room / 2), visible.length - room));
    return [visible.slice(begin, begin + room), begin];
  }

  function headline(view, comparison, values) {
    const counts = WORST.map((word) => [values.filter((row) => row.word === word).length, word, word === "wrong" ? "rb-warn" : ""]);
    const left = comparison.values - values.length;
    const ranks = comparison.sizes.reduce((product, size) => product * size, 1);
    frame.showStats([ranks, TEXT.onRanks(comparison.names.map((name, n) => `${name}=${comparison.sizes[n]}`).join(", "))], ...counts.filter(([count]) => count), ...(left > 0 ? [[left, TEXT.unlisted]] : []), ...leftOutStats(view.workers));
    setText(sentence, comparison.words);
    frame.describe(`${comparison.words} ${counts.filter(([count]) => count).map(([count, word]) => `${count} ${word}`).join(", ")}.`);
  }

  return (view, width) => {
    const comparison = Object.values(view.comparisons)[0];
    const all = Object.entries(view.values).map(([key, row]) => ({ ...row, key })).sort((a, b) => a.order - b.order);
    frame.showHint(comparison ? null : Object.keys(view.workers).length ? TEXT.hint : STRINGS.workers.hint);
    sentence.hidden = !comparison;
    if (!comparison) {
      join(rows, [], () => null);
      join(frame.top, [], () => null);
      frame.showStats(...leftOutStats(view.workers));
      frame.describe(TEXT.none);
      frame.showLegend([]);
      frame.resize(0, 0);
      return showBelow(null, [], width);
    }
    const report = `${comparison.words} ${comparison.values} ${comparison.first}`;
    const isNew = report !== shownFor;
    if (isNew) [step, chosen, shownFor] = [comparison.step, comparison.first || null, report];
    headline(view, comparison, all);
    showSteps(all, comparison.steps, comparison.first);
    const values = all.filter((row) => row.step === step);
    const phases = LISTS.compare.phases.filter((phase) => values.some((row) => row.phase === phase));
    const isFolded = ({ name, folded: atFirst }) => (name ? folded.get(name) ?? atFirst : false);
    const rowsOf = visibleRows(view.modules, values, isFolded).filter(({ values: own, holds }) => own.length || holds);
    const minis = rowsOf.map(({ row }) => view.layouts[row.layouts[step]]);
    const said = rowsOf.map(({ row }, n) => besideWords(minis[n], row.nearest[step]));
    const geometry = geometryOf(width, phases, view.layouts, said);
    const tall = Math.max(ROW, ...minis.map((layout) => ((layout && miniSize(layout)?.height) || 0) + 8));
    const [visible, begin] = rowsInPicture(rowsOf, tall);
    const layouts = minis.slice(begin);
    const corner = visible.length < rowsOf.length ? TEXT.some(begin + 1, begin + visible.length, rowsOf.length) : TEXT.corner;
    const tops = [["value", corner, 12, "rb-note"], ["layout", TEXT.shared, geometry.names + 4, "rb-note"]];
    const heads = [...tops, ...phases.map((phase) => [phase, phase, geometry.x.get(phase), "rb-center"])];
    join(frame.top, heads.map(([key, ...parts]) => ({ key, parts })), (key) => {
      const [, text, x, kind] = heads.find(([one]) => one === key);
      return label(x, 18, text, kind, { "data-phase": key });
    });
    marks = [];
    const items = visible.map((item, n) => {
      const [layout, nearest] = [layouts[n], item.row.nearest[step]];
      for (const phase of phases)
        for (const square of squaresOf(item.values.filter((row) => row.phase === phase)))
          marks.push({ phase, keys: [square.key, ...square.rows.map(({ key }) => key)] });
      const has = (wanted) => item.values.some(({ key }) => key === wanted) && wanted;
      const parts = [geometry.key, tall, n, item.row, item.isOpen, layout, nearest, has(chosen), report, ...item.values.map(({ key }) => view.values[key])];
      return { key: item.row.name, parts, item, layout, nearest, n };
    });
    join(rows, items, (_, { item, layout, nearest, n }) =>
      set(rowNode(item, layout, nearest, geometry, tall, { first: comparison.first, chosen }), { transform: `translate(0 ${n * tall})` }));
    frame.resize(Math.max(width, geometry.width), items.length * tall + 4, HEAD, true);
    const at = items.findIndex(({ item }) => item.values.some(({ key }) => key === chosen));
    const isMoved = isNew || follows || width !== drawnWidth; // in another width the chosen square must not leave the frame
    const { phase } = values.find(({ key }) => key === chosen) ?? {};
    if (at >= 0 && isMoved) scrollTo(at * tall, tall, isNew ? frame.body.clientHeight / 2 : 0, geometry, phase);
    drawnWidth = width;
    follows = false;
    const cell = chosen === null ? [] : marks.find(({ keys }) => keys.includes(chosen))?.keys ?? [chosen];
    const isOfCell = new Set(cell);
    showBelow(values.find(({ key }) => key === chosen), values.filter(({ key }) => isOfCell.has(key)), width, comparison.first);
    const shown = legendOf(values, layouts, comparison.first, marks.some(({ keys }) => keys.length > 2));
    const words = shown.map(([, text]) => text).join();
    if (words !== legend) frame.showLegend(shown);
    legend = words;
  };
});
