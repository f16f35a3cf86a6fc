"""The view of the metrics panel: curves of what the ranks log, which of them diverge, and the points as CSV.

Guarantees
- A curve is of one process and of the last run of its name there. A worker has another one after its restart.
- The curve of a process that has ended stays, unless its successor logs that name from a smaller step and no other rank
  is in a run, its last one, that went on at the same time.
- Of more than `ALL_SHOWN` points a curve shows real ones: of each `BUCKET` the lowest and the highest, so no peak is
  lost. The CSV has all points that are kept, of all runs.
- A value that is said to be at a step is of that step, and of a rank that does not diverge.
- A rank diverges by two rules only, which `find_divergence` has; a curve without others is never called far.
- A row of points changes only while its block grows.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row, Table
from rpcbench.runtime import current, metrics
from rpcbench.runtime.members import GONE
from rpcbench.telemetry.collector import LIVE, Collector, Phase
from rpcbench.telemetry.recording import make_lone_world, save_text
from rpcbench.telemetry.views import View, World, is_up, worker_rows

ALL_SHOWN, BUCKET = 1000, 20
RECENT, LEAST, OTHERS, FACTOR = 20, 5, 2, 3.0
"""To judge whether a rank is far: the points compared, the fewest of them, the fewest other ranks, and how many widths
of the others' range it must be away."""
_FINEST = 0.01  # least width of that range, as a share of its largest value: ranks that agree differ by rounding
_BLOCKS = 2**32  # more than an incarnation has: so the order of blocks is that of incarnations first
_NAMED = 4  # ranks that a line of the text names
_ENDS = {"lost": "was lost", "restarted": "was started again"}
HEADS = ("name", "worker", "run", "step", "value")
"""The columns of the CSV."""


class ShownCurve(NamedTuple):
    """The blocks of a curve, with its process and name."""

    worker: int
    incarnation: int
    name: str
    blocks: list[Row]

    @property
    def process(self) -> str:
        return f"{self.worker}.{self.incarnation}" if self.incarnation else str(self.worker)


def metrics_view(world: World) -> View:
    """Return the metrics of all members. Sections: workers, metrics, curves, ends, points.

    `metrics` (by name): its `order`, the `step` of its last point, and how many ranks `diverge`.
    `curves` (`worker/name`, or `worker.incarnation/name` of a process after a restart): the number of `count` points
    in the last run, the last `step` and its `value` as a number, or as text if it is not finite; `state`: "" or how it
    diverges, "nan" or "far", and that in `words`; `ended`: "" or what happened to its process since, "lost",
    "restarted" or "stopped".
    `ends` (`worker` or `worker.incarnation`): the same of each process that has ended, and the `name` and `step` that
    it logged last.
    `points` (`worker/number`): those of a block that are shown: `curve`, `steps`, `values`, and in `odd` [step, text,
    count] of its first value that is not finite, and how many there are; else None. `odds`: [first step, last step,
    text] where one such value follows the other.
    """
    kept = {worker: _member_blocks(member) for worker, member in world.items()}
    found = {f"{curve.process}/{curve.name}": curve for curve in _find_shown(kept)}
    curves = {key: _curve_row(curve, world[curve.worker]) for key, curve in found.items()}
    names: Table = {}
    for name in sorted({row["name"] for row in curves.values()}, key=lambda name: (_order_of(curves, name), name)):
        mine = {key: row for key, row in curves.items() if row["name"] == name}
        _judge_curves(mine, found, world)
        diverge = len({row["worker"] for row in mine.values() if row["state"]})
        step = max(row["step"] for row in latest_curves(mine.values()))
        names[name] = {"name": name, "order": len(names), "step": step, "diverge": diverge}
    ends = {
        curve.process: _end_row(curve, curves[key]["ended"], kept)
        for key, curve in found.items()
        if curves[key]["ended"]
    }
    points = dict(_shown_points(found))
    return {"workers": worker_rows(world, ()), "metrics": names, "curves": curves, "ends": ends, "points": points}


