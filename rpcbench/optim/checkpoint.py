"""States of optimizers on disk: each owner writes a file of its own, and a manifest says which file has what.

A file is torch.save's, read with weights_only. It comes under its name when it is whole, and the manifest after all of
them: a directory with a manifest is a complete state.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rpcbench.optim.files import load, new_file
from rpcbench.optim.files import manifest as load_manifest
from rpcbench.optim.local import State, merged
from rpcbench.runtime import current

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
    *found, inside = load_manifest(path, _fields)
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
