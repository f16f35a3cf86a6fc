"""One worker's record of each context, and its row in the table "graphs": the picture of what is local of a context.

Guarantees
- Without an observer, nothing is examined: each method is one test, and no node of a graph is looked at.
- An error of the watching is logged and ends here: messages and passes go on.
- A row is made when it is reported: it is the last state of the context, whichever threads change it, or None. The rows
  of the last contexts that were released here stay for a while, so that the end of a short one can be seen.
- A leaf gets the name of a variable, or its place in a shared object: "w" or "model.0.weight". No user code runs for
  that: only the dictionaries of objects are read. A leaf that is not found there has no name.
"""

# The row. All fields but the first four are there only for what happened while somebody watched.
#
#     leaves, more     the leaves that hold gradients: name, shape and bytes of each; how many are not listed
#     gradients        how many leaves hold one
#     passes           of each backward pass that runs: its number of regions, and how many have run
#     made, ended      seconds of this member's clock; `ended` is None until the release
#     sends, recvs     each message: its peer; of a send also its label, shape, bytes, and `back`: when a gradient came
#     parts            of the local graph, in the order of the forward (below)
#     step, stages     in a pipeline: the number of the step, and the modules of each stage here
#
# A part is the set of operations that lead to the same sends, so it runs as one region if all of these get gradients:
#
#     recv 7 ── Linear ── Relu ──┬── Sum ──> send 8       part 1: recv 7, Linear, Relu   for sends 8 and 9
#                                └── Mul ──> send 9       part 2: Sum   for 8            part 3: Mul   for 9
#
# `sends` of a part are numbers of messages, or -1 for the roots of a pass. The graph below a send is walked when the
# message is sent, and the one below the roots when backward begins: no message says before which tensors will be roots.
# Of a larger graph than MOST_NODES only the recvs are known, once backward begins; its `count` is None. `ran` of a part
# holds nothing, the time when its region began, or that and the time when it had run. Operations that only reshape are
# left out. A walk takes some 5 µs for a node, on the thread that sends.

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from rpcbench.autograd.gradients import LeafGradients
from rpcbench.autograd.graph import Ends, Reach, find_ends_within, is_leaf, is_recv, leaf_of
from rpcbench.autograd.regions import Grads, LocalPass, Spans
from rpcbench.base.ids import Id, Row, Table
from rpcbench.protocol.backward import Sent
from rpcbench.runtime.events import Bystander, EventLog
from rpcbench.runtime.handles import shape_of
from rpcbench.runtime.values import ObjectStore
from rpcbench.serialization.tensor_types import Route

Named = Iterator[tuple[str, Tensor]]


class LeafNames:
    """The names of leaves; each leaf is looked for once. `shared` returns this process's values of RRefs."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._known: Any = WeakTensorKeyDictionary()  # leaf → name; weak, so that it keeps no tensor alive

    def names_of(self, leaves: Iterable[Tensor]) -> list[str]:
        """Return a name for each leaf, or ""."""
        leaves = list(leaves)
        unknown = [leaf for leaf in leaves if leaf not in self._known]
        if unknown:
            found = leaf_names(vars(sys.modules["__main__"]), self._shared())
            for leaf in unknown:
                self._known[leaf] = found.get(id(leaf), "")
        return [self._known[leaf] for leaf in leaves]


def leaf_names(variables: Mapping[str, Any], shared: Iterable[Any]) -> dict[int, str]:
    """Return names by id of tensor: the name of a variable, or else the place in a shared object."""
    found: dict[int, str] = {}
    # A copy made in one step: other threads may define variables meanwhile. IPython's own names begin with "_".
    public = {name: value for name, value in dict(variables).items() if not name.startswith("_")}
    for namespace in [public, *map(_namespace_of, shared)]:
        for name, tensor in _tensors_inside(namespace):
            found.setdefault(id(tensor), name)
    return found


def _tensors_inside(namespace: Mapping[str, Any]) -> Named:
    """Yield the tensors of a namespace, and those of its modules."""
    for name, value in namespace.items():  # `type(value)`, not isinstance, which would read a user's `__class__`
        if Tensor in type(value).__mro__:
            yield name, value
        elif nn.Module in type(value).__mro__:
            yield from _iterate_parameters(value, f"{name}.")


def _iterate_parameters(module: Any, prefix: str) -> Named:
    own = _attributes_of(module)
    yield from ((prefix + name, tensor) for name, tensor in own.get("_parameters", {}).items() if tensor is not None)
    for name, inner in own.get("_modules", {}).items():
        if inner is not None:
            yield from _iterate_parameters(inner, f"{prefix}{name}.")


def _namespace_of(value: Any) -> dict[str, Any]:
    """Return the namespace of a shared object; a tensor by itself has none."""
    kinds = type(value).__mro__
    return (
        dict(_iterate_parameters(value, "")) if nn.Module in kinds else {} if Tensor in kinds else _attributes_of(value)
    )


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return a copy of the object's own dictionary, without running a property or `__getattr__` of its class."""
    with contextlib.suppress(AttributeError):
        return dict(object.__getattribute__(value, "__dict__"))
    return {}