def _member_blocks(member: dict[str, Any]) -> dict[str, list[Row]]:
    """Return the blocks of a member by name, oldest first, with their key, `incarnation` and the number of the run.

    The collector has put an incarnation into the rows of former processes only: those are `former`."""
    by_name: dict[str, list[Row]] = {}
    own = member["incarnation"]
    table = member["tables"].get("metrics", {})
    rows = [{"incarnation": own, **row, "key": key, "former": "incarnation" in row} for key, row in table.items()]
    for row in sorted(rows, key=lambda row: (row["incarnation"], row["order"], row["block"])):
        by_name.setdefault(row["name"], []).append(row)
    for blocks in by_name.values():
        _join_runs(blocks)
    return by_name


def _join_runs(blocks: list[Row]) -> None:
    """Number the runs of all incarnations on. One that goes on with larger steps is in the run of the one before."""
    first = 0  # number of the first run of an incarnation
    for before, block in pairwise(blocks):
        if block["incarnation"] != before["incarnation"]:
            ends, begins = _points_of(before), _points_of(block)
            goes_on = bool(ends and begins) and ends[-1][0] < begins[0][0]
            first = before["run"] + (not goes_on) - block["run"]
        block["run"] += first


def _find_shown(kept: dict[int, dict[str, list[Row]]]) -> Iterator[ShownCurve]:
    """Return the curves that are shown, those of former processes first."""
    spans = {
        (worker, name): _span_of(_last_run(blocks))
        for worker, by_name in kept.items()
        for name, blocks in by_name.items()
    }
    for worker, by_name in kept.items():
        for name, blocks in by_name.items():
            for incarnation, rows in groupby(blocks, key=itemgetter("incarnation")):
                own = _last_run([*rows])
                others = (span for (other, each), span in spans.items() if each == name and other != worker)
                if own[-1]["run"] == blocks[-1]["run"] or any(_do_overlap(_span_of(own), span) for span in others):
                    yield ShownCurve(worker, incarnation, name, own)


def _last_run(blocks: list[Row]) -> list[Row]:
    return [row for row in blocks if row["run"] == blocks[-1]["run"]]


def _span_of(blocks: list[Row]) -> tuple[float, float]:
    return blocks[0]["times"][0], blocks[-1]["times"][1]


def _do_overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _order_of(curves: Table, name: str) -> int:
    return min(int(row["order"]) for row in curves.values() if row["name"] == name)


def _points_of(block: Row) -> list[tuple[int, float, str]]:
    """Return (step, value, its text) of all points of a block in their order; a value as text alone is NaN."""
    points = [(step, value, repr(value)) for step, value in zip(block["steps"], block["values"], strict=False)]
    for before, step, text in reversed(block["odd"]):
        points.insert(before, (step, math.nan, text))
    return points


def _curve_row(curve: ShownCurve, member: dict[str, Any]) -> Row:
    blocks = curve.blocks
    last = next((points[-1] for block in reversed(blocks) if (points := _points_of(block))), (0, math.nan, ""))
    step, value, text = last
    return {
        "worker": curve.worker, "incarnation": curve.incarnation, "name": curve.name, "order": blocks[-1]["order"],
        "step": step, "count": sum(len(block["steps"]) + len(block["odd"]) for block in blocks),
        "value": text if math.isnan(value) else value, "state": "", "words": "", "ended": _end_of(blocks[-1], member),
    }  # fmt: skip


def _end_of(block: Row, member: dict[str, Any]) -> str:
    if block["former"]:
        return "restarted"
    return "" if member["state"] not in GONE else "lost" if member["state"] == "lost" else "stopped"


def _end_row(curve: ShownCurve, ended: str, kept: dict[int, dict[str, list[Row]]]) -> Row:
    """Return the end of a process: its last values by time, also where a later run is shown in its place."""
    rows = [row for each in kept[curve.worker].values() for row in each if row["incarnation"] == curve.incarnation]
    last = max(rows, key=lambda row: (row["times"][1], -row["order"]))
    return {"worker": curve.worker, "ended": ended, "name": last["name"], "step": _points_of(last)[-1][0]}


def latest_curves(curves: Iterable[Row]) -> list[Row]:
    """Return the curves of a metric without those of former processes, but all of them where there are no others."""
    rows = [*curves]
    return [row for row in rows if row["ended"] != "restarted"] or rows


