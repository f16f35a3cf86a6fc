"""Checks of lesson 24."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from checks import NotYet, differ, dots_left, exercise, name_slip, read, require, returned, right, trying
from checks import hint as hint
from checks import solution as solution
from checks.flights import Flights, Seen
from checks.on_ranks import Run, run_on_ranks
from rpcbench.base.errors import count_noun
from rpcbench.pipeline import schedules
from rpcbench.pipeline.schedules import gpipe
from rpcbench.pipeline.simulate import simulate

MANY = 600  # micro-batches, more than any of these exercises needs


@exercise(
    "Take the ideal time as 1. How long is then the bubble, and how long the whole step?",
    "With an ideal time of 1 the bubble lasts `ratio`, and the step lasts `1 + ratio`.",
)
def idle_share(answer: Callable[[float], float]) -> None:
    """`answer(ratio)` is what the schedules show when they are played through."""
    for workers, microbatches in ((2, 4), (1, 4), (2, 1), (4, 8), (8, 3), (16, 128)):
        ratio = (workers - 1) / microbatches
        with trying():
            share = returned(answer(ratio))
        wanted = simulate(schedules.one_f_one_b(workers, microbatches)).idle
        share = read(share, float, "A number is wanted")
        slips = {"That is the share that is busy.": 1 / (1 + ratio)}
        if ratio < 1:
            slips["That leads the other way: it makes a ratio of a share."] = ratio / (1 - ratio)
        require(
            abs(share - wanted) < 1e-6,
            f"With {count_noun(workers, 'worker')} and {count_noun(microbatches, 'micro-batch')} the ratio is "
            f"{ratio:g}, and {differ(wanted, share, ' of the step is idle; you say ')}."
            f"{name_slip(share, slips) if ratio else ''}",
        )
    right("25 % of the ideal time is 20 % of the step. Both numbers tell of the same bubble.")


@exercise(
    "The share falls with each micro-batch more. Begin with one, and go on for as long as the share is too large.",
    "Begin with `microbatches = 1` and `while (workers - 1) / (microbatches + workers - 1) > share + 1e-9:`.",
)
def enough(answer: Callable[[int, float], int]) -> None:
    """`answer(workers, share)` is the smallest number of micro-batches for it."""
    for workers, share in ENOUGH:
        with trying():
            number: Any = returned(answer(workers, share))
        number = read(number, int, "A whole number is wanted")
        require(number >= 1, f"{number} micro-batches are none; there has to be one at least.")
        asked = f"for {count_noun(workers, 'worker')} and {100 * share:g}% at most"
        require(number < MANY, f"You say {number} {asked}; but far fewer would do.")
        idle = simulate(gpipe(workers, number)).idle
        require(idle <= share + 1e-9, f"You say {number} {asked}; but then {idle:.2%} is idle.")
        fewer = simulate(gpipe(workers, number - 1)).idle if number > 1 else 1.0
        require(fewer > share + 1e-9, f"You say {number} {asked}; but {number - 1} would do."
                f"{_too_many(number, workers, share)}")  # fmt: skip
    right("Not one too many.")


ENOUGH = [
    (4, 0.1), (2, 0.5), (2, 0.2), (8, 0.05), (1, 0.1), (4, 0.3), (6, 0.07), (2, 0.002),
    (4, 0.2), (7, 0.2), (13, 0.2),  # met exactly, where (p - 1) (1 - s) / s is rounded to a little more
]  # fmt: skip


def _too_many(number: int, workers: int, share: float) -> str:
    """Return the sentence on the mistake that leads to this number; empty if none is known."""
    if workers > 1 and number in (math.ceil((workers - 1) / share), math.ceil((workers - 1) / share - 1e-9)):
        return " That is for the ratio to the ideal time, (p - 1) / m. The share of the whole step is asked for."
    quotient = (workers - 1) * (1 - share) / share
    if number == math.ceil(quotient) and quotient - math.floor(quotient) < 1e-6:
        return (
            f" The share is met exactly then. A quotient of rounded numbers may lie a little above a whole one: "
            f"{quotient!r}."
        )
    return ""


@exercise(
    "Go through the operations in order, and count: a forward begins to keep something, and a backward ends it.",
    "Begin with `kept = most = 0`, and test for the letter by `'F' in op`.",
)
def most_kept(answer: Callable[[Sequence[str]], int]) -> None:
    """`answer(ops)` is the most that a worker keeps at once."""
    known = ["0F0", "0B0", "0F1", "0F2", "0B1", "0F3", "0B2", "0B3"]
    late = ["12F0", "12F1", "12B0", "12F2", "12F3", "12B1", "12B2", "12B3"]
    mixed = ["3F7", "3F2", "3B2", "3F11", "3F0", "3B7", "3F1", "3B11", "3B0", "3B1"]  # micro-batches in another order
    lists = [(known, 2), (late, 3), (mixed, 3)]
    for make in (gpipe, schedules.one_f_one_b):
        ops = make(4, 12)
        played = simulate(ops).peak_live
        lists += [(list(map(str, own)), most) for own, most in zip(ops, played, strict=True)]
    for words, most in lists:
        given = list(words)
        with trying():
            number = returned(answer(given))
        require(given == words, "The list `ops` has changed; leave it as it was given.")
        number = read(number, int, "A whole number is wanted")
        require(number == most, f"{' '.join(words)} keeps {most} at most; you say {number}.")
    right("GPipe keeps all twelve; of 1F1B the four workers keep 4, 3, 2 and 1.")


# -- 1F1B with messages
RANKS, SHAPE = 3, (2, 4)  # stages, shape of what a stage passes on
MICROBATCHES = (6, 2)  # of a step; once fewer than there are stages
Messages = list[Tensor] | None


@exercise(
    "What must a stage keep from a forward for its backward? And two neighbours that both send first, and wait until "
    "the other has received, wait for ever.",
    "Begin with two functions: `forward(n)` gets `x` (`inputs[n]`, or what `dist.recv` writes into "
    "`torch.empty(shape)`, with `requires_grad_()`), appends `(x, stage(x))` to a list, and sends on with "
    "`dist.isend`; `backward()` takes the first pair out of that list.",
)
def on_ranks(answer: Callable[..., Any]) -> None:
    """`answer(stage, microbatches, shape, inputs, targets)` runs on each worker: one step of 1F1B by messages."""
    for count in MICROBATCHES:
        with saying(f"With {count} micro-batches: " if count < RANKS else ""):
            _try_step(answer, count)
    right("A pipeline by hand: activations go forward, gradients go back, and as few are kept as 1F1B needs.")


def _try_step(answer: Callable[..., Any], count: int) -> None:
    """One step of so many micro-batches."""
    data = torch.randn(2, count, *SHAPE, generator=torch.Generator().manual_seed(24))
    inputs, targets = list(data[0]), list(data[1])
    given = [(count, inputs if rank == 0 else None, targets if rank == RANKS - 1 else None) for rank in range(RANKS)]
    ran = run_on_ranks(step_here, answer, given)
    wholes = stages()
    for number in range(count):
        (F.mse_loss(nn.Sequential(*wholes)(inputs[number]), targets[number]) / count).backward()
    for rank, (gradients, kept, seen) in enumerate(ran.values):
        _of_one_process(rank, gradients, wholes[rank])
        most = min(RANKS - rank, count)
        require(kept <= most, f"Right gradients; but rank {rank} has kept the activations of {kept} "
                f"micro-batches at once. In 1F1B it keeps {most}.")  # fmt: skip
        require(not (why := seen.why_wrong()), f"Right gradients; but rank {rank} {why}")
    _activations_and_gradients(ran, count)


@contextlib.contextmanager
def saying(case: str) -> Iterator[None]:
    """Hints begin with the case."""
    try:
        yield
    except NotYet as hint:
        raise NotYet(f"{case}{hint}") from None


def stages() -> list[nn.Module]:
    """The stages of a model, alike on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(24)
        return [nn.Sequential(nn.Linear(SHAPE[1], SHAPE[1]), nn.Tanh()) for _ in range(RANKS)]


