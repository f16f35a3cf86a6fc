"""Metrics of any loop: numbers that a process logs by name and step, as rows of the table "metrics".

Guarantees
- A call costs about two microseconds, with one more for each further number, and three with a watcher.
- The last `KEPT` points of each name are kept in each process, and at most one block more; a point has 16 bytes.
- A value is a number or a tensor of no dimensions, which is read once. Anything else is refused, with its name.
- Clients get what is logged on the logging thread, after it has been kept. Their errors are the caller's.
- A process without an agent keeps its points all the same; the first agent that logs here begins with a copy of them.

A row is a block of up to `BLOCK` points of one name and one run, key "NAME'S NUMBER.BLOCK": a full block never changes,
so a change that is sent is small. It has the times of its first and last point, in seconds since 1970. A step smaller
than the one before begins a new run of that name.
"""

from __future__ import annotations

import math
import operator
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from rpcbench.base.ids import Row, Table
from rpcbench.runtime.current import find_current

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent

KEPT, BLOCK = 10_000, 200
MOST_NAMES, LONGEST_NAME = 200, 200
"""Names in a process, and characters of one."""
_MOST_STEP = 2**53  # what a browser can count to
_LARGEST = 2.0**63  # a value as large as this, as one that is not finite, is kept as text
Values = dict[str, float]
Deliver = Callable[[Values, int], object]


@dataclass(slots=True)
class _Points:
    run: int
    began: float  # when the first point was logged, and the last one
    last: float
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    odd: list[list[Any]] = field(default_factory=list)  # [points before it, step, text]: NaN and the like

    def __len__(self) -> int:
        return len(self.steps) + len(self.odd)


class _Curve:
    """The points of one name."""

    def __init__(self, name: str, order: int, now: float = 0.0) -> None:
        self.name, self.order = name, order
        self.first = 0  # number of the first block that is kept
        self.blocks: deque[_Points] = deque([_Points(0, now, now)])
        self.last_step: float = -math.inf

    def add_point(self, step: int, value: float, now: float) -> str | None:
        """Add a point. Returns the key of a block that is dropped for it."""
        block, dropped = self.blocks[-1], None
        if step < self.last_step or len(block) >= BLOCK:
            block = _Points(block.run + (step < self.last_step), now, now)
            self.blocks.append(block)
            if sum(map(len, self.blocks)) >= KEPT + BLOCK:
                self.blocks.popleft()
                self.first += 1
                dropped = f"{self.order}.{self.first - 1}"
        self.last_step, block.last = step, now
        if -_LARGEST < value < _LARGEST:
            block.steps.append(step)
            block.values.append(value)
        else:
            block.odd.append([len(block.steps), step, repr(value)])
        return dropped

    @property
    def last_key(self) -> str:
        return f"{self.order}.{self.first + len(self.blocks) - 1}"

    def make_row(self, number: int) -> Row | None:
        """Return the row of a block, None if it has been dropped."""
        if number < self.first:
            return None
        block = self.blocks[number - self.first]
        return {
            "name": self.name, "order": self.order, "run": block.run, "block": number, "steps": block.steps.tolist(),
            "values": block.values.tolist(), "odd": [*block.odd], "times": [block.began, block.last],
        }  # fmt: skip

    def copy(self) -> _Curve:
        copied = _Curve(self.name, self.order)
        copied.first, copied.last_step = self.first, self.last_step
        copied.blocks = deque(
            replace(one, steps=one.steps[:], values=one.values[:], odd=[*one.odd]) for one in self.blocks
        )
        return copied


