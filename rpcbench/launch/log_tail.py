"""What C code and child processes write while a cell runs: read back from the worker's log, where it goes.

Descriptors 1 and 2 stay those of the log. So nothing that a process writes there can block, is lost when the worker is
killed, or has to pass through Python; a child that outlives the cell, or the worker, goes on writing to the log.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from pathlib import Path

MOST = 16 << 20
_AT_ONCE = 1 << 18
_OUT = 1


class LogTail:
    """The log from where a cell began, as text. One thread reads."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.begin(self.size())

    def size(self) -> int:
        """How many bytes the log has now. From any thread."""
        return os.fstat(self._file).st_size

    def begin(self, at: int) -> None:
        """What was written before position `at` belongs to no cell."""
        self.at = at
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, until: int) -> Iterator[str]:
        """What was written up to position `until` and was not read yet. Of more than `MOST` bytes only the last."""
        if (left_out := until - self.at - MOST) > 0:
            self.begin(until - MOST)
            yield f"\n({left_out:,} bytes of output, too many at once, are only in the worker's log.)\n"
        while self.at < until and (data := os.pread(self._file, min(_AT_ONCE, until - self.at), self.at)):
            self.at += len(data)
            if text := self._decoder.decode(data):
                yield text


def log_tail(worker: str) -> LogTail | None:
    """That of this worker. None where its output goes elsewhere: to torchrun, Ray, or through a connection; the file
    is known by its name, as others than this worker might write to any other file."""
    if not stat.S_ISREG(os.fstat(_OUT).st_mode) or (path := _path(_OUT)).name != f"{worker}.log":
        return None
    return LogTail(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _path(descriptor: int) -> Path:
    import fcntl

    if hasattr(fcntl, "F_GETPATH"):  # macOS
        return Path(os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()
