"""Distributed backward over real agents equals one local backward."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from rpcbench import autograd
from rpcbench.base.errors import RpcError, WorkerLostError
from rpcbench.rpc import RRef, remote, rpc_async, rpc_sync
from rpcbench.runtime.agent import Agent


def scale(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
    return (x * factor).sin()


def double_via(x: torch.Tensor, to: str) -> torch.Tensor:
    return rpc_sync(to, scale, (x * 2,)) * x


def ping(x: torch.Tensor, levels: int, here: str, there: str) -> torch.Tensor:
    return x if levels == 0 else rpc_sync(there, ping, (x * 1.5, levels - 1, there, here)).sin() + x


class Server:
    """Holds a weight, and returns the gradient that its worker has for it."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.double).view(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def gradient(self, context: int) -> torch.Tensor:
        return autograd.get_gradients(context)[self.weight]

    def value(self) -> torch.Tensor:
        return self.weight.detach()


def values(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(1)).requires_grad_()


def check(function: Any, local: Any, *leaves: torch.Tensor) -> None:
    """Check the gradients of `function`, which makes calls, against those of `local`, which makes none."""
    with autograd.context() as context:
        autograd.backward(context, [function(*leaves).sum()])
        found = autograd.get_gradients(context)
        assert all(leaf.grad is None for leaf in leaves)
    expected = torch.autograd.grad(local(*leaves).sum(), leaves)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[leaf], gradient, rtol=1e-12, atol=1e-12)


def test_gradients_through_one_call_equal_a_local_backward(agents: list[Agent]) -> None:
    check(lambda x: rpc_sync("worker1", scale, (x,)), scale, values(4))


def test_gradients_through_a_residual_around_a_call_equal_a_local_backward(agents: list[Agent]) -> None:
    check(lambda x: rpc_sync("worker1", scale, (x * 2,)) + x * 2, lambda x: scale(x * 2) + x * 2, values(4))


def test_gradients_through_a_diamond_over_two_workers_equal_a_local_backward(agents: list[Agent]) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        left, right = (rpc_async(f"worker{n}", scale, (h, float(n))) for n in (1, 2))
        return left.wait() * right.wait()

    check(both, lambda x: scale(x.exp(), 1.0) * scale(x.exp(), 2.0), values(4))


def test_gradients_through_nested_calls_equal_a_local_backward(agents: list[Agent]) -> None:
    check(lambda x: rpc_sync("worker1", double_via, (x, "worker2")), lambda x: scale(x * 2) * x, values(4))


def test_gradients_through_calls_back_and_forth_equal_a_local_backward(agents: list[Agent]) -> None:
    def local(x: torch.Tensor, levels: int) -> torch.Tensor:
        return x if levels == 0 else local(x * 1.5, levels - 1).sin() + x

    check(lambda x: rpc_sync("worker1", ping, (x, 5, "worker1", "notebook")), lambda x: local(x, 5), values(3))


def test_gradients_of_a_weight_used_before_and_after_a_call_equal_a_local_backward(agents: list[Agent]) -> None:
    check(lambda w: rpc_sync("worker1", scale, (w * 2,)) * w, lambda w: scale(w * 2) * w, values(3))


def test_an_unused_call_does_not_stall_the_pass(agents: list[Agent]) -> None:
    def unused(x: torch.Tensor) -> torch.Tensor:
        rpc_sync("worker2", scale, (x,))
        return rpc_sync("worker1", scale, (x,))

    check(unused, scale, values(3))


def test_gradients_through_a_fetched_rref_equal_a_local_backward(agents: list[Agent]) -> None:
    check(lambda x: remote("worker1", scale, (x,)).to_here() * 2, lambda x: scale(x) * 2, values(3))


def test_gradients_of_a_parameter_in_a_call_equal_a_local_backward(agents: list[Agent]) -> None:
    check(lambda p: rpc_sync("worker1", scale, (p,)), scale, nn.Parameter(torch.ones(3, dtype=torch.double)))


