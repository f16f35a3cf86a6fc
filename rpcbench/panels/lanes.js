// The graph of a context, for the autograd panel: its blocks and arrows, and their places. Pure functions of rows of the view.
// A block is a part of a worker's graph (`parts`): the operations that lead to the same sends, which run as one region. An
// arrow is a message (`messages`) or, if these are too many to be listed, all messages between two workers (`links`). A block
// stands to the right of all that it needs, so time runs from left to right, but widths are no durations.
// Graphs of more than a few dozen blocks fold: to one block for each worker between its messages, or to one for each worker.
// In a pipeline a block is a stage, for all micro-batches.

const WORDS = STRINGS.autograd;
const [HELD, BOX, TOP] = [216, 24, 30]; // pixels
const [MIN_GAP, MAX_GAP, MIN_BLOCK] = [18, 120, 24];
const [CHARACTER, JOIN] = [7.3, " › "]; // width in pixels
const [MANY_BLOCKS, MANY_IN_CELL, MOST_OPS, LONGEST] = [36, 3, 8, 16];

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

function formatTime(seconds) {
  if (seconds >= 60) return formatMinutes(seconds);
  const [value, unit] = seconds < 1e-3 ? [seconds * 1e6, "µs"] : seconds < 1 ? [seconds * 1e3, "ms"] : [seconds, "s"];
  return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)} ${unit}`;
}

// ---- the graph

// Returns the blocks of the parts, the arrows of the messages, and `feeds`, the ways from a part to another one of its worker.
// An end of a message that no part is known of gets an empty block.
function connect(parts, messages) {
  const blocks = parts.map((part) => ({ key: `${part.worker}/${part.place}`, worker: part.worker, parts: [part], before: [] }));
  const [senders, receivers] = [new Map(), new Map()];
  const size = (block) => block?.parts[0].sends.length ?? Infinity;
  for (const block of blocks) {
    const [part] = block.parts;
    // Of the parts that lead to a send, the last one leads to the fewest others.
    for (const send of part.sends) if (size(block) < size(senders.get(send))) senders.set(send, block);
    for (const recv of part.recvs) receivers.set(recv, block);
  }
  const stages = (worker) => blocks.filter((block) => block.worker === worker && block.parts[0].stage !== null);
  const ofStage = (worker, fits) => stages(worker).filter(({ parts: [{ stage }] }) => fits(stage)).at(-1);
  const end = (key, worker) => {
    blocks.push({ key, worker, parts: [], before: [] });
    return blocks.at(-1);
  };
  const arrows = messages.map((message) => {
    const { message: name, stage } = message;
    const [a, b] = stage === null
      ? [senders.get(name), receivers.get(name)]
      : [ofStage(message.from, (other) => other < stage), ofStage(message.to, (other) => other === stage)];
    const [from, to] = [a ?? end(`${name}<`, message.from), b ?? end(`${name}>`, message.to)];
    to.before.push(from);
    return { key: name, from, to, messages: [message] };
  });
  const feeds = parts.some((part) => part.sends.length > 1) ? blocks.flatMap((block) => feedsOf(block, blocks)) : [];
  for (const { from, to } of feeds) to.before.push(from);
  return { blocks, arrows, feeds };
}

// Returns the ways into a block from those parts of its worker that lead to its sends and to more.
function feedsOf(block, blocks) {
  const own = block.parts[0]?.sends ?? [];
  const larger = blocks.filter((other) => {
    const sends = other.worker === block.worker && other !== block ? (other.parts[0]?.sends ?? []) : [];
    return own.length > 0 && sends.length > own.length && own.every((send) => sends.includes(send));
  });
  const least = Math.min(...larger.map((other) => other.parts[0].sends.length));
  const nearest = larger.filter((other) => other.parts[0].sends.length === least);
  return nearest.map((from) => ({ key: `${from.key}~${block.key}`, from, to: block, messages: [] }));
}

// Gives each block its level: one more than the highest of those that it needs, and a block that needs nothing stands right
// before the first one that needs it. Returns whether that is possible: it is not in a circle.
function setLevels({ blocks, arrows, feeds }) {
  for (const block of blocks) block.level = 0;
  let isMoving = true;
  for (let round = 0; isMoving && round <= blocks.length; round++) {
    isMoving = false;
    for (const block of blocks) {
      const level = Math.max(-1, ...block.before.map((other) => other.level)) + 1;
      isMoving ||= level > block.level;
      block.level = Math.max(level, block.level);
    }
  }
  const next = new Map();
  for (const { from, to } of [...arrows, ...feeds]) next.set(from, Math.min(next.get(from) ?? Infinity, to.level));
  for (const block of blocks) if (!block.before.length && next.has(block)) block.level = Math.max(0, next.get(block) - 1);
  return !isMoving;
}

// Returns a graph with one block for all blocks that have the same key, and one arrow for all arrows between two of these.
function fold({ blocks, arrows }, keyOf) {
  const [into, ways] = [new Map(), new Map()];
  for (const block of blocks) {
    const key = keyOf(block);
    if (!into.has(key)) into.set(key, { ...block, key, parts: [] });
    into.get(key).parts.push(...block.parts);
  }
  for (const { from, to, messages } of arrows) {
    const [a, b] = [into.get(keyOf(from)), into.get(keyOf(to))];
    const key = `${a.key}>${b.key}`;
    if (!ways.has(key)) ways.set(key, { key, from: a, to: b, messages: [] });
    ways.get(key).messages.push(...messages);
  }
  return { blocks: [...into.values()], arrows: [...ways.values()], feeds: [] };
}

// Returns the graph of a context as it fits into so many pixels: whole, or folded. With `isWide` each block has a lane for
// itself, as the blocks have no order or would not fit beside one another.
function graphOf({ parts, messages, links, members }, room) {
  const isListed = sum(messages, "sent") >= sum(links, "sent");
  const columns = ({ blocks }) => 1 + Math.max(0, ...blocks.map(({ level }) => level));
  const fits = (graph) => columns(graph) * (MIN_BLOCK + MIN_GAP) <= room;
  if (parts.length && isListed) {
    const whole = connect(parts, messages);
    if (setLevels(whole)) {
      const cell = ({ worker, level }) => `${worker}/${level}`;
      const counts = new Map();
      for (const block of whole.blocks) counts.set(cell(block), (counts.get(cell(block)) ?? 0) + 1);
      const isLarge = whole.blocks.length > MANY_BLOCKS || Math.max(...counts.values()) > MANY_IN_CELL;
      const graph = isLarge ? fold(whole, cell) : whole;
      graph.arrows.sort((a, b) => a.from.level - b.from.level || a.to.level - b.to.level);
      if (fits(graph)) return { ...graph, isWide: false };
    }
  }
  const shown = new Set([...parts.map(({ worker }) => worker), ...links.flatMap(({ from, to }) => [from, to])]);
  const own = members.filter(({ worker }) => shown.has(worker) || parts.length === 0).map(({ worker }) => worker);
  const blocks = [...new Set([...own, ...shown])].map((worker) => ({
    key: `${worker}`, worker, parts: parts.filter((part) => part.worker === worker), before: [],
  }));
  const of = new Map(blocks.map((block) => [block.worker, block]));
  const arrows = links.map((link) => {
    const listed = messages.filter(({ from, to }) => from === link.from && to === link.to);
    const more = { fired: sum(listed, "fired"), back: sum(listed, "back"), bytes: sum(listed, "bytes"), isListed };
    of.get(link.to).before.push(of.get(link.from));
    return { key: `${link.from}>${link.to}`, from: of.get(link.from), to: of.get(link.to), messages: [{ ...link, ...more }] };
  });
  const graph = { blocks, arrows, feeds: [] };
  const isWide = !setLevels(graph) || !fits(graph);
  if (isWide) for (const block of blocks) block.level = 0;
  const order = ({ from, to }) => [Math.max(from.worker, to.worker), from.worker];
  arrows.sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
  return { ...graph, isWide };
}

// ---- what stands in a block

const opName = (op) => shorten(op.startsWith("leaf ") ? op.slice(5) : op.split(" ")[0], LONGEST);

// Returns the texts in a block, at most `most` operations of it: those of one part, or of parts that are all alike. Below 1
// it is a name of three letters, or their number.
function chipsOf({ parts }, most) {
  if (!parts.length) return [];
  const [{ ops, count, stage }] = parts;
  const same = parts.every((part) => part.ops.join() === ops.join() && part.count === count);
  const times = parts.length > 1 && same ? [`×${parts.length}`] : [];
  const total = parts.some((part) => part.count === null) ? null : sum(parts, "count");
  if (stage !== null && parts.length === 1) return [WORDS.stage(stage), ...(most < 2 ? [] : opsOf(ops, count, most - 1))];
  if (total && most < (count > 1 || parts.length > 1 ? 0 : -1)) return [`${total}`];
  if (total && most < 0) return [opName(ops[0]).slice(0, 3)];
  if (total === null || !same || (most < 1 && count > 1)) return [WORDS.operations(total)];
  return count ? [...opsOf(ops, count, Math.max(1, most)), ...times] : [WORDS.passedOn, ...times];
}

function opsOf(ops, count, most) {
  const shown = ops.slice(0, count > most ? Math.max(1, most - 1) : most);
  return [...shown.map(opName), ...(count > shown.length ? [`+${count - shown.length}`] : [])];
}

const textOf = (chips) => chips.join(JOIN).replace(`${JOIN}×`, " ×");
const widthOf = (chips) => (chips.length ? textOf(chips).length * CHARACTER + 12 : 10);

// Returns the state of the parts of a block, the share that has run, and the text below the block.
function progressOf({ parts }) {
  const ran = parts.filter(({ state }) => state === "ran");
  const state = ["failed", "runs"].find((one) => parts.some((part) => part.state === one)) ??
    (parts.length && ran.length === parts.length ? "ran" : ran.length ? "partly" : "");
  const [part] = parts;
  if (part && part.stage !== null && parts.length === 1 && part.done) {
    const text = WORDS.backwards(part.done, part.times, part.seconds === null ? "" : formatTime(part.seconds));
    return { state, share: part.times ? Math.min(1, part.done / part.times) : 0, text };
  }
  const time = ran.length ? formatTime(sum(ran, "seconds")) : "";
  const text = { ran: time, partly: `${ran.length} / ${parts.length}`, runs: WORDS.runs, failed: WORDS.failed }[state] ?? "";
  return { state, share: parts.length ? ran.length / parts.length : 0, text };
}

// ---- places

// Gives each block its x, y and width (w), and returns the lanes and the size of the picture. `lanes` are ids of workers,
// `left` and `right` the pixels beside the blocks.
function layOut({ blocks, isWide }, lanes, width, left, right) {
  const [row, pad] = lanes.length > 6 ? [38, 6] : [44, 9]; // of a block with its time, and above it
  const slots = new Map();
  const stacks = new Map(lanes.map((id) => [id, 1]));
  for (const block of blocks) {
    const cell = `${block.worker}/${block.level}`;
    block.slot = slots.get(cell) ?? 0;
    slots.set(cell, block.slot + 1);
    stacks.set(block.worker, Math.max(stacks.get(block.worker) ?? 1, block.slot + 1));
  }
  let y = TOP;
  const places = new Map(lanes.map((id) => {
    const place = { id, y, pad, height: stacks.get(id) * row + pad };
    y += place.height;
    return [id, place];
  }));
  const count = 1 + Math.max(0, ...blocks.map(({ level }) => level));
  const room = width - left - right;
  const levels = Array.from({ length: count }, (_, level) => blocks.filter((block) => block.level === level));
  const wide = (most) => levels.map((own) => Math.max(MIN_BLOCK, ...own.map((block) => widthOf(chipsOf(block, most)))));
  let most = MOST_OPS;
  while (most > -2 && wide(most).reduce((a, b) => a + b, (count + 1) * MIN_GAP) > room) most--;
  const widths = isWide ? [room - 2 * MIN_GAP] : wide(most);
  const gap = Math.max(MIN_GAP, Math.min(MAX_GAP, (room - widths.reduce((a, b) => a + b, 0)) / (count + 1)));
  let x = left + (isWide ? MIN_GAP : gap / 2);
  const columns = widths.map((w) => {
    const column = { x, end: x + w };
    x += w + gap;
    return column;
  });
  for (const block of blocks) {
    block.chips = chipsOf(block, most);
    block.x = columns[block.level].x;
    block.w = isWide ? widths[0] : Math.max(block.parts.length ? MIN_BLOCK : 0, widthOf(block.chips));
    block.y = places.get(block.worker).y + pad + block.slot * row;
  }
  return { places, columns, gap, height: y, width: Math.max(width, x - gap / 2 + right) };
}

// Returns the path of an arrow, from the right of a block to the left of another one, `shift` below the middle of both, and the
// place for a number. If there are columns between, it runs along a lane that is free there, or else between two lanes.
function pathOf({ from, to }, shift, { places, columns, gap }, taken) {
  const [x1, x2] = [from.x + from.w, to.x];
  const [y1, y2] = [from.y + BOX / 2 + shift, to.y + BOX / 2 + shift];
  const ends = { x1, y1, x2, y2 };
  if (to.level - from.level <= 1) {
    const bend = Math.max(14, (x2 - x1) / 2);
    const aside = -1.6 * shift * Math.sign(y2 - y1); // so that a steep arrow does not cover the one beside it
    const d = `M${x1} ${y1} C${x1 + bend + aside} ${y1} ${x2 - bend + aside} ${y2} ${x2} ${y2}`;
    return { d, x: (x1 + x2) / 2, y: (y1 + y2) / 2, ...ends };
  }
  const isFree = (worker) => !taken.some((one) => one.worker === worker && from.level < one.level && one.level < to.level);
  const { y: top, height } = places.get(from.worker);
  const between = (y2 >= y1 ? top + height - 4 : top + 4) + shift;
  const way = isFree(from.worker) ? y1 : isFree(to.worker) ? y2 : between;
  const [xa, xb] = [columns[from.level].end + gap * 0.8, columns[to.level].x - gap * 0.8];
  const [ba, bb] = [(xa - x1) / 2, (x2 - xb) / 2];
  const [out, into] = [`C${x1 + ba} ${y1} ${xa - ba} ${way} ${xa} ${way}`, `C${xb + bb} ${way} ${x2 - bb} ${y2} ${x2} ${y2}`];
  return { d: `M${x1} ${y1} ${out} L${xb} ${way} ${into}`, x: (xa + xb) / 2, y: way, ...ends };
}

// Returns the vertical path of an arrow between two wide blocks, where the blocks have no order.
function straight({ from, to }, x) {
  const down = to.y > from.y;
  const [y1, y2] = down ? [from.y + BOX, to.y] : [from.y, to.y + BOX];
  return { d: `M${x} ${y1} L${x} ${y2}`, x, y: (y1 + y2) / 2, x1: x, y1, x2: x, y2, turn: down ? 90 : -90 };
}
