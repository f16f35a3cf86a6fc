"""Which parts of collectives, in the traces of several ranks, are of the same collective; and how far clocks differ.

Guarantees
- Collectives are matched by torch's number. Without it they are matched by their order, from where the times of two
  ranks agree, as their traces may begin at other ones.
- A collective that every rank must enter before one can leave it bounds how far two clocks differ. Where these bounds
  exclude that they agree, a remark says by how much.
- Where no order fits, as the ranks have recorded other steps, a remark says so, and the collectives are left out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rpcbench.base.errors import count_noun
from rpcbench.distributed.flight_dumps import name_of_rank
from rpcbench.telemetry.message_views import SHARED, ClockOffset
from rpcbench.telemetry.profile_tables import format_seconds
from rpcbench.telemetry.torch_traces import TracedCollective

_ALL_ENTER = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "barrier",
}  # fmt: skip
"""Collectives that no rank leaves before all have entered."""
_ROUNDING = 2e-5  # seconds by which the stamps of a GPU and its host may differ
_SAMPLES = 32  # collectives with counterparts searched by time
_SAME_STEPS = "Let all ranks record the same steps, at the same time."
Part = tuple[int, int, TracedCollective]
"""A rank, and the number and times of its part of a collective."""
Matched = dict[str, list[Part]]
"""The parts of each collective, by its key."""
Numbered = dict[tuple[int, int], TracedCollective]
"""Collectives of a rank by their number, and by their place among those with the same number."""
Own = Sequence[TracedCollective]
"""Those of one rank in one group, in order."""


def match_collectives(traced: Mapping[int, Own]) -> tuple[Matched, dict[int, ClockOffset], list[str]]:
    """Return the matched collectives, the offset of each rank's clock to that of the first one, and remarks.

    Args:
        traced: The collectives of each rank in the order of their beginning, in seconds.
    """
    matched, remarks = _match_groups(traced)
    clocks = _compare_clocks([*traced], matched)
    if wrong := [rank for rank, clock in clocks.items() if clock is None]:
        matched = {}
        remarks.append(_describe_mismatch(wrong))
    offsets = {rank: clock or SHARED for rank, clock in clocks.items()}
    remarks += [_describe_clock(rank, clock) for rank, clock in offsets.items() if clock.ahead]
    return matched, offsets, remarks


def _match_groups(traced: Mapping[int, Own]) -> tuple[Matched, list[str]]:
    """Return the collectives of the groups in which all ranks agree, and remarks on the others."""
    groups: dict[str, dict[int, list[TracedCollective]]] = {}
    for rank, own in traced.items():
        for each in own:
            groups.setdefault(each.group, {}).setdefault(rank, []).append(each)
    matched: Matched = {}
    remarks = []
    for group, parts in groups.items():
        numbered = _number_parts(parts)
        if isinstance(numbered, str):
            words = f"of group {group}" if group else "of the job"
            remarks.append(f"{numbered}, so the collectives {words} are not matched. {_SAME_STEPS}")
            continue
        for rank, found in numbered.items():
            for (number, nth), each in found.items():
                matched.setdefault(f"{group}/{number}.{nth}", []).append((rank, number, each))
    return matched, remarks


def _number_parts(parts: Mapping[int, Own]) -> dict[int, Numbered] | str:
    """Return the collectives of each rank by number, or the difference of the ranks, as the beginning of a sentence."""
    (first, known), *others = parts.items()
    begins = {first: 0}  # by rank: the place, among those of the first rank, of its first collective
    if any(each.number is None for own in parts.values() for each in own):
        for rank, own in others:
            begin = _find_begin(known, own)
            if begin is None:
                counts = f"{count_noun(len(known), 'collective')}, {name_of_rank(rank)} {len(own)}"
                return f"{name_of_rank(first)} has {counts}"
            begins[rank] = begin
    earliest = min(begins.values())
    numbered = {rank: _number_collectives(own, 1 + begins.get(rank, 0) - earliest) for rank, own in parts.items()}
    return _find_difference(numbered) or numbered


def _number_collectives(own: Own, begin: int) -> Numbered:
    found: Numbered = {}
    seen: Counter[int] = Counter()
    for place, each in enumerate(own, begin):
        number = place if each.number is None else each.number
        found[number, seen[number]] = each
        seen[number] += 1
    return found


def _find_begin(known: Own, own: Own) -> int | None:
    """Return the place among `known` of the first of `own`: where their times agree, else 0 if there are as many."""
    fitting = [begin for begin in _find_candidates(known, own) if _fits(known, own, begin)]
    if len(fitting) == 1:
        return fitting[0]
    return 0 if len(known) == len(own) else None


def _find_candidates(known: Own, own: Own) -> set[int]:
    """Return the beginnings with which some of `own` run at the same time as their counterparts."""
    found = set()
    for nth in range(0, len(own), 1 + len(own) // _SAMPLES):
        one = own[nth]
        found |= {place - nth for place, each in enumerate(known) if each.begin <= one.end and one.begin <= each.end}
    return found


def _fits(known: Own, own: Own, begin: int) -> bool:
    """Return whether the two ranks were in the same collectives at the same time, without any offset of clocks."""
    pairs = [*_pair_parts(known, own, begin)]
    bounding = [pair for pair in pairs if pair[0].op in _ALL_ENTER]
    return bool(bounding) and all(one.op == two.op for one, two in pairs) and _bound_offset(bounding) is SHARED


def _pair_parts(known: Own, own: Own, begin: int) -> Iterator[tuple[TracedCollective, TracedCollective]]:
    for place, each in enumerate(own, begin):
        if 0 <= place < len(known):
            yield known[place], each


def _find_difference(numbered: Mapping[int, Numbered]) -> str:
    (first, known), *others = numbered.items()
    for rank, own in others:
        for key in own.keys() & known.keys():
            if own[key].op != known[key].op:
                ops = f"{known[key].op} on {name_of_rank(first)} and {own[key].op} on {name_of_rank(rank)}"
                return f"Collective {key[0]} is {ops}"
    return ""


def _compare_clocks(ranks: Sequence[int], matched: Matched) -> dict[int, ClockOffset | None]:
    """Return the offset of each rank's clock to that of the first one; None where no offset fits the collectives."""
    reference = ranks[0]
    pairs: dict[int, list[tuple[TracedCollective, TracedCollective]]] = {}
    for parts in matched.values():
        by_rank = {rank: each for rank, _, each in parts if each.op in _ALL_ENTER}
        if reference in by_rank:
            for rank in by_rank.keys() - {reference}:
                pairs.setdefault(rank, []).append((by_rank[reference], by_rank[rank]))
    return {rank: _bound_offset(pairs[rank]) if rank in pairs else SHARED for rank in ranks}


