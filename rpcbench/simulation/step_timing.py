"""Gives the actions of all played ranks their times on a hardware, and each second of a step its cause.

Guarantees
- A stream runs its actions in the order of issue, a wait holds up only the actions behind it on its stream.
- A collective begins when all of its ranks that are played have come; ranks that are not played come with the one
  that is, as they do the same. A transfer begins when both ends have come. Collectives of one group, and transfers in
  one direction between two ranks, follow each other.
- An operator that runs beside a collective is slowed by it, by `Efficiency.contention`.
- Ranks that meet in each step are as slow as the slowest one of their world, by `Efficiency.spread`.
- The seconds of all causes of a rank add up to the step.
- Ranks that wait for each other for ever raise SimulationError, with the waits.
"""

# Theory of operation
#
#     log of rank 0 ──► Cursor ─┐                        Meeting of one collective
#     log of rank 8 ──► Cursor ─┼── arrives, with its ──► begin = the last arrival, or the end of the group's last one
#     …                         │   own time              end   = begin + seconds
#                               └── waits for its end ◄──┘
#
# A cursor runs its log until it needs the end of a collective to which others have not come, then the next one runs.
# Each stream has a frontier: the time until which it is planned, and the cause of its wait there.

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from rpcbench.base.errors import SimulationError
from rpcbench.simulation.costs import collective_seconds, kernel_time
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.rank_log import (
    COMPUTE,
    BeginOperation,
    Collective,
    EndOperation,
    Kernel,
    ModelPart,
    RankLog,
    RecordEvent,
    Synchronize,
    WaitForCollective,
    WaitForEvent,
)

LAUNCH, BUBBLE, OTHERS, PIPELINE = "launch", "bubble", "waiting for ranks", "exposed pipeline"
"""Causes of idle time, beside `costs.COMPUTE_BOUND`, `MEMORY_BOUND` and "exposed NAME", of a group."""
CONTENTION = "slowed by collectives"
"""Cause of the time that operators lose to collectives beside them."""


def is_exposed(cause: str) -> bool:
    """Return whether a cause is a wait for a collective or a transfer."""
    return cause.startswith("exposed ")


class TimedSpan(NamedTuple):
    """The time of an action on a rank."""

    lane: str  # "compute", or the name of a group for its collectives
    name: str
    begin: float  # seconds from the begin of the step
    end: float
    cause: str
    part: ModelPart


class CollectiveTimes(NamedTuple):
    """The times of a collective or transfer on a rank, in seconds from the begin of the step."""

    come: float  # when this rank has come to it
    begin: float  # when all have come, and the one before it is over
    end: float


@dataclass(slots=True)
class RankTimeline:
    """The times of one rank's step."""

    rank: int
    spans: list[TimedSpan] = field(default_factory=list)
    causes: dict[str, float] = field(default_factory=dict)  # seconds of each; their sum is the step
    seconds: float = 0.0
    collectives: dict[int, CollectiveTimes] = field(default_factory=dict)  # by number
    operations: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each of a pipeline's stages

    def add_cause(self, cause: str, seconds: float) -> None:
        """Give a cause some of the step's seconds."""
        if seconds > 0.0:
            self.causes[cause] = self.causes.get(cause, 0.0) + seconds


class _Moment(NamedTuple):
    """A time, and the cause of a wait until then."""

    time: float
    cause: str = LAUNCH
    others: float = 0.0  # seconds of it in which other ranks had not come


_BEGIN = _Moment(0.0)


@dataclass(slots=True)
class _Meeting:
    """A collective, or a transfer, at which ranks meet."""

    expected: frozenset[int]  # played ranks
    seconds: float
    before: _Meeting | None  # of the same group: it ends first
    arrivals: dict[int, float] = field(default_factory=dict)
    free: float = 0.0  # when the group's last one has ended
    begin: float = 0.0
    end: float | None = None

    def resolve(self) -> bool:
        """Set the times if all have come and the one before is over; return whether they are set."""
        if self.end is not None:
            return True
        if self.expected - self.arrivals.keys() or not (self.before is None or self.before.resolve()):
            return False
        self.free = 0.0 if self.before is None or self.before.end is None else self.before.end
        self.begin = max(self.free, *self.arrivals.values())
        self.end, self.before = self.begin + self.seconds, None
        return True

    def seconds_for_others(self, rank: int) -> float:
        """Return how long a rank, and the link, have waited for the other ranks."""
        return max(0.0, self.begin - max(self.free, self.arrivals[rank]))


