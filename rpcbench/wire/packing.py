"""Plain data as msgpack.

A packer has a buffer of a quarter of a megabyte, so packers are used again; but each by one at a time: to pack may set
off a garbage collection, and with it anybody's code, which packs something else on this thread or lets others run.
"""

from __future__ import annotations

from typing import Any

import msgpack

TEXT = "surrogatepass"  # an exception may hold text that is no Unicode, such as a file name
_idle: list[Any] = []


def packed(data: Any) -> bytes:
    """Numbers, strings, bytes, lists, tuples and dicts of these."""
    try:
        packer = _idle.pop()
    except IndexError:
        packer = msgpack.Packer(unicode_errors=TEXT)
    result: bytes = packer.pack(data)
    _idle.append(packer)  # not where it failed: then something may be left in it
    return result
