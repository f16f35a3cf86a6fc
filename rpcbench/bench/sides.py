"""Who can be measured against: by name, the module behind it, what pip installs, and which workloads it can do.

A module is an RPC module in torch's form, or one of ours that puts another runtime behind the names of one: its
`join(rank, url)` gives an object with those names.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

from rpcbench.base.errors import RpcError

CALLS, RREFS, TRAINING, WORLDS = "calls", "rrefs", "training", "worlds"
_EVERYTHING = frozenset({CALLS, RREFS, TRAINING, WORLDS})


class Known(NamedTuple):
    """`imports`: the package that must be there; `pip`: what installs it; `goals`: those of the table are about it."""

    module: str
    imports: str
    pip: str
    does: frozenset[str] = _EVERYTHING
    goals: bool = False


OTHERS = {
    "torch": Known("torch.distributed.rpc", "torch", "torch", goals=True),
    "ray": Known("rpcbench.bench.ray_side", "ray", "ray", frozenset({CALLS, RREFS})),
    "monarch": Known("rpcbench.bench.monarch_side", "monarch", "torchmonarch", frozenset({CALLS})),
}
_DOES = {known.module: known.does for known in OTHERS.values()}


def module_of(name: str) -> str:
    """The module of a side. RpcError, with the command that helps, where it is not installed."""
    known = OTHERS[name]
    if importlib.util.find_spec(known.imports) is None:
        raise RpcError(f"{name} is not installed here: pip install {known.pip}")
    return known.module


def has_goals(name: str) -> bool:
    """Whether the goals of the table are about that side."""
    return name not in OTHERS or OTHERS[name].goals


def does(module: str, what: str) -> bool:
    """Whether that side can do such work."""
    return what in _DOES.get(module, _EVERYTHING)
