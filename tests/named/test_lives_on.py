"""Copies, pickles, files, views and gradients keep names."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from rpcbench import named
from rpcbench.named import NamedTensor, NamesError


def weight() -> NamedTensor:
    return named.rand(3, 4, names=("N", "C"), requires_grad=True)


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # weights only, which is its default


WAYS: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda value: pickle.loads(pickle.dumps(value)),
    lambda value: cloudpickle.loads(cloudpickle.dumps(value)),
    _saved,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [weight, lambda: weight().detach().t(), lambda: nn.Parameter(weight().detach())])
def test_copies_and_pickles_keep_names(way: Callable[[Any], Any], make: Callable[[], NamedTensor]) -> None:
    value = make()
    made = way({"a": value})["a"]
    assert (type(made), made.names, made.requires_grad) == (NamedTensor, value.names, value.requires_grad)
    assert (made.is_leaf, made.stride(), torch.equal(made, value)) == (True, value.stride(), True)
    assert isinstance(made, nn.Parameter) == isinstance(value, nn.Parameter)


def test_a_deep_copy_shares_memory_only_within_itself() -> None:
    whole = weight().detach()
    one, other, again = copy.deepcopy([whole, whole.t(), whole])
    one.zero_()
    assert again is one
    assert float(other.sum()) == 0
    assert float(whole.sum()) > 0
    with pytest.raises(RuntimeError, match="detach"):
        copy.deepcopy(weight() * 2)


def test_a_deep_copy_includes_the_gradient() -> None:
    value = weight()
    value.sum().backward()
    made = copy.deepcopy(value)
    assert made.grad.names == ("N", "C")
    assert made.grad.data_ptr() != value.grad.data_ptr()


def test_views_share_memory_and_have_their_own_names() -> None:
    whole = weight().detach()
    views = [whole.t(), whole[1:], whole.detach(), whole.data, whole.unsqueeze(0), whole.transpose("N", "C")]
    assert [view.names for view in views] == [
        ("C", "N"), ("N", "C"), ("N", "C"), ("N", "C"), (None, "N", "C"), ("C", "N"),
    ]  # fmt: skip
    whole.zero_()
    assert all(not view.any() for view in views)
    same = whole.to(torch.float)  # the same object
    same.rename_("A", "B")
    assert whole.names == ("A", "B")


def test_flattening_one_dimension_does_not_change_the_tensor() -> None:
    value = weight()
    assert value.flatten(1).names == ("N", None)
    assert value.names == ("N", "C")


def test_gradients_have_the_names_of_their_tensor() -> None:
    value, scale = weight(), named.ones(4, names=("C",), requires_grad=True)
    (value * scale).sum().backward()
    assert (value.grad.names, scale.grad.names) == (("N", "C"), ("C",))
    assert value.grad is value.grad
    (value * scale).sum().backward()
    assert torch.equal(value.grad.rename(None), torch.full((3, 4), 2.0))
    value.grad.zero_()
    assert float(value.grad.sum()) == 0
    value.grad = None
    assert value.grad is None
    value.grad = torch.ones(3, 4)
    assert value.grad.names == ("N", "C")
    with pytest.raises(NamesError, match=r"grad of \(N=3, C=4\)"):
        value.grad = named.ones(3, 4, names=("C", "N"))


def test_backward_and_grad_accept_and_return_named_gradients() -> None:
    value = weight()
    doubled = value * 2
    doubled.backward(torch.ones(3, 4), retain_graph=True)
    with pytest.raises(NamesError, match="backward"):
        doubled.backward(named.ones(3, 4, names=("C", "N")))
    [gradient] = torch.autograd.grad(doubled.sum(), value, create_graph=True)
    assert (gradient.names, gradient.sum("N").names) == (("N", "C"), ("C",))
    [second] = torch.autograd.grad([(value**3).sum()], [value], [torch.tensor(1.0)], retain_graph=True)
    torch.testing.assert_close(second.rename(None), 3 * value.detach().rename(None) ** 2)
    plain = torch.rand(4, requires_grad=True)
    assert type(torch.autograd.grad((value * plain).sum(), plain)[0]) is Tensor


def test_grad_accepts_gradient_edges_of_named_tensors() -> None:
    value = weight()
    doubled = value * 2
    leaf, end = get_gradient_edge(value), get_gradient_edge(doubled)
    ones = torch.ones(3, 4)
    [gradient] = torch.autograd.grad(end, value, ones, retain_graph=True)
    assert (gradient.names, gradient.rename(None).unique().tolist()) == (("N", "C"), [2.0])
    given, plain = torch.autograd.grad([end], [doubled, leaf], [ones])
    assert (given.names, type(plain), plain.unique().tolist()) == (("N", "C"), Tensor, [2.0])


def test_backward_accepts_several_tensors_and_chosen_inputs() -> None:
    value, other = weight(), weight()
    made = [value * 2, other * value]
    torch.autograd.backward(made, [torch.ones(3, 4), named.ones(3, 4, names=("N", "C"))], inputs=[value])
    assert (value.grad.names, other.grad) == (("N", "C"), None)
    assert torch.equal(value.grad.rename(None), (other + 2).rename(None))
    (value * other).sum().backward(inputs=[other])
    assert torch.equal(other.grad.rename(None), value.rename(None))
    with pytest.raises(NamesError, match=r"grad of \(N=3, C=4\)"):
        torch.autograd.backward([value * 2], [named.ones(3, 4, names=("C", "N"))])


def test_hooks_get_gradients_with_names() -> None:
    value, seen = weight(), []

    def hook(gradient: NamedTensor) -> NamedTensor:
        seen.append(gradient.names)
        return gradient * gradient.sum("C").align_as(gradient)

    value.register_hook(hook)
    value.sum().backward()
    assert seen == [("N", "C")]
    assert torch.equal(value.grad.rename(None), torch.full((3, 4), 4.0))


def test_a_plain_tensor_in_a_graph_with_named_ones_gets_a_plain_gradient() -> None:
    plain = torch.rand(3, 4, requires_grad=True)
    (named.named(plain, "N", "C") * weight()).sum().backward()
    assert type(plain.grad) is Tensor
    assert type(plain) is Tensor


def test_replaced_data_keeps_the_names() -> None:
    value = weight()
    value.data = torch.zeros(5, 4)
    assert value.names == ("N", "C")
    for wrong in (torch.zeros(4), named.zeros(3, 4, names=("C", "N"))):
        with pytest.raises(NamesError, match="data="):
            value.data = wrong


def test_named_tensors_can_be_formatted() -> None:
    assert f"{named.tensor(1.25, names=()):.1f}" == "1.2"
    assert f"{named.ones(1, names=('N',))}" == "NamedTensor([1.], (N=1))"
