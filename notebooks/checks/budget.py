"""Checks of lesson 37: each plays a step on all ranks, draws it, and says what is wrong or over a limit."""

from __future__ import annotations

from collections.abc import Callable

import budgets
from budgets import Level
from IPython.display import display
from one_step import Step
from step_records import Run

from checks import dots_left, exercise, require, right, shown, trying
from checks import hint as hint
from checks import solution as solution


def try_level(level: Level, step: Step, praise: str | Callable[[Run], str]) -> None:
    """Play, draw and judge a step. `praise`: what is said of a right one, or a function of what has happened in it."""
    require(callable(step), f"A function `step(rank)` is wanted, not {shown(step)}.{dots_left()}")
    with trying("Your step"):
        run, faults = level.try_step(step)
    require(run.bars, f"{' '.join(faults) or 'The step does nothing.'}{dots_left()}")
    display(level.picture(run))  # type: ignore[no-untyped-call]
    require(not faults, " ".join(faults))
    right(praise if isinstance(praise, str) else praise(run))


@exercise(
    "Of which layer is the gradient complete first? Until when does its all-reduce run, and what could the rank "
    "compute meanwhile?",
    "Let the all-reduce of a layer begin right after its backward. Update the layer one turn later, when backward of "
    "the layer below it has run.",
)
def early(answer: Step) -> None:
    """Data parallel: room for the gradients of two layers, and time for all-reduces that hide behind backward."""
    try_level(budgets.EARLY, answer, "A gradient lives for two backwards: one makes it, one hides its all-reduce.")


@exercise(
    "Half of an all-reduce is a reduce-scatter. When is the gradient of a layer complete, with two micro-batches?",
    "Reduce-scatter a layer in the backward of the last micro-batch, `rank.microbatches[-1]`. Update and gather all "
    "layers at the end, the last layer first.",
)
def zero1(answer: Step) -> None:
    """ZeRO-1: states are shards; whole gradients add up over the micro-batches."""
    try_level(budgets.ZERO1, answer, "The same messages as an all-reduce, and a quarter of the states.")


@exercise(
    "Which of your last answer's tensors are too many? They need not stay whole until the last micro-batch.",
    "`reduce_scatter` adds to a shard that is there already. So it may come after each backward of each micro-batch.",
)
def zero2(answer: Step) -> None:
    """ZeRO-2: gradients are shards, too."""
    try_level(budgets.ZERO2, answer, "Less memory for more messages: a reduce-scatter for each micro-batch.")


@exercise(
    "Which weights does the next computation need, and can they come while this one runs? Which gathered weights are "
    "used twice in a row?",
    "Gather layer 0 first. Then, before each forward, gather the next layer; before each backward, the one below. Free "
    "a layer after its forward, but for the last one, and after its backward.",
)
def zero3(answer: Step) -> None:
    """ZeRO-3: weights are shards, gathered one layer ahead."""
    try_level(budgets.ZERO3, answer, _praise_gathers)


def _praise_gathers(run: Run) -> str:
    count = sum(bar.call == "all_gather" and bar.lane == "network" for bar in run.bars if bar.rank == 0)
    if count <= 2 * run.world.layers - 2:
        return f"{count} gathers, and no step has fewer: the last two layers stay whole from forward to backward."
    return f"{count} gathers, nearly all beside a computation. With two whole layers at the turn six would be enough."


@exercise(
    "How many micro-batches must rank 0 send before the first gradient can come back? How many rank 3?",
    "First `rank.stages - rank.stage - 1` forwards. Then, for each micro-batch, the forward of one that is so many "
    "further on, if there is one, and its own backward.",
)
def pipeline(answer: Step) -> None:
    """A pipeline of four stages, with room for the activations of four micro-batches."""
    try_level(budgets.PIPELINE, answer, "1F1B: each rank keeps only what is on its way through the stages after it.")


@exercise(
    "Your pipeline, and at its end what ZeRO-1 does. Which ranks have the same layers?",
    "1F1B as before. Then for each layer a reduce-scatter, and for each layer an update and an all-gather.",
)
def both(answer: Step) -> None:
    """Two replicas of a pipeline of two stages, with shards of states."""
    try_level(budgets.BOTH, answer, "One reduce-scatter for all micro-batches: they may be as many as you like.")


@exercise(
    "A whole gradient lives from its first micro-batch to its last. Which order of backwards makes that time short?",
    "All forwards first. Then go through the layers from the last to the first, and run backward of each for all "
    "micro-batches before the next layer.",
)
def order(answer: Step) -> None:
    """The memory of ZeRO-2, nearly, with the messages of ZeRO-1."""
    try_level(budgets.ORDER, answer, "Activations of two micro-batches are smaller here than all whole gradients.")
