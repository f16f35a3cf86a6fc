"""CUDA on a simulated rank: a program for GPUs runs unchanged on tensors of the CPU without data.

Guarantees
- Within the block the device "cuda" is "cpu", in each argument of torch's functions and in a mesh. No GPU is used,
  also where there is one.
- The program is told that there are GPUs; torch itself is not. Streams and events of `torch.cuda` are those of
  `torch.cpu`, which `RankRecorder` records.
- `torch.autocast("cuda")` computes in float32 what it does on a GPU; the list is that of torch's documentation.
- A call of `torch.cuda` that needs a GPU raises SimulationError, with the name of the call and its line.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.cuda
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from rpcbench.base.errors import SimulationError
from rpcbench.distributed.call_sites import calling_site
from rpcbench.runtime.handles import is_user_file
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.patches import replace_attribute, replace_attributes

_CUDA = re.compile(r"cuda(:\d+)?")
_CPU = "cpu"
_IN_FLOAT32 = {  # functions that autocast computes in float32 on CUDA
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "binary_cross_entropy_with_logits", "cosh",
    "cosine_embedding_loss", "cdist", "cosine_similarity", "cross_entropy", "cumprod", "cumsum", "dist", "erfinv",
    "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10",
    "log_softmax", "log1p", "log2", "margin_ranking_loss", "mse_loss", "multilabel_margin_loss",
    "multi_margin_loss", "nll_loss", "norm", "normalize", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal",
    "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softmin", "softplus", "sum", "renorm", "tan",
    "triplet_margin_loss",
}  # fmt: skip
_SAME_TENSOR = {"cuda", "pin_memory"}  # methods that return the tensor itself where it is on the device
_WITHOUT_EFFECT = (
    "set_device", "empty_cache", "ipc_collect", "init", "manual_seed", "manual_seed_all", "seed_all",
    "set_per_process_memory_fraction", "reset_accumulated_memory_stats",
)  # fmt: skip
_MARKS = ("mark", "range_push", "range_pop", "range_start", "range_end")  # of torch.cuda.nvtx


class GpuProperties(NamedTuple):
    """The GPU as a program sees it: the name and the bytes of memory of the hardware."""

    name: str
    total_memory: int


class CudaAsCpu(TorchFunctionMode):
    """Gives torch's functions the device "cpu" where the program names "cuda"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _SAME_TENSOR and function is getattr(Tensor, name):
            return args[0]
        if function is Tensor.to and isinstance(args[1], int):
            args = (args[0], _CPU, *args[2:])
        args = [_map_device(each) for each in args]
        if function is torch.device and args[0] == _CPU:
            args = [_CPU]  # no number
        kwargs = {key: _map_device(value) for key, value in (kwargs or {}).items()}
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _CPU
        if name in _IN_FLOAT32 and torch.is_autocast_enabled("cuda"):
            args = [_widen_tensor(each) for each in args]
        return function(*args, **kwargs)


def _map_device(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device(_CPU)
    return _CPU if isinstance(value, str) and _CUDA.fullmatch(value) else value


def _widen_tensor(value: Any) -> Any:
    is_reduced = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_reduced else value


@contextlib.contextmanager
def play_cuda_on_cpu(local_rank: int, local_size: int, hardware: Hardware) -> Iterator[None]:
    """Let programs use "cuda" within the block, as the rank `local_rank` of `local_size` on its host."""
    changed = {
        "get_device_properties": lambda device=None: GpuProperties(hardware.name, int(hardware.memory_bytes)),
        "current_device": lambda: local_rank,
        "device_count": lambda: local_size,
        "is_available": _is_available_to_caller(torch.cuda.is_available),
        "is_bf16_supported": lambda including_emulation=True: True,
        **dict.fromkeys(_WITHOUT_EFFECT, _do_nothing),
    }
    with contextlib.ExitStack() as stack:
        nccl = {name: _refuse_nccl(name) for name in torch.cuda.nccl.__all__}
        stack.enter_context(replace_attributes(torch.cuda, changed))
        stack.enter_context(replace_attributes(torch.cuda.nvtx, dict.fromkeys(_MARKS, _do_nothing)))
        stack.enter_context(replace_attributes(torch.cuda.nccl, nccl))
        for module in [each for name, each in sys.modules.items() if name.startswith("torch.cuda")]:
            if "_lazy_init" in vars(module):
                stack.enter_context(replace_attribute(module, "_lazy_init", _refuse_call))
        stack.enter_context(replace_attribute(torch.cuda.amp.common, "amp_definitely_not_available", lambda: True))
        stack.enter_context(_autocast_as_cuda())
        stack.enter_context(replace_attribute(Tensor, "record_stream", _do_nothing))
        stack.enter_context(replace_attribute(Module, "to", _convert_to_cpu(Module.to)))
        stack.enter_context(replace_attribute(DeviceMesh, "__init__", _make_mesh_of_cpu(DeviceMesh.__init__)))
        stack.enter_context(CudaAsCpu())
        yield


def _is_available_to_caller(own: Any) -> Any:
    def is_available() -> bool:
        return is_user_file(sys._getframe(1).f_code.co_filename) or own()

    return is_available


def _do_nothing(*args: Any, **options: Any) -> None:
    """Stand in place of a function that changes no tensor."""


def _refuse_call() -> None:
    """Raise an error with the function of torch.cuda that would start CUDA."""
    raise SimulationError(
        f"{calling_site()} calls torch.cuda.{sys._getframe(1).f_code.co_name}, which needs a GPU, and a simulated rank "
        "has none: leave the call out of the simulated program"
    )


def _refuse_nccl(name: str) -> Any:
    def refuse(*args: Any, **options: Any) -> None:
        raise SimulationError(
            f"{calling_site()} calls torch.cuda.nccl.{name}, which a simulated rank does not have: use the collectives "
            "of torch.distributed"
        )

    return refuse


def _convert_to_cpu(convert: Any) -> Any:
    def to(self: Module, *args: Any, **options: Any) -> Module:
        if args and isinstance(args[0], int):
            args = (_CPU, *args[1:])
        converted: Module = convert(self, *args, **options)
        return converted

    return to


def _make_mesh_of_cpu(make: Any) -> Any:
    def make_of_cpu(self: DeviceMesh, device_type: str, *args: Any, **options: Any) -> None:
        make(self, _map_device(device_type), *args, **options)

    return make_of_cpu


@contextlib.contextmanager
def _autocast_as_cuda() -> Iterator[None]:
    """Let `autocast("cuda")` work on the CPU's tensors; torch's state says besides that it is one for CUDA."""
    make: Any = torch.autocast.__init__
    enter: Any = torch.autocast.__enter__
    leave: Any = torch.autocast.__exit__

    def make_for_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        self.is_for_cuda = device_type == "cuda"
        if self.is_for_cuda and dtype is None:
            dtype = torch.get_autocast_dtype("cuda")
        make(self, _map_device(device_type), dtype, *args, **options)

    def enter_both(self: Any) -> Any:
        self.was_for_cuda = torch.is_autocast_enabled("cuda")
        if self.is_for_cuda:
            torch.set_autocast_enabled("cuda", self._enabled)
        return enter(self)

    def leave_both(self: Any, *error: Any) -> Any:
        torch.set_autocast_enabled("cuda", self.was_for_cuda)
        return leave(self, *error)

    changed = {"__init__": make_for_cpu, "__enter__": enter_both, "__exit__": leave_both}
    with replace_attributes(torch.autocast, changed):
        yield