def _bound_offset(pairs: Sequence[tuple[TracedCollective, TracedCollective]]) -> ClockOffset | None:
    """Return how far the second clock is ahead: 0 if the collectives allow it, None if they allow no offset."""
    # Neither rank ends before the other one has begun.
    least = max(other.begin - one.end for one, other in pairs) - _ROUNDING
    most = min(other.end - one.begin for one, other in pairs) + _ROUNDING
    if least > most:
        return None
    if least <= 0 <= most:
        return SHARED
    usual = statistics.median(other.end - one.end for one, other in pairs)
    return ClockOffset(min(most, max(least, usual)), (most - least) / 2)


def _describe_mismatch(ranks: Sequence[int]) -> str:
    names = ", ".join(map(name_of_rank, ranks))
    why = "they are others than those of the first rank, and are not matched"
    return f"No offset of clocks explains the collectives of {names}: {why}. {_SAME_STEPS}"


def _describe_clock(rank: int, clock: ClockOffset) -> str:
    way = "ahead of" if clock.ahead > 0 else "behind"
    ahead, error = format_seconds(abs(clock.ahead)), format_seconds(clock.error)
    found = f"The clock of {name_of_rank(rank)} is {ahead} {way} that of the first rank, to within {error}, as the"
    return f"{found} collectives show. Its times are moved by that."
