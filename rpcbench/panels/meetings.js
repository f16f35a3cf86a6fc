// Collectives among messages: rows of dots. A dot is a member that has come, a ring one that is missing.

// Collectives as rows among messages. `came` are their entries, `missing` ids of those who have not come.
function meetings({ workers, collectives = {}, entries = {} }) {
  const ids = new Map(Object.values(workers).map(({ id, name }) => [name, id]));
  const came = {};
  for (const entry of Object.values(entries)) (came[entry.collective] ??= []).push(entry);
  const unlike = { kind: "Collective", call: "", rrefs: [], context: "", tries: 1, received: null };
  return Object.fromEntries(
    Object.entries(collectives).map(([key, row]) => {
      const missing = row.missing.map((name) => ids.get(name)).filter((id) => id !== undefined);
      return [key, { ...row, ...unlike, label: `${row.op} #${row.number}`, sent: row.begin, came: came[key] ?? [], missing }];
    }),
  );
}

const endsOf = (row, names) => (row.came ? row.members : [names(row.from), names(row.to)]);

function meetingSentence(row, began, names) {
  const shape = row.shape ? ` of ${row.shape}` : "";
  const parts = [`${row.op}${shape} in ${row.group} #${row.number} at ${took(row.sent - began)}`];
  if (row.end !== null) parts.push(`took ${took(row.end - row.begin)}`);
  if (row.state !== "done") parts.push(row.state);
  if (row.last !== null) parts.push(`${names(row.last)} came last`);
  for (const { worker, waited } of row.came) if (waited) parts.push(`${names(worker)} waited ${took(waited)}`);
  if (row.last === null && row.state === "open") parts.push(`entered: ${row.came.map(({ worker }) => names(worker)).join(" ")}`);
  if (row.missing.length) parts.push(`missing: ${row.missing.map(names).join(" ")}`);
  if (row.bytes) parts.push(`${bytes(row.bytes)} of data`);
  return parts.join(", ");
}

// A dot where each has come, a ring where one is missing.
function dots(row, cols) {
  const y = STEP / 2;
  const all = [...row.came.map(({ worker }) => worker), ...row.missing].map(cols.x);
  const dot = (id, kind) => svg("circle", { class: `rb-dot ${kind}`, cx: cols.x(id), cy: y, r: 5, "data-worker": id });
  return [
    svg("line", { class: "rb-line", x1: Math.min(...all), x2: Math.max(...all), y1: y, y2: y }),
    ...row.came.map(({ worker }) => dot(worker, worker === row.last ? "rb-last" : "rb-came")),
    ...row.missing.map((id) => dot(id, "rb-missing")),
  ];
}
