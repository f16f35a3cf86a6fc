"""Layers keep, add and check names; products by names; optimizers on named parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rpcbench import named
from rpcbench.named import NamedTensor, NamesError, contract, name_parameters


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return name_parameters(nn.Linear(4, 5), weight=("H", "C"), bias=("H",))


def x(*names: str, sizes: tuple[int, ...] = ()) -> NamedTensor:
    known = {"N": 3, "C": 4, "H": 8, "W": 8, "T": 5, "S": 6, "E": 4, "V": 2}
    return named.rand(*(known[name] for name in names), names=names)


LAYERS: list[tuple[Callable[[], nn.Module], Callable[[], NamedTensor], tuple[str | None, ...]]] = [
    (linear, lambda: x("N", "C"), ("N", "H")),
    (lambda: nn.Linear(4, 5), lambda: x("N", "T", "C"), ("N", "T", None)),
    (
        lambda: name_parameters(nn.Conv2d(4, 5, 3), weight=("F", "C", None, None), bias=("F",)),
        lambda: x("N", "C", "H", "W"),
        ("N", "F", "H", "W"),
    ),
    (lambda: name_parameters(nn.Conv1d(4, 5, 3), weight=("F", "C", ...)), lambda: x("C", "W"), ("F", "W")),
    (lambda: name_parameters(nn.LayerNorm(4), weight=("C",), bias=("C",)), lambda: x("N", "T", "C"), ("N", "T", "C")),
    (lambda: name_parameters(nn.BatchNorm1d(4), weight=("C",)), lambda: x("N", "C"), ("N", "C")),
    (lambda: name_parameters(nn.GroupNorm(2, 4), weight=("C",)), lambda: x("N", "C", "W"), ("N", "C", "W")),
    (lambda: name_parameters(nn.RMSNorm(4), weight=("C",)), lambda: x("N", "C"), ("N", "C")),
    (
        lambda: name_parameters(nn.Embedding(9, 4), weight=("words", "E")),
        lambda: named.tensor([[1, 2, 3]], names=("N", "T")),
        ("N", "T", "E"),
    ),
    (lambda: nn.Sequential(nn.ReLU(), nn.GELU(), nn.Dropout(), nn.Softmax(-1)), lambda: x("N", "C"), ("N", "C")),
    (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(2)), lambda: x("N", "C", "H", "W"), ("N", "C", "H", "W")),
    (lambda: nn.Flatten(), lambda: x("N", "C", "H", "W"), ("N", None)),
]


@pytest.mark.parametrize(("make", "value", "expected"), LAYERS)
def test_layers_keep_names_and_add_those_of_their_parameters(
    make: Callable[[], nn.Module], value: Callable[[], NamedTensor], expected: tuple[str | None, ...]
) -> None:
    layer, given = make(), value()
    names = given.names
    torch.manual_seed(1)
    made = layer(given)
    assert (made.names, given.names) == (expected, names)
    torch.manual_seed(1)
    plain = copy.deepcopy(layer)
    for module in plain.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, NamedTensor):
                module._parameters[name] = nn.Parameter(parameter.detach().rename(None))
    assert torch.equal(made.rename(None), plain(given.rename(None)))


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: linear()(x("C", "N")), r"linear of \(C=4, N=3\) and \(H=5, C=4\).*input is 'N' and the weight's 'C'"),
    (lambda: linear()(x("N", "C").rename(N="H")), "'H' would occur twice"),
    (lambda: functional.layer_norm(x("N", "C"), (4,), x("E")), "layer_norm .* has 'C' and the second 'E'"),
    (lambda: functional.conv1d(x("N", "C", "W"), named.rand(5, 4, 3, names=("F", "E", None))), "channels .* 'C'"),
    (lambda: functional.mse_loss(x("N", "C"), x("E")), "mse_loss"),
    (lambda: functional.cross_entropy(x("N", "C"), named.tensor([0, 1, 2], names=("T",))), "cross_entropy"),
    (lambda: torch.einsum("ab,ab->a", x("N", "C"), x("N", "E")), "'b' is 'C' and another 'E'"),
    (lambda: contract(x("N", "C"), torch.rand(4), to=("N",)), "all dimensions need names"),
    (lambda: contract(x("N", "C"), to=("Q",)), "none of them has 'Q'"),
    (lambda: name_parameters(nn.Linear(2, 2), weights=("A", "B")), r"no parameter 'weights', only \['weight', 'b"),
    (lambda: name_parameters(nn.Linear(2, 2), weight=("A",)), r"named of \(2, 2\): 1 names"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_layers_and_products_refuse_wrong_names(call: Callable[[], object], message: str) -> None:
    with pytest.raises(NamesError, match=message):
        call()


def test_losses_remove_the_names_that_they_reduce() -> None:
    scores = x("N", "C")
    assert functional.mse_loss(scores, scores).names == ()
    assert functional.mse_loss(scores, scores, reduction="none").names == ("N", "C")
    target = named.tensor([0, 1, 2], names=("N",))
    assert functional.cross_entropy(scores, target, reduction="none").names == ("N",)
    assert functional.cross_entropy(scores, scores.softmax("C")).names == ()


def attention(query: NamedTensor, key: NamedTensor, value: NamedTensor) -> NamedTensor:
    scores = contract(query, key, to=("N", "T", "S")) / query.size("E") ** 0.5
    return contract(scores.softmax("S"), value, to=("N", "T", "V"))


def test_attention_by_names_equals_attention_of_torch() -> None:
    query, key, value = x("N", "T", "E"), x("N", "S", "E"), x("N", "S", "V")
    torchs = functional.scaled_dot_product_attention(query, key, value)
    ours = attention(query, key.align_to("E", ...), value.align_to("V", "S", "N"))
    assert ours.names == torchs.names == ("N", "T", "V")
    torch.testing.assert_close(ours.rename(None), torchs.rename(None))
    by_name = functional.scaled_dot_product_attention(query=query, key=key, value=value)
    assert by_name.names == torchs.names and torch.equal(by_name.rename(None), torchs.rename(None))
    chosen = torch.where(condition=query > 0, input=query, other=query)
    assert chosen.names == query.names and torch.equal(chosen.rename(None), query.rename(None))
    with pytest.raises(NamesError, match="scaled_dot_product_attention"):
        functional.scaled_dot_product_attention(query, value, key)


def test_einsum_names_its_result() -> None:
    assert torch.einsum("nc,nc->n", x("N", "C"), x("N", "C")).names == ("N",)
    assert torch.einsum("nc,kc", x("N", "C"), torch.rand(2, 4)).names == (None, "N")


def train(layer: nn.Linear, kind: type[torch.optim.Optimizer], given: Tensor) -> list[Tensor]:
    optimizer = kind(layer.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        optimizer.zero_grad()
        layer(given).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    return [*layer.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_optimizers_train_named_parameters_like_plain_ones(kind: type[torch.optim.Optimizer]) -> None:
    given = x("N", "C")
    torch.manual_seed(0)
    plain = train(nn.Linear(4, 5), kind, given.rename(None))
    trained = train(linear(), kind, given)
    assert [each.names for each in trained] == [("H", "C"), ("H",)]
    assert all(each.grad is not None and each.grad.names == each.names for each in trained)
    for ours, theirs in zip(trained, plain, strict=True):
        torch.testing.assert_close(ours.detach().rename(None), theirs.detach(), rtol=0, atol=0)


def test_modules_keep_names_through_state_dicts_copies_and_casts() -> None:
    layer = linear()
    layer.load_state_dict(nn.Linear(4, 5).state_dict())
    assert copy.deepcopy(layer).double().weight.names == layer.weight.names == ("H", "C")
    other = linear()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.weight, layer.weight)
    turned = name_parameters(nn.Linear(4, 5), weight=("C", "H"))
    with pytest.raises(RuntimeError, match="copy_ of"):
        turned.load_state_dict(layer.state_dict())
