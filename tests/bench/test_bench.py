"""The comparison itself: wrong results are never figures, both sides get the same work, who waits stands still."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from rpcbench.bench import command, pair
from rpcbench.bench.compare import Plan, Samples
from rpcbench.bench.member import batch
from rpcbench.bench.pair import BenchError, Pair, pairs
from rpcbench.bench.report import as_table, as_values
from rpcbench.bench.workloads import WORKLOADS, Api, Operation
from rpcbench.cli.main import main

TORCH = "torch.distributed.rpc"


def local_api(spoil: Callable[[Any], Any] = lambda result: result) -> Api:
    """Both modules acted out in this process; `spoil` changes every result on its way back."""
    leaves: list[torch.Tensor] = []

    def remote(to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> types.SimpleNamespace:
        made = function(*args)
        return types.SimpleNamespace(local_value=lambda: made)

    def backward(context: int, roots: list[torch.Tensor]) -> None:
        graph, found = [root.grad_fn for root in roots], []
        while graph:
            node = graph.pop()
            found.extend([node.variable] if hasattr(node, "variable") else [])
            graph.extend(parent for parent, _ in node.next_functions if parent)
        leaves[:] = [leaf for leaf in found if any(leaf is p for p in near)]
        gradients[:] = torch.autograd.grad(roots, leaves)

    near: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    rpc = types.SimpleNamespace(
        rpc_sync=lambda to, function, args: spoil(function(*args)),
        remote=remote,
    )
    autograd = types.SimpleNamespace(
        context=lambda: contextlib.nullcontext(7),
        backward=backward,
        get_gradients=lambda context: dict(zip(leaves, map(spoil, gradients), strict=True)),
    )
    return Api(rpc, autograd)
