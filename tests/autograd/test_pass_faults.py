"""Real processes that die, and functions that raise, during a backward pass."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from worlds import cluster_fixture, until

import rpcbench
from rpcbench import autograd
from rpcbench.base.errors import RpcError, WorkerLostError
from rpcbench.rpc import RRef, remote, rpc_sync

pytestmark = pytest.mark.process
cluster = cluster_fixture(3, scope="function")


class InBackward(torch.autograd.Function):
    """Ends its process, or raises, when gradients arrive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("raised on purpose")


class Server:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, what: str) -> torch.Tensor:
        return rpc_sync("worker2", fails_in_backward, (x * self.weight, what)) * 2

    def value(self) -> torch.Tensor:
        return self.weight.detach().clone()


def fails_in_backward(x: torch.Tensor, what: str) -> torch.Tensor:
    return rpc_sync("worker3", torch.sin, (InBackward.apply(x, what),))


def counts() -> dict[str, str]:
    return autograd._get_debug_info()


def nothing_left(cluster: rpcbench.Cluster, *names: str) -> None:
    """Wait until no context, and so no pass, is left on these workers and here."""
    until(lambda: all(cluster.rpc_sync(name, counts)["num_autograd_contexts"] == "0" for name in names), "contexts")
    assert counts() == {"num_autograd_contexts": "0", "num_current_backward_passes": "0"}


def test_a_worker_that_dies_in_a_pass_is_named_and_leaves_nothing(cluster: rpcbench.Cluster) -> None:
    server: RRef[Server] = remote("worker1", Server)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = server.rpc_sync().forward(x, "die").sum()
        with pytest.raises(WorkerLostError, match=rf"context {context} .*worker2.*SIGKILL"):
            autograd.backward(context, [loss])
        assert autograd.get_gradients(context) == {}
        until(lambda: cluster.rpc_sync("worker3", counts)["num_current_backward_passes"] == "0", "the pass to end")
        autograd.backward(context, [rpc_sync("worker1", torch.mul, (x, 2.0)).sum()])
        assert autograd.get_gradients(context)[x].tolist() == [2, 2, 2]
    nothing_left(cluster, "worker1", "worker3")
    assert server.rpc_sync().value().tolist() == [1, 1, 1]


def test_an_error_two_hops_away_keeps_type_worker_and_stack(cluster: rpcbench.Cluster) -> None:
    server: RRef[Server] = remote("worker1", Server)
    x = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        loss = server.rpc_sync().forward(x, "raise").sum()
        with pytest.raises(KeyError, match=r"Error on Node 2.*raised on purpose") as caught:
            autograd.backward(context, [loss])
        assert isinstance(caught.value, RpcError)
        assert "on worker2" in str(caught.value.__cause__) and "in backward" in str(caught.value.__cause__)
        workers = ("worker1", "worker2", "worker3")
        until(lambda: all(cluster.rpc_sync(n, counts)["num_current_backward_passes"] == "0" for n in workers))
    nothing_left(cluster, *workers)


def begin_and_die(x: torch.Tensor) -> None:
    with autograd.context():
        rpc_sync("worker2", torch.sin, (x,))
        rpc_sync("worker2", rpc_sync, ("worker3", torch.sin, (x,)))
        os.kill(os.getpid(), signal.SIGKILL)


def test_contexts_of_a_worker_that_dies_are_released_on_all_workers(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(WorkerLostError, match="worker1"):
        rpc_sync("worker1", begin_and_die, (torch.ones(3, requires_grad=True),))
    nothing_left(cluster, "worker2", "worker3")


def test_a_context_known_only_through_a_dead_worker_is_released(cluster: rpcbench.Cluster) -> None:
    x = torch.ones(3, requires_grad=True)
    with autograd.context():
        rpc_sync("worker1", rpc_sync, ("worker2", torch.sin, (x,)))
        assert cluster.rpc_sync("worker2", counts)["num_autograd_contexts"] == "1"
        os.kill(cluster.pid("worker1"), signal.SIGKILL)
        until(lambda: "worker1" not in [info.name for info in cluster.agent.members()], "the loss to be known")
    nothing_left(cluster, "worker2")
