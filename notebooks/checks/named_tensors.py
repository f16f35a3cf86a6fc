"""Checks of lesson 90."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from checks import exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from rpcbench import named
from rpcbench.named import NamedTensor, contract, names_of

Answer = Callable[..., Any]


@exercise(
    "Without `over` in the result of `mean`, torch would line it up from the right. What keeps the dimension there?",
    "Begin with `x - x.mean(over, keepdim=True)`.",
)
def standardise(answer: Answer) -> None:
    """`answer(x, over)` has mean 0 and deviation 1 over that dimension, wherever it stands."""
    x = named.rand(3, 4, 5, names=("N", "T", "C"))
    for over in ("C", "N", "T"):
        with trying(f"standardise(x, {over!r}) of a tensor (N, T, C)"):
            found = returned(_asked(answer, x, over))
            _names(found, x.names)
        place = x.names.index(over)
        plain = x.rename(None)
        expected = (plain - plain.mean(place, keepdim=True)) / plain.std(place, keepdim=True)
        _same(found, expected, f"Over {over!r} the mean should be 0 and the standard deviation 1.")
    right("By name, wherever the dimension stands.")


@exercise(
    "The two must be lined up by name before they are multiplied. Which method takes the order from another tensor?",
    "Begin with `scale.align_as(images)`, and look at its shape.",
)
def scale_channels(answer: Answer) -> None:
    """`answer(images, scale)` multiplies each channel by its number, wherever the channels stand."""
    scale = named.tensor([1.0, 10.0, 100.0], names=("C",))
    for order in (("N", "H", "W", "C"), ("N", "C", "H", "W"), ("C", "H", "W"), ("N", "C", "H", "W", "D")):
        images = named.rand(*(3,) * len(order), names=order)
        with trying(f"For images ({', '.join(order)}) it"):
            found = returned(_asked(answer, images, scale))
            _names(found, order)
        shape = [3 if name == "C" else 1 for name in order]
        expected = images.rename(None) * scale.rename(None).view(shape)
        _same(found, expected, f"For images ({', '.join(order)}) the numbers went to another dimension than C.")
    right("One line for every layout.")


@exercise(
    "There are two products, each a `contract`: one sums over E, the other over S. `query.size('E')` is the size of E.",
    "Begin with `scores = contract(query, key, to=('N', 'T', 'S')) / query.size('E') ** 0.5`.",
)
def attention(answer: Answer) -> None:
    """`answer(query, key, value)` is attention, whatever the order of the dimensions."""
    query, key = named.rand(2, 3, 4, names=("N", "T", "E")), named.rand(2, 5, 4, names=("N", "S", "E")) * 3
    value = named.rand(2, 5, 7, names=("N", "S", "V"))
    expected = scaled_dot_product_attention(*(each.rename(None) for each in (query, key, value)))
    for given in (key, key.align_to("E", "S", "N")):
        with trying(f"For a key ({', '.join(map(str, given.names))}) it"):
            found = returned(_asked(answer, query, given, value))
        _names(found, ("N", "T", "V"))
        _same(found, expected, _wrong(found, query, given, value))
    right("Not one transpose.")


def _wrong(found: Tensor, query: NamedTensor, key: NamedTensor, value: NamedTensor) -> str:
    scores = contract(query, key, to=("N", "T", "S"))
    over_queries = contract((scores / 2).softmax("T"), value, to=("N", "T", "V"))
    if _close(found, over_queries):
        return "The weights of each query should add up to 1: over which dimension is that?"
    if _close(found, contract(scores.softmax("S"), value, to=("N", "T", "V"))):
        return "The scores grow with the size of E: divide them by its root, before the softmax."
    if _close(found, contract((scores / 4).softmax("S"), value, to=("N", "T", "V"))):
        return "The scores should be divided by the square root of the size of E, not by the size."
    return "The names are right, the numbers are not those of attention."


@exercise(
    "`unflatten` makes two dimensions of E, and `flatten` one of two. In between it is attention with one name more.",
    "Begin with `query.unflatten('E', [('head', heads), ('D', query.size('E') // heads)])`; do so for the others, too.",
)
def with_heads(answer: Answer) -> None:
    """`answer(query, key, value, heads)` is attention with several heads, whatever the order of the dimensions."""
    orders = (("N", "T", "E"), ("N", "S", "E")), (("E", "T", "N"), ("S", "N", "E")), (("T", "N", "E"), ("E", "N", "S"))
    for heads, size in ((2, 6), (3, 6), (1, 4), (4, 8)):
        query = named.rand(2, 3, size, names=("N", "T", "E")) * 3
        key, value = (named.rand(2, 5, size, names=("N", "S", "E")) * 3 for _ in range(2))
        parts = (each.rename(None).unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value))
        expected = scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        for of_query, of_keys in orders:
            given = query.align_to(*of_query), key.align_to(*of_keys), value.align_to(*of_keys[::-1])
            told = ", ".join(
                f"a {name} ({', '.join(map(str, each.names))})"
                for name, each in zip(("query", "key", "value"), given, strict=True)
            )
            with trying(f"For {told} and {heads} heads it"):
                found = returned(_asked(answer, *given, heads))
            _names(found, ("N", "T", "E"))
            _same(found, expected, f"With {told}, of size {size} in E, and {heads} heads the numbers are not right.")
    right("Heads are one dimension more, and nothing else changes.")


def _asked(answer: Answer, *given: Any) -> Any:
    """What the answer says; it must leave its tensors alone."""
    before = [_plain(each).clone() if isinstance(each, Tensor) else each for each in given]
    names = [names_of(each) if isinstance(each, Tensor) else () for each in given]
    found = answer(*given)
    for each, values, were in zip(given, before, names, strict=True):
        if isinstance(each, Tensor):
            same = names_of(each) == were and torch.equal(_plain(each), values)
            require(same, f"Your function has changed the tensor ({', '.join(map(str, were))}) that it was given.")
    return found


def _names(found: Any, expected: tuple[str | None, ...]) -> None:
    require(isinstance(found, Tensor), f"It should return a tensor, not {shown(found)}.")
    names = names_of(found)
    require(any(names), "The names are gone: the result should have some.")
    require(names == tuple(expected), f"The result should be ({', '.join(map(str, expected))}), not {names}.")


def _plain(tensor: Tensor) -> Tensor:
    return tensor.rename(None) if isinstance(tensor, NamedTensor) else tensor


def _close(found: Tensor, expected: Tensor) -> bool:
    plain, other = _plain(found), _plain(expected)
    return plain.shape == other.shape and torch.allclose(plain, other, atol=1e-5)


def _same(found: Tensor, expected: Tensor, hint: str) -> None:
    require(_close(found, expected), hint)
