"""The time of a process by part of the model: modules and annotations, as ranges on threads, and the operators in them.

Guarantees
- A part is a path of names: of the ranges that are open on a thread, the outermost first. Its seconds are those of its
  ranges; its own seconds are without the ranges within them.
- A backward operator belongs to the part of its forward operator and counts in its `backward`, wherever it runs.
- Communication and kernels count in each part around the operator that asked for them, and in the forward operator's.
- An operator that lies in no range, and belongs to none, is in the part with the empty path.
- A range takes 20 bytes, and a process has `MOST_PARTS` at most: the time of others stays in the part around them.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rpcbench.runtime.operator_columns import STEP, OperatorColumns, ThreadOperators
from rpcbench.runtime.operator_kinds import COMMUNICATION, Times

MOST_PARTS = 10_000
MODULE = "nn.Module: "
"""The beginning of the name under which torch's profiler records the call of a module."""
_OUTSIDE = 0  # the number of the empty path
_NOBODY = -1  # the number of no thread
Numbers = NDArray[np.int64]


class PartSum(NamedTuple):
    """All runs of a part."""

    path: tuple[str, ...]  # () for operators without a part
    runs: int
    seconds: float  # on threads
    own: float  # without the parts within it
    backward: float  # of the backward operators of its forward operators
    communication: float  # of kernels, else of operators on threads, forward and backward
    on_device: float  # of other kernels, forward and backward


class PartColumns:
    """The ranges, links and launches of one process, in any order. Times are seconds, on the clock of its operators."""

    def __init__(self) -> None:
        self._threads: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._ranges: dict[int, _Ranges] = {}  # by thread
        self.forward, self.backward, self.launches = _TimedIds(), _TimedIds(), _TimedIds()
        self._kernels = array("q"), array("d"), array("b")  # correlation, seconds, whether it communicates

    def add_range(self, name: str, thread: str, begin: float, seconds: float) -> None:
        """Add the call of a module, or an annotation."""
        name = f"{STEP}*" if name.startswith(STEP) else name.removeprefix(MODULE)
        number = self._names.setdefault(name, len(self._names))
        self._ranges.setdefault(self.number_thread(thread), _Ranges()).add_range(number, begin, seconds)

    def add_kernel(self, correlation: int, seconds: float, kind: int) -> None:
        """Add a kernel, or a copy of the accelerator, which the launch with the same correlation has asked for."""
        correlations, durations, communicates = self._kernels
        correlations.append(correlation)
        durations.append(seconds)
        communicates.append(kind == COMMUNICATION)

    def number_thread(self, thread: str) -> int:
        """Return the number of a thread, for points."""
        return self._threads.setdefault(thread, len(self._threads))

    def sum_parts(self, operators: OperatorColumns) -> list[PartSum]:
        """Return the sums of all parts, in the order of their first runs, that of the empty path first."""
        sums = _Sums()
        opened = {thread: sums.add_ranges(self._list_ranges(thread)) for thread in self._threads.values()}
        threads, times, parts = self._find_links(opened)
        continued: dict[int, _Segments] = {}
        for each in operators.list_threads():  # one at a time: each is a copy of its operators
            of_thread = threads == (thread := self.number_thread(each.thread))
            own = opened.get(thread, _Segments([]))
            continued[thread] = sums.add_backward(each, times[of_thread], parts[of_thread])
            sums.add_outside(each, own, continued[thread])
            if not self._kernels[0]:
                sums.add_communication(each, own, continued[thread])
        self._sum_kernels(sums, opened, continued)
        return sums.list_sums()

    def _list_ranges(self, thread: int) -> Iterator[tuple[float, float, str]]:
        """Yield begin, end and name of the ranges of a thread, each before those within it."""
        names = [*self._names]
        ranges = self._ranges.get(thread, _Ranges())
        return ((begin, end, names[which]) for begin, end, which in ranges.list_nested())

    def _find_links(self, opened: dict[int, _Segments]) -> tuple[Numbers, Times, Numbers]:
        """Return the threads and times of backward operators, and the parts of their forward operators."""
        ids, threads, times = self.backward.columns
        found = _find_parts(*self.forward.find_by_id(ids), opened)
        linked = found != _OUTSIDE
        return threads[linked], times[linked], found[linked]

    def _sum_kernels(self, sums: _Sums, opened: dict[int, _Segments], continued: dict[int, _Segments]) -> None:
        correlations, seconds, communicate = [_view_column(column) for column in self._kernels]
        places = self.launches.find_by_id(correlations)
        found = _find_parts(*places, opened), _find_parts(*places, continued)
        for table, chosen in ((sums.communication, communicate == 1), (sums.on_device, communicate == 0)):
            sums.add_to_parts(table, found[0][chosen], found[1][chosen], seconds[chosen])


