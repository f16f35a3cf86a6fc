"""Whether this machine has room for so many workers: said before they start, as afterwards all is merely slow.

The memory a worker needs is a rough figure, that of one which has run a few small cells; programs need more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil

from rpcbench.base.errors import RpcError, counted

DESCRIPTORS = 6
"""Files that this process opens for each worker, about: sockets, shared memory, bells."""
EACH = {"fork": 60 << 20, "spawn": 300 << 20, "kernel": 300 << 20}
_GB = 1 << 30


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_descriptors(n: int) -> None:
    """RpcError where this process may not open as many files as the connections to `n` more workers need."""
    if not hasattr(psutil, "RLIMIT_NOFILE"):  # Windows knows no such limit, and macOS does not tell
        return
    process = psutil.Process()
    left = process.rlimit(psutil.RLIMIT_NOFILE)[0] - process.num_fds()
    if left < n * DESCRIPTORS:
        raise RpcError(
            f"Too many open files: to start {counted(n, 'worker')} opens about {n * DESCRIPTORS} in this process, and "
            f"it may open {max(0, left)} more; allow more with `ulimit -n` before it starts, or close some"
        )


def complaints(n: int, mode: str) -> Iterator[str]:
    """A sentence for each thing that `n` workers, started by "fork" or "spawn" or as a "kernel", have too little of;
    none of workers started in another way, which may be elsewhere."""
    if mode not in EACH:
        return
    there = cores()
    if n > there:
        yield f"{counted(n, 'worker')} on {counted(there, 'core')}: when all compute, they take turns."
    free, needed = psutil.virtual_memory().available, n * EACH[mode]
    if needed > free:
        many = f"{counted(n, 'worker')} need{'s' if n == 1 else ''}"
        room = f"there is room for {free // EACH[mode] or 'none'}"
        yield f"{many} about {needed / _GB:.1f} GB of memory, and {free / _GB:.1f} GB are free: {room}."
