"""A module that runs a list of operations, as a trace has them: plain data, so that it travels as any module does.

`torch.fx.GraphModule` is traced anew where it is unpickled, for which it changes `nn.Module` for all threads meanwhile.
So a graph within a graph, such as a branch of `torch.cond`, is a `Recipe`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree


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
    def of(node: fx.Node, found: Callable[[fx.Node], Any]) -> Step:
        """`found`: what is put in the place of a node among the arguments."""
        args, kwargs = plain(node.args, found), plain(node.kwargs, found)
        if str(node.target) == "flat_apply":  # of a function that is no operation of torch's
            function, spec, *flat = args
            args, kwargs = _pytree.tree_unflatten(flat, spec)
            return Step(node.name, _pytree._retrieve_constant(function).func, args, kwargs)
        return Step(node.name, _target(node), args, kwargs)


class Recipe(nn.Module):
    """Called with the values `takes`, it runs the steps and returns `made`. `own`: path → parameter, buffer, module.

    What is in `own` and not in `state` stays out of the state_dict. `made` may be of any class that _pytree knows.
    """

    def __init__(
        self,
        takes: Sequence[str],
        steps: Sequence[Step],
        made: Any,
        own: Mapping[str, Any],
        state: set[str],
    ) -> None:
        super().__init__()
        self._takes, self._steps, self._made, self._own = tuple(takes), tuple(steps), made, tuple(own)
        for path, value in own.items():
            self.hold(path, value, path in state)

    def hold(self, path: str, value: Any, persistent: bool) -> None:
        """Have a parameter, buffer or module under this path; `persistent`: in the state_dict."""
        *parents, name = path.split(".")
        module: nn.Module = self
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
        return _pytree.tree_map_only(Ref, lambda ref: held[ref.name], self._made)


class Attention(nn.Module):
    """`scaled_dot_product_attention` with dropout in training mode only; its trace has that of the sample."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, query: Any, key: Any, value: Any, mask: Any = None, _traced: float = 0.0, *rest: Any, **others: Any
    ) -> Any:
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout, *rest, **others)


def plain(value: Any, found: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a node, with what is `found` for each node in them."""
    if isinstance(value, fx.Node):
        return found(value)
    return _mapped(value, lambda item: plain(item, found))


def _target(node: fx.Node) -> Callable[..., Any] | str | Ref:
    if node.op == "call_module":
        return Ref(str(node.target))
    function: Any = node.target
    if isinstance(function, torch._ops.OpOverload):
        return str(function)
    if isinstance(function, torch._ops.HigherOrderOperator):
        return _IN_PLACE_OF.get(str(function), f"higher_order.{function}")
    return function  # type: ignore[no-any-return]


def _with_grad_mode(enabled: bool, function: Callable[..., Any], *args: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return function(*args)


def _with_autocast(
    device: str, dtype: torch.dtype, enabled: bool, cached: bool | None, function: Callable[..., Any], *args: Any
) -> Any:
    with torch.autocast(device, dtype, enabled, cached):
        return function(*args)


_IN_PLACE_OF: dict[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": _with_grad_mode,
    "wrap_with_autocast": _with_autocast,
}
"""torch's own would load its compiler on each worker."""


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
