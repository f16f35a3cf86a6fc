"""Checks of lesson 24."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from checks import exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
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
        require(
            isinstance(share, float | int) and abs(share - wanted) < 1e-9,
            f"With {count_noun(workers, 'worker')} and {count_noun(microbatches, 'micro-batch')} the ratio is "
            f"{ratio:g}, and {wanted:.4f} of the step is idle; you say {shown(share)}.",
        )
    right("25 % of the ideal time is 20 % of the step. Both numbers tell of the same bubble.")


@exercise(
    "The share falls with each micro-batch more. Begin with one, and go on for as long as the share is too large.",
    "Begin with `microbatches = 1` and `while (workers - 1) / (microbatches + workers - 1) > share + 1e-9:`.",
)
def enough(answer: Callable[[int, float], int]) -> None:
    """`answer(workers, share)` is the smallest number of micro-batches for it."""
    for workers, share in ((4, 0.1), (2, 0.5), (2, 0.2), (8, 0.05), (1, 0.1), (4, 0.3), (6, 0.07), (2, 0.002)):
        with trying():
            number: Any = returned(answer(workers, share))
        require(isinstance(number, int), f"A whole number is wanted, not {shown(number)}.")
        require(number >= 1, f"{number} micro-batches are none; there has to be one at least.")
        asked = f"for {count_noun(workers, 'worker')} and {100 * share:g}% at most"
        require(number < MANY, f"You say {number} {asked}; but far fewer would do.")
        idle = simulate(gpipe(workers, number)).idle
        require(idle <= share + 1e-9, f"You say {number} {asked}; but then {idle:.2%} is idle.")
        fewer = simulate(gpipe(workers, number - 1)).idle if number > 1 else 1.0
        require(fewer > share + 1e-9, f"You say {number} {asked}; but {number - 1} would do.")
    right("Not one too many.")


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
        require(number == most, f"{' '.join(words)} keeps {most} at most; you say {shown(number)}.")
    right("GPipe keeps all twelve; of 1F1B the four workers keep 4, 3, 2 and 1.")


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
            require(
                isinstance(words, list) and all(isinstance(word, str) for word in words),
                f"A list of texts is wanted, as ['0F0', '0B0']; for {asked} you return {shown(words)}.",
            )
            wanted = list(map(str, own))
            require(
                words == wanted,
                f"For {asked} the list is {' '.join(wanted)}; yours is {' '.join(words) or 'empty'}.",
            )
    right(
        "rpcbench and torch write the same lists. `schedule` takes yours, too, as a text with a line for each worker."
    )
