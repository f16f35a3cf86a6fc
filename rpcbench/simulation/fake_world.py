"""One process as one rank of a world that is not there: process groups that move nothing, tensors without data.

Guarantees
- In the block, `torch.distributed` has a default group of the given size, and every new tensor has a shape, a type and
  no bytes. A real tensor that the program made before becomes one at its first use.
- DistributedDataParallel, FSDP and DTensor run their own code. The parts of it that need data are
  replaced, and listed here: DDP's check that all ranks have equal parameters, and its future of an all-reduce; the
  arithmetic of a mesh and the order of DDP's buckets, which are computed with data; the copy of a tensor by
  `copy.deepcopy`, and the change of a module's device or type.
- A DataLoader loads its data: samplers and data sets read values, and the program gets the batch without them.
- Operators by which DTensor finds a result's shape are not seen: they are no work of a rank.
- A program that reads a value gets a SimulationError that names the line and the way to give the value.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import _redistribute, debug
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from rpcbench.base.errors import SimulationError
from rpcbench.distributed.call_sites import calling_site
from rpcbench.runtime import current
from rpcbench.runtime.handles import is_user_file
from rpcbench.simulation.fake_cuda import play_cuda_on_cpu
from rpcbench.simulation.fake_groups import make_groups_fake
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.patches import replace_attribute, run_with_data

_OF_THE_CPU = r"DTensor (random|manual_seed)|torch\.cuda\.amp\.GradScaler is enabled|'pin_memory' argument"
"""Warnings that a real run on GPUs does not have."""
_OF_GPUS = "_cuda"  # names of torch._C that begin so are absent without CUDA


class RankPlace(NamedTuple):
    """The place of a rank in its world."""

    rank: int
    size: int
    hardware: Hardware  # of which the program sees the name, the memory and the ranks of a host

    @property
    def ranks_per_host(self) -> int:
        return self.hardware.ranks_per_host

    @property
    def local_rank(self) -> int:
        return self.rank % self.ranks_per_host

    @property
    def local_size(self) -> int:
        return min(self.size, self.ranks_per_host)

    def torchrun_variables(self) -> dict[str, str]:
        """Return the environment variables that torchrun sets on this rank."""
        host = self.rank // self.ranks_per_host
        numbers = {
            "RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank, "GROUP_RANK": host,
            "LOCAL_WORLD_SIZE": self.local_size, "ROLE_RANK": self.rank, "ROLE_WORLD_SIZE": self.size,
            "GROUP_WORLD_SIZE": -(-self.size // self.ranks_per_host), "MASTER_PORT": 29500,
            "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
        }  # fmt: skip
        texts = {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "simulation", "ROLE_NAME": "default"}
        return texts | {name: str(number) for name, number in numbers.items()}


@contextlib.contextmanager
def fake_world(
    place: RankPlace, bucket_found: Callable[[Tensor], None], has_group: bool = True
) -> Iterator[FakeTensorMode]:
    """Be a rank of a world within the block. SimulationError where this process has a process group already.

    Args:
        place: Of the rank.
        bucket_found: Called with each bucket of gradients that DistributedDataParallel sends.
        has_group: Whether there is a default group; False: the program makes it.
    """
    if c10d.is_initialized():
        raise SimulationError("this process has a process group already, so it cannot play a rank of another world")
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(make_groups_fake(place.rank, place.size))
            if has_group:
                c10d.init_process_group()
            stack.enter_context(replace_attribute(current, "current_agent", _refuse_agent(current.current_agent)))
            stack.enter_context(play_cuda_on_cpu(place.local_rank, place.local_size, place.hardware))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", _OF_THE_CPU)
            stack.enter_context(_compute_meshes_with_data())
            stack.enter_context(_propagate_shapes_unseen())
            stack.enter_context(_make_ddp_without_data(bucket_found))
            stack.enter_context(_take_stages_as_given())
            for loader, name in ((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")):
                stack.enter_context(replace_attribute(loader, name, run_with_data(vars(loader)[name])))
            stack.enter_context(replace_attribute(FakeTensor, "__deepcopy__", _copy_tensor))
            stack.enter_context(replace_attribute(FakeTensor, "__format__", _format_tensor))
            swap = _swap_with_weak_references(torch.utils.swap_tensors)
            stack.enter_context(replace_attribute(torch.utils, "swap_tensors", swap))
            mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(explain_errors())
            yield mode
    finally:
        if c10d.is_initialized():
            c10d.destroy_process_group()
        _forget_meshes()


def _refuse_agent(find: Callable[[], Any]) -> Callable[[], Any]:
    """Return `current_agent`, which refuses the program, and not the other threads of its worker."""
    program = threading.get_ident()

    def current_agent() -> Any:
        if threading.get_ident() != program:
            return find()
        raise SimulationError(
            f"{calling_site()} speaks to workers, as RPC and pipelines of rpcbench do, and a simulated rank has none: "
            "use torch.distributed, for a pipeline torch.distributed.pipelining, of which each stage is a role"
        )

    return current_agent


def _forget_meshes() -> None:
    """Empty the caches of DTensor: they hold meshes, and equal meshes of the next world have groups of other names."""
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


@contextlib.contextmanager
def _compute_meshes_with_data() -> Iterator[None]:
    """Let meshes compute their ranks, which are data, outside of the fake mode."""
    with contextlib.ExitStack() as stack:
        for name in ("__init__", "__getitem__", "_concatenate", "_unflatten", "_flatten"):
            stack.enter_context(replace_attribute(DeviceMesh, name, run_with_data(vars(DeviceMesh)[name])))
        yield


@contextlib.contextmanager
def _propagate_shapes_unseen() -> Iterator[None]:
    """Let DTensor make its whole tensors without data in a mode of its own."""
    propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_unseen(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, schema)

    with replace_attribute(ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen):
        yield


@contextlib.contextmanager
def _make_ddp_without_data(bucket_found: Callable[[Tensor], None]) -> Iterator[None]:
    """Let DistributedDataParallel neither compare nor send parameters when it is made, and reduce by a hook."""
    make: Any = DistributedDataParallel.__init__
    signature = inspect.signature(make)
    prepare: Any = DistributedDataParallel._pre_forward
    register: Any = DistributedDataParallel.register_comm_hook
    with_hook: weakref.WeakSet[Any] = weakref.WeakSet()

    def register_once(self: Any, *args: Any, **options: Any) -> None:
        with_hook.add(self)
        register(self, *args, **options)

    def make_without_data(self: Any, *args: Any, **options: Any) -> None:
        given = signature.bind(self, *args, **options)
        given.arguments.update(init_sync=False, device_ids=None, output_device=None)
        make(*given.args, **given.kwargs)

    def prepare_with_hook(self: Any, *args: Any, **options: Any) -> Any:
        if self not in with_hook:
            # a lambda: torch compares the annotations of a hook with its own classes
            self.register_comm_hook(
                self.process_group, lambda group, bucket: _reduce_bucket(group, bucket, bucket_found)
            )
        with _IndicesWithData():  # type: ignore[no-untyped-call]
            self.reducer._rebuild_buckets()
        return prepare(self, *args, **options)

    with (
        replace_attribute(DistributedDataParallel, "__init__", make_without_data),
        replace_attribute(DistributedDataParallel, "_pre_forward", prepare_with_hook),
        replace_attribute(DistributedDataParallel, "register_comm_hook", register_once),
    ):
        yield


def _copy_tensor(tensor: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Copy a tensor, as `copy.deepcopy` does for models, within its mode: torch would copy the mode, too."""
    if id(tensor) not in memo:
        made = memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        made.grad = copy.deepcopy(tensor.grad, memo)
        own = {name: value for name, value in vars(tensor).items() if name not in vars(made)}  # whether a parameter
        vars(made).update(copy.deepcopy(own, memo))
    copied: Tensor = memo[id(tensor)]
    return copied


