"""Each Python process that finds this on its path notes which files of the package run while the flag is up.

`python -m tests.house` puts this folder on the path. `HOUSE_TRACE` names a folder: `flag` in it has one byte, 1 while
files are noted; each process appends the files that it enters to a file named by its process id. A profile function is
inherited by forks and, through `threading`, by each new thread.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType

_PACKAGE = f"{os.sep}rpcbench{os.sep}"


def _install(folder: Path) -> None:
    with (folder / "flag").open("r+b") as file:
        flag = mmap.mmap(file.fileno(), 1)
    noted: set[tuple[int, int, str]] = set()  # (process, number of the run, file)

    def note(frame: FrameType, event: str, _: object) -> None:
        run = flag[0]
        path = frame.f_code.co_filename
        if event == "call" and run and _PACKAGE in path:
            key = (os.getpid(), run, path)
            if key not in noted:
                noted.add(key)
                with (folder / f"{run}-{os.getpid()}").open("a") as notes:
                    notes.write(path + "\n")

    threading.setprofile(note)
    sys.setprofile(note)


if folder := os.environ.get("HOUSE_TRACE"):
    _install(Path(folder))
