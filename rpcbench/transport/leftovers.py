"""Removes shared directories that worlds of the past have left: a secret, and sockets of processes that were killed.

One goes when nobody has come to it for a day, and nobody listens in it. Whoever comes to one makes it new by that, so
none is taken away from a world that is about to meet.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from rpcbench.transport.local import somebody_listens

_AGE = 24 * 3600.0


def sweep(top: Path) -> None:
    """Look through all the shared directories of a user, which are in `top`."""
    old = time.time() - _AGE
    for directory in top.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process does the same; no directory
            if directory.stat().st_mtime < old and not any(map(_may_be_of_use, directory.iterdir())):
                shutil.rmtree(directory)


def _may_be_of_use(path: Path) -> bool:
    if path.is_socket():
        return somebody_listens(path)
    if path.name == "leader":  # where one listens at a socket here, that tells
        return " unix:" not in path.read_text()
    return path.name not in ("secret", "lock", "failure")
