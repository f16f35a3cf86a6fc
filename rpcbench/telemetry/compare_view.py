"""The view of the comparison panel: a pure function from the tables of `compare.report_rows`, and its words.

A row is a module, a parameter or a buffer; rows are nested by their names. What modules hold is folded where a model is
large: but for the first module that differs, and the way to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row, Table
from rpcbench.telemetry.views import View, World, rows_of, worker_rows


class VerdictMark(NamedTuple):
    """A verdict on a value, as panels and pictures draw it."""

    colour: str
    name: str  # in the legend


VERDICT_MARKS = {
    "wrong": VerdictMark("red", "wrong"),
    "right": VerdictMark("green", "right, within round-off"),
    "cannot tell": VerdictMark("dim", "cannot tell: zero, or all round-off"),
    "not there": VerdictMark("dim", "not there: no rank has it as the reference has it"),
}
"""By the words of `compare.verdicts`, the worst first."""
PHASES = ("initial", "forward", "loss", "backward", "gradient", "step")
"""The columns: the phases of `compare.capture`, but for inputs."""
_LAYOUT_PHASES = ("forward", "gradient", "initial", "step")  # of the first that is right is the layout of a row
_FEW, _MANY = 36, 48  # rows in sight at first, if the model is large; rows of a model that is not
_LINE = 160  # characters of a line of text


def compare_view(world: World) -> View:
    """Return the last comparison. Sections: workers, comparisons, modules, values, layouts.

    `comparisons` has one row at most: `names` and `sizes` of the mesh, whether all is `ok`, in `words`, the key of the
    `first` difference's value, the `ranks` that differ, the number of `values`, `steps`, and the step shown at first.
    `modules` (by name): `label`, `depth`, `parent` (None: none), `order`, whether it is `folded` at first, the keys of
    its `layouts`, by step, and the words of the `nearest` one, by step, where none fits.
    `values`: the rows of the table "verdicts". `layouts`: see `compare.report_rows`.
    """
    found = [(worker, row) for worker, _, row in rows_of(world, "comparisons")]
    view: View = {
        "workers": worker_rows(world, ()), "comparisons": {}, "modules": {}, "values": {}, "layouts": {},
    }  # fmt: skip
    if not found:
        return view
    worker, comparison = found[-1]
    own = {worker: world[worker]}
    values = dict(sorted(((key, row) for _, key, row in rows_of(own, "verdicts")), key=lambda item: item[1]["order"]))
    first = values.get(comparison["first"])
    last = max((row["step"] for row in values.values()), default=0)
    shown = {"steps": last + 1, "step": first["step"] if first else 0}
    view["comparisons"]["0"] = {**comparison, **shown}
    view["modules"] = _module_rows(values, first)
    view["values"] = values
    view["layouts"] = {key: row for _, key, row in rows_of(own, "layouts")}
    return view


# -- the tree
def _module_rows(values: Table, first: Row | None) -> Table:
    names = dict.fromkeys(("", *(row["name"] for row in values.values())))
    for name in list(names):
        names.update(dict.fromkeys(_ancestors(name)))
    layouts = _layouts_of(values.values())
    nearest = _nearest_layouts(values.values(), layouts)
    rows: Table = {}
    for n, name in enumerate(_in_order(names, values.values())):
        parent = _parent(name)
        inside = name if not parent else name[len(parent) + 1 :]
        rows[name] = {
            "name": name, "label": inside, "depth": len(_ancestors(name)), "parent": parent, "order": n,
            "folded": False, "layouts": layouts.get(name, {}), "nearest": nearest.get(name, {}),
        }  # fmt: skip
    for name in _choose_folded(rows, first):
        rows[name]["folded"] = True
    return rows


def _parent(name: str) -> str | None:
    """Return the name of the module around; None for the model itself."""
    return name.rpartition(".")[0] if name else None


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules around, the nearest first."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


def _in_order(names: Iterable[str], values: Iterable[Row]) -> Iterator[str]:
    """Yield a module, then what it holds: its own parameters, then modules in the order of their forwards."""
    forwards: dict[str, int] = {}
    for row in values:
        if row["phase"] == "forward":
            for name in (row["name"], *_ancestors(row["name"])):
                forwards.setdefault(name, row["order"])
    inside: dict[str | None, list[str]] = {}
    for name in names:
        inside.setdefault(_parent(name), []).append(name)
    waiting = [""]
    while waiting:
        name = waiting.pop()
        yield name
        held = sorted(inside.get(name, ()), key=lambda each: _place_in_module(each, each in inside, forwards))  # stable
        waiting += reversed(held)


def _place_in_module(name: str, holds: bool, forwards: dict[str, int]) -> tuple[bool, float]:
    return holds or name in forwards, forwards.get(name, math.inf)


def _layouts_of(values: Collection[Row]) -> dict[str, dict[str, str]]:
    """Return the key of the learnt layout by module and step. Initial values stand in for those of all steps."""
    found: dict[str, dict[str, tuple[int, str]]] = {}
    steps = range(max((row["step"] for row in values), default=0) + 1)
    for row in values:
        if row["word"] == "right" and row["layout"] and row["phase"] in _LAYOUT_PHASES:
            place = _LAYOUT_PHASES.index(row["phase"])
            by_step = found.setdefault(row["name"], {})
            for step in map(str, steps if row["phase"] == "initial" else [row["step"]]):
                by_step[step] = min(by_step.get(step, (len(_LAYOUT_PHASES), "")), (place, row["layout"]))
    return {name: {step: layout for step, (_, layout) in by_step.items()} for name, by_step in found.items()}


def _nearest_layouts(values: Iterable[Row], layouts: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Return the words of the nearest layout by module and step, of what is wrong and has no learnt one; they are empty
    where no layout has the right shapes."""
    found: dict[str, dict[str, str]] = {}
    for row in values:
        name, step = row["name"], str(row["step"])
        if row["word"] == "wrong" and row["phase"] in _LAYOUT_PHASES and step not in layouts.get(name, {}):
            found.setdefault(name, {}).setdefault(step, row["words"])
    return found


