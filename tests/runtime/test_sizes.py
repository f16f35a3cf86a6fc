"""The memory that a value keeps alive: computed without code of its class, and reported by its owner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from worlds import until, world

from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.runtime.handles import MOST, size_of


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_args, **_kwargs):
        raise AssertionError("it was asked")


class Proud(torch.nn.Linear):
    def parameters(self, *_args, **_kwargs):
        raise AssertionError("it was asked")

    named_modules = modules = buffers = parameters


class Bare(torch.nn.Module):
    def __init__(self):
        self.n = 3


def tied():
    one = torch.nn.Linear(3, 5, bias=False)
    two = torch.nn.Linear(3, 5, bias=False)
    two.weight = one.weight
    return torch.nn.Sequential(one, two, torch.nn.Sequential(one))


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (torch.zeros(10), 40),
        (torch.zeros(10)[2:4], 40),  # a view keeps the whole storage
        (torch.nn.Parameter(torch.zeros(3)), 12),
        (torch.nn.Linear(3, 5), 80),
        (torch.nn.BatchNorm1d(2), 4 * 8 + 8),
        (Proud(3, 5), 80),
        (tied(), 60),
        (torch.nn.Module(), 0),
        (Bare(), 0),
        ([torch.zeros(2), 3, torch.zeros(1)], 12),
        ({"a": torch.zeros(2)}, 8),
        (torch.zeros(10).as_subclass(Loud), None),
        (torch.zeros(10, device="meta"), None),
        (torch.zeros(3, 3).to_sparse(), None),
        ([torch.zeros(1)] * (MOST + 1), None),
        ([], None),
        ("text", None),
        (3, None),
    ],
)
def test_size_of_counts_the_memory_of_tensors_and_modules(value, size):
    assert size_of(value) == size


def held(rref):
    return rref.local_value().numel()


def test_owners_report_the_sizes_of_created_and_of_local_values(tmp_path: Path, no_leaks: None) -> None:
    with world(tmp_path, 2) as agents:
        there = remote("worker1", torch.zeros, (25,))
        plain = remote("worker1", dict, ())
        mine = RRef(torch.zeros(50))
        rpc_sync("worker1", RRef.owner_name, (mine,))
        until(lambda: [row["size"] for row in agents[1].tables()["owned"].values()] == [100, None])
        other = remote("worker1", list, ([mine],))
        until(lambda: [row["size"] for row in agents[0].tables()["owned"].values()] == [200])
        del there, plain, other
