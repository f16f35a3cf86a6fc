"""The members that come last in collectives, and why: the operators that take longer there than on the others.

Guarantees
- The straggler is the member for which the others wait, so it has the least waiting in collectives itself.
- Times are own times; those of collectives are left out, as the others' are longer just because they wait.
- Operators of the accelerator come first: those of the threads are named where none of these is longer.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class Excess(NamedTuple):
    """An operator that takes longer on one member."""

    name: str
    device: str
    longer: float  # seconds, than the mean of the others
    calls: int
    calls_elsewhere: float  # mean


def find_excess(name: str, members: Members, least: float) -> list[Excess]:
    """Return the operators that take longer on a member than on the others, by `least` seconds or more, most first."""
    others = [one for other, one in members.items() if other != name]
    means: dict[tuple[str, str], list[float]] = {}
    for one in others:
        for each in one.sums:
            mean = means.setdefault((each.name, each.device), [0.0, 0.0])
            mean[0] += each.own / len(others)
            mean[1] += each.calls / len(others)
    found = [_measure_excess(each, means) for each in members[name].sums if each.kind != COMMUNICATION]
    longer = sorted((one for one in found if one.longer >= least), key=lambda one: -one.longer)
    return [one for one in longer if one.device != CPU] or longer


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
    excess = find_excess(member, members, _LEAST * one.seconds)
    for each in excess[:_CAUSES]:
        on = "" if each.device == CPU else f" on {each.device}"
        calls = f"{each.calls} calls, {each.calls_elsewhere:.0f} elsewhere"
        name, longer = shorten_words(each.name, NAME_LENGTH), format_seconds(each.longer)
        yield f"    {name}{on} takes {longer} longer there than on the others ({calls})"
    if not excess:
        yield "    No operator takes longer there: look at Python, data loading and the processor of that host."
