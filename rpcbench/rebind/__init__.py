"""Puts our modules in the place of torch.distributed.{rpc,autograd,optim,nn}, for programs written for torch.

`bind()` does it in this process; with `environment()` a new Python process, and every one that it starts in turn, does
it by itself as soon as torch is imported (`site/sitecustomize.py`). Nothing of torch is changed but these names: what
imported them before keeps torch's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["VARIABLE", "bind", "environment"]

VARIABLE = "RPCBENCH_REBIND"
_SITE = Path(__file__).parent / "site"
_MODULES = {
    "torch.distributed.autograd": "rpcbench.autograd",
    "torch.distributed.rpc": "rpcbench.rpc",
    **{
        f"torch.distributed.rpc.{part}": f"rpcbench.rpc.{part}"
        for part in (
            "api", "backend_registry", "constants", "functions", "internal", "options", "rref_proxy",
            "server_process_global_profiler",
        )
    },
    "torch.distributed.optim.optimizer": "rpcbench.optim",
    "torch.distributed.nn.api.remote_module": "rpcbench.nn",
}  # fmt: skip
_NAMES = {  # what the packages, which hold more than RPC, take from these modules when they are imported
    "torch.distributed.optim": ("DistributedOptimizer", "rpcbench.optim"),
    "torch.distributed.nn": ("RemoteModule", "rpcbench.nn"),
}


def bind() -> None:
    """From now on, who imports one of those modules gets ours. torch must be imported already."""
    for theirs, ours in _MODULES.items():
        module = importlib.import_module(ours)
        package, _, name = theirs.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], name, module)
        sys.modules[theirs] = module
    for package, (name, ours) in _NAMES.items():
        if package in sys.modules:
            setattr(sys.modules[package], name, getattr(sys.modules[ours], name))


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base`, for processes that are to bind by themselves."""
    path = [str(_SITE), *filter(None, [base.get("PYTHONPATH")])]
    return {**base, VARIABLE: "1", "PYTHONPATH": os.pathsep.join(path)}
