"""Launchers by name: our own, and those that other packages bring under the entry points "rpcbench.launchers".

Each is a callable `(directory: RunDirectory, **options) -> Launcher`, one file each; what only one of them needs is
imported where it is asked for. A name of ours is ours, whatever else is installed.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rpcbench.base.errors import RpcError
from rpcbench.launch.base import Launcher

if TYPE_CHECKING:
    from rpcbench.transport.run_dir import RunDirectory


GROUP = "rpcbench.launchers"
OWN = {
    "local": "rpcbench.launch.process:ProcessLauncher",
    "kernel": "rpcbench.launch.kernel:KernelLauncher",
    "command": "rpcbench.launch.command:CommandLauncher",
    "torchrun": "rpcbench.launch.torchrun:TorchrunLauncher",
    "ray": "rpcbench.launch.ray_launcher:RayLauncher",
}
"""As in pyproject.toml; the table is for where the metadata of an older version is installed."""
KINDS = {"process": "local", "kernel": "kernel"}
"""Short names of workers: the launcher of each."""
_PACKAGES = {"kernel": "ipykernel jupyter-client", "ray": "'rpcbench[ray]'"}
"""What pip installs for those of ours that need more."""

Make = Callable[..., Launcher]


def launcher_names() -> list[str]:
    """Of all launchers there are."""
    return [*OWN, *sorted({point.name for point in entry_points(group=GROUP)} - OWN.keys())]


def make_launcher(name: str, directory: RunDirectory, options: Mapping[str, Any]) -> Launcher:
    """The launcher of that name, with these options.

    ValueError where there is none, or it takes no such option; RpcError, with its own words, where it cannot be loaded.
    """
    try:
        make = _found(name)
        _check(name, make, directory, options)
        return make(directory, **options)
    except ModuleNotFoundError as missing:
        how = f": pip install {_PACKAGES[name]}" if name in _PACKAGES else ""
        raise RpcError(f"workers of launcher {name!r} need {missing.name}, which is not installed{how}") from missing


def chosen_launcher(name: str | None, kind: str, kernel: str, start: str | None) -> tuple[str, dict[str, Any]]:
    """The name and options of the launcher that arguments of `Cluster` mean. ValueError where two contradict."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is no kind of worker; use one of {tuple(KINDS)}")
    if name is not None and kind != "process" and KINDS[kind] != name:
        raise ValueError(f"kind={kind!r} means the launcher {KINDS[kind]!r}, not {name!r}: leave one out")
    name = name or KINDS[kind]
    if start is not None and name != "local":
        raise ValueError(f"start={start!r} is for workers of kind 'process'; launcher {name!r} has ways of its own")
    return name, {"kernel": kernel} if name == "kernel" else {"start": start} if start is not None else {}


def _found(name: str) -> Make:
    if name in OWN:
        return _load(OWN[name])
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        raise ValueError(f"there is no launcher {name!r}; there are {', '.join(launcher_names())}")
    try:
        make: Make = points[0].load()
    except ModuleNotFoundError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        raise RpcError(f"the launcher {name!r} ({points[0].value}) cannot be loaded: {told}") from error
    return make


def _check(name: str, make: Make, directory: RunDirectory, options: Mapping[str, Any]) -> None:
    takes = inspect.signature(make)
    try:
        takes.bind(directory, **options)
    except TypeError as error:
        known = ", ".join(list(takes.parameters)[1:]) or "none"
        raise ValueError(f"launcher {name!r}: {error}; its options: {known}") from None


def _load(place: str) -> Make:
    module, _, name = place.partition(":")
    make: Make = getattr(importlib.import_module(module), name)
    return make


def connection_file(of: Launcher, name: str) -> str:
    """Where a kernel worker is found. RuntimeError where workers are none."""
    from rpcbench.launch.kernel import KernelLauncher

    if not isinstance(of, KernelLauncher):
        raise RuntimeError(f"{name} is no kernel; those are started by Cluster(2, kind='kernel')")
    return str(of.connection_file(name))
