"""The figures of all members over the last 15 minutes, and the bytes between them, from the answers to `HealthPoller`.

Guarantees
- The memory is bounded: a sample a second for a minute, one in five seconds (the mean) for 15 minutes, and for traffic
  the last ten seconds. `count_bytes` tells how much it is: 250 kB, and about 45 kB for a member with three figures.
- A figure is only of time in which somebody looked. The first answer after a pause makes no sample: its share of CPU
  would be a mean over the pause. So there is no sample of a time without polling, and charts have a gap there.
- A member that is late keeps its last figures for `_HOLD` seconds, as sums would have dips otherwise; then it has none.
- A row never changes, so a look at the history costs little, and a change is one new row for a second.

The history is two tables of the member that polls, so panels, records and replays have it as they have any table:
"samples", a row for each sample of all members, and "traffic", a row for each sender.
"""
# Theory of operation
#
#   answers (table "health")        add_answers               closes a second                     tables
#   ─────────────────────────► FigureProgress ─────────────────────────► "1/AT"   sample of a second
#   two a second for a member   sums of its figures,        means, rates       "5/AT"   mean of five of those
#                               bytes by peer                                  "ID"     bytes of a sender by receiver

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from rpcbench.base.ids import Row, Table
from rpcbench.runtime.events import EventLog
from rpcbench.telemetry.views import World
from rpcbench.telemetry.worker_columns import chart_columns, is_of_gpu, read_levels, read_limits

KEPT = {1: 60, 5: 900}
"""Seconds for which samples are kept, by the seconds from one to the next."""
_HOLD = 3.0
_LONGEST = 5.0  # seconds between two answers, of which the second one tells the figures of the time between them
_TRAFFIC_SECONDS = 10