class Held(torch.autograd.Function):
    """Counts the results of forwards that wait for their backward."""

    now = most = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Held.now += 1
        Held.most = max(Held.most, Held.now)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Held.now -= 1
        return gradients[0]


class Stage(nn.Module):
    """The stage of a rank."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        held: Tensor = Held.apply(self.inner(x))  # type: ignore[no-untyped-call]
        return held


def step_here(
    answer: Callable[..., Any], count: int, inputs: Messages, targets: Messages
) -> tuple[list[Tensor | None], int, Seen]:
    """On a worker: the gradients of its stage after the answer, how many forwards have waited at most, and what
    happened to its messages."""
    Held.now = Held.most = 0
    rank = dist.get_rank()
    stage = Stage(stages()[rank])
    try:
        with trying(f"On rank {rank} of {RANKS} it"), Flights() as flights:
            answer(stage, count, SHAPE, inputs, targets)
    except NotYet as hint:
        why = f" {NO_GRADIENT[rank > 0]}" if "Expected parameter `tensor`" in str(hint) else ""
        raise NotYet(f"{hint}{why}") from None
    return [each.grad for each in stage.parameters()], Held.most, flights.seen()


NO_GRADIENT = (  # why what is sent is no tensor, on rank 0 and on the others
    "The inputs of rank 0 have no gradient, and there is no rank before it.",
    "A tensor has no gradient, but None, unless it required one before the forward in which it was used.",
)


def _of_one_process(rank: int, gradients: Sequence[Tensor | None], whole: nn.Module) -> None:
    for (name, parameter), found in zip(whole.named_parameters(), gradients, strict=True):
        require(found is not None, f"Rank {rank}: {name} of its stage has no gradient.{dots_left()}")
        assert found is not None and parameter.grad is not None
        times = (found / parameter.grad).median().item()
        even = torch.allclose(found, times * parameter.grad, atol=1e-6)
        told = f"is {times:.3g} times that of one process. The loss is the mean over all micro-batches." if even else (
            "is not that of one process. Does each gradient meet the activations of its own micro-batch?")  # fmt: skip
        require(torch.allclose(found, parameter.grad, atol=1e-6), f"Rank {rank}: the gradient of {name} {told}")


def _activations_and_gradients(ran: Run, count: int) -> None:
    for rank, calls in enumerate(ran.calls):
        told = f"Right; but in the trace rank {rank}"
        others = sorted({call.op for call in calls} - {"send"})
        require(not others, f"{told} calls {', '.join(others)}. Messages are enough.")
        near = [other for other in (rank - 1, rank + 1) if 0 <= other < RANKS]
        astray = [call.to for call in calls if call.to not in near]
        require(not astray, f"{told} sends to rank {astray[:1]}, which is not its neighbour.")
        require(len(calls) == len(near) * count, f"{told} sends {len(calls)} messages. "
                f"{len(near) * count} are enough, one for each micro-batch and neighbour.")  # fmt: skip


@exercise(
    "There are three parts: forwards alone, backward and forward in turn, and backwards alone.",
    "Begin with `first = min(workers - worker, microbatches)` and a list of that many forwards.",
)
def one_f_one_b(answer: Callable[[int, int, int], Sequence[str]]) -> None:
    """`answer(worker, workers, microbatches)` is the list of this worker."""
    for workers, microbatches in ((2, 4), (1, 3), (4, 8), (4, 2), (3, 11), (3, 3), (11, 2)):
        lists = schedules.one_f_one_b(workers, microbatches)
        for worker, own in enumerate(lists):
            asked = f"worker {worker} of {workers} with {count_noun(microbatches, 'micro-batch')}"
            with trying(f"For {asked} it"):
                words = returned(answer(worker, workers, microbatches))
            words = read(words, [str], f"A list of texts is wanted for {asked}, as ['0F0', '0B0']")
            wanted = list(map(str, own))
            require(
                words == wanted,
                f"For {asked} the list is {' '.join(wanted)}; yours is {' '.join(words) or 'empty'}.",
            )
    right(
        "rpcbench and torch write the same lists. `schedule` takes yours, too, as a text with a line for each worker."
    )
