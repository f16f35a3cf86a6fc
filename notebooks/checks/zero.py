"""Checks of lesson 22."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from counted_ring import LAYERS, WIDTH, batch, make_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from checks import differ, dots_left, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks
from checks.ranks import Ranks

CLOSE = 1e-9


@exercise(
    "Add up three terms: parameters, gradients, states. From which stage on is each of them divided by the ranks?",
    "Begin with `parameters = 4 * numbers / (ranks if stage == 3 else 1)`, and write the other two in the same way.",
)
def memory(answer: Callable[[int, int, int, int], float]) -> None:
    """`answer(stage, numbers, ranks, states)` is the bytes that a rank holds."""
    for numbers, ranks, states in ((1200, 3, 2), (1200, 4, 0), (600, 6, 1), (80, 1, 2)):
        for stage in range(4):
            with trying("The function"):
                found = returned(answer(stage, numbers, ranks, states))
            found = read(found, float, "It should return a number of bytes")
            wanted = _memory(stage, numbers, ranks, states)
            if abs(found - wanted) > CLOSE:
                _wrong_memory(found, stage, numbers, ranks, states)
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
    short = 3 * numbers * states / (ranks if stage else 1)  # of states with one byte each
    require(not states or abs(found + short - wanted) > CLOSE, f"{case} {found:g} bytes would be right if a number of "
            "the optimizer's state had one byte. It has four, as all others.")  # fmt: skip
    why = _terms_otherwise(found, stage, numbers, ranks, states)
    require(False, f"{case} a rank holds {differ(wanted, found, ' bytes, not ', 6)}.{why}")


def _terms_otherwise(found: float, stage: int, numbers: int, ranks: int, states: int) -> str:
    """Which terms are counted whole where they are cut, or the other way round; empty if that is not the mistake."""
    terms = {"parameters": (4.0, 3), "gradients": (4.0, 2), "states": (4.0 * states, 1)}
    mistakes = []
    for wrong in itertools.chain.from_iterable(itertools.combinations(terms, count) for count in (1, 2, 3)):
        parts = {name: (stage >= first) != (name in wrong) for name, (_, first) in terms.items()}  # whether it is cut
        total = sum(numbers * size / (ranks if parts[name] else 1) for name, (size, _) in terms.items())
        if abs(found - total) < CLOSE:
            mistakes.append([f"the {name} {'cut' if parts[name] else 'whole'}" for name in wrong])
    fewest = [" and ".join(each) for each in mistakes if len(each) == len(mistakes[0])]
    return f" Yours counts {' or '.join(fewest)}: look at the table's row of stage {stage}." if fewest else ""


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
            found = read(found, [(str, int, int)], "A list of (name, begin, end) is wanted")
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
                _same_step(wholes[rank], alone.detach(), before, rank, gradients, most, case)
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


def _same_step(
    found: Tensor, wanted: Tensor, before: Tensor, rank: int, gradients: Tensor, most: float, case: str
) -> None:
    size = len(gradients)
    if torch.allclose(found, wanted, atol=1e-6):
        return
    require(not torch.equal(found, before), f"{case} `whole` is as it was on rank {rank}.{dots_left()} Change "
            "`whole` itself.")  # fmt: skip
    mine = found.chunk(size)[rank]
    if torch.allclose(mine, wanted.chunk(size)[rank], atol=1e-6):
        require(False, f"{case} rank {rank} has stepped with its own shard, and the other shards of `whole` are not "
                "those of the other ranks.")  # fmt: skip
    moved, should = (mine - before.chunk(size)[rank]), (wanted - before).chunk(size)[rank]
    times = moved / should
    if slip := _clipped_otherwise(moved - should, gradients, rank, most):
        require(False, f"{case} rank {rank} has moved its shard as if {slip}")
    even = float(times.max() - times.min()) < 1e-5
    how = f"{float(times[0]):.4g} times as far as" if even else "otherwise than"
    require(False, f"{case} the shard of rank {rank} has moved {how} one process moves it with the mean gradient, "
            f"clipped to a norm of {most:g}.")  # fmt: skip


def _clipped_otherwise(further: Tensor, gradients: Tensor, rank: int, most: float) -> str:
    """The mistake in clipping by which a shard has moved further than it should; empty if it is not known."""
    mean = gradients.mean(0)
    shards = mean.chunk(len(gradients))
    norms = [float(shard.norm()) for shard in shards]

    def clipped(gradient: Tensor, norm: float) -> Tensor:
        return gradient * min(1.0, most / norm) if norm else gradient

    early = torch.stack([clipped(each, float(each.norm())) for each in gradients]).mean(0).chunk(len(gradients))[rank]
    mistakes = {
        "it were clipped by the norm of this shard alone. Each shard has another norm, and all are to shrink alike.":
            clipped(shards[rank], norms[rank]),
        "it were clipped by the sum of the norms of all shards. Squares of norms can be added up, norms cannot.":
            clipped(shards[rank], sum(norms)),
        "it were clipped by the square of the norm.": clipped(shards[rank], float(mean.norm()) ** 2),
        "each rank had clipped its own gradient, before the mean is taken. One process clips the mean.":
            early,
    }  # fmt: skip
    wanted = clipped(shards[rank], float(mean.norm()))
    return next((told for told, other in mistakes.items()
                 if torch.allclose(further, 0.1 * (wanted - other), rtol=1e-4, atol=1e-6)), "")  # fmt: skip


def _little_traffic(calls: list[tuple[str, int]], case: str) -> None:
    sent = {name: sum(size for other, size in calls if other == name) for name, _ in calls}
    told = ", ".join(f"{name} of {size}" for name, size in calls)
    require(sent.get("all_reduce", 0) <= 1, f"{case} right, but {sent.get('all_reduce')} numbers go through all_reduce "
            f"({told}); the norm needs one.")  # fmt: skip
    names = [name for name, _ in calls]
    require(names.count("reduce_scatter") == 1 and names.count("all_gather") == 1, f"{case} right, with {told}; one "
            "reduce_scatter and one all_gather are enough.")  # fmt: skip


class Scaled(nn.Module):
    """The layers of the lesson, and a parameter that belongs to none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled: Tensor = self.scale * self.layers(x)
        return scaled


