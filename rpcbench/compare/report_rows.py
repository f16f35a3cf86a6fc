"""The tables "comparisons", "verdicts" and "layouts": a report as rows, for panels, pictures and records.

Guarantees
- Rows are plain data, and all numbers in them are finite: None stands for an error that is not.
- A member keeps the rows of its last report. Of a report with more than `MOST` values, the wrong ones have rows first.
- A layout is drawn as pieces of a box. Uneven pieces are drawn as even ones; its words are exact.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterator

from rpcbench.base.ids import Row, Table
from rpcbench.compare.capture import INPUT
from rpcbench.compare.evidence import rank_number, rank_words
from rpcbench.compare.layouts import CUT, SUM, Coordinate, Layout, MeshShare, positions
from rpcbench.compare.report import CompareReport, Difference
from rpcbench.compare.verdicts import WRONG, Mesh, ValueVerdict
from rpcbench.runtime.agent import Agent

MOST = 5000  # values with rows
_LARGEST = 2.0**62  # what records take
_FINE = 12  # parts into which a piece of a box is divided at most: as many as the ways to deal a dimension need


class Comparisons:
    """The tables of the last report of an agent's comparisons. One for each agent: `agent.part(Comparisons)`."""

    def __init__(self, agent: Agent) -> None:
        self._bus = agent.links.bus
        self._lock = threading.Lock()
        self._tables = report_tables(None)
        for name in self._tables:
            self._bus.register_table(name, functools.partial(self.latest_table, name))

    def latest_table(self, name: str) -> Table:
        with self._lock:
            return self._tables[name]

    def show_report(self, report: CompareReport) -> None:
        """Make a report the last one."""
        tables = report_tables(report)
        with self._lock:
            before, self._tables = self._tables, tables
        for name, table in tables.items():
            for key in {**before[name], **table}:
                self._bus.record_change("Compared", name, key, functools.partial(table.get, key))


def report_tables(report: CompareReport | None) -> dict[str, Table]:
    """Return the tables of a report: its one row of "comparisons", a row of "verdicts" for each value that the text of
    a report has, and of "layouts" for each way in which the ranks have a right one."""
    tables: dict[str, Table] = {"comparisons": {}, "verdicts": {}, "layouts": {}}
    if report is None:
        return tables
    shown = {str(n): each for n, each in enumerate(report.verdicts) if each.key.phase != INPUT}
    for key in _choose_values(shown):
        row = tables["verdicts"][key] = _verdict_row(int(key), shown[key], report.mesh)
        if row["layout"] and row["layout"] not in tables["layouts"]:
            tables["layouts"][row["layout"]] = _layout_row(shown[key], report.mesh)
    tables["comparisons"]["0"] = {
        "names": list(report.mesh.names), "sizes": list(report.mesh.sizes), "ok": report.ok, "values": len(shown),
        "words": str(report).partition("\n")[0], "first": _find_key(shown, report.first),
        "ranks": list(report.first.ranks) if report.first else [],
    }  # fmt: skip
    return tables


def _choose_values(shown: dict[str, ValueVerdict]) -> list[str]:
    if len(shown) <= MOST:
        return [*shown]
    return sorted(sorted(shown, key=lambda key: shown[key].word != WRONG)[:MOST], key=int)


def _find_key(shown: dict[str, ValueVerdict], first: Difference | None) -> str:
    """Return the key of the first difference's value; empty if all is right."""
    if first is None:
        return ""
    place = first.step, first.phase, first.name
    found = [key for key, each in shown.items() if (each.key.turn, each.key.phase, each.key.name) == place]
    return next((key for key in found if shown[key].word == WRONG), found[0] if found else "")


def _verdict_row(order: int, verdict: ValueVerdict, mesh: Mesh) -> Row:
    key = verdict.key
    return {
        "order": order, "step": key.turn, "phase": key.phase, "name": key.name, "part": key.part,
        "call": verdict.call, "word": verdict.word, "layout": _layout_key(verdict, mesh), "words": verdict.layout,
        "error": _finite(verdict.error), "allowed": _finite(verdict.allowed), "norm": _finite(verdict.norm),
        "factor": _finite(verdict.factor), "shape": list(verdict.shape), "dtype": verdict.dtype,
        "ranks": _rank_numbers(mesh, verdict.places), "missing": _rank_numbers(mesh, verdict.missing),
        "errors": _errors_by_rank(verdict, mesh),
        "maps": [[list(each.ranks), list(each.shape), [list(row) for row in each.cells]] for each in verdict.maps],
        "largest": _finite(verdict.maps[0].largest) if verdict.maps else None,
    }  # fmt: skip


