"""Checks of lesson 24."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from checks import require, returned, right, shown, trying
from rpcbench.pipeline.schedules import gpipe, one_f_one_b
from rpcbench.pipeline.simulate import simulate


def idle_share(answer: Callable[[int, int], float]) -> None:
    """`answer(workers, microbatches)` is what the schedules show when they are played through."""
    for workers, microbatches in ((1, 4), (2, 1), (2, 8), (4, 8), (8, 3)):
        with trying():
            share = returned(answer(workers, microbatches))
        wanted = simulate(one_f_one_b(workers, microbatches)).idle
        names = f"{workers} workers and {microbatches} micro-batches"
        require(
            isinstance(share, float | int) and abs(share - wanted) < 1e-9,
            f"With {names} the workers are idle for {wanted:.4f} of the time; you say {shown(share)}.",
        )
    right("It holds for every number of workers and micro-batches.")


def enough(answer: Callable[[int, float], int]) -> None:
    """`answer(workers, share)` is the smallest number of micro-batches for it."""
    for workers, share in ((4, 0.1), (2, 0.5), (2, 0.2), (8, 0.05), (1, 0.1), (4, 0.3)):
        with trying():
            number: Any = returned(answer(workers, share))
        require(isinstance(number, int), f"A whole number is wanted, not {shown(number)}.")
        require(number >= 1, f"{number} micro-batches are none; there has to be one at least.")
        asked = f"for {workers} workers, and {share:.0%} at most"
        idle = simulate(gpipe(workers, number)).idle
        require(idle <= share + 1e-9, f"You say {number} {asked}; but then {idle:.2%} is idle.")
        fewer = simulate(gpipe(workers, number - 1)).idle if number > 1 else 1.0
        require(fewer > share + 1e-9, f"You say {number} {asked}; but {number - 1} would do.")
    right("Not one too many.")


def most_kept(answer: Callable[[Sequence[str]], int]) -> None:
    """`answer(ops)` is the most that a worker keeps at once."""
    known = ["0F0", "0B0", "0F1", "0F2", "0B1", "0F3", "0B2", "0B3"]
    with trying():
        number = returned(answer(known))
    require(number == 2, f"{' '.join(known)} keeps 2 at most; you say {shown(number)}.")
    for schedule in (gpipe, one_f_one_b):
        ops = schedule(4, 8)
        for own, most in zip(ops, simulate(ops).peak_live, strict=True):
            with trying():
                number = returned(answer(list(map(str, own))))
            require(number == most, f"{' '.join(map(str, own))} keeps {most} at most; you say {shown(number)}.")
    right("GPipe keeps all eight; of 1F1B the four workers keep 4, 3, 2 and 1.")
