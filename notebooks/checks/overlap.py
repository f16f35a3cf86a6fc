"""Checks of lesson 21."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from checks import differ, dots_left, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks
from checks.ranks import AllReduce, Ranks

Loss = Callable[[Tensor, Tensor], Tensor]
CLOSE = 1e-9


@exercise(
    "A mean over ranks divides by their number, and each rank's loss is divided by its own rows. What should it be "
    "divided by instead, and which factor turns one into the other?",
    "Begin with `total = torch.tensor(float(rows))` and `all_reduce(total)`: now `total` has the rows of all ranks.",
)
def weigh(answer: Callable[[Tensor, int, int, AllReduce], Tensor]) -> None:
    """`answer(loss, rows, size, all_reduce)`: the mean of the ranks' gradients is then that of one process."""
    made = torch.Generator().manual_seed(21)
    for rows in ([4, 4], [5, 3], [7, 1, 4], [2, 3, 1, 10], [6], [4, 3]):
        data = torch.rand(sum(rows), 3, generator=made, dtype=torch.double)
        at = torch.rand(3, generator=made, dtype=torch.double)
        parts = data.split(rows)
        losses, gradients = zip(*_weighed(answer, parts, at), strict=True)
        mean = torch.stack(gradients).mean(0)
        wanted, plain = _gradient(data, at), torch.stack([_gradient(part, at) for part in parts]).mean(0)
        if not torch.allclose(mean, wanted, atol=CLOSE):
            _wrong_weight(rows, mean, wanted, plain)
        for rank, (part, found) in enumerate(zip(parts, losses, strict=True)):
            loss = float((part @ at).square().mean()) * rows[rank] * len(rows) / sum(rows)
            require(abs(found - loss) <= 1e-4 * loss, f"Ranks with {rows} rows: the gradients are right, but rank "
                    f"{rank} returns {found:.4g}. Its own loss times the factor is {loss:.4g}.")  # fmt: skip
    right("With DistributedDataParallel, which always takes the plain mean, this is how unequal shares stay exact.")


def _weighed(answer: Callable[..., Any], parts: Sequence[Tensor], at: Tensor) -> list[tuple[float, Tensor]]:
    """Of each rank the loss that the answer returns there, and its gradient."""
    ranks = Ranks(len(parts))

    def part(rank: int) -> tuple[float, Tensor]:
        weights = at.clone().requires_grad_()
        loss = (parts[rank] @ weights).square().mean()
        found = returned(answer(loss, len(parts[rank]), len(parts), ranks.all_reduce(rank)))
        require(isinstance(found, Tensor), f"It should return the loss times a factor, not {shown(found)}.")
        require(found.numel() == 1, f"The loss is one number; yours has the shape {tuple(found.shape)}.")
        require(found.requires_grad, "What it returns has lost its graph, so `backward` cannot begin there.")
        found.backward()
        gradient = weights.grad if weights.grad is not None else torch.zeros(3, dtype=torch.double)
        return float(found.detach()), gradient

    return ranks.run(part)


def _gradient(rows: Tensor, at: Tensor) -> Tensor:
    weights = at.clone().requires_grad_()
    (rows @ weights).square().mean().backward()
    assert weights.grad is not None
    return weights.grad


def _wrong_weight(rows: list[int], mean: Tensor, wanted: Tensor, plain: Tensor) -> None:
    times = mean / wanted
    case = f"Ranks with {rows} rows:"
    require(not torch.allclose(mean, plain, atol=CLOSE), f"{case} every rank counts alike, whatever its rows.")
    require(
        float(times.max() - times.min()) > 1e-6,
        f"{case} the mean of the gradients is {float(times[0]):.4g} times that of one process.",
    )
    require(False, f"{case} the mean of the gradients is not that of one process; the ranks have the wrong weights.")


