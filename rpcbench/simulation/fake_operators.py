"""Operators of a simulated rank that differ from torch's own without data: counts of tokens, and waits.

Guarantees
- `bincount` with a `minlength`, and `histc`, count evenly: as many of each as of any other. A remark names the place.
  So the counts of experts may be read, sent to other ranks, and split a tensor.
- Small tensors have values if these follow from such counts, or from numbers of the program. A collective gives
  them the values that it would if all ranks had the same; where that is not known, they have none.
- A value that is not known is an error when it is read, or `values`, where that is given; the report says so.
- `torch.compile` leaves a function as it is, and no checkpoint is written. The report says so.
- A wait returns the tensor that was waited for, as on a real rank, and not another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import checkpoint, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from rpcbench.distributed.call_sites import calling_site
from rpcbench.distributed.torch_ops import TORCH_OPS
from rpcbench.simulation.patches import replace_attribute, replace_attributes

_MOST_KNOWN = 2**16  # elements of a tensor whose values are kept
_WITHOUT_VALUES = {"empty_like", "new_empty", "new_empty_strided"}
_EXCHANGES = {  # operator → where its result is, if it is an argument, and its input
    "alltoall_base_": (0, 1), "all_to_all_single": (None, 0),
    "_allgather_base_": (0, 1), "all_gather_into_tensor": (None, 0),
}  # fmt: skip
_TOGETHER = {  # operator of several tensors → that of one, which has a form without data
    "allgather_into_tensor_coalesced_": torch.ops.c10d._allgather_base_.default,
    "reduce_scatter_tensor_coalesced_": torch.ops.c10d._reduce_scatter_base_.default,
}
_SAVES: dict[Any, tuple[str, ...]] = {torch: ("save",), checkpoint: ("save", "async_save")}
_GATHERS = {"_allgather_base_", "all_gather_into_tensor"}


class FakeOperators(TorchDispatchMode):
    """Runs these operators; enter it within `fake_world`. `values`: of a tensor whose value is read and not known."""

    def __init__(self, values: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.remarks: list[str] = []
        self._values = values
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> FakeOperators:
        self._exits.enter_context(replace_attribute(fake_tensor, "CONSTANT_NUMEL_LIMIT", _MOST_KNOWN))
        self._exits.enter_context(replace_attribute(torch, "compile", self._leave_uncompiled))
        for module, names in _SAVES.items():
            self._exits.enter_context(replace_attributes(module, dict.fromkeys(names, self._leave_unsaved)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exits.close()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function._opname
        if name == "wait_tensor":
            return args[0]
        if name == "_local_scalar_dense" and self._values is not None and _values_of(args[0]) is None:
            return self._assume_value(args[0], self._values)
        if name in ("bincount", "histc") and (bins := _bins_of(name, args, kwargs)):
            return self._count_evenly(args[0], bins)
        if name == "repeat_interleave" and (repeats := _values_of(args[0])) is not None:
            with _disable_current_modes():
                kwargs = {**kwargs, "output_size": int(repeats.sum())}
        if function.namespace in ("c10d", "_c10d_functional"):
            return _exchange(function, args, kwargs)
        result = function(*args, **kwargs)
        if name in _WITHOUT_VALUES:
            _set_values(result, None)
        return result

    def _add_remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    def _leave_uncompiled(self, model: Any = None, **options: Any) -> Any:
        self._add_remark("torch.compile is not simulated: what it compiles runs as it was written")
        return (lambda function: function) if model is None else model

    def _leave_unsaved(self, *args: Any, **options: Any) -> None:
        self._add_remark(f"{calling_site()}: no checkpoint is written")

    def _assume_value(self, tensor: Tensor, value: float) -> float:
        """Return the value that the program reads: of a comparison, False."""
        if tensor.dtype == torch.bool:
            value = False
        self._add_remark(f"{calling_site()}: values that are read here are assumed to be {value}")
        return value if tensor.is_floating_point() or tensor.dtype == torch.bool else int(value)

    def _count_evenly(self, counted: Tensor, bins: int) -> Tensor:
        self._add_remark(f"{calling_site()}: counts are assumed to be even, as many of each of {bins}")
        counts: Tensor = torch.ops.aten.new_empty.default(
            counted, [bins], dtype=None if counted.is_floating_point() else torch.int64
        )
        with _disable_current_modes():
            number = torch.arange(bins)
            _set_values(counts, (counted.numel() // bins + (number < counted.numel() % bins)).to(counts.dtype))
        return counts


def _bins_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return the number of counts, if each is of ones; 0 if it is not known."""
    if name == "histc":
        return int(args[1] if len(args) > 1 else kwargs.get("bins", 100))
    if (len(args) > 1 and args[1] is not None) or kwargs.get("weights") is not None:
        return 0
    return int(args[2] if len(args) > 2 else kwargs.get("minlength", 0))


def _values_of(tensor: Any) -> Tensor | None:
    """Return the values of a tensor, if they are known."""
    return tensor.constant if isinstance(tensor, FakeTensor) else None


def _set_values(tensor: Any, values: Tensor | None) -> None:
    if not isinstance(tensor, FakeTensor):
        return
    tensor.constant = values
    if values is not None:
        tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)


def _exchange(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a collective, and give its result the values that follow from those of its input."""
    if function._opname == "allreduce_coalesced_":
        tensors, group, reduce_op, *others = args
        return torch.ops.c10d.allreduce_.default(tensors, group, reduce_op, None, *others, **kwargs)[1]
    if (single := _TOGETHER.get(function._opname)) is not None:
        outputs, inputs, boxed, *others = args
        group = c10d.ProcessGroup.unbox(boxed)  # boxed anew for each, as torch compares no boxes
        made = [single(*pair, group.boxed(), *others, **kwargs) for pair in zip(outputs, inputs, strict=True)]
        return made[-1][1]
    place, source = _EXCHANGES.get(function._opname, (None, 0))
    given = _values_of(args[source]) if function._opname in _EXCHANGES else None
    for tensor in tree_leaves((args, kwargs)):
        if _values_of(tensor) is not None and (given is None or tensor is not args[source]):
            tensor.fake_mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)
    if given is None:
        return function(*args, **kwargs)
    _set_values(args[source], None)  # or torch would run the operator on the values
    result = function(*args, **kwargs)
    _set_values(args[source], given)
    made = result if place is None else args[place]
    with _disable_current_modes():
        _set_values(made, _values_from_equals(function, args, given, made.shape))
    return result


def _values_from_equals(function: Any, args: Sequence[Any], given: Tensor, shape: torch.Size) -> Tensor | None:
    """Return the result of a rank if all ranks give the same; None for parts of sizes that the program gives."""
    group = group_of_call(function, args)
    if function._opname in _GATHERS:
        return torch.cat([given] * group.size()).view(shape)
    if any(each for each in args if isinstance(each, list)):
        return None
    return given.chunk(group.size())[group.rank()].repeat(group.size(), *[1] * (given.dim() - 1))


def group_of_call(function: Any, args: Sequence[Any]) -> c10d.ProcessGroup:
    """Return the group of a call of a collective's operator."""
    if function.namespace == "c10d":
        return c10d.ProcessGroup.unbox(args[TORCH_OPS[function._opname].group])
    names = [each for each in args if isinstance(each, str)]
    return next(group for group in distributed_c10d._world.pg_map if group.group_name in names)
