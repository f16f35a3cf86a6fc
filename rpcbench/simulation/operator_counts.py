"""The costs of an operator in counts: floating-point operations, and bytes that it reads and writes.

Guarantees
- A matrix product, convolution or attention has the operations of torch's own counter (`torch.utils.flop_counter`);
  a causal attention has half of them.
- A view, and memory that is only reserved, cost nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_LOOKUPS = {"embedding", "index_select", "gather", "index", "slice_scatter", "select_scatter"}
"""Operators that read as much as they write, and not their whole first tensor."""
_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "_foreach_copy_",
    "_foreach_zero_",
}  # fmt: skip
"""Operators that write their first tensor and do not read it."""
_RESERVES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


_CPU_ATTENTION: dict[str, Callable[..., int]] = {  # the attention that torch's counter does not know
    "_scaled_dot_product_flash_attention_for_cpu": sdpa_flop_count,
    "_scaled_dot_product_flash_attention_for_cpu_backward": sdpa_backward_flop_count,
}


def kind_of_operator(function: Any) -> str:
    """Return "matmul", "attention", "convolution", or "memory" for all others, which take the time of their bytes."""
    name = function._opname
    if "attention" in name:
        return "attention"
    if "convolution" in name:
        return "convolution"
    return "matmul" if function._overloadpacket in flop_registry else "memory"


def count_flops(function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of a matrix product, convolution or attention; 0 for all else."""
    count = _CPU_ATTENTION.get(function._opname)
    if count is not None:
        tensors = [each.shape for each in args if isinstance(each, Tensor)]
        flops = int(count(*tensors[: 4 if count is sdpa_backward_flop_count else 3]))
    elif (counter := flop_registry.get(function._overloadpacket)) is not None:
        flops = int(counter(*args, **kwargs, out_val=result))
    else:
        return 0
    return flops // 2 if _is_causal(function, args, kwargs) else flops


def _is_causal(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    names = [each.name for each in function._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("is_causal", False))


def count_traced_flops(name: str, shapes: Sequence[Any], values: Sequence[str] | None) -> int:
    """Return the same for an operator in a trace.

    Args:
        name: As `aten::mm`.
        shapes: Of each argument; [] for what is no tensor.
        values: Of each argument as text; "" for a tensor. None where the trace has none.
    """
    function = _traced_operator(name)
    if function is None:
        return 0
    if "convolution" in name:
        return _count_convolution(shapes, values, backward="backward" in name)
    count = _CPU_ATTENTION.get(function._opname) or flop_registry[function._overloadpacket]
    needed = _TRACED.get(function._opname) or (4 if "backward" in name else 3)
    tensors = [shape for shape in shapes if isinstance(shape, list) and shape][:needed]
    if len(tensors) < needed:  # nested tensors have no shape
        return 0
    names = [each.name for each in function._schema.arguments]
    given = dict(zip(names, values or (), strict=False))
    return int(count(*tensors)) // (2 if given.get("is_causal") == "True" else 1)


_TRACED = {"mm": 2, "addmm": 3, "bmm": 2, "baddbmm": 3, "_scaled_mm": 2, "convolution": 2, "convolution_backward": 3}
"""The tensors of products whose operators in traces call no other one of them."""


@functools.cache
def _traced_operator(name: str) -> Any:
    """Return the operator that a trace names, if it counts; None for all others."""
    space, _, short = name.partition("::")
    attends = "dot_product" in short and short.startswith("_") and "math" not in short and "fused" not in short
    if space != "aten" or not (attends or short in _TRACED):
        return None
    packet = getattr(torch.ops.aten, short, None)
    return None if packet is None else packet.default


def _count_convolution(shapes: Sequence[Any], values: Sequence[str] | None, backward: bool) -> int:
    """Return the operations of a convolution; of its backward pass those for both gradients."""
    if backward:
        made, _, weight = shapes[:3]
        return int(2 * 2 * math.prod(weight) * made[0] * math.prod(made[2:]))
    (count, _, *sizes), weight = shapes[:2]
    stride, padding, dilation = (json.loads(text) for text in (values or [])[3:6])
    if (values or [])[6] == "True":  # transposed: each number of the input meets the whole weight
        return int(2 * math.prod(weight) * count * math.prod(sizes))
    made = [
        (size + 2 * pad - spread * (width - 1) - 1) // step + 1
        for size, pad, spread, width, step in zip(sizes, padding, dilation, weight[2:], stride, strict=True)
    ]
    return int(2 * math.prod(weight) * count * math.prod(made))


def count_bytes(function: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes; 0 for a view."""
    if function._opname in _RESERVES:
        return 0
    read, written = _split_arguments(function, args, kwargs)
    storages = {each.untyped_storage()._cdata for each in itertools.chain(read, written)}
    new = [each for each in made if each.untyped_storage()._cdata not in storages]
    if not new and not written:
        return 0
    if function._opname in _LOOKUPS:
        return 2 * sum(map(_touched_bytes, new)) + sum(map(_touched_bytes, read[1:]))
    return sum(map(_touched_bytes, itertools.chain(read, written, new)))


def _split_arguments(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and those of its arguments that it writes; most are in both."""
    arguments = function._schema.arguments
    given = {each.name: value for each, value in zip(arguments, args, strict=False)} | kwargs
    read, written = [], []
    for each in arguments:
        tensors = [value for value in tree_leaves(given.get(each.name)) if isinstance(value, Tensor)]
        if each.is_write:
            written += tensors
        if not each.is_out and not (each.is_write and function._opname in _OVERWRITES):
            read += tensors
    return read, written


def _touched_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, an expanded one counted once."""
    kept = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return torch.Size(kept).numel() * tensor.element_size()
