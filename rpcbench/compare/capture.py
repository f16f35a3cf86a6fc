"""Keeps the values of training steps: inputs and outputs of modules, gradients, and what an optimizer made of them.

Guarantees
- The program computes what it computes without a capture, but for dropout (see `masks`).
- Names are those of the model without the wrappers of DDP, FSDP, activation checkpoints and `torch.compile`.
- The second forward of a checkpointed module is no call of its own, nor is one that only learns shapes.
- The values lie in a `Spool`, not in memory. Several calls of a module (micro-batches, recurrence) are kept in order,
  and may run on several threads.
- After `close` no hook is left on the model, and the capture does not keep it.
"""

# Theory of operation
#
#     hooks of each module               ──► "input", "forward": by the number of the call
#     hook of an output                  ──► "backward": the gradient of that output, under the number of its call
#     global hook before optimizer.step  ──► "gradient" of each parameter: after all reductions, and after clipping
#     global hook after optimizer.step   ──► "step": the optimizer's state
#     `end_step`                         ──► "gradient" if no optimizer has stepped; "step": buffers, and parameters if
#                                            an optimizer, or the program by itself, has changed any
#
# A gradient belongs to the call whose output it is of, however the backward passes are ordered.

from __future__ import annotations

import dataclasses
import inspect
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rpcbench.base.errors import CompareError
from rpcbench.compare.masks import DropMask, MaskRecorder
from rpcbench.compare.module_options import Options, read_module_options, read_optimizer_options
from rpcbench.compare.spool import Spool, Stored
from rpcbench.distributed.parameter_shards import (
    iterate_modules,
    local_tensor,
    placement_word,
    read_model,
    source_tensor,
)  # fmt: skip

__all__ = ["Capture", "capture"]

INITIAL, INPUT, FORWARD, LOSS, BACKWARD, GRADIENT, STEP = (
    "initial", "input", "forward", "loss", "backward", "gradient", "step",
)  # fmt: skip
PHASES = (INITIAL, INPUT, FORWARD, LOSS, BACKWARD, GRADIENT, STEP)


class Key(NamedTuple):
    """The name of a value: the same in the reference and on each rank."""

    turn: int  # the number of the step, from 0
    phase: str  # one of PHASES
    name: str  # of the module, parameter or buffer; "" for the model itself, and for the loss
    part: str = ""  # of several tensors: "[0]", "['logits']", ".logits"; of an optimizer's state: "exp_avg"


class Kept(NamedTuple):
    """The value of one call."""

    stored: Stored
    placements: tuple[tuple[str, str], ...] | None  # of a DTensor: (mesh dimension, "Shard(0)")


class ModuleFacts(NamedTuple):
    """The facts of a module besides its values."""

    kind: str  # the name of its class
    parameters: tuple[str, ...]  # its own, by their names in the model


@dataclasses.dataclass(slots=True)
class Catalog:
    """The contents of a run's files, without the values themselves."""

    values: dict[Key, dict[int, Kept]]  # by key in the order of execution; by number of the call
    modules: dict[str, ModuleFacts]
    tied: dict[str, tuple[str, ...]]  # parameter → its other names
    masks: dict[str, list[DropMask]]  # of a module whose forward draws them
    updates: dict[int, int] = dataclasses.field(default_factory=dict)
    """Turn → how often optimizers have stepped one parameter, at most; 0 if the program has changed them by itself."""
    options: dict[tuple[int, str], Options] = dataclasses.field(default_factory=dict)
    """Turn and name → options: of a module at its first call, of a parameter's group when an optimizer steps it."""
    changed_again: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict)
    """Turn and name → "input" or "output" of a module that was another one when its forward was run again."""


Perturb = Callable[[str, Tensor], Tensor]
"""Takes the name of a module and a value of it; returns the value moved by round-off."""

StoreValue = Callable[[Key, int, Tensor], Stored]
"""Takes a key, the number of a call and a dense value, which it must not keep a reference to."""


NamedPart = tuple[str, nn.Module]
"""A part of a model, with its name in the model; "" for the model itself."""


_NO_CALL = -1
_CHANGED = 1e-3  # of a value's norm, by which round-off does not change it