@dataclass(slots=True)
class FigureProgress:
    """The answers of one member, as far as later ones need them."""

    life: tuple[int, int] | None = None  # incarnation and process
    question: int = -1
    clock: float = 0.0  # of the member, at its last answer
    peers: dict[str, list[int]] = field(default_factory=dict)
    lent: dict[str, int] = field(default_factory=dict)
    host: str = ""
    limits: dict[str, tuple[str, float]] = field(default_factory=dict)
    has_begun: bool = False  # another process has taken its place since the last sample
    # since the last sample
    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    moved: dict[str, int] = field(default_factory=dict)  # bytes sent, by receiver
    # in the last sample
    figures: dict[str, float] = field(default_factory=dict)
    heard_at: float = float("-inf")
    flows: deque[tuple[float, dict[str, int]]] = field(default_factory=lambda: deque(maxlen=_TRAFFIC_SECONDS))

    def add_answer(self, told: Row, incarnation: int, now: float) -> None:
        """Add an answer, unless it was added before."""
        life, question = (incarnation, told.get("pid", 0)), told.get("question", 0)
        if (life, question) == (self.life, self.question):
            return
        clock, peers = told.get("clock", now), told.get("peers", {})
        passed = clock - self.clock
        if life == self.life and 0 < passed <= _LONGEST:
            moved = {peer: _increase(count, self.peers.get(peer, (0, 0))) for peer, count in peers.items()}
            self._add_figures(read_levels(told), moved, passed)
        if life != self.life:
            self.has_begun = self.has_begun or self.life is not None
            self.drop_figures()
        self.life, self.question, self.clock, self.peers = life, question, clock, peers
        self.lent, self.host, self.limits = told.get("lent", {}), told.get("host", ""), read_limits(told)

    def _add_figures(self, levels: dict[str, float], moved: dict[str, tuple[int, int]], passed: float) -> None:
        rate = sum(sent + received for sent, received in moved.values()) / passed
        rates = {column.key: rate for column in chart_columns() if column.is_rate}
        for key, value in (levels | rates).items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        for peer, (sent, _) in moved.items():
            if sent:
                self.moved[peer] = self.moved.get(peer, 0) + sent
        self.count += 1
        self.seconds += passed

    def gpus(self) -> set[tuple[str, str]]:
        """Return the figures that are those of a GPU, whoever uses it, each with the GPU."""
        return {(key, device) for key, (device, _) in self.limits.items() if is_of_gpu(key)}

    def end_second(self, now: float, users: Mapping[tuple[str, str], int]) -> dict[str, float]:
        """Return the figures since the last call, or those before if it is late; none if it is very late.

        `users`: how many members have a GPU, each of which gets an equal part of its figures.
        """
        if self.count:
            parts = {key: max(1, users[key, device]) for key, device in self.gpus()}
            self.figures = {
                key: _round_value(value / self.count / parts.get(key, 1)) for key, value in self.sums.items()
            }
            self.heard_at = now
            self.flows.append((self.seconds, self.moved))
            self.count, self.sums, self.seconds, self.moved = 0, {}, 0.0, {}
        elif self.is_silent(now):
            self.figures = {}
            self.flows.clear()
        return self.figures

    def is_silent(self, now: float) -> bool:
        return now - self.heard_at >= _HOLD

    def drop_figures(self) -> None:
        """Begin anew: the member has gone, or nobody has looked for a while."""
        self.count, self.sums, self.seconds, self.moved = 0, {}, 0.0, {}
        self.figures, self.heard_at = {}, float("-inf")
        self.flows.clear()

    def traffic_row(self, id_: int, now: float) -> Row:
        """Return by receiver the bytes per second, of one second and of the last `seconds`, ten at most; all bytes, and
        those in shared memory."""
        to = {}
        for peer, count in self.peers.items():
            if peer != str(id_) and count[0]:
                rates = [self._rate(peer, list(self.flows)[-1:]), self._rate(peer, self.flows)]
                to[peer] = [*rates, count[0], self.lent.get(peer, 0)]
        seconds = max(1, round(sum(passed for passed, _ in self.flows)))
        return {"from": id_, "host": self.host, "silent": self.is_silent(now), "seconds": seconds, "to": to}

    def _rate(self, peer: str, flows: Collection[tuple[float, dict[str, int]]]) -> int:
        seconds = sum(passed for passed, _ in flows)
        return round(sum(moved.get(peer, 0) for _, moved in flows) / seconds) if seconds else 0


def _increase(now: list[int], before: Iterable[int]) -> tuple[int, int]:
    """Return how much two counters have grown; one that is smaller has begun again, with a new connection."""
    sent, received = (new if new < old else new - old for new, old in zip(now, before, strict=True))
    return sent, received


