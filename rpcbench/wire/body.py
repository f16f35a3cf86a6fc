"""User data on the wire: a pickle with numbered holes, the table of its tensors, and their raw bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Body(NamedTuple):
    """Opaque to everything but the codec.

    `buffers` are views of tensor memory on the sending side (nothing is copied) and writable buffers, owned by nobody
    else, on the receiving side.
    """

    payload: bytes
    tensors: bytes
    buffers: Sequence[memoryview | bytearray | bytes]
