"""The kinds of workers a cluster can have, by name; what only one of them needs is imported where it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcbench.launch.base import Launcher
from rpcbench.launch.process import ProcessLauncher
from rpcbench.words.errors import RpcError

if TYPE_CHECKING:
    from rpcbench.transport.rundir import RunDirectory

KINDS = ("process", "kernel")


def launcher(kind: str, directory: RunDirectory, start: str | None, kernel: str) -> Launcher:
    """A launcher of that kind. ValueError where there is none, RpcError where something it needs is not installed."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is no kind of worker; use one of {KINDS}")
    if kind == "process":
        return ProcessLauncher(directory, start)
    if start is not None:
        raise ValueError(f"start={start!r} is for workers of kind 'process'; kernels are launched by Jupyter")
    try:
        import ipykernel  # noqa: F401

        from rpcbench.launch.kernel import KernelLauncher
    except ModuleNotFoundError as missing:
        raise RpcError(
            f"workers that are kernels need {missing.name}, which is not installed: "
            "pip install ipykernel jupyter-client"
        ) from missing
    return KernelLauncher(directory, kernel)


def connection_file(of: Launcher, name: str) -> str:
    """Where a kernel worker is found. RuntimeError where workers are none."""
    from rpcbench.launch.kernel import KernelLauncher

    if not isinstance(of, KernelLauncher):
        raise RuntimeError(f"{name} is no kernel; those are started by Cluster(2, kind='kernel')")
    return str(of.connection_file(name))
