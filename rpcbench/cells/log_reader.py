"""Reads the new lines of a worker's log, again and again, while the worker writes it.

Guarantees
- A look reads only the bytes since the last one, and of many only the last `MOST_BYTES`: the others are counted.
- Lines are as a terminal would leave them: without colours, and of a progress bar the last state. They are cut at
  `LONGEST` characters.
- As with `read_last_lines`, no line has the secret of a cluster, also where a look ends within it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rpcbench.cells.worker_log import LEFT_OUT, SECRET

MOST_BYTES = 200_000
LONGEST = 2_000
_MOST_BEGUN = 256_000  # bytes of a line without an end; of a longer one the last are kept
_KEPT = 16_000
_OVERLAP = 64  # bytes in which a secret's name may be cut in two
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)|[\x00-\x08\x0b-\x1f\x7f]")


class LogReader:
    """A log, and how far it has been read. `skipped`: bytes that no look has returned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self._end = 0  # of what has been read
        self._begun = b""  # a line without an end
        self._is_cut = False  # the line that begins `_begun` lacks its beginning, which is not to be shown
        self._has_secret = False  # that beginning had a secret

    @property
    def begun_line(self) -> str:
        """The last line, if it has no end yet."""
        if self._is_cut:
            return ""
        return LEFT_OUT if self._has_secret else _shown(self._begun)

    def end_line(self) -> str:
        """End the line that has no end, as its process has ended, and return it."""
        line, self._begun, self._has_secret = self.begun_line, b"", False
        return line

    def read_lines(self) -> list[str]:
        """Return the lines that have ended since the last look; [] if there is no file."""
        try:
            with self.path.open("rb") as file:
                data = self._read_new_bytes(file.fileno())
        except OSError:
            return []
        if self._is_cut:
            lost, end, data = data.partition(b"\n")
            self.skipped += len(lost) + len(end)
            self._is_cut = not end
        *lines, self._begun = (self._begun + data).split(b"\n")
        shown = [_shown(line) for line in lines]
        if shown and self._has_secret:
            shown[0], self._has_secret = LEFT_OUT, False
        self._shorten_begun()
        return shown

    def _read_new_bytes(self, file: int) -> bytes:
        size = os.fstat(file).st_size
        if size < self._end:  # somebody has emptied it
            self._end, self._begun, self._is_cut, self._has_secret = 0, b"", False, False
        if size - self._end > MOST_BYTES:
            self.skipped += size - MOST_BYTES - self._end + len(self._begun)
            self._end, self._begun, self._is_cut, self._has_secret = size - MOST_BYTES, b"", True, False
        data = os.pread(file, size - self._end, self._end)
        self._end += len(data)
        return data

    def _shorten_begun(self) -> None:
        """Keep the end of a line that grows without an end, as one of progress bars does."""
        if len(self._begun) > _MOST_BEGUN:
            self._has_secret |= _has_secret(self._begun[: _OVERLAP - _KEPT])
            self._begun = self._begun[-_KEPT:]


def _shown(line: bytes) -> str:
    return LEFT_OUT if _has_secret(line) else clean_line(line.decode(errors="replace"))


def _has_secret(line: bytes) -> bool:
    return b"secret" in line and SECRET.search(line.decode(errors="replace")) is not None


def clean_line(line: str) -> str:
    """Return a line as a terminal would leave it, cut at `LONGEST` characters."""
    last = line.rstrip("\r").rpartition("\r")[2]
    shown = _CODES.sub("", last) if not last.isprintable() else last
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"
