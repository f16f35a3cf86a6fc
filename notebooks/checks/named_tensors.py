"""Checks of lesson 90."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from checks import require, returned, right, shown, trying
from rpcbench import named
from rpcbench.named import NamedTensor, contract, names_of

Answer = Callable[..., Any]


def standardise(answer: Answer) -> None:
    """`answer(x, over)` has mean 0 and deviation 1 over that dimension, wherever it stands."""
    x = named.rand(3, 4, 5, names=("N", "T", "C"))
    for over in ("C", "N", "T"):
        with trying(f"standardise(x, {over!r}) of a tensor (N, T, C)"):
            found = returned(answer(x, over))
            _names(found, x.names)
        place = x.names.index(over)
        plain = x.rename(None)
        expected = (plain - plain.mean(place, keepdim=True)) / plain.std(place, keepdim=True)
        _same(found, expected, f"Over {over!r} the mean should be 0 and the standard deviation 1.")
    right("By name, wherever the dimension stands.")


def scale_channels(answer: Answer) -> None:
    """`answer(images, scale)` multiplies each channel by its number, wherever the channels stand."""
    scale = named.tensor([1.0, 10.0, 100.0], names=("C",))
    for order in (("N", "H", "W", "C"), ("N", "C", "H", "W"), ("C", "H", "W"), ("N", "C", "H", "W", "D")):
        images = named.rand(*(3,) * len(order), names=order)
        with trying(f"For images ({', '.join(order)}) it"):
            found = returned(answer(images, scale))
            _names(found, order)
        shape = [3 if name == "C" else 1 for name in order]
        expected = images.rename(None) * scale.rename(None).view(shape)
        _same(found, expected, f"For images ({', '.join(order)}) the numbers went to another dimension than C.")
    right("One line for every layout.")


def attention(answer: Answer) -> None:
    """`answer(query, key, value)` is attention, whatever the order of the dimensions."""
    query, key = named.rand(2, 3, 4, names=("N", "T", "E")), named.rand(2, 5, 4, names=("N", "S", "E")) * 3
    value = named.rand(2, 5, 4, names=("N", "S", "V"))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value).rename(None)
    for given in (key, key.align_to("E", "S", "N")):
        with trying():
            found = returned(answer(query, given, value))
        _names(found, ("N", "T", "V"))
        _same(found, expected, _wrong(found, query, given, value))
    right("Not one transpose.")


def _wrong(found: Tensor, query: NamedTensor, key: NamedTensor, value: NamedTensor) -> str:
    scores = contract(query, key, to=("N", "T", "S"))
    over_queries = contract((scores / 2).softmax("T"), value, to=("N", "T", "V"))
    if torch.allclose(found.rename(None), over_queries.rename(None)):
        return "The weights of each query should add up to 1: over which dimension is that?"
    if torch.allclose(found.rename(None), contract(scores.softmax("S"), value, to=("N", "T", "V")).rename(None)):
        return "The scores grow with the size of E: divide them by its root, before the softmax."
    return "The names are right, the numbers are not those of attention."


def _names(found: Any, expected: tuple[str | None, ...]) -> None:
    require(isinstance(found, Tensor), f"It should return a tensor, not {shown(found)}.")
    names = names_of(found)
    require(any(names), "The names are gone: the result should have some.")
    require(names == tuple(expected), f"The result should be ({', '.join(map(str, expected))}), not {names}.")


def _same(found: Tensor, expected: Tensor, hint: str) -> None:
    require(torch.allclose(found.rename(None), expected, atol=1e-5), hint)