def _format_tensor(tensor: FakeTensor, specification: str) -> str:
    """Format a tensor as torch does for those with data: a tensor without dimensions as its value."""
    return format(tensor.item() if tensor.dim() == 0 else str(tensor), specification)


def _swap_with_weak_references(swap: Any) -> Any:
    """Return the swap by which modules change device or type, which torch refuses for tensors with weak references."""

    def swap_tensors(first: Tensor, second: Tensor) -> None:
        if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
            swap(first, second)
            return
        torch._C._swap_tensor_impl(first, second)
        first.fake_device, second.fake_device = second.fake_device, first.fake_device

    return swap_tensors


class _IndicesWithData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives data to tensors of indices, to which DDP writes the order of its buckets; the buckets have none."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        if kwargs.get("dtype") == torch.int32 or (given and all(each.dtype == torch.int32 for each in given)):
            with _disable_current_modes():
                return function(*args, **kwargs)
        return function(*args, **kwargs)


def _reduce_bucket(
    group: c10d.ProcessGroup, bucket: GradBucket, bucket_found: Callable[[Tensor], None]
) -> torch.futures.Future[Tensor]:
    """Reduce a bucket as DDP's own code does: divided first, then summed."""
    buffer = bucket.buffer()
    bucket_found(buffer)
    buffer.div_(c10d.get_world_size(group))
    work = c10d.all_reduce(buffer, group=group, async_op=True)
    Variable._execution_engine.queue_callback(work.wait)  # at the end of the backward pass, as DDP waits
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


