"""Checks of lesson 26."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from memory_meter import Kept
from tensor_by_hand import add, copy, piece
from torch import Tensor, nn
from torch.nn import functional as F

from checks import EMPTY, NotYet, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run as Ran
from checks.on_ranks import run_on_ranks

CHAINS = [  # what each layer keeps, its input among it; what its input alone is; lengths of segments
    ([40, 30, 20, 10], [4, 3, 2, 1], [1, 2, 1]),  # the largest segment is neither the first nor the last
    ([10, 20, 30, 40], [1, 2, 3, 4], [2, 2]),
    ([10, 20, 30, 40], [1, 2, 3, 4], [4]),
    ([10, 20, 30, 40], [1, 2, 3, 4], [1, 1, 1, 1]),
    ([5, 5, 5, 50, 5, 5], [5, 1, 5, 3, 5, 2], [3, 1, 2]),
    ([8, 8, 8, 8, 8, 8, 8, 8, 8], [8] * 9, [3, 3, 3]),
    ([6, 6, 6, 20, 20, 20], [1, 1, 9, 7, 1, 1], [2, 1, 3]),
    ([50, 10, 10], [5, 5, 5], [1, 2]),
    ([7], [3], [1]),
]


def peak_of(kept: Sequence[int], inputs: Sequence[int], segments: Sequence[int]) -> int:
    begins = [0, *itertools.accumulate(segments)]
    return max(
        sum(inputs[begin] for begin in begins[:number]) + sum(kept[begins[number] : begins[number + 1]])
        for number in range(len(segments))
    )


@exercise(
    "Go through backward: the last segment is computed again first. Which inputs are still stored at this moment, and "
    "what does the segment itself keep?",
    "For each segment add up `kept` of its layers, and the inputs of the first layers of all segments before it. The "
    "answer is the largest of these sums.",
)
def peak(answer: Callable[[list[int], list[int], list[int]], Any]) -> None:
    """`answer(kept, inputs, segments)` is the most that a chain holds in its backward."""
    for kept, inputs, segments in CHAINS:
        given = list(kept), list(inputs), list(segments)
        with trying():
            found = returned(answer(*given))
        case = f"kept {kept}, inputs {inputs}, segments {segments}"
        require(given == (kept, inputs, segments), f"{case}: the lists have changed.")
        found = read(found, float, "It should return a number")
        wanted = peak_of(kept, inputs, segments)
        if found != wanted:
            most = max(_sums(kept, segments))
            if found == most:
                raise NotYet(f"{case}: {found} is what the largest segment keeps. The inputs of earlier segments wait.")
            if found == sum(kept) and len(segments) > 1:
                raise NotYet(
                    f"{case}: {found} is what all layers keep together. Segments are computed again one by one."
                )
            slip = _slip(found, kept, inputs, segments)
            raise NotYet(f"{case}: the most held at once is {wanted}, and you say {found:g}.{slip}")
    right("It is what the meter shows, but for the few values on their way.")


def _slip(found: float, kept: Sequence[int], inputs: Sequence[int], segments: Sequence[int]) -> str:
    """Return the sentence on the inputs that `peak` counts by mistake; empty if none is known."""
    firsts = [inputs[begin] for begin in itertools.accumulate([0, *segments[:-1]])]
    sums = list(enumerate(_sums(kept, segments)))
    mistakes = {
        "That counts a segment's own input twice: it is among what its first layer keeps.":
            max(sum(firsts[: number + 1]) + own for number, own in sums),
        "That counts the inputs of all segments; a segment whose backward is over has given its input up.":
            max(sum(firsts) + own for _, own in sums),
        "That counts the inputs of later segments, whose backward is over. It is the earlier ones that wait.":
            max(sum(firsts[number + 1 :]) + own for number, own in sums),
    }  # fmt: skip
    return name_slip(found, mistakes, within=0)


def _sums(kept: Sequence[int], segments: Sequence[int]) -> list[int]:
    begins = [0, *itertools.accumulate(segments)]
    return [sum(kept[a:b]) for a, b in itertools.pairwise(begins)]


def all_segmentations(layers: int) -> list[list[int]]:
    found = []
    for cuts in itertools.product((False, True), repeat=layers - 1):
        places = [0, *(place for place, cut in enumerate(cuts, 1) if cut), layers]
        found.append([b - a for a, b in itertools.pairwise(places)])
    return found


@exercise(
    "Between two layers there is a cut or there is none. How many ways are there, and what does `peak` say of each?",
    "`itertools.product((False, True), repeat=len(kept) - 1)` runs through all ways to cut. Turn each into a list of "
    "lengths, and take the `min` by its peak.",
)
def best_segments(answer: Callable[[list[int], list[int]], Any]) -> None:
    """`answer(kept, inputs)` is a list of segments with the smallest peak."""
    chains = [(kept, inputs) for kept, inputs, _ in CHAINS]
    chains += [([30, 1, 1, 1, 1], [1, 12, 12, 12, 12]), ([16] * 6, [1] * 6)]
    chains += [([9, 1, 1, 1, 9, 1, 1, 1], [1, 1, 1, 6, 1, 1, 1, 1]), ([1, 1], [1, 1])]
    for kept, inputs in chains:
        given = list(kept), list(inputs)
        with trying():
            found = returned(answer(*given))
        case = f"kept {kept}, inputs {inputs}"
        require(given == (kept, inputs), f"{case}: the lists have changed.")
        found = read(found, [int], "It should return a list of lengths")
        whole = all(each > 0 for each in found)
        require(whole, f"{case}: each segment has one layer or more; {shown(found)} is no list of such lengths.")
        require(
            sum(found) == len(kept),
            f"{case}: the segments {shown(found)} have {sum(found)} layers together, not {len(kept)}.",
        )
        best = min(peak_of(kept, inputs, each) for each in all_segmentations(len(kept)))
        own = peak_of(kept, inputs, found)
        require(own == best, f"{case}: with segments {list(found)} the most held at once is {own}; {best} is possible.")
    right("√n segments of equal length are the best only where all layers are alike.")


class Watched:
    """A part of a model with dropout, which counts its runs and sees whether its inner values are kept."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(26)
            self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 4)
        self.runs = 0
        self.inner: weakref.ref[Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        require(not _by_torch(), "`run` was called by torch's `checkpoint`. Here you should do without it.")
        self.runs += 1
        hidden = F.dropout(self.first(x).tanh(), 0.5)
        self.inner = weakref.ref(hidden)
        return self.second(hidden)

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.first.parameters(), *self.second.parameters()]


