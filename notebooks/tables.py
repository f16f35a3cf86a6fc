"""The RRefs of all members as a table: which process keeps which value alive."""

from __future__ import annotations

import time
from typing import Any

import rpcbench
import rpcbench.rpc as rpc
from rpcbench.runtime import current
from rpcbench.runtime.checks import find_leaks

PATIENCE = 5.0


def references(wait: bool = True) -> None:
    """Print all RRefs of the cluster: the owner of each value, and its users, with the line that made the reference.

    Messages take a moment, so this waits until owners and users agree, 5 seconds at most; with `wait=False` not at all.
    """
    found = settled() if wait else every()
    held = {fork: leak for leak in found if leak.held for fork in leak.forks}
    for leak in found:
        if not leak.held:
            print(f"RRef {leak.rref}: {leak.type or 'a value'} on {leak.owner}")
            for fork, holder in zip(leak.forks, leak.holders, strict=True):
                print(f"    used by {holder}, {_how(held.get(fork))}")
    if not found:
        print("no RRef is alive")


def settled() -> list[Any]:
    """The RRefs of all members, once owners and users agree twice: a freed value drops its RRefs a moment later."""
    deadline = time.monotonic() + PATIENCE
    before: set[Any] | None = None
    while True:
        found = every()
        counted, held = ({fork for leak in found if leak.held is side for fork in leak.forks} for side in (False, True))
        if counted == held == before or time.monotonic() > deadline:
            return found
        before = counted
        time.sleep(0.02)


def every() -> list[Any]:
    """The RRefs that all members have now."""
    return [leak for name in ["notebook", *rpcbench.cluster().workers] for leak in rpc.rpc_sync(name, own)]


def _how(user: Any) -> str:
    if user is None:
        return "which has dropped it, but has not told the owner yet"
    return f"made at {user.site}" if user.site else "came in a message"


def own() -> list[Any]:
    """The RRefs of the member that runs this."""
    return find_leaks(current.current_agent())
