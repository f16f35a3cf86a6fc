"""The costs of an operator in counts: floating-point operations, and bytes that it reads and writes.

Guarantees
- A matrix product, convolution or attention has the operations of torch's own counter (`torch.utils.flop_counter`);
  a causal attention has half of them.
- A view, and memory that is only reserved, cost nothing.
"""

from __future__ import annotations

import itertools
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
