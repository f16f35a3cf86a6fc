"""The log of a worker process: the file that its standard output and error go to, outside cells and calls.

Guarantees
- Only this user can read it.
- What leaves a log, by `read_last_lines`, has no secret: a command that makes a terminal has its input, the request,
  echoed there.
- Frames of C++, torch's warnings about connections and the errors of forks stay in the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import IO, Any

from rpcbench.base.config import FORK_MARK
from rpcbench.base.errors import count_noun

_LAST_LINES = 20  # of a log, that `read_last_lines` returns
_LAST_BYTES = 1 << 16  # of a log, in which `read_last_lines` looks for them
_FATAL = "Fatal Python error"  # how faulthandler begins
SECRET = re.compile(r'secret\\*": *\\*"')  # in a request, which is JSON in JSON
_FRAMES = re.compile(
    r"(?:^Exception raised from .+ \(most recent call first\):\n)?((?:^frame #\d+: .*(?:\n|\Z))+)\n?", re.MULTILINE
)  # of C++, as torch adds them to an error
_TOLD_BY_TORCH = re.compile(r"^(?:\[rank\d+\]:)?\[W\d{4} .+\] ?\[c10d\]")  # a warning about a connection
LEFT_OUT = "(a terminal has echoed the request to the worker here; it has the cluster's secret, and is left out)"


def log_path(directory: Path, worker: str, incarnation: int) -> Path:
    """Return the path of a worker's log; each incarnation has its own."""
    return directory / f"{worker}.{incarnation}.log"


def open_private(path: Path, mode: str = "ab") -> IO[Any]:
    """Open a file that only this user can read: by default a log, to append to."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def read_last_lines(log: Path) -> str:
    """Return the last lines that the worker itself has written to its log, or its fatal error; empty if there is no
    such file. Left out are the error of a fork, torch's warnings about connections, frames of C++, and a line that has
    the secret of a cluster."""
    try:
        with log.open("rb") as file:
            start = file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    if start:
        del lines[:1]  # it lacks its beginning, and with that perhaps the name of the secret that it has
    # Before `splitlines`, which also splits at "\r": a terminal may echo one line in several pieces.
    shown = "\n".join(LEFT_OUT if SECRET.search(line) else line for line in lines).splitlines()
    own = [line for line in shown if not (line.startswith(FORK_MARK) or _TOLD_BY_TORCH.match(line))]
    text = _FRAMES.sub("", "\n".join(own))
    begin = text.rfind(_FATAL)
    return "\n".join(text.splitlines()[-_LAST_LINES:]) if begin < 0 else _fatal_error_text(text[begin:])


def fold_frames(text: str) -> str:
    """Replace the frames of C++ in the text of a log by their number."""
    return _FRAMES.sub(lambda found: f"({count_noun(found[1].count('frame #'), 'frame')} of C++: see the log)\n", text)


def _fatal_error_text(text: str) -> str:
    """Return the parts of a faulthandler report that matter: the signal, and the stack of the thread that caused it."""
    first, *blocks = text.split("\n\n")
    stack = [line for block in blocks if block.startswith("Current thread") for line in block.splitlines()]
    return "\n".join([first, *stack[:_LAST_LINES]])
