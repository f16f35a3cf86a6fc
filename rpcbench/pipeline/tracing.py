"""A model with any forward as a row of parts: traced by torch.export, and cut at the borders of its modules.

Guarantees
- A part has the operations of one module, and those that its parents do right after it. Every parameter and buffer of
  the state_dict is in a part, under its un-split name, and is the model's own tensor; a tied one has the name under
  which the part uses it.
- Batches may have other sizes than the sample. Dropout follows train and eval as usual, except where it is in
  evaluation mode when the model is traced.
- A model that a trace cannot represent, as with batch norm in train mode or a user's own backward, is refused.
"""

# Theory of operation
#
#     forward       e = embed(x);  h = block(e);  return head(h + e)
#     parts         embed: x -> e       block: e -> h       head: h, e -> the output
#
# torch.export gives a graph whose nodes name the module that each operation belongs to:
#
#     model, sample -> _export_model -> _refuse_functions -> _simplify_graph -> _group_operations
#                   -> _make_recipe for each -> ModuleLink
#
# `_group_operations` cuts the row of nodes where a new module begins. A piece takes the nodes of earlier pieces that it
# uses, and gives its own nodes that later pieces use; `stage_graph` connects them by these names.
#
# A part's module is a `Recipe`, a list of operations as plain data, because it is pickled as any module is. A
# torch.fx.GraphModule would be traced anew where it is unpickled, and that changes `nn.Module` for all threads while it
# lasts. So a graph within a graph, such as a branch of `torch.cond`, is a `Recipe`, too.

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.registered_operators import OperatorName
from rpcbench.pipeline.stage_graph import ModuleLink


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference by name: to a value that was taken or computed before, or to a tensor or module of the recipe."""

    name: str


@dataclass(frozen=True, slots=True)
class TracedOp:
    """`name` = `target`(*args, **kwargs). The target: a function, the name of one in torch.ops, or a submodule."""

    name: str
    target: Callable[..., Any] | OperatorName | Ref
    args: Any
    kwargs: Any

    @staticmethod
    def from_node(node: fx.Node, found: Callable[[fx.Node], Any]) -> TracedOp:
        """Return the operation of a node. `found`: returns the replacement for each node among the arguments."""
        args, kwargs = replace_nodes(node.args, found), replace_nodes(node.kwargs, found)
        if str(node.target) == "flat_apply":  # a call of a Python function, its arguments flattened by torch.export
            function, spec, *flat = args
            args, kwargs = _pytree.tree_unflatten(flat, spec)
            return TracedOp(node.name, _pytree._retrieve_constant(function).func, args, kwargs)
        return TracedOp(node.name, _target_of_node(node), args, kwargs)


class Recipe(nn.Module):
    """A module that is called with the values `takes`, runs the steps and returns `made`, of any class that _pytree
    knows. `own`: path → parameter, buffer or module; those that are not in `state` are left out of the state_dict."""

    def __init__(
        self,
        takes: Sequence[str],
        steps: Sequence[TracedOp],
        made: Any,
        own: Mapping[str, Any],
        state: set[str],
    ) -> None:
        super().__init__()
        self._takes, self._steps, self._made, self._own = tuple(takes), tuple(steps), made, tuple(own)
        for path, value in own.items():
            self.register_value(path, value, path in state)

    def register_value(self, path: str, value: Any, persistent: bool) -> None:
        """Register a parameter, buffer or module under this path. `persistent`: in the state_dict."""
        *parents, name = path.split(".")
        module: nn.Module = self
        for parent in parents:  # the path of an un-split model has levels that this part lacks
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        if isinstance(value, nn.Module):
            module.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value, persistent)

    def may_change_inputs(self) -> bool:
        """Return whether a step may change a value that it gets. PipelineError if an operator is not there."""
        targets = [step.target.find_operator() for step in self._steps if isinstance(step.target, OperatorName)]
        return any(isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable for op in targets)

    def forward(self, *values: Any) -> Any:
        held = dict(zip(self._takes, values, strict=True))
        held.update((path, operator.attrgetter(path)(self)) for path in self._own)
        for step in self._steps:
            function = _resolve_function(step.target, held)
            held[step.name] = function(*_fill_references(step.args, held), **_fill_references(step.kwargs, held))
        return _pytree.tree_map_only(Ref, lambda ref: held[ref.name], self._made)


class Attention(nn.Module):
    """`scaled_dot_product_attention` with dropout in training mode only; a trace has the dropout of the sample."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(
        self, query: Any, key: Any, value: Any, mask: Any = None, _traced: float = 0.0, *rest: Any, **others: Any
    ) -> Any:
        dropout = self.dropout if self.training else 0.0
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout, *rest, **others)


