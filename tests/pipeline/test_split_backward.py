"""Backwards in two halves: each computes its own gradients, and together they equal a whole backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rpcbench.pipeline.gradient_sums import SplitBackward


class Twice(nn.Module):
    """A weight that is used twice, a weight that is computed from others, and an unused layer."""

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
def test_both_halves_equal_a_whole_backward_to_the_last_bit(name: str) -> None:
    value, output, weights, gradient = _case(name, True)
    whole = torch.autograd.grad([output], [value, *weights], [gradient], retain_graph=True, allow_unused=True)
    halves = SplitBackward([output], [gradient], [value], weights)
    torch.testing.assert_close(halves.inputs(), [whole[0]], rtol=0, atol=0)
    found = halves.weights()
    wanted = [(weight, grad) for weight, grad in zip(weights, whole[1:], strict=True) if grad is not None]
    assert [id(weight) for weight, _ in found] == [id(weight) for weight, _ in wanted]
    for (_, got), (_, grad) in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, grad, rtol=0, atol=0)


def test_without_an_input_gradient_the_second_half_computes_all_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    loss = model(torch.randn(5, 6)).sum()
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    halves = SplitBackward([loss], None, [], list(model.parameters()))
    assert halves.inputs() == []
    for (_, got), grad in zip(halves.weights(), whole, strict=True):
        assert torch.equal(got, grad)


def test_each_half_computes_only_its_own_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe records matrix products; only they differ between the halves of a chain of layers."""
    products: list[tuple[int, ...]] = []

    class Probe(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                products.append(tuple(result.shape))
            return result

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7))
    value = torch.randn(5, 6, requires_grad=True)
    halves = SplitBackward([model(value)], [torch.ones(5, 7)], [value], list(model.parameters()))
    with Probe(), torch.autograd.set_multithreading_enabled(False):
        halves.inputs()
        first = products[:]
        halves.weights()
    assert first == [(5, 8), (5, 6)], "gradients of inputs"
    assert sorted(products[2:]) == [(7, 8), (8, 6)], "gradients of weights"


def test_the_second_half_frees_the_graph() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    value = torch.randn(5, 6, requires_grad=True)
    output = model(value)
    halves = SplitBackward([output], [torch.ones(5, 8)], [value], list(model.parameters()))
    halves.inputs()
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
    halves = SplitBackward([output], [torch.ones(5, 8)], [value], list(model.parameters()))
    (first,) = halves.inputs()
    assert ran == ["middle"]
    found = dict(halves.weights())
    assert ran == ["middle", "weight"]
    assert torch.equal(first, whole[0])
    assert torch.equal(found[model.weight], whole[1])


class Branches(nn.Module):
    """Two inputs and four outputs: of both inputs, of one, of weights only, and of one input and those weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.apart = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        learned = torch.tanh(self.apart.weight)
        return self.first(x) * y, self.second(y), learned @ self.apart.bias, learned[:5] + torch.tanh(x)


@pytest.mark.parametrize("outputs", [[0], [1], [2], [1, 2], [0, 1, 2, 3], [2, 2, 3]])
def test_both_halves_equal_a_whole_backward_with_several_outputs_and_inputs(outputs: list[int]) -> None:
    torch.manual_seed(3)
    model = Branches().double()
    values = [torch.randn(5, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = list(model.parameters())
    made = model(*values)
    roots = [made[number] for number in outputs]
    gradients = [torch.randn_like(root) for root in roots]
    whole = torch.autograd.grad(roots, [*values, *weights], gradients, retain_graph=True, allow_unused=True)
    halves = SplitBackward(roots, gradients, values, weights)
    found = dict(enumerate(halves.inputs())) | {2 + _place(weights, w): grad for w, grad in halves.weights()}
    for number, wanted in enumerate(whole):
        torch.testing.assert_close(found.get(number), wanted, rtol=1e-14, atol=1e-14)


def _place(weights: list[Tensor], weight: Tensor) -> int:
    return next(number for number, each in enumerate(weights) if each is weight)
