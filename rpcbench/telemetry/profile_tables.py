"""The tables of a profile: by operator, by worker, by kind of work, and two profiles compared.

Guarantees
- A table says what its times are. Text and HTML have the same columns; in HTML a bar shows the share of the time.
- Rows are plain data: seconds, bytes, shares from 0 to 1.
"""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import format_bytes
from rpcbench.launch.status import text_table
from rpcbench.runtime.operator_columns import CPU
from rpcbench.runtime.operator_kinds import KindSeconds
from rpcbench.runtime.operator_profile import MemberProfile

Members = dict[str, MemberProfile]


class ProfileTable:
    """A table of a profile, displayed or printed: `rows` are dicts, with seconds and bytes, the largest sum first."""

    def __init__(
        self, rows: list[dict[str, Any]], cells: list[tuple[str, ...]], shares: list[float], empty: str = ""
    ) -> None:
        self.rows = rows
        self._empty = empty  # the sentence in place of a table without rows
        self._cells = cells  # the head first
        self._shares = shares  # of each row, from 0 to 1: the length of its bar

    def keep_first(self, count: int) -> ProfileTable:
        """Return the table with these first rows alone."""
        return ProfileTable(self.rows[:count], self._cells[: count + 1], self._shares[:count])

    def __repr__(self) -> str:
        return text_table(self._cells) if self.rows or not self._empty else self._empty

    def _repr_html_(self) -> str:
        if self._empty and not self.rows:
            return f"<div>{html.escape(self._empty)}</div>"
        (name, *head), *rows = self._cells
        heads = f'<th style="text-align:left">{html.escape(name)}</th><th></th>' + "".join(
            f"<th>{html.escape(cell)}</th>" for cell in head
        )
        body = "".join(_html_row(row, share) for row, share in zip(rows, self._shares, strict=True))
        return (
            '<div style="overflow-x:auto"><table style="margin:0;font-variant-numeric:tabular-nums">'
            f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        )


_BAR_PIXELS = 80
NAME_LENGTH = 70  # of an operator in a cell: those of kernels have thousands of characters


def _html_row(cells: Sequence[str], share: float) -> str:
    # Styles stand at the elements, as pages that sanitize outputs drop a style sheet. The colour suits both themes.
    width = min(1.0, max(0.0, share)) * _BAR_PIXELS
    bar = f'<div style="width:{width:.1f}px;height:0.7em;border-radius:2px;background:#4a86e8"></div>'
    name, *others = map(html.escape, cells)
    name_style = "text-align:left;min-width:10em;max-width:28em;overflow-wrap:break-word"
    name = name.replace("::", "::<wbr>").replace("_", "_<wbr>")  # a narrow page breaks it there, not within a word
    first = f'<td style="{name_style}">{name}</td><td style="min-width:{_BAR_PIXELS}px">{bar}</td>'
    return f"<tr>{first}{''.join(f'<td style=white-space:nowrap>{cell}</td>' for cell in others)}</tr>"


def tabulate_operators(members: Members) -> ProfileTable:
    """Return a row for each operator, the longest first."""
    rows = _sum_over_members(members)
    device_seconds = {row["device"]: 0.0 for row in rows}
    for row in rows:
        device_seconds[row["device"]] += row["self"]
    has_devices = any(row["device"] != CPU for row in rows)
    has_bytes = any(one.allocated is not None for one in members.values())
    member_names = [*members] if len(members) > 1 else []
    optional = ["on"] * has_devices, ["allocated"] * has_bytes
    cells = [("operator", *optional[0], "calls", "self", "share", "total", *optional[1], *member_names)]
    shares = []
    for row in rows:
        share = row["self"] / device_seconds[row["device"]] if device_seconds[row["device"]] else None
        shares.append(share or 0.0)
        on = [row["device"]] if has_devices else []
        times = format_seconds(row["self"]), "" if share is None else f"{share:.1%}", format_seconds(row["total"])
        size = [] if not has_bytes else ["" if row["allocated"] is None else format_bytes(row["allocated"])]
        parts = [format_seconds(row["workers"][name]) if name in row["workers"] else "" for name in member_names]
        cells.append((shorten_words(row["operator"], NAME_LENGTH), *on, str(row["calls"]), *times, *size, *parts))
    return ProfileTable(rows, cells, shares)


