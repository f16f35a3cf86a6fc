"""Checks of lesson 29."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from checks import NotYet, exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

Counts = list[list[int]]


# -- splits
COUNTS = [
    [[3, 1], [2, 5]],
    [[1, 2, 3], [4, 5, 6], [7, 8, 0]],
    [[1, 0, 2, 4], [3, 5, 0, 1]],
    [[2, 1, 0, 3, 1, 4], [0, 2, 6, 1, 5, 1], [3, 3, 1, 0, 2, 2]],
    [[7, 9]],
    [[4, 0, 1, 2, 5, 3], [1, 6, 2, 0, 3, 7]],  # three experts on a rank
]


@exercise(
    "Row `rank` of the table is what this rank has to send; a column is what an expert gets from everyone.",
    "Begin with `share = len(counts[0]) // len(counts)`. A rank sends to rank q the sum of `counts[rank][q * share "
    ": (q + 1) "
    "* share]`.",
)
def splits(answer: Callable[[Counts, int], Any]) -> None:
    """`answer(counts, rank)` is how many tokens a rank sends to each rank, and gets from each."""
    for counts in COUNTS:
        ranks = len(counts)
        share = len(counts[0]) // ranks
        between = [[sum(row[to * share : (to + 1) * share]) for to in range(ranks)] for row in counts]
        for rank in range(ranks):
            with trying():
                found = returned(answer([list(row) for row in counts], rank))
            case = f"counts {counts}, rank {rank}"
            pair = isinstance(found, tuple) and len(found) == 2
            require(pair, f"It should return a pair of lists, (sent, received), not {shown(found)}.")
            for part in found:
                plain = isinstance(part, list) and all(isinstance(each, int) for each in part)
                require(plain, f"`all_to_all_single` takes lists of numbers, not {shown(part)}.")
                require(len(part) == ranks, f"{case}: one number for each of {ranks} ranks; {part} has {len(part)}.")
            sent, received = between[rank], [row[rank] for row in between]
            require(found != (received, sent) or sent == received, f"{case}: the two lists are the wrong way round.")
            for name, part, wanted in (("sends", found[0], sent), ("gets", found[1], received)):
                if part != wanted:
                    raise NotYet(_wrong_splits(name, part, wanted, counts, rank, case))
    right("Both ends of each message know its size, so nobody waits for what does not come.")


def _wrong_splits(name: str, part: list[int], wanted: list[int], counts: Counts, rank: int, case: str) -> str:
    ranks = len(counts)
    share = len(counts[0]) // ranks
    if name == "sends" and part == [sum(counts[rank][to::ranks]) for to in range(ranks)]:
        return f"{case}: {part} deals the experts like cards; rank 0 has the first {share}, rank 1 the next."
    if part[rank] == 0 and part == [0 if to == rank else each for to, each in enumerate(wanted)]:
        return f"{case}: {part}: what a rank keeps for itself also goes through the all-to-all."
    if share > 1 and name == "sends" and part == [counts[rank][to * share] for to in range(ranks)]:
        return f"{case}: {part} counts one expert of each rank; each has {share}."
    return f"{case}: it {name} {wanted}, not {part}."


# -- order
CHOSEN = [[2, 0, 1, 0, 2, 1, 0, 3], [1, 1, 0], [3, 2, 1, 0, 0], [0, 0, 0, 0], [1, 2, 0, 2, 0, 1, 1, 2, 0, 0], [4], []]


class _Unstable(TorchFunctionMode):
    """`argsort` and `sort` of vectors, without `stable=True`, turn equal numbers round: torch may do so."""

    used = False  # such a sort has turned some round

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in ("argsort", "sort") or kwargs.get("stable") or not args or args[0].ndim != 1:
            return found
        descending = kwargs.get("descending", args[2] if len(args) > 2 else False)
        order = len(args[0]) - 1 - args[0].flip(0).argsort(stable=True, descending=descending)
        self.used |= not torch.equal(order, args[0].argsort(stable=True, descending=descending))
        return order if name == "argsort" else type(found)((args[0][order], order))


@exercise(
    "`argsort` says which token comes first, second, third. Where is then the answer to token 0?",
    "`order = chosen.argsort(stable=True)`. The inverse says for each token at which place of `order` it stands; "
    "sorting "
    "`order` itself tells that.",
)
def order_of(answer: Callable[[Tensor], Any]) -> None:
    """`answer(chosen)` is the order by expert, and its inverse."""
    for numbers in CHOSEN:
        with trying(), _Unstable() as unstable:
            found = returned(answer(torch.tensor(numbers, dtype=torch.long)))
        case = f"chosen {numbers}"
        pair = isinstance(found, tuple) and len(found) == 2 and all(isinstance(each, Tensor) for each in found)
        require(pair, f"It should return a pair of tensors, (order, inverse), not {shown(found)}.")
        for name, each in zip(("order", "inverse"), found, strict=True):
            kind = str(each.dtype).removeprefix("torch.")
            require(kind in ("int64", "int32"), f"{case}: `{name}` is a tensor of {kind}, which is no index.")
            told = f"{case}: `{name}` should have the shape {(len(numbers),)}, and has {tuple(each.shape)}."
            require(each.shape == (len(numbers),), told)
        order, inverse = (each.tolist() for each in found)
        there = list(range(len(numbers)))
        require(sorted(order) == there, f"{case}: `order` has each place of a token once; {order} has not.")
        by_expert = [numbers[place] for place in order]
        require(by_expert == sorted(numbers), f"{case}: in the order {order} the experts are {by_expert}.")
        wanted = sorted(there, key=lambda place: numbers[place])
        here = " Here a sort without `stable=True` turns equal numbers round, as torch may do." if unstable.used else ""
        require(order == wanted, f"{case}: tokens of one expert should stay in their order; {order} mixes them.{here}")
        require(sorted(inverse) == there, f"{case}: `inverse` has each place once; {inverse} has not.")
        back = [order[place] for place in inverse]
        if back != there:
            same = " It is `order` once more." if inverse == order else ""
            raise NotYet(f"{case}: tokens[order][inverse] are the tokens {back}, not {there}.{same}")
    right("What the dispatch has mixed, the combine puts back.")


# -- capacity
CASES = [
    ([0, 1, 0, 0, 1, 2, 0, 2], 3, 2),
    ([1, 1, 1, 1], 2, 1),
    ([2, 1, 0], 3, 1),
    ([0, 0, 1, 1, 1], 2, 3),
    ([1, 0], 2, 0),
    ([7, 5, 7, 7, 5, 0], 8, 2),
    ([], 2, 1),
]


@exercise(
    "Go through the tokens from the first to the last, and count how many each expert has already.",
    "Begin with `taken = [0] * experts`. A token is kept if `taken` of its expert is below the capacity; only then "
    "count it.",
)
def capacity(answer: Callable[[list[int], int, int], Any]) -> None:
    """`answer(chosen, experts, capacity)` says for each token whether it has a place."""
    for chosen, experts, places in CASES:
        given = list(chosen)
        with trying():
            found = returned(answer(given, experts, places))
        case = f"chosen {chosen}, capacity {places}"
        require(given == chosen, f"{case}: `chosen` itself has changed; it is {given} now.")
        plain = isinstance(found, list) and all(isinstance(each, bool) for each in found)
        require(plain, f"It should return a list of True and False, not {shown(found)}.")
        require(len(found) == len(chosen), f"{case}: one for each of the {len(chosen)} tokens, not {len(found)}.")
        wanted = [chosen[:at].count(expert) < places for at, expert in enumerate(chosen)]
        if found != wanted:
            raise NotYet(_wrong_capacity(found, wanted, chosen, places, case))
    right("The others go on unchanged, by way of the residual.")


def _wrong_capacity(found: list[bool], wanted: list[bool], chosen: list[int], places: int, case: str) -> str:
    if found == [not each for each in wanted]:
        return f"{case}: True is for a token that is kept, not for one that is dropped."
    if found == [chosen[:at].count(expert) <= places for at, expert in enumerate(chosen)]:
        return f"{case}: some expert takes {places + 1} tokens."
    if found == [chosen[at + 1 :].count(expert) < places for at, expert in enumerate(chosen)]:
        return f"{case}: the first tokens of an expert are kept, not the last."
    if found == [at < places for at in range(len(chosen))]:
        return f"{case}: each expert has {places} places, not all experts together."
    if found == [chosen.count(expert) <= places for expert in chosen]:
        return f"{case}: an expert with too many tokens still keeps the first {places} of them."
    return f"{case}: kept are {wanted}, not {shown(found)}."


# -- top-2
@exercise(
    "A token has two rows, and their weights should add up to 1. First find the sum of the weights of each token.",
    "`sums = torch.zeros(count).index_add(0, token, weight)`, in the type of `weight`. Then each row counts weight / "
    "sums[token], and `index_add` adds the rows of a token.",
)
def combine(answer: Callable[[Tensor, Tensor, Tensor, int], Any]) -> None:
    """`answer(answers, token, weight, count)` is for each token the mean of its answers, by weight."""
    made = torch.Generator().manual_seed(29)
    cases: list[tuple[int, int, list[int]]] = [  # tokens, width, the token of each row
        (3, 3, [0, 2, 1, 0, 1, 2]),
        (2, 3, [1, 0, 1, 0]),
        (4, 3, [3, 0, 0, 2, 3, 2]),
        (1, 3, [0, 0]),
        (4, 3, [1, 0, 1]),
        (2, 5, [1, 1, 0, 1]),  # three rows of one token
        (2, 1, [0, 1, 1, 0]),
        (3, 2, []),
    ]
    for count, width, tokens in cases:
        kind = torch.float if width == 5 else torch.double
        answers = torch.randn(len(tokens), width, generator=made, dtype=torch.double).to(kind)
        weight = (0.1 + 0.4 * torch.rand(len(tokens), generator=made, dtype=torch.double)).to(kind)
        token = torch.tensor(tokens, dtype=torch.long)
        given = answers.clone(), token.clone(), weight.clone()
        case = f"rows of the tokens {tokens}"
        with trying(f"With {case}, {count} tokens of width {width} in {str(kind).removeprefix('torch.')}, it"):
            found = returned(answer(*given, count))
        require(isinstance(found, Tensor), f"It should return a tensor, not {shown(found)}.")
        shape = (count, width)
        require(found.shape == shape, f"The result should have the shape {shape}, and has {tuple(found.shape)}.")
        same = all(torch.equal(a, b) for a, b in zip(given, (answers, token, weight), strict=True))
        require(same, "What was given has changed. Make new tensors.")
        answers, weight = answers.double(), weight.double()
        wanted = torch.zeros(count, width, dtype=torch.double)
        for number in set(tokens):
            mine = token == number
            wanted[number] = (weight[mine, None] * answers[mine]).sum(0) / weight[mine].sum()
        near = 1e-9 if kind == torch.double else 1e-4
        if not torch.allclose(found.double(), wanted, rtol=near, atol=near):
            raise NotYet(_wrong_combine(found.double(), wanted, answers, token, weight, case))
    right("Mixtral combines its two experts in this way.")


def _wrong_combine(found: Tensor, wanted: Tensor, answers: Tensor, token: Tensor, weight: Tensor, case: str) -> str:
    count = len(wanted)
    plain = torch.zeros_like(wanted).index_add(0, token, weight[:, None] * answers)
    if torch.allclose(found, plain):
        return f"{case}: the weights of a token do not add up to 1 yet."
    if torch.allclose(found, torch.zeros_like(wanted).index_add(0, token, weight[:, None] / weight.sum() * answers)):
        return f"{case}: the weights of all tokens together add up to 1, not those of each token."
    sums = torch.zeros(count, dtype=torch.double).index_add(0, token, weight)
    parts = (weight / sums[token])[:, None] * answers
    last = torch.zeros_like(wanted)
    for row, number in enumerate(token.tolist()):
        last[number] = parts[row]
    if torch.allclose(found, last):
        return f"{case}: a token has two rows, and the second one has replaced the first."
    if torch.allclose(found, torch.zeros_like(wanted).index_add(0, token, answers)):
        return f"{case}: the two answers of a token are added up without their weights."
    if torch.allclose(found, torch.zeros_like(wanted).index_add(0, token, answers / 2)):
        return f"{case}: the two answers of a token count alike. Each has a weight."
    empty = [number for number in range(count) if number not in token.tolist()]
    if empty and not torch.isfinite(found[empty]).all():
        return f"{case}: token {empty[0]} has no row; its result is 0, not {found[empty[0], 0]:g}."
    wrong = next((number for number in range(count) if not torch.allclose(found[number], wanted[number])), 0)
    return f"{case}: token {wrong} should get {_numbers(wanted[wrong])}, not {_numbers(found[wrong])}."


def _numbers(tensor: Tensor) -> str:
    return ", ".join(f"{number:.4g}" for number in tensor.flatten().tolist())
