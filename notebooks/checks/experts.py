"""Checks of lesson 29."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from checks import NotYet, differ, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks

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
            found = read(found, ([int], [int]), "It should return a pair of lists of numbers, (sent, received)")
            for part in found:
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
        found = read(found, (Tensor, Tensor), "It should return a pair of tensors, (order, inverse)")
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
        found = read(found, [bool], "It should return a list of True and False")
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


# -- dispatch and combine on the workers
RANKS, WIDTH = 4, 3
ROUTED = [[2, 0, 2, 1, 3], [], [3, 3, 0], [1, 2, 2, 0, 1, 2]]  # of each rank's tokens; expert 2 has most, rank 1 none
EXCHANGES = 3
SIZES = (
    " An all-to-all whose ranks disagree on a size can end a process. How many counts does each rank send, if no token "
    "goes to the last expert?"
)
MOST = 4 * WIDTH * max(map(len, ROUTED))  # bytes of a rank's tokens
TIMES = [2.0, -1.0, 3.0, 0.5]  # what an expert does to a token


@exercise(
    "Three exchanges: how many tokens go where, the tokens, and the answers. What a rank has sent in the second it "
    "gets back in the third. And a rank without tokens has an expert that others need.",
    "Begin with `order, inverse = sorted_by_expert(chosen)`, and with `sent = chosen.bincount(minlength=size)` and "
    "`received = torch.empty_like(sent)` for `dist.all_to_all_single(received, sent)`.",
)
def on_ranks(answer: Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Tensor]) -> None:
    """`answer(tokens, chosen, expert)` runs on each worker: each token is answered by the expert of its rank."""
    tokens = [torch.arange(1.0, 1 + WIDTH * len(own)).reshape(-1, WIDTH) + 100 * rank
              for rank, own in enumerate(ROUTED)]  # fmt: skip
    given = [(each, torch.tensor(own, dtype=torch.long)) for each, own in zip(tokens, ROUTED, strict=True)]
    try:
        ran = run_on_ranks(answer_here, answer, given)
    except NotYet as hint:
        raise NotYet(f"{hint}{SIZES if 'has ended' in str(hint) else ''}") from None
    for rank, ((found, after), own) in enumerate(zip(ran.values, tokens, strict=True)):
        _answered(rank, returned(found), own)
        require(torch.equal(after, own), f"Rank {rank}: `tokens` has changed; leave it as it was.")
    _three_exchanges(ran)
    right("Each token has been to its expert and back, and none has travelled for nothing.")


def own_expert(tokens: Tensor) -> Tensor:
    """What this rank's expert answers."""
    rank = dist.get_rank()
    require(tokens.dim() == 2 and tokens.shape[1] == WIDTH, f"Rank {rank}: `expert` gets {list(tokens.shape)}; it "
            f"takes (tokens, {WIDTH}).")  # fmt: skip
    return TIMES[rank] * tokens


def answer_here(answer: Callable[..., Any], tokens: Tensor, chosen: Tensor) -> tuple[Any, Tensor]:
    """On a worker: the answers of the tokens, and the tokens after it."""
    return answer(tokens, chosen, own_expert), tokens


def _answered(rank: int, found: Any, tokens: Tensor) -> None:
    told = f"Rank {rank}, with {len(tokens)} tokens for the experts {ROUTED[rank]}"
    require(isinstance(found, Tensor), f"{told}, returns {shown(found)}, not a tensor.")
    require(found.shape == tokens.shape, f"{told}, returns {list(found.shape)}; an answer for each token is wanted, "
            f"{list(tokens.shape)}.")  # fmt: skip
    times = torch.tensor([TIMES[expert] for expert in ROUTED[rank]])[:, None]
    wanted = times * tokens
    order = torch.tensor(ROUTED[rank], dtype=torch.long).argsort(stable=True)
    slips = {
        "Its own expert has answered all of them.": TIMES[rank] * tokens,
        "They are right, but sorted by expert, not in the order of the tokens.": wanted[order],
        "They are right, but in another order: `order` sorts, and `inverse` undoes it.": wanted[order][order],
        "They are the tokens themselves: no expert has computed.": tokens,
    }
    slip = next((f" {name}" for name, other in slips.items() if torch.equal(found, other)), "")
    mixed = " They are answers of other experts, or of other tokens." if not slip else ""
    require(torch.equal(found, wanted), f"{told}, does not get their answers back.{slip or mixed}")


def _three_exchanges(ran: Run) -> None:
    for rank, calls in enumerate(ran.calls):
        told = f"Right; but in the trace rank {rank}"
        require(len(calls) <= EXCHANGES, f"{told} makes {len(calls)} exchanges. Three are enough: the counts, the "
                "tokens, the answers.")  # fmt: skip
        largest = max(calls, key=lambda call: call.size)
        require(largest.size <= MOST, f"{told} exchanges {largest.size} bytes by {largest.op}. No rank has more than "
                f"{MOST} bytes of tokens: send each to its expert alone.")  # fmt: skip


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
            raise NotYet(_wrong_combine(found, wanted, answers, token, weight, case))
    right("Mixtral combines its two experts in this way.")


def _wrong_combine(found: Tensor, wanted: Tensor, answers: Tensor, token: Tensor, weight: Tensor, case: str) -> str:
    raw, found, count = found, found.double(), len(wanted)
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
    wrong = int((found - wanted).abs().sum(1).nan_to_num(nan=torch.inf).argmax())
    return f"{case}: token {wrong} should get {differ(wanted[wrong], raw[wrong])}."


# -- on paper
ENOUGH = 2 * 2 * 63 / 64 / 50e9 * 400e12 / (2 * 3)
SLIPS = {
    "A vector travels there and an answer back, and each of their numbers has two bytes.": ENOUGH / 2,
    "A multiplication and an addition are two operations.": ENOUGH * 2,
    "An expert has three matrices here.": ENOUGH * 3 / 2,
    "An expert has three matrices, and each number of them is used once for a token.": ENOUGH * 3,
    "In practice a GPU computes 400 TFLOP/s, not its peak.": ENOUGH * 989 / 400,
    "Most of the experts are in other hosts, behind 50 GB/s.": ENOUGH / 9,
    "Only forward is asked for, also of the operations.": ENOUGH / 3,
    "One part in 64 stays on its GPU: a GPU sends 63 of 64.": ENOUGH * 64 / 63,
}


@exercise(
    "Write both times for one token and one of its experts: the bytes of two vectors, and the operations of three "
    "matrices. What is in both?",
    "Begin with `moving = 2 * d * 2 * 63 / 64 / 50e9` and `computing = 2 * 3 * d * h / 400e12`.",
)
def wide_enough(answer: float) -> None:
    """`answer` is the hidden width with which experts compute as long as their all-to-alls take, within 1 %."""
    h = read(answer, float, "A number is wanted: how large h must be")
    told = f"With h = {h:.5g} the experts compute {h / ENOUGH:.3g} times as long as the two all-to-alls take"
    require(abs(h - ENOUGH) <= 0.01 * ENOUGH, f"{told}; both should take equally long." + name_slip(h, SLIPS, 0.005))
    right("Mixtral's experts have 14,336 and are wide enough; those of DeepSeek-V3 have 2,048, and send 2.6 times as "
          "long as they compute.")  # fmt: skip
