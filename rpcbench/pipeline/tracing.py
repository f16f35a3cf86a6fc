"""A model of any forward as a row of parts: traced by torch.export, and taken apart at the borders of its modules.

    forward       e = embed(x);  h = block(e);  return head(h + e)
    parts         embed: x → e         block: e → h         head: h, e → the output

Guarantees
- A part has the operations of one module, and those that its parents do right after it. Every parameter that is used
  has a part, under its un-split name, and is the model's own; one that is tied has the name of where it is used.
- Batches may have other sizes than the sample; dropout follows train and eval as ever, but where it is in evaluation
  mode when the model is traced.
- What tracing cannot keep true, such as batch norm in train mode, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree

from rpcbench.pipeline.links import Link
from rpcbench.pipeline.recipe import Recipe, Step, plain
from rpcbench.words.errors import PipelineError

_BAKED = ("batch_norm", "instance_norm", "dropout", "rrelu")
"""Operations whose trace has the mode they were traced in."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A model's parts, in the order in which they run, and the names of its inputs. Made by `traced`."""

    model: nn.Module
    links: tuple[Link, ...]
    inputs: tuple[str, ...]


@dataclass(slots=True)
class _Piece:
    """Operations in a row, of the module `path` and of its parents."""

    path: str
    nodes: list[fx.Node] = field(default_factory=list)


def traced(model: nn.Module, sample: Any) -> Traced:
    """`model`, to be cut by `split` wherever one of its modules begins.

        stages = split(traced(model, x[:4]), workers, at=["layers.2"])      # or balance="params", "time", ...
        print(stages.check(x[:4]))

    `sample`: what the model is called with: a tensor, a tuple of them, or a dict by the names of forward's arguments;
    dimension 0 counts the samples, two or more. The forward must do the same whatever the values in its tensors are.
    Parameters that it does not use are in no part. Dropout that is in evaluation mode drops nothing, then or later.
    PipelineError where it cannot be traced.
    """
    args, kwargs = (
        ((), sample) if isinstance(sample, dict) else (sample if isinstance(sample, tuple) else (sample,), {})
    )
    program = _exported(model, args, kwargs)
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    _simplify(module)
    inputs = tuple(node.target for node in module.graph.nodes if node.op == "placeholder")
    return Traced(model, tuple(_links(model, module, program.call_spec.out_spec)), inputs)


def call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a model is called with for this batch."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    for value in [*args, *kwargs.values()]:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) < 2:
            raise PipelineError("the sample must be tensors of two samples or more: a tensor, a tuple, or a dict")
    batch: Any = {0: torch.export.Dim.DYNAMIC}
    shapes = dict.fromkeys(kwargs, batch) if kwargs else tuple(batch for _ in args)
    try:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise PipelineError(
            f"{type(model).__name__} cannot be traced for batches of any size; torch.export says: {error}"
        ) from error
    changed = list(program.graph_signature.buffers_to_mutate.values())
    if changed:
        raise PipelineError(f"the forward changes the buffer {changed[0]!r}: a traced model cannot. {_OTHERWISE}")
    return program


_OTHERWISE = "Give split() a list of modules instead (see `part`), or leave that module out"


def _simplify(module: fx.GraphModule) -> None:
    """Without what checks the trace's own assumptions; dropout as a module, which knows train from eval."""
    graph = module.graph
    for node in list(graph.nodes):
        name = str(node.target)
        if node.op == "call_function" and "_assert" in name:
            graph.erase_node(node)
        elif node.target is torch.ops.aten.dropout.default and not node.args[2]:  # of a module in evaluation mode
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is torch.ops.aten.dropout.default:
            path = f"_{node.name}"
            module.add_submodule(path, nn.Dropout(node.args[1]))
            with graph.inserting_before(node):
                other = graph.call_module(path, (node.args[0],))
            other.meta = node.meta
            node.replace_all_uses_with(other)
            graph.erase_node(node)
        elif node.op == "call_function" and (any(word in name for word in _BAKED) or _drops(node)):
            raise PipelineError(f"the forward has {name}, whose trace is of train mode only. {_OTHERWISE}")
    graph.eliminate_dead_code()


def _drops(node: fx.Node) -> bool:
    """Attention with dropout."""
    return "scaled_dot_product" in str(node.target) and any(isinstance(arg, float) and arg for arg in node.args[4:5])


def _links(model: nn.Module, module: fx.GraphModule, spec: Any) -> Iterator[Link]:
    pieces = _pieces(module.graph)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    outputs = _pytree.tree_leaves(output.args[0])
    names = _names(model)
    for number, piece in enumerate(pieces):
        last = number + 1 == len(pieces)
        later = {arg for other in pieces[number + 1 :] for node in other.nodes for arg in node.all_input_nodes}
        gives = [node for node in piece.nodes if node in later or (not last and node in outputs)]
        wanted = {arg for node in piece.nodes for arg in node.all_input_nodes}
        wanted.update(arg for arg in outputs if last and isinstance(arg, fx.Node))
        takes = [n for n in module.graph.nodes if n in wanted and n not in piece.nodes and n.op != "get_attr"]
        made: Any = _pytree.tree_unflatten(outputs, spec) if last else tuple(gives)
        part = _part(piece, takes, made, module, names)
        taken = tuple(str(n.target) if n.op == "placeholder" else n.name for n in takes)  # as forward calls them
        yield Link(piece.path, part, taken, None if last else tuple(n.name for n in gives), "")


def _pieces(graph: fx.Graph) -> list[_Piece]:
    """The operations, by the module they are of; what a parent does goes with what comes before it."""
    pieces: list[_Piece] = []
    waiting: list[fx.Node] = []
    for node in graph.nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        path = _path(node)
        if not path and not pieces:
            waiting.append(node)
            continue
        if path and (not pieces or not f"{pieces[-1].path}.".startswith(f"{path}.")):
            pieces.append(_Piece(path, waiting))
            waiting = []
        pieces[-1].nodes.append(node)
    if not pieces:
        raise PipelineError("the model has no modules whose operations could be told apart, so it cannot be cut")
    return pieces


def _path(node: fx.Node) -> str:
    """The module that an operation is of; "" for the model itself."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    path = stack[-1] if stack else ""
    return "" if path.startswith("_empty") else path.split("@")[0]


def _part(
    piece: _Piece, takes: Sequence[fx.Node], made: Any, module: fx.GraphModule, names: dict[int, list[str]]
) -> Recipe:
    """A module of these operations, with the model's own parameters."""
    own: dict[str, Any] = {}

    def name(node: fx.Node) -> str:
        if node.op != "get_attr":
            return node.name
        value = _attribute(module, str(node.target))
        path = next((n for n in names.get(id(value), ()) if n.startswith(f"{piece.path}.")), str(node.target))
        own[path] = value
        return path

    steps = [Step.of(node, name) for node in piece.nodes]
    returned = plain(made, name)
    own.update((str(n.target), module.get_submodule(str(n.target))) for n in piece.nodes if n.op == "call_module")
    state = {path for paths in names.values() for path in paths}
    return Recipe([node.name for node in takes], steps, returned, own, state)


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Parameters and buffers that belong to the state, by identity, with all names they have."""
    found: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return found