# -- what is folded
def _choose_folded(rows: Table, first: Row | None) -> set[str]:
    if len(rows) <= _MANY:
        return set()
    deepest = max(row["depth"] for row in rows.values())
    depths = Counter(row["depth"] for row in rows.values())
    depth = next((d for d in range(deepest, 1, -1) if sum(depths[n] for n in range(d + 1)) <= _FEW), 1)
    folded = {row["parent"] for row in rows.values() if row["depth"] > depth}
    return folded.difference((first["name"], *_ancestors(first["name"])) if first else ())


# -- text
def compare_text(view: View) -> tuple[str, list[str]]:
    """Return the view as text: a line with the sums, and the other lines."""
    if not view["comparisons"]:
        return f"{count_noun(len(view['workers']), 'member')}, nothing was compared", []
    (comparison,) = view["comparisons"].values()
    values = list(view["values"].values())
    counts = Counter(row["word"] for row in values)
    mesh = ", ".join(f"{name}={size}" for name, size in zip(comparison["names"], comparison["sizes"], strict=False))
    tally = ", ".join(f"{counts[word]} {word}" for word in VERDICT_MARKS if counts[word])
    lines = [shorten_words(f"  {comparison['words']}", 4 * _LINE)]
    lines += [shorten_words(f"  {_value_words(row)}", _LINE) for row in values if row["word"] == "wrong"]
    learnt = {row["name"]: row["words"] for row in values if row["word"] == "right" and row["phase"] == "forward"}
    lines += [shorten_words(f"  {name or '(model)'}: {words}", _LINE) for name, words in learnt.items() if words]
    return f"comparison of {count_noun(comparison['values'], 'value')} on ({mesh}): {tally}", lines


def _value_words(row: Row) -> str:
    """Return a wrong value in words: `step 1: gradient 0.weight: error 0.3, allowed 1e-06`."""
    step = f"step {row['step']}: " if row["step"] else ""
    call = "" if row["call"] is None else f" call {row['call']}"
    name = f"{row['name'] or '(model)'}{row['part']}{call}"
    return f"{step}{row['phase']} {name}: error {_number_words(row['error'])}, allowed {_number_words(row['allowed'])}"


def _number_words(number: Any) -> str:
    return "infinite" if number is None else f"{number:.2g}"