MODELS: list[tuple[list[tuple[str, int]], int]] = [  # parameters in the order of the model, and the cap
    ([("a", 4), ("b", 4), ("c", 4), ("d", 4)], 8),
    ([("embed", 9), ("up", 4), ("down", 4), ("head", 1)], 8),
    ([("a", 3), ("b", 2), ("c", 12), ("d", 1), ("e", 1)], 5),
    ([("w", 30), ("v", 5)], 10),
    ([("v", 5), ("w", 30)], 10),
    ([("only", 7)], 7),
    ([("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5)], 100),
    ([("a", 2), ("b", 20), ("c", 30), ("d", 2), ("e", 8)], 10),
]


@exercise(
    "Backward runs from the last parameter to the first. Go that way; the bucket that is being filled is the last one "
    "of your list.",
    "Begin with `found, room = [], 0` and `for name, size in reversed(parameters):`. A parameter that fits goes into "
    "`found[-1]`; when does a new bucket begin?",
)
def buckets(answer: Callable[[list[tuple[str, int]], int], Sequence[Sequence[str]]]) -> None:
    """`answer(parameters, cap)`: buckets from the last parameter to the first, none above the cap."""
    for parameters, cap in MODELS:
        given = list(parameters)
        with trying("The function"):
            found: Any = returned(answer(given, cap))
        case = f"Of {shown(parameters)} with a cap of {cap}:"
        found = read(found, [[str]], f"{case} it should return a list of lists of names")
        require(given == parameters, "The list `parameters` has changed; leave it as it was given.")
        sizes, names = dict(parameters), [name for bucket in found for name in bucket]
        require(all(name in sizes for name in names), f"{case} a bucket has names of parameters, not {shown(names)}.")
        require(all(found), f"{case} {found} has an empty bucket.")
        missing = [name for name in sizes if names.count(name) != 1]
        require(not missing, f"{case} {', '.join(missing)} should be in exactly one bucket of {found}.")
        require(found != [] and found[0][0] == parameters[-1][0], f"{case} the first gradient that is ready is that of "
                f"{parameters[-1][0]}, and your first bucket begins with {found[0][0]}.")  # fmt: skip
        require(names == [name for name, _ in reversed(parameters)], f"{case} the names come as {names}; backward "
                "meets them from the last to the first.")  # fmt: skip
        for bucket in found:
            total = sum(sizes[name] for name in bucket)
            require(total <= cap or len(bucket) == 1, f"{case} the bucket {bucket} has {total} bytes.")
        wanted = _buckets(parameters, cap)
        require(found == wanted, f"{case} {found} has more buckets than it must: a parameter that fits goes into the "
                "bucket before.")  # fmt: skip
    right("DistributedDataParallel does this once, at its first step, for every rank alike.")


def _buckets(parameters: list[tuple[str, int]], cap: int) -> list[list[str]]:
    found: list[list[str]] = []
    room = 0
    for name, size in reversed(parameters):
        if not found or size > room:
            found.append([])
            room = cap
        found[-1].append(name)
        room -= size
    return found


TIMES: list[tuple[list[float], list[float], str]] = [
    ([5], [3], "one bucket"),
    ([5, 5, 5, 5], [2, 2, 2, 2], "a link that is faster than backward"),
    ([5, 5, 5], [6, 6, 6], "a link that is slower than backward"),
    ([10, 1, 1], [2, 8, 1], "a slow first bucket"),
    ([3, 3, 20], [9, 9, 1], "a slow last bucket"),
    ([4, 4, 4], [0, 0, 0], "a link that takes no time"),
    ([1, 2, 3, 4], [4, 3, 2, 1], "buckets that differ"),
    ([1, 6, 1], [1, 4, 2], "a slow bucket in the middle"),
    ([5, 5, 5], [1, 20, 1], "a long message in the middle"),
    ([5, 5, 5, 5], [1, 20, 1, 1], "a long message before two short ones"),
    ([5, 5, 5, 5, 5, 5], [1, 1, 20, 1, 1, 1], "a long message in the middle of six"),
    ([0.5, 0.25], [1.5, 0.25], "times with fractions"),
]


@exercise(
    "Follow two clocks: the time until which backward has computed, and the time at which the link is free again.",
    "Begin with `ready = free = 0` and `for compute, send in zip(backward, reduce):`. A message leaves when its "
    "gradients are ready and the link is free; which of the two is later?",
)
def exposed(answer: Callable[[list[float], list[float]], float]) -> None:
    """`answer(backward, reduce)`: how long the step still waits for the link when backward is over."""
    for backward, reduce, what in TIMES:
        one, other = list(backward), list(reduce)
        with trying("The function"):
            found: Any = returned(answer(one, other))
        require((one, other) == (backward, reduce), "The lists have changed; leave them as they were given.")
        case = f"{what[0].upper()}{what[1:]}: backward {backward}, messages {reduce}:"
        found = read(found, float, f"{case} a number is wanted")
        ready, ends, alone = 0.0, 0.0, 0.0
        for compute, send in zip(backward, reduce, strict=True):
            ready += compute
            ends = max(ready, ends) + send
            alone = max(alone, ready + send)
        if abs(found - (ends - ready)) > CLOSE:
            require(abs(found - ends) > CLOSE, f"{case} {found:g} is when the last message arrives. How long has "
                    "backward been over by then?")  # fmt: skip
            require(abs(found - (alone - ready)) > CLOSE, f"{case} {found:g} would be right if messages travelled at "
                    "the same time. The link carries one after another.")  # fmt: skip
            require(abs(found - sum(reduce)) > CLOSE, f"{case} {found:g} is all that is sent; some of it hides behind "
                    "backward.")  # fmt: skip
            require(False, f"{case} {differ(ends - ready, found, ' stay exposed, not ', 6)}.")
    right("What hides costs nothing; the last bucket can never hide.")


ACCUMULATED: list[tuple[list[list[int]], Loss]] = [  # of each rank the rows of its micro-batches; the loss
    ([[3, 3]] * 2, F.mse_loss),
    ([[4, 1]] * 2, F.mse_loss),
    ([[2, 3, 1]] * 3, F.mse_loss),
    ([[2, 2]], F.mse_loss),
    ([[1, 4], [5], [2, 2, 1]], F.mse_loss),
    ([[2, 1]] * 2, F.l1_loss),
]


# -- in buckets, on the workers
SIZE, WIDE, LAYERS, MOST = 2, 6, 8, 4  # ranks, width and number of layers, all-reduces
LATE = 2.0  # seconds by which rank 1 comes late: a sum that nobody waited for is not there yet


@exercise(
    "A hook runs when the gradient of a parameter is complete. When are those of a whole bucket there, and when may "
    "the step read what an all-reduce has made of them?",
    "Begin with `backwards = list(model.parameters())[::-1]`, cut it into `most` groups, and give each parameter a "
    "`register_post_accumulate_grad_hook` that looks whether its group is complete. It keeps the flat vector and what "
    "`dist.all_reduce(flat, async_op=True)` returns.",
)
def on_ranks(answer: Callable[[nn.Module, Tensor, int], Any]) -> None:
    """`answer(model, loss, most)` runs backward on each worker, and averages while it runs."""
    ran = run_on_ranks(average_here, answer, [(rank,) for rank in range(SIZE)])
    for rank, gradients in enumerate(ran.values):
        _mean_of_ranks(rank, gradients)
    _few_and_early(ran)
    right("Few messages, and the first ones travel while backward still runs: that is what DDP does.")


class Marker(torch.autograd.Function):
    """Meets the other ranks in backward, behind the first layer: a mark in the trace. Then rank 1 is late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dist.barrier(ctx.group)
        if dist.get_rank() == 1:
            time.sleep(LATE)
        return gradients[0], None


def small_model() -> nn.Sequential:
    """Alike on all ranks."""
    made = torch.Generator().manual_seed(21)
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE, dtype=torch.double) for _ in range(LAYERS)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=WIDE**-0.5, generator=made)
    return model


def loss_on(model: nn.Sequential, rank: int, through: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss of a rank's rows; the output of the first layer goes through a function."""
    x = torch.linspace(-1, 1 + rank, 4 * WIDE, dtype=torch.double).reshape(4, WIDE)
    return torch.tanh(model[1:](through(model[0](x)))).square().mean()


def average_here(answer: Callable[[nn.Module, Tensor, int], Any], rank: int) -> list[Tensor | None]:
    """On a worker: the gradients that the answer leaves."""
    model, apart = small_model(), dist.new_group()  # of its own: it waits for no all-reduce of the answer
    answer(model, loss_on(model, rank, lambda x: Marker.apply(x, apart)), MOST)
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def _mean_of_ranks(rank: int, gradients: Sequence[Tensor | None]) -> None:
    own = []
    for each in range(SIZE):
        model = small_model()
        loss_on(model, each, lambda x: x).backward()
        own.append([parameter.grad for parameter in model.parameters()])
    names = [name for name, _ in small_model().named_parameters()]
    for name, found, *parts in zip(names, gradients, *own, strict=True):
        require(found is not None, f"Rank {rank}: {name} has no gradient.{dots_left()} Has backward run?")
        mean = torch.stack([part for part in parts if part is not None]).mean(0)
        slips = {
            "is that of this rank alone. Was it averaged, and did the step wait for the sum?": parts[rank],
            f"is that of this rank alone, divided by {SIZE}. Did the step wait for the sum?": parts[rank] / SIZE,
            "is the sum over the ranks, not the mean.": mean * SIZE,
            f"is the mean, divided by {SIZE} once more.": mean / SIZE,
        }
        told = next((told for told, slip in slips.items() if torch.allclose(found, slip, atol=CLOSE)), "")
        close = torch.allclose(found, mean, atol=CLOSE)
        require(close or not told, f"Rank {rank}: the gradient of {name} {told}")
        require(close, f"Rank {rank}: the gradient of {name} is not the mean over the ranks.")


def _few_and_early(ran: Run) -> None:
    numbers = sum(parameter.numel() for parameter in small_model().parameters())
    for rank, calls in enumerate(ran.calls):
        ops = [call.op for call in calls]
        others = sorted({*ops} - {"all_reduce", "barrier"})
        told = f"Right gradients; but in the trace rank {rank}"
        require(not others, f"{told} calls {', '.join(others)}. All-reduces are enough.")
        count = ops.count("all_reduce")
        require(count <= MOST, f"{told} has {count} all-reduces, and {MOST} are allowed.")
        early = ops.index("barrier")
        require(early, f"{told} begins its first all-reduce when backward is over: nothing is hidden.")
        sent = sum(call.size for call in calls if call.op == "all_reduce")
        require(sent <= 8 * numbers, f"{told} adds up {sent} bytes; all gradients together have {8 * numbers}.")


@exercise(
    "Each micro-batch's loss is a mean over its own rows. With which factor do they add up to the mean over all rows "
    "of this rank? `backward` adds to what `.grad` already has.",
    "Let each micro-batch do `(loss_of(model(x), y) * len(x) / rows).backward()`, with `rows` of all parts. Afterwards "
    "make one vector of all gradients: `torch.cat([p.grad.flatten() for p in model.parameters()])`.",
)
def accumulate(answer: Callable[[nn.Module, Loss, list[tuple[Tensor, Tensor]], int, AllReduce], Any]) -> None:
    """`answer(model, loss_of, parts, size, all_reduce)` leaves the gradient of all rows, by one all-reduce."""
    for lengths, loss_of in ACCUMULATED:
        size = len(lengths)
        made = torch.Generator().manual_seed(size)
        x, y = (torch.rand(size, sum(lengths[0]), wide, generator=made, dtype=torch.double) for wide in (3, 2))
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        models = [copy.deepcopy(model) for _ in range(size)]
        parts = [list(zip(x[r].split(each), y[r].split(each), strict=True)) for r, each in enumerate(lengths)]
        seen = [_Forwards(each) for each in models]
        count = _accumulated(answer, models, loss_of, parts)
        loss_of(model(x.flatten(0, 1)), y.flatten(0, 1)).backward()
        told = lengths[0] if all(each == lengths[0] for each in lengths) else " and ".join(map(str, lengths))
        case = f"{size} rank{'s' if size > 1 else ''} with micro-batches of {told} rows"
        case += ":" if loss_of is F.mse_loss else f", and {loss_of.__name__} as `loss_of`:"
        mistakes = _wrongly_accumulated(model, loss_of, parts)
        for rank in range(size):
            _same_gradients(models[rank], model, rank, case, mistakes)
            rows = seen[rank].rows
            require(sorted(rows) == sorted(lengths[rank]), f"{case} the gradients are right, after forwards of {rows} "
                    "rows. Each micro-batch goes through the model by itself: memory has room for one.")  # fmt: skip
            most = seen[rank].most
            require(most == 1, f"{case} the gradients are right, but {most} micro-batches waited for their backward at "
                    "the same time: memory has room for one.")  # fmt: skip
        require(count == 1, f"{case} the gradients are right, after {count} all-reduces where one is enough.")
    right("Many backwards, one message: what `no_sync` of DistributedDataParallel is for.")


class _Forwards:
    """The rows of each forward of a model, and how many forwards waited for their backward at the same time."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[int] = []
        self.waiting = self.most = 0
        model.register_forward_hook(self._forward)

    def _forward(self, _model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.rows.append(len(inputs[0]))
        if output.requires_grad:
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            output.register_hook(self._backward)

    def _backward(self, _gradient: Tensor) -> None:
        self.waiting -= 1


def _accumulated(answer: Callable[..., Any], models: Sequence[nn.Module], loss_of: Loss, parts: Sequence[Any]) -> int:
    """Run the answer on all ranks; return how many collectives it called."""
    ranks = Ranks(len(models))

    def part(rank: int) -> None:
        answer(models[rank], loss_of, parts[rank], len(models), ranks.all_reduce(rank))

    ranks.run(part)
    return len(ranks.calls[0])


def _wrongly_accumulated(model: nn.Module, loss_of: Loss, parts: Sequence[Any]) -> dict[str, list[Tensor]]:
    """What makes other gradients of micro-batches with unequal rows, and the gradients that it makes."""
    means = [torch.autograd.grad(loss_of(model(x), y), [*model.parameters()]) for rank in parts for x, y in rank]
    sums = [torch.stack(of_one).sum(0) for of_one in zip(*means, strict=True)]
    mean_of_means = (
        "This is the mean of the micro-batches' means, in which each micro-batch counts alike, and not each row."
    )
    sum_of_means = "This is the sum of the micro-batches' means. `loss_of` is a mean over its own rows alone."
    return {
        mean_of_means: [each / len(means) for each in sums],
        sum_of_means: [each / len(parts) for each in sums],
    }


def _same_gradients(
    found: nn.Module, wanted: nn.Module, rank: int, case: str, mistakes: dict[str, list[Tensor]]
) -> None:
    for place, ((name, mine), theirs) in enumerate(zip(found.named_parameters(), wanted.parameters(), strict=True)):
        assert theirs.grad is not None
        require(mine.grad is not None, f"The gradient of {name} is None.{dots_left()}")
        assert mine.grad is not None
        require(mine.grad.shape == theirs.grad.shape, f"{case} the gradient of {name} has the shape "
                f"{tuple(mine.grad.shape)}, its parameter {tuple(theirs.shape)}.")  # fmt: skip
        if not torch.allclose(mine.grad, theirs.grad, atol=CLOSE):
            times = mine.grad / theirs.grad
            even = float(times.max() - times.min()) < 1e-6
            how = f"{float(times.flatten()[0]):.4g} times" if even else "not"
            near = [told for told, of in mistakes.items() if torch.allclose(mine.grad, of[place], atol=CLOSE)]
            told = "" if even else "".join(f" {each}" for each in near[:1])  # a factor alone has several causes
            require(False, f"{case} the gradient of {name} on rank {rank} is {how} that of one process.{told}")


ENOUGH = 63 / 64 * 400e12 / 50e9
FEW = {
    "Each rank sends 63/64 of the gradients, not all of them.": ENOUGH * 64 / 63,
    "An all-reduce has two halves, and each sends 63/64 of the gradients.": ENOUGH / 2,
    "A ring through all 64 GPUs has 64 chunks, so 63/64 of the gradients pass each link twice, those between hosts, "
    "too; 7/8 would be a ring of one GPU in each host.": ENOUGH * 7 / 8 * 64 / 63,
    "Either a gradient counts 4 bytes, where bfloat16 has 2, or backward 2 operations, where it has 4.": ENOUGH * 2,
    "Forward is over when backward begins: 4 operations for each parameter are left, not 6.": ENOUGH * 2 / 3,
    "That is with the peak; the GPU reaches 400 TFLOP/s.": ENOUGH * 989.4 / 400,
    "That is with NVLink; between hosts the link has 50 GB/s.": ENOUGH / 9,
    "That is with 400 GB/s; the link has 400 Gbit/s.": ENOUGH / 8,
    "These are the tokens of all GPUs.": ENOUGH * 64,
}


@exercise(
    "Write both times with N parameters: the bytes of an all-reduce by the bandwidth, the operations of backward by "
    "the speed. N is in both.",
    "Begin with `sent = 2 * 63 / 64 * 2 / 50e9`, the seconds for each parameter; backward takes 4 · tokens / 400e12.",
)
def hidden(answer: float) -> None:
    """`answer` is the tokens of each GPU with which backward takes as long as the all-reduce, within 1 %."""
    tokens = read(answer, float, "A number of tokens is wanted")
    require(abs(tokens - ENOUGH) <= 0.01 * ENOUGH, f"With {tokens:.6g} tokens on each GPU backward takes "
            f"{tokens / ENOUGH:.3g} times as long as the all-reduce; both should take equally long."
            + name_slip(tokens, FEW, 0.005))  # fmt: skip
    right("About two rows of 4096 tokens, however large the model is.")


# -- the rows of a rank
Shuffled = Callable[[int, int], list[int]]


@exercise(
    "All ranks need the same order, and each epoch another one: what is the seed? Then make the order long enough for "
    "all ranks to get equally many.",
    "Each rank reads `-(-length // size)` rows, the quotient rounded up. Where the order is too short, it begins anew, "
    "more than once if need be.",
)
def rows_of(answer: Callable[[int, int, int, int, Shuffled], Sequence[int]]) -> None:
    """`answer(rank, size, length, epoch, shuffled)` is the rows that a rank reads in an epoch."""
    for length, size in ((10, 4), (12, 4), (7, 3), (9, 8), (2, 5), (5, 1)):
        epochs = [_shares(answer, size, length, epoch) for epoch in range(3)]
        for before, after in itertools.pairwise(epochs):
            alike = length > 4 and before == after
            require(not alike, f"{length} rows, {size} ranks: two epochs have the same order, {shown(before)}.")
    right("The order of `DistributedSampler` is made in the same way, with its own seed added to the epoch.")


def _shares(answer: Callable[..., Any], size: int, length: int, epoch: int) -> list[list[int]]:
    """What the answer reads on each rank in an epoch, after a look at it."""
    case, seeds, found = f"{length} rows, {size} ranks, epoch {epoch}", set(), []

    def shuffled(count: int, seed: int) -> list[int]:
        require(count == length, f"{case}: you shuffle {shown(count)} numbers.")
        seeds.add(read(seed, int, f"{case}: a seed is a whole number"))
        return random.Random(f"lesson 21, {seed}").sample(range(length), length)

    for rank in range(size):
        with trying(f"{case}: rank {rank}"):
            share = returned(answer(rank, size, length, epoch, shuffled))
        found.append(read(share, [int], f"{case}: a list of numbers of rows is wanted"))
        strange = [row for row in found[-1] if row not in range(length)]
        require(not strange, f"{case}: rank {rank} reads row {shown(strange[:1])}, which is not there.")
    require(seeds, f"{case}: nobody has called `shuffled`.")
    require(len(seeds) == 1, f"{case}: the ranks shuffle with different seeds, {sorted(seeds)}.")
    counts, each = [len(share) for share in found], -(-length // size)
    require(len(set(counts)) == 1, f"{case}: the ranks read {counts} rows, and the last all-reduce waits for ever.")
    missing = set(range(length)).difference(*found)
    require(not missing, f"{case}: nobody reads row {min(missing, default=0)}. The ranks read {shown(found)}.")
    require(counts[0] == each, f"{case}: each rank reads {counts[0]} rows, where {each} are enough.")
    return found
