"""Checks of questions 1 to 4 of the exam: calls, uneven gathers, autograd over calls, stale gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from checks import NotYet, read, require, returned, right, shown, trying
from checks.exam_parts import Tensor, all_gather, numbers, question, same
from checks.ranks import Ranks
from rpcbench.base.errors import count_noun


# -- 1
class Calls:
    """The calls of one trial, which watch that the window is kept."""

    def __init__(self, parts: Sequence[int], limit: int) -> None:
        self.parts, self.limit = parts, limit
        self.asked = f"{len(parts)} parts, at most {limit} under way"
        self.begun = 0
        self.under_way: list[int] = []

    def begin(self, part: int) -> Call:
        require(self.begun < len(self.parts), f"{self.asked}: you begin more calls than there are parts.")
        wanted = self.parts[self.begun]
        require(part == wanted, f"{self.asked}: call {self.begun + 1} is for {shown(part)}; the next part is {wanted}.")
        require(
            len(self.under_way) < self.limit,
            f"{self.asked}: you begin call {self.begun + 1}, and {len(self.under_way)} are under way already.",
        )
        self.begun += 1
        self.under_way.append(self.begun)
        return Call(self, self.begun, part * 10)

    def waited(self, number: int) -> None:
        if number not in self.under_way:
            return
        count = len(self.under_way)
        require(
            count == self.limit or self.begun == len(self.parts),
            f"{self.asked}: you wait for call {number} while {count} of {self.limit} calls are under "
            "way; begin the next one first.",
        )
        require(
            number == self.under_way[0],
            f"{self.asked}: you wait for call {number}; the oldest one under way is {self.under_way[0]}.",
        )
        self.under_way.remove(number)


class Call:
    """Stands for a future."""

    def __init__(self, calls: Calls, number: int, value: int) -> None:
        self._calls, self._number, self._value = calls, number, value

    def wait(self) -> int:
        self._calls.waited(self._number)
        return self._value


@question
def in_window(answer: Callable[[Callable[[int], Call], list[int], int], list[int]]) -> None:
    """`answer(begin, parts, limit)` is the results in order, with no more than `limit` calls under way."""
    for parts, limit in (
        ([4, 1, 4, 2, 8], 2),
        ([5, 3, 9, 9, 7, 1], 3),
        ([2, 6, 4], 1),
        ([3, 1, 2], 5),
        ([7, 0, 1, 1], 4),
        ([], 2),
    ):
        calls, given = Calls(list(parts), limit), list(parts)
        with trying():
            found: Any = returned(answer(calls.begin, given, limit))
        require(given == parts, f"{calls.asked}: `parts` itself has changed; it was {parts}, and is {given}.")
        wanted = [part * 10 for part in parts]
        found = read(found, [object], f"{calls.asked}: a list of the results is wanted")
        require(found == wanted, f"{calls.asked}: the results are {wanted}; you return {shown(found)}.")
        require(not calls.under_way, f"{calls.asked}: you do not wait for all calls.")
    right("The line is never empty, and never has more than it may.")


# -- 2
@question
def gather_uneven(answer: Callable[[Tensor, int, Callable[[Tensor], list[Tensor]]], list[Tensor]]) -> None:
    """`answer(mine, size, all_gather)` is the vectors of all ranks, each with its own length."""
    for lengths in ((3, 5), (0, 2, 1), (4, 4, 4, 4), (2, 37, 2), (6,), (3, 0), (0, 0)):
        size = len(lengths)
        given = [torch.arange(1.0, length + 1) + 100 * rank for rank, length in enumerate(lengths)]
        for vector in given:
            vector[1::2] = 0.0  # zeros that are no padding, and other numbers that might be taken for it
            vector[4::8], vector[6::8] = -1.0, torch.nan
        asked = f"Vectors of lengths {list(lengths)}"
        ranks = Ranks(size)
        before = [vector.clone() for vector in given]
        found = ranks.run(
            lambda rank, of=given, size=size, ranks=ranks: returned(answer(of[rank], size, all_gather(ranks, rank)))
        )
        for rank, parts in enumerate(found):
            told = f"{asked}: rank {rank} returns"
            require(
                isinstance(parts, list | tuple), f"{told} {shown(parts)}; a list with a tensor of each rank is wanted."
            )
            require(len(parts) == size, f"{told} a list of {len(parts)}; there are {size} ranks.")
            for source, part in enumerate(parts):
                require(
                    isinstance(part, Tensor) and part.dtype == torch.float32,
                    f"{told} {shown(part)} in place {source}; a tensor of float32 is wanted.",
                )
                require(
                    part.shape == before[source].shape,
                    f"{told} in place {source} a tensor of shape {tuple(part.shape)}; the vector of rank {source} "
                    f"has length {lengths[source]}.",
                )
                require(
                    same(part, before[source]),
                    f"{told} in place {source} {numbers(part)}; rank {source} has {numbers(before[source])}.",
                )
            require(same(given[rank], before[rank]), f"{asked}: `mine` of rank {rank} has changed; work on a copy.")
        require(max(ranks.messages) <= 2, f"{asked}: right, but with {max(ranks.messages)} calls; two are enough.")
        fewest = min(ranks.messages)
        require(fewest == 2, f"{asked}: right, but with {count_noun(fewest, 'call')} on a rank; two are wanted.")
        require(
            max(ranks.sent) <= max(lengths) + 1,
            f"{asked}: right, but a rank gives {max(ranks.sent)} numbers to all_gather, where "
            f"{max(lengths) + 1} are enough.",
        )
    right("First the lengths, then the numbers: so do all libraries that gather objects.")


# -- 3
class Once(torch.autograd.Function):
    """Counts how often backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passed: list[int]) -> Tensor:
        ctx.passed = passed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.passed.append(1)
        return gradients[0], None


