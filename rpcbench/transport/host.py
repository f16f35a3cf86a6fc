"""Which host this is: two processes with one host identity share a kernel and its network.

Among them the end of a process is always noticed, so silence means nothing. RPCBENCH_HOST_ID overrides what is found
out, for containers that share these and should count as several hosts, or the other way round.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import uuid
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_id() -> str:
    """The same on all processes of one host, until it starts again."""
    return os.environ.get("RPCBENCH_HOST_ID") or _found()


@functools.cache
def _found() -> str:
    linux = _BOOT.exists()
    parts = [_BOOT.read_text(), str(_NETWORK.readlink())] if linux else [platform.node(), str(uuid.getnode())]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
