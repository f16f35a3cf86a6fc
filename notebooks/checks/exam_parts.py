"""Parts of the exam: how a question is counted, and collectives and texts that its checks share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from checks import exercise, require, shown
from checks.ranks import Ranks

Tensor = torch.Tensor
Check = Callable[..., None]
Link = tuple[float, float]

questions: list[str] = []
solved: set[str] = set()  # in this kernel; the last answer to a question counts


def question(check: Check) -> Check:
    """An exercise without hints, which `result` counts."""
    tried = exercise()(check)
    questions.append(check.__name__)

    @functools.wraps(check)
    def last_counts(*answers: Any) -> None:
        solved.discard(check.__name__)
        tried(*answers)
        solved.add(check.__name__)

    return last_counts


def result() -> None:
    """Print how many questions are answered right in this kernel."""
    print(f"{len(solved)} of {len(questions)} right.")
    if left := [str(number) for number, name in enumerate(questions, 1) if name not in solved]:
        print(f"Not yet right: {'question' if len(left) == 1 else 'questions'} {', '.join(left)}.")


# -- parts
def all_gather(ranks: Ranks, rank: int) -> Callable[[Tensor], list[Tensor]]:
    def all_gather(tensor: Tensor) -> list[Tensor]:
        require(isinstance(tensor, Tensor), f"`all_gather` takes a tensor, not {shown(tensor)}.")
        ranks.count(rank, "all_gather", tensor.numel())
        call = f"all_gather with shape {tuple(tensor.shape)}"
        return [each.clone() for each in ranks.meet(rank, call, tensor.detach().clone())]

    return all_gather


def all_to_all(ranks: Ranks, rank: int) -> Callable[[list[Tensor]], list[Tensor]]:
    def all_to_all(parts: list[Tensor]) -> list[Tensor]:
        told = f"{ranks.size} ranks: rank {rank} gives all_to_all"
        require(isinstance(parts, list | tuple), f"{told} {shown(parts)}, not a list.")
        require(len(parts) == ranks.size, f"{told} a list of {len(parts)}; a tensor for each rank is wanted.")
        for part in parts:
            require(isinstance(part, Tensor), f"{told} {shown(part)} in its list, not a tensor.")
        ranks.count(rank, "all_to_all", sum(part.numel() for part in parts))
        found = ranks.meet(rank, "all_to_all", [part.detach().clone() for part in parts])
        return [theirs[rank] for theirs in found]

    return all_to_all


def numbers(value: Any) -> str:
    if not isinstance(value, Tensor):
        return shown(value)
    flat = [round(each, 3) for each in value.flatten().tolist()]
    return shown([int(each) if float(each).is_integer() else each for each in flat])


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), atol=1e-5)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers; nan is the same as nan."""
    return one.shape == other.shape and torch.equal(one.nan_to_num(nan=0.125), other.nan_to_num(nan=0.125))
