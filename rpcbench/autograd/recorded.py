"""What a worker keeps for one context, beside the tables of `protocol.contexts`: graph, gradients, and passes on it."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from rpcbench.autograd.gradients import LeafGradients
from rpcbench.autograd.graph import Ends
from rpcbench.autograd.regions import LocalPass
from rpcbench.wire.devices import Route
from rpcbench.words.ids import Id

Grads = list["Tensor | None"]


class SentTensors(NamedTuple):
    """The edges of a sent message, and what they lead to where that is known already."""

    edges: list[GradientEdge | None]
    found: Ends | None


@dataclass(slots=True, eq=False)
class Pass:
    """One backward pass, as far as it runs on this worker: what has come and waits, and whether a thread is at it."""

    local: LocalPass | None = None
    waiting: collections.deque[tuple[int, Grads]] = field(default_factory=collections.deque)
    busy: bool = False


@dataclass(slots=True, eq=False)
class Recorded:
    """One context. Messages have the numbers that they have in the tables."""

    sends: dict[int, SentTensors] = field(default_factory=dict)
    recvs: dict[int, Any] = field(default_factory=dict)
    backs: dict[int, Route] = field(default_factory=dict)  # the ways of the gradients of recvs
    gradients: LeafGradients = field(default_factory=LeafGradients)
    passes: dict[Id, Pass] = field(default_factory=dict)
    summed: set[Id] = field(default_factory=set)
    """What was asked to be added here, and has been."""
