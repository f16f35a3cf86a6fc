"""The tables "models" and "shards": the models that a program gave to `watch_model`, and their parameters on this rank.

Guarantees
- A model that is not watched has no hook. Hooks write plain numbers, so tables are made on any thread without torch.
- A gradient is read only on the thread that runs the model: before a forward pass, before a step of an optimizer, and
  at the end of a cell; nowhere if several threads run it. (Reading it elsewhere can crash a backward pass.)
- Without an observer a step costs a comparison for each group of parameters that is gathered, and reads no gradient.
- A table keeps no model alive. The rows of a model that has been freed are dropped with the next event or table.
- An error of the watch is logged and ends in its hook: the program's passes and steps go on.
- A module has one watch: a later one that contains some of the same parameters ends the earlier one.
"""
# A piece's row never changes but for `gradient` and `state` (bytes). What changes in every step is in the row of the
# model: `groups` has, for each group of parameters that are gathered together, whether it is whole now, and how often
# it has been so. So a step of a model of a hundred parameters changes one row.

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as c10d
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rpcbench.base.ids import Row, Table
from rpcbench.base.sources import ipython_shell
from rpcbench.distributed.parameter_shards import FoundParameter, local_bytes, read_model, source_tensor
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import Bystander, EventLog

MOST = 2000  # parameters of a model that have rows
_MARK = "_rpcbench_shards"  # the attribute of a group of `fully_shard` that names its watch
_TRANSITIONS = {"_to_unsharded": True, "_to_sharded": False, "_to_sharded_post_forward": False}


_BYSTANDER = Bystander("models")  # in all hooks


class ShardRow:
    """The piece of one parameter: its plain fields, and the bytes of its gradient and of its optimizer state."""

    __slots__ = ("fixed", "gradient", "key", "source", "state")

    def __init__(self, model: str, order: int, group: int | None, found: FoundParameter) -> None:
        piece = found.piece
        self.key = f"{model}/{piece.name}"
        self.gradient = self.state = 0
        self.source = weakref.ref(found.source)
        mesh = piece.mesh
        self.fixed: Row = {
            "name": piece.name, "also": list(piece.also), "order": order, "group": group, "kind": piece.kind,
            "shape": list(piece.shape), "offset": list(piece.region.offset), "size": list(piece.region.size),
            "gathered": None if piece.gathered is None else [list(part) for part in piece.gathered],
            "dtype": piece.dtype, "placements": list(piece.placements), "over": list(mesh.names) if mesh else [],
            "device": piece.device, "trainable": piece.trainable, "bytes": piece.held_bytes, "whole": piece.whole_bytes,
        }  # fmt: skip

    @property
    def tensor(self) -> Tensor | None:
        source = self.source()
        return None if source is None else source_tensor(source)

    def shard_row(self) -> Row:
        return {**self.fixed, "gradient": self.gradient, "state": self.state}