class _RunningCalls:
    """Numbers the calls of each module in a turn, by thread from the begin to the end of their forward."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, bool, int], int] = defaultdict(int)

    def enter_call(self, name: str, again: bool, rank: int) -> int:
        """Return the number of a call that begins on this thread. Calls of one rank are in the order in which they are
        made, and the first calls of all ranks, by rank, come before the second ones. `again`: the call was made before,
        and gets the number that it had."""
        with self._lock:
            count = self._counts[name, again, rank]
            self._counts[name, again, rank] += 1
        number = (count << 64) + rank if rank else count
        self._stack().append((name, number))
        return number

    def enter_no_call(self, name: str) -> None:
        """Begin a forward that is no call."""
        self._stack().append((name, _NO_CALL))

    def current_call(self) -> int:
        return self._stack()[-1][1]

    def current_name(self) -> str | None:
        """Return the name of the module that runs its forward on this thread."""
        stack = self._stack()
        return stack[-1][0] if stack else None

    def leave_call(self) -> None:
        self._stack().pop()

    def begin_turn(self) -> None:
        self._counts.clear()

    def _stack(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] | None = getattr(self._thread, "stack", None)
        if found is None:
            found = self._thread.stack = []
        return found


class Capture:
    """The values of a model's run on this process, made by `rpcbench.capture`; for `cluster.compare_captures`.

    Args:
        model: Its modules get hooks; `close` removes them. Or several parts of it, with the name of each.
        perturb: Applied to each output, each gradient of one, and the model's inputs on their way; parameters are moved
            once, after their initial values were kept.
        store: Takes each value, in place of the spool.
    """

    keeps_all_steps = False  # also of parameters that nothing has changed here

    def __init__(
        self, model: nn.Module | Sequence[NamedPart], perturb: Perturb | None = None, store: StoreValue | None = None
    ) -> None:
        self.spool = Spool()
        self._store = store or self._spool_value
        self.catalog = Catalog({}, {}, {}, {})
        self._parts: Sequence[NamedPart] = [("", model)] if isinstance(model, nn.Module) else model
        self._perturb = perturb
        self._turn = 0
        self._running = _RunningCalls()
        self._hooked: dict[nn.Module, str] = {}  # modules with hooks → their names
        self._without_grad: set[tuple[str, int]] = set()  # calls that autograd did not see: reentrant checkpoints
        self._stepped: set[str] = set()  # parameters with the gradient that an optimizer has stepped with
        self._updates: Counter[int] = Counter()  # parameter → steps of optimizers in this turn
        self._masks = MaskRecorder(self.catalog.masks)
        self._handles: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._add_module_hooks()
        self._keep_parameters(INITIAL)
        if perturb is not None:
            with torch.no_grad():
                for parameter in self._named_parameters().values():
                    local_tensor(parameter).copy_(perturb("", local_tensor(parameter)))
        self._sums = self._sum_parameters()

    def __enter__(self) -> Self:
        self._masks.__enter__()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None and self._has_open_step():
            self.end_step()
        self._masks.__exit__(kind, *error)
        self.close()

    def close(self) -> None:
        """Remove all hooks, and forget the model. The values kept remain."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._parts = ()

    # -- hooks
    def _add_module_hooks(self) -> None:
        for name, module in self._iterate_modules():
            known = name in self.catalog.modules  # a wrapper has the hooks of what it wraps
            own = tuple(join_name(name, each) for each, _ in module.named_parameters(recurse=False))
            self.catalog.modules[name] = ModuleFacts(_class_name(module), own)
            if not known:
                self._hooked[module] = name
                self._handles += [
                    module.register_forward_pre_hook(partial(self._before_forward, name), with_kwargs=True),
                    module.register_forward_hook(partial(self._after_forward, name), always_call=False),
                    module.register_forward_hook(partial(self._leave_forward, name), always_call=True),
                ]

    def _before_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if is_inferring_shapes():
            self._masks.enter_module(None)
            self._running.enter_no_call(name)
            return None
        self._masks.enter_module(name)
        again = self._is_run_again()
        call = self._running.enter_call(name, again, self._rank_of_call())
        if again:
            self._compare_again(INPUT, name, call, (args, kwargs))
            return None
        if (self._turn, name) not in self.catalog.options:
            self.catalog.options[self._turn, name] = read_module_options(module)

        def keep(path: str, tensor: Tensor) -> Tensor:
            if self._perturb is not None and name == "":
                tensor = self._perturb(name, tensor)
            self._keep_value(INPUT, name, path, call, tensor)
            return tensor

        found = map_tensors(keep, (args, kwargs))
        return found if self._perturb is not None and name == "" else None

    def _after_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._running.current_call()
        if call == _NO_CALL:
            return None
        if self._is_run_again():
            self._watch_again(name, call, output)
            self._compare_again(FORWARD, name, call, output)
            return None

        def keep(path: str, tensor: Tensor) -> Tensor:
            if self._perturb is not None:
                tensor = self._perturb(name, tensor)
            self._keep_value(FORWARD, name, path, call, tensor)
            if tensor.requires_grad:
                self._watch_gradient(Key(self._turn, BACKWARD, name, path), call, tensor)
            else:
                self._without_grad.add((name, call))
            return tensor

        found = map_tensors(keep, output)
        return found if self._perturb is not None else None

    def _leave_forward(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._running.leave_call()
        self._masks.leave_module()

    def _is_run_again(self) -> bool:
        """Return whether the forward on this thread is one that was run before, and is no call of its own."""
        return is_in_backward()

    def _rank_of_call(self) -> int:
        """Return a number that puts the calls of a module in order, where they may run in any; 0: in theirs."""
        return 0

    def _watch_again(self, name: str, call: int, output: Any) -> None:
        """Watch the gradients of an output that was computed again, if the first forward had none."""
        if (name, call) in self._without_grad:

            def watch(path: str, tensor: Tensor) -> Tensor:
                if tensor.requires_grad:
                    self._watch_gradient(Key(self._turn, BACKWARD, name, path), call, tensor)
                return tensor

            map_tensors(watch, output)

    def _compare_again(self, phase: str, name: str, call: int, values: Any) -> None:
        """Note whether a module gets or returns other values than when its forward was run before."""

        def compare(path: str, tensor: Tensor) -> Tensor:
            kept = self.catalog.values.get(Key(self._turn, phase, name, path), {}).get(call)
            if kept is not None and tensor.is_floating_point() and self._store == self._spool_value:
                own, before = local_tensor(tensor.detach()).cpu().double(), self.spool.read_tensor(kept.stored).double()
                if own.shape == before.shape and float((own - before).norm()) > _CHANGED * float(before.norm()):
                    word = "input" if phase == INPUT else "output"
                    self.catalog.changed_again.setdefault((self._turn, name), word)
            return tensor

        map_tensors(compare, values)

    def _watch_gradient(self, key: Key, call: int, tensor: Tensor) -> None:
        tensor.register_hook(partial(self._keep_gradient, key, call))  # type: ignore[no-untyped-call]

    def _keep_gradient(self, key: Key, call: int, gradient: Tensor) -> Tensor | None:
        moved = gradient if self._perturb is None else self._perturb(key.name, gradient)
        self._keep_at(key, call, moved)
        return None if self._perturb is None else moved

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        names = {id(each): name for name, each in self._named_parameters().items()}
        stepped = 0
        for group in optimizer.param_groups:
            own = [id(each) for each in group["params"] if id(each) in names]
            options = read_optimizer_options(optimizer, group) if own else {}
            self.catalog.options.update({(self._turn, names[each]): options for each in own})
            self._updates.update(own)
            stepped += len(own)
        if stepped:
            self._keep_parameter_gradients(settles=True)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in self._named_parameters().items():
            for part, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    self._keep_value(STEP, name, part, 0, value)

    # -- turns
    def end_step(self, loss: Tensor | float | None = None) -> None:
        """Keep the loss of a step, and what the step has left in the model. Call it after each step; the end of the
        block calls it for a last one. CompareError after the block."""
        if not self._handles:
            raise CompareError("this capture has ended with its `with` block: call its end_step inside of the block")
        if loss is not None:
            value = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)
            self._keep_value(LOSS, "", "", 0, value)
        self._keep_parameter_gradients(settles=False)
        sums = self._sum_parameters()
        has_changed = bool(self._updates) or sums != self._sums
        if has_changed:
            self.catalog.updates[self._turn] = max(self._updates.values(), default=0)
        if has_changed or self.keeps_all_steps:
            self._keep_parameters(STEP)
        for name, buffer in self._named_buffers():
            self._keep_value(STEP, name, "", 0, buffer)
        self._turn += 1
        self._sums = sums
        self._updates.clear()
        self._stepped.clear()
        self._running.begin_turn()
        self._without_grad.clear()

    def _has_open_step(self) -> bool:
        return any(key.turn == self._turn and key.phase != INITIAL for key in self.catalog.values)

    def _keep_parameters(self, phase: str) -> None:
        for name, parameter in self._named_parameters().items():
            self._keep_value(phase, name, "", 0, parameter)

    def _keep_parameter_gradients(self, settles: bool) -> None:
        """Keep the gradients of parameters that no optimizer has stepped with. `settles`: one does so now."""
        for name, gradient in self._gradients().items():
            if name not in self._stepped:
                self._keep_value(GRADIENT, name, "", 0, gradient)
                if settles:
                    self._stepped.add(name)

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the parameters that have one."""
        return {name: each.grad for name, each in self._named_parameters().items() if each.grad is not None}

    # -- the model
    def _iterate_modules(self) -> Iterator[NamedPart]:
        return ((join_name(path, name), each) for path, part in self._parts for name, each in iterate_modules(part))

    def _sum_parameters(self) -> list[float]:
        """Return a sum of each parameter: others after a step show that the program has changed them by itself."""
        own = (local_tensor(each).detach() for each in self._named_parameters().values())
        reals = (torch.view_as_real(each) if each.is_complex() else each for each in own)
        return [float(each.sum(dtype=torch.float64)) for each in reals]

    def _named_parameters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for path, part in self._parts:
            for piece, source in read_model(part).parameters:
                first, *others = (join_name(path, each) for each in (piece.name, *piece.also))
                found[first] = source_tensor(source)
                self.catalog.tied.update({first: tuple(others)} if others else {})
        return found

    def _named_buffers(self) -> list[tuple[str, Tensor]]:
        return [
            (join_name(name, each), buffer)
            for name, module in self._iterate_modules()
            for each, buffer in module.named_buffers(recurse=False)
        ]

    # -- values
    def _keep_value(self, phase: str, name: str, part: str, call: int, tensor: Tensor) -> None:
        self._keep_at(Key(self._turn, phase, name, part), call, tensor)

    def _keep_at(self, key: Key, call: int, tensor: Tensor) -> None:
        local = local_tensor(tensor.detach())
        values = local if local.layout == torch.strided else local.to_dense()
        kept = Kept(self._store(key, call, values), _placements_of(tensor))
        self.catalog.values.setdefault(key, {})[call] = kept

    def _spool_value(self, key: Key, call: int, value: Tensor) -> Stored:
        return self.spool.add_tensor(value)


def capture(model: nn.Module) -> Capture:
    """Keep the values of a model's training steps: a `with` block around forward, backward and the optimizer's step.

    On workers it stands in a cell of `%%remote all`, under one name; then call `cluster.compare_captures`.

    Args:
        model: The model of this process; it may be wrapped by DDP or `fully_shard`, or be cut by tensor parallel.

    >>> model = torch.nn.Linear(4, 1)
    >>> with rpcbench.capture(model) as run:
    ...     loss = model(torch.ones(2, 4)).sum()
    ...     loss.backward()
    ...     run.end_step(loss)
    """
    return Capture(model)


def is_in_backward() -> bool:
    """Return whether autograd runs a backward pass on this thread: a forward in it is one that is run again."""
    return torch._C._current_graph_task_id() != -1


def is_inferring_shapes() -> bool:
    """Return whether `torch.distributed.pipelining` runs a stage on this thread to learn shapes, with values that mean
    nothing: before the first step of a schedule."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    from torch.distributed.pipelining.stage import PipelineStage  # here: half a second, where no program uses it

    code, frame = PipelineStage._compute_outputs.__code__, inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def join_name(path: str, name: str) -> str:
    """Return the name in the model of a child, parameter or buffer of the module at `path`; "" is the module itself."""
    return ".".join(filter(None, (path, name)))


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("FSDP")


