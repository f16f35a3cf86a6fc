"""Checks of lesson 25."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checks import require, returned, right, shown, trying
from rpcbench.pipeline import PipelineError, schedule
from rpcbench.pipeline.ops import parse, validate
from rpcbench.pipeline.schedules import one_f_one_b

MOST_IDLE, MOST_KEPT = 0.08, 3


def in_halves(answer: Callable[[Sequence[str]], Sequence[str]]) -> None:
    """`answer(words)` has I and W in place of each B."""
    for own in (["0F0", "0B0"], *(list(map(str, own)) for own in one_f_one_b(3, 12))):
        with trying():
            words = list(returned(answer(list(own))))
        wanted = " ".join(
            f"{word.replace('B', 'I')} {word.replace('B', 'W')}" if "B" in word else word for word in own
        ).split()
        require(words == wanted, f"{shown(' '.join(own))} should become {shown(' '.join(wanted))}, not {shown(words)}.")
    right("Nothing is lost, and not much won so far: the next one gets its gradient sooner, that is all.")


def mine(answer: str) -> None:
    """Two workers, four micro-batches, in halves; less idle than MOST_IDLE with MOST_KEPT."""
    require(isinstance(answer, str), "Replace the three dots by the schedule, a text of two lines.")
    with trying("The schedule"):
        ops = parse(answer)
    require(len(ops) == 2, f"Two workers need two lines; here are {len(ops)}.")
    try:
        validate(ops, stages=2, microbatches=4, most_live=MOST_KEPT)
    except PipelineError as error:
        require(False, f"It was refused: {error}.")
    idle = schedule(ops).simulate().idle
    require(idle < MOST_IDLE, f"It runs, and leaves {idle:.1%} idle. Look at the drawing: which gap could a W fill?")
    right(f"{idle:.1%} idle. A schedule of your own!")