# -- what diverges
def find_divergence(last: float | str, recent: list[float], others: list[list[float]]) -> tuple[str, str]:
    """Return how a rank diverges, "nan", "far" or "", and why, in words.

    It does so where its last value is not finite. Or else where the median of its last 20 points lies outside the range
    that the last 20 points of all other ranks have together, by more than three times the width of that range, which
    counts as one percent of its largest value at least. All are compared up to the last step that each of them has; a
    rank with fewer than five finite points there is not compared, and two others are needed, as of two ranks nobody can
    say which one is wrong.

    Args:
        last: the last value, as text if it is not finite.
        recent: the finite ones of the last points of the rank, up to a step that all ranks have.
        others: those of each other rank, none of one that is not there.
    """
    if isinstance(last, str):
        return "nan", f"is {last}"
    known = [values for values in others if len(values) >= LEAST]
    if len(recent) < LEAST or len(known) < OTHERS:
        return "", ""
    low, high = min(map(min, known)), max(map(max, known))
    width = max(high - low, _FINEST * max(abs(low), abs(high)))
    middle = median(recent)
    if max(low - middle, middle - high) <= FACTOR * width:
        return "", ""
    them = "all" if len(known) == len(others) else len(known)
    return "far", f"is about {middle:.4g} where {them} others are between {low:.4g} and {high:.4g}"


def _judge_curves(mine: Table, found: dict[str, ShownCurve], world: World) -> None:
    """Compare the curves of one metric, each with the latest one of each other rank."""
    newest = {row["worker"]: key for key, row in mine.items()}
    ends = {  # a lost rank holds nobody back
        worker: mine[key]["step"] for worker, key in newest.items() if is_up(world, worker) and not mine[key]["ended"]
    }
    recent: dict[tuple[str, int], list[float]] = {}

    def recent_values(key: str, until: int) -> list[float]:
        if mine[key]["step"] < until:
            return []
        if (key, until) not in recent:
            recent[key, until] = _recent_values(found[key].blocks, until)
        return recent[key, until]

    for key, row in mine.items():
        until = min([row["step"], *(end for worker, end in ends.items() if worker != row["worker"])])
        others = [recent_values(other, until) for worker, other in newest.items() if worker != row["worker"]]
        row["state"], words = find_divergence(row["value"], recent_values(key, until), others)
        row["words"] = words.replace("is ", "was ").replace(" are ", " were ") if row["ended"] else words


def _recent_values(blocks: list[Row], until: int) -> list[float]:
    """Return the finite ones of the last points up to a step: so none of a rank that has long been NaN."""
    values: list[float] = []
    for block in reversed(blocks):
        odd = [(step, math.nan) for _, step, _ in block["odd"]]
        pairs = sorted([*zip(block["steps"], block["values"], strict=False), *odd], key=itemgetter(0))
        values = [value for step, value in pairs if step <= until] + values
        if len(values) >= RECENT:
            break
    return [value for value in values[-RECENT:] if not math.isnan(value)]


# -- the points that are shown
def _shown_points(found: dict[str, ShownCurve]) -> Iterator[tuple[str, Row]]:
    for key, (worker, _, _, blocks) in found.items():
        is_all = sum(len(block["steps"]) for block in blocks) <= ALL_SHOWN
        for block in blocks:
            chosen = range(len(block["steps"])) if is_all else _extremes(block["values"])
            odd = [*block["odd"][0][1:], len(block["odd"])] if block["odd"] else None
            yield f"{worker}/{block['key']}", {
                "curve": key, "order": block["incarnation"] * _BLOCKS + block["block"],
                "steps": [block["steps"][i] for i in chosen], "values": [block["values"][i] for i in chosen],
                "odd": odd, "odds": [*_odd_spans(block["odd"])],
            }  # fmt: skip


def _odd_spans(odd: list[list[Any]]) -> Iterator[list[Any]]:
    for (_, text), values in groupby(odd, key=lambda one: (one[0], one[2])):  # none with a number between them
        steps = [step for _, step, _ in values]
        yield [steps[0], steps[-1], text]


def _extremes(values: list[float]) -> list[int]:
    """Return the places of the lowest and the highest value of each bucket, in order."""
    places: set[int] = set()
    for begin in range(0, len(values), BUCKET):
        bucket = values[begin : begin + BUCKET]
        places |= {begin + bucket.index(min(bucket)), begin + bucket.index(max(bucket))}
    return sorted(places)