class WatchedModel:
    """The hooks of one model, and its rows."""

    def __init__(self, model: nn.Module, name: str, stage: int | None, bus: EventLog) -> None:
        reading = read_model(model)
        self.key = name if stage is None else f"{name} {stage}"
        self._bus = bus
        found = reading.parameters[:MOST]
        self.rows = [ShardRow(self.key, n, reading.group_of.get(n), one) for n, one in enumerate(found)]
        self._groups = [[bool(group.is_unsharded), 0] for group in reading.groups]  # whole now, times gathered
        self._sizes = [_gathered_bytes(group) for group in reading.groups]
        self._most = self._extra_bytes
        self._threads: set[int] = set()  # that have run the model
        self._states: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # measured, by optimizer
        self.steps = 0
        rank, world = (c10d.get_rank(), c10d.get_world_size()) if c10d.is_initialized() else (None, 1)
        self._fixed: Row = {
            "model": name, "stage": stage, "kind": reading.kind, "rank": rank, "world": world,
            "parameters": len(reading.parameters), "remarks": reading.remarks,
            "meshes": [[list(one.names), list(one.shape), list(one.ranks)] for one in reading.meshes],
        }  # fmt: skip
        self._undo: list[Callable[[], object]] = [model.register_forward_pre_hook(self._before_forward).remove]
        for number, group in enumerate(reading.groups):
            self._wrap_group(group, number)
        leaves = (one.source for one in found if isinstance(one.source, Tensor) and one.source.requires_grad)
        if (leaf := next((one for one in leaves if one.is_leaf and one.device.type == "cpu"), None)) is not None:
            # One of them tells the thread of a backward pass. On a device that is a thread of the autograd engine, for
            # which the program waits.
            hook = leaf.register_post_accumulate_grad_hook(self._gradient_accumulated)  # type: ignore[no-untyped-call]
            self._undo.append(hook.remove)
        self.read_gradients()

    def remove_hooks(self) -> None:
        while self._undo:
            self._undo.pop()()

    def model_row(self) -> Row:
        return {
            **self._fixed, "steps": self.steps, "gathered": self._extra_bytes, "most": self._most,
            "groups": [list(group) for group in self._groups],
        }  # fmt: skip

    @property
    def _extra_bytes(self) -> int:
        """The bytes that gathered parameters add to the rank's own pieces now."""
        return sum(size for size, (whole, _) in zip(self._sizes, self._groups, strict=True) if whole)

    # -- gathering
    def _wrap_group(self, group: Any, number: int) -> None:
        """Replace the methods of a group of `fully_shard` by which it gathers and frees its parameters."""
        if (earlier := vars(group).get(_MARK)) is not None:
            earlier.end()
        kind = type(group)

        def change(method: str, whole: bool) -> None:
            getattr(kind, method)(group)
            with _BYSTANDER:
                if group.device.type == "cpu":
                    self._threads.add(threading.get_ident())
                self._gathering_changed(number, whole)

        setattr(group, _MARK, self)
        for method, whole in _TRANSITIONS.items():
            setattr(group, method, functools.partial(change, method, whole))
        self._undo.append(functools.partial(_restore_methods, weakref.ref(group)))

    def _gathering_changed(self, number: int, whole: bool) -> None:
        group = self._groups[number]
        if group[0] == whole:
            return
        group[0] = whole
        group[1] += whole
        self._most = max(self._most, self._extra_bytes)
        self._report_model()

    def _report_model(self) -> None:
        if self._bus.listening:
            self._bus.record_change("ModelChanged", "models", self.key, self.model_row)

    def report_rows(self) -> None:
        self._report_model()
        for row in self.rows:
            self._bus.record_change("ShardChanged", "shards", row.key, row.shard_row)

    # -- gradients
    def _gradient_accumulated(self, _parameter: Tensor) -> None:
        self._threads.add(threading.get_ident())

    def _before_forward(self, _module: nn.Module, _inputs: object) -> None:
        self._threads.add(threading.get_ident())
        if self._bus.listening:
            with _BYSTANDER:
                self.read_gradients()  # `zero_grad` has no hook

    def read_gradients(self) -> None:
        """Measure gradients, unless another thread than this one has run the model: its backward may run now."""
        if not self._threads <= {threading.get_ident()}:
            return
        for row in self.rows:
            if (tensor := row.tensor) is not None:
                gradient = tensor.grad
                size = 0 if gradient is None else local_bytes(gradient)
                if size != row.gradient:
                    row.gradient = size
                    self._bus.record_change("ShardChanged", "shards", row.key, row.shard_row)

    # -- optimizers
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Measure the gradients that an optimizer of this model is about to use."""
        if self._bus.listening and optimizer in self._states:
            self.read_gradients()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Count a step of an optimizer that has parameters of this model, and measure its new states."""
        if self._states.get(optimizer) != len(optimizer.state):  # it makes a state in the first step of a parameter
            self.measure_states(optimizer)
        if optimizer in self._states:
            self.steps += 1
            self._report_model()

    def measure_states(self, optimizer: Optimizer) -> None:
        """Measure the states that an optimizer has for parameters of this model; remember it if it has any of them."""
        by_tensor = {id(row.tensor): row for row in self.rows}  # anew: `fully_shard` may have replaced parameters
        for parameter in _iterate_parameters(optimizer):
            if (row := by_tensor.get(id(parameter))) is None:
                continue
            self._states[optimizer] = len(optimizer.state)
            values = optimizer.state[parameter].values() if parameter in optimizer.state else ()
            row.state = sum(local_bytes(one) for one in values if isinstance(one, Tensor))
            self._bus.record_change("ShardChanged", "shards", row.key, row.shard_row)


def _restore_methods(ref: weakref.ref[Any]) -> None:
    """Give a group of `fully_shard` its own methods back, unless it has been freed."""
    if (group := ref()) is not None:
        for name in (_MARK, *_TRANSITIONS):
            vars(group).pop(name, None)


def _gathered_bytes(group: Any) -> int:
    """Return the bytes of a group's parameters after they are gathered."""
    cast = group.mp_policy.param_dtype  # None: it is gathered as it is kept
    return sum(one._orig_size.numel() * (cast or one.sharded_param.dtype).itemsize for one in group.fsdp_params)