def test_gradients_stay_on_the_worker_that_has_the_leaf(agents: list[Agent]) -> None:
    server: RRef[Server] = remote("worker1", Server)
    weight = server.rpc_sync().value().requires_grad_()
    x = values(2, 3)
    with autograd.context() as context:
        autograd.backward(context, [server.rpc_sync().forward(x).pow(2).sum()])
        there, here = server.rpc_sync().gradient(context), autograd.get_gradients(context)[x]
    expected = torch.autograd.grad((x @ weight).pow(2).sum(), [weight, x])
    torch.testing.assert_close(there, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(here, expected[1], rtol=1e-12, atol=1e-12)


def test_gradients_of_two_passes_in_one_context_add_up(agents: list[Agent]) -> None:
    x = values(3)
    with autograd.context() as context:
        loss = rpc_sync("worker1", scale, (x,)).sum()
        autograd.backward(context, [loss], retain_graph=True)
        once = autograd.get_gradients(context)[x].clone()
        autograd.backward(context, [loss])
        torch.testing.assert_close(autograd.get_gradients(context)[x], 2 * once)
        with pytest.raises(RuntimeError, match="second time"):
            autograd.backward(context, [loss])


def test_contexts_of_many_threads_do_not_mix_their_gradients(agents: list[Agent]) -> None:
    x, found = values(3), {}

    def train(number: int) -> None:
        with autograd.context() as context:
            autograd.backward(context, [rpc_sync(f"worker{1 + number % 2}", scale, (x, float(number))).sum()])
            found[number] = autograd.get_gradients(context)[x]

    threads = [threading.Thread(target=train, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        torch.testing.assert_close(found[number], torch.autograd.grad(scale(x, float(number)).sum(), x)[0])


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise KeyError("broken on purpose")


def breaking(x: torch.Tensor) -> torch.Tensor:
    return Broken.apply(x)


def relay(x: torch.Tensor) -> torch.Tensor:
    return rpc_sync("worker2", breaking, (x,))


def test_an_error_two_hops_away_arrives_with_type_and_worker(agents: list[Agent]) -> None:
    with autograd.context() as context:
        loss = rpc_sync("worker1", relay, (values(3),)).sum()
        with pytest.raises(KeyError, match=r"Error on Node 2.*broken on purpose") as caught:
            autograd.backward(context, [loss])
        assert isinstance(caught.value, RpcError)
        assert "in backward" in str(caught.value.__cause__)


def test_a_lost_worker_fails_the_pass(agents: list[Agent]) -> None:
    with autograd.context() as context:
        loss = rpc_sync("worker2", scale, (values(3),)).sum()
        agents[2].links.peers.close()
        with pytest.raises(WorkerLostError, match="worker2"):
            autograd.backward(context, [loss])
    agents.pop()


@pytest.mark.parametrize("roots", [torch.ones(()), 5, None, [3.0]], ids=str)
def test_roots_that_are_no_list_of_tensors_are_refused(agents: list[Agent], roots: Any) -> None:
    with autograd.context() as context, pytest.raises(TypeError, match=r"such as \[loss\]"):
        autograd.backward(context, roots)


@pytest.mark.parametrize(
    ("roots", "reason"),
    [
        ([], "No tensors provided"),
        ([torch.ones(())], "requires_grad not set"),
        ([torch.ones(2, requires_grad=True) * 2], "not a scalar"),
        ([torch.ones((), requires_grad=True)], "valid gradient function"),
    ],
)
def test_invalid_roots_are_refused(agents: list[Agent], roots: list[torch.Tensor], reason: str) -> None:
    with autograd.context() as context, pytest.raises(RuntimeError, match=reason):
        autograd.backward(context, roots)


def test_contexts_cannot_be_nested_or_used_after_their_end(agents: list[Agent]) -> None:
    with autograd.context() as context:
        again = autograd.context()
        with pytest.raises(RuntimeError, match="Already have an autograd context"):
            again.__enter__()
    with pytest.raises(RuntimeError, match=r"Could not find autograd context.* belong inside"):
        autograd.get_gradients(context)
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        autograd.backward(context, [values(1).sum()])


def test_a_pass_over_tensors_of_two_contexts_is_refused_on_each_worker(agents: list[Agent]) -> None:
    x = values(3)
    with autograd.context():
        received = rpc_sync("worker1", scale, (x,))
        kept = remote("worker1", double_via, (x, "worker2"))
        kept.to_here()
    with autograd.context() as context:
        for root in (received, kept.to_here()):
            with pytest.raises(RpcError, match="received in another autograd context"):
                autograd.backward(context, [root.sum()])
        autograd.backward(context, [rpc_sync("worker1", scale, (x,)).sum()])
        assert x in autograd.get_gradients(context)


def test_a_call_outside_a_context_cuts_the_graph(agents: list[Agent]) -> None:
    assert rpc_sync("worker1", scale, (values(3),)).is_leaf
