"""Who keeps what alive: the RRefs of all members as a table, for lesson 02."""

from __future__ import annotations

import time
from typing import Any

import rpcbench
import rpcbench.rpc as rpc
from rpcbench.agent import current

PATIENCE = 5.0


def references() -> None:
    """Print all RRefs of the cluster: the owner of each value, and each user with the line that made its reference.

    Goodbyes take a moment, so this waits until owners and users say the same; after 5 seconds it prints what is so.
    """
    found = settled()
    for leak in found:
        if not leak.held:
            print(f"RRef {leak.rref}: {leak.type or 'a value'} on {leak.owner}")
            for user in (user for user in found if user.held and user.rref == leak.rref):
                print(f"    used by {user.holders[0]}, {f'made at {user.site}' if user.site else 'came in a message'}")
    if not found:
        print("no RRef is alive")


def settled() -> list[Any]:
    """What all members say, once owners and users agree."""
    deadline = time.monotonic() + PATIENCE
    while True:
        found = [leak for name in ["notebook", *rpcbench.cluster().workers] for leak in rpc.rpc_sync(name, own)]
        counted, held = ({fork for leak in found if leak.held is side for fork in leak.forks} for side in (False, True))
        if counted == held or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def own() -> list[Any]:
    """What the member that runs this says."""
    return current.current().leaks()
