"""Each kind of tensor can be sent and gets its gradient back, for any use of it by the callee."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worlds import nothing_left, world

from rpcbench import autograd
from rpcbench.autograd import gradients
from rpcbench.autograd.gradients import LeafGradients
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.runtime.agent import Agent


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made
        nothing_left(made)


class Marked(torch.Tensor):
    pass


class Squared(torch.autograd.Function):
    """A Function of the user."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


def leaf(*shape: int, dtype: torch.dtype = torch.double) -> torch.Tensor:
    return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x


def in_place(x: torch.Tensor) -> torch.Tensor:
    x.mul_(3)
    x[0] = 1
    x.view(-1)[1:2].add_(x[-1].sum())
    return x.sin()


def squared(x: torch.Tensor) -> torch.Tensor:
    return Squared.apply(x)


def views(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[:2], x[1:]]).transpose(0, 1)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x * x.conj().exp()).sum(-1)


def looked_up(table: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(torch.tensor([1, 0, 1]), table, sparse=True)


def both(pair: list[torch.Tensor]) -> torch.Tensor:
    return pair[0] * pair[1]


def first_of(x: torch.Tensor, _unused: torch.Tensor) -> torch.Tensor:
    return x * 2


def recorded_in_no_grad(x: torch.Tensor) -> bool:
    with torch.no_grad():
        return rpc_sync("notebook", needs_grad, (x,))


def needs_grad(x: torch.Tensor) -> bool:
    return x.requires_grad and x.grad_fn is not None


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (plain, leaf(3)),
        (plain, nn.Parameter(leaf(3).detach())),
        (plain, leaf(3).detach().as_subclass(Marked).requires_grad_()),
        (in_place, leaf(3, 2)),
        (squared, leaf(3)),
        (views, leaf(3, 2)),
        (spectrum, leaf(3, dtype=torch.complex128)),
        (looked_up, leaf(4, 2)),
    ],
    ids=lambda part: getattr(part, "__name__", None) or type(part).__name__,
)
def test_the_gradient_of_a_sent_tensor_equals_that_of_a_local_call(
    agents: list[Agent], function: Any, x: torch.Tensor
) -> None:
    inputs = x * 1 if function is in_place else x
    with autograd.context() as context:
        loss = rpc_sync("worker1", function, (inputs,)).pow(2).sum()
        autograd.backward(context, [loss])
        (found,) = autograd.get_gradients(context).values()
    (expected,) = torch.autograd.grad(function(x * 1 if function is in_place else x).pow(2).sum(), x)
    assert found.layout == expected.layout
    torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors_and_their_gradients_can_be_sent(agents: list[Agent], layout: torch.layout) -> None:
    dense = torch.eye(3, dtype=torch.double)
    x = (dense.to_sparse() if layout is torch.sparse_coo else dense.to_sparse_csr()).requires_grad_()
    with autograd.context() as context:
        autograd.backward(context, [rpc_sync("worker1", torch.mul, (x, 3.0)).to_dense().sum()])
        gradient = autograd.get_gradients(context)[x]
    expected = torch.autograd.grad((x * 3.0).to_dense().sum(), x)[0]
    torch.testing.assert_close(gradient.to_dense(), expected.to_dense())


def test_a_tensor_sent_twice_and_tensors_that_share_memory_get_right_gradients(agents: list[Agent]) -> None:
    x = leaf(3)
    for make in (lambda h: [h, h], lambda h: [h, h.view(3)], lambda h: [h[:2], h[1:]]):
        pair = make(x * 2)
        with autograd.context() as context:
            autograd.backward(context, [rpc_sync("worker1", both, (pair,)).sum()])
            found = autograd.get_gradients(context)[x]
        torch.testing.assert_close(found, torch.autograd.grad(both(make(x * 2)).sum(), x)[0])


def test_an_unused_tensor_of_a_message_gets_no_gradient(agents: list[Agent]) -> None:
    x, unused, ran = leaf(3), leaf(3), []
    other = unused * 2
    other.register_hook(ran.append)
    with autograd.context() as context:
        autograd.backward(context, [rpc_sync("worker1", first_of, (x, other)).sum()])
        assert list(autograd.get_gradients(context)) == [x] and not ran


def test_a_message_is_recorded_in_any_grad_mode_as_in_torch(agents: list[Agent]) -> None:
    with autograd.context():
        assert rpc_sync("worker1", recorded_in_no_grad, (leaf(3),))


def test_an_embedding_table_of_a_server_gets_sparse_gradients(agents: list[Agent]) -> None:
    table: RRef[nn.Embedding] = remote("worker1", nn.Embedding, (4, 2), {"sparse": True})
    with autograd.context() as context:
        for rows in ([1], [1, 2]):
            autograd.backward(context, [table.rpc_sync().forward(torch.tensor(rows)).sum()])
        gradient = rpc_sync("worker1", gradient_of_table, (table, context))
    assert gradient.is_sparse
    assert gradient.to_dense().tolist() == [[0, 0], [2, 2], [1, 1], [0, 0]]


def gradient_of_table(table: RRef[nn.Embedding], context: int) -> torch.Tensor:
    return autograd.get_gradients(context)[table.local_value().weight]


# -- ownership of gradients
def test_copied_gradients_share_no_memory() -> None:
    a, b, c, d = (leaf(4) for _ in range(4))
    big = torch.arange(8.0, dtype=torch.double)
    held = LeafGradients()
    held.add_gradients(
        [(a, big[:4]), (b, big[4:]), (c, torch.ones(1, dtype=torch.double).expand(4)), (d, own := torch.ones(4))]
    )
    found = held.copy()
    for gradient in found.values():
        gradient.mul_(10)
    assert big.tolist() == list(range(8))
    assert found[a].tolist() == [0, 10, 20, 30] and found[c].tolist() == [10] * 4
    assert found[d] is own  # not copied without need


def test_gradients_that_two_passes_add_at_once_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x, held, meeting = leaf(3), LeafGradients(), threading.Barrier(2)

    def total(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.2)  # times out if only one thread adds at a time
        return first + second

    monkeypatch.setattr(gradients, "sum_gradients", total)
    held.add_gradients([(x, torch.ones(3))])
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(held.add_gradients, [(x, torch.ones(3))]) for _ in range(2)]:
            done.result()
    assert held.copy()[x].tolist() == [3, 3, 3]


def test_dense_and_sparse_gradients_add_up_in_any_order() -> None:
    sparse, dense = torch.eye(3).to_sparse(), torch.ones(3, 3)
    for order in ([sparse, dense], [dense, sparse], [sparse, sparse, dense]):
        x, held = leaf(3, 3), LeafGradients()
        for gradient in order:
            held.add_gradients([(x, gradient)])
        assert torch.equal(held.copy()[x].to_dense(), sum(g.to_dense() for g in order))
