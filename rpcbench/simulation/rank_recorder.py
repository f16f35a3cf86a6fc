"""Records the actions of a played rank: operators, collectives, waits of streams, memory.

Guarantees
- The program computes the same shapes as without a recorder; no operator runs twice.
- A view of a tensor is no kernel. An operator that torch makes of others is recorded as those.
- No model lives longer than in its program.
- Collectives have the words of the rows of real runs (`distributed.torch_ops`).
"""

# Theory of operation
#
#     program ──► operators ──► RankRecorder.__torch_dispatch__ ──► FakeTensorMode: shapes alone
#        │                         │ Kernel, Collective, WaitForCollective; storages
#        │  torch.cpu's streams ──►│ RecordEvent, WaitForEvent       (FSDP issues its gathers ahead on streams)
#        │  Work.wait ────────────►│ WaitForCollective
#        └─ modules' hooks ───────►│ the part of the model
#
# The program runs on the CPU, where torch has classes for streams and events that do nothing. Those that record stand
# in their place: so the order of FSDP's gathers, reductions and waits is FSDP's own.

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.cpu
import torch.cuda
import torch.distributed as c10d
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed import distributed_c10d
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rpcbench.base.errors import SimulationError
from rpcbench.distributed.call_sites import calling_site
from rpcbench.distributed.parameter_shards import local_tensor
from rpcbench.distributed.torch_ops import (
    BARRIERS,
    TORCH_OPS,
    TRANSFERS,
    Layouts,
    OpLabel,
    flatten_tensors,
    group_label,
)
from rpcbench.runtime.handles import tensor_bytes
from rpcbench.simulation.fake_operators import group_of_call
from rpcbench.simulation.memory import MemoryBook
from rpcbench.simulation.model_pieces import PieceBook
from rpcbench.simulation.module_paths import ModuleWatch
from rpcbench.simulation.operator_counts import count_bytes, count_flops, kind_of_operator
from rpcbench.simulation.patches import replace_attribute, replace_attributes
from rpcbench.simulation.rank_log import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTE,
    STATES,
    Action,
    BeginOperation,
    Collective,
    EndOperation,
    Kernel,
    ModelPart,
    RankLog,
    RecordEvent,
    Synchronize,
    WaitForCollective,
    WaitForEvent,
)

_FUNCTIONAL = {  # operator of torch.ops._c10d_functional → that of c10d which it runs, and where its reduction stands
    "all_reduce": ("allreduce_", 1), "all_reduce_": ("allreduce_", 1), "all_reduce_coalesced": ("allreduce_", 1),
    "all_reduce_coalesced_": ("allreduce_", 1), "broadcast": ("broadcast_", None), "broadcast_": ("broadcast_", None),
    "all_gather_into_tensor": ("_allgather_base_", None), "all_gather_into_tensor_out": ("_allgather_base_", None),
    "all_gather_into_tensor_coalesced": ("_allgather_base_", None),
    "reduce_scatter_tensor": ("_reduce_scatter_base_", 1), "reduce_scatter_tensor_out": ("_reduce_scatter_base_", 1),
    "reduce_scatter_tensor_coalesced": ("_reduce_scatter_base_", 1), "all_to_all_single": ("alltoall_base_", None),
    "shard_dim_alltoall": ("alltoall_base_", None),
}  # fmt: skip
_SKIPPED = {"prim", "profiler", "prims_meta"}
_OPERATIONS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
"""Methods of a pipeline's stage, and the kinds of their operations; a backward without weights is "I"."""


