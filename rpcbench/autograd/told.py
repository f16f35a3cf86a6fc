"""What this worker's own graph says of each context, as rows of the table "graphs": gradients of which leaves are held,
and how many regions of a backward pass have run.

Guarantees
- While nobody listens nothing is looked at.
- A row is made when it is told: it is the context's last state, whichever threads change it; after its end None.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rpcbench.autograd.names import Names
from rpcbench.autograd.recorded import Recorded
from rpcbench.base.events import Row, Table
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import shape_of

MOST_LEAVES = 64


class Told:
    """`contexts`: those that are open here."""

    def __init__(self, agent: Agent, contexts: dict[int, Recorded]) -> None:
        self._bus = agent.bus
        self._contexts = contexts
        self._names = Names(agent.values.present)
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
