"""The columns of the workers panel, in one list.

Guarantees
- A new figure of a worker needs its measurement (`runtime.publisher.Health`) and one row of `WORKER_COLUMNS`. The view,
  the table with its heads, tooltips, curves, folds, legend and help, the text, the still picture, the history and the
  charts of the panel of resources, and the check of records read this list.
- A member, or a record, of another version may lack a figure: its value is None, and nothing is drawn for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rpcbench.base.errors import count_noun, format_bytes, format_part
from rpcbench.base.ids import Row

SHAPES: dict[str, type] = {"share": float, "bytes": int, "count": int, "text": str}
"""The kinds of columns for figures, with the types of their values."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. The kinds that are not in `SHAPES` have code of their own in `panels/workers.js`."""

    key: str  # field of a row of the view, and CSS class of the cells
    head: str
    kind: str
    help: str  # one or two sentences: the tooltip of the head, and a part of the panel's help
    source: str = ""  # place of the figure in a row of the table "health", as `gpu.use`; by default `key`
    whole: str = ""  # place of the amount of which the figure is a part
    is_of_host: bool = False  # the whole belongs to the host: with one host it stands above the table
    is_optional: bool = False  # the column is there only while a worker has the figure
    curve: str = ""  # colour of a curve of the last minute; such a column has a chart in the panel of resources
    is_rate: bool = False  # only the chart has the curve: the change of the figure in a second
    limit: str = ""  # place of the amount that the machine or the GPU has; a text counts as one
    level: float | None = None  # a value that a dashed line marks in the curve
    remark: str = ""  # a part of the legend, behind the scale of the curve
    fold: int = 25  # columns with low numbers are the first to fold where there is no room; 0: never
    detail: str = ""  # its name in the open row; by default the head
    words: str = "{head} {value}"  # in texts


WORKER_COLUMNS = (
    Column(
        "name", "worker", "name", fold=0,
        help="A click on a name opens the row: all figures, the bytes for each peer, and the end of its output.",
    ),
    Column(
        "now", "now", "activity", fold=0,
        help="“now” is its activity: it runs a cell or a call, waits for another worker, has calls under way for which "
        "it does not wait, or is idle.",
    ),
    Column(
        "cpu", "CPU", "share", curve="blue", limit="cores", level=1, remark="dashed: 100 %, one core", fold=98,
        help="100 % of CPU is one core.",
    ),
    Column(
        "memory", "memory", "bytes", whole="ram", is_of_host=True, curve="purple", limit="ram", fold=96,
        help="The memory is the bytes that no other process shares; the second figure is that of its machine.",
    ),
    Column(
        "gpu", "GPU", "text", source="gpu.name", is_optional=True, fold=60,
        help="The columns for GPUs are there while a worker has a GPU of its own.",
    ),
    Column(
        "gpu_memory", "GPU memory", "bytes", source="gpu.memory", whole="gpu.total", is_optional=True, curve="green",
        limit="gpu.total", fold=94, help="GPU memory is the bytes in use there, by all processes.",
    ),
    Column(
        "gpu_use", "GPU use", "share", source="gpu.use", is_optional=True, curve="orange", limit="gpu.name",
        fold=92,
        help="GPU use is the share of time in which it computes.",
    ),
    Column(
        "threads", "threads", "threads", fold=50, words="{value}",
        help="Full squares are threads that run a function, hollow ones wait.",
    ),
    Column(
        "queued", "queue", "count", fold=40, detail="calls in the queue", words="{value} queued",
        help="“queue” counts calls that have arrived and not begun.",
    ),
    Column(
        "bytes", "bytes", "traffic", fold=20, detail="bytes sent and received", curve="teal", is_rate=True,
        help="“bytes” are those sent and received, through shared memory too.",
    ),
    Column("log", "last output", "log", "The last output is the last line that it wrote outside cells.", fold=10),
    Column(
        "acts", "buttons", "buttons", fold=0,
        help="“stack” shows the lines of Python that its threads run now, also while a cell runs. “interrupt” stops "
        "the cell that runs there, “restart” ends the process and starts it again.",
    ),
)  # fmt: skip


def _figures() -> list[Column]:
    return [column for column in WORKER_COLUMNS if column.kind in SHAPES]


def read_figures(told: Row) -> Row:
    """Return the figures of a row of the table "health" by their keys; that of which one is a part as `KEY_whole`."""
    found: Row = {}
    for column in _figures():
        found[column.key] = _look_up(told, column.source or column.key)
        if column.whole:
            found[f"{column.key}_whole"] = _look_up(told, column.whole)
    return found


