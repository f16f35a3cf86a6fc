"""The views of the panels of resources and of traffic: pure functions from the tables of all members, and their texts.

Guarantees
- A view has the history that `resource_history` has made, and adds no figure: a time without samples has none.
- A change of a view is one sample for a second, or the senders that have sent something; never the whole history.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rpcbench.base.errors import count_noun, format_bytes
from rpcbench.base.ids import Row
from rpcbench.telemetry.views import View, World, rows_of, worker_rows
from rpcbench.telemetry.worker_columns import Column, chart_columns

MEMBER_COLOURS = ("blue", "amber", "green", "purple", "indigo", "olive", "teal", "orange")
"""Of the members in charts, in their order; more members have the same ones again."""
TRAFFIC_SPANS = ("second", "ten", "all")
"""The first figures of a flow: bytes per second, of the last second and of ten, and all bytes."""


def resources_view(world: World) -> View:
    """Return the figures of all members over time. Sections: workers, samples.

    `samples` (`step/at`): the figures at `at`, in seconds since 1970, as the mean of the `step` seconds before. In `of`
    are the values by key of a chart and by member, in `limits` what all their machines or GPUs have, in `began` the
    members whose process has been started again since the sample before.
    """
    return {"workers": worker_rows(world, ()), "samples": {key: row for _, key, row in rows_of(world, "samples")}}


def traffic_view(world: World) -> View:
    """Return the bytes that members send to one another. Sections: workers, flows.

    `flows`: a row for each sender: `to` has by receiver the figures of `TRAFFIC_SPANS`, and the bytes in shared memory,
    all counted by the sender since it has its present connections. "ten" is of the last `seconds`, ten at most: figures
    begin when somebody looks. A `silent` sender has not answered of late.
    """
    return {"workers": worker_rows(world, ()), "flows": {key: row for _, key, row in rows_of(world, "traffic")}}


def chart_title(column: Column) -> str:
    """Return the name of a column's chart."""
    return f"{column.detail or column.head} per second" if column.is_rate else column.head


def chart_rows() -> list[dict[str, Any]]:
    """Return the charts, for the drawing code."""
    return [
        {
            "key": one.key, "title": chart_title(one), "short": f"{one.head}/s" if one.is_rate else one.head,
            "kind": "rate" if one.is_rate else one.kind,
        }
        for one in chart_columns()
    ]  # fmt: skip


def _figure_text(column: Column, value: float) -> str:
    if column.kind == "share":
        return f"{100 * value:.0f} %"
    return f"{format_bytes(round(value))}{'/s' if column.is_rate else ''}"


def resources_text(view: View) -> tuple[str, list[str]]:
    """Return the first line, with the number of samples, and a line for each chart, with the last values."""
    names = {key: str(row["name"]) for key, row in view["workers"].items()}
    rows = sorted(view["samples"].values(), key=lambda row: (row["at"], -row["step"]))
    first = f"{count_noun(len(names), 'member')}, {count_noun(len(rows), 'sample')}"
    if not rows:
        return f"{first}: the first one comes while somebody looks", []
    last = next(row for row in reversed(rows) if row["at"] == rows[-1]["at"])
    lines = [_chart_line(column, rows, last, names) for column in chart_columns() if last["of"].get(column.key)]
    return f"{first} in {last['at'] - rows[0]['at'] + rows[0]['step']} s", lines


def _chart_line(column: Column, rows: list[Row], last: Row, names: dict[str, str]) -> str:
    values = last["of"][column.key]
    limit = last["limits"].get(column.key)
    most = max(sum(row["of"].get(column.key, {}).values()) for row in rows)
    each = sorted(values.items(), key=lambda item: -item[1])
    told = ", ".join(f"{names.get(key, f'id {key}')} {_figure_text(column, value)}" for key, value in each)
    of = f" of {_figure_text(column, limit)}" if limit else ""
    total, top = _figure_text(column, sum(values.values())), _figure_text(column, most)
    return f"  {chart_title(column)} {total}{of} (at most {top}): {told}"


def traffic_text(view: View) -> tuple[str, list[str]]:
    """Return the first line, with sums, and a line for each pair, the busiest first: all of the last ten seconds, as in
    the picture."""
    names = {key: str(row["name"]) for key, row in view["workers"].items()}
    pairs = [(key, peer, flow) for key, row in view["flows"].items() for peer, flow in row["to"].items()]
    sums: Counter[int] = Counter()
    for _, _, flow in pairs:
        sums.update(dict(enumerate(flow)))
    lately, every = format_bytes(sums[1]), format_bytes(sums[2])
    silent = [names.get(key, f"id {key}") for key, row in view["flows"].items() if row["silent"]]
    unknown = f"; no figures of {', '.join(silent)}" if silent else ""
    seconds = max((row.get("seconds", 10) for row in view["flows"].values()), default=10)
    first = f"{count_noun(len(names), 'member')}, {lately}/s in the last {seconds} s, {every} in all{unknown}"
    pairs.sort(key=lambda pair: (-pair[2][1], -pair[2][2], int(pair[0]), int(pair[1])))
    return first, [_pair_line(names, *pair) for pair in pairs]


def _pair_line(names: dict[str, str], sender: str, receiver: str, flow: list[int]) -> str:
    ends = f"{names.get(sender, f'id {sender}')} → {names.get(receiver, f'id {receiver}')}"
    shared = f", {format_bytes(flow[3])} of it in shared memory" if flow[3] else ""
    return f"  {ends}: {format_bytes(flow[1])}/s, {format_bytes(flow[2])} in all{shared}"