# -- text and files
def metrics_text(view: View) -> tuple[str, list[str]]:
    """Return the first line, with counts, and a line for each rank that diverges or was lost and for each metric."""
    names = {int(key): str(row["name"]) for key, row in view["workers"].items()}
    curves = [*view["curves"].values()]
    bad = [row for row in curves if row["state"]]
    counts = f"{count_noun(len(view['metrics']), 'metric')}, {count_noun(len(curves), 'curve')}"
    first = f"{count_noun(len(names), 'member')}, {counts}{f', {len(bad)} diverged' if bad else ''}"
    warned = [f"  {row['name']} of {_whose(row, names)} {row['words']}" for row in bad]
    ended = [
        f"  {names[row['worker']]} {_ENDS[row['ended']]} after step {row['step']:,} of {row['name']}"
        for row in view["ends"].values()
        if row["ended"] in _ENDS
    ]
    return first, [*warned, *ended, *(_metric_line(name, curves, names) for name in view["metrics"])]


def _whose(row: Row, names: dict[int, str]) -> str:
    return f"{names[row['worker']]}{' before its restart' if row['ended'] == 'restarted' else ''}"


def _metric_line(name: str, curves: list[Row], names: dict[int, str]) -> str:
    """Return the values at the last step of the ranks that do not diverge, and which ranks are left out."""
    mine = latest_curves(row for row in curves if row["name"] == name)
    steady = [row for row in mine if not row["state"]] or mine
    step = max(row["step"] for row in steady)
    there = [row for row in steady if row["step"] == step and not isinstance(row["value"], str)]
    if not there:
        return f"  {name} at step {step:,}: no finite value"
    values = [row["value"] for row in there]
    spread = f"median {median(values):.4g}, from {min(values):.4g} to {max(values):.4g}"
    told = f"{values[0]:.4g}" if len(values) == 1 else spread
    whole = f" on {len(mine)} ranks" if len(mine) > 1 else ""
    return f"  {name} at step {step:,}: {told}{_missing_words(mine, there, step, names) or whole}"


def _missing_words(mine: list[Row], there: list[Row], step: int, names: dict[int, str]) -> str:
    away = [row for row in mine if row not in there]
    if not away:
        return ""
    words = [_whose(row, names) + f" at step {row['step']:,}" * (row["step"] != step) for row in away]
    more = f" and {len(away) - _NAMED} more" if len(away) > _NAMED else ""
    return f" on {len(there)} of {len(mine)} ranks, without {', '.join(words[:_NAMED])}{more}"


def metrics_csv(world: World) -> str:
    """Return all points of all members as CSV, with the columns of `HEADS`."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(HEADS)
    for member in world.values():
        for name, blocks in _member_blocks(member).items():
            for block in blocks:
                own = name, member["name"], block["run"]
                rows.writerows((*own, step, word) for step, _, word in _points_of(block))
    return text.getvalue()


def save_metrics(path: str | Path) -> Path:
    """Write all points that `rpcbench.log` has kept as CSV: name, worker, run, step, value.

    It has those of all members of the current cluster, or without one those of this process.

    Args:
        path: of the file.

    Returns:
        The path.

    Raises:
        OSError: The file cannot be written.
    """
    agent = current.find_current()
    if agent is None:
        return save_text(path, metrics_csv(LONE_METRICS.world()))
    collector = agent.part(Collector)
    stop = collector.subscribe(lambda: None)
    try:
        collector.settle()
        return save_text(path, metrics_csv(collector.world()))
    finally:
        stop()


class LoneMetrics:
    """The metrics of this process before it has an agent, as a source of worlds for panels."""

    @property
    def phase(self) -> Phase:
        taken = metrics.WITHOUT_AGENT.copied_at
        return LIVE if taken is None else Phase("stopped", time.time() - (time.monotonic() - taken))

    def subscribe(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` after each change; return a function that ends that."""
        return metrics.WITHOUT_AGENT.add_watcher(wake)

    def world(self) -> World:
        return make_lone_world({"metrics": metrics.WITHOUT_AGENT.table()})


LONE_METRICS = LoneMetrics()