class _Meetings:
    """Finds the meeting of a rank's next collective."""

    def __init__(self, played: frozenset[int], hardware: Hardware) -> None:
        self._played = played
        self._hardware = hardware
        self._counts: Counter[tuple[int, object]] = Counter()  # (rank, key) → meetings so far
        self._meetings: defaultdict[object, list[_Meeting]] = defaultdict(list)

    def join(self, rank: int, collective: Collective, time: float) -> _Meeting:
        """Return the meeting of a collective to which `rank` comes at `time`."""
        key, expected = self._key_of(rank, collective)
        place = self._counts[rank, key]
        self._counts[rank, key] += 1
        meetings = self._meetings[key]
        if place == len(meetings):
            seconds = collective_seconds(collective, rank, self._hardware)
            meetings.append(_Meeting(expected, seconds, meetings[-1] if meetings else None))
        meetings[place].arrivals[rank] = time
        return meetings[place]

    def _key_of(self, rank: int, collective: Collective) -> tuple[object, frozenset[int]]:
        if collective.peer is None:
            return (collective.group, collective.ranks), self._played & {*collective.ranks}
        pair = collective.members(rank)
        if collective.peer in self._played:
            return pair, frozenset(pair)
        return (rank, pair), frozenset((rank,))  # the other end does as this rank does


@dataclass(slots=True)
class _Wait:
    """A collective that a cursor waits for."""

    rank: int
    collective: Collective
    meeting: _Meeting


class _Cursor:
    """Runs the log of one rank."""

    def __init__(self, log: RankLog, hardware: Hardware, meetings: _Meetings, behind: float) -> None:
        self._log, self._hardware, self._meetings = log, hardware, meetings
        self._behind = behind  # by which share of its time an operator of the slowest rank takes longer
        self.timeline = RankTimeline(log.rank)
        self._issued = 0.0  # until when the program has issued its actions
        self._filled = 0.0  # until when the compute stream's seconds have causes
        self._began = 0.0  # when the operation of a pipeline's stage has begun
        self._streams: defaultdict[int, _Moment] = defaultdict(lambda: _BEGIN)
        self._events: dict[int, _Moment] = {}
        self._joined: dict[int, tuple[Collective, _Meeting]] = {}
        self._beside: list[_Meeting] = []  # that may still be under way

    def run(self) -> Iterator[_Wait]:
        """Run to the end; yield each unresolved collective that is waited for, and go on when it is resolved."""
        for action in self._log.actions:
            stream = getattr(action, "stream", COMPUTE) if self._hardware.has_streams else COMPUTE
            if isinstance(action, Kernel):
                self._run_kernel(stream, action)
            elif isinstance(action, Collective):
                yield from self._issue_collective(stream, action)
            elif isinstance(action, WaitForCollective):
                yield from self._wait_for_collective(stream, action.number)
            elif isinstance(action, RecordEvent):
                self._events[action.event] = self._streams[stream]
            elif isinstance(action, WaitForEvent):
                self._wait_until(stream, self._events.get(action.event, _BEGIN))
            elif isinstance(action, BeginOperation):
                self._began = self._streams[COMPUTE].time
            elif isinstance(action, EndOperation):
                self.timeline.operations.append((self._began, self._streams[COMPUTE].time))
            elif isinstance(action, Synchronize):
                self._issued = max(self._issued, *(moment.time for moment in self._streams.values()), 0.0)
        for number in list(self._joined):
            yield from self._wait_for_collective(COMPUTE, number)
        for moment in list(self._streams.values()):
            self._wait_until(COMPUTE, moment)
        self._fill_gap(self._streams[COMPUTE], self._streams[COMPUTE].time)
        self.timeline.seconds = self._filled

    def _run_kernel(self, stream: int, kernel: Kernel) -> None:
        seconds, bound = kernel_time(kernel, self._hardware)
        self._issued += self._hardware.launch_seconds
        at = self._streams[stream]
        # a CPU launches an operator and then runs it; others run one while the program launches the next
        begin = max(at.time, self._issued) if self._hardware.has_streams else at.time + self._hardware.launch_seconds
        lost = self._seconds_lost(begin, begin + seconds) if stream == COMPUTE else 0.0
        waited = seconds * self._behind if stream == COMPUTE else 0.0
        end = begin + seconds + lost + waited
        if stream == COMPUTE:
            self._fill_gap(at, begin)
            self.timeline.add_cause(bound, seconds)
            self.timeline.add_cause(CONTENTION, lost)
            self.timeline.add_cause(OTHERS, waited)
            self._filled = end
        lane = "compute" if stream == COMPUTE else f"stream {stream}"
        self.timeline.spans.append(TimedSpan(lane, kernel.op, begin, end, bound, kernel.part))
        self._streams[stream] = _Moment(end, bound)

    def _seconds_lost(self, begin: float, end: float) -> float:
        """Return the seconds that an operator loses to collectives beside it whose ranks have all come."""
        if not (share := self._hardware.efficiency.contention):
            return 0.0
        self._beside = [each for each in self._beside if not each.resolve() or (each.end or 0.0) > begin]
        shared = (min(each.end, end) - max(each.begin, begin) for each in self._beside if each.end is not None)
        return share * min(end - begin, sum(max(0.0, seconds) for seconds in shared))

    def _fill_gap(self, at: _Moment, begin: float) -> None:
        """Give the idle time of the compute stream before `begin` its causes."""
        waited = max(0.0, min(at.time, begin) - self._filled)
        others = min(at.others, waited)
        self.timeline.add_cause(BUBBLE if at.cause == PIPELINE else OTHERS, others)
        self.timeline.add_cause(at.cause, waited - others)
        self.timeline.add_cause(LAUNCH, max(0.0, begin - max(at.time, self._filled)))
        self._filled = max(self._filled, begin)

    def _issue_collective(self, stream: int, collective: Collective) -> Iterator[_Wait]:
        self._issued += self._hardware.launch_seconds
        time = max(self._streams[stream].time, self._issued if self._hardware.has_streams else 0.0)
        meeting = self._meetings.join(self._log.rank, collective, time)
        self._joined[collective.number] = collective, meeting
        self._beside.append(meeting)
        if collective.is_blocking:
            yield from self._wait_for_collective(stream, collective.number)

    def _wait_for_collective(self, stream: int, number: int) -> Iterator[_Wait]:
        if number not in self._joined:
            return
        collective, meeting = self._joined.pop(number)
        while not meeting.resolve():
            yield _Wait(self._log.rank, collective, meeting)
        assert meeting.end is not None
        name = "pipeline" if collective.peer is not None else collective.group
        span = TimedSpan(name, collective.op, meeting.begin, meeting.end, f"exposed {name}", collective.part)
        self.timeline.spans.append(span)
        come = meeting.arrivals[self._log.rank]
        self.timeline.collectives[number] = CollectiveTimes(come, meeting.begin, meeting.end)
        self._wait_until(stream, _Moment(meeting.end, span.cause, meeting.seconds_for_others(self._log.rank)))

    def _wait_until(self, stream: int, moment: _Moment) -> None:
        at = self._streams[stream]
        if moment.time > at.time:
            if stream == COMPUTE:
                self._fill_gap(at, at.time)  # until then it has waited for something else
            self._streams[stream] = moment


