"""The collectives of torch's dispatcher, and the words for them: operators, groups, shapes.

Guarantees
- A collective has the same words on all ranks, whether it runs or is simulated.
- Text is made when it is asked for, not when the collective runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as c10d


class TorchOp(NamedTuple):
    """An operator of torch's dispatcher: its name for users, and the positions of its arguments."""

    name: str
    tensors: int  # the tensors of this rank: one, a list, or a list of lists
    group: int
    reduce_op: int | None = None
    root: int | None = None  # a rank of the group
    side: str = ""  # of the root: "src" or "dst"


class OpLabel(NamedTuple):
    """An operation with its arguments; its text, which is made when it is shown, is `all_reduce(SUM)`."""

    op: TorchOp
    reduce_op: Any  # torch's object
    root: int | None  # as a rank of the world

    def __str__(self) -> str:
        arguments = [] if self.reduce_op is None else [REDUCE_OPS[self.reduce_op.op()]]
        if self.root is not None:
            arguments.append(f"{self.op.side}={self.root}")
        return f"{self.op.name}({', '.join(arguments)})" if arguments else self.op.name


class Layouts(tuple[tuple[torch.dtype, torch.Size], ...]):
    """The layouts of tensors; its text, which is made when it is shown, is that of the first ones."""

    __slots__ = ()

    def __str__(self) -> str:
        texts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in self[:_LAYOUTS_SHOWN]]
        more = [f"{len(self) - _LAYOUTS_SHOWN} more"] if len(self) > _LAYOUTS_SHOWN else []
        return ", ".join(texts + more)


_LAYOUTS_SHOWN = 3
TORCH_OPS = {
    "allreduce_": TorchOp("all_reduce", 0, 1, 2),
    "allreduce_coalesced_": TorchOp("all_reduce", 0, 1, 2),
    "broadcast_": TorchOp("broadcast", 0, 1, None, 2, "src"),
    "reduce_": TorchOp("reduce", 0, 1, 2, 3, "dst"),
    "allgather_": TorchOp("all_gather", 1, 2),
    "_allgather_base_": TorchOp("all_gather", 1, 2),
    "allgather_coalesced_": TorchOp("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": TorchOp("all_gather", 1, 2),
    "reduce_scatter_": TorchOp("reduce_scatter", 1, 2, 3),
    "_reduce_scatter_base_": TorchOp("reduce_scatter", 1, 2, 3),
    "reduce_scatter_tensor_coalesced_": TorchOp("reduce_scatter", 1, 2, 3),
    "gather_": TorchOp("gather", 1, 2, None, 3, "dst"),
    "scatter_": TorchOp("scatter", 0, 2, None, 3, "src"),
    "alltoall_": TorchOp("all_to_all", 1, 2),
    "alltoall_base_": TorchOp("all_to_all", 1, 2),
    "barrier": TorchOp("barrier", 0, 1),
    "monitored_barrier_": TorchOp("monitored_barrier", 0, 1),
    "send": TorchOp("send", 0, 1, None, 2),
    "recv_": TorchOp("recv", 0, 1, None, 2),
    "recv_any_source_": TorchOp("recv from any rank", 0, 1),
}
TRANSFERS = {"send", "recv_", "recv_any_source_", "monitored_barrier_"}  # each rank makes as many as it has peers
BARRIERS = {"barrier", "monitored_barrier_"}  # their tensor is a dummy
REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")  # in the order of c10d


def group_label(group: c10d.ProcessGroup, is_world: bool) -> str:
    """Return the name of a group for people: "world", the name of a mesh's dimension, or torch's own."""
    label = "world" if is_world else group.group_desc.removeprefix("mesh_")
    return f"group {group.group_name}" if label in ("", "undefined") else label


def first_tensor(tensors: Any) -> torch.Tensor | None:
    while not isinstance(tensors, torch.Tensor):
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def flatten_tensors(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [each for inner in tensors for each in flatten_tensors(inner)]