def _rank_numbers(mesh: Mesh, places: tuple[Coordinate, ...]) -> list[int]:
    return sorted(rank_number(mesh.sizes, place) for place in places)


def _errors_by_rank(verdict: ValueVerdict, mesh: Mesh) -> list[list[float | None]]:
    """Return [rank, norm of its difference] of each rank, for the layout of the verdict."""
    if verdict.fit is None:
        return []
    found = verdict.fit.by_rank.items()
    return sorted([rank_number(mesh.sizes, verdict.whole_places[place]), _finite(error)] for place, error in found)


def _finite(number: float) -> float | None:
    return number if abs(number) < _LARGEST else None  # so for a number that is none, too


# -- drawings of layouts
def _layout_key(verdict: ValueVerdict, mesh: Mesh) -> str:
    """Return what names a drawing: the layout, and the ranks if only some have the value. Empty without a layout."""
    if verdict.fit is None:
        return ""
    everywhere = len(verdict.places) == math.prod(mesh.sizes)
    on = "" if everywhere else f"on {rank_words(mesh.sizes, verdict.places)}"
    return f"{verdict.layout} {on}".strip()


def _layout_row(verdict: ValueVerdict, mesh: Mesh) -> Row:
    """Return the drawing of a layout: for each rank of the whole mesh the blocks that it has, None without a value."""
    assert verdict.fit is not None and verdict.mesh is not None
    layout = verdict.fit.layout
    boxes: list[list[list[float]] | None] = [None] * math.prod(mesh.sizes)
    for place, blocks in zip(_places_of(verdict.mesh), draw_layout(layout, verdict.mesh.sizes), strict=True):
        if (rank := rank_number(mesh.sizes, verdict.whole_places[place])) < len(boxes):  # a driver has no box
            boxes[rank] = [list(block) for block in blocks]
    return {
        "words": _layout_key(verdict, mesh), "names": list(mesh.names), "sizes": list(mesh.sizes), "boxes": boxes,
        "summed": layout.has_kind(SUM),
    }  # fmt: skip


def _places_of(mesh: Mesh) -> Iterator[Coordinate]:
    return itertools.product(*map(range, mesh.sizes))


Block = tuple[float, float, float, float]
"""Left, top, width and height in a box, as shares of it."""


@functools.cache
def draw_layout(layout: Layout, sizes: tuple[int, ...]) -> tuple[tuple[Block, ...], ...]:
    """Return, for each rank of a mesh in row-major order, the blocks that it has of a box for the tensor.

    Dimension 0 of the tensor runs down. Across runs dimension 1, or a later one if that is the one that is cut.
    """
    across = next((share.dim for share in layout.shares if share.kind == CUT and share.dim > 0), 1)
    found = []
    for place in itertools.product(*map(range, sizes)):
        rows, columns = (list(_find_runs(layout, sizes, place, dim)) for dim in (0, across))
        found.append(tuple((x, y, width, height) for y, height in rows for x, width in columns))
    return tuple(found)


def _find_runs(layout: Layout, sizes: tuple[int, ...], place: Coordinate, dim: int) -> Iterator[tuple[float, float]]:
    """Yield begin and length of each run of indices that a rank has along a dimension, as shares of its size."""
    cuts = []
    for m in layout.order:
        share = layout.shares[m]
        if share.kind == CUT and share.dim == dim:
            even = MeshShare(CUT, dim) if share.deal == "as they are" else share
            cuts.append((even, sizes[m], place[m]))
    size = _FINE * math.prod(count for _, count, _ in cuts)
    held: list[int] = positions(size, cuts).tolist()
    begin = 0
    for n in range(1, len(held) + 1):
        if n == len(held) or held[n] != held[n - 1] + 1:
            yield round(held[begin] / size, 4), round((n - begin) / size, 4)
            begin = n
