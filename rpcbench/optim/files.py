"""Files of checkpoints: written whole or not at all, and read without running code that somebody put into them.

Guarantees
- A file that cannot be written is an OSError that names it and the worker, and leaves nothing behind.
- A file that torch.save has not written, or that holds objects of foreign classes, is a ValueError that names it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from rpcbench.runtime import current

T = TypeVar("T")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, whole and on disk when the block ends; there is none where the block, or the disk, fails."""
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise
    except BaseException as error:
        with contextlib.suppress(OSError):  # it may not even have been made
            path.unlink()
        failed = _of_system(error)
        if failed is None or failed.errno is None:
            raise
        told = f"{current.current().name} cannot write this file of a checkpoint: {os.strerror(failed.errno)}"
        raise OSError(failed.errno, told, str(path)) from failed


def _of_system(error: BaseException | None) -> OSError | None:
    """What the system said: torch raises an error of its own on top of that."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def load(path: Path, mmap: bool = False) -> Any:
    """What torch.save has written there. ValueError where that is anything else, OSError where it cannot be read."""
    try:
        return torch.load(path, weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception:  # noqa: BLE001  (torch raises many kinds, with advice that is wrong here)
        raise ValueError(f"{path} {_strange(path)}. Nothing was loaded") from None


def _strange(path: Path) -> str:
    try:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001  (not even a file of torch's)
        classes = []
    if not classes:
        return "is no file of a checkpoint, or is damaged"
    return (
        f"holds objects of {', '.join(sorted(classes))}, which could run code as they are loaded. Where you know who "
        "has made the file, and these classes, allow them on the workers: torch.serialization.add_safe_globals([...])"
    )


def manifest(path: Path, read: Callable[[Any], T | None]) -> T:
    """What `read` makes of the JSON in a file. ValueError that names the file where that is none, or None comes out."""
    try:
        found = read(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if found is None:
        raise ValueError(f"{path} is no manifest of a checkpoint, or is damaged")
    return found