class _Ranges:
    """Ranges of a thread, as columns."""

    def __init__(self) -> None:
        self._which, self._begins, self._seconds = array("i"), array("d"), array("d")

    def add_range(self, which: int, begin: float, seconds: float) -> None:
        self._which.append(which)
        self._begins.append(begin)
        self._seconds.append(seconds)

    def list_nested(self) -> Iterator[tuple[float, float, int]]:
        begins, seconds = _view_column(self._begins), _view_column(self._seconds)
        for place in np.lexsort((-seconds, begins)).tolist():
            yield self._begins[place], self._begins[place] + self._seconds[place], self._which[place]


def _view_column(column: array[Any]) -> NDArray[Any]:
    """Return the numbers of a column without a copy: none may be added meanwhile."""
    return np.frombuffer(column, dtype=column.typecode) if column else np.zeros(0, dtype=column.typecode)


class _TimedIds:
    """Events by an id, each with the thread and the time at which it was."""

    def __init__(self) -> None:
        self._ids, self._threads, self._times = array("q"), array("i"), array("d")

    def add_point(self, id_: int, thread: int, time: float) -> None:
        self._ids.append(id_)
        self._threads.append(thread)
        self._times.append(time)

    @property
    def columns(self) -> tuple[Numbers, Numbers, Times]:
        """The ids, threads and times."""
        return _view_column(self._ids), _view_column(self._threads), _view_column(self._times)

    def find_by_id(self, ids: Numbers) -> tuple[Numbers, Times]:
        """Return the threads and times of the latest events with these ids; `_NOBODY` where there is none."""
        if not self._ids:
            return np.full(len(ids), _NOBODY), np.zeros(len(ids))
        own, threads, times = self.columns
        order = np.lexsort((times, own))
        places = order[np.maximum(0, np.searchsorted(own[order], ids, side="right") - 1)]
        return np.where(own[places] == ids, threads[places], _NOBODY), times[places]


class _Segments:
    """The part that a thread runs, from each time at which it changes."""

    def __init__(self, changes: list[tuple[float, int]]) -> None:
        self._times = np.array([time for time, _ in changes], dtype=np.float64)
        self._parts = np.array([_OUTSIDE, *(part for _, part in changes)], dtype=np.int64)

    def find_parts(self, times: Times) -> Numbers:
        found: Numbers = self._parts[np.searchsorted(self._times, times, side="right")]
        return found


def _find_parts(threads: Numbers, times: Times, segments: dict[int, _Segments]) -> Numbers:
    """Return the parts that these threads ran at these times."""
    found = np.full(len(threads), _OUTSIDE, dtype=np.int64)
    for thread in np.unique(threads).tolist():
        if thread in segments:
            found[threads == thread] = segments[thread].find_parts(times[threads == thread])
    return found


Spent = defaultdict[int, float]
"""Seconds by part."""
T = TypeVar("T")