class WholeParameters(TorchDispatchMode):
    """Looks before each operation how many bytes of a model's parameters are gathered; `most` is the most so far."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.most, self._model = 0, model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = sum(each.nbytes for each in self._model.parameters() if not isinstance(each, DTensor))
        self.most = max(self.most, now)
        return func(*args, **(kwargs or {}))


@dataclass
class Sharded:
    """A step of a model that an answer has cut, on one rank."""

    whole: list[str]  # parameters that are not cut
    held: int  # bytes of the pieces of parameters, and of the states of Adam
    most: int = 0  # bytes that were gathered at once
    wrong: str = ""  # the first gradient that is not that of one process


RANKS = 4
SHARE = -(-WIDTH // RANKS) * 4 * (LAYERS * (WIDTH + 1) + 1)  # bytes of the parameters: 13 rows of 50 on a rank
ONE_LAYER = 4 * (WIDTH * WIDTH + WIDTH + WIDTH)  # a layer, and the parameter beside the layers
GATHERS = 2 * LAYERS  # all layers twice, the last one and `scale` once


@exercise(
    "The root takes what no layer has taken, so it comes last. Then follow one step: which layer is needed again right "
    "after its forward?",
    "Begin with `for layer in model.layers:`, and let `reshard_after_forward` depend on whether `layer` is "
    "`model.layers[-1]`.",
)
def on_ranks(answer: Callable[[nn.Module], Any]) -> None:
    """`answer(model)` cuts a model on each worker: one layer is whole at a time, and none is gathered for nothing."""
    ran = run_on_ranks(sharded_step, answer, [()] * RANKS)
    for rank, seen in enumerate(ran.values):
        _all_cut(rank, seen)
        require(not seen.wrong, f"All is cut; but on rank {rank} {seen.wrong}.")
        require(seen.most <= ONE_LAYER, f"Right gradients; but on rank {rank} {seen.most} bytes of parameters are "
                f"whole at once. One layer and `scale` have {ONE_LAYER}.")  # fmt: skip
    _no_gather_for_nothing(ran)
    right(f"One layer at a time, and {GATHERS} gathers: the last layer stays, as its backward comes next.")


def sharded_step(answer: Callable[[nn.Module], Any]) -> Sharded:
    """On a worker: a step of Adam on this rank's rows of a batch."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, alone = Scaled(), Scaled()
    try:
        answer(model)
    except TypeError:
        require(not isinstance(model.scale, DTensor), "`fully_shard(model)` has taken all parameters before the layers "
                "were cut. Call it last: it takes what is left.")  # fmt: skip
        raise
    cut = {name: each for name, each in model.named_parameters() if isinstance(each, DTensor)}
    whole = [name for name, _ in alone.named_parameters() if name not in cut]
    held = sum(each.to_local().untyped_storage().nbytes() for each in cut.values())
    if whole or held > SHARE:
        return Sharded(whole, held)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = batch(step=0)
    F.mse_loss(alone(x), y).backward()
    with WholeParameters(model) as seen:
        F.mse_loss(model(x.chunk(size)[rank]), y.chunk(size)[rank]).backward()
    wrong = next((told for name, one in alone.named_parameters() if (told := _why_other(name, cut[name], one))), "")
    optimizer.step()
    return Sharded(whole, held, seen.most, wrong)