def _placements_of(tensor: Tensor) -> tuple[tuple[str, str], ...] | None:
    if not isinstance(tensor, DTensor):
        return None
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(zip(names, map(placement_word, tensor.placements), strict=False))


# -- values of programs
def map_tensors(function: Callable[[str, Tensor], Tensor], value: Any, path: str = "") -> Any:
    """Return a value with `function(path, tensor)` in place of each tensor in it; the value itself is not changed.

    Tensors are found in tuples, lists, mappings, named tuples and dataclasses. A path is the Python that reads one:
    `[0]`, `['logits']`, `.logits`; empty for the value itself. A packed sequence is left as it is: the order of its
    rows depends on the lengths of all of them, so pieces of a batch have other orders.
    """
    if isinstance(value, Tensor):
        return function(path, value)
    if isinstance(value, PackedSequence):
        return value
    if isinstance(value, Mapping):
        found = {key: map_tensors(function, each, f"{path}[{key!r}]") for key, each in value.items()}
        return found if type(value) is dict else _rebuild_mapping(value, found)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(
            *(map_tensors(function, each, f"{path}.{name}") for name, each in zip(value._fields, value, strict=True))
        )
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, each, f"{path}[{n}]") for n, each in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        return dataclasses.replace(
            value, **{name: map_tensors(function, getattr(value, name), f"{path}.{name}") for name in names}
        )
    return value


def _rebuild_mapping(value: Mapping[Any, Any], found: dict[Any, Any]) -> Any:
    return type(value)(**found) if dataclasses.is_dataclass(value) else type(value)(found)  # type: ignore[call-arg]
