"""The operators of one process as columns, so that millions of them fit in memory, with their sums.

Guarantees
- An operator takes 20 bytes, and each name, thread and kind stands once.
- Sums count all operators. Own time is time without the operators that it called, which lie within it on its track.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpcbench.runtime.operator_kinds import (
    COMMUNICATION,
    COMPUTE,
    OTHER,
    Codes,
    KindSeconds,
    Spans,
    Times,
    measure_kinds,
)

CPU = "CPU"
STEP = "ProfilerStep#"
"""The beginning of the name under which torch's profiler records each step: one row for all."""
_PIECE = 1 << 16  # numbers that are Python's objects at once, as each takes 40 bytes
_ENGINE = "autograd::engine::evaluate_function"


class Operator(NamedTuple):
    """One run of an operator."""

    name: str
    track: str  # the thread, or the stream of a GPU
    begin: float  # seconds of the member's clock
    seconds: float
    device: str = CPU
    alone: bool = True  # False: it ends on another thread, so others of its thread may overlap it
    kind: int = COMPUTE


class OperatorSum(NamedTuple):
    """All runs of an operator."""

    name: str
    device: str
    calls: int
    own: float  # seconds without the operators that it called; 0 for those that others overlap
    seconds: float  # with them
    kind: int = COMPUTE


class ThreadOperators(NamedTuple):
    """Operators of one thread as columns, each before those that it called."""

    thread: str
    begins: Times
    ends: Times
    communicate: NDArray[np.bool_]
    engine: NDArray[np.bool_]  # whether it is the autograd engine's, around a backward operator


Identity = tuple[str, str, str, bool, int]
"""All of an operator but its times: name, track, device, alone, kind."""


class OperatorColumns:
    """Operators in the order in which they were added; iterated, they are those."""

    def __init__(self, found: Iterable[Operator] = ()) -> None:
        self._numbers: dict[Identity, int] = {}
        self._which, self._begins, self._seconds = array("i"), array("d"), array("d")
        for one in found:
            self.add_operator((one.name, one.track, one.device, one.alone, one.kind), one.begin, one.seconds)

    def add_operator(self, identity: Identity, begin: float, seconds: float) -> None:
        """Add one, with times in seconds."""
        self._which.append(self._numbers.setdefault(identity, len(self._numbers)))
        self._begins.append(begin)
        self._seconds.append(seconds)

    def __len__(self) -> int:
        return len(self._which)

    def __iter__(self) -> Iterator[Operator]:
        return self._make_operators(np.arange(len(self), dtype=np.int32))

    def find_longest(self, count: int) -> list[Operator]:
        """Return the longest operators, in the order in which they were added."""
        # The longest: an operator that called a kept one is longer, and so kept, too.
        places = np.arange(len(self), dtype=np.int32)
        if len(self) > count:
            places = np.sort(np.argsort(-self._duration_column(), kind="stable")[:count]).astype(np.int32)
        return [*self._make_operators(places)]

    def sum_operators(self) -> list[OperatorSum]:
        """Return the sums by operator, in the order of their own time, longest first."""
        totals: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for one, own in _own_seconds(self._in_order()):
            name = f"{STEP}*" if one.name.startswith(STEP) else one.name
            total = totals[name, one.device, one.kind]
            total[0] += 1
            total[1] += own
            total[2] += one.seconds
        made = [
            OperatorSum(name, device, int(calls), own, seconds, kind)
            for (name, device, kind), (calls, own, seconds) in totals.items()
        ]
        return sorted(made, key=lambda one: (-one.own, one.name))

    def measure_kinds(self, span: float | None) -> tuple[KindSeconds, Spans]:
        """Return the times by kind, in `span` seconds, and the spans of computation.

        They are those of the accelerator where there is one, in its own span.
        """
        identities = [*self._numbers]
        devices = np.array([device != CPU for _, _, device, _, _ in identities], dtype=bool)
        tracks = {name: n for n, name in enumerate({track for _, track, *_ in identities})}
        columns = np.array([(kind, tracks[track]) for _, track, _, _, kind in identities], dtype=np.int32)
        which = self._which_column()
        chosen = devices[which] if devices.any() else np.ones(len(which), dtype=bool)
        kinds, places = columns.reshape(-1, 2)[which[chosen]].T
        begins, seconds = self._begin_column()[chosen], self._duration_column()[chosen]
        return measure_kinds(kinds, places, begins, seconds, None if devices.any() else span)

    def list_threads(self) -> Iterator[ThreadOperators]:
        """Yield the operators of each thread of the CPU."""
        identities = [*self._numbers]
        which = self._which_column()
        counted = np.array([device == CPU and alone and kind != OTHER for _, _, device, alone, kind in identities])
        for thread in sorted({track for _, track, *_ in identities}):
            on_thread = np.array([track == thread for _, track, *_ in identities]) & counted
            places = np.flatnonzero(on_thread[which])
            begins, seconds = self._begin_column()[places], self._duration_column()[places]
            order = np.lexsort((-seconds, begins))
            own, begins = which[places[order]], begins[order]
            communicate = np.array([kind == COMMUNICATION for *_, kind in identities])[own]
            engine = np.array([name.startswith(_ENGINE) for name, *_ in identities])[own]
            yield ThreadOperators(thread, begins, begins + seconds[order], communicate, engine)

    def measure_span(self) -> float:
        """Return the seconds from the first operator to the end of the last."""
        begins = self._begin_column()
        return float((begins + self._duration_column()).max() - begins.min()) if len(self) else 0.0

    def _which_column(self) -> Codes:
        return np.frombuffer(self._which, dtype=np.int32) if self._which else np.zeros(0, dtype=np.int32)

    def _begin_column(self) -> Times:
        return np.frombuffer(self._begins) if self._begins else np.zeros(0)  # no copy: none may be added meanwhile

    def _duration_column(self) -> Times:
        return np.frombuffer(self._seconds) if self._seconds else np.zeros(0)

    def _in_order(self) -> Iterator[Operator]:
        """Yield the operators of one track after those of another, each before those that it called."""
        names = sorted({track for _, track, *_ in self._numbers})
        ranks = {name: n for n, name in enumerate(names)}
        tracks = np.array([ranks[track] for _, track, *_ in self._numbers], dtype=np.int32)
        which = self._which_column()
        order = np.lexsort((-self._duration_column(), self._begin_column(), tracks[which] if len(which) else which))
        return self._make_operators(order.astype(np.int32))

    def _make_operators(self, places: Codes) -> Iterator[Operator]:
        identities = [*self._numbers]
        for first in range(0, len(places), _PIECE):
            for place in places[first : first + _PIECE].tolist():
                name, track, *others = identities[self._which[place]]
                yield Operator(name, track, self._begins[place], self._seconds[place], *others)


def _own_seconds(ordered: Iterable[Operator]) -> Iterator[tuple[Operator, float]]:
    """Yield each operator with its seconds without those of the operators that it called."""
    inside: list[tuple[Operator, list[float]]] = []  # those that have not ended, each with its own seconds
    for one in ordered:
        while inside and (inside[-1][0].track != one.track or _end_time(inside[-1][0]) <= one.begin):
            outer, (own,) = inside.pop()
            yield outer, max(0.0, own)
        if not one.alone:
            yield one, 0.0
            continue
        if inside:
            inside[-1][1][0] -= one.seconds
        inside.append((one, [one.seconds]))
    for outer, (own,) in inside:
        yield outer, max(0.0, own)


def _end_time(one: Operator) -> float:
    return one.begin + one.seconds
