"""Steps of `torch.distributed.pipelining` on workers, recorded as those of our pipelines: tables "steps" and "ops".

Guarantees
- A program needs no change, and nothing is imported for it: the methods are wrapped when it imports torch's module.
- An operation's time is that of torch's call, without the waits for its inputs. On a GPU it launches kernels there.
- The plan of a rank is what its schedule says, and follows torch where it runs another order.
- Ranks number the steps of one process group alike, as all of them run its steps. A new group begins at 1.
- Where a step cannot be recorded, that is logged, and the step runs as without this file.
"""

# Theory of operation
#
#     schedule.step(x)                        one thread
#        │  TorchStep ──► StepRecord          the row of the step, with the plan of this rank
#        ├─ stage.forward_one_chunk           F  ┐
#        ├─ stage.backward_one_chunk          B, or I where the backward is in halves  ├ begin_op, end_op
#        ├─ stage.backward_weight_one_chunk   W  ┘
#        ▼
#     end_step(DONE, FAILED or INTERRUPTED, loss)
#
# The activations that a stage holds are not known: torch keeps them in the graphs of autograd.
# Torch's stages exchange activations between these calls, so a gap of a lane is a wait for a neighbour, or a transfer.

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch

from rpcbench.base.errors import PipelineError
from rpcbench.distributed import groups
from rpcbench.pipeline.ops import Kind, Op, Ops, read_ops
from rpcbench.pipeline.schedules import gpipe, one_f_one_b
from rpcbench.pipeline.simulate import simulate
from rpcbench.pipeline.step_log import DONE, FAILED, INTERRUPTED, OpLog, StepRecord
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.current import find_current
from rpcbench.runtime.events import Bystander
from rpcbench.runtime.handles import tensor_bytes

_MODULE = "torch.distributed.pipelining.schedules"
_METHODS = {
    "forward_one_chunk": Kind.FORWARD, "backward_one_chunk": Kind.BACKWARD, "backward_weight_one_chunk": Kind.WEIGHT,
}  # fmt: skip
_ORDERS = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b}  # torch's own texts of these are not what it runs
_BYSTANDER = Bystander("steps of torch.distributed.pipelining")
_running = threading.local()  # `step`: the TorchStep of this thread
_last_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by process group


