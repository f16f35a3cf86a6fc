"""What C code and child processes write while a cell runs: read back from the worker's log, where it goes.

Descriptors 1 and 2 stay those of the log. So nothing that a process writes there can block, is lost when the worker is
killed, or has to pass through Python; a child that outlives the cell, or the worker, goes on writing to the log. It is
open here only while there is something to read, as a worker may have no descriptor to spare.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from rpcbench.launch.handle import log_of

MOST = 16 << 20
_AT_ONCE = 1 << 18
_OUT = 1


class LogTail:
    """The log from where a cell began, as text. One thread reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self.begin(self.size())

    def size(self) -> int:
        """How many bytes the log has now, or had before the world took it away at its end. From any thread."""
        with contextlib.suppress(FileNotFoundError):
            self._size = self._path.stat().st_size
        return self._size

    def begin(self, at: int) -> None:
        """What was written before position `at` belongs to no cell."""
        self.at = at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, until: int) -> Iterator[str]:
        """What was written up to position `until` and was not read yet. Of more than `MOST` bytes only the last."""
        if (left_out := until - self.at - MOST) > 0:
            self.begin(until - MOST)
            yield f"\n({left_out:,} bytes of output, too many at once, are only in the worker's log.)\n"
        with self._path.open("rb") as log:
            log.seek(self.at)
            while self.at < until and (data := log.read(min(_AT_ONCE, until - self.at))):
                self.at += len(data)
                if text := self._decoder.decode(data):
                    yield text


def log_tail(worker: str, incarnation: int) -> LogTail | None:
    """That of this worker. None where its output goes elsewhere: to torchrun, Ray, or through a connection; the file
    is known by its name, as others than this worker might write to any other file."""
    if not stat.S_ISREG(os.fstat(_OUT).st_mode) or (path := _path(_OUT)) != log_of(path.parent, worker, incarnation):
        return None
    return LogTail(path)


def _path(descriptor: int) -> Path:
    import fcntl

    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()
