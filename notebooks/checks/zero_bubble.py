"""Checks of lesson 25."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from checks import exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from rpcbench.pipeline import PipelineError, schedule, schedules
from rpcbench.pipeline.ops import Kind, parse_ops, validate_ops

MOST_IDLE, MOST_KEPT = 0.08, 3


def _words(found: Any, asked: str) -> list[str]:
    """The answer, if it is a list of texts."""
    require(
        isinstance(found, list) and all(isinstance(word, str) for word in found),
        f"A list of texts is wanted; {asked} you return {shown(found)}.",
    )
    words: list[str] = found
    return words


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
        words = _words(found, f"for {shown(own)}")
        wanted = " ".join(
            f"{word.replace('B', 'I')} {word.replace('B', 'W')}" if "B" in word else word for word in own
        ).split()
        require(words == wanted, f"{shown(' '.join(own))} should become {shown(' '.join(wanted))}, not {shown(words)}.")
    right("The next worker gets its gradient sooner. The gaps are still empty.")


@exercise(
    "The first worker is idle between its second forward and `0I0`. What could it run there, and is it allowed?",
    "Begin with `0F0 0F1 0F2 0I0 0W0`: then two micro-batches are kept, and there is room for the next forward.",
)
def mine(answer: str) -> None:
    """Two workers, four micro-batches, in halves; less idle than MOST_IDLE with MOST_KEPT."""
    require(isinstance(answer, str), "Replace the three dots by the schedule, a text of two lines.")
    with trying("The schedule"):
        ops = parse_ops(answer)
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


@exercise(
    "Draw 1F1B in halves for 3 workers: the last worker has gaps at the end that saved `W`s would fill.",
    "Let worker w run each `W` later by w micro-batches: W0 right after I of micro-batch w; the rest come last.",
)
def zero_bubble(answer: Callable[[int, int, int], Sequence[str]]) -> None:
    """The lists of all workers are a schedule as short as ZB-H1, which keeps no more than `workers` micro-batches."""
    for workers, microbatches in ((2, 4), (3, 6), (4, 9), (3, 3), (1, 2), (2, 12)):
        asked = f"{workers} workers and {microbatches} micro-batches"
        lines = []
        for worker in range(workers):
            with trying(f"For worker {worker} of {asked} it"):
                found = returned(answer(worker, workers, microbatches))
            lines.append(" ".join(_words(found, f"for worker {worker} of {asked}")))
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
