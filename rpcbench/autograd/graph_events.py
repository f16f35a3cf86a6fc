"""One worker's record of each context, and its row in the table "graphs": leaves with gradients, regions that have run.

Guarantees
- Without an observer, nothing is examined.
- A row is made when it is reported: it is the last state of the context, whichever threads change it, or None.
- A leaf gets the name of a variable, or its place in a shared object: "w" or "model.0.weight". No user code runs for
  that: only the dictionaries of objects are read. A leaf that is not found there has no name.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils.weak import WeakTensorKeyDictionary

from rpcbench.autograd.gradients import LeafGradients
from rpcbench.autograd.graph import Ends
from rpcbench.autograd.regions import Grads, LocalPass
from rpcbench.base.ids import Id, Row, Table, row_of
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import shape_of
from rpcbench.serialization.tensor_types import Route

Named = Iterator[tuple[str, Tensor]]


class LeafNames:
    """The names of leaves; each leaf is looked for once. `shared` returns this process's values of RRefs."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._known: Any = WeakTensorKeyDictionary()  # leaf → name; weak, so that it keeps no tensor alive

    def of(self, leaves: Iterable[Tensor]) -> list[str]:
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
    for namespace in [public, *map(_namespace, shared)]:
        for name, tensor in _inside(namespace):
            found.setdefault(id(tensor), name)
    return found


def _inside(namespace: Mapping[str, Any]) -> Named:
    """Yield the tensors of a namespace, and those of its modules."""
    for name, value in namespace.items():  # `type(value)`, not isinstance, which would read a user's `__class__`
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
    """Return the namespace of a shared object; a tensor by itself has none."""
    kinds = type(value).__mro__
    return dict(_parameters(value, "")) if nn.Module in kinds else {} if Tensor in kinds else _attributes(value)


def _attributes(value: Any) -> dict[str, Any]:
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


MOST_LEAVES = 64  # in one row


class GraphEvents:
    """Reports changes of `contexts`, the records of open contexts, as rows of the table "graphs"."""

    def __init__(self, agent: Agent, contexts: dict[int, Recorded]) -> None:
        self._bus = agent.bus
        self._contexts = contexts
        self._names = LeafNames(agent.values.present)
        agent.bus.register("graphs", self._table)

    def changed(self, kind: str, context: int) -> None:
        """Report a change of the leaves or the regions of a context, or its end."""
        if self._bus.listening:
            self._bus.note(kind, "graphs", str(context), partial(row_of, self._contexts, context, self._row))

    def _table(self) -> Table:
        rows = {str(context): self._row(context, kept) for context, kept in self._contexts.copy().items()}
        return {key: row for key, row in rows.items() if row is not None}

    def _row(self, context: int, kept: Recorded) -> Row | None:
        leaves = kept.gradients.leaves()
        shown = leaves[:MOST_LEAVES]
        # A subclass of Tensor may override `shape` and the like, which would run user code.
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
