"""Optimizer states on disk: each owner writes a file of its own, and a manifest lists the files and their parameters.

Guarantees
- A file is torch.save's, read with weights_only: no code that was put into it runs.
- Files get their names when all are complete, and the manifest comes last: a directory with a manifest is a complete
  state. A save in which a file cannot be written leaves the state before it.
- A file that cannot be written is an OSError that names it and the worker, and leaves nothing behind.
- A file that torch.save has not written, or that holds objects of foreign classes, is a ValueError that names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rpcbench.base.files import make_file, rename_draft, replace_file
from rpcbench.runtime import current

T = TypeVar("T")
State = dict[str, Any]
"""As torch's `Optimizer.state_dict()`: {"state": {number: ...}, "param_groups": [{..., "params": [numbers]}]}."""


@contextlib.contextmanager
def name_faults(path: Path) -> Iterator[None]:
    """Let an error of the system in the block name this file, and this worker."""
    try:
        yield
    except FileExistsError:
        raise
    except BaseException as error:
        failed = _of_system(error)
        if failed is None or failed.errno is None:
            raise
        text = f"{current.current_agent().name} cannot write this file of a checkpoint: {os.strerror(failed.errno)}"
        raise OSError(failed.errno, text, str(path)) from failed


def _of_system(error: BaseException | None) -> OSError | None:
    # torch raises an error of its own on top of the system's
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def load_file(path: Path, mmap: bool = False) -> Any:
    """Return the content of a file of torch.save. ValueError if it is of another kind, OSError if it cannot be read."""
    try:
        return torch.load(path, weights_only=True, mmap=mmap)
    except OSError:
        raise
    except Exception:  # noqa: BLE001  (torch raises many kinds, with advice that is wrong here)
        raise ValueError(f"{path} {_load_error_text(path)}. Nothing was loaded") from None


def _load_error_text(path: Path) -> str:
    try:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001  (not even a file of torch's)
        classes = []
    if not classes:
        return "is not a checkpoint file, or is damaged"
    return (
        f"holds objects of {', '.join(sorted(classes))}, which could run code as they are loaded. If you trust the "
        "file and these classes, allow them on the workers: torch.serialization.add_safe_globals([...])"
    )


def publish_manifest(path: Path, content: Any) -> None:
    """Replace a manifest by this content as JSON: after a crash the file has the old content or the new one."""
    with name_faults(path), replace_file(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def read_manifest(path: Path, read: Callable[[Any], T | None], missing: str) -> T:
    """Return `read_shares` of a file's JSON. ValueError with the text `missing` if there is no file; one that names the
    file if it is no JSON, or `read_shares` returns None."""
    try:
        found = read(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(missing) from None
    except (ValueError, RecursionError) as error:  # JSON nested too deep
        raise ValueError(f"{path} is damaged: {error}") from None
    if found is None:
        raise ValueError(f"{path} is not a checkpoint manifest, or is damaged")
    return found


MANIFEST = "optimizer.json"
_FORMAT = 1  # version of the manifest
_FILE = re.compile(r"[^/\\\0]+\.pt")  # no path leads out of the directory


def save_optimizer(name: str, size: int, directory: str | Path, on_each: Callable[[str, str], list[Any]]) -> None:
    """Write the state of an optimizer class over `size` parameters. `on_each`: calls a method of each owner's share."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    shares = dict(on_each("write", str(directory)))  # drafts: while these are written, the old state stays
    (target / MANIFEST).unlink(missing_ok=True)  # until all files have their names there is no complete state
    on_each("adopt", str(directory))
    publish_manifest(target / MANIFEST, {"format": _FORMAT, "optimizer": name, "parameters": size, "files": shares})


def shard_files(name: str, size: int, directory: str | Path) -> dict[str, list[int]]:
    """Return file → numbers of its parameters. ValueError if the state is not of such an optimizer."""
    path = Path(directory) / MANIFEST
    *found, inside = read_manifest(
        path, _parse_manifest, f"{directory} holds no complete optimizer state: there is no {MANIFEST}"
    )
    if found != [_FORMAT, name, size]:
        raise ValueError(
            f"{directory} holds format {found[0]}, {found[1]} over {found[2]} parameters; wanted: format {_FORMAT}, "
            f"{name} over {size}"
        )
    if elsewhere := [file for file in inside if not _FILE.fullmatch(file)]:
        raise ValueError(f"{path} names files outside its folder: {elsewhere[0]!r}. Nothing was loaded")
    return inside


def _parse_manifest(manifest: Any) -> tuple[Any, Any, Any, dict[str, list[int]]] | None:
    match manifest:
        case {"format": format_, "optimizer": name, "parameters": size, "files": dict(inside)}:
            numbers = [number for each in inside.values() for number in (each if isinstance(each, list) else [None])]
            return (format_, name, size, inside) if all(isinstance(number, int) for number in numbers) else None
    return None


def write_draft(state: State, directory: str) -> str:
    """Write a draft of one owner's share. Returns the name that `adopt_draft` gives it."""
    path = _share_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)  # of a save that has failed
    with name_faults(draft), make_file(draft) as file:
        torch.save(state, file)
    return path.name


def adopt_draft(directory: str) -> None:
    """Give the owner's draft its name."""
    rename_draft(_share_path(directory).with_suffix(".draft"), _share_path(directory))


def _share_path(directory: str) -> Path:
    return Path(directory) / f"{current.current_agent().name}.pt"


def read_shares(directory: str, files: dict[str, list[int]], numbers: Sequence[int]) -> list[State]:
    """Return the shares that have any of these parameters."""
    return [load_file(Path(directory) / name) for name, inside in files.items() if not {*numbers}.isdisjoint(inside)]
