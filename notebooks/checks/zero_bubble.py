"""Checks of lesson 25."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rpcbench
from checks import DOTS, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from rpcbench.pipeline import Pipeline, PipelineError, Plan, schedule, schedules, split
from rpcbench.pipeline.batch import StepResult
from rpcbench.pipeline.ops import Kind, parse_ops, validate_ops

MOST_IDLE, MOST_KEPT = 0.08, 3


@exercise(
    "Take one word after the other into a new list: most go there as they are, and each `B` becomes two words.",
    "Begin with `halves = []` and `for word in words:`; `word.replace('B', 'I')` is the first half.",
)
def in_halves(answer: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """`answer(words)` has I and W in place of each B."""
    short = [["0F0", "0B0"], ["0F0", "0F1", "0B0", "0B1"], ["3F10", "3B10"], ["11F0", "11B0"]]
    several = ["0F0", "2F0", "2F1", "2B0", "0B0", "2B1"]  # stages
    short += [several, ["0F0", "0F1", "0I0", "0W0", "0B1"]]  # in the last one a backward is in halves already
    lists = [*short, *(list(map(str, own)) for own in schedules.one_f_one_b(3, 12))]
    for own in lists:
        given = list(own)
        with trying():
            found = returned(answer(given))
        require(given == own, "Your function has changed the list that it was given. Make a new one.")
        words = read(found, [str], f"A list of texts is wanted for {shown(own)}")
        wanted = " ".join(
            f"{word.replace('B', 'I')} {word.replace('B', 'W')}" if "B" in word else word for word in own
        ).split()
        told = " should become ".join(shown(" ".join(each)) for each in (own, wanted))
        require(words == wanted, f"{told}, not {shown(' '.join(words))}.")
    right("The next worker gets its gradient sooner. The gaps are still empty.")


@exercise(
    "The first worker is idle between its second forward and `0I0`. What could it run there, and is it allowed?",
    "Begin with `0F0 0F1 0F2 0I0 0W0`: then two micro-batches are kept, and there is room for the next forward.",
)
def mine(answer: str | Plan | Sequence[str]) -> None:
    """Two workers, four micro-batches, in halves; less idle than MOST_IDLE with MOST_KEPT."""
    require(answer is not ..., f"{DOTS[:-1]} by the schedule, a text of two lines.")
    lines = [str(answer)] if isinstance(answer, str | Plan) else read(answer, [object], "A text of two lines is wanted")
    words = [line if isinstance(line, str) else " ".join(read(line, [str], "A text is wanted")) for line in lines]
    with trying("The schedule"):
        ops = parse_ops("\n".join(words))
    require(len(ops) == 2, f"Two workers need two lines; here are {len(ops)}.")
    try:
        validate_ops(ops, stages=2, microbatches=4, most_live=MOST_KEPT)
    except PipelineError as error:
        require(False, f"It was refused: {error}.")
    idle = schedule(ops).simulate().idle
    require(idle < MOST_IDLE, f"It runs, and leaves {idle:.1%} idle. Look at the drawing: which gap could a W fill?")
    other = [str(op) for own in ops for op in own if op.kind not in (Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)]
    require(not other, f"It runs, and has {', '.join(other)}. All operations should be F, I or W.")
    right(f"{idle:.1%} idle. A schedule of your own!")


# -- a pipeline on the workers, under a limit
WORKERS, WIDE, ROWS = 3, 4, 2  # stages and workers, width of an activation, samples in a micro-batch
RUNS = ((6, 2), (5, 1), (4, 3), (2, 2))  # micro-batches, and how many of them a worker may keep


@exercise(
    "1F1B begins with as many forwards as there are workers from here to the end. What if that is more than the limit? "
    "And behind each backward there is room for one forward more.",
    "Begin with `def ops(workers, microbatches, chunks=1)`, which makes for each worker a list of texts: `ahead = "
    "min(workers - worker, most, microbatches)` forwards, then a backward and a forward by turns, then the backwards "
    "that are left. A pipeline takes the function as its schedule.",
)
def on_workers(answer: Callable[[Any, int, int], Pipeline]) -> None:
    """`answer(stages, microbatches, most)` is a pipeline that keeps no more than `most` activations on a worker."""
    workers = rpcbench.cluster().workers
    require(len(workers) >= WORKERS, f"{WORKERS} workers are needed: `%cluster scale {WORKERS}`.")
    for microbatches, most in RUNS:
        case = f"{microbatches} micro-batches, at most {most}"
        model = layers()
        with trying(f"{case}: it"):
            pipe = returned(answer(split(layers(), workers[:WORKERS]), microbatches, most))
        require(isinstance(pipe, Pipeline), f"{case}: it should return a Pipeline, not {shown(pipe)}.")
        x, y = torch.randn(2, microbatches * ROWS, WIDE, generator=torch.Generator().manual_seed(25))
        with trying(f"{case}: the step"), pipe.batch(x, y) as batch:
            result, found = batch.result, batch.gradients()
        F.mse_loss(model(x), y).backward()
        _same_gradients(case, found, model)
        _kept(case, result, microbatches, most)
        _no_longer(case, result, microbatches, most)
    right("The memory decides how many forwards may run ahead, and the bubble pays for it.")


def layers() -> nn.Sequential:
    """A stage for each worker."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(25)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(WORKERS)))