@contextlib.contextmanager
def _take_stages_as_given() -> Iterator[None]:
    """Let stages of torch.distributed.pipelining use the shapes that they were made with: their neighbours, which
    would vote on that and send theirs, are not there."""

    def set_mode(schedule: Any, stages: list[Any], has_backward: bool, *done: Any) -> None:
        for stage in stages:
            if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
                is_complete = stage._user_meta.is_complete_for_forward()  # then it is DTensors that need more
                names = "input_grads=..., output_grads=..." if is_complete else "input_args=..., output_args=..."
                raise SimulationError(
                    f"{calling_site()}: stage {stage.stage_index} would get its shapes from the stages beside it, "
                    f"which are not there: make it by PipelineStage(..., {names}), tensors of one micro-batch"
                )
            stage._inference_mode = InferenceMode.STATIC

    with replace_attribute(schedules._PipelineSchedule, "_warmup_p2p", set_mode):
        yield


@contextlib.contextmanager
def explain_errors() -> Iterator[None]:
    """Turn the errors of fake tensors into sentences."""
    try:
        yield
    except DataDependentOutputException as error:
        raise SimulationError(
            f"{_place_of(error)} reads the value of a tensor ({error.func}), and a simulated rank has none: give it by "
            "rpcbench.simulated_value(tensor, value), which is the value here and the tensor's own in a real run; "
            "`rpcbench simulate script.py --values 1.0` gives all"
        ) from error
    except DynamicOutputShapeException as error:
        raise SimulationError(
            f"{_place_of(error)}: the shape of the result of {error.func} depends on the values of a tensor, and a "
            "simulated rank has none: give the operator fixed sizes (a capacity of each expert, a mask, torch.where)"
        ) from error
    except UnsupportedOperatorException as error:
        raise SimulationError(
            f"{_place_of(error)}: {error.func} has no implementation without data: register one by "
            "torch.library.register_fake"
        ) from error
    except AttributeError as error:
        if error.obj is not torch._C or not str(error.name).startswith(_OF_GPUS):
            raise
        name = traceback.extract_tb(error.__traceback__)[-1].name
        raise SimulationError(
            f"{_place_of(error)} calls {name}, which needs CUDA, and this torch has none: leave it out of the program"
        ) from error


def _place_of(error: BaseException) -> str:
    """Return the innermost line of the program."""
    lines = [each for each in traceback.extract_tb(error.__traceback__) if is_user_file(each.filename)]
    return f"{lines[-1].filename}, line {lines[-1].lineno}" if lines else "the program"


def simulated_value(tensor: Tensor, value: float) -> float:
    """Return the value of a tensor with one element: `value` on a simulated rank, which has no data, else the tensor's.

    For control flow and logs that read a loss or a count: `if rpcbench.simulated_value(norm, 1.0) > 5: …`.

    Args:
        tensor: One element.
        value: The simulation goes on with it.
    """
    return float(value) if is_simulated() else float(tensor.item())


def is_simulated() -> bool:
    """Return whether this process plays a rank of `rpcbench.simulate`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