class SentTensors(NamedTuple):
    """The edges of a sent message, and their ends."""

    edges: Sequence[GradientEdge | None]
    found: Ends | None  # None: not searched yet


@dataclass(slots=True)
class Pass:
    """This worker's part of one backward pass."""

    local: LocalPass | None = None  # planned when the first gradients arrive
    waiting: deque[tuple[int, Grads]] = field(default_factory=deque)  # gradients that have arrived: by send
    busy: bool = False  # a thread runs the pass


@dataclass(slots=True)
class Recorded:
    """The record of one context, by the numbers of its messages."""

    sends: dict[int, SentTensors] = field(default_factory=dict)
    recvs: dict[int, Any] = field(default_factory=dict)  # the recv nodes
    backs: dict[int, Route] = field(default_factory=dict)  # routes (devices) of the gradients of recvs
    gradients: LeafGradients = field(default_factory=LeafGradients)
    passes: dict[Id, Pass] = field(default_factory=dict)
    summed: set[Id] = field(default_factory=set)  # requests of `accumulate` that have been carried out
    seen: SeenGraph | None = None  # made while somebody watches


MOST_LEAVES = 64  # in one row
MOST_MESSAGES = 64  # in the row of an open context
MOST_NODES = 1000  # of the graph below one message
MOST_OPS = 24  # names in one part
KEPT = 2  # released contexts
_GRADIENT = re.compile(r"Backward\d*$")
_QUIET = frozenset(("leaf", "T", "View", "UnsafeView", "Transpose", "Permute", "Expand", "Squeeze", "Unsqueeze"))
_PLAIN_NAMES = {"Convolution": "Conv", "NativeLayerNorm": "LayerNorm", "NativeBatchNorm": "BatchNorm"}


class SeenGraph:
    """The picture of one context, while somebody watches."""

    def __init__(self) -> None:
        self.made = time.monotonic()
        self.sends: dict[int, Row] = {}
        self.recvs: dict[int, int] = {}  # message → sender
        self.stages: Row = {}  # in a pipeline: fields of the row
        self.passes: list[tuple[tuple[int, ...], Spans]] = []  # roots, in the order of the bits, and regions that ran
        self._roots: set[int] = set()  # sends, or -1, below which the graph was walked
        self._large: set[int] = set()  # those with a graph that is too large for that
        # In the order of the forward: the roots that a node is below, its name or "", and the message of a recv.
        self._nodes: dict[Any, tuple[frozenset[int], str, int | None]] = {}

    def add_nodes_below(self, root: int, sent: SentTensors, names: LeafNames) -> None:
        """Note the nodes below a send or the roots, once; of a large graph, when they are known, only its recvs."""
        if root in self._roots or ((large := find_ends_within(sent.edges, MOST_NODES) is None) and sent.found is None):
            return
        self._roots.add(root)
        if large:
            self._large.add(root)
        # In `Reach` children come first, so this is an order of the forward.
        below = [*sent.found.recvs.values()] if large and sent.found else [*Reach(sent.edges).below]
        leaves = {node: leaf_of(node) for node in below if is_leaf(node)}
        called = dict(zip(leaves, names.names_of(leaves.values()), strict=True))
        for node in below:
            roots, name, recv = self._nodes.get(node) or (
                frozenset(),
                _name_operation(node, called),
                _message_of_recv(node),
            )
            self._nodes[node] = roots | {root}, name, recv

    def part_rows(self) -> list[Row]:
        """Return the parts of the local graph, each as a row."""
        found: dict[frozenset[int], list[tuple[str, int | None]]] = {}
        for roots, name, recv in list(self._nodes.values()):
            found.setdefault(roots, []).append((name, recv))
        for root in list(self._large):  # without a recv
            if not any(root in roots for roots in found):
                found[frozenset((root,))] = []
        shown = [roots for roots, nodes in found.items() if any(map(_is_shown, nodes)) or roots & self._large]
        # Weights that several operations share are no part of their own; a leaf that is sent as it is, is one.
        shown += [roots for roots in found if not all(any(root in other for other in shown) for root in roots)]
        return [self._row_of_part(roots, nodes) for roots, nodes in found.items() if roots in shown]

    def _row_of_part(self, roots: frozenset[int], nodes: list[tuple[str, int | None]]) -> Row:
        names = [name for name, _ in nodes if name]
        # Leaves and changes of layout are shown only where nothing else is.
        ops = [name for name in names if name.partition(" ")[0] not in _QUIET] or names
        recvs = [recv for _, recv in nodes if recv is not None]
        count = None if roots & self._large else len(ops)
        ran: list[float] = []
        for order, spans in list(self.passes):
            ran = spans.get(sum(1 << place for place, root in enumerate(order) if root in roots), ran)
        return {"sends": sorted(roots), "recvs": recvs, "ops": ops[:MOST_OPS], "count": count, "ran": list(ran)}

    def row_fields(self, ended: float | None) -> Row:
        """Return the fields of the row that are about messages and parts."""
        most = MOST_MESSAGES if ended is None else None
        sends = [{"message": message, **send} for message, send in list(self.sends.items())[:most]]
        recvs = [{"message": message, "from": source} for message, source in list(self.recvs.items())[:most]]
        times = {"made": self.made, "ended": ended}
        return {**times, "sends": sends, "recvs": recvs, "parts": self.part_rows(), **self.stages}


