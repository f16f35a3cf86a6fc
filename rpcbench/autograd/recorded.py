"""What a worker keeps for one context, beside the tables of `protocol.backward`: graph, gradients, and passes on it."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from rpcbench.autograd.gradients import LeafGradients
from rpcbench.autograd.graph import Ends
from rpcbench.autograd.regions import LocalPass
from rpcbench.base.ids import Id
from rpcbench.serialization.tensor_types import Route

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
