"""Checks of lesson 23."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from checks import NotYet, differ, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks
from checks.ranks import AllReduce, Ranks

WORDS = ("nothing", "all_gather", "all_reduce", "reduce_scatter")
HAVE = {
    "columns": "after the first layer each rank has some hidden units, complete",
    "rows": "after the first layer each rank has a part of a sum for every hidden unit",
}
NEED = {
    "columns": "the second layer, cut by columns, multiplies all hidden units on each rank",
    "rows": "the second layer, cut by rows, multiplies on each rank only the hidden units of its own rows",
}


@exercise(
    "Write down for each cut what a rank has after the layer, and what it must have before the layer. The nonlinearity "
    "must see complete sums.",
    "There are four cases. Begin with the one where the rank already has what the second layer needs.",
)
def between(answer: Callable[[str, str], Any]) -> None:
    """`answer(first, second)` is the cheapest collective between two layers with these cuts."""
    wanted = {
        ("columns", "rows"): "nothing",
        ("columns", "columns"): "all_gather",
        ("rows", "columns"): "all_reduce",
        ("rows", "rows"): "reduce_scatter",
    }
    for first, second in itertools.product(("columns", "rows"), repeat=2):
        with trying():
            found = returned(answer(first, second))
        require(found in WORDS, f"The answer is one of {', '.join(WORDS)}, not {shown(found)}.")
        if found != wanted[first, second]:
            enough = {"all_reduce": ("all_gather", "reduce_scatter"), "all_gather": ("nothing",)}
            more = wanted[first, second] in (*enough.get(found, ()), "nothing") and found != "nothing"
            told = "brings a rank more than it needs" if more else "does not bring a rank what it needs"
            raise NotYet(f"{first}, then {second}: {HAVE[first]}, and {NEED[second]}. {found} {told}.")
    right("One of the four pairs is free, and it is the one that Megatron-LM takes.")


@exercise(
    "Rows 0 to width - 1 of `qkv` make queries, the next `width` make keys, the last make values. What does a rank "
    "need so that its heads are complete?",
    "Begin with `query, key, value = qkv.chunk(3)`, and cut each of them. Then ask which columns of `out` multiply "
    "what these heads have read.",
)
def attention_pieces(answer: Callable[[Tensor, Tensor, int, int], Any]) -> None:
    """`answer(qkv, out, rank, size)` are this rank's pieces of an attention's two weights."""
    made = torch.Generator().manual_seed(23)
    for size, heads, each in ((2, 4, 3), (1, 2, 2), (3, 6, 2), (4, 4, 4)):
        width = heads * each
        qkv, out = (torch.randn(rows, width, generator=made) for rows in (3 * width, width))
        before = qkv.clone(), out.clone()
        x = torch.randn(2, 5, width, generator=made)
        total = torch.zeros_like(x)
        for rank in range(size):
            with trying():
                found = returned(answer(qkv, out, rank, size))
            found = _pair(found, width, size, rank)
            total += _attention(x, *found, each)
            _not_chunks(found, qkv, rank, size)
        require(
            torch.equal(qkv, before[0]) and torch.equal(out, before[1]), "The weights have changed. Cut, do not write."
        )
        if not torch.allclose(total, _attention(x, qkv, out, each), atol=1e-4):
            raise NotYet(_wrong_sum(answer, qkv, out, size, width))
    right("Each rank has whole heads, and one sum makes the attention of one process.")


def _pair(found: Any, width: int, size: int, rank: int) -> tuple[Tensor, Tensor]:
    found = read(found, (Tensor, Tensor), "It should return two tensors")
    for name, piece, shape in zip(
        ("qkv", "out"), found, ((3 * width // size, width), (width, width // size)), strict=True
    ):
        require(
            piece.shape == shape,
            f"Rank {rank} of {size}: its piece of `{name}`, width {width}, should have the shape {shape}, "
            f"and has {tuple(piece.shape)}."
            + (" That is a cut along the other dimension." if tuple(piece.shape) == shape[::-1] != shape else ""),
        )
    return found[0], found[1]


def _not_chunks(found: Any, qkv: Tensor, rank: int, size: int) -> None:
    require(
        size == 1 or not torch.equal(found[0], qkv.chunk(size)[rank]),
        f"Rank {rank} of {size} has {qkv.shape[0] // size} rows of `qkv` that follow each other. Of queries, keys and "
        "values it then has some kinds whole and others not at all.",
    )


def _attention(x: Tensor, qkv: Tensor, out: Tensor, each: int) -> Tensor:
    """Attention with as many heads of width `each` as there are in `qkv`."""
    heads = [part.unflatten(-1, (-1, each)).transpose(1, 2) for part in (x @ qkv.T).chunk(3, dim=-1)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2) @ out.T


def _wrong_sum(answer: Callable[..., Any], qkv: Tensor, out: Tensor, size: int, width: int) -> str:
    """Which rows of `qkv` no rank has; or that the pieces do not belong together."""
    pieces = [answer(qkv, out, rank, size) for rank in range(size)]
    for name, whole, dim, found in (
        ("row", qkv, 0, torch.cat([piece[0] for piece in pieces])),
        ("column", out, 1, torch.cat([piece[1] for piece in pieces], dim=1)),
    ):
        for number, line in enumerate(whole.unbind(dim)):
            held = sum(torch.equal(line, other) for other in found.unbind(dim))
            of = "qkv" if name == "row" else "out"
            if held != 1:
                return f"With {size} ranks and width {width}, {name} {number} of `{of}` is on {held} ranks, not on one."
    return (
        f"With {size} ranks the results do not add up to the attention of one process. Each row and column is on one "
        "rank, but a rank's columns of `out` are not those of its heads, or its queries, keys and values are of "
        "different heads."
    )


@exercise(
    "Each of the two functions does something in one direction only. `all_reduce` writes into the tensor that it gets; "
    "may you change that one?",
    "Write two classes as `Scale` above, inside of your function so that they see `all_reduce`. In the one, `backward` "
    "clones the gradient and adds it up; in the other, `forward` clones x and adds it up.",
)
def copy_and_add(answer: Callable[[AllReduce], Any]) -> None:
    """`answer(all_reduce)` returns the functions f and g of Megatron-LM."""
    vector, table = torch.arange(1.0, 5.0), torch.arange(1.0, 7.0, dtype=torch.double).view(2, 3)
    for size, numbers in ((2, vector), (3, vector), (1, vector), (2, table)):
        ranks = Ranks(size)
        ranks.run(lambda rank, ranks=ranks, numbers=numbers: _one_rank(answer, ranks, rank, numbers.clone()))
    right("f adds up in backward, g in forward. A layer cut by columns and then by rows needs one of each.")


def _one_rank(answer: Callable[[AllReduce], Any], ranks: Ranks, rank: int, numbers: Tensor) -> None:
    size = ranks.size
    found = returned(answer(ranks.all_reduce(rank)))
    f, g = read(found, (Callable, Callable), "It should return two functions")
    for each in (f, g):
        kind = isinstance(each, type) and each.__name__
        require(not kind, f"`{kind}` is a class, and two functions are wanted: autograd runs a class by its `.apply`.")
    where = f"{size} rank{'s' if size > 1 else ''}"
    where += "" if numbers.ndim == 1 else f" and a tensor of {numbers.dtype} with the shape {tuple(numbers.shape)}"
    total = sum(range(1, size + 1))

    x = numbers.clone().requires_grad_()
    y = returned(f(x), f)
    require(isinstance(y, Tensor), f"{where}: the first function should return a tensor, not {shown(y)}.")
    require(torch.equal(x, numbers), f"{where}: the first function has changed its argument.")
    _alike(y, numbers, f"{where}: the result of the first function")
    require(not ranks.calls[rank], f"{where}: the first function sends something in forward. There is nothing to send.")
    require(
        torch.equal(y, numbers),
        f"{where}: the first function, given {numbers.tolist()} on each rank, should return "
        f"the same, and returns {shown(y.tolist())}.",
    )
    require(y.requires_grad, "The result of the first function has no gradient: autograd has not seen it.")
    y.backward(numbers * (rank + 1))
    require(x.grad is not None, "The first function hands back no gradient.")
    _same(x.grad, numbers, total, size, rank, f"{where}: the gradient that the first function hands back")
    _sends(ranks, rank, 1, f"{where}: the first function, in forward and backward together,")

    part = (numbers * (rank + 1)).requires_grad_()
    whole = returned(g(part * 1.0), g)
    require(isinstance(whole, Tensor), f"The second function should return a tensor, not {shown(whole)}.")
    first = whole.detach().clone()
    kept = part * 2.0
    g(kept)
    require(torch.equal(kept, part * 2.0), f"{where}: the second function has changed its argument.")
    _alike(whole, numbers, f"{where}: the result of the second function")
    _same(first, numbers, total, size, rank, f"{where}: the result of the second function")
    require(torch.equal(whole, first), f"{where}: the result of the second function has changed when it was called "
            "once more, with another tensor.")  # fmt: skip
    require(whole.requires_grad, "The result of the second function has no gradient: autograd has not seen it.")
    whole.backward(numbers)
    require(part.grad is not None, "The second function hands back no gradient.")
    require(
        torch.equal(part.grad, numbers),
        f"{where}: the second function gets the gradient {numbers.tolist()} on each "
        f"rank and hands back {part.grad.tolist()}. Each part counts once in the sum.",
    )
    _sends(ranks, rank, 3, f"{where}: the second function, in two forwards and a backward together,", 2)

    x = numbers.clone().requires_grad_()
    given = numbers.clone()
    (x + f(x)).backward(given)  # both summands are handed the same gradient
    require(
        torch.equal(given, numbers) and torch.equal(x.grad, numbers * (1 + size)),
        f"{where}: `x + f(x)` has the gradient {x.grad.tolist()} and should have {(numbers * (1 + size)).tolist()}. "
        "The first function changes the gradient that it is given, which the other summand needs as well.",
    )


def _alike(found: Tensor, numbers: Tensor, what: str) -> None:
    """The same shape and dtype."""
    for name, one, other in (("shape", tuple(found.shape), tuple(numbers.shape)), ("type", found.dtype, numbers.dtype)):
        require(one == other, f"{what} has the {name} {one}, and its argument {other}.")


def _sends(ranks: Ranks, rank: int, so_far: int, what: str, times: int = 1) -> None:
    sent = len(ranks.calls[rank]) - so_far + times
    require(sent == times, f"{what} has called `all_reduce` {sent} times, where {times} would do.")


def _same(found: Tensor, numbers: Tensor, total: int, size: int, rank: int, what: str) -> None:
    wanted = numbers * total
    if torch.equal(found, wanted):
        return
    if torch.allclose(found * size, wanted):
        raise NotYet(f"{what} is the mean over the ranks, not the sum.")
    if torch.equal(found, numbers * (rank + 1)):
        raise NotYet(f"{what} is that of one rank alone, not the sum over all.")
    raise NotYet(f"{what} is {shown(found.tolist())}, not {wanted.tolist()}.")


VOCABULARIES = [  # the words of each rank; how far scores differ, and where they lie; tokens
    ((4, 4), 1.0, 0.0, 5),
    ((3, 5, 2), 1.0, 0.0, 5),
    ((6,), 1.0, 0.0, 5),
    ((4, 4), 400.0, 0.0, 5),
    ((1, 1, 6, 4), 3.0, 0.0, 5),
    ((3, 2), 1.0, -1000.0, 5),
    ((2, 3), 1.0, 0.0, 1),
]


@exercise(
    "A softmax needs two things of the whole row: its largest score, and the sum of exp(score - largest). Both are one "
    "number for each token, and `all_reduce` makes them whole.",
    "The score of the target is on one rank only. Let the other ranks have 0 there, and add up. The gradient of the "
    "mean loss is (softmax - 1 at the target) / tokens.",
)
def vocabulary_loss(answer: Callable[[Tensor, Tensor, int, AllReduce], Any]) -> None:
    """`answer(scores, targets, first, all_reduce)`: the cross entropy of scores cut along the vocabulary."""
    made = torch.Generator().manual_seed(23)
    for sizes, scale, shift, tokens in VOCABULARIES:
        words = sum(sizes)
        scores = torch.randn(tokens, words, generator=made, dtype=torch.double) * scale + shift
        targets = torch.tensor([0, words - 1, sizes[0] % words, sizes[0] - 1, words // 2])[-tokens:]
        whole = scores.clone().requires_grad_()
        loss = F.cross_entropy(whole, targets)
        loss.backward()
        ranks, firsts = Ranks(len(sizes)), [sum(sizes[:rank]) for rank in range(len(sizes))]
        given = [scores[:, first : first + size].clone() for first, size in zip(firsts, sizes, strict=True)]
        before, aims = [each.clone() for each in given], targets.clone()
        found = ranks.run(
            lambda rank, of=given, firsts=firsts, targets=targets, ranks=ranks: returned(
                answer(of[rank], targets, firsts[rank], ranks.all_reduce(rank))
            )
        )
        case = f"A vocabulary of {words} words, {' + '.join(map(str, sizes))}"
        case += ", one token" if tokens == 1 else f", all scores near {shift:g}" if shift else ""
        same = all(torch.equal(a, b) for a, b in zip([*given, targets], [*before, aims], strict=True))
        require(same, f"{case}: `scores` or `targets` have changed.")
        for rank, pair in enumerate(found):
            others = _own_maxima(given, targets, firsts, rank)
            _counted_from_zero(pair, given, targets, f"{case}, rank {rank}")
            gradient = whole.grad[:, firsts[rank] : firsts[rank] + sizes[rank]]
            _loss_of(pair, rank, loss.detach(), gradient, case, tokens, others)
        most = max(ranks.sent)
        require(
            most <= 3 * tokens,
            f"{case}: right numbers; but a rank has sent {most} numbers for {tokens} tokens. "
            "Three for each token are enough, however many words there are.",
        )
    right("Scores never travel: three numbers for each token are enough.")


def _own_maxima(parts: list[Tensor], targets: Tensor, firsts: list[int], rank: int) -> list[Tensor]:
    """The losses that come out if each rank takes away its own largest score, and the sums are added up as they are:
    with the rank's own maximum added again, or that of the rank that has the target."""
    largest = torch.stack([part.amax(1) for part in parts])
    sums = sum((part - most[:, None]).exp().sum(1) for part, most in zip(parts, largest, strict=True))
    owner, each = torch.bucketize(targets, torch.tensor(firsts), right=True) - 1, torch.arange(len(targets))
    aimed = torch.cat(parts, 1)[each, targets]
    return [(sums.log() + own - aimed).mean() for own in (largest[rank], largest[owner, each])]


