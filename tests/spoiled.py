"""Full disks and damaged files, for tests that write and read files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

DAMAGE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Limit each file of this process to `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def damaged(content: bytes, draw: Any) -> bytes:
    """Return the content truncated, or with some bytes changed, or both."""
    changed = bytearray(content[: draw(st.integers(0, len(content)))] if draw(st.booleans()) else content)
    places = st.tuples(st.integers(0, max(len(changed) - 1, 0)), st.integers(0, 255))
    for place, byte in draw(st.lists(places, max_size=4)) if changed else ():
        changed[place] = byte
    return bytes(changed)