def _sum_over_members(members: Members) -> list[dict[str, Any]]:
    rows_by_operator: dict[tuple[str, str], dict[str, Any]] = {}
    for name, member_profile in members.items():
        for operator_sum in member_profile.sums:
            new_row = {
                "operator": operator_sum.name,
                "device": operator_sum.device,
                "calls": 0,
                "self": 0.0,
                "total": 0.0,
                "allocated": None,  # unknown
                "workers": {},
            }
            row = rows_by_operator.setdefault((operator_sum.name, operator_sum.device), new_row)
            row["calls"] += operator_sum.calls
            row["self"] += operator_sum.own
            row["total"] += operator_sum.seconds
            row["workers"][name] = operator_sum.own
            size = (member_profile.allocated or {}).get(operator_sum.name)
            if size is not None and operator_sum.device == CPU:  # where it was called, also for bytes of a GPU
                row["allocated"] = (row["allocated"] or 0) + size
    return sorted(rows_by_operator.values(), key=lambda row: (-row["self"], row["operator"]))


def tabulate_workers(members: Members, seconds: float) -> ProfileTable:
    """Return a row for each member that was profiled for some seconds."""
    rows: list[dict[str, Any]] = []
    for name, one in members.items():
        own: dict[str, float] = defaultdict(float, {CPU: 0.0})
        for sum_ in one.sums:
            own[sum_.device] += sum_.own
        busy = {device: each / seconds for device, each in own.items()} if seconds else {}
        calls = sum(sum_.calls for sum_ in one.sums)
        rows.append({"worker": name, "calls": calls, "self": dict(own), "busy": busy, **_memory_fields(one)})
    rows.sort(key=lambda row: -row["self"][CPU])
    devices = list(dict.fromkeys(device for row in rows for device in row["self"]))
    has_memory = any("memory" in row for row in rows)
    head = ("worker", "calls", *(f"self, {device}" for device in devices), "busy", *_MEMORY[: 3 * has_memory])
    most = max([1.0, *(row["busy"].get(CPU, 0.0) for row in rows)])
    shares = [row["busy"].get(CPU, 0.0) / most for row in rows]
    return ProfileTable(rows, [head, *(_worker_cells(row, devices) for row in rows)], shares)


_MEMORY = "resident", "peak", "growth"


def _memory_fields(one: MemberProfile) -> dict[str, int]:
    """Return bytes of the process; nothing for one whose memory was not sampled."""
    sizes = [memory["resident"] for _, memory in one.memory]
    if not sizes:
        return {}
    return {"memory": sizes[-1], "peak": max(sizes), "growth": sizes[-1] - sizes[0], "before": sizes[0]}


def _worker_cells(row: dict[str, Any], devices: Sequence[str]) -> tuple[str, ...]:
    own = [format_seconds(row["self"].get(device, 0.0)) for device in devices]
    known = "memory" in row
    sizes = [format_bytes(row["memory"]), format_bytes(row["peak"]), format_growth(row["growth"])] if known else []
    return row["worker"], str(row["calls"]), *own, format_busy(row), *sizes


def format_busy(row: dict[str, Any]) -> str:
    """Return `62 %`, or `62 %, CUDA 34 %`; a question mark while the wall time is unknown."""
    parts = [f"{'' if device == CPU else f'{device} '}{share * 100:.0f} %" for device, share in row["busy"].items()]
    return ", ".join(parts) or "?"


def format_growth(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_bytes(abs(size))}"