@question
def fan_out(answer: Callable[[Callable[[Tensor], Tensor], list[Callable[[Tensor], Tensor]], Tensor], Tensor]) -> None:
    """`answer(first, branches, x)` is the gradient of `x`, by messages without graphs."""
    powers = (1, 2, 3, 2)
    for count, shape in ((1, (2,)), (2, (3,)), (3, (2, 2)), (4, (2,)), (2, (1,))):
        x = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
        before = x.clone()
        wide = count == 3  # `hidden` has another shape than `x`
        sent = torch.stack([2 * x * x, x]) if wide else 2 * x * x
        asked = f"{count_noun(count, 'branch')}"
        passed: list[int] = []
        runs: list[int] = []
        copies: list[Tensor] = []
        ran: list[int] = []

        def first(x: Tensor, passed: list[int] = passed, runs: list[int] = runs, wide: bool = wide) -> Tensor:
            require(isinstance(x, Tensor), f"`first` is given {shown(x)}, not a tensor.")
            runs.append(1)
            hidden = torch.stack([2 * x * x, x]) if wide else 2 * x * x
            return Once.apply(hidden, passed)  # type: ignore[no-any-return]

        def branch(
            number: int, asked: str = asked, copies: list[Tensor] = copies, sent: Tensor = sent, ran: list[int] = ran
        ) -> Callable[[Tensor], Tensor]:
            def branch(hidden: Tensor) -> Tensor:
                told = f"{asked}: branch {number} is given"
                require(isinstance(hidden, Tensor), f"{told} {shown(hidden)}, not a tensor.")
                require(
                    hidden.grad_fn is None, f"{told} a tensor with a graph behind it; a graph lives in one process."
                )
                require(hidden.requires_grad, f"{told} a tensor that needs no gradient, so none will come back.")
                require(
                    not any(hidden is copy for copy in copies),
                    f"{told} the same tensor as a branch before; each is to have a copy of its own.",
                )
                require(same(hidden.detach(), sent), f"{told} {numbers(hidden)}; `first` returns {numbers(sent)}.")
                copies.append(hidden)
                ran.append(number)
                return ((number + 1) * hidden ** powers[number]).sum()

            return branch

        branches = [branch(number) for number in range(count)]
        given = list(branches)
        with trying():
            found: Any = returned(answer(first, given, x))
        require(given == branches, f"{asked}: the list `branches` itself has changed; it has {len(given)} now.")
        require(same(x.detach(), before), f"{asked}: `x` itself is {numbers(x)} now; it was {numbers(before)}.")
        require(
            not x.requires_grad and x.grad is None and x.is_leaf,
            f"{asked}: `x` itself has changed; it needed no gradient, and has none.",
        )
        require(sorted(ran) == list(range(count)), f"{asked}: the branches that ran are {ran}; each is to run once.")
        require(len(runs) == 1, f"{asked}: `first` runs {len(runs)} times; once is enough.")
        require(len(passed) == 1, f"{asked}: backward goes {len(passed)} times through the graph of `first`, not once.")
        leaf = before.clone().requires_grad_()
        whole = torch.stack([2 * leaf * leaf, leaf]) if wide else 2 * leaf * leaf
        sum(((number + 1) * whole ** powers[number]).sum() for number in range(count)).backward()  # type: ignore[union-attr]
        wanted = leaf.grad
        require(
            isinstance(found, Tensor) and found.shape == x.shape,
            f"{asked}: you return {shown(found)}; a tensor in the shape of `x` is wanted.",
        )
        require(
            torch.allclose(found, wanted),
            f"{asked}: the gradient of `x` is {numbers(wanted)}; yours is {numbers(found)}.",
        )
    right("The parts of a gradient are added up where the tensor was sent, and then backward goes on, once.")


