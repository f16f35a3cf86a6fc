"""The rows of the table: operations over an API that is given by name, goals, figures, and the known runtimes.

- An operation is written once and runs on both sides; the API's module is its only parameter.
- A runtime is an RPC module in torch's form, or one of the `*_side` modules, which put another runtime behind the names
  of one: their `join(rank, url)` returns an object with those names.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from rpcbench.base.errors import RpcError

CALLEE = "worker1"


@dataclass(frozen=True, slots=True)
class Api:
    """`torch.distributed.rpc` or a drop-in for it, with the autograd and optim modules beside it."""

    rpc: Any
    autograd: Any
    optim: Any

    @staticmethod
    def named(name: str) -> Api:
        """`name` is the rpc module's; the others are its siblings."""
        package = name.rpartition(".")[0]
        return Api(*(importlib.import_module(module) for module in (name, f"{package}.autograd", f"{package}.optim")))


@dataclass(frozen=True, slots=True)
class Operation:
    """One unit of work, and whether what it returned is right. `around` is entered around all of them, untimed.

    `calls`: how many calls a unit has.
    """

    run: Callable[[], Any]
    right: Callable[[Any], bool]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    calls: int = 1


Prepare = Callable[[Api, random.Random], Operation]


@dataclass(frozen=True, slots=True)
class Batch:
    """The seconds of each call, or other values in the unit of the row; and CPU seconds of one call."""

    values: list[float]
    cpu: float | None = None


@dataclass(slots=True)
class Samples:
    """One row on one side, batch by batch in the order of measuring. `main` is the quantile of values that counts."""

    main: float = 0.5
    batches: list[Batch] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(batch.values) for batch in self.batches)

    @property
    def value(self) -> float:
        return self._quantile(self.main)

    @property
    def p10(self) -> float:
        return self._quantile(0.1)

    @property
    def cpu(self) -> float | None:
        """Median over the batches; None where it was not measured."""
        known = [batch.cpu for batch in self.batches if batch.cpu is not None]
        return median(known) if known else None

    def _quantile(self, which: float) -> float:
        return float(np.quantile(list(self._all()), which))

    def _all(self) -> Iterable[float]:
        return (value for batch in self.batches for value in batch.values)


Figures = dict[str, dict[str, Samples]]
"""{title of the row: {name of the side: samples}}; a side that cannot do it is missing."""


CALLS, RREFS, TRAINING, WORLDS = "calls", "rrefs", "training", "worlds"
_EVERYTHING = frozenset({CALLS, RREFS, TRAINING, WORLDS})


class Known(NamedTuple):
    """`imports`: the package that must be there; `pip`: what installs it; `goals`: those of the table are about it."""

    module: str
    imports: str
    pip: str
    does: frozenset[str] = _EVERYTHING
    goals: bool = False


OTHERS = {
    "torch": Known("torch.distributed.rpc", "torch", "torch", goals=True),
    "ray": Known("benchmarks.ray_side", "ray", "ray", frozenset({CALLS, RREFS})),
    "monarch": Known("benchmarks.monarch_side", "monarch", "torchmonarch", frozenset({CALLS})),
}
_DOES = {known.module: known.does for known in OTHERS.values()}


def module_of(name: str) -> str:
    """The module of a side. RpcError, with the command that helps, where it is not installed."""
    known = OTHERS[name]
    if importlib.util.find_spec(known.imports) is None:
        raise RpcError(f"{name} is not installed here: pip install {known.pip}")
    return known.module


def has_goals(name: str) -> bool:
    """Whether the goals of the table are about that side."""
    return name not in OTHERS or OTHERS[name].goals


def does(module: str, what: str) -> bool:
    """Whether that side can do such work."""
    return what in _DOES.get(module, _EVERYTHING)


PLAIN = "benchmarks.plain"
BOTH, OURS, HOSTS, BARE = "both", "ours", "hosts", "bare"
SECONDS, BYTES, CORES = "s", "B", "cores"


@dataclass(frozen=True, slots=True)
class Goal:
    """The `ratio` theirs / ours, at least; or `most` of ours.

    `most` is in the unit of the row, or, where `of` names another row, a multiple of what ours takes there.
    """

    ratio: float | None = None
    most: float | None = None
    of: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Its goal, the unit of its values, and which quantile of them counts."""

    goal: Goal
    unit: str = SECONDS
    quantile: float = 0.5


@dataclass(frozen=True, slots=True)
class Workload:
    """How to make its operation, its row, and who is measured.

    `on`: BOTH sides; OURS alone; ours between two HOSTS. For comparison: a PLAIN loop over
    TCP between these; two BARE processes of this host, which have a socket and no runtime.
    `needs`: what the other side must be able to do.
    """

    prepare: Prepare
    row: Row
    on: str = BOTH
    needs: str = CALLS