def _counted_from_zero(pair: Any, parts: list[Tensor], targets: Tensor, where: str) -> None:
    """Name a loss in which each rank has taken a target for the number of one of its own words."""
    if len(parts) == 1 or not isinstance(pair, tuple | list):
        return
    each = torch.arange(len(targets))
    aimed = sum(
        torch.where(targets < part.shape[1], part[each, targets.clamp(max=part.shape[1] - 1)], 0.0) for part in parts
    )
    loss = (torch.cat(parts, 1).logsumexp(1) - aimed).mean()
    found = torch.as_tensor(pair[0], dtype=torch.double).squeeze()
    require(found.shape != () or not torch.allclose(found, loss, atol=1e-6), f"{where}: `targets` count in the whole "
            "vocabulary. Which number does a word have among the words of its rank?")  # fmt: skip


def _loss_of(
    pair: Any, rank: int, loss: Tensor, gradient: Tensor, case: str, tokens: int, own_maxima: list[Tensor]
) -> None:
    found, found_gradient = read(pair, (object, object), "It should return (loss, gradient)")
    where = f"{case}, rank {rank}"
    found = torch.tensor(read(found, float, f"{where}: the loss should be one number"), dtype=torch.double)
    require(
        bool(found.isfinite().all()),
        f"{where}: the loss is {found.item()}. exp of a large score is infinite, and "
        "log of zero as well: take away the largest score of the whole row first.",
    )
    if not torch.allclose(found.squeeze(), loss, atol=1e-6):
        if torch.allclose(found.squeeze() / tokens, loss, atol=1e-6):
            raise NotYet(f"{where}: the loss is the sum over tokens, not the mean.")
        if any(torch.allclose(found, other, atol=1e-6) for other in own_maxima):
            raise NotYet(f"{where}: each rank has taken away its own largest score, so the sums of the ranks count "
                         "from different scores and cannot be added up.")  # fmt: skip
        told = differ(found.item(), loss.item(), ", and in one process ")
        raise NotYet(f"{where}: the loss is {told}.")
    require(
        isinstance(found_gradient, Tensor) and found_gradient.shape == gradient.shape,
        f"{where}: the gradient should be a tensor of the shape {tuple(gradient.shape)}.",
    )
    if not torch.allclose(found_gradient.double(), gradient, atol=1e-6):
        if torch.allclose(found_gradient.double() / tokens, gradient, atol=1e-6):
            raise NotYet(f"{where}: the gradient is that of the sum over tokens; the loss is a mean.")
        raise NotYet(f"{where}: right loss, but the gradient of the scores is not that of one process.")


