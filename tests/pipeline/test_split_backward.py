"""Backwards in two halves: each computes its own gradients, and together they equal a whole backward."""

from __future__ import annotations

import weakref
from typing import Any

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
    torch.testing.assert_close(halves.compute_input_gradients(), [whole[0]], rtol=0, atol=0)
    found = halves.compute_weight_gradients()
    wanted = [(weight, grad) for weight, grad in zip(weights, whole[1:], strict=True) if grad is not None]
    assert [id(weight) for weight, _ in found] == [id(weight) for weight, _ in wanted]
    for (_, got), (_, grad) in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, grad, rtol=0, atol=0)


def test_without_an_input_gradient_the_second_half_computes_all_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    loss = model(torch.randn(5, 6)).sum()
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    halves = SplitBackward([loss], None, [], list(model.parameters()))
    assert halves.compute_input_gradients() == []
    for (_, got), grad in zip(halves.compute_weight_gradients(), whole, strict=True):
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
        halves.compute_input_gradients()
        first = products[:]
        halves.compute_weight_gradients()
    assert first == [(5, 8), (5, 6)], "gradients of inputs"
    assert sorted(products[2:]) == [(7, 8), (8, 6)], "gradients of weights"


def test_the_second_half_frees_the_graph() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
    value = torch.randn(5, 6, requires_grad=True)
    middle = model[:2](value)
    kept, output = weakref.ref(middle), model[2](middle)
    halves = SplitBackward([output], [torch.ones(5, 8)], [value], list(model.parameters()))
    del middle, output
    halves.compute_input_gradients()
    assert kept() is not None, "the second half needs it"
    halves.compute_weight_gradients()
    assert kept() is None


class Counted(torch.autograd.Function):
    """A product, whose backward counts its runs."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Counted.runs += 1
        value, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ value


class Hooked(nn.Module):
    """Layers with a hook of one kind. `ran` has the gradient that the hook got in each of its runs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last, self.kind = nn.Linear(6, 6), nn.Linear(6, 6), kind
        self.ran: list[Tensor] = []
        if kind == "of a weight":
            self.first.weight.register_hook(self._double)
        if kind == "of a module":
            self.first.register_full_backward_hook(lambda _module, down, up: (self._double(up[0]) - up[0] + down[0],))

    def forward(self, value: Tensor) -> Tensor:
        weight = self.first.weight.tanh()
        made = Counted.apply(self.first(value), weight)  # type: ignore[no-untyped-call]
        out = self.last(torch.tanh(made))
        node: Any = {"Function": made, "inner weight": weight}.get(self.kind.split(", ")[-1], out)
        if self.kind.startswith("of a tensor"):
            node.register_hook(self._double)
        elif self.kind.startswith("before a node"):
            node.grad_fn.register_prehook(lambda up: (self._double(up[0]),))
        elif self.kind.startswith("behind a node"):
            node.grad_fn.register_hook(
                lambda down, up: (self._double(up[0]), *(grad if grad is None else grad * 3 for grad in down))[1:]
            )
        elif self.kind == "retain_grad":
            out.retain_grad()
            self.kept = out
        return torch.tanh(out)

    def _double(self, grad: Tensor) -> Tensor:
        self.ran.append(grad.clone())
        return grad * 2


HOOKS = [
    f"{hook}{place}"
    for hook in ("of a tensor", "before a node", "behind a node")
    for place in ("", ", Function", ", inner weight")
]


@pytest.mark.parametrize("kind", [*HOOKS, "of a weight", "of a module", "retain_grad"])
def test_a_hook_runs_once_with_the_gradient_of_a_whole_backward(kind: str) -> None:
    model = Hooked(kind).double()
    value = torch.randn(5, 6, dtype=torch.double, requires_grad=True)
    weights, gradient = list(model.parameters()), torch.randn(5, 6, dtype=torch.double)
    Counted.runs = 0
    whole = torch.autograd.grad(model(value), [value, *weights], gradient)
    ran, kept = [*model.ran], model.kept.grad if kind == "retain_grad" else None
    model.ran.clear()
    halves = SplitBackward([model(value)], [gradient], [value], weights)
    found = [*halves.compute_input_gradients(), *(grad for _, grad in halves.compute_weight_gradients())]
    torch.testing.assert_close(found, [*whole], rtol=0, atol=0)
    torch.testing.assert_close(model.ran, ran, rtol=0, atol=0)
    assert Counted.runs == 2, "once in each backward"
    assert len(ran) == (kind != "retain_grad")
    if kept is not None:
        assert torch.equal(model.kept.grad, kept)  # type: ignore[arg-type]


def test_a_hook_of_a_weight_used_at_several_places_gets_the_sum() -> None:
    model, ran = Twice().double(), list[Tensor]()
    model.shared.weight.register_hook(lambda grad: ran.append(grad) or grad.clamp(-0.1, 0.1))
    value = torch.randn(5, 6, dtype=torch.double, requires_grad=True)
    weights, gradient = [model.shared.weight, model.scaled.bias], torch.randn(5, 6, dtype=torch.double)
    whole = torch.autograd.grad(model(value), weights, gradient)
    halves = SplitBackward([model(value)], [gradient], [value], weights)
    halves.compute_input_gradients()
    torch.testing.assert_close([grad for _, grad in halves.compute_weight_gradients()], [*whole], rtol=0, atol=0)
    assert len(ran) == 2 and torch.equal(*ran)


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
    found = dict(enumerate(halves.compute_input_gradients())) | {
        2 + _place(weights, w): grad for w, grad in halves.compute_weight_gradients()
    }
    for number, wanted in enumerate(whole):
        torch.testing.assert_close(found.get(number), wanted, rtol=1e-14, atol=1e-14)


def _place(weights: list[Tensor], weight: Tensor) -> int:
    return next(number for number, each in enumerate(weights) if each is weight)
