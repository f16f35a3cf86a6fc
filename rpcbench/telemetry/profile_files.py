"""Traces of torch's profiler from all ranks of a job, joined as one profile: `rpcbench.profile.open`.

Guarantees
- All ranks are on one clock, and their collectives are matched, as far as `collective_matching` finds both.
- Ranks without a trace are in `missing`. Files of different jobs, or two of one rank, are a ValueError that names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row, Table
from rpcbench.distributed.flight_dumps import find_files, name_of_rank
from rpcbench.runtime.events import PARTS_KEPT
from rpcbench.runtime.operator_profile import MemberProfile
from rpcbench.telemetry.collective_matching import Matched, match_collectives
from rpcbench.telemetry.message_views import SHARED, ClockOffset
from rpcbench.telemetry.profile import Profile, profile
from rpcbench.telemetry.profile_groups import UNSAID, GroupPart
from rpcbench.telemetry.profile_tables import format_seconds
from rpcbench.telemetry.recording import make_rank_world
from rpcbench.telemetry.stragglers import describe_stragglers
from rpcbench.telemetry.torch_traces import RankTrace, TracedCollective, read_trace
from rpcbench.telemetry.trace import Trace


def read_traces(files: str | Path | Sequence[str | Path]) -> list[RankTrace]:
    """Read the traces of a job, one for each rank, in the order of ranks. Raises as `open_profile` does."""
    traces: dict[int, RankTrace] = {}
    paths = find_files(files)
    for path in paths:
        trace = read_trace(path)
        if trace.rank is None and len(paths) > 1:
            raise ValueError(f"{path} does not say its rank: give its name the rank, as trace_rank3.json")
        rank = trace.rank or 0
        if (other := traces.get(rank)) is not None:
            raise ValueError(f"{other.source} and {path} are both of rank {rank}: give the files of one job")
        traces[rank] = trace
    return [traces[rank] for rank in sorted(traces)]


def open_profile(files: str | Path | Sequence[str | Path]) -> TracedProfile:
    """Return the traces of torch.profiler from all ranks of a job as one profile: `rpcbench.profile.open`.

    A file is what `export_chrome_trace` or `tensorboard_trace_handler` has written, plain or gzip, of any size. It says
    its rank, or its name does.

    Args:
        files: A pattern, as `trace_rank*.json*`, a folder, one file, or several: one for each rank.

    Returns:
        A profile with the tables, the timeline of collectives and the file for Perfetto that `rpcbench.profile` has.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is no trace of torch's profiler, is empty, cut off, or of another job, or two have one rank.
    """
    return join_traces(read_traces(files))


def join_traces(traces: Sequence[RankTrace], failed: Mapping[str, str] | None = None) -> TracedProfile:
    """Return the profile of some ranks. `failed`: why others have no trace, by name."""
    sizes = {trace.size: trace.source for trace in traces if trace.size is not None}
    if len(sizes) > 1:
        (one, source), (two, other) = list(sizes.items())[:2]
        raise ValueError(f"{source} is of a job of {count_noun(one, 'rank')}, {other} of one of {two}")
    placed = {trace.rank or 0: _place_on_clock(trace, min(each.origin for each in traces)) for trace in traces}
    told, unsaid = _leave_out_unsaid(traces, placed)
    matched, clocks, remarks = match_collectives(told)
    remarks += unsaid
    made = _make_profile(placed, matched, clocks, remarks)
    absent = [name_of_rank(rank) for rank in range(max(sizes, default=0)) if rank not in placed]
    made.missing = dict.fromkeys(absent, "not among the files") | dict(failed or {})
    return made


class _Placed(NamedTuple):
    """A rank's profile and collectives, on the common clock as its host states it."""

    profile: MemberProfile
    collectives: list[TracedCollective]
    seconds: float


def _place_on_clock(trace: RankTrace, origin: int) -> _Placed:
    later = (trace.origin - origin) * 1e-9
    operators = [each._replace(begin=each.begin + later) for each in trace.profile.operators]
    collectives = [replace(each, begin=each.begin + later, end=each.end + later) for each in trace.collectives]
    computed = trace.profile.computed
    if computed is not None:
        computed = computed[0] + later, computed[1] + later
    return _Placed(trace.profile._replace(operators=operators, computed=computed), collectives, trace.seconds)


