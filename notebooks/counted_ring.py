"""The rings of lesson 20, which count what this rank sends, and a model and its task: for lesson 22.

torch's calls for the same are `reduce_scatter_tensor` and `all_gather_into_tensor`. gloo, between CPUs, makes its
reduce-scatter of an all-reduce, so the bytes that belong to a reduce-scatter could not be counted there.
"""

from __future__ import annotations

import rings
import torch
import torch.distributed as dist
from torch import Tensor, nn

LAYERS, WIDTH = 8, 50


class Ring:
    """All ranks of the world. `sent`: the bytes that this rank has sent so far."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.sent = 0

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's shard of the sum over the ranks. The length is a multiple of their number."""
        return rings.reduce_scatter(whole, self.rank, self.size, self._shift)

    def all_gather(self, shard: Tensor) -> Tensor:
        """The shards of all ranks as one vector."""
        return rings.all_gather(shard, self.rank, self.size, self._shift)

    def all_reduce(self, whole: Tensor) -> Tensor:
        """The sum over the ranks, on each of them: one after the other, the two above."""
        return self.all_gather(self.reduce_scatter(whole))

    def _shift(self, chunk: Tensor) -> Tensor:
        came = torch.empty_like(chunk)
        sending = dist.isend(chunk, (self.rank + 1) % self.size)
        dist.recv(came, (self.rank - 1) % self.size)
        assert sending is not None
        sending.wait()
        self.sent += chunk.nbytes
        return came


def make_model(seed: int = 22) -> nn.Sequential:
    """Layers alike, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batch(step: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    """Inputs of a step, and what a network with other weights answers: the task is to answer the same."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step))
    with torch.no_grad():
        return x, make_model(seed=1)(x)
