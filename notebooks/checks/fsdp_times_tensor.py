"""Checks of lesson 31."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from checks import NotYet, on_threads, require, returned, right, shown, trying

PATIENCE = 20.0
Cut = Callable[[str, int], Tensor]


class Ranks:
    """Ranks as threads, each with its pieces of two matrices; counts the sums that they ask for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sums = [0] * size
        self.matrices = {"up": torch.randn(4, 6 * size), "down": torch.randn(6 * size, 4 * size)}
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._meeting = threading.Barrier(size, timeout=PATIENCE)

    def cut(self, rank: int) -> Cut:
        def cut(name: str, dim: int) -> Tensor:
            require(name in self.matrices, f'`cut` knows "up" and "down", not {shown(name)}.')
            require(dim in (0, 1), f"A matrix has the dimensions 0 and 1, not {shown(dim)}.")
            return self.matrices[name].chunk(self.size, dim)[rank]

        return cut

    def all_reduce(self, rank: int) -> Callable[[Tensor], None]:
        def all_reduce(tensor: Tensor) -> None:
            require(isinstance(tensor, Tensor), "`all_reduce` adds up a tensor, in place.")
            self.sums[rank] += 1
            self._parts[rank] = tensor.clone()
            try:
                self._meeting.wait()
                total = torch.stack(self._parts).sum(0)
                self._meeting.wait()
            except threading.BrokenBarrierError:
                raise NotYet("A rank waits for the others in vain: all call `all_reduce` equally often.") from None
            tensor.copy_(total)

        return all_reduce

    def run(self, answer: Callable[..., Any], x: Tensor) -> list[Any]:
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            with trying("The function"):
                found[rank] = returned(answer(x.clone(), self.cut(rank), self.all_reduce(rank)))

        on_threads(self.size, one, failed=self._meeting.abort)
        return found


def feed_forward(answer: Callable[[Tensor, Cut, Callable[[Tensor], None]], Any]) -> None:
    """`answer(x, cut, all_reduce)` is relu(x @ up) @ down on every rank, with one sum."""
    torch.manual_seed(17)
    ranks, x = Ranks(2), torch.randn(3, 4)
    wanted = torch.relu(x @ ranks.matrices["up"]) @ ranks.matrices["down"]
    for found in ranks.run(answer, x):
        require(isinstance(found, Tensor), f"It should return a tensor, not {shown(found)}.")
        require(found.shape == wanted.shape, f"The result should have the shape {tuple(wanted.shape)} on each rank, "
                f"and has {tuple(found.shape)}.")  # fmt: skip
        if not torch.allclose(found, wanted, atol=1e-4):
            require(max(ranks.sums) > 0, "Each rank has its part of the sum. Who adds them up?")
            raise NotYet("The numbers are not those of relu(x @ up) @ down: relu must see whole sums.")
    require(max(ranks.sums) == 1, f"Right numbers; but with {max(ranks.sums)} sums where one is enough.")
    right("Columns of the first, rows of the second: one sum for both.")


MODELS = [  # (numbers, whether tensor parallel cuts them) of each parameter; dp; tp
    ([(1000, True)], 1, 1),
    ([(1024, False), (4096, True)], 2, 2),
    ([(64, False), (64, True)], 4, 2),
    ([(96, False), (960, True), (96, False)], 2, 4),
]


def bytes_held(answer: Callable[[list[tuple[int, bool]], int, int], Any]) -> None:
    """`answer(parameters, dp, tp)` is what a rank holds of parameters, gradients and the state of Adam."""
    for parameters, dp, tp in MODELS:
        with trying():
            found = returned(answer(list(parameters), dp, tp))
        require(isinstance(found, int | float), f"It should return a number, not {shown(found)}.")
        cut, whole = (sum(count for count, by_tp in parameters if by_tp is kind) for kind in (True, False))
        wanted = 16 * (cut / (dp * tp) + whole / dp)
        if found != wanted:
            raise NotYet(_hint(float(found), cut, whole, dp, tp, f"{parameters}, dp={dp}, tp={tp}"))
    right("As the panel says.")


def _hint(found: float, cut: int, whole: int, dp: int, tp: int, case: str) -> str:
    if found in (4 * (cut / (dp * tp) + whole / dp), 8 * (cut / (dp * tp) + whole / dp)):
        return f"{case}: a rank also holds a gradient for each number, and two numbers of Adam. All have four bytes."
    if found == 16 * (cut + whole) / (dp * tp):
        return f"{case}: what tensor parallel does not cut is cut by FSDP alone."
    if found == 16 * (cut / (dp * tp) + whole):
        return f"{case}: FSDP cuts the others, too."
    return f"{case}: a rank holds other than {found:g} bytes."


def gathers(answer: Callable[[int, bool], Any]) -> None:
    """`answer(blocks, keep)` counts the all-gathers of parameters in a step of FSDP."""
    for blocks in (7, 2, 1):
        for keep in (False, True):
            with trying():
                found = returned(answer(blocks, keep))
            wanted = blocks * (1 if keep else 2) + 1
            case = f"{blocks} block{'s' if blocks > 1 else ''}, {'kept' if keep else 'not kept'}"
            require(found != wanted - 1, f"{case}: not {found}. The model itself has parameters outside of its blocks.")
            require(found != wanted + 1, f"{case}: not {found}. The model itself stays whole until its backward.")
            require(found == wanted, f"{case}: not {shown(found)}. Count in the timeline: who is gathered, and when?")
    right("Memory, or twice the traffic: you choose.")


def parameters_of(model: nn.Module) -> list[tuple[int, bool]]:
    """What `bytes_held` is given for the model of the lesson."""
    cut = ("query.weight", "key.weight", "value.weight", "out.weight", "up.weight", "up.bias", "down.weight")
    return [(each.numel(), name.endswith(cut)) for name, each in model.named_parameters()]