def _why_other(name: str, cut: DTensor, alone: nn.Parameter) -> str:
    if cut.grad is None:
        return f"{name} has no gradient"
    wanted = distribute_tensor(alone.grad, cut.device_mesh, cut.placements, src_data_rank=None).to_local()
    found = cut.grad.to_local()
    return "" if torch.allclose(found, wanted, atol=1e-7) else f"the gradient of {name} is not that of one process"


def _all_cut(rank: int, seen: Sharded) -> None:
    layers = [name for name in seen.whole if name.startswith("layers.")]
    few = ", ".join(layers[:2]) + (f" and {len(layers) - 2} more" if len(layers) > 2 else "")
    require(len(seen.whole) < 2 * LAYERS + 1, f"Rank {rank} has all parameters whole: nothing was cut.{dots_left()}")
    require(not layers, f"Rank {rank} has {few} whole: not each layer is cut.")
    require(not seen.whole, f"Rank {rank} has `scale` whole: it belongs to the model, and to none of its layers.")
    require(seen.held <= SHARE, f"Rank {rank} keeps {seen.held} bytes of parameters, and a share of four ranks has "
            f"{SHARE}. Over how many ranks is a parameter cut?")  # fmt: skip


def _no_gather_for_nothing(ran: Run) -> None:
    for rank in range(len(ran.values)):
        gathers = [call.size for call in ran.calls[rank] if call.op == "all_gather"]
        own = gathers.count(min(gathers))
        why = "`scale` twice." if own > 1 else "each layer twice. Which one is needed again right after its forward?"
        require(len(gathers) <= GATHERS, f"Right gradients, one layer at a time; but the trace of rank {rank} has "
                f"{len(gathers)} all-gathers, and {GATHERS} are enough: it gathers {why}")  # fmt: skip


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
                f"and gradients of width {weight.shape[1]}, not {before} and {after}."
                + (" You give it its output." if before == after == weight.shape[1] else ""))  # fmt: skip
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
    require(count > 0, f"{case} no gradient was handed to `reduce_scatter`.{dots_left()}")
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


LONGER = 511 / 512 * (156e12 / 25e9) / 4096
SLIPS = {
    "That is the time without communication by the one with it.": 1 / LONGER,
    "Transfers run beside the computing, so the two times are not added.": 1 + LONGER,
    "Either a parameter counts four bytes, where bfloat16 has two, or the GPU counts with its peak, where it computes "
    "156 TFLOP/s.": 2 * LONGER,
    "That is the traffic of stage 2; stage 3 gathers the parameters twice.": LONGER * 2 / 3,
    "The transfers take longer than computing, so they are not hidden.": 1.0,
}


@exercise(
    "Compare for each parameter: the seconds of its three transfers, and of the 6 operations of each token. The longer "
    "ones decide.",
    "Begin with `moving = 3 * 511 / 512 * 2 / 25e9` and `computing = 6 * 4096 / 156e12`.",
)
def exposed(answer: float) -> None:
    """`answer` is the time of a step, as a multiple of computing alone, within 1 %."""
    times = read(answer, float, "A number is wanted: how many times as long the step takes")
    require(abs(times - LONGER) <= 0.01 * LONGER,
            f"A step does not take {times:.4g} times as long." + name_slip(times, SLIPS, 0.005))  # fmt: skip
    right("It is communication-bound: a third of the step is exposed. Two rows on each GPU would hide all transfers.")
