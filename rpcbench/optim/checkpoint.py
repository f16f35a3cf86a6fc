"""States of optimizers on disk: each owner writes a file of its own, and a manifest says which file has what.

A file is torch.save's, read with weights_only. It comes under its name when it is whole, and the manifest after all of
them: a directory with a manifest is a complete state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rpcbench.agent import current
from rpcbench.optim.local import State, merged

MANIFEST = "optimizer.json"
_FORMAT = 1


def save(name: str, size: int, directory: str | Path, shares: Callable[[], list[tuple[str, list[int]]]]) -> None:
    """Write the shares, then the manifest of an optimizer class over `size` parameters."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    (target / MANIFEST).unlink(missing_ok=True)  # until the new state is whole there is none
    manifest = {"format": _FORMAT, "optimizer": name, "parameters": size, "files": dict(shares())}
    _replace(target / MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1)))


def files(name: str, size: int, directory: str | Path) -> dict[str, list[int]]:
    """File → numbers of the parameters in it. ValueError where the state is not of such an optimizer."""
    path = Path(directory) / MANIFEST
    if not path.exists():
        raise ValueError(f"{directory} holds no complete optimizer state: there is no {MANIFEST}")
    manifest: dict[str, Any] = json.loads(path.read_text())
    found = (manifest["format"], manifest["optimizer"], manifest["parameters"])
    if found != (_FORMAT, name, size):
        raise ValueError(
            f"{directory} holds format {found[0]}, {found[1]} over {found[2]} parameters; wanted: format {_FORMAT}, "
            f"{name} over {size}"
        )
    return dict(manifest["files"])


def write(state: State, directory: str) -> str:
    """One owner's share, as a file; its name."""
    name = f"{current.current().name}.pt"
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    _replace(target / name, lambda path: torch.save(state, path))
    return name


def read(directory: str, files: dict[str, list[int]], numbers: Sequence[int]) -> State:
    """All that the files have of these parameters."""
    wanted = set(numbers)
    needed = [Path(directory) / name for name, inside in files.items() if wanted.intersection(inside)]
    return merged([torch.load(path, weights_only=True) for path in needed])


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    draft = path.with_suffix(f".{os.getpid()}.draft")
    write(draft)
    draft.replace(path)
