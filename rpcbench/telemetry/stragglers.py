"""The members that come last in collectives, and why: the operators that take longer there than on the others.

Guarantees
- The straggler is the member for which the others wait, so it has the least waiting in collectives itself.
- Times are own times; those of collectives are left out, as the others' are longer just because they wait.
- Operators of the accelerator come first: those of the threads are named where none of these is longer.
- Where no single operator takes much longer, the sums of all decide: a text sends its reader to Python and data loading
  only if the member's operators take no longer together, and it says if they are more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rpcbench.base.charts import shorten_words
from rpcbench.base.errors import count_noun
from rpcbench.runtime.operator_columns import CPU, OperatorSum
from rpcbench.runtime.operator_kinds import COMMUNICATION
from rpcbench.telemetry.message_views import Straggler
from rpcbench.telemetry.profile_tables import NAME_LENGTH, Members, format_seconds
from rpcbench.telemetry.trace import CollectiveTimeline

_STRAGGLERS, _CAUSES = 2, 3  # that a text names
_LEAST = 0.1
"""The share of the others' waiting that an operator must take longer, and of the most waiting that a straggler must
cause, to be named."""
_MANY = 1.2
"""The calls of a straggler, in those of the others, from which it counts as calling more operators."""
_FEW = 3  # calls: a smaller difference is no cause of waiting


class Excess(NamedTuple):
    """An operator that takes longer on one member."""

    name: str
    device: str
    longer: float  # seconds, than the mean of the others
    calls: int
    calls_elsewhere: float  # mean


def find_excess(name: str, members: Members) -> list[Excess]:
    """Return how much longer each operator takes on a member than on the others, those that are longest first."""
    others = [one for other, one in members.items() if other != name]
    means: dict[tuple[str, str], list[float]] = {}
    for one in others:
        for each in one.sums:
            mean = means.setdefault((each.name, each.device), [0.0, 0.0])
            mean[0] += each.own / len(others)
            mean[1] += each.calls / len(others)
    found = [_measure_excess(each, means) for each in members[name].sums if each.kind != COMMUNICATION]
    return sorted(found, key=lambda one: -one.longer)


def _measure_excess(each: OperatorSum, means: dict[tuple[str, str], list[float]]) -> Excess:
    own, calls = means.get((each.name, each.device), (0.0, 0.0))
    return Excess(each.name, each.device, each.own - own, each.calls, calls)


def describe_stragglers(timeline: CollectiveTimeline, members: Members) -> str:
    """Return lines on the members for which the others waited longest; "" where none is known."""
    names = timeline.names
    whole = sum(row["last"] is not None for row in timeline.rows.values())
    known = [one for one in timeline.stragglers if one.seconds and names[one.worker] in members]
    found = [one for one in known if one.seconds >= _LEAST * known[0].seconds][:_STRAGGLERS]
    return "\n".join(line for one in found for line in _describe_straggler(one, names[one.worker], whole, members))


def _describe_straggler(one: Straggler, member: str, whole: int, members: Members) -> Iterator[str]:
    waited = format_seconds(one.seconds)
    yield f"{member} kept the others waiting {waited} in {one.collectives} of {count_noun(whole, 'collective')}."
    least = _LEAST * one.seconds
    excess = find_excess(member, members)
    longer = [each for each in excess if each.longer >= least]
    for each in ([each for each in longer if each.device != CPU] or longer)[:_CAUSES]:
        on = "" if each.device == CPU else f" on {each.device}"
        name, more = shorten_words(each.name, NAME_LENGTH), format_seconds(each.longer)
        yield f"    {name}{on} takes {more} longer there than on the others ({_compare_calls(each)})"
    if not longer:
        yield f"    {_describe_totals(excess, [*_total_operators(member, members)], least)}"


class OperatorTotals(NamedTuple):
    """All operators of a member beside the mean of the others, without collectives."""

    device: str
    own: float  # seconds
    calls: int
    own_elsewhere: float
    calls_elsewhere: float

    @property
    def longer(self) -> float:
        return self.own - self.own_elsewhere

    @property
    def more(self) -> bool:
        return self.calls > _MANY * self.calls_elsewhere and self.calls - self.calls_elsewhere >= _FEW


def _total_operators(name: str, members: Members) -> Iterator[OperatorTotals]:
    """Yield the sums on each device, the accelerator first."""
    others = [one.sums for other, one in members.items() if other != name]
    devices = {each.device for one in members.values() for each in one.sums}
    for device in sorted(devices, key=lambda device: (device == CPU, device)):
        elsewhere = [_sum_operators(sums, device) for sums in others]
        own, calls = (sum(column) / len(others) for column in zip(*elsewhere, strict=True))
        yield OperatorTotals(device, *_sum_operators(members[name].sums, device), own, calls)


def _sum_operators(sums: Iterable[OperatorSum], device: str) -> tuple[float, int]:
    counted = [each for each in sums if each.device == device and each.kind != COMMUNICATION]
    return sum(each.own for each in counted), sum(each.calls for each in counted)


def _describe_totals(excess: Sequence[Excess], sums: Sequence[OperatorTotals], least: float) -> str:
    """Return what all operators together say, where no single one takes much longer."""
    longer = [one for one in sums if one.longer >= least]
    found = longer or [one for one in sums if one.more]
    if not found:
        return f"No operator takes longer there: {_ELSEWHERE}."
    one = found[0]
    on = "" if one.device == CPU else f" on {one.device}"
    calls = f"operators{on}, {one.calls} calls against {one.calls_elsewhere:.0f} elsewhere"
    said = f"It runs {'more' if one.more else 'no more'} {calls}"
    took = f"{format_seconds(one.own)} against {format_seconds(one.own_elsewhere)}"
    if not longer:
        return f"{said}, but the difference, {took}, is less than a tenth of the waiting: {_ELSEWHERE}, too."
    most = [each for each in excess if each.device == one.device and each.longer > 0][:_CAUSES]
    named = ", ".join(f"{shorten_words(each.name, NAME_LENGTH)} ({_compare_calls(each)})" for each in most)
    return f"{said}, and is busy in them for {took}. The longest of the difference: {named}."


def _compare_calls(each: Excess) -> str:
    return f"{each.calls} calls, {each.calls_elsewhere:.0f} elsewhere"


_ELSEWHERE = "look at Python, data loading and the processor of that host"
