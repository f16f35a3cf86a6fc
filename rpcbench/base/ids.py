"""Names for things that more than one process knows.

An `Id` is unique over the life of a world: the worker that made it, that worker's incarnation (a restarted worker
never inherits its predecessor's ids) and a counter. What is shown or returned to users looks as torch's ids do.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

COUNTER_BITS = 48
MAX_WORKER = (1 << 15) - 1
OWN = 1 << COUNTER_BITS - 1
"""In the number of a call: it is the bench's own, such as a cell, and no part of a program."""
_NAME = re.compile(r"[A-Za-z0-9_:.\-]*")
_LONGEST_NAME = 128


class Id(NamedTuple):
    """Identity of an RRef or of one fork of it."""

    worker: int
    serial: int
    incarnation: int = 0

    def __str__(self) -> str:
        again = f".{self.incarnation}" if self.incarnation else ""
        return f"{self.worker}.{self.serial}{again}"


def global_id(worker: int, serial: int) -> int:
    """64-bit id as torch shows it: 16 bits worker, 48 bits counter."""
    return worker << COUNTER_BITS | serial


def worker_of(number: int) -> int:
    """The worker that made a 64-bit id."""
    return number >> COUNTER_BITS


_SERIAL_BITS = 32
_LIVES = (1 << COUNTER_BITS - _SERIAL_BITS) - 1


def first_serial(incarnation: int) -> int:
    """Where the counters of 64-bit ids begin, so that they differ from those of an earlier incarnation."""
    return (incarnation & _LIVES) << _SERIAL_BITS


def origin_of(number: int) -> int:
    """Which process made a 64-bit id, if its counter began at `first_serial`."""
    return number >> _SERIAL_BITS


def origin(worker: int, incarnation: int) -> int:
    """`origin_of` all ids that this process makes."""
    return origin_of(global_id(worker, first_serial(incarnation)))


class Counter:
    """0, 1, 2, … (or from `first` on) from any thread."""

    def __init__(self, first: int = 0) -> None:
        self.next: Callable[[], int] = itertools.count(first).__next__  # one step of the interpreter


def check_name(name: str) -> str:
    """The name itself, or ValueError/RuntimeError with torch's wording where a world cannot have such a worker."""
    if not isinstance(name, str):
        raise TypeError(f"worker name must be a str, not {type(name).__name__}")
    if not name or len(name) >= _LONGEST_NAME or not _NAME.fullmatch(name):
        raise RuntimeError(
            "Worker name must match ^[A-Za-z0-9-_:.]*$, and must be non-empty and shorter than "
            f"{_LONGEST_NAME} chars, but got {name!r}"
        )
    return name