def _name_operation(node: Any, leaves: Mapping[Any, str]) -> str:
    """Return the name of an operation: "Linear net.0" with the place of its module if that is known."""
    if is_recv(node):
        return ""
    if node in leaves:
        return f"leaf {leaves[node]}".rstrip()
    name = _GRADIENT.sub("", node.name().rpartition("::")[2])
    below = [child for child, _ in node.next_functions if child is not None]
    turned = [child.next_functions[0][0] for child in below if child.name() == "TBackward0"]  # a weight of Linear
    if name in ("Addmm", "Mm") and any(child in leaves for child in turned):
        name = "Linear"
    own = [leaf for child in [*turned, *below] if isinstance(leaf := leaves.get(child), str) and "." in leaf]
    module = own[0].rpartition(".")[0] if own else ""
    return f"{_PLAIN_NAMES.get(name, name)} {module}".rstrip()


def _is_shown(node: tuple[str, int | None]) -> bool:
    """Return whether a node is a recv, or an operation that does more than reshape."""
    name, recv = node
    return recv is not None or (bool(name) and name.partition(" ")[0] not in _QUIET)


def _message_of_recv(node: Any) -> int | None:
    return int(node.key) if is_recv(node) else None


P = ParamSpec("P")
T = TypeVar("T")


def _while_watched(
    deed: Callable[Concatenate[GraphEvents, P], T],
) -> Callable[Concatenate[GraphEvents, P], T | None]:
    """Return a method that does this while somebody watches, and otherwise nothing; None after an error, too."""

    @wraps(deed)
    def aside(self: GraphEvents, /, *args: P.args, **options: P.kwargs) -> T | None:
        if self._bus.listening:
            with self._bystander:
                return deed(self, *args, **options)
        return None

    return aside