def format_sums(rows: Sequence[dict[str, Any]]) -> str:
    """Return the sum of the own time of rows: `5.00 ms`, with that of each other device."""
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        sums[row["device"]] += row["self"]
    return ", ".join(f"{'' if device == CPU else f'{device} '}{format_seconds(sums[device])}" for device in sums)


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits, in the unit that fits it: `2.86 s`, `-95.2 ms`, `840 µs`."""
    size = abs(seconds)
    unit, scale = ("s", 1.0) if size >= 0.9995 else ("ms", 1e-3) if size >= 0.9995e-3 else ("µs", 1e-6)
    digits = 2 if size < 9.995 * scale else 1 if size < 99.95 * scale else 0
    return f"{seconds / scale:.{digits}f} {unit}"


def tabulate_kinds(members: Members) -> ProfileTable:
    """Return a row for each member, with its seconds by kind of work."""
    known = {name: one.kinds for name, one in members.items() if one.kinds is not None}
    rows: list[dict[str, Any]] = [{"worker": name, **_kind_fields(kinds)} for name, kinds in known.items()]
    head = ("worker", *_KINDS, "overlap of communication", "span")
    cells = [tuple(_kind_cells(row)) for row in rows]
    return ProfileTable(rows, [head, *cells], [share_of(row["compute"], row["span"]) for row in rows])


_KINDS = "compute", "communication", "exposed", "copies", "idle"
"""Communication is exposed where nothing is computed meanwhile."""


def _kind_fields(kinds: KindSeconds) -> dict[str, float]:
    return {**kinds._asdict(), "exposed": kinds.exposed, "overlap_share": share_of(kinds.overlap, kinds.communication)}


def share_of(part: float, whole: float) -> float:
    """Return a share of a whole, 0 of nothing."""
    return part / whole if whole else 0.0


def describe_part(part: float, whole: float) -> str:
    """Return seconds and their share: `5.00 ms (12%)`."""
    return f"{format_seconds(part)} ({share_of(part, whole):.0%})"


def _kind_cells(row: dict[str, Any]) -> list[str]:
    parts = [describe_part(row[kind], row["span"]) for kind in _KINDS]
    return [row["worker"], *parts, f"{row['overlap_share']:.1%}", format_seconds(row["span"])]


def compare_tables(after: Members, before: Members, by: str) -> ProfileTable:
    """Return the differences of two profiles, means of their members. ValueError: there is no such comparison."""
    if by not in _MEANS:
        raise ValueError(f"profiles are compared by {' or '.join(_MEANS)}, not by {by!r}")
    if not after or not before:
        raise ValueError("a profile without members cannot be compared")
    new, old = _MEANS[by](after), _MEANS[by](before)
    rows: list[dict[str, Any]] = [
        {by: name, "device": device, "before": old.get((name, device), 0.0), "after": new.get((name, device), 0.0)}
        for name, device in dict.fromkeys([*new, *old])
    ]
    for row in rows:
        row["longer"] = row["after"] - row["before"]
    rows.sort(key=lambda row: (-row["longer"], row[by]))
    most = max((abs(row["longer"]) for row in rows), default=0.0)
    return ProfileTable(rows, _comparison_cells(rows, by), [share_of(abs(row["longer"]), most) for row in rows])


def _comparison_cells(rows: Sequence[dict[str, Any]], by: str) -> list[tuple[str, ...]]:
    cells: list[tuple[str, ...]] = [(by, "on", "before", "after", "longer")]
    for row in rows:
        sign = "+" if row["longer"] > 0 else ""
        times = format_seconds(row["before"]), format_seconds(row["after"]), sign + format_seconds(row["longer"])
        cells.append((shorten_words(row[by], NAME_LENGTH), row["device"], *times))
    return cells


Means = dict[tuple[str, str], float]
"""Seconds by name and device, the mean of all members."""


def _mean_operators(members: Members) -> Means:
    sums: Means = defaultdict(float)
    for one in members.values():
        for each in one.sums:
            sums[each.name, each.device] += each.own / len(members)
    return sums


def _mean_kinds(members: Members) -> Means:
    sums: Means = defaultdict(float)
    for one in members.values():
        if one.kinds is not None:
            device = next((each.device for each in one.sums if each.device != CPU), CPU)
            for kind, seconds in {**one.kinds._asdict(), "exposed": one.kinds.exposed}.items():
                sums[kind, device] += seconds / len(members)
    return sums


_MEANS: dict[str, Callable[[Members], Means]] = {"operator": _mean_operators, "kind": _mean_kinds}


def measure_utilization(members: Members, peak: float) -> dict[str, float]:
    """Return the share of a peak, in operations per second, that each member reached. ValueError without shapes."""
    known = {name: one for name, one in members.items() if one.flops is not None and one.kinds is not None}
    if not known:
        raise ValueError(
            "the operations are not known, as no operator has its shapes: record a trace of torch.profiler with "
            "record_shapes=True"
        )
    return {name: share_of(one.flops or 0.0, peak * one.kinds.span) for name, one in known.items() if one.kinds}
