"""The registry of launchers by name: our own, in `OWN`, and those of other packages' entry points "rpcbench.launchers".

Each is a callable `(directory: RunDirectory, **options) -> Launcher`. Modules that only one launcher needs are imported
when it is made. Our names take precedence over those of other packages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from rpcbench.base.errors import RpcError
from rpcbench.launch.base import Launcher
from rpcbench.transport.run_dir import RunDirectory

GROUP = "rpcbench.launchers"


class OwnLauncher(NamedTuple):
    """A launcher of this package."""

    place: str  # module:class
    text: str  # for the help of `%cluster start`
    packages: str = ""  # that only it needs, as arguments of `pip install`


OWN = {
    "local": OwnLauncher("rpcbench.launch.process:ProcessLauncher", "processes of this host"),
    "kernel": OwnLauncher(
        "rpcbench.launch.kernel:KernelLauncher", "Jupyter kernels of this host", "ipykernel jupyter-client"
    ),
    "command": OwnLauncher(
        "rpcbench.launch.command:CommandLauncher",
        "a command for each worker, template='ssh {host} {cmd}' hosts=node1,node2",
    ),
    "torchrun": OwnLauncher("rpcbench.launch.torchrun:TorchrunLauncher", "ranks of one torchrun on this host"),
    "ray": OwnLauncher("rpcbench.launch.ray_launcher:RayLauncher", "actors of Ray, cpus=0.5", "ray"),
}
KINDS = {"process": "local", "kernel": "kernel"}
"""The launcher for each `kind` of `Cluster`."""

Make = Callable[..., Launcher]


def launcher_names() -> list[str]:
    """Return the names of all launchers."""
    return [*OWN, *sorted({point.name for point in entry_points(group=GROUP)} - OWN.keys())]


def option_names(name: str) -> list[str]:
    """Return the names of a launcher's options. Raises the errors of `make_launcher`."""
    return list(inspect.signature(_load_maker(name)).parameters)[1:]


def check_launcher(name: str) -> str:
    """Return the name. ValueError if it is the name of no launcher."""
    if name not in OWN and name not in (names := launcher_names()):
        raise ValueError(f"there is no launcher {name!r}; there are {', '.join(names)}")
    return name


def make_launcher(name: str, directory: RunDirectory, options: Mapping[str, Any]) -> Launcher:
    """Make the launcher of that name, with these options. ValueError if there is none, or if it has no such option;
    RpcError, with the error's text, if it cannot be loaded."""
    try:
        make = _load_maker(name)
        _check_options(name, make, directory, options)
        return make(directory, **options)
    except ModuleNotFoundError as missing:
        how = f": pip install {OWN[name].packages}" if name in OWN and OWN[name].packages else ""
        raise RpcError(f"workers of launcher {name!r} need {missing.name}, which is not installed{how}") from missing


def choose_launcher(
    name: str | None, kind: str, kernel: str, start: str | None, python: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return name and options of the launcher for these arguments of `Cluster`. ValueError if two contradict."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not a kind of worker; use one of {tuple(KINDS)}")
    if name is not None and kind != "process" and KINDS[kind] != name:
        raise ValueError(f"kind={kind!r} means the launcher {KINDS[kind]!r}, not {name!r}: leave one out")
    name = name or KINDS[kind]
    if start is not None and name != "local":
        raise ValueError(f"start={start!r} is for workers of kind 'process'; launcher {name!r} does not take it")
    given = {"kernel": kernel if name == "kernel" else None, "start": start, "python": python}
    return name, {option: value for option, value in given.items() if value is not None}


def _load_maker(name: str) -> Make:
    check_launcher(name)
    points = [EntryPoint(name, OWN[name].place, GROUP)] if name in OWN else [*entry_points(group=GROUP, name=name)]
    try:
        make: Make = points[0].load()
    except ModuleNotFoundError:
        raise  # `make_launcher` names the package to install
    except Exception as error:  # of any type
        cause = f"{type(error).__name__}: {error}"
        raise RpcError(f"the launcher {name!r} ({points[0].value}) cannot be loaded: {cause}") from error
    return make


def _check_options(name: str, make: Make, directory: RunDirectory, options: Mapping[str, Any]) -> None:
    takes = inspect.signature(make)  # before the call: its own TypeErrors may have other causes
    try:
        takes.bind(directory, **options)
    except TypeError as error:
        known = ", ".join(option_names(name)) or "none"
        raise ValueError(f"launcher {name!r}: {error}; its options: {known}") from None