def replace_nodes(value: Any, found: Callable[[fx.Node], Any]) -> Any:
    """Return a node's arguments with each node in them replaced by `found(node)`."""
    if isinstance(value, fx.Node):
        return found(value)
    return _map_items(value, lambda item: replace_nodes(item, found))


def _target_of_node(node: fx.Node) -> Callable[..., Any] | OperatorName | Ref:
    if node.op == "call_module":
        return Ref(str(node.target))
    function: Any = node.target
    if isinstance(function, torch._ops.OpOverload):
        return OperatorName.from_overload(function)
    if isinstance(function, torch._ops.HigherOrderOperator):
        return _IN_PLACE_OF.get(str(function), OperatorName(f"higher_order.{function}"))
    return function  # type: ignore[no-any-return]


def _with_grad_mode(enabled: bool, function: Callable[..., Any], *args: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return function(*args)


def _with_autocast(
    device: str, dtype: torch.dtype, enabled: bool, cached: bool | None, function: Callable[..., Any], *args: Any
) -> Any:
    with torch.autocast(device, dtype, enabled, cached):
        return function(*args)


# Replacements for two operators of torch, by the operator's name.
_IN_PLACE_OF: dict[str, Callable[..., Any]] = {
    "wrap_with_set_grad_enabled": _with_grad_mode,
    "wrap_with_autocast": _with_autocast,
}
"""torch's own would load its compiler on each worker."""


def _fill_references(value: Any, held: Mapping[str, Any]) -> Any:
    if isinstance(value, Ref):
        return held[value.name]
    return _map_items(value, lambda item: _fill_references(item, held))


def _map_items(value: Any, change: Callable[[Any], Any]) -> Any:
    # The containers that the arguments of an fx.Node may have.
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, tuple):
        return tuple(change(item) for item in value)
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    return slice(*map(change, (value.start, value.stop, value.step))) if isinstance(value, slice) else value


def _resolve_function(target: Callable[..., Any] | OperatorName | Ref, held: Mapping[str, Any]) -> Any:
    if isinstance(target, Ref):
        return held[target.name]
    return target.find_operator() if isinstance(target, OperatorName) else target


_BAKED = ("batch_norm", "instance_norm", "dropout", "rrelu")
"""Operations whose trace has the mode in which they were traced."""
_KEPT = ("torch._higher_order_ops.", "torch._functorch.")
"""Modules of torch with autograd Functions that the operations of a trace create anew."""


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A model's parts, in the order in which they run, and the names of its inputs. Made by `traced`."""

    model: nn.Module  # the whole one, for `Stages.check`
    links: tuple[ModuleLink, ...]
    inputs: tuple[str, ...]


@dataclass(slots=True)
class _TracedSegment:
    """Consecutive operations of the module `path` and of its parents."""

    path: str  # as "layers.2"
    nodes: list[fx.Node] = field(default_factory=list)


def traced(model: nn.Module, sample: Any) -> TracedModel:
    """Trace `model`, so that `split` can cut it wherever one of its modules begins.

        stages = split(traced(model, x[:4]), workers, at=["layers.2"])      # or balance="params", "time", ...
        print(stages.check(x[:4]))

    The forward must do the same for all values in its tensors. Dropout that is in evaluation mode now drops nothing
    later either. The model runs twice, and its output may be of any class that torch.utils._pytree knows.

    Args:
        model: a module with any forward.
        sample: its arguments: a tensor, a tuple of them, or a dict by the names of forward's arguments. Dimension 0
            counts the samples, two or more.

    Returns:
        The parts of the model, for `split`.

    Raises:
        PipelineError: where the model cannot be traced.
    """
    args, kwargs = model_arguments(sample)
    program = _export_model(model, args, kwargs)  # torch.export runs the model once, `_refuse_functions` again
    module = program.module(check_guards=False)  # they may refuse batches of other sizes
    assert isinstance(module, fx.GraphModule)
    _refuse_functions(model, args, kwargs, module.graph)
    for graph in [each for each in module.modules() if isinstance(each, fx.GraphModule)]:
        _simplify_graph(graph)
    inputs = tuple(node.target for node in module.graph.nodes if node.op == "placeholder")
    links = tuple(_make_links(model, module, program.call_spec.out_spec))
    _assign_unused(model, links)
    return TracedModel(model, links, inputs)


def model_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, positional and by keyword, that a model is called with for this batch."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def _export_model(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    for value in [*args, *kwargs.values()]:
        # torch.export takes sizes 0 and 1 as constants, so a sample of one would allow batches of one only.
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) < 2:
            raise PipelineError("the sample must be tensors of two samples or more: a tensor, a tuple, or a dict")
    batch: Any = {0: torch.export.Dim.DYNAMIC}
    shapes = dict.fromkeys(kwargs, batch) if kwargs else tuple(batch for _ in args)
    try:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:  # torch.export raises errors of many kinds
        raise PipelineError(
            f"{type(model).__name__} cannot be traced for batches of any size; torch.export reports: {error}"
        ) from error
    changed = list(program.graph_signature.buffers_to_mutate.values())
    if changed:
        raise PipelineError(f"the forward changes the buffer {changed[0]!r}: a traced model cannot. {_OTHERWISE}")
    return program


