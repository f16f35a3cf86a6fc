"""Checks of lesson 22."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from checks import exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.ranks import Ranks

CLOSE = 1e-9


@exercise(
    "Add up three terms: parameters, gradients, states. From which stage on is each of them divided by the ranks?",
    "Begin with `parameters = 4 * numbers / (ranks if stage == 3 else 1)`, and write the other two in the same way.",
)
def memory(answer: Callable[[int, int, int, int], float]) -> None:
    """`answer(stage, numbers, ranks, states)` is the bytes that a rank holds."""
    for numbers, ranks, states in ((1200, 4, 2), (1200, 3, 0), (600, 6, 1), (80, 1, 2)):
        for stage in range(4):
            with trying("The function"):
                found = returned(answer(stage, numbers, ranks, states))
            require(isinstance(found, int | float) and not isinstance(found, bool),
                    f"It should return a number of bytes, not {shown(found)}.")  # fmt: skip
            wanted = _memory(stage, numbers, ranks, states)
            if abs(found - wanted) > CLOSE:
                _wrong_memory(float(found), stage, numbers, ranks, states)
    right("Every rank more takes its share of what is cut; what is not cut stays.")


def _memory(stage: int, numbers: int, ranks: int, states: int) -> float:
    each = [4.0, 4.0, 4.0 * states]
    return sum(numbers * size / (ranks if stage >= first else 1) for size, first in zip(each, (3, 2, 1), strict=True))


def _wrong_memory(found: float, stage: int, numbers: int, ranks: int, states: int) -> None:
    case = f"Stage {stage}, {numbers} numbers, {ranks} ranks, {states} states:"
    require(abs(found * 4 - _memory(stage, numbers, ranks, states)) > CLOSE, f"{case} {found:g} are numbers. A number "
            "has four bytes.")  # fmt: skip
    for other in range(4):
        same = abs(found - _memory(other, numbers, ranks, states)) < CLOSE
        require(not same, f"{case} {found:g} bytes is what stage {other} holds.")
    for other in {0, 1, 2} - {states}:
        same = abs(found - _memory(stage, numbers, ranks, other)) < CLOSE
        require(not same, f"{case} {found:g} bytes would be right with {other} state{'' if other == 1 else 's'} for "
                "each number.")  # fmt: skip
    wanted = _memory(stage, numbers, ranks, states)
    require(False, f"{case} a rank holds {wanted:g} bytes, not {found:g}.")


FLATS: list[tuple[list[tuple[str, int]], int]] = [
    ([("weight", 6), ("bias", 2)], 2),
    ([("weight", 5), ("bias", 2)], 3),
    ([("weight", 10), ("bias", 3), ("scale", 1)], 4),
    ([("a", 1), ("b", 1), ("c", 1), ("d", 4)], 2),
    ([("weight", 5)], 4),
    ([("scale", 3)], 4),
    ([("weight", 4)], 1),
]


@exercise(
    "A rank has the places from `rank * share` to `(rank + 1) * share` of the flat vector. Where in it does each "
    "parameter begin and end, and which part lies within the rank's places?",
    "Begin with `share = -(-sum(count for _, count in sizes) // ranks)`, which rounds up, and walk over `sizes` with "
    "`start = 0`, adding each count. The part of a parameter is from `max(start, first)` to `min(start + count, "
    "last)`, minus `start`.",
)
def held(answer: Callable[[list[tuple[str, int]], int, int], Sequence[tuple[str, int, int]]]) -> None:
    """`answer(sizes, ranks, rank)`: which numbers of which parameters a rank has of the flat vector."""
    for sizes, ranks in FLATS:
        for rank in range(ranks):
            given = list(sizes)
            with trying("The function"):
                found: Any = returned(answer(given, ranks, rank))
            require(given == sizes, "The list `sizes` has changed; leave it as it was given.")
            require(isinstance(found, list) and all(isinstance(each, tuple) and len(each) == 3 for each in found),
                    f"A list of (name, begin, end) is wanted, not {shown(found)}.")  # fmt: skip
            wanted = _held(sizes, ranks, rank)
            if found != wanted:
                _wrong_shard(sizes, ranks, rank, found, wanted)
    right("A shard knows nothing of layers or shapes: it is a part of a vector.")


def _held(sizes: list[tuple[str, int]], ranks: int, rank: int) -> list[tuple[str, int, int]]:
    share = -(-sum(count for _, count in sizes) // ranks)
    first, last, start, found = rank * share, (rank + 1) * share, 0, []
    for name, count in sizes:
        begin, end = max(start, first), min(start + count, last)
        if begin < end:
            found.append((name, begin - start, end - start))
        start += count
    return found


def _wrong_shard(sizes: list[tuple[str, int]], ranks: int, rank: int, found: list[Any], wanted: list[Any]) -> None:
    known, total = dict(sizes), sum(count for _, count in sizes)
    case = f"{shown(sizes)} on {ranks} ranks, rank {rank}:"
    for name, begin, end in found:
        require(name in known, f"{case} {shown(name)} is not the name of a parameter.")
        require(begin < end, f"{case} ({name!r}, {begin}, {end}) is an empty part; leave it out.")
        inside = begin >= 0 and end <= known[name]
        require(inside, f"{case} ({name!r}, {begin}, {end}) goes beyond the {known[name]} "
                f"numbers of {name}. Count from the begin of the parameter; padding belongs to none.")  # fmt: skip
    share = -(-total // ranks)
    has = sum(end - begin for _, begin, end in found)
    should = sum(end - begin for _, begin, end in wanted)
    require(has == should, f"{case} of {total} numbers each rank has {share} places; this one holds {should} numbers, "
            f"not {has}.")  # fmt: skip
    require(False, f"{case} it holds {wanted}, not {shown(found)}.")


STEPS = ((2, 1.0), (3, 0.5), (4, 3.0), (1, 1.0))  # ranks, and the norm of the gradient above which the check clips


@exercise(
    "After `reduce_scatter` no rank has the whole gradient. The square of its norm is a sum over all numbers, thus "
    "also a sum over the shards.",
    "Begin with `shard.grad = reduce_scatter(gradient) / size` and `square = shard.grad.square().sum()`; after "
    "`all_reduce(square)` its root is the norm of the whole gradient, on every rank.",
)
def step(answer: Callable[..., Any]) -> None:
    """`answer(whole, gradient, shard, optimizer, ...)` is a step of stage 1, clipped."""
    for size, most in STEPS:
        made = torch.Generator().manual_seed(size)
        count = 4 * size
        alone = nn.Parameter(torch.rand(count, generator=made, dtype=torch.double))
        wholes = [alone.detach().clone() for _ in range(size)]
        shards = [nn.Parameter(wholes[rank].chunk(size)[rank]) for rank in range(size)]
        optimizers = [torch.optim.SGD([shard], lr=0.1, momentum=0.9) for shard in shards]
        reference = torch.optim.SGD([alone], lr=0.1, momentum=0.9)
        for number, times in enumerate((0.05, 5.0, 1.0, 0.0)):  # the first one and the last are not clipped
            gradients = times * torch.randn(size, count, generator=made, dtype=torch.double)
            before = alone.detach().clone()
            calls = _stepped(answer, wholes, gradients, shards, optimizers, most)
            mean = gradients.mean(0)
            alone.grad = mean * (most / max(float(mean.norm()), most))
            reference.step()
            case = f"{size} rank{'s' if size > 1 else ''}, step {number + 1}, norm {float(mean.norm()):.2g}:"
            for rank in range(size):
                _same_step(wholes[rank], alone.detach(), before, rank, size, most, case)
            _little_traffic(calls, case)
    right("Sharded, clipped, and the same parameters on every rank.")


def _stepped(
    answer: Callable[..., Any],
    wholes: Sequence[Tensor],
    gradients: Tensor,
    shards: Sequence[nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    most: float,
) -> list[tuple[str, int]]:
    """Run the answer on all ranks; return what rank 0 called."""
    ranks = Ranks(len(wholes))

    def part(rank: int) -> None:
        answer(wholes[rank], gradients[rank].clone(), shards[rank], optimizers[rank], most, len(wholes),
               ranks.reduce_scatter(rank), ranks.all_gather(rank), ranks.all_reduce(rank))  # fmt: skip

    ranks.run(part)
    return ranks.calls[0]


def _same_step(found: Tensor, wanted: Tensor, before: Tensor, rank: int, size: int, most: float, case: str) -> None:
    if torch.allclose(found, wanted, atol=1e-6):
        return
    require(not torch.equal(found, before), f"{case} `whole` is as it was on rank {rank}. Replace the three dots; "
            "change `whole` itself.")  # fmt: skip
    mine = found.chunk(size)[rank]
    if torch.allclose(mine, wanted.chunk(size)[rank], atol=1e-6):
        require(False, f"{case} rank {rank} has stepped with its own shard, and the other shards of `whole` are not "
                "those of the other ranks.")  # fmt: skip
    moved, should = (mine - before.chunk(size)[rank]), (wanted - before).chunk(size)[rank]
    times = moved / should
    even = float(times.max() - times.min()) < 1e-5
    how = f"{float(times[0]):.4g} times as far as" if even else "otherwise than"
    require(False, f"{case} the shard of rank {rank} has moved {how} one process moves it with the mean gradient, "
            f"clipped to a norm of {most:g}.")  # fmt: skip


def _little_traffic(calls: list[tuple[str, int]], case: str) -> None:
    sent = {name: sum(size for other, size in calls if other == name) for name, _ in calls}
    told = ", ".join(f"{name} of {size}" for name, size in calls)
    require(sent.get("all_reduce", 0) <= 1, f"{case} right, but {sent.get('all_reduce')} numbers go through all_reduce "
            f"({told}); the norm needs one.")  # fmt: skip
    names = [name for name, _ in calls]
    require(names.count("reduce_scatter") == 1 and names.count("all_gather") == 1, f"{case} right, with {told}; one "
            "reduce_scatter and one all_gather are enough.")  # fmt: skip


class Layer:
    """A layer of the stretch exercise: its weight is gathered and freed, and it watches who uses it when."""

    def __init__(self, place: int, weight: Tensor, seen: Seen) -> None:
        self.place, self._weight, self._seen = place, weight, seen
        self._here: Tensor | None = None
        self._pending: Tensor | None = None  # a whole gradient that was computed, and not handed on
        self.reduced: list[Tensor] = []

    def gather(self) -> Tensor:
        require(self._here is None, f"Layer {self.place} is gathered twice without a `free` between.")
        self._here = self._weight.clone()
        self._seen.gathered(self._here.numel())
        return self._here

    def free(self) -> None:
        require(self._here is not None, f"Layer {self.place} is freed, and was not gathered.")
        assert self._here is not None
        self._seen.gathered(-self._here.numel())
        self._here.fill_(float("nan"))  # who reads it now gets no number
        self._here = None

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        self._usable(weight, "forward")
        return torch.tanh(x @ weight)

    def backward(self, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        self._usable(weight, "backward")
        before, after = x.shape[-1], gradient.shape[-1]
        require((before, after) == tuple(weight.shape), f"Layer {self.place} takes inputs of width {weight.shape[0]} "
                f"and gradients of width {weight.shape[1]}, not {before} and {after}.")  # fmt: skip
        of_sum = gradient * (1 - torch.tanh(x @ weight).square())
        self._pending = x.T @ of_sum
        self._seen.computed(self._pending.numel())
        return of_sum @ weight.T, self._pending

    def reduce_scatter(self, gradient: Tensor) -> None:
        require(isinstance(gradient, Tensor) and gradient.shape == self._weight.shape, f"Layer {self.place} has a "
                f"gradient of shape {tuple(self._weight.shape)}, not {shown(gradient)}.")  # fmt: skip
        self.reduced.append(gradient.clone())
        if self._pending is not None:
            self._seen.computed(-self._pending.numel())
            self._pending = None

    def _usable(self, weight: Tensor, where: str) -> None:
        require(
            isinstance(weight, Tensor), f"`{where}` takes the whole weight that `gather` returns, not {shown(weight)}."
        )
        require(not bool(weight.isnan().any()), f"The {where} of layer {self.place} uses a weight that was freed.")
        require(
            torch.equal(weight, self._weight), f"The {where} of layer {self.place} has the weight of another layer."
        )

    @property
    def here(self) -> bool:
        return self._here is not None


class Seen:
    """Counts the numbers of weights that are gathered, and those of whole gradients; with the most of each."""

    def __init__(self) -> None:
        self.now = self.most = self.gradients = self.most_gradients = 0
        self.gathers = 0

    def gathered(self, numbers: int) -> None:
        self.gathers += numbers > 0
        self.now += numbers
        self.most = max(self.most, self.now)

    def computed(self, numbers: int) -> None:
        self.gradients += numbers
        self.most_gradients = max(self.most_gradients, self.gradients)


@exercise(
    "Backward needs two things of each layer: its input, which forward should keep, and its weight, which forward has "
    "given up. Walk the layers a second time, from the last to the first.",
    "Forward: `weight = layer.gather()`, `inputs.append(x)`, `x = layer.forward(x, weight)`, `layer.free()`. Then "
    "`gradient = loss_gradient(x)`, and a loop over `zip(reversed(layers), reversed(inputs))`.",
)
def zero3(answer: Callable[[list[Layer], Tensor, Callable[[Tensor], Tensor]], Any]) -> None:
    """`answer(layers, x, loss_gradient)`: forward and backward with one layer gathered at a time."""
    for widths in ([3, 4, 2], [2, 5, 5, 5, 1], [4, 3]):
        made = torch.Generator().manual_seed(len(widths))
        pairs = itertools.pairwise(widths)
        weights = [torch.randn(*pair, generator=made, dtype=torch.double).requires_grad_() for pair in pairs]
        x = torch.randn(6, widths[0], generator=made, dtype=torch.double)
        seen = Seen()
        layers = [Layer(place, weight.detach(), seen) for place, weight in enumerate(weights)]
        given = list(layers)
        with trying("The function"):
            answer(given, x.clone(), lambda y: 2 * y / y.numel())
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight)
        y.square().mean().backward()
        case = (
            f"{len(layers)} layer{'s' if len(layers) > 1 else ''} of {[weight.numel() for weight in weights]} numbers:"
        )
        _right_gradients(layers, [weight.grad for weight in weights], case)
        _little_memory(layers, seen, max(weight.numel() for weight in weights), case)
        require(given == layers, f"{case} the list `layers` has changed; leave it as it was given.")
    right("No more than one layer is whole at any time, however many there are: that is FSDP.")


def _right_gradients(layers: list[Layer], wanted: list[Tensor | None], case: str) -> None:
    count = sum(len(layer.reduced) for layer in layers)
    require(count > 0, f"{case} no gradient was handed to `reduce_scatter`. Replace the three dots.")
    for layer, gradient in zip(layers, wanted, strict=True):
        assert gradient is not None
        times = len(layer.reduced)
        require(
            times == 1, f"{case} `reduce_scatter` of layer {layer.place} was called {times} times, and should be once."
        )
        require(torch.allclose(layer.reduced[0], gradient, atol=CLOSE), f"{case} layer {layer.place} has another "
                "gradient than in one process. Which input had it? Which gradient comes from behind it?")  # fmt: skip


def _little_memory(layers: list[Layer], seen: Seen, largest: int, case: str) -> None:
    require(seen.most <= largest, f"{case} right gradients; but {seen.most} numbers were gathered at the same time, "
            f"and the largest layer has {largest}.")  # fmt: skip
    require(seen.most_gradients <= largest, f"{case} right gradients; but {seen.most_gradients} numbers of whole "
            "gradients were there at the same time. Hand each on before the next is computed.")  # fmt: skip
    left = [layer.place for layer in layers if layer.here]
    require(not left, f"{case} at the end layer {', '.join(map(str, left))} is still gathered.")
    require(seen.gathers <= 2 * len(layers), f"{case} {seen.gathers} gathers; two for each layer are enough.")