def _by_torch() -> bool:
    """Whether a function of torch.utils.checkpoint is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


Run = Callable[[Tensor], Tensor]


def _gradients(part: Watched, through: Callable[[Run, Tensor], Any]) -> tuple[Any, ...]:
    """Two uses of a part, one behind the other, with another gradient for each number of the result."""
    torch.manual_seed(7)
    leaf = torch.linspace(-1, 1, 18).view(3, 6).requires_grad_()
    first = returned(through(part, leaf * 2.0))
    require(isinstance(first, Tensor), f"It should return a tensor, not {shown(first)}.")
    second = through(part, F.pad(first, (0, 2)) + leaf)
    drawn = torch.rand(1)
    if part.inner is not None and part.inner() is not None:
        gc.collect()
    alive = part.inner is not None and part.inner() is not None
    runs = part.runs
    require(second.requires_grad, "The result has no gradient: autograd cannot go back through it.")
    second.backward(torch.arange(12.0).view(3, 4))
    return (
        first.detach(),
        second.detach(),
        drawn,
        torch.rand(1),
        leaf.grad,
        [p.grad for p in part.parameters],
        alive,
        runs,
    )


@exercise(
    "Write a `torch.autograd.Function` inside of your function. Its `forward` runs without a graph and saves x; what "
    "must `backward` do with autograd switched on, from where, and with which random numbers?",
    "In `forward`: `ctx.save_for_backward(x)` and `ctx.state = torch.get_rng_state()`, then run. In `backward`: detach "
    "x, run it again within `torch.enable_grad()` and `torch.random.fork_rng(devices=[])`, and call "
    "`.backward(gradient)` on the result.",
)
def recomputed(answer: Callable[[Run, Tensor], Any]) -> None:
    """`answer(run, x)` is run(x); it keeps x alone, and computes the rest again in backward."""
    plain, own = Watched(), Watched()
    with torch.random.fork_rng(devices=[]):
        wanted = _gradients(plain, lambda run, x: run(x))
        with trying():
            found = _gradients(own, answer)
    first, second, drawn, after, of_x, of_parameters, alive, runs = found
    require(torch.equal(first, wanted[0]) and torch.equal(second, wanted[1]), "The result is not run(x).")
    require(
        torch.equal(drawn, wanted[2]),
        "After the forward the random numbers go on elsewhere than without recomputation.",
    )
    require(not alive, "After forward the inner values of `run` are still alive. Only x may be kept.")
    require(runs == 2, f"Two uses have called `run` {runs} times in forward; once for each is enough.")
    require(own.runs > 2, "In backward `run` was not called again.")
    require(of_x is not None, "The gradient of x is missing.")
    require(
        all(each is not None for each in of_parameters),
        "The parameters have no gradients. `run` uses them, so backward must reach them, too.",
    )
    same = [torch.equal(a, b) for a, b in zip([of_x, *of_parameters], [wanted[4], *wanted[5]], strict=True)]
    if not all(same):
        raise NotYet(_why(answer))
    require(own.runs == 4, f"Two uses have called `run` {own.runs - 2} times in backward; once for each is enough.")
    require(
        torch.equal(after, wanted[3]),
        "After backward the random numbers go on elsewhere than without recomputation: put the state back.",
    )
    right("It keeps one input, and the gradients are the same to the last bit.")


def _why(answer: Callable[..., Any]) -> str:
    """Try without dropout: are the gradients right then?"""

    class Dry(Watched):
        def __call__(self, x: Tensor) -> Tensor:
            self.runs += 1
            hidden = self.first(x).tanh()
            self.inner = weakref.ref(hidden)
            return self.second(hidden)

    plain, own = Dry(), Dry()
    with torch.random.fork_rng(devices=[]):
        wanted_dry, found_dry = _gradients(plain, lambda run, x: run(x)), _gradients(own, answer)
    if torch.equal(wanted_dry[4], found_dry[4]) and all(map(torch.equal, wanted_dry[5], found_dry[5])):
        return "Without dropout the gradients are right, with dropout they are not: the second run draws another mask."
    return "The gradients differ from those without recomputation, even without dropout."


PLANS = [  # (what a layer keeps, its input, seconds to compute it again) of each layer; the budget
    ([(10, 1, 5.0), (10, 1, 1.0), (10, 1, 5.0)], 21),
    ([(10, 1, 1.0), (10, 1, 1.0)], 100),
    ([(10, 1, 2.0), (10, 1, 3.0)], 11),
    ([(10, 5, 1.0), (10, 5, 1.0)], 12),
    ([(60, 10, 6.0), (40, 10, 3.0), (40, 10, 3.5), (20, 5, 0.5)], 110),
    ([(9, 3, 1.0), (8, 1, 4.0), (7, 2, 2.0), (6, 1, 2.5), (20, 4, 3.0)], 40),
    ([(10, 2, 1.0), (30, 2, 10.0)], 32),
    ([(30, 1, 9.0), (16, 1, 4.0), (16, 1, 4.0), (10, 1, 0.0)], 44),
    ([(30, 1, 9.0), (16, 1, 4.0), (16, 1, 4.0), (10, 1, 0.5)], 47),
    ([(10, 1, seconds) for seconds in (4.0, 3.0, 7.0, 1.0, 2.0, 6.0, 5.0, 8.0)], 30),
]


def held_by(layers: Sequence[tuple[int, int, float]], again: set[int]) -> int:
    """The most that is held: in the backward of layer i, what the layers before it hold, and all that layer i keeps."""
    held = [given if number in again else kept for number, (kept, given, _) in enumerate(layers)]
    return max(sum(held[:number]) + kept for number, (kept, _, _) in enumerate(layers))


# -- recomputation between the messages, on the workers
RANKS, PARTS, ROWS, WIDTH, HIDDEN = 2, 3, 5, 8, 12
INPUTS = (PARTS - 1) * ROWS * WIDTH * 4  # bytes of the inputs of all parts but the first
Parts = Callable[[nn.ModuleList, Tensor], Any]


@exercise(
    "What runs again in backward is what was given to `checkpoint`. Which functions of the loop send a message in "
    "forward, and do they have to run again?",
    "Begin with the loop without recomputation, `x = x + add(part(copy(x)))`, and put `checkpoint` around `part` "
    "alone, with `use_reentrant=False`.",
)
def on_ranks(answer: Parts) -> None:
    """`answer(parts, x)` runs on each worker: a model cut by tensor parallel, recomputed without more messages."""
    ran, plain = (run_on_ranks(kept_here, run, [()] * RANKS) for run in (answer, without_recomputation))
    for rank, (seen, wanted) in enumerate(zip(ran.values, plain.values, strict=True)):
        result, gradients, kept = seen
        result = returned(result)
        require(isinstance(result, Tensor), f"Rank {rank} returns {shown(result)}, not a tensor.")
        same = result.shape == wanted[0].shape and torch.equal(result, wanted[0])
        require(same, f"Rank {rank} returns other numbers than without recomputation: each part adds the sum of its "
                "results over the ranks to `x`.")  # fmt: skip
        wrong = next((name for name, one in wanted[1].items() if not _is_equal(gradients[name], one)), "")
        require(not wrong, f"Rank {rank}: the result is right, but the gradient of {wrong} is not that without "
                "recomputation.")  # fmt: skip
        require(kept <= INPUTS, f"Right gradients; but rank {rank} keeps {kept} bytes for backward besides `x`. The "
                f"inputs of the other parts are {INPUTS}; without recomputation it keeps {wanted[2]}.")  # fmt: skip
    _no_more_messages(ran, plain)
    right("Computed again, and not sent again: the results of the messages are kept.")


def without_recomputation(parts: nn.ModuleList, x: Tensor) -> Tensor:
    for part in parts:
        x = x + add(part(copy(x)))
    return x


def kept_here(answer: Parts) -> tuple[Any, dict[str, Tensor | None], int]:
    """On a worker: the result, the gradients, and the bytes that autograd has kept."""
    parts, made = nn.ModuleList(), torch.Generator().manual_seed(26)
    for _ in range(PARTS):
        up, down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)
        for layer in (up, down):
            nn.init.normal_(layer.weight, std=0.3, generator=made)
        up.weight, down.weight = piece(up.weight, 0), piece(down.weight, 1)
        parts.append(nn.Sequential(up, nn.Tanh(), down))
    x = torch.randn(ROWS, WIDTH, generator=made).requires_grad_()
    with Kept(parts, [x]) as kept:
        result = answer(parts, x)
    if not isinstance(result, Tensor):
        return result, {}, 0
    result.sum().backward()
    gradients = {"x": x.grad, **{name: each.grad for name, each in parts.named_parameters()}}
    return result.detach(), gradients, kept.total


def _is_equal(found: Tensor | None, wanted: Tensor | None) -> bool:
    assert wanted is not None
    return found is not None and torch.equal(found, wanted)


def _no_more_messages(ran: Ran, plain: Ran) -> None:
    for rank in range(RANKS):
        count, least = (each.ops(rank)["all_reduce"] for each in (ran, plain))
        require(count <= least, f"Right, and little is kept; but the trace of rank {rank} has {count} all-reduces, and "
                f"{least} without recomputation: {count - least} run again in backward.")  # fmt: skip
        others = sorted({*ran.ops(rank)} - {"all_reduce"})
        require(not others, f"Right; but in the trace rank {rank} also calls {', '.join(others)}.")


@exercise(
    "First write a function that gives the most that is held for a given set of layers. The last layer is special: is "
    "anything gained if it is computed again?",
    "Try all subsets, of each size, by `itertools.combinations(range(len(layers)), size)`; keep those within the "
    "budget and take the one with the smallest sum of seconds.",
)
def plan(answer: Callable[[list[tuple[int, int, float]], int], Any]) -> None:
    """`answer(layers, budget)` is the cheapest set of layers to recompute within a budget; None if there is none."""
    for number, (layers, budget) in enumerate(PLANS):
        given = list(layers)
        with trying():
            found = answer(given, budget)
        require(found is not ..., EMPTY)
        case = f"Layers {layers}, budget {budget}"
        require(given == layers, f"{case}: the list has changed.")
        subsets = [
            set(each) for size in range(len(layers) + 1) for each in itertools.combinations(range(len(layers)), size)
        ]
        fitting = [each for each in subsets if held_by(layers, each) <= budget]
        if not fitting:
            require(found is None, f"{case}: no choice fits, so the answer is None, not {shown(found)}.")
            continue
        require(found is not None or number == 0, f"{case}: you say None, but there is a choice that fits.")
        found = returned(found)
        found = set(read(found, {int}, "It should return a set of layer numbers"))
        known = all(0 <= each < len(layers) for each in found)
        require(known, f"{case}: {shown(found)} is no set of layers. Layers are counted from 0.")
        most = held_by(layers, found)
        require(most <= budget, f"{case}: with {shown(found)} computed again, {most} is held at one moment.")
        seconds = sum(layers[layer][2] for layer in found)
        least = min(sum(layers[layer][2] for layer in each) for each in fitting)
        require(seconds <= least + 1e-9, f"{case}: {shown(found)} takes {seconds:g} seconds; {least:g} are enough.")
    right("That is selective recomputation: the layers that keep much and cost little.")