class _Sums:
    """The parts that were found so far, and their sums."""

    def __init__(self) -> None:
        self._parents, self._names = [_OUTSIDE], [""]
        self._known: dict[tuple[int, str], int] = {}
        self._runs, self._seconds, self._own = Counter[int](), Spent(float), Spent(float)
        self._backward: Spent = Spent(float)  # without the backward operators within
        self.communication, self.on_device = Spent(float), Spent(float)

    def add_ranges(self, ranges: Iterable[tuple[float, float, str]]) -> _Segments:
        """Add the ranges of a thread, and return their parts over time."""
        return _walk_nested(ranges, self._add_range)

    def _add_range(self, outer: int, name: str, seconds: float) -> int:
        part = self._known.get((outer, name))
        if part is None:
            if len(self._names) > MOST_PARTS:
                return outer
            part = self._known[outer, name] = len(self._names)
            self._parents.append(outer)
            self._names.append(name)
        self._runs[part] += 1
        self._seconds[part] += seconds
        self._own[part] += seconds
        if outer != _OUTSIDE:
            self._own[outer] -= seconds
        return part

    def add_backward(self, each: ThreadOperators, times: Times, parts: Numbers) -> _Segments:
        """Add the backward operators of a thread that run at these times, and return their parts over time."""
        begins, ends = each.begins[each.engine], each.ends[each.engine]
        places = np.searchsorted(begins, times, side="right") - 1
        within = (places >= 0) & (times <= ends[places]) if len(begins) else np.zeros(len(times), dtype=bool)
        chosen = dict(zip(places[within].tolist(), parts[within].tolist(), strict=True))
        nested = ((float(begins[place]), float(ends[place]), chosen[place]) for place in sorted(chosen))
        return _walk_nested(nested, self._add_backward_operator)

    def _add_backward_operator(self, outer: int, part: int, seconds: float) -> int:
        self._backward[part] += seconds
        if outer != _OUTSIDE:
            self._backward[outer] -= seconds
        return part

    def add_outside(self, each: ThreadOperators, opened: _Segments, continued: _Segments) -> None:
        """Add the operators of a thread that no part has, as a part of their own."""
        begins, ends = _keep_outermost(each.begins, each.ends)
        lost = (opened.find_parts(begins) == _OUTSIDE) & (continued.find_parts(begins) == _OUTSIDE)
        seconds = float((ends - begins)[lost].sum())
        self._runs[_OUTSIDE] += int(lost.sum())
        self._seconds[_OUTSIDE] += seconds
        self._own[_OUTSIDE] += seconds

    def add_communication(self, each: ThreadOperators, opened: _Segments, continued: _Segments) -> None:
        """Add the operators of a thread that communicate."""
        begins, ends = _keep_outermost(each.begins[each.communicate], each.ends[each.communicate])
        self.add_to_parts(self.communication, opened.find_parts(begins), continued.find_parts(begins), ends - begins)

    def add_to_parts(self, table: Spent, ranges: Numbers, forward: Numbers, seconds: Times) -> None:
        """Add seconds to the parts of ranges, to those of forward operators, and to all around these, once in each."""
        pairs, which = np.unique(np.stack([ranges, forward]), axis=1, return_inverse=True)
        totals = np.bincount(which.reshape(-1), weights=seconds, minlength=pairs.shape[1])
        for (one, two), total in zip(pairs.T.tolist(), totals.tolist(), strict=True):
            for part in {*self._list_around(one), *self._list_around(two)} or {_OUTSIDE}:
                table[part] += total

    def _list_around(self, part: int) -> list[int]:
        """Return a part and those around it, innermost first; none for the outside."""
        found = []
        while part != _OUTSIDE:
            found.append(part)
            part = self._parents[part]
        return found

    def list_sums(self) -> list[PartSum]:
        """Return the sums of all parts that have run."""
        backward = Spent(float)
        for part, seconds in self._backward.items():
            for each in self._list_around(part):
                backward[each] += seconds
        tables = self._seconds, self._own, backward, self.communication, self.on_device
        return [
            PartSum(self._path_of(part), self._runs[part], *(max(0.0, table.get(part, 0.0)) for table in tables))
            for part in range(len(self._names))
            if self._runs[part] or any(part in table for table in tables[3:])
        ]

    def _path_of(self, part: int) -> tuple[str, ...]:
        return tuple(self._names[each] for each in reversed(self._list_around(part)))


def _walk_nested(items: Iterable[tuple[float, float, T]], enter: Callable[[int, T, float], int]) -> _Segments:
    """Walk over ranges, each before those within it; `enter(outer part, item, seconds)` returns the part of one."""
    changes: list[tuple[float, int]] = []
    inside: list[tuple[int, float]] = []  # parts that have not ended, and their ends

    def leave(until: float) -> None:
        while inside and inside[-1][1] <= until:
            _, end = inside.pop()
            changes.append((end, inside[-1][0] if inside else _OUTSIDE))

    for begin, end, item in items:
        leave(begin)
        outer, last = inside[-1] if inside else (_OUTSIDE, math.inf)
        inside.append((enter(outer, item, min(end, last) - begin), min(end, last)))
        changes.append((begin, inside[-1][0]))
    leave(math.inf)
    return _Segments(changes)


def _keep_outermost(begins: Times, ends: Times) -> tuple[Times, Times]:
    """Return the spans that lie in none before them."""
    latest = np.maximum.accumulate(ends)
    first = np.concatenate(([True], begins[1:] >= latest[:-1])) if len(begins) else np.zeros(0, dtype=bool)
    return begins[first], ends[first]