def _look_up(row: Row, place: str) -> Any:
    outer, _, inner = place.rpartition(".")
    return ((row.get(outer) or {}) if outer else row).get(inner)


def figure_shapes() -> dict[str, Any]:
    """Return the shape of the figures in a row of the table "health", as `record_schema` has shapes."""
    found: dict[str, Any] = {}
    for column in _figures():
        for place in filter(None, (column.source or column.key, column.whole, column.limit)):
            outer, _, inner = place.rpartition(".")
            fields = found.setdefault(f"{outer}?", (None, {}))[1] if outer else found
            fields.setdefault(f"{inner}?", (None, SHAPES[column.kind]))
    return found


def view_shapes() -> dict[str, Any]:
    """Return the shape of what `read_figures` returns."""
    found: dict[str, Any] = {}
    for column in _figures():
        found[column.key] = (None, SHAPES[column.kind])
        if column.whole:
            found[f"{column.key}_whole"] = (None, SHAPES[column.kind])
    return found


def chart_columns() -> list[Column]:
    """Return the columns whose figures the panel of resources shows over time."""
    return [column for column in WORKER_COLUMNS if column.curve]


def is_of_gpu(key: str) -> bool:
    """Return whether the figure of this column is that of a GPU, and not of a process."""
    return any(column.key == key and column.source.startswith("gpu.") for column in WORKER_COLUMNS)


def read_levels(told: Row) -> dict[str, float]:
    """Return the known figures with a chart, but for rates, of a row of the table "health"."""
    found = {one.key: _look_up(told, one.source or one.key) for one in chart_columns() if not one.is_rate}
    return {key: value for key, value in found.items() if value is not None}


def read_limits(told: Row) -> dict[str, tuple[str, float]]:
    """Return by the keys of figures the machine or GPU that a member uses, and the amount that it has in all."""
    found: dict[str, tuple[str, float]] = {}
    for column in chart_columns():
        amount = _look_up(told, column.limit) if column.limit else None
        if amount is not None:
            gpu = _look_up(told, "gpu.name") if column.limit.startswith("gpu.") else ""
            found[column.key] = f"{told.get('host', '')} {gpu}", 1 if isinstance(amount, str) else amount
    return found


def _format_value(column: Column, row: Row) -> str:
    """Return the figure of a worker as text; empty where it is unknown."""
    if column.kind == "threads":
        return "" if row["busy"] is None else f"{row['busy']} busy, {row['waiting']} waiting"
    value = row[column.key]
    if value is None:
        return ""
    whole = row.get(f"{column.key}_whole")
    if whole is None or column.is_of_host:
        return _FORMATS.get(column.kind, str)(value)
    return format_part(value, whole)


_FORMATS: dict[str, Callable[[Any], str]] = {
    "share": lambda value: f"{100 * value:.0f} %", "bytes": format_bytes,
}  # fmt: skip


def figure_words(row: Row) -> str:
    """Return the known figures of a worker: `CPU 50 %, memory 20.0 MB, 1 busy, 0 waiting, 0 queued`."""
    named = [(one, _format_value(one, row)) for one in WORKER_COLUMNS if one.kind in (*SHAPES, "threads")]
    return ", ".join(one.words.format(head=one.head, value=value) for one, value in named if value)


_DOING = {"cell": "runs a cell", "busy": "runs a call", "idle": "idle", "": "no report yet"}
_STATES = {"left": "stopped", "stopped": "suspended", "suspect": "no answer", "starts": "starts …"}


def activity_words(row: Row) -> str:
    """Return a worker's activity, or its end, in a few words."""
    doing, awaits, more = row["doing"], row["awaits"], (row["cells"] or 0) - 1
    if row["state"] == "lost":
        return f"lost: {row['ended']}" if row["ended"] else "lost"
    if row["state"] != "up":
        return str(_STATES.get(row["state"], row["state"]))  # a record may have states of a later version
    if doing == "silent":
        return f"no answer for {row['silent']} s"
    if doing == "idle" and row["under_way"]:
        return f"{count_noun(row['under_way'], 'call')} under way"
    if doing == "waits":
        return f"waits for {awaits}" if awaits else "waits"
    queue = f", {more} more {'waits' if more == 1 else 'wait'}" if doing == "cell" and more > 0 else ""
    return f"{_DOING[doing]}{queue}{f', waits for {awaits}' if awaits and doing else ''}"