def record_torch_pipelines() -> None:
    """Record the steps of torch's schedules in this process, from their import on. Twice is as once."""
    if _MODULE in sys.modules:
        _wrap_methods(sys.modules[_MODULE])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport:
    """An import hook that finds torch's module as Python would, once, and wraps its methods after its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # first, or the next line would call this method again
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                with _BYSTANDER:
                    _wrap_methods(module)

            spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap_methods(schedules: Any) -> None:
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if not hasattr(kind.step, "__wrapped__"):
            kind.step = _wrap_step(kind.step)
    stage = schedules._PipelineStageBase
    for name in _METHODS:
        if not hasattr(method := getattr(stage, name), "__wrapped__"):
            setattr(stage, name, _wrap_operation(method, _METHODS[name]))


def _wrap_step(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def run_recorded(schedule: Any, *args: Any, **options: Any) -> Any:
        agent = find_current()
        if agent is None or getattr(_running, "step", None) is not None:
            return step(schedule, *args, **options)
        if schedule._has_backward and options.get("losses") is None:
            options["losses"] = []  # torch puts those of the micro-batches in
        with TorchStep(agent, schedule, args, options):
            return step(schedule, *args, **options)

    return run_recorded


def _wrap_operation(method: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def run_recorded(stage: Any, chunk: int, *args: Any, **options: Any) -> Any:
        running: TorchStep | None = getattr(_running, "step", None)
        if running is None or (kind is not Kind.FORWARD and not stage.has_backward):
            return method(stage, chunk, *args, **options)
        is_half = signature.bind(stage, chunk, *args, **options).arguments.get("full_backward") is False
        running.begin_operation(Op(stage.stage_index, Kind.INPUT if is_half else kind, chunk))
        try:
            result = method(stage, chunk, *args, **options)
        except BaseException:
            running.end_operation(0, is_failed=True)
            raise
        running.end_operation(_count_sent_bytes(stage, kind, chunk))
        return result

    return run_recorded


def _count_sent_bytes(stage: Any, kind: Kind, chunk: int) -> int:
    """Return the bytes of the results that a neighbour on another rank gets."""
    if kind is Kind.WEIGHT:
        return 0
    to = stage.stage_index + (1 if kind is Kind.FORWARD else -1)
    if not 0 <= to < stage.num_stages or stage.stage_index_to_group_rank.get(to) == stage.group_rank:
        return 0
    results = stage.fwd_cache[chunk][0] if kind is Kind.FORWARD else stage.bwd_cache.get(chunk, ())
    return sum(tensor_bytes(each) for each in results if isinstance(each, torch.Tensor))


class TorchStep:
    """The record of one step of torch's schedule on this rank: `with` it around the step."""

    def __init__(self, agent: Agent, schedule: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self._agent, self._schedule = agent, schedule
        self._losses: Sequence[torch.Tensor] | None = options.get("losses")  # torch fills this list
        self._record: StepRecord | None = None  # None where it cannot be recorded
        tensors = [each for each in (*args, options.get("target")) if isinstance(each, torch.Tensor) and each.dim()]
        self._samples = len(tensors[0]) if tensors else None  # a rank between the first and the last stage has none

    def __enter__(self) -> None:
        with _BYSTANDER:
            self._record = self._open_record()
        _running.step = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _running.step = None
        if self._record is not None:
            with _BYSTANDER:
                failed = INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
                self._record.end_step(DONE if error is None else failed, **self._read_loss())

    @_BYSTANDER
    def begin_operation(self, op: Op) -> None:
        if self._record is not None:
            self._record.expect_op(op)
            self._record.begin_op()

    @_BYSTANDER
    def end_operation(self, sent: int, is_failed: bool = False) -> None:
        if self._record is not None:
            self._record.end_op(sent, None, is_failed)

    def _open_record(self) -> StepRecord:
        stage, trains = _stages_of(self._schedule)[0], self._schedule._has_backward
        ops = _read_orders(self._schedule, trains)
        group = stage.group or torch.distributed.group.WORLD
        number = _last_steps[group] = _last_steps.get(group, 0) + 1
        ranks = torch.distributed.get_process_group_ranks(group)
        world = groups.member_of(None, at_work=False).world
        return self._agent.part(OpLog).open_step(
            run=world.token,
            step=number,
            plan=" ".join(map(str, ops[stage.group_rank])),
            workers=[self._agent.member(world.ranks[rank].name).id for rank in ranks],
            ideal=_ideal_share(ops) if trains else None,
            samples=self._samples,
            replica=_replica_of(ranks),
        )

    def _read_loss(self) -> dict[str, float]:
        """Return the mean of the losses of the micro-batches, on the rank of the last stage."""
        losses = [loss.detach() for loss in self._losses or ()]
        return {"loss": float(torch.stack(losses).mean())} if losses else {}


def _stages_of(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages


def _read_orders(schedule: Any, trains: bool) -> Ops:
    """Return the operations of each rank of the pipeline, as its schedule says before it runs."""
    if hasattr(schedule, "_stage"):
        make = _ORDERS.get(type(schedule).__name__, gpipe)
        ops = make(schedule._stage.num_stages, schedule._n_microbatches)
    else:
        ops = read_ops([schedule.pipeline_order[rank] for rank in sorted(schedule.pipeline_order)])
    return ops if trains else [[op for op in own if op.kind is Kind.FORWARD] for own in ops]


def _ideal_share(ops: Ops) -> float | None:
    """Return the idle share of these orders with equal stages; None if they cannot run as they stand."""
    try:
        return simulate(ops).idle
    except PipelineError:
        return None


def _replica_of(ranks: Sequence[int]) -> int | None:
    """Return the number of this pipeline among equal ones, whose ranks follow one another or are a stride apart; None
    if it has all ranks."""
    size = len(ranks)
    if size == torch.distributed.get_world_size():
        return None
    stride = ranks[1] - ranks[0] if size > 1 else 1
    return ranks[0] // (size * stride) * stride + ranks[0] % stride
