"""What a worker is at, in eight bytes that outlive it: after its death the driver reads at which operation it was.

The bytes are memory that both processes of one host share. To note something is one store into it, no message; a worker
on another host notes it where nobody else looks. The file behind it is gone as soon as both have it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from rpcbench.pipeline.ops import Kind, Op

_BYTES = 8
PLACES = 1 << 16
"""So many operations are told apart."""
_DOINGS = 1 << 4


class Doing(IntEnum):
    """What a worker is at. `NOTHING`: it has not begun."""

    NOTHING = 0
    WAITS = 1
    RUNS = 2
    SENDS = 3
    READY = 4
    APPLIES = 5
    APPLIED = 6


class Place(NamedTuple):
    """`where`: the position in the worker's list of operations, or, where it applies, the stage."""

    step: int
    doing: Doing
    where: int


class Record:
    """One worker's bytes, in one pipeline."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self.word = memoryview(memory).cast("Q")

    @staticmethod
    def at(path: str) -> Record:
        """The one behind a file of `files`; for an empty path one that nobody else reads."""
        if not path:
            return Record(bytearray(_BYTES))
        with Path(path).open("r+b") as file:
            return Record(mmap.mmap(file.fileno(), _BYTES))

    def note(self, step: int, doing: Doing, where: int = 0) -> None:
        """One store of a machine word: whoever reads it after a death reads this place, or the one before."""
        self.word[0] = noted(step, doing) + where % PLACES

    @property
    def place(self) -> Place:
        rest, where = divmod(self.word[0], PLACES)
        step, doing = divmod(rest, _DOINGS)
        return Place(step, Doing(doing), where)


def noted(step: int, doing: Doing) -> int:
    """What the word says of the first place, and one more for each after it."""
    return (step * _DOINGS + doing) * PLACES


@contextlib.contextmanager
def files(directory: str, ids: Sequence[int]) -> Iterator[dict[int, str]]:
    """An empty record's path for each of these workers, for as long as the block takes: open them inside."""
    token = secrets.token_hex(8)
    paths = {id_: Path(directory) / f"ops-{token}.{id_}" for id_ in ids}
    try:
        for path in paths.values():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(bytes(_BYTES))
        yield {id_: str(path) for id_, path in paths.items()}
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def words(place: Place, step: int, ops: Sequence[Op]) -> str:
    """What a worker was at in this step, of which it had these operations."""
    if place.step != step or place.doing is Doing.NOTHING:
        return "before its first operation"
    if place.doing is Doing.APPLIES:
        return f"in the optimizer of stage {place.where}"
    if place.doing in (Doing.READY, Doing.APPLIED):
        return "after its last operation" if place.doing is Doing.READY else "after its optimizers"
    op = ops[place.where]
    name = f"{'the all-reduce' if op.kind is Kind.ALL_REDUCE else op.label} of stage {op.stage}"
    return {
        Doing.WAITS: f"waiting to begin {name}",
        Doing.RUNS: f"in {name}",
        Doing.SENDS: f"sending what {name} has made",
    }[place.doing]