MATRICES = (*(f"attention.{name}" for name in ("query", "key", "value", "out")), "feed.up", "feed.down")
FOUR = 4


@exercise(
    "The plan of the lesson has six all-reduces. In which three layers does backward add up the gradient of the same "
    "vector, and what stands in front of all three?",
    "Begin with the plan of the lesson, and add an entry for the module `attention`, with `PrepareModuleInput`.",
)
def on_ranks(answer: Callable[[], Any]) -> None:
    """`answer()` is a plan on each worker: six matrices are cut, and a step has four all-reduces."""
    ran = run_on_ranks(step_by_plan, answer, [(), ()])
    for rank, (plan, whole, wrong) in enumerate(ran.values):
        plan = returned(plan)
        require(plan == "dict", f"A plan is a dict of names and styles, not a {plan}.")
        require(not whole, f"Rank {rank} has all of {', '.join(whole)}. The plan should cut each of the six matrices.")
        require(not wrong, f"It runs, but on rank {rank} {wrong} differs from one process.")
    _four_all_reduces(ran)
    right("Four all-reduces: one f and one g for the attention, and the same for the network behind it.")


def step_by_plan(answer: Callable[[], Any]) -> tuple[str | None, list[str], str]:
    """On a worker, a step by the plan: the type of the plan, matrices that are whole, and the first wrong value."""
    from tiny_transformer import Block

    plan = answer()
    if not isinstance(plan, dict):
        return None if plan is None else type(plan).__name__, [], ""
    torch.manual_seed(1)
    alone, vectors = Block(32, 4, experts=0), torch.randn(8, 16, 32)
    block = Block(32, 4, experts=0)
    block.load_state_dict(alone.state_dict())
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    parallelize_module(block, mesh, plan, src_data_rank=None)  # which sends nothing: all ranks have the same weights
    weights = dict(block.named_parameters())
    whole = [name for name in MATRICES if _numel(weights[f"{name}.weight"]) == alone.get_submodule(name).weight.numel()]
    if whole:  # then the layers do not fit together
        return "dict", whole, ""
    for name in ("attention.out", "feed.down"):
        placements = weights[f"{name}.weight"].placements
        require(not placements[0].is_shard(0), f"The plan cuts {name} by columns. Then each rank multiplies the whole "
                "input of this layer; what does a rank have of it?")  # fmt: skip
    results = [model(vectors) for model in (block, alone)]
    for result in results:
        result.square().mean().backward()
    pairs = [("the result", *results)]
    pairs += [(f"the gradient of {name}", weights[name].grad, one.grad) for name, one in alone.named_parameters()]
    return "dict", whole, next((name for name, found, wanted in pairs if not _is_same(found, wanted)), "")