class RankRecorder(TorchDispatchMode):
    """Records the steps of one rank; enter it within `fake_world`."""

    def __init__(self, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = RankLog(rank)
        self._memory = MemoryBook(self.current_stream)
        self._modules = ModuleWatch(self._model_found)
        self._models = weakref.WeakKeyDictionary[nn.Module, dict[int, int]]()  # id of a parameter → its elements
        self._pieces = PieceBook()
        self._in_optimizer = self._in_backward = False
        self._streams: dict[int, int] = {}  # id of a stream → its number; the stream is kept
        self._kept_streams: list[Any] = []
        self._events, self._collectives = 0, 0
        self._held: dict[int, list[Tensor]] = {}  # number of a collective → its tensors, which it keeps until a wait
        self._pending: dict[torch.UntypedStorage, int] = {}  # result of a functional collective → its number
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> RankRecorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        for opened in (
            self._modules,
            _record_streams(self),
            _answer_for_memory(self._memory),
            replace_attribute(FakeWork, "wait", lambda work, timeout=None: self._wait_for_work(work)),
            replace_attribute(FakeWork, "synchronize", lambda work: self._wait_for_work(work)),
            replace_attribute(torch.UntypedStorage, "resize_", _resize_and_count(self._memory)),
        ):
            self._exits.enter_context(opened)
        for name in _OPERATIONS:
            self._exits.enter_context(replace_attribute(_PipelineStageBase, name, _mark_operation(self, name)))
        self._exits.callback(register_optimizer_step_pre_hook(self._before_optimizer).remove)
        self._exits.callback(register_optimizer_step_post_hook(self._after_optimizer).remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exits.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    # -- steps
    def begin_step(self) -> None:
        """Forget the actions until now."""
        self.log.actions.clear()
        self._memory.begin_step()
        self._modules.called.clear()
        self._in_backward = False

    def end_step(self) -> RankLog:
        """Return the log of the step."""
        self._held.clear()  # those of collectives that nothing waits for
        self._mark_gradients(each for model in self._models for each in model.parameters())
        self._memory.write_step(self.log)
        counts: dict[int, int] = {}
        for own in self._models.values():
            counts |= own
        self.log.parameters = sum(counts.values())
        self.log.models = self._pieces.read_step(self._modules.called)
        return self.log

    def add_action(self, action: Action) -> None:
        """Record the next action of the program."""
        self.log.actions.append(action)

    # -- operators
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor, or another that consists of tensors: it makes operators of its own
        part = self._current_part()
        self._memory.set_position(len(self.log.actions), part)
        result = function(*args, **kwargs)
        if function.namespace in _SKIPPED:
            return result
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if function._opname == "_local_scalar_dense" and args[0].constant is None:
            self.add_action(Synchronize())  # a value that a GPU has computed
        elif function.namespace == "c10d":
            self._record_c10d(function, args, result, part)
        elif function._opname == "wait_tensor":
            self._wait_for_tensor(args[0])
        elif function.namespace in ("_c10d_functional", "_dtensor", "_c10d_functional_autograd"):
            self._record_functional(function, args, made, part)
        else:
            self._record_kernel(function, args, kwargs, result, given, made, part)
        self._memory.add_tensors(made, part.phase in (FORWARD, RECOMPUTE))
        if function._opname == "chunk_cat":  # FSDP puts whole gradients together, to reduce them
            self._memory.mark_tensors(given, GRADIENTS)
        elif function.namespace == "fsdp":
            self._memory.mark_tensors(made + flatten_tensors(kwargs.get("out", [])), GATHERED)
        return result

    def _current_part(self) -> ModelPart:
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and not self._in_backward:
            self._memory.begin_backward()
            self._modules.begin_backward()
        self._in_backward = in_backward
        phase = OPTIMIZER if self._in_optimizer else BACKWARD if in_backward else FORWARD
        if in_backward and self._modules.is_in_forward:
            phase = RECOMPUTE
        return ModelPart("" if self._in_optimizer else self._modules.current_path(), phase)

    def _record_kernel(
        self, function: Any, args: Any, kwargs: Any, result: Any, given: Sequence[Tensor], made: Sequence[Tensor],
        part: ModelPart,
    ) -> None:  # fmt: skip
        size = count_bytes(function, args, kwargs, made)
        if size == 0:
            return
        dtype = str((given or made)[0].dtype).removeprefix("torch.")
        flops = count_flops(function, args, kwargs, result)
        self.add_action(
            Kernel(self.current_stream(), function._opname, kind_of_operator(function), dtype, flops, size, part)
        )

    # -- collectives
    def _record_c10d(self, function: Any, args: Any, result: Any, part: ModelPart) -> None:
        name = function._opname
        if name not in TORCH_OPS:
            return
        op = TORCH_OPS[name]
        group = group_of_call(function, args)
        if name == "recv_any_source_":
            raise SimulationError(
                f"{calling_site()} receives from any rank, and a simulated rank cannot tell which will send: name it"
            )
        peer = root = None
        if op.root is not None:
            rank = c10d.get_global_rank(group, args[op.root])
            peer, root = (rank, None) if name in TRANSFERS else (None, rank)
        label: object = OpLabel(op, None if op.reduce_op is None else args[op.reduce_op], root)
        if peer is not None:
            label = "send"  # of both ends, as they have one row in a real run
        is_blocking = any(arg is False for arg in args)  # of the operators, only `async_op` is of this type
        tensors = [] if name in BARRIERS else flatten_tensors(args[op.tensors])
        number = self._add_collective(op.name, str(label), group, peer, tensors, is_blocking, part)
        work: Any = FakeWork.unbox(result[-1] if isinstance(result, tuple) else result)
        work.seq_id = number
        if not is_blocking:
            self._held[number] = tensors

    def _record_functional(self, function: Any, args: Any, made: Sequence[Tensor], part: ModelPart) -> None:
        if function._opname not in _FUNCTIONAL:
            return
        name, place = _FUNCTIONAL[function._opname]
        group = group_of_call(function, args)
        op = TORCH_OPS[name]
        argument = "" if place is None else f"({args[place].upper()})"
        if op.name == "broadcast":
            argument = f"(src={c10d.get_global_rank(group, args[1])})"
        number = self._add_collective(op.name, op.name + argument, group, None, flatten_tensors(args[0]), False, part)
        for tensor in made:
            self._pending[tensor.untyped_storage()] = number

    def _add_collective(
        self, kind: str, op: str, group: c10d.ProcessGroup, peer: int | None, tensors: Sequence[Tensor],
        is_blocking: bool, part: ModelPart,
    ) -> int:  # fmt: skip
        self._collectives += 1
        label = group_label(group, group is distributed_c10d._get_default_group())
        shape = str(Layouts((each.dtype, each.shape) for each in tensors))
        self.add_action(
            Collective(
                self.current_stream(), self._collectives, op, kind, label, tuple(c10d.get_process_group_ranks(group)),
                peer, sum(map(tensor_bytes, tensors)), shape, str(calling_site()), is_blocking, part,
            )
        )  # fmt: skip
        return self._collectives

    def _wait_for_tensor(self, tensor: Tensor) -> None:
        if (number := self._pending.pop(tensor.untyped_storage(), None)) is not None:
            self.add_action(WaitForCollective(self.current_stream(), number))

    def _wait_for_work(self, work: Any) -> bool:
        self._held.pop(work.seq_id, None)
        self.add_action(WaitForCollective(self.current_stream(), work.seq_id))
        return True

    # -- streams
    def current_stream(self) -> int:
        """Return the number of the current stream."""
        return self.number_stream(torch.cpu.current_stream())

    def number_stream(self, stream: Any) -> int:
        """Return the number of a stream; the default stream is `COMPUTE`."""
        if id(stream) not in self._streams:
            default = stream is torch.cpu._default_cpu_stream
            self._streams[id(stream)] = COMPUTE if default else len(self._kept_streams) + 1
            self._kept_streams += [] if default else [stream]
        return self._streams[id(stream)]

    def new_event(self) -> int:
        """Return the number of an event that is recorded now."""
        self._events += 1
        return self._events

    # -- the model and its optimizer
    def mark_gradients(self, tensor: Tensor) -> None:
        """Count a tensor as gradients, as a bucket of DistributedDataParallel is."""
        self._memory.mark_tensors([tensor], GRADIENTS)

    def begin_operation(self, stage: Any, kind: str, microbatch: int) -> None:
        """Record that a stage of a pipeline begins an operation; `add_action(EndOperation())` ends it."""
        self._pieces.set_stage(stage.submod, stage.stage_index)
        self.add_action(BeginOperation(stage.stage_index, stage.num_stages, kind, microbatch))

    def _model_found(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        self._models[model] = {id(tensor): local_tensor(tensor).numel() for tensor in tensors}
        self._memory.mark_tensors(map(local_tensor, tensors), PARAMETERS)
        self._pieces.add_model(model)

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer = True
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._mark_gradients(parameters)
        self._pieces.add_gradients(parameters)

    def _mark_gradients(self, parameters: Iterable[Tensor]) -> None:
        self._memory.mark_tensors([local_tensor(each.grad) for each in parameters if each.grad is not None], GRADIENTS)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        for parameter, state in optimizer.state.items():
            values = [local_tensor(each) for each in state.values() if isinstance(each, Tensor)]
            self._memory.mark_tensors(values, STATES)
            self._pieces.set_state(parameter, sum(map(tensor_bytes, values)))


def _resize_and_count(memory: MemoryBook) -> Callable[[torch.UntypedStorage, int], Any]:
    resize = torch.UntypedStorage.resize_

    def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        memory.resize_storage(storage, size)
        return result

    return resize_and_count


def _mark_operation(recorder: RankRecorder, name: str) -> Callable[..., Any]:
    """Return a stage's method that records when it begins and ends."""
    method = getattr(_PipelineStageBase, name)
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run_marked(stage: Any, chunk: int, *args: Any, **options: Any) -> Any:
        is_half = signature.bind(stage, chunk, *args, **options).arguments.get("full_backward") is False
        recorder.begin_operation(stage, "I" if is_half else _OPERATIONS[name], chunk)
        try:
            return method(stage, chunk, *args, **options)
        finally:
            recorder.add_action(EndOperation())

    return run_marked


@contextlib.contextmanager
def _answer_for_memory(memory: MemoryBook) -> Iterator[None]:
    """Let `torch.cuda.max_memory_allocated` and its like return the bytes of the played rank."""

    def memory_stats(device: Any = None) -> dict[str, int]:
        return memory.read_statistics()

    shared = {"memory_stats": memory_stats, "reset_peak_memory_stats": lambda device=None: memory.reset_peak()}
    with replace_attributes(torch.cuda, shared), replace_attributes(torch.cuda.memory, shared):
        yield


@contextlib.contextmanager
def _record_streams(recorder: RankRecorder) -> Iterator[None]:
    """Put streams and events that record in the place of those of `torch.cpu`, which do nothing, and `torch.cuda`."""

    class RecordingEvent(torch.cpu.Event):
        number = 0

        def __init__(self, *args: Any, **options: Any) -> None:
            """Take the arguments of CUDA's events."""

        def elapsed_time(self, end: Any) -> float:
            return torch.empty(()).item()  # a value as that of a tensor, which is not known

        def record(self, stream: Any = None) -> RecordingEvent:  # type: ignore[override]
            self.number = recorder.new_event()
            of = recorder.current_stream() if stream is None else recorder.number_stream(stream)
            recorder.add_action(RecordEvent(of, self.number))
            return self

        def wait(self, stream: Any = None) -> None:
            of = recorder.current_stream() if stream is None else recorder.number_stream(stream)
            recorder.add_action(WaitForEvent(of, self.number))

        def synchronize(self) -> None:
            recorder.add_action(Synchronize())

    class RecordingStream(torch.cpu.Stream):
        def __init__(self, *args: Any, **options: Any) -> None:
            """Take the arguments of CUDA's streams."""

        def query(self) -> bool:
            return True

        def record_event(self, event: Any = None) -> RecordingEvent:  # type: ignore[override]
            recorded: RecordingEvent = (event or RecordingEvent()).record(self)
            return recorded

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            RecordingEvent().record(stream).wait(self)

        def synchronize(self) -> None:
            recorder.add_action(Synchronize())

    default = RecordingStream()
    shared: dict[str, Any] = {
        "Event": RecordingEvent, "Stream": RecordingStream, "current_stream": torch.cpu.current_stream,
        "stream": torch.cpu.stream, "synchronize": lambda device=None: recorder.add_action(Synchronize()),
    }  # fmt: skip
    of_cpu = {"_default_cpu_stream": default, "_current_stream": default, **shared}
    of_cuda = {"default_stream": lambda device=None: default, "StreamContext": torch.cpu.StreamContext, **shared}
    with replace_attributes(torch.cpu, of_cpu), replace_attributes(torch.cuda, of_cuda):
        yield
