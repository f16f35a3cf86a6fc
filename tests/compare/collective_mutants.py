"""Mutants by machine: one collective of a right program is left out, or is done twice.

The collectives of torch (functional ones of DTensor, those of DDP and FSDP, plain calls) pass a dispatch mode, which
counts them in order. The number of the mutated one is the same on all ranks, so none waits for another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

REDUCE, SCATTER, GATHER = "reduce", "scatter", "gather"
KINDS = {  # operator → what it does
    "_c10d_functional::all_reduce": REDUCE, "c10d::allreduce_": REDUCE,
    "_c10d_functional::reduce_scatter_tensor": SCATTER, "c10d::_reduce_scatter_base_": SCATTER,
    "_c10d_functional::all_gather_into_tensor": GATHER, "c10d::_allgather_base_": GATHER,
}  # fmt: skip


class Mutator(TorchDispatchMode):
    """Leaves out the collective `number`, or does it `twice`; `alone` is a group of this rank. `seen`: all kinds."""

    def __init__(self, number: int, twice: bool, alone: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.number, self.twice, self.alone = number, twice, alone
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name not in KINDS:
            return func(*args, **kwargs)
        self.seen.append(KINDS[name])
        if len(self.seen) - 1 != self.number:
            return func(*args, **kwargs)
        if self.twice:
            return self.repeat(func, args, kwargs)
        return self.leave_out(func, KINDS[name], args, kwargs)

    def repeat(self, func: Any, args: Any, kwargs: Any) -> Any:
        done = func(*args, **kwargs)
        if func._schema.name == "c10d::allreduce_":
            return func(*args, **kwargs)
        return func(torch.ops._c10d_functional.wait_tensor(done), *args[1:], **kwargs)

    def leave_out(self, func: Any, kind: str, args: Any, kwargs: Any) -> Any:
        if func._schema.name == "c10d::allreduce_":
            assert self.alone is not None
            return func(args[0], self.alone.boxed(), *args[2:], **kwargs)
        if func._schema.name == "c10d::_reduce_scatter_base_":  # others add nothing to this rank's piece
            alone = torch.zeros_like(args[1])
            piece = slice(args[0].numel() * dist.get_rank(), args[0].numel() * (dist.get_rank() + 1))
            alone.view(-1)[piece] = args[1].reshape(-1)[piece]
            return func(args[0], alone, *args[2:], **kwargs)
        if func._schema.name == "c10d::_allgather_base_":
            done = func(*args, **kwargs)
            dist.Work.unbox(done[1]).wait()
            args[0].copy_(own_result(kind, args[1], args[0].numel()))
            return done
        count = 1 if kind == REDUCE else args[2] if kind == SCATTER else args[1]
        size = args[0].numel() // count if kind == SCATTER else args[0].numel() * count
        found = own_result(kind, args[0], size)
        return found.view(-1, *args[0].shape[1:]) if kind != REDUCE else found


def own_result(kind: str, value: Tensor, size: int) -> Tensor:
    """What this rank has without the others: its own value, its own piece of that, or copies of it."""
    if kind == REDUCE:
        return value.clone()
    if kind == SCATTER:
        return value.reshape(-1)[size * dist.get_rank() :][:size].clone()
    return value.reshape(-1).repeat(size // value.numel())
