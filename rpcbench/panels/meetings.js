// Collectives in the messages panel: each is a row among the messages, with a mark in the column of each member.
// A dot is a member that has entered, a ring one that is missing; the member that entered last has a dot of its own style.
// Python puts this text between `common.js` and `messages.js`; it uses names of both.

// Returns collectives as rows like those of messages. `entered` are the rows of members that have entered, `missing` the ids
// of the others. A member outside this world has no id here and is left out.
function collectiveRows({ workers, collectives = {}, entries = {} }) {
  const ids = new Map(Object.values(workers).map(({ id, name }) => [name, id]));
  const entered = {};
  for (const entry of Object.values(entries)) (entered[entry.collective] ??= []).push(entry);
  const defaults = { kind: "Collective", family: "collective", call: "", rrefs: [], context: "", tries: 1, received: null }; // fields of messages
  return Object.fromEntries(
    Object.entries(collectives).map(([key, row]) => {
      const missing = row.missing.map((name) => ids.get(name)).filter((id) => id !== undefined);
      const words = `${row.op} #${row.number}`;
      return [key, { ...row, ...defaults, label: words, words, sent: row.begin, entered: entered[key] ?? [], missing }];
    }),
  );
}

// The names of a message's sender and receiver, or of a collective's members.
const endsOf = (row, names) => (row.entered ? row.members : [names(row.from), names(row.to)]);

function collectiveSentence(row, began, names) {
  const shape = row.shape ? ` of ${row.shape}` : "";
  const parts = [`${row.op}${shape} in ${row.group} #${row.number} at ${formatSeconds(row.sent - began, true)}`];
  if (row.site) parts.push(`asked by ${row.site}`);
  if (row.end !== null && row.end_known === false) parts.push("its end is not known, as it began while nobody watched");
  else if (row.end !== null) parts.push(`took ${formatSeconds(row.end - row.begin, true)}`);
  if (row.state !== "done") parts.push(row.state);
  if (row.last !== null) parts.push(`${names(row.last)} came last`);
  for (const { worker, waited } of row.entered) if (waited) parts.push(`${names(worker)} waited ${formatSeconds(waited, true)}`);
  if (row.last === null && row.state === "open") parts.push(`entered: ${row.entered.map(({ worker }) => names(worker)).join(" ")}`);
  if (row.missing.length) parts.push(`missing: ${row.missing.map(names).join(" ")}`);
  parts.push(...(row.elsewhere ?? []));
  if (row.bytes) parts.push(`${formatBytes(row.bytes)} of data`);
  return parts.join(", ");
}

// Draws the marks of a collective's members, and a line that joins them.
function memberMarks(row, cols) {
  const y = STEP / 2;
  const all = [...row.entered.map(({ worker }) => worker), ...row.missing].map(cols.x);
  const mark = (id, kind) => svg("circle", { class: `rb-dot ${kind}`, cx: cols.x(id), cy: y, r: 5, "data-worker": id });
  return [
    svg("line", { class: "rb-line", x1: Math.min(...all), x2: Math.max(...all), y1: y, y2: y }),
    ...row.entered.map(({ worker }) => mark(worker, worker === row.last ? "rb-last" : "rb-came")),
    ...row.missing.map((id) => mark(id, "rb-missing")),
  ];
}