def _numel(weight: Tensor) -> int:
    return (weight.to_local() if isinstance(weight, DTensor) else weight).numel()


def _is_same(found: Tensor, wanted: Tensor) -> bool:
    if isinstance(found, DTensor):
        wanted = distribute_tensor(wanted.detach(), found.device_mesh, found.placements, src_data_rank=None).to_local()
        found = found.to_local()
    return found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-6)


def _four_all_reduces(ran: Run) -> None:
    for rank in range(len(ran.values)):
        ops = ran.ops(rank)
        others = sorted({*ops} - {"all_reduce"})
        require(not others, f"Right results; but in the trace rank {rank} also calls {', '.join(others)}.")
        count = ops["all_reduce"]
        why = " Each layer cut by columns has an f: which of them have the same input?" if count > FOUR else ""
        require(count == FOUR, f"Right results; but the trace has {count} all-reduces in a step, not {FOUR}.{why}")


WEIGHTS, WIDTH, FLOPS, NVLINK, NETWORK = 856e6, 8192, 400e12, 450e9, 50e9


def _layer(ranks: int, link: float, operations: float = 6, sums: int = 4, size: int = 2) -> tuple[float, float]:
    """Return the seconds of computing and of all-reduces in a layer, for each token."""
    return operations * WEIGHTS / ranks / FLOPS, sums * 2 * (ranks - 1) / ranks * WIDTH * size / link