_OTHERWISE = "Give split() a list of modules instead (see `part`), or leave that module out"


def _refuse_functions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], graph: fx.Graph) -> None:
    """Raise PipelineError for a user's own backward: a trace has the operations of a Function's forward only. The model
    is run for this, because only the graph that autograd records shows its Functions."""
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.enable_grad():
        output = model(*map(_requiring_grad, args), **{name: _requiring_grad(value) for name, value in kwargs.items()})
    calls = [node for node in graph.nodes if "flat_apply" in str(node.target)]
    kept = {arg for node in calls for arg in node.args if isinstance(arg, str)}
    for function in _backward_functions(output):
        name = f"{function.__module__}.{function.__qualname__}"
        if name == "torch.utils.checkpoint.CheckpointFunction":
            raise PipelineError(
                "the forward has a torch.utils.checkpoint with use_reentrant=True, whose trace has no gradients: use "
                "use_reentrant=False, or leave it out and give Pipeline recompute='all'"
            )
        if name not in kept and not name.startswith(_KEPT):
            raise PipelineError(
                f"the forward has {name}, a torch.autograd.Function, whose backward a trace does not keep. {_OTHERWISE}"
            )


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values, which require gradients if their type allows it."""
    # A clone is no leaf, so the forward may change it in place.
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()).clone()


def _backward_functions(output: Any) -> Iterator[type]:
    """Yield the classes of all Functions whose backward a backward pass from `output` would run."""
    leaves = [leaf for leaf in _pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    waiting: list[Any] = [leaf.grad_fn for leaf in leaves]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            yield node._forward_cls  # type: ignore[attr-defined]
        waiting += [earlier for earlier, _ in node.next_functions]


def _simplify_graph(module: fx.GraphModule) -> None:
    """Remove checks of the trace's own assumptions, and make dropout a module, which follows train and eval."""
    graph = module.graph
    for node in list(graph.nodes):
        name = str(node.target)
        if node.op == "call_function" and "_assert" in name:  # of sizes, for example
            graph.erase_node(node)
        elif node.target is operator.getitem:
            node.args[0].append(node)  # only one of several values can go to another stage, not all of them
        elif node.target is torch.ops.aten.dropout.default and not node.args[2]:  # of a module in evaluation mode
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is torch.ops.aten.dropout.default:
            _replace_node(module, node, nn.Dropout(node.args[1]), node.args[:1])
        elif "scaled_dot_product" in name and any(isinstance(arg, float) and arg for arg in node.args[4:5]):
            _replace_node(module, node, Attention(node.args[4]), node.args)
        elif node.op == "call_function" and any(word in name for word in _BAKED):
            raise PipelineError(f"the forward has {name}, whose trace is of train mode only. {_OTHERWISE}")
    # The two calls of a nesting have no result that is used, but must both stay.
    graph.eliminate_dead_code(lambda node: node.is_impure() or bool(_nesting_change(node)))


def _replace_node(module: fx.GraphModule, node: fx.Node, other: nn.Module, args: tuple[Any, ...]) -> None:
    path = f"_{node.name}"
    module.add_submodule(path, other)
    with module.graph.inserting_before(node):
        call = module.graph.call_module(path, args, node.kwargs if args == node.args else {})
    call.meta = node.meta
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)