class MetricLog:
    """What was logged by one agent, `agent.part(MetricLog)`, or by a process that has none."""

    def __init__(self, agent: Agent | None = None) -> None:
        self._lock = threading.Lock()  # guards the curves
        self._curves: dict[str, _Curve] = {}
        self.last_step = 0  # of the last call
        self.copied_at: float | None = None  # when an agent began to log in its place, in monotonic seconds
        self._watchers: list[Callable[[], object]] = []  # replaced, never changed
        self._bus = None if agent is None else agent.links.bus
        if agent is not None:
            self._take_points(WITHOUT_AGENT)
            agent.links.bus.register_table("metrics", self.table)

    def _take_points(self, other: MetricLog) -> None:
        with other._lock:
            self._curves = {name: curve.copy() for name, curve in other._curves.items()}
            self.last_step, other.copied_at = other.last_step, time.monotonic()
        other._tell_watchers()
        for curve in self._curves.values():
            for number in range(curve.first, curve.first + len(curve.blocks)):
                self._report_block(f"{curve.order}.{number}", curve, number)

    def add_values(self, values: Values, step: int) -> None:
        """Add a point to each of these names."""
        reports, now = [], time.time()
        with self._lock:
            self.last_step = step
            for name, value in values.items():
                curve = self._curves.get(name) or self._begin_curve(name, now)
                reports.append((curve, curve.add_point(step, value, now), curve.last_key))
        if self._watchers:
            self._tell_watchers()
        if self._bus is None or not self._bus.listening:
            return
        for curve, dropped, key in reports:
            if dropped is not None:
                self._bus.record_change("MetricDropped", "metrics", dropped, lambda: None)
            self._report_block(key, curve, int(key.partition(".")[2]))

    def next_step(self, names: Iterable[str]) -> int:
        """Return the step of the last call, or the one after it where one of these names has a value there."""
        for name in names:
            curve = self._curves.get(name)
            if curve is not None and curve.last_step == self.last_step:
                return self.last_step + 1
        return self.last_step

    def add_watcher(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` after each change, on the thread that makes it. Returns a function that ends that."""
        own = partial(wake)
        self._watchers = [*self._watchers, own]

        def remove_watcher() -> None:
            self._watchers = [one for one in self._watchers if one is not own]

        return remove_watcher

    def _tell_watchers(self) -> None:
        for wake in self._watchers:
            wake()

    def _begin_curve(self, name: str, now: float) -> _Curve:
        if len(self._curves) >= MOST_NAMES:
            raise ValueError(f"this process has logged {MOST_NAMES} names, no more {name!r}: put numbers in step=")
        curve = self._curves[name] = _Curve(name, len(self._curves), now)
        return curve

    def _report_block(self, key: str, curve: _Curve, number: int) -> None:
        def make_row() -> Row | None:
            with self._lock:
                return curve.make_row(number)

        if self._bus is not None:
            self._bus.record_change("MetricLogged", "metrics", key, make_row)

    def table(self) -> Table:
        with self._lock:
            numbered = [
                (curve, number)
                for curve in self._curves.values()
                for number in range(curve.first, curve.first + len(curve.blocks))
            ]
            rows = {f"{curve.order}.{number}": curve.make_row(number) for curve, number in numbered}
            return {key: row for key, row in rows.items() if row is not None}


WITHOUT_AGENT = MetricLog()
_clients: list[tuple[object, Deliver]] = []  # replaced, never changed, so that a reader needs no lock


def log(metrics: Mapping[str, object] | None = None, /, *, step: int | None = None, **named: object) -> None:
    """Log numbers of a loop, on any worker or rank and in the notebook: `rpcbench.log(loss=loss, lr=0.1)`.

    `%panel metrics` draws them, a curve for each name and rank. Each process keeps the last 10,000 points of a name,
    also before a cluster runs and in programs without one. A call costs about two microseconds. A tensor is read by
    one `.item()`, which waits until a GPU has computed it: log each tenth step where that matters.

    Args:
        metrics: values by name, for names that are no Python names: `rpcbench.log({"train/loss": 0.5})`.
        step: the step that the values belong to, the horizontal axis. By default that of the last call here, and one
            more where one of these names has a value there already; 0 in the first call. So several calls in one turn
            of a loop have one step. A smaller step than the last one of a name begins its curve anew.
        named: values by name. A value is a number, or a tensor or NumPy array of no dimensions.

    Raises:
        TypeError: for another value, named with what to log in its place.
        ValueError: for a name that is empty or longer than 200 characters, more than 200 names, or a step of more than
            53 bits.
    """
    given = named if metrics is None else {**metrics, **named}
    values = {name: value if type(value) is float else _read_value(name, value) for name, value in given.items()}
    if not all(map(_is_name, values)):
        raise ValueError(f"names of metrics are texts of 1 to {LONGEST_NAME} characters: {[*values]!r:.500}")
    agent = find_current()
    kept = WITHOUT_AGENT if agent is None else agent.part(MetricLog)
    number = kept.next_step(values) if step is None else operator.index(step)
    if not -_MOST_STEP <= number <= _MOST_STEP:
        raise ValueError(f"step={number} has more than 53 bits, which no browser counts to")
    kept.add_values(values, number)
    for _, deliver in _clients:
        deliver(values, number)


def log_to(client: object) -> None:
    """Hand all that this process logs on to your tracker, too; `None` ends that for all.

    Call it in the process that logs: on a worker in a cell or in the function that runs there. Call it on rank 0 alone
    if your tracker shall have one curve.

    Args:
        client: a run of W&B, or `wandb` itself (`log(values, step=)`); TensorBoard's `SummaryWriter` (`add_scalar`);
            the module `mlflow` (`log_metrics`); another object with one of these methods; or a function of the values,
            a dict, and the step. rpcbench imports none of them. Their errors are raised by `rpcbench.log`.

    Raises:
        TypeError: for an object with none of these methods.
    """
    global _clients
    if client is None:
        _clients = []
        return
    _clients = [*(one for one in _clients if one[0] is not client), (client, _adapt_client(client))]


def _adapt_client(client: Any) -> Deliver:
    if callable(add := getattr(client, "add_scalar", None)):
        return lambda values, step: [add(name, value, step) for name, value in values.items()]
    for method in ("log_metrics", "log"):
        if callable(send := getattr(client, method, None)):
            return lambda values, step: send(values, step=step)
    if callable(client):
        return lambda values, step: client(values, step)
    raise TypeError(
        f"log_to cannot use {type(client).__name__}: it takes a W&B run, a SummaryWriter, the module mlflow, or a "
        "function of the values and the step"
    )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= LONGEST_NAME


def _read_value(name: str, value: Any) -> float:
    """Return a number or a tensor of no dimensions as a float; TypeError for anything else."""
    if hasattr(value, "full_tensor"):
        raise TypeError(f"{name} is a DTensor, whose value needs all ranks: log {name}.full_tensor() on each of them")
    shape = getattr(value, "shape", ())
    if tuple(shape):
        raise TypeError(f"{name} is of shape {[*shape]}: log one number, such as {name}.mean()")
    if not isinstance(value, Real) and callable(item := getattr(value, "item", None)):
        value = item()
    if not isinstance(value, Real):
        raise TypeError(f"{name} is of type {type(value).__name__}: log takes numbers and tensors of no dimensions")
    return float(value)


def _forget_threads() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    WITHOUT_AGENT._lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)
