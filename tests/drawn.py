"""The content of drawn panels, read from the page, and the same values from the tables of all members, to compare."""

from __future__ import annotations

from collections import Counter
from typing import Any

Tables = dict[int, dict[str, Any]]
"""By member; all tables of each."""
NO_STEP = "\N{EN DASH}"

# ---- autograd

# By context: the panel shows one, and it counts only while it is open.
CONTEXTS = """() => {
  const number = (node, name) => node.dataset[name] === undefined ? null : Number(node.dataset[name]);
  const each = (card, what, key, value) =>
    Object.fromEntries([...card.querySelectorAll(what)].map(one => [key(one), value(one)]));
  const links = card => {
    const found = {};
    for (const one of card.querySelectorAll('.rb-message')) {
      const link = found[`${one.dataset.from}>${one.dataset.to}`] ??= [0, 0];
      link[0] += number(one, 'sent');
      link[1] += number(one, 'received');
    }
    return found;
  };
  const cards = [...document.querySelectorAll('.rb-card:not(.rb-gone)')];
  return Object.fromEntries(cards.map(card => [card.dataset.context, {
    links: links(card),
    members: each(card, '[data-member]', one => one.dataset.member,
      one => [number(one, 'sends'), number(one, 'recvs')]),
    passes: each(card, '.rb-part', one => `${one.dataset.pass} ${one.dataset.worker}`,
      one => ['left', 'arrived', 'regions', 'ran'].map(name => number(one, name))),
    held: each(card, '[data-holder]', one => one.dataset.holder,
      one => [number(one, 'gradients'), one.querySelector('title').textContent.split('\\n').slice(1)]),
  }]));
}"""


def contexts(everywhere: Tables) -> dict[str, Any]:
    """The same values of all open contexts, from the tables of all members. A link: messages sent, and received."""
    found: dict[str, Any] = {}
    for worker, tables in everywhere.items():
        for key, row in tables["contexts"].items():
            if not (row["sends"] or row["recvs"] or row["gradients"]):  # it has no lane
                continue
            card = found.setdefault(key, {"links": {}, "members": {}, "passes": {}, "held": {}})
            graph = tables["graphs"].get(key, {"leaves": [], "passes": []})
            card["members"][str(worker)] = [len(row["sends"]), len(row["recvs"])]
            leaves = [f"{leaf['name']} {leaf['shape']}".strip() for leaf in graph["leaves"]]
            card["held"][str(worker)] = [row["gradients"], leaves]
            cut = {one["pass"]: [one["regions"], one["ran"]] for one in graph["passes"]}
            for one in row["passes"]:
                counts = [one["needed"] - one["arrived"], one["arrived"], *cut.get(one["pass"], [None, None])]
                card["passes"][f"{one['pass']} {worker}"] = counts
            for to, count in Counter(send["to"] for send in row["sends"]).items():
                card["links"].setdefault(f"{worker}>{to}", [0, 0])[0] = count
            for source, count in Counter(recv["from"] for recv in row["recvs"]).items():
                card["links"].setdefault(f"{source}>{worker}", [0, 0])[1] = count
    return found


# ---- pipeline

STEPS = """() => ({
  step: document.querySelector('.rb-pipeline .rb-stat b').textContent.trim(),
  ops: Object.fromEntries([...document.querySelectorAll('.rb-pipeline .rb-picture .rb-op:not(.rb-pale)')].map(
    op => [op.dataset.op, [op.getAttribute('class').match(/rb-op-(\\w)/)[1], op.dataset.state]])),
  lanes: Object.fromEntries([...document.querySelectorAll('.rb-lane[data-done]')].map(lane => [lane.dataset.worker,
    ['done', 'planned', 'held', 'peak'].map(name => Number(lane.dataset[name])).concat(lane.dataset.next)])),
})"""


def latest_step(everywhere: Tables) -> dict[str, Any]:
    """The same values from the tables of all members, with one stage on each worker."""
    ops = {key: row for tables in everywhere.values() for key, row in tables.get("ops", {}).items()}
    number = max((row["step"] for row in ops.values()), default=NO_STEP)
    shown = {key: row for key, row in ops.items() if row["step"] == number}
    parts = [part for tables in everywhere.values() for part in tables.get("steps", {}).values()]
    lanes = {str(part["worker"]): _lane(part, shown) for part in parts if part["step"] == number}
    told = {key: [row["op"], "runs" if row["end"] is None else "ended"] for key, row in shown.items()}
    return {"step": f"step {number}", "ops": told, "lanes": lanes}


def _lane(part: dict[str, Any], ops: dict[str, Any]) -> list[Any]:
    rows = [row for row in ops.values() if row["worker"] == part["worker"]]
    held = [row["held"] for row in rows if row["end"] is not None]
    rests = part["state"] == "running" and len(held) == len(rows) < len(part["plan"])
    now = [(held or [0])[-1], max(held, default=0)]
    return [len(held), len(part["plan"]), *now, part["plan"][len(rows)] if rests else ""]