def _same_gradients(case: str, found: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        times = (found[name] / parameter.grad).mean().item()
        close = torch.allclose(found[name], parameter.grad, atol=1e-6)
        require(close, f"{case}: the gradient of {name} is {times:.3g} times that of one process. Is `loss_fn` the "
                "mean squared error?")  # fmt: skip


def _kept(case: str, result: StepResult, microbatches: int, most: int) -> None:
    """In the step that has run, from the begin of a forward to the end of its backward, or of its W."""
    ran = {row["microbatch"] for row in result.rows if row["op"] == "F"}
    require(len(ran) == microbatches, f"{case}: the step has run {len(ran)} micro-batches.")
    for worker in sorted({row["worker"] for row in result.rows}):
        rows = sorted((row for row in result.rows if row["worker"] == worker), key=lambda row: row["begin"])
        now = largest = 0
        for row in rows:
            now += {"F": 1, "B": -1, "W": -1}.get(row["op"], 0)
            largest = max(largest, now)
        order = " ".join(f"{row['op']}{row['microbatch']}" for row in rows)
        require(largest <= most, f"{case}: right gradients; but {result.names[worker]} has kept {largest} at once: "
                f"{order}.")  # fmt: skip


def _no_longer(case: str, result: StepResult, microbatches: int, most: int) -> None:
    best = schedule(_limited(microbatches, most)).simulate().idle
    assert result.idle_ideal is not None
    require(result.idle_ideal <= best + 1e-9, f"{case}: right gradients, and no more is kept; but on paper "
            f"{result.idle_ideal:.1%} are idle, and {best:.1%} are possible. It should not become empty before "
            "the last forward: a worker that keeps as many as it may runs one backward, then a forward.")  # fmt: skip


def _limited(microbatches: int, most: int) -> str:
    """1F1B with no more than `most` forwards ahead."""
    lines = []
    for worker in range(WORKERS):
        ahead = min(WORKERS - worker, most, microbatches)
        words = [f"{worker}F{number}" for number in range(ahead)]
        for number in range(microbatches):
            words.append(f"{worker}B{number}")
            words += [f"{worker}F{ahead + number}"] if ahead + number < microbatches else []
        lines.append(" ".join(words))
    return "\n".join(lines)


@exercise(
    "Draw 1F1B in halves for 3 workers: the last worker has gaps at the end that saved `W`s would fill.",
    "Let a worker put its `W`s off, a later worker more than an earlier one. By how many micro-batches may worker w "
    "be behind, if nobody keeps more than `workers`? Begin with the last worker of three, on paper.",
)
def zero_bubble(answer: Callable[[int, int, int], Sequence[str]]) -> None:
    """The lists of all workers are a schedule as short as ZB-H1, which keeps no more than `workers` micro-batches."""
    for workers, microbatches in ((2, 4), (3, 6), (4, 9), (3, 3), (1, 2), (2, 12)):
        asked = f"{workers} workers and {microbatches} micro-batches"
        lines = []
        for worker in range(workers):
            with trying(f"For worker {worker} of {asked} it"):
                found = returned(answer(worker, workers, microbatches))
            lines.append(" ".join(read(found, [str], f"A list of texts is wanted for worker {worker} of {asked}")))
        text = "\n".join(lines)
        try:
            ops = parse_ops(text)
            require(len(ops) == workers, f"For {asked} there are only {len(ops)} lists that are not empty.")
            validate_ops(ops, stages=workers, microbatches=microbatches, most_live=workers)
        except PipelineError as error:
            require(False, f"For {asked} it was refused: {error}. The schedule: {'; '.join(lines)}.")
        length, wanted = schedule(ops).simulate().makespan, 3 * microbatches + workers - 1
        require(
            length <= wanted,
            f"For {asked} it runs, and takes {length:g} units; {wanted} are enough. The schedule: {'; '.join(lines)}.",
        )
    right("A third of the bubble of 1F1B, in no more memory than its first worker needs.")
