"""States of optimizers on disk: each owner writes a file of its own, and a manifest says which file has what.

Guarantees
- A file is torch.save's, read with weights_only: no code that somebody put into it runs.
- It comes under its name when it is whole, and the manifest after all of them: a directory with a manifest is a
  complete state.
- A file that cannot be written is an OSError that names it and the worker, and leaves nothing behind.
- A file that torch.save has not written, or that holds objects of foreign classes, is a ValueError that names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from rpcbench.optim.local import State, merged
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


MANIFEST = "optimizer.json"
_FORMAT = 1
_FILE = re.compile(r"[^/\\\0]+\.pt")


def save(name: str, size: int, directory: str | Path, shares: Callable[[], list[tuple[str, list[int]]]]) -> None:
    """Write the shares, then the manifest of an optimizer class over `size` parameters."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    (target / MANIFEST).unlink(missing_ok=True)  # until the new state is whole there is none
    manifest = {"format": _FORMAT, "optimizer": name, "parameters": size, "files": dict(shares())}
    _replace(target / MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode()))


def files(name: str, size: int, directory: str | Path) -> dict[str, list[int]]:
    """File → numbers of the parameters in it. ValueError where the state is not of such an optimizer."""
    path = Path(directory) / MANIFEST
    if not path.exists():
        raise ValueError(f"{directory} holds no complete optimizer state: there is no {MANIFEST}")
    *found, inside = manifest(path, _fields)
    if found != [_FORMAT, name, size]:
        raise ValueError(
            f"{directory} holds format {found[0]}, {found[1]} over {found[2]} parameters; wanted: format {_FORMAT}, "
            f"{name} over {size}"
        )
    if elsewhere := [file for file in inside if not _FILE.fullmatch(file)]:
        raise ValueError(f"{path} names files outside its folder: {elsewhere[0]!r}. Nothing was loaded")
    return inside


def _fields(manifest: Any) -> tuple[Any, Any, Any, dict[str, list[int]]] | None:
    match manifest:
        case {"format": format_, "optimizer": name, "parameters": size, "files": dict(inside)}:
            numbers = [number for each in inside.values() for number in (each if isinstance(each, list) else [None])]
            return (format_, name, size, inside) if all(isinstance(number, int) for number in numbers) else None
    return None


def write(state: State, directory: str) -> str:
    """One owner's share, as a file; its name."""
    name = f"{current.current().name}.pt"
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    _replace(target / name, lambda file: torch.save(state, file))
    return name


def read(directory: str, files: dict[str, list[int]], numbers: Sequence[int]) -> State:
    """All that the files have of these parameters."""
    wanted = set(numbers)
    needed = [Path(directory) / name for name, inside in files.items() if wanted.intersection(inside)]
    return merged([load(path) for path in needed])


def _replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    draft = path.with_suffix(f".{secrets.token_hex(4)}.draft")
    with new_file(draft) as file:
        write(file)
    draft.replace(path)
