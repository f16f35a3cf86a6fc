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
    three, two = named.rand(3, 4, 5, names=("N", "T", "C")), named.rand(4, 3, names=("row", "N"))
    for x, over in ((three, "C"), (three, "N"), (three, "T"), (two, "row"), (two, "N")):
        with trying(f"standardise(x, {over!r}) of a tensor ({', '.join(map(str, x.names))})"):
            found = returned(_asked(answer, x, over))
            _names(found, x.names)
        place = x.names.index(over)
        plain = x.rename(None)
        centred = plain - plain.mean(place, keepdim=True)
        expected = centred / plain.std(place, keepdim=True)
        told = f"Over {over!r} the mean of the result should be 0 and its standard deviation 1"
        mean, std = _plain(found).mean(place).abs().max().item(), _plain(found).std(place).mean().item()
        if mean > 0.01:
            told += f"; the mean is up to {mean:.2g}"
        elif _close(found, centred / plain.var(place, keepdim=True)):
            told += "; you divide by the variance"
        elif _close(found, centred / plain.std(place, keepdim=True, correction=0)):
            told += "; `x.std(over)` divides the sum of the squares by n - 1, and yours by n"
        else:
            told += f"; the deviation is {std:.2g} in the mean"
        _same(found, expected, f"{told}.")
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
    for size, count in ((4, 2), (9, 2)):
        query = named.rand(count, 3, size, names=("N", "T", "E"))
        key = named.rand(count, 5, size, names=("N", "S", "E")) * 3
        value = named.rand(count, 5, 7, names=("N", "S", "V"))
        expected = scaled_dot_product_attention(*(each.rename(None) for each in (query, key, value)))
        for given in (key, key.align_to("E", "S", "N"), key.align_to("S", "N", "E")):
            order = f"a key ({', '.join(map(str, given.names))})"
            with trying(f"For {order} it"):
                found = returned(_asked(answer, query, given, value))
            _names(found, ("N", "T", "V"))
            _same(found, expected, f"With {order}, of size {size} in E: {_wrong(found, query, given, value)}")
    right("Not one transpose.")


def _wrong(found: Tensor, query: NamedTensor, key: NamedTensor, value: NamedTensor) -> str:
    scores, size = contract(query, key, to=("N", "T", "S")), query.size("E")
    over_queries = contract((scores / size**0.5).softmax("T"), value, to=("N", "T", "V"))
    if _close(found, over_queries):
        return "the weights of each query should add up to 1: over which dimension is that?"
    if _close(found, contract(scores.softmax("S"), value, to=("N", "T", "V"))):
        return "the scores grow with the size of E: divide them by its root, before the softmax."
    if _close(found, contract((scores / size).softmax("S"), value, to=("N", "T", "V"))):
        return "the scores should be divided by the square root of the size of E, not by the size."
    return "the names are right, the numbers are not those of attention."


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
            why = _wrong_heads(found, (query, key, value), heads)
            _same(found, expected, f"With {told}, of size {size} in E, and {heads} heads {why}.")
    right("Heads are one dimension more, and nothing else changes.")


def _wrong_heads(found: Tensor, given: tuple[Tensor, Tensor, Tensor], heads: int) -> str:
    """The mistake in a result of several heads, where it is a common one."""
    query, key, value = (each.rename(None) for each in given)
    size = query.shape[-1]

    def attended(cut: Callable[[Tensor], Tensor], join: Callable[[Tensor], Tensor], scale: float) -> Tensor:
        return join(scaled_dot_product_attention(cut(query), cut(key), cut(value), scale=scale))

    def in_rows(each: Tensor) -> Tensor:  # head 0 has the first numbers
        return each.unflatten(-1, (heads, -1)).transpose(1, 2)

    def in_columns(each: Tensor) -> Tensor:  # head 0 has each `heads`-th number
        return each.unflatten(-1, (-1, heads)).movedim(-1, 1)

    def rows(each: Tensor) -> Tensor:
        return each.transpose(1, 2).flatten(2)

    def columns(each: Tensor) -> Tensor:
        return each.movedim(1, -1).flatten(2)

    own = (size // heads) ** -0.5
    one_head = scaled_dot_product_attention(query, key, value, scale=own)
    mistakes = {
        "the products are divided by the square root of the size of E, not of that of one head": attended(
            in_rows, rows, size**-0.5
        ),
        "the products are divided by no square root": attended(in_rows, rows, 1.0),
        "head 0 does not have the first numbers of each vector": attended(in_columns, columns, own),
        "head 0 does not have the first numbers of each vector, but of the result": attended(in_columns, rows, own),
        "the heads are right, and put together in another order": attended(in_rows, columns, own),
        "all heads have the same weights, as one head would": one_head,
    }
    return next((why for why, wrong in mistakes.items() if _close(found, wrong)), "the numbers are not right")


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