def _nesting_change(node: fx.Node) -> int:
    """Return the levels of `torch.vmap` and similar that this node enters (1) or leaves (-1); 0 for any other node."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _make_links(model: nn.Module, module: fx.GraphModule, spec: Any) -> Iterator[ModuleLink]:
    pieces = _group_operations(module.graph)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    outputs = _pytree.tree_leaves(output.args[0])
    names = _names_by_tensor(model)
    state = {path for paths in names.values() for path in paths}
    for number, piece in enumerate(pieces):
        last = number + 1 == len(pieces)
        # It gives nodes that later pieces use, and those that the model returns, which the last piece collects.
        later = {arg for other in pieces[number + 1 :] for node in other.nodes for arg in node.all_input_nodes}
        gives = [node for node in piece.nodes if node in later or (not last and node in outputs)]
        wanted = {arg for node in piece.nodes for arg in node.all_input_nodes}
        wanted.update(arg for arg in outputs if last and isinstance(arg, fx.Node))
        takes = [n for n in module.graph.nodes if n in wanted and n not in piece.nodes and n.op != "get_attr"]
        part = _make_recipe(
            module,
            piece.nodes,
            takes,
            outputs if last else tuple(gives),
            spec if last else None,
            state,
            partial(_name_of_parameter, module=module, piece=piece, names=names),
        )
        taken = tuple(str(n.target) if n.op == "placeholder" else n.name for n in takes)  # named as in forward
        yield ModuleLink(piece.path, part, taken, None if last else tuple(n.name for n in gives), "")


def _group_operations(graph: fx.Graph) -> list[_TracedSegment]:
    """Return the operations grouped by their module; those of a parent belong to the piece before them."""
    pieces: list[_TracedSegment] = []
    waiting: list[fx.Node] = []  # of the model itself, before its first module
    depth = 0  # levels of torch.vmap: one that is entered in a stage must be left there
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        path = _module_path(node) if not depth else pieces[-1].path if pieces else ""
        depth += _nesting_change(node)
        if not path and not pieces:
            waiting.append(node)
            continue
        # A parent's operation continues the piece of its child; any other module begins a piece.
        if path and (not pieces or not f"{pieces[-1].path}.".startswith(f"{path}.")):
            pieces.append(_TracedSegment(path, waiting))
            waiting = []
        pieces[-1].nodes.append(node)
    if not pieces:
        raise PipelineError("the model has no modules whose operations could be told apart, so it cannot be cut")
    return pieces


def _module_path(node: fx.Node) -> str:
    """Return the path of the module that an operation belongs to; "" for the model itself."""
    source: Any = node
    while source.target is operator.getitem:  # it has no module of its own
        source = source.args[0]
    stack = [path for path, _ in (source.meta.get("nn_module_stack") or {}).values()]
    path = stack[-1] if stack else ""
    # "block@1" is the second use of "block"; "_empty…": torch.export found no module
    return "" if path.startswith("_empty") else path.split("@")[0]


def _make_recipe(
    module: fx.GraphModule,
    nodes: Sequence[fx.Node],
    takes: Sequence[fx.Node],
    made: Any,
    spec: _pytree.TreeSpec | None = None,
    state: set[str] | None = None,
    named: Callable[[fx.Node], str] = lambda node: str(node.target),
) -> Recipe:
    """Return a module of these operations, with the model's own parameters, under the paths that `named` returns.
    PipelineError for an attribute that is not plain data, which could not be sent."""
    own: dict[str, Any] = {}

    def found(node: fx.Node) -> Any:
        if node.op != "get_attr":
            return Ref(node.name)
        value = _attribute_of_node(module, node)
        if isinstance(value, _pytree.TreeSpec):
            return value
        if isinstance(value, fx.GraphModule):
            value = _make_nested_recipe(value)
        elif not isinstance(value, torch.Tensor):
            raise PipelineError(f"the forward uses {node.target}, a {type(value).__name__}, in a trace. {_OTHERWISE}")
        path = named(node)
        own[path] = value
        return Ref(path)

    steps = [TracedOp.from_node(node, found) for node in nodes]
    returned = replace_nodes(made, found)
    if spec is not None:
        returned = _pytree.tree_unflatten(returned, spec)
    own.update((str(n.target), module.get_submodule(str(n.target))) for n in nodes if n.op == "call_module")
    return Recipe([node.name for node in takes], steps, returned, own, state or set())


def _make_nested_recipe(module: fx.GraphModule) -> Recipe:
    """Return the recipe of a graph within a graph, such as a branch of `torch.cond`."""
    nodes = list(module.graph.nodes)
    takes = [node for node in nodes if node.op == "placeholder"]
    return _make_recipe(module, [n for n in nodes if n.op.startswith("call_")], takes, nodes[-1].args[0])


def _name_of_parameter(
    node: fx.Node, module: fx.GraphModule, piece: _TracedSegment, names: Mapping[int, list[str]]
) -> str:
    """Return the un-split name of a parameter that is used here; of several names, the one within this module."""
    own = names.get(id(_attribute_of_node(module, node)), ())
    return next((name for name in own if name.startswith(f"{piece.path}.")), str(node.target))


def _attribute_of_node(module: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def _assign_unused(model: nn.Module, links: Sequence[ModuleLink]) -> None:
    """Give parameters and buffers that no part has, and further names of tied ones, to the nearest part."""
    states = [link.module.state_dict(keep_vars=True) for link in links]
    held = {name for state in states for name in state}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in held:
            continue
        # A tied tensor stays in the part that uses it; else the part whose path has most levels in common takes it.
        owners = [at for at, state in enumerate(states) if any(tensor is own for own in state.values())]
        nearest = max(owners or range(len(links)), key=lambda at, name=name: _count_common_levels(links[at].name, name))
        part = links[nearest].module
        assert isinstance(part, Recipe)
        part.register_value(name, tensor, persistent=True)


def _count_common_levels(one: str, other: str) -> int:
    """Return how many leading levels two paths have in common."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and buffer in the state_dict, by the tensor's identity."""
    found: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return found
