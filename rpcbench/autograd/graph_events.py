"""What a worker keeps for each context, and what is told of it as rows of the table "graphs": gradients of which leaves
are held, and how many regions of a backward pass have run.

Guarantees
- While nobody listens nothing is looked at.
- A row is made when it is told: it is the context's last state, whichever threads change it; after its end None.
- A leaf is called as variables and shared objects do, "model.0.weight" or "w". Nothing of the user's runs for that:
  namespaces of plain objects are read as they stand, and what cannot be read so has no name.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from rpcbench.autograd.gradients import LeafGradients
from rpcbench.autograd.graph import Ends
from rpcbench.autograd.regions import LocalPass
from rpcbench.base.events import Row, Table
from rpcbench.base.ids import Id
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import shape_of
from rpcbench.serialization.tensor_types import Route

Named = Iterator[tuple[str, Tensor]]


class LeafNames:
    """Each leaf is looked for once. `shared`: gives the objects of this process that others have RRefs of."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, leaves: Iterable[Tensor]) -> list[str]:
        """A name for each, or ""."""
        leaves = list(leaves)
        unknown = [leaf for leaf in leaves if leaf not in self._known]
        if unknown:
            found = leaf_names(vars(sys.modules["__main__"]), self._shared())
            for leaf in unknown:
                self._known[leaf] = found.get(id(leaf), "")
        return [self._known[leaf] for leaf in leaves]


def leaf_names(variables: Mapping[str, Any], shared: Iterable[Any]) -> dict[int, str]:
    """id of a tensor → its name: that of a variable, or else its place in an object that is shared."""
    found: dict[int, str] = {}
    public = {name: value for name, value in dict(variables).items() if not name.startswith("_")}
    for name, tensor in _inside(public):
        found.setdefault(id(tensor), name)
    for value in shared:
        for name, tensor in _inside(_namespace(value)):
            found.setdefault(id(tensor), name)
    return found


def _inside(namespace: Mapping[str, Any]) -> Named:
    """Tensors of a namespace, and those of its modules."""
    for name, value in namespace.items():
        if Tensor in type(value).__mro__:
            yield name, value
        elif nn.Module in type(value).__mro__:
            yield from _parameters(value, f"{name}.")


def _parameters(module: Any, prefix: str) -> Named:
    own = _attributes(module)
    yield from ((prefix + name, tensor) for name, tensor in own.get("_parameters", {}).items() if tensor is not None)
    for name, inner in own.get("_modules", {}).items():
        if inner is not None:
            yield from _parameters(inner, f"{prefix}{name}.")


def _namespace(value: Any) -> dict[str, Any]:
    """Of an object that is shared; a tensor by itself has no name there."""
    kinds = type(value).__mro__
    return dict(_parameters(value, "")) if nn.Module in kinds else {} if Tensor in kinds else _attributes(value)


def _attributes(value: Any) -> dict[str, Any]:
    """The object's own dictionary, copied in one step, with no property or `__getattr__` of its class asked."""
    with contextlib.suppress(AttributeError):
        return dict(object.__getattribute__(value, "__dict__"))
    return {}


Grads = list["Tensor | None"]


class SentTensors(NamedTuple):
    """The edges of a sent message, and what they lead to where that is known already."""

    edges: list[GradientEdge | None]
    found: Ends | None


class Pass:
    """One backward pass, as far as it runs on this worker: what has come and waits, and whether a thread is at it."""

    __slots__ = ("busy", "local", "waiting")

    def __init__(self) -> None:
        self.local: LocalPass | None = None
        self.waiting: collections.deque[tuple[int, Grads]] = collections.deque()
        self.busy = False


class Recorded:
    """One context. Messages have the numbers that they have in the tables.

    `backs`: the ways of the gradients of recvs. `summed`: what was asked to be added here, and has been.
    """

    __slots__ = ("backs", "gradients", "passes", "recvs", "sends", "summed")

    def __init__(self) -> None:
        self.sends: dict[int, SentTensors] = {}
        self.recvs: dict[int, Any] = {}
        self.backs: dict[int, Route] = {}
        self.gradients = LeafGradients()
        self.passes: dict[Id, Pass] = {}
        self.summed: set[Id] = set()


MOST_LEAVES = 64


class GraphEvents:
    """`contexts`: those that are open here."""

    def __init__(self, agent: Agent, contexts: dict[int, Recorded]) -> None:
        self._bus = agent.bus
        self._contexts = contexts
        self._names = LeafNames(agent.values.present)
        agent.bus.register("graphs", self._table)

    def changed(self, kind: str, context: int) -> None:
        """Leaves or regions of a context are not what they were, or it is over."""
        if self._bus.listening:
            self._bus.note(kind, "graphs", str(context), partial(self._now, context))

    def _table(self) -> Table:
        rows = {str(context): self._row(context, kept) for context, kept in self._contexts.copy().items()}
        return {key: row for key, row in rows.items() if row is not None}

    def _now(self, context: int) -> Row | None:
        kept = self._contexts.get(context)
        return None if kept is None else self._row(context, kept)

    def _row(self, context: int, kept: Recorded) -> Row | None:
        leaves = kept.gradients.leaves()
        shown = list(itertools.islice(leaves, MOST_LEAVES))
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[no-untyped-call,unused-ignore]
            described = [_leaf(name, leaf) for name, leaf in zip(self._names.of(shown), shown, strict=True)]
        passes = [
            {"pass": str(walk), "regions": one.local.regions, "ran": one.local.ran}
            for walk, one in list(kept.passes.items())
            if one.local is not None
        ]
        if not leaves and not passes:
            return None
        return {"context": context, "leaves": described, "more": len(leaves) - len(shown), "passes": passes}


def _leaf(name: str, leaf: Tensor) -> dict[str, Any]:
    plain = leaf.layout is torch.strided and not leaf.is_nested
    shape = "nested" if leaf.is_nested else shape_of(leaf)
    return {"name": name, "shape": shape, "bytes": leaf.nbytes if plain else 0}