def _slower(one: tuple[float, float], two: tuple[float, float]) -> float:
    return sum(two) / sum(one)


ONE, TWO = _layer(8, NVLINK), _layer(16, NETWORK)
TIMES = _slower(ONE, TWO)
SLIPS = {
    "That is the time on 8 GPUs by the one on 16.": 1 / TIMES,
    "The ring of 16 passes the links between the hosts.": _slower(ONE, _layer(16, NVLINK)),
    "The 8 GPUs of one host have the fast links.": _slower(_layer(8, NETWORK), TWO),
    "That is computing alone; the sums are added to it.": 0.5,
    "Those are the sums alone.": TWO[1] / ONE[1],
    "No computing hides the sums, so the two times are added.": max(TWO) / max(ONE),
    "A layer has four all-reduces, in each of which a rank of a ring sends twice (n - 1)/n of the tensor.":
        _slower(_layer(8, NVLINK, sums=2), _layer(16, NETWORK, sums=2)),
    "Forward has 2 operations for each weight and token, backward 4.":
        _slower(_layer(8, NVLINK, operations=2), _layer(16, NETWORK, operations=2)),
    "A number in bfloat16 has two bytes.": _slower(_layer(8, NVLINK, size=4), _layer(16, NETWORK, size=4)),
    "Each GPU has a part of the matrices only.": (8 * ONE[0] + TWO[1]) / (8 * ONE[0] + ONE[1]),
}  # fmt: skip


@exercise(
    "For one token: the seconds of 6 operations for each weight of a rank, and those of four all-reduces of a vector. "
    "Add them up, once for 8 ranks and once for 16.",
    "Begin with `one = 6 * 856e6 / 8 / 400e12 + 4 * 2 * 7 / 8 * 8192 * 2 / 450e9`, and write the same for 16.",
)
def two_hosts(answer: float) -> None:
    """`answer` is the time of a layer on 16 GPUs in two hosts, as a multiple of that on 8 in one, within 1 %."""
    times = read(answer, float, "A number is wanted: how many times as long the step takes")
    require(abs(times - TIMES) <= 0.01 * TIMES,
            f"It does not take {times:.4g} times as long." + name_slip(times, SLIPS, 0.002))  # fmt: skip
    right("Twice the GPUs, and slower: between hosts the sums take three times as long as computing.")