# -- 4
@question
def accepted(answer: Callable[[list[tuple[str, str]], int], list[bool]]) -> None:
    """`answer(log, most)` says for each push whether it was accepted."""
    known = [("pull", "a"), ("pull", "b"), ("push", "a"), ("push", "b"), ("pull", "b"), ("push", "b")]
    twice = [("pull", "a"), ("push", "a"), ("push", "a"), ("push", "a")]
    chance = random.Random(5)
    logs = [(known, 0), (known, 1), (twice, 0), (twice, 1), ([("pull", "a")], 2), ([], 0)]
    for most in (0, 1, 2, 3):
        log = [("pull", name) for name in "abc"]
        log += [(chance.choice(("pull", "push", "push")), chance.choice("abc")) for _ in range(24)]
        logs.append((log, most))
    for log, most in logs:
        given = list(log)
        with trying():
            found: Any = returned(answer(given, most))
        wanted = _accepted(log, most)
        asked = f"accepted({shown(log)}, {most})"
        found = read(found, [bool], f"{asked}: a list of True and False is wanted")
        require(given == log, f"{asked} changes `log`.")
        require(len(found) == len(wanted), f"{asked} returns {len(found)} answers; there are {len(wanted)} pushes.")
        for number, (mine, right_one) in enumerate(zip(found, wanted, strict=True)):
            if mine != right_one:
                raise NotYet(f"{asked}: {_why(log, most, number)}; you say {mine}.")
    right("A push that is thrown away makes no step, so it makes no other gradient older.")


def _accepted(log: list[tuple[str, str]], most: int) -> list[bool]:
    steps, pulled, answers = 0, {}, []
    for kind, name in log:
        if kind == "pull":
            pulled[name] = steps
        else:
            answers.append(steps - pulled[name] <= most)
            steps += answers[-1]
    return answers


def _why(log: list[tuple[str, str]], most: int, push: int) -> str:
    """Why a push is accepted or not."""
    place = [place for place, (kind, _) in enumerate(log) if kind == "push"][push]
    name = log[place][1]
    pulled = max(before for before in range(place) if log[before] == ("pull", name))
    since = sum(kind == "push" for kind, _ in log[pulled:place])
    stale = sum(_accepted(log[:place], most)[push - since :])
    return (
        f"before push {push + 1}, of {name!r}, {count_noun(since, 'push')} came after the last pull of {name!r}, and "
        f"the server made a step with {stale} of them, so it is {'accepted' if stale <= most else 'thrown away'}"
    )
