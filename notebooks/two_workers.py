"""Stand-ins for a large model on two workers, and a timeline of them, for lesson 14.

`watch(run, stages, rows, parts)` runs a function on the stages and draws when each worker was busy with which part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import draw
import torch
from torch import Tensor, nn

from rpcbench.nn import RemoteModule

SECONDS = 0.004  # for each row, in the ends; the middle takes twice as long
UNIT = 4 * SECONDS  # a part of four rows, in one of the ends
PLACES = {
    "first": ("worker1", SECONDS, "blue"),
    "middle": ("worker2", 2 * SECONDS, "green"),
    "last": ("worker1", SECONDS, "purple"),
}
Run = Callable[[Any, Tensor, int], Tensor]


class Work(NamedTuple):
    worker: str
    stage: str
    begin: float
    end: float


class Stage(nn.Module):
    """Sleeps for each row of its input instead of computing, and logs when. One part at a time, as a busy core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.log: list[tuple[float, float]] = []

    def forward(self, rows: Tensor) -> Tensor:
        with _core:
            begin = time.perf_counter()
            time.sleep(self.seconds * len(rows))
            self.log.append((begin, time.perf_counter()))
        return rows

    def take(self) -> list[tuple[float, float]]:
        """What was logged since the last time."""
        taken, self.log = self.log, []
        return taken


_core = threading.Lock()  # the one core of a worker: what runs there takes turns
_seen: list[Work] = []  # of the last `watch`


def stages() -> tuple[RemoteModule, ...]:
    """The two ends on worker1, and the middle on worker2."""
    return tuple(RemoteModule(worker, Stage, (seconds,)) for worker, seconds, _ in PLACES.values())


def watch(run: Run, modules: tuple[RemoteModule, ...], rows: Tensor, parts: int) -> tuple[float, draw.Drawing]:
    """Run a function on the stages: the time in units of one part in one of the ends, and a timeline."""
    for module in modules:
        _taken(module)
    found = run(modules, rows, parts)
    assert torch.equal(found, rows), "the stages hand on what they are given"
    work = [
        Work(worker, stage, begin, end)
        for module, (stage, (worker, _, _)) in zip(modules, PLACES.items(), strict=True)
        for begin, end in _taken(module)
    ]
    _seen[:] = work
    began = min(each.begin for each in work)
    units = (max(each.end for each in work) - began) / UNIT
    lanes: dict[str, list[tuple[float, float, str, str]]] = {"worker1": [], "worker2": []}
    for stage, (worker, _, colour) in PLACES.items():
        times = sorted((each.begin, each.end) for each in work if each.stage == stage)
        lanes[worker] += [
            (1000 * (begin - began), 1000 * (end - began), f"{stage[0]}{number}", colour)
            for number, (begin, end) in enumerate(times, 1)
        ]
    return units, draw.lanes(lanes, "ms", f"{parts} parts, {run.__name__}: {units:.1f} units")


def overlap() -> float:
    """Seconds of the last `watch` in which both workers were busy."""
    ends, middle = ([each for each in _seen if (each.worker == "worker1") is one] for one in (True, False))
    return sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a in ends for b in middle)


def at_once(modules: tuple[RemoteModule, ...], rows: Tensor, parts: int) -> Tensor:
    """The lesson's version of exercise 3: each part goes on as soon as it is ready."""
    first, middle, last = modules
    begun = [first.forward_async(part) for part in rows.chunk(parts)]
    begun = [middle.forward_async(part.wait()) for part in begun]
    begun = [last.forward_async(part.wait()) for part in begun]
    return torch.cat([part.wait() for part in begun])


def _taken(module: RemoteModule) -> list[tuple[float, float]]:
    taken: list[tuple[float, float]] = module.get_module_rref().rpc_sync().take()
    return taken
