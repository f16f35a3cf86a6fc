"""A module that runs a list of operations, as a trace has them: plain data, so that it travels as any module does.

`torch.fx.GraphModule` is traced anew where it is unpickled, for which it changes `nn.Module` for all threads meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True, slots=True)
class Ref:
    """A value that was taken or made before, or something of the module's own."""

    name: str


@dataclass(frozen=True, slots=True)
class Step:
    """`name` = `target`(*args, **kwargs). The target: a function, the name of one in torch.ops, or a submodule."""

    name: str
    target: Callable[..., Any] | str | Ref
    args: Any
    kwargs: Any

    @staticmethod
    def of(node: fx.Node, name: Callable[[fx.Node], str]) -> Step:
        target: Callable[..., Any] | str | Ref
        if node.op == "call_module":
            target = Ref(str(node.target))
        else:
            function: Any = node.target
            target = str(function) if isinstance(function, torch._ops.OpOverload) else function
        return Step(node.name, target, plain(node.args, name), plain(node.kwargs, name))


class Recipe(nn.Module):
    """Called with the values `takes`, it runs the steps and returns `made`. `own`: path → parameter, buffer, module.

    What is in `own` and not in `state` stays out of the state_dict.
    """

    def __init__(
        self, takes: Sequence[str], steps: Sequence[Step], made: Any, own: Mapping[str, Any], state: set[str]
    ) -> None:
        super().__init__()
        self._takes, self._steps, self._made, self._own = tuple(takes), tuple(steps), made, tuple(own)
        for path, value in own.items():
            _set(self, path, value, path in state)

    @property
    def changes_in_place(self) -> bool:
        """Whether a step may change a value that it gets."""
        targets = [_function(step.target, {}) for step in self._steps if isinstance(step.target, str)]
        return any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in targets)

    def forward(self, *values: Any) -> Any:
        held = dict(zip(self._takes, values, strict=True))
        held.update((path, _get(self, path)) for path in self._own)
        for step in self._steps:
            function = _function(step.target, held)
            held[step.name] = function(*_filled(step.args, held), **_filled(step.kwargs, held))
        return _filled(self._made, held)


def plain(value: Any, name: Callable[[fx.Node], str]) -> Any:
    """Arguments of a node, without nodes."""
    if isinstance(value, fx.Node):
        return Ref(name(value))
    return _mapped(value, lambda item: plain(item, name))


def _filled(value: Any, held: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return held[value.name]
    return _mapped(value, lambda item: _filled(item, held))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, tuple):
        return tuple(change(item) for item in value)
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    return slice(*map(change, (value.start, value.stop, value.step))) if isinstance(value, slice) else value


def _function(target: Callable[..., Any] | str | Ref, held: Mapping[str, Any]) -> Any:
    if isinstance(target, Ref):
        return held[target.name]
    if not isinstance(target, str):
        return target
    found: Any = torch.ops
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _get(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _set(module: nn.Module, path: str, value: Any, persistent: bool) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    if isinstance(value, nn.Module):
        module.add_module(name, value)
    elif isinstance(value, nn.Parameter):
        module.register_parameter(name, value)
    else:
        module.register_buffer(name, value, persistent)
