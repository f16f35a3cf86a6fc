"""Backwards in two halves: each computes its own, and both together what one would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rpcbench.pipeline.halves import Halves


class Twice(nn.Module):
    """A weight at two places of the way, and one that is computed from another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.scaled = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.scaled(self.shared(x)))) + x


MODELS = {
    "a chain": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6)),
    "a weight used twice": Twice,
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0),
    "a recurrent layer": lambda: nn.Sequential(nn.RNN(6, 6, batch_first=True), First()),
    "convolutions": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Flatten()),
}


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


def _case(name: str, needs: bool) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    torch.manual_seed(3)
    model = MODELS[name]().double()
    value = torch.randn(5, 6, dtype=torch.float64, requires_grad=needs)
    output = model(value.detach().requires_grad_() if not needs else value)
    return value, output, list(model.parameters()), torch.randn_like(output)


@pytest.mark.parametrize("name", MODELS)
def test_halves_give_what_the_whole_gives_to_the_last_bit(name: str) -> None:
    value, output, weights, gradient = _case(name, True)
    whole = torch.autograd.grad([output], [value, *weights], [gradient], retain_graph=True, allow_unused=True)
    halves = Halves(output, value, weights)
    torch.testing.assert_close(halves.input(gradient), whole[0], rtol=0, atol=0)
    found = halves.weights()
    wanted = [(weight, grad) for weight, grad in zip(weights, whole[1:], strict=True) if grad is not None]
    assert [id(weight) for weight, _ in found] == [id(weight) for weight, _ in wanted]
    for (_, got), (_, grad) in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, grad, rtol=0, atol=0)


def test_an_input_without_gradient_leaves_all_to_the_second_half() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    loss = model(torch.randn(5, 6)).sum()
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    halves = Halves(loss, None, list(model.parameters()))
    assert halves.input(None) is None
    for (_, got), grad in zip(halves.weights(), whole, strict=True):
        assert torch.equal(got, grad)


def test_each_half_computes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe in place of matrix products, which are all that differs between the halves of a chain of layers."""
    products: list[tuple[int, ...]] = []

    class Probe(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                products.append(tuple(result.shape))
            return result

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7))
    value = torch.randn(5, 6, requires_grad=True)
    halves = Halves(model(value), value, list(model.parameters()))
    with Probe(), torch.autograd.set_multithreading_enabled(False):
        halves.input(torch.ones(5, 7))
        first = products[:]
        halves.weights()
    assert first == [(5, 8), (5, 6)], "gradients of inputs"
    assert sorted(products[2:]) == [(7, 8), (8, 6)], "gradients of weights"


def test_the_graph_is_freed_by_the_second_half() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    value = torch.randn(5, 6, requires_grad=True)
    output = model(value)
    halves = Halves(output, value, list(model.parameters()))
    halves.input(torch.ones(5, 8))
    halves.weights()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, list(model.parameters()), torch.ones(5, 8))


def test_hooks_run_in_the_half_of_their_tensor() -> None:
    ran: list[str] = []
    model = nn.Linear(6, 8)
    value = torch.randn(5, 6, requires_grad=True)
    middle = torch.tanh(value)
    output = model(middle)
    middle.register_hook(lambda grad: ran.append("middle") or grad * 2)
    model.weight.register_hook(lambda grad: ran.append("weight") or grad * 3)
    whole = torch.autograd.grad(output, [value, model.weight], torch.ones(5, 8), retain_graph=True)
    ran.clear()
    halves = Halves(output, value, list(model.parameters()))
    first = halves.input(torch.ones(5, 8))
    assert ran == ["middle"]
    found = dict(halves.weights())
    assert ran == ["middle", "weight"]
    assert torch.equal(first, whole[0])
    assert torch.equal(found[model.weight], whole[1])