class GraphEvents:
    """Reports changes of `contexts`, the records of open contexts, as rows of the table "graphs"."""

    def __init__(self, bus: EventLog, values: ObjectStore, contexts: dict[int, Recorded]) -> None:
        self._bus = bus
        self._bystander = Bystander("backward passes")
        self._contexts = contexts
        self._past: Table = {}  # the last rows of released contexts, oldest first
        self._names = LeafNames(values.present_values)
        bus.register_table("graphs", self._context_table)

    @_while_watched
    def report_change(self, kind: str, context: int) -> None:
        """Report a change of the leaves, the messages or the regions of a context, or its end."""
        self._bus.record_change(kind, "graphs", str(context), partial(self._current_row, context))

    @_while_watched
    def message_sent(
        self, context: int, message: int, sent: Sent, tensors: Sequence[Tensor] = (), kept: SentTensors | None = None
    ) -> None:
        """Note a message that was sent, with its tensors, and their graph where that is known."""
        if (seen := self._graph_of_context(context)) is not None:
            seen.sends[message] = {"to": sent.to, "label": sent.label, **_size_fields(tensors), "back": None}
            if kept is not None:
                seen.add_nodes_below(message, kept, self._names)
            self.report_change("MessageSent", context)

    @_while_watched
    def send_withdrawn(self, context: int, message: int) -> None:
        """Take a message back that was not sent after all."""
        if (seen := self._graph_of_context(context)) is not None:
            seen.sends.pop(message, None)

    @_while_watched
    def message_received(self, context: int, message: int, source: int) -> None:
        if (seen := self._graph_of_context(context)) is not None:
            seen.recvs[message] = source
            self.report_change("MessageReceived", context)

    @_while_watched
    def step_began(self, context: int | None, step: int, modules: Mapping[int, nn.Module]) -> None:
        """Note that a context is that of a pipeline's step, with the stages of this worker."""
        if (seen := self._graph_of_context(context)) is not None:
            stages = {str(stage): _module_names(module) for stage, module in modules.items()}
            seen.stages = {"step": step, "stages": stages}

    @_while_watched
    def pass_planned(self, context: int, roots: Mapping[int, SentTensors]) -> Spans | None:
        """Note that a pass begins here with these roots; return where to note the regions that run."""
        if (seen := self._graph_of_context(context)) is None:
            return None
        spans = Spans()
        for root, one in roots.items():
            seen.add_nodes_below(root, one, self._names)
        seen.passes.append((tuple(roots), spans))
        return spans

    @_while_watched
    def gradients_arrived(self, context: int, message: int) -> None:
        """Note that the gradients of a message, or of the roots, have come and will run."""
        if (seen := self._graph_of_context(context)) is not None:
            if message in seen.sends:
                seen.sends[message] = {**seen.sends[message], "back": time.monotonic()}
            self.report_change("GradientsCame", context)

    def context_dropped(self, context: int, kept: Recorded | None) -> None:
        """Report the end of a context here; its last row stays until some more have ended."""
        if not self._bus.listening:
            self._past.clear()
        self._keep_last_row(context, kept)

    @_while_watched
    def _keep_last_row(self, context: int, kept: Recorded | None) -> None:
        """Keep the last row of a context that has ended, in place of an older one."""
        if kept is not None and kept.seen is not None:
            self._past[str(context)] = {
                **self._make_row(context, kept),
                "passes": [],
                **kept.seen.row_fields(time.monotonic()),
            }
        old = [*self._past][:-KEPT]
        for key in old:
            self._past.pop(key, None)
        for key in {str(context), *old}:
            self.report_change("GraphDropped", int(key))

    def _graph_of_context(self, context: int | None) -> SeenGraph | None:
        """Return the picture of an open context, made if it is new; None if there is none."""
        if (kept := self._contexts.get(context)) is None:  # type: ignore[arg-type]
            return None
        if kept.seen is None:
            kept.seen = SeenGraph()
        return kept.seen

    def _context_table(self) -> Table:
        rows = {str(context): self._current_row(context) for context in [*self._contexts]}
        return {**self._past, **{key: row for key, row in rows.items() if row is not None}}

    def _current_row(self, context: int) -> Row | None:
        """Return the row in its present state; None for a context without anything to tell."""
        kept = self._contexts.get(context)
        if kept is None:
            return self._past.get(str(context))
        row = self._make_row(context, kept)
        if kept.seen is not None:
            return {**row, **kept.seen.row_fields(None)}
        return row if row["leaves"] or row["passes"] else None

    def _make_row(self, context: int, kept: Recorded) -> Row:
        leaves = kept.gradients.leaves_with_gradient()
        shown = leaves[:MOST_LEAVES]
        # A subclass of Tensor may override `shape` and the like, which would run user code.
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
            described = [
                _leaf_fields(name, leaf) for name, leaf in zip(self._names.names_of(shown), shown, strict=True)
            ]
        passes = [
            {"pass": str(pass_id), "regions": one.local.regions, "ran": one.local.ran}
            for pass_id, one in list(kept.passes.items())
            if one.local is not None
        ]
        more = len(leaves) - len(shown)
        return {"context": context, "leaves": described, "more": more, "gradients": len(leaves), "passes": passes}


def _module_names(module: nn.Module) -> list[str]:
    """Return the classes of the modules of a stage, in order."""
    return [type(inner).__name__ for inner in module.children()][:MOST_OPS] or [type(module).__name__]


def _size_fields(tensors: Sequence[Tensor]) -> Row:
    """Return shapes, as "[4, 2] and 3 more", and bytes of the tensors that require grad."""
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
        found = [_leaf_fields("", tensor) for tensor in tensors if tensor.requires_grad]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return {"shape": found[0]["shape"] + more if found else "", "bytes": sum(one["bytes"] for one in found)}


def _leaf_fields(name: str, leaf: Tensor) -> dict[str, Any]:
    plain = leaf.layout is torch.strided and not leaf.is_nested
    shape = "nested" if leaf.is_nested else shape_of(leaf)
    return {"name": name, "shape": shape, "bytes": leaf.nbytes if plain else 0}