class ResourceHistory:
    """The two tables, which `add_answers` makes; a part of `HealthPoller`. Only its thread adds."""

    def __init__(self, bus: EventLog, zero: float | None = None) -> None:
        """`zero`: when the monotonic clock was 0, in seconds since 1970; by default what both clocks say now."""
        self._bus = bus
        self._lock = threading.Lock()  # guards the tables
        self._tables: dict[str, Table] = {"samples": {}, "traffic": {}}
        # Taken once: no change of the system's clock moves the samples.
        self._offset = time.time() - time.monotonic() if zero is None else zero
        self._members: dict[int, FigureProgress] = {}
        self._second, self._added_at = 0, 0.0  # of the last sample and the last call
        self._recent: list[Row] = []  # samples of a second that are in no mean yet
        self._ages = {step: deque[int]() for step in KEPT}  # times of the samples that are kept
        self._limits: dict[str, float] = {}
        for name in self._tables:
            bus.register_table(name, partial(self.copy_table, name))

    def copy_table(self, name: str) -> Table:
        with self._lock:
            return dict(self._tables[name])

    def count_bytes(self) -> int:
        """Return the bytes of both tables, about."""
        seen: set[int] = set()
        return sum(_size(self.copy_table(name), seen) for name in self._tables)

    def add_answers(self, world: World, now: float) -> None:
        """Add the answers that have come since the last call. `now`: monotonic seconds."""
        for id_, member in world.items():
            progress = self._members.setdefault(id_, FigureProgress())
            if member["state"] not in ("up", "suspect") or now - self._added_at > _HOLD:
                progress.drop_figures()
            if member["state"] in ("up", "suspect") and (told := member["tables"].get("health", {}).get(str(id_))):
                progress.add_answer(told, member["incarnation"], now)
        self._added_at = now
        second = int(now + self._offset)
        if second > self._second:
            self._second = second
            self._end_second(second, {id_ for id_ in self._members if id_ in world}, now)

    def _end_second(self, second: int, there: set[int], now: float) -> None:
        of: dict[str, dict[str, float]] = {}
        users = Counter(device for id_ in there for device in self._members[id_].gpus())
        for id_ in sorted(there):
            for key, value in self._members[id_].end_second(now, users).items():
                of.setdefault(key, {})[sys.intern(str(id_))] = value  # else each figure would have a text of its own
        if of:
            heard = [id_ for id_ in sorted(there) if self._members[id_].figures]
            began = [id_ for id_ in heard if self._members[id_].has_begun]
            for id_ in began:
                self._members[id_].has_begun = False
            self._add_sample({"at": second, "step": 1, "of": of, "limits": self._sum_limits(heard), "began": began})
        for id_ in sorted(self._members):
            row = self._members[id_].traffic_row(id_, now) if id_ in there else None
            self._store("traffic", str(id_), row)

    def _sum_limits(self, there: list[int]) -> dict[str, float]:
        """Return by key of a figure the amount that all machines, or GPUs, of these members have."""
        devices: dict[str, dict[str, float]] = {}
        for id_ in there:
            for key, (device, amount) in self._members[id_].limits.items():
                devices.setdefault(key, {})[device] = amount
        limits = {key: sum(amounts.values()) for key, amounts in devices.items()}
        if limits != self._limits:  # all rows share one dict while they are equal
            self._limits = limits
        return self._limits

    def _add_sample(self, row: Row) -> None:
        if self._recent and self._recent[0]["at"] // 5 != row["at"] // 5:
            self._keep(_mean_sample(self._recent))
            self._recent = []
        self._recent.append(row)
        self._keep(row)

    def _keep(self, row: Row) -> None:
        """Store a sample, and drop those of its kind that are too old."""
        step, at = row["step"], row["at"]
        ages = self._ages[step]
        ages.append(at)
        self._store("samples", f"{step}/{at}", row)
        while ages[0] <= at - KEPT[step]:
            self._store("samples", f"{step}/{ages.popleft()}", None)

    def _store(self, table: str, key: str, row: Row | None) -> None:
        rows = self._tables[table]
        with self._lock:
            if rows.get(key) == row:
                return
            if row is None:
                del rows[key]
            else:
                rows[key] = row
        self._bus.record_change("Sampled", table, key, lambda: row)


def _round_value(value: float) -> float:
    """Return a share to 0.1 %, and bytes as a whole number."""
    return round(value, 3) if value < 100 else round(value)


def _mean_sample(rows: list[Row]) -> Row:
    """Return the mean of samples of a second. Each member counts only the seconds of which it has a figure."""
    known: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for key, figures in row["of"].items():
            for id_, value in figures.items():
                known.setdefault(key, {}).setdefault(id_, []).append(value)
    of = {
        key: {id_: _round_value(sum(values) / len(values)) for id_, values in figures.items()}
        for key, figures in known.items()
    }
    began = sorted({id_ for row in rows for id_ in row["began"]})
    return {"at": rows[-1]["at"], "step": 5, "of": of, "limits": rows[-1]["limits"], "began": began}


def _size(value: object, seen: set[int]) -> int:
    """Return the bytes of an object with all in it; each counts once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    inside: list[object] = []
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, list):
        inside = value
    return sys.getsizeof(value) + sum(_size(one, seen) for one in inside)
