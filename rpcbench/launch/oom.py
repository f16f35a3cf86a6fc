"""Whether the kernel has killed for want of memory: the only sign by which a SIGKILL can be told for its own."""

from __future__ import annotations

import contextlib
from pathlib import Path

_COUNTS = Path("/proc/vmstat")


def oom_kills() -> int:
    """How many processes of this host were killed for want of memory since it started; 0 where that is not known."""
    with contextlib.suppress(OSError):
        for line in _COUNTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
