"""Checks of lesson 11."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from checks import NotYet, require, returned, right, shown, trying

CarryBack = Callable[[list[Tensor], list[Tensor], list["Tensor | None"]], list["Tensor | None"]]


def carry_back(answer: CarryBack) -> None:
    """`answer(received, returned, gradients)` is one local backward pass in the middle of a distributed one."""
    a, b, lonely = received = [torch.rand(3, dtype=torch.double, requires_grad=True) for _ in range(3)]
    runs: list[Tensor] = []
    trunk = a * b
    trunk.register_hook(runs.append)
    sine, power, unused = computed = [trunk.sin(), trunk.exp(), lonely * trunk]
    gradients = [torch.tensor([1.0, -2.0, 3.0], dtype=torch.double), torch.rand(3, dtype=torch.double), None]
    wanted = [*torch.autograd.grad([sine, power], [a, b], gradients[:2], retain_graph=True), None]
    runs.clear()

    try:
        found = returned(answer(received, computed, gradients))
    except RuntimeError as error:
        raise NotYet(_explained(str(error))) from None
    require(isinstance(found, list), f"The answer should be a list, not {shown(found)}.")
    require(len(found) == 3, f"Three tensors were received, so three gradients go back, not {len(found)}.")
    require(len(runs) == 1, f"The part that two of the tensors share ran {len(runs)} times. One pass does it.")
    require(found[2] is None, "One received tensor is used only for what nobody needed: its gradient is None.")
    close = all(g is not None and torch.allclose(g, w) for g, w in zip(found[:2], wanted[:2], strict=True))
    require(close, f"The gradient of the first tensor should be {shown(wanted[0])}, and it is {shown(found[0])}.")
    require(unused.grad_fn is not None, "The returned tensors should stay as they are.")
    right("So a worker in the middle does its part.")


def _explained(error: str) -> str:
    if "second time" in error:
        return "The returned tensors share a part of the graph, and it was gone when the second pass came to it."
    return f"torch says: {error.splitlines()[0]}."


class _Asked(dict[str, list[str]]):
    """`behind`, which counts how often it is asked about each message."""

    def __init__(self, behind: dict[str, list[str]]) -> None:
        super().__init__(behind)
        self.questions: list[str] = []

    def __getitem__(self, message: str) -> list[str]:
        require(message not in self.questions, f"It asked twice about message {message}.")
        self.questions.append(message)
        return super().__getitem__(message)


def discover(answer: Callable[[list[str], dict[str, list[str]]], set[str]]) -> None:
    """`answer(found, behind)` is all that can be reached."""
    chain = {"a": ["b"], "b": ["c"], "c": [], "unused": ["c"]}
    diamond = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["e"], "e": [], "unused": []}
    two_roots = {"a": ["c"], "b": ["c", "d"], "c": [], "d": [], "unused": ["a"]}
    _discovered(answer, ["a"], chain, {"a", "b", "c"})
    _discovered(answer, ["a"], diamond, {"a", "b", "c", "d", "e"})
    _discovered(answer, ["a", "b"], two_roots, {"a", "b", "c", "d"})
    _discovered(answer, [], {"unused": []}, set())
    right("A call that nobody used is never found, and nobody waits for it.")


def _discovered(answer: Any, found: list[str], behind: dict[str, list[str]], wanted: set[str]) -> None:
    sends = returned(answer(list(found), _Asked(behind)))
    require(isinstance(sends, set), f"The answer should be a set, not {shown(sends)}.")
    where = f"With found={found} and behind={behind}:"
    for name in sorted(sends - wanted):
        raise NotYet(f"{where} no gradient will ever come to {name}.")
    for name in sorted(wanted - sends):
        raise NotYet(f"{where} {name} is missing; the loss depends on it.")


def step(answer: Callable[[Tensor, Any, Any], Sequence[Tensor]], weights: Sequence[Any]) -> None:
    """`answer(x, weight1, weight2)` is both gradients."""
    x = torch.rand(3, 4, dtype=torch.double)
    near = [weight.to_here().detach().requires_grad_() for weight in weights]
    wanted = torch.autograd.grad((torch.tanh(x @ near[0]) @ near[1]).square().mean(), near)
    with trying():
        found = returned(answer(x, *weights))
    require(len(found) == 2, f"The answer should be two gradients, not {shown(found)}.")
    for name, gradient, right_one in zip(("weight1", "weight2"), found, wanted, strict=True):
        require(isinstance(gradient, Tensor), f"{name} is still without a gradient: its part of the graph is cut off.")
        require(torch.allclose(gradient, right_one), f"The gradient of {name} is not that of the whole loss.")
    right("No cut is left.")