def time_logs(logs: Sequence[RankLog], hardware: Hardware, ranks: int = 1) -> dict[int, RankTimeline]:
    """Return the times of the played ranks of so many. SimulationError if they wait for each other for ever."""
    played = frozenset(log.rank for log in logs)
    meetings = _Meetings(played, hardware)
    behind = hardware.efficiency.spread * slowest_of(ranks)
    cursors = {log.rank: _Cursor(log, hardware, meetings, behind) for log in logs}
    running = {rank: cursor.run() for rank, cursor in cursors.items()}
    while running:
        waits: dict[int, _Wait] = {}
        progressed = False
        for rank, cursor in list(running.items()):
            wait = _run_until_wait(cursor)
            if wait is None:
                del running[rank]
                progressed = True
            else:
                waits[rank] = wait
        if running and not progressed and not any(wait.meeting.resolve() for wait in waits.values()):
            raise SimulationError(f"the ranks wait for each other for ever: {_describe_waits(waits)}")
    return {rank: cursor.timeline for rank, cursor in cursors.items()}


def slowest_of(count: int) -> float:
    """Return how many standard deviations the slowest of so many ranks is behind their mean (Blom's formula)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _run_until_wait(cursor: Iterator[_Wait]) -> _Wait | None:
    """Run a cursor as far as it goes. Returns None at its end."""
    for wait in cursor:
        if not wait.meeting.resolve():
            return wait
    return None


def _describe_waits(waits: Mapping[int, _Wait]) -> str:
    texts = []
    for rank, wait in heapq.nsmallest(4, waits.items(), key=lambda each: each[0]):
        missing = sorted(wait.meeting.expected - wait.meeting.arrivals.keys())
        texts.append(
            f"rank {rank} in {wait.collective.kind} of {wait.collective.group} at {wait.collective.site} for {missing}"
        )
    return "; ".join(texts)