def _iterate_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class ShardEvents:
    """The tables of one agent: `agent.part(ShardEvents)`."""

    def __init__(self, agent: Agent) -> None:
        self._bus = agent.links.bus
        self._lock = threading.Lock()  # guards the next two; held for no user code
        self._watched: dict[str, tuple[weakref.ref[nn.Module], WatchedModel]] = {}
        self._unhook: list[Callable[[], object]] = []  # end the hooks on all optimizers
        self._freed: SimpleQueue[str] = SimpleQueue()  # keys of models that have been freed: finalizers take no lock
        self._shell: Any = None  # IPython's, whose cells are followed
        self._bus.register_table("models", self.models_table)
        self._bus.register_table("shards", self.shards_table)

    def begin_watch(
        self, model: nn.Module, name: str, optimizer: Optimizer | None = None, stage: int | None = None
    ) -> None:
        """Watch a model; see `watch_model`. On a thread of the program."""
        self._drop_freed()
        key = name if stage is None else f"{name} {stage}"
        known = self._watched.get(key)
        if known is None or known[0]() is not model:
            for other in [*self._models_sharing_parts(model), *([key] if known else [])]:
                self._forget_model(other)
            watched = WatchedModel(model, name, stage, self._bus)
            freed = self._freed.put
            with self._lock:
                self._watched[key] = (weakref.ref(model, lambda _: freed(key)), watched)
            self._follow_program()
        else:
            watched = known[1]
            watched.read_gradients()
        for one in self._find_optimizers() if optimizer is None else [optimizer]:
            watched.measure_states(one)
        watched.report_rows()

    def models_table(self) -> Table:
        self._drop_freed()
        return {watched.key: watched.model_row() for watched in self._watched_models()}

    def shards_table(self) -> Table:
        self._drop_freed()
        return {row.key: row.shard_row() for watched in self._watched_models() for row in watched.rows}

    def _watched_models(self) -> list[WatchedModel]:
        with self._lock:
            return [watched for _, watched in self._watched.values()]

    def _models_sharing_parts(self, model: nn.Module) -> list[str]:
        """Return the keys of watched models of which the model has parts, or is one."""
        modules = set(map(id, model.modules()))
        return [
            key
            for key, (ref, _) in self._watched.items()
            if (other := ref()) is not None and not modules.isdisjoint(map(id, other.modules()))
        ]

    def _forget_model(self, key: str) -> None:
        with self._lock:
            entry = self._watched.pop(key, None)
            last = not self._watched
        if entry is None:
            return
        entry[1].remove_hooks()
        for row in entry[1].rows:
            self._bus.record_change("ShardForgotten", "shards", row.key, _no_row)
        self._bus.record_change("ModelForgotten", "models", key, _no_row)
        while last and self._unhook:
            self._unhook.pop()()

    def _drop_freed(self) -> None:
        while True:
            try:
                key = self._freed.get_nowait()
            except Empty:
                return
            if (entry := self._watched.get(key)) is not None and entry[0]() is None:  # else watched anew
                self._forget_model(key)

    # -- the program
    def _follow_program(self) -> None:
        """Follow the steps of all optimizers, and the ends of cells."""
        if not self._unhook:
            self._unhook.append(register_optimizer_step_pre_hook(self._about_to_step).remove)
            self._unhook.append(register_optimizer_step_post_hook(self._optimizer_stepped).remove)
        shell = ipython_shell()
        if shell is not None and shell is not self._shell:
            shell.events.register("post_run_cell", self._cell_ended)
            self._shell = shell

    @_BYSTANDER
    def _about_to_step(self, optimizer: Optimizer, _args: object, _keys: object) -> None:
        for watched in self._watched_models():
            watched.before_optimizer_step(optimizer)

    @_BYSTANDER
    def _optimizer_stepped(self, optimizer: Optimizer, _args: object, _keys: object) -> None:
        for watched in self._watched_models():
            watched.optimizer_stepped(optimizer)

    @_BYSTANDER
    def _cell_ended(self, *_: object) -> None:
        self._drop_freed()
        for watched in self._watched_models():
            watched.read_gradients()

    def _find_optimizers(self) -> list[Optimizer]:
        """Return the optimizers among the variables of cells: their steps before the watch were not seen."""
        shell = ipython_shell()
        return [] if shell is None else [one for one in list(shell.user_ns.values()) if isinstance(one, Optimizer)]


def _no_row() -> None:
    """Return no row: the event removes it."""


def watch_model(model: Any, name: str = "model", optimizer: Optimizer | None = None, stage: int | None = None) -> None:
    """Show a model in the sharding panel. Call it on every rank, after the model was sharded, wrapped or moved.

    Args:
        model: An `nn.Module`: plain, of DTensors, sharded by `fully_shard`, or a DistributedDataParallel; or a stage of
            `torch.distributed.pipelining`. It is not kept alive.
        name: Parts of one model have the same name on all ranks.
        optimizer: Measured now; otherwise those among the variables of cells are, and all others after their next step.
        stage: The number of the pipeline stage that this part of the model is.

    Raises:
        TypeError: `model` is no module.
        RuntimeError: This process is no member of a world.
    """
    part = getattr(model, "submod", None)
    if isinstance(part, nn.Module) and stage is None and isinstance(getattr(model, "stage_index", None), int):
        model, stage = part, model.stage_index
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch_model watches an nn.Module or a stage of one, not a {type(model).__name__}")
    if not name or "/" in name:
        raise ValueError(f"a watched model has a name without a slash, not {name!r}")
    current.current_agent().part(ShardEvents).begin_watch(model, name, optimizer, stage)


def watch_variable(name: str) -> str:
    """Watch the module that a variable of this process's cells holds. Return "", or a sentence if there is none."""
    shell = ipython_shell()
    value = None if shell is None else shell.user_ns.get(name)
    if value is None:
        return f"there is no variable {name}"
    try:
        watch_model(value, name)
    except TypeError:
        return f"{name} is no model but a {type(value).__name__}"
    return ""
