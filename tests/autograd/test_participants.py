"""Graphs of users over several workers, and the parts of them that a pass touches."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from rpcbench import autograd
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.transport.base import Link
from rpcbench.wire.messages import Discover, Discovered, Gradients, Settled


def leaf(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(5)).requires_grad_()


def curve(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
    return (x * factor).sin() * x


def fetched(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.to_here() * 2


def passed_on(rref: RRef[torch.Tensor], to: str) -> torch.Tensor:
    return rpc_sync(to, fetched, (rref,)) + rref.to_here()


class Held:
    """A parameter of a worker, with a hook that counts its runs."""

    def __init__(self) -> None:
        self.weight = torch.ones(3, dtype=torch.double, requires_grad=True)
        self.runs = 0
        self.weight.register_hook(self.count)

    def count(self, grad: torch.Tensor) -> None:
        self.runs += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def looked_at(self, context: int) -> tuple[int, bool]:
        """Return how often the hook has run, and whether there is a gradient."""
        return self.runs, self.weight in autograd.get_gradients(context)


def test_a_pass_with_several_roots_equals_one_local_backward(agents: list[Agent]) -> None:
    x = leaf(3)

    def losses(call: Any) -> list[torch.Tensor]:
        h = x.exp()
        first, second = call("worker1", curve, (h,)), call("worker2", curve, (h, 2.0))
        return [first.sum(), (first * second).sum(), h.prod()]

    with autograd.context() as context:
        autograd.backward(context, losses(rpc_sync))
        found = autograd.get_gradients(context)[x]
    (expected,) = torch.autograd.grad(sum(losses(lambda to, function, args: function(*args))), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_an_rref_that_several_workers_fetch_equal_a_local_backward(agents: list[Agent]) -> None:
    x = leaf(3)
    with autograd.context() as context:
        made = remote("worker1", curve, (x,))
        autograd.backward(context, [(rpc_sync("worker2", passed_on, (made, "worker1")) * made.to_here()).sum()])
        found = autograd.get_gradients(context)[x]
    h = curve(x)
    (expected,) = torch.autograd.grad(((h * 2 + h) * h).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hooked", ["leaf", "joining"])
def test_a_hook_where_paths_over_workers_join_runs_once_with_the_whole_sum(agents: list[Agent], hooked: str) -> None:
    """The hook is not linear: if it ran on portions, the sum would differ."""

    def gradient(call: Any, backward: Any) -> tuple[Any, list[Any]]:
        x, runs = leaf(3), []
        h = x * 2
        {"leaf": x, "joining": h}[hooked].register_hook(lambda grad: runs.append(grad) or grad * grad)
        loss = (call("worker1", curve, (h,)) + call("worker2", curve, (h,)) + h).sum()
        return backward(loss, x), runs

    def over_workers(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        autograd.backward(context, [loss])
        return autograd.get_gradients(context)[x]

    with autograd.context() as context:
        found, runs = gradient(rpc_sync, over_workers)
    expected, _ = gradient(lambda to, function, args: function(*args), lambda y, x: torch.autograd.grad(y, x)[0])
    assert len(runs) == 1
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_second_pass_without_retain_graph_names_the_worker_of_the_freed_graph(agents: list[Agent]) -> None:
    x = leaf(3)
    with autograd.context() as context:
        loss = rpc_sync("worker1", curve, (x,)).sum()
        for retain_graph in (True, False):
            autograd.backward(context, [loss], retain_graph=retain_graph)
        with pytest.raises(RuntimeError, match=r"Error on Node 1: .*second time"):
            autograd.backward(context, [loss])
        found = autograd.get_gradients(context)[x]
    torch.testing.assert_close(found, 2 * torch.autograd.grad(curve(x).sum(), x)[0], rtol=1e-12, atol=1e-12)


def test_an_unused_call_runs_no_hooks_and_gets_no_gradient(agents: list[Agent]) -> None:
    x = leaf(3)
    used, unused = remote("worker1", Held), remote("worker2", Held)
    with autograd.context() as context:
        unused.rpc_sync().forward(x * 5)
        autograd.backward(context, [used.rpc_sync().forward(x).sum()])
        assert used.rpc_sync().looked_at(context) == (1, True)
        assert unused.rpc_sync().looked_at(context) == (0, False)
        assert torch.equal(autograd.get_gradients(context)[x], torch.ones_like(x))


class Counting(Link):
    """Counts the messages of backward passes."""

    def __init__(self, counts: collections.Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def handle_outgoing(self, to: int, seq: int, message: Any, may_wait: bool) -> None:
        if isinstance(message, Discover | Discovered | Gradients | Settled):
            self._counts[type(message).__name__] += 1
        super().handle_outgoing(to, seq, message, may_wait)


def test_a_send_of_the_pass_costs_at_most_two_messages(agents: list[Agent]) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for agent in agents:
        agent.links.interceptors.replace_links(Counting(counts))
    x = leaf(3)
    with autograd.context() as context:
        near = rpc_sync("worker1", curve, (x,))
        rpc_sync("worker2", curve, (x,))  # unused
        autograd.backward(context, [rpc_sync("worker2", curve, (near,)).sum()])
    needed = 4  # two calls, and two answers
    assert counts["Gradients"] == needed and counts["Settled"] <= needed
    assert counts.total() == counts["Gradients"] + counts["Settled"]
