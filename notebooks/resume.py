"""A training that can be saved and gone on with, how often to save, and who reads what: for lesson 33.

`Training` has a state of five parts. A run that goes on without one of them goes on otherwise than it would have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

PARTS = ("model", "optimizer", "scheduler", "random", "position")


def warm_up_and_decay(step: int) -> float:
    """The factor of the learning rate: up to 1 in five steps, then slowly down."""
    return min(1.0, (step + 1) / 5) * 0.97**step


class Training:
    """A small network learns a curve from noisy rows.

    Attributes:
        model, optimizer, scheduler: As ever.
        random: The generator of the noise.
        position: How many rows have been read.
    """

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(33)
            self.model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_up_and_decay)
        self.random = torch.Generator().manual_seed(33)
        self.position = 0
        self._rows = torch.randn(60, 1, generator=torch.Generator().manual_seed(7), dtype=torch.double)

    def step(self) -> float:
        """One step with the next four rows; its loss."""
        x = self._rows[torch.arange(self.position, self.position + 4) % len(self._rows)]
        self.position += 4
        noise = 0.1 * torch.randn(x.shape, generator=self.random, dtype=torch.double)
        loss = F.mse_loss(self.model(x + noise), torch.sin(2 * x))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def load(self, saved: dict[str, Any]) -> None:
        """Take over the parts that are there."""
        saved = copy.deepcopy(saved)
        for name in ("model", "optimizer", "scheduler"):
            if name in saved:
                getattr(self, name).load_state_dict(saved[name])
        if "random" in saved:
            self.random.set_state(saved["random"])
        self.position = saved.get("position", self.position)


def snapshot(training: Training) -> dict[str, Any]:
    """All parts of the state, as they are now."""
    states = {name: getattr(training, name).state_dict() for name in ("model", "optimizer", "scheduler")}
    return copy.deepcopy({**states, "random": training.random.get_state(), "position": training.position})


# -- who reads what
def bounds(rank: int, ranks: int, length: int) -> tuple[int, int]:
    """The rows of a rank, as `torch.chunk` cuts them."""
    wide = math.ceil(length / ranks)
    return min(rank * wide, length), min((rank + 1) * wide, length)


def pieces(rank: int, ranks: int, old: int, length: int) -> list[tuple[int, int, int]]:
    """For one of `ranks` new ranks: the old rank, and the rows of its file to read."""
    first, last = bounds(rank, ranks, length)
    found = []
    for number in range(old):
        begin, end = bounds(number, old, length)
        if (low := max(first, begin)) < (high := min(last, end)):
            found.append((number, low - begin, high - begin))
    return found


# -- how often
def best_interval(cost: float, mtbf: float) -> float:
    """Young's interval between two saves."""
    return math.sqrt(2 * cost * mtbf)


def lost_share(interval: float, cost: float, mtbf: float) -> float:
    """The share of the time that goes into saves, and into work that is done again."""
    return cost / interval + interval / (2 * mtbf)


def total_time(work: float, interval: float, cost: float, restart: float, failures: Sequence[float]) -> float:
    """How long a run takes that fails: `failures` are the times from each start to the failure."""
    time = done = 0.0
    for up in failures:
        left = work - done
        if left + (math.ceil(left / interval) - 1) * cost <= up:
            break
        done += up // (interval + cost) * interval
        time += up + restart
    left = work - done
    return time + left + (math.ceil(left / interval) - 1) * cost


def simulated_share(interval: float, cost: float, mtbf: float, work: float, runs: int = 20) -> float:
    """The share of the time that is lost in a simulation, the mean of several runs with failures at random."""
    random = torch.Generator().manual_seed(33)
    lost = []
    for _ in range(runs):
        failures = (-mtbf * torch.rand(int(5 * work / mtbf), generator=random, dtype=torch.double).log()).tolist()
        time = total_time(work, interval, cost, 0.0, failures)
        lost.append((time - work) / work)
    return sum(lost) / runs