def _leave_out_unsaid(
    traces: Sequence[RankTrace], placed: Mapping[int, _Placed]
) -> tuple[dict[int, list[TracedCollective]], list[str]]:
    """Return the collectives that can be matched, and a remark on those of an unknown group, one of several."""
    found = {rank: one.collectives for rank, one in placed.items()}
    several = {group.label: name for trace in traces if len(trace.groups) > 1 for name, group in trace.groups.items()}
    told = {rank: [each for each in own if each.group or each.label] for rank, own in found.items()}
    if not several or told == found:
        return found, []
    names = ", ".join(name_group(name, label) for label, name in several.items())
    remark = f"The traces do not say the groups of collectives, as with gloo, and the job has several ({names}), so "
    return told, [f"{remark}those are not matched. table(by='group') counts them."]


def _make_profile(
    placed: Mapping[int, _Placed], matched: Matched, clocks: Mapping[int, ClockOffset], remarks: list[str]
) -> TracedProfile:
    latest = sorted(matched, key=lambda key: min(each.begin for _, _, each in matched[key]))[-PARTS_KEPT:]
    if len(latest) < len(matched):
        remarks.append(f"Of {len(matched)} collectives the latest {len(latest)} are shown.")
    tables: dict[int, dict[str, Table]] = {rank: {"collectives": {}} for rank in placed}
    for key in latest:
        for rank, number, each in matched[key]:
            tables[rank]["collectives"][key] = _collective_row(rank, number, each, placed)
    seen = Trace()
    seen.complete = True
    seen.world = make_rank_world(tables, remarks)
    for rank in placed:
        seen.world[rank]["clock"] = clocks.get(rank, SHARED)
    made = TracedProfile(seen)
    made.remarks = remarks
    made.members = {name_of_rank(rank): one.profile for rank, one in placed.items()}
    made.parts = {name_of_rank(rank): _list_own_parts(one.collectives) for rank, one in placed.items()}
    made.seconds = max(one.seconds for one in placed.values())
    return made


def _collective_row(rank: int, number: int, one: TracedCollective, placed: Mapping[int, _Placed]) -> Row:
    listed = one.ranks or tuple(placed)
    return {
        "group": name_group(one.group, one.label) or "world", "number": number, "op": one.op,
        "members": [name_of_rank(each) for each in listed if each in placed], "shape": one.shape, "bytes": one.size,
        "begin": one.begin, "end": one.end, "failed": False, "site": "", "end_known": True,
    }  # fmt: skip


def name_group(name: str, label: str) -> str:
    """Return the name of a group: `world`, torch's description, as `mesh_dp`, or `group 7`; "" if it has none."""
    if label == "default_pg" or (name == "0" and not label):
        return "world"
    return label if label not in ("", "undefined") else f"group {name}" if name else ""


def _list_own_parts(own: Sequence[TracedCollective]) -> list[GroupPart]:
    return [
        GroupPart(name_group(each.group, each.label) or UNSAID, tuple(map(name_of_rank, each.ranks)), each.size,
                  each.begin, each.end)
        for each in own
    ]  # fmt: skip


class TracedProfile(Profile):
    """A profile of ranks that torch's profiler has recorded. `remarks`: sentences on clocks and collectives.

    `parts`: those of all collectives, by rank, also of those that are not matched.
    """

    name_parts = "record with_stack=True, or record_function"
    remarks: list[str]
    parts: dict[str, list[GroupPart]]

    def list_parts(self) -> dict[str, list[GroupPart]]:
        """Return the parts of collectives of each rank, by its name."""
        return self.parts

    @property
    def head(self) -> list[str]:
        """Sentences: the ranks and their time, the ranks that kept others waiting, and why."""
        ranks = count_noun(len(self.members), "rank")
        told = describe_stragglers(self.collectives, self.members).splitlines()
        return [f"{ranks}, {format_seconds(self.seconds)}.", *told]

    @property
    def notes(self) -> list[str]:
        """Sentences: the remarks, the ranks that are missing, and the operators that the file does not have."""
        return [*self.remarks, *super().notes]

    def __repr__(self) -> str:
        return f"{self.table(by='kind')!r}\n{super().__repr__()}"

    def _repr_html_(self) -> str:
        return f"{self.table(by='kind')._repr_html_()}{super()._repr_html_()}"


profile.open = open_profile  # type: ignore[attr-defined]
