"""Checks of the exam, here of its last questions: no hints, no solutions; the right answers are with the tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import slow_jobs
import torch
import torch.distributed as dist
from budgets import Level
from one_step import Step
from step_records import World

from checks import hint as hint
from checks import require, returned, right, shown
from checks import solution as solution
from checks.budget import try_level
from checks.exam_parts import Tensor, close, numbers, question, same
from checks.exam_parts import questions as questions
from checks.exam_parts import result as result
from checks.exam_parts import solved as solved
from checks.exam_rpc import accepted as accepted
from checks.exam_rpc import fan_out as fan_out
from checks.exam_rpc import gather_uneven as gather_uneven
from checks.exam_rpc import in_window as in_window
from checks.exam_training import embed as embed
from checks.exam_training import experts as experts
from checks.exam_training import idle as idle
from checks.exam_training import normalize as normalize
from checks.exam_training import recompute as recompute
from checks.exam_training import two_level as two_level
from checks.exam_training import zero1_step as zero1_step
from checks.mysteries import judge_verdict
from checks.on_ranks import Run, run_on_ranks
from rpcbench.base.errors import count_noun

# -- 12
FULLY_SHARDED = Level(World(microbatches=8, zero=3), memory=75, sent=66, time=53)


@question
def sharded_step(answer: Step) -> None:
    """`answer(rank)` is a step of ZeRO-3 with two micro-batches, which sends as much as one with a single one."""
    try_level(FULLY_SHARDED, answer, "Two micro-batches share each gather, and their gradients share each reduction.")


# -- 13 and 14
@question
def suspect1(answer: tuple[str, str]) -> None:
    """`answer`: the worker and the kind of the fault of a mystery."""
    right(judge_verdict(slow_jobs.choose_fault(56), answer))


@question
def suspect2(answer: tuple[str, str]) -> None:
    """`answer`: the same of another one."""
    right(judge_verdict(slow_jobs.choose_fault(19), answer))


# -- 15
HEIGHTS, WIDTH = [3, 1, 4, 2], 2  # rows of each rank, and their length
LATE = 2.0  # seconds by which rank 1 comes late: a row that nobody waited for is not there yet


@question
def smooth(answer: Callable[[Tensor], Tensor]) -> None:
    """`answer(x)` runs on each worker: for each row the mean of it and of the rows beside it, also of other ranks."""
    whole = torch.arange(1.0, sum(HEIGHTS) * WIDTH + 1).square().reshape(-1, WIDTH)
    given = [(part.clone(),) for part in whole.split(HEIGHTS)]
    ran = run_on_ranks(smoothed_here, answer, given)
    places = range(len(whole))
    wanted = torch.stack([whole[max(place - 1, 0) : place + 2].mean(0) for place in places]).split(HEIGHTS)
    round_ring = torch.stack([whole[[place - 1, place, (place + 1) % len(whole)]].mean(0) for place in places])
    for rank, (found, after) in enumerate(ran.values):
        found, told = returned(found), f"Rank {rank}, with {count_noun(HEIGHTS[rank], 'row')}, returns"
        require(isinstance(found, Tensor), f"{told} {shown(found)}; a tensor is wanted.")
        require(same(after, given[rank][0]), f"`x` of rank {rank} has changed.")
        require(found.shape == after.shape, f"{told} a tensor of shape {tuple(found.shape)}, not {tuple(after.shape)}.")
        alone = torch.stack([after[max(place - 1, 0) : place + 2].mean(0) for place in range(len(after))])
        slips = {"No row of another rank is in it.": alone, "The first row and the last are no neighbours.":
                 round_ring.split(HEIGHTS)[rank]}  # fmt: skip
        slip = next((f" {why}" for why, other in slips.items() if close(found, other)), "")
        require(close(found, wanted[rank]), f"{told} {numbers(found)}; {numbers(wanted[rank])} is wanted.{slip}")
    _one_row_to_each_side(ran)
    right("One row to each side: what a rank sends does not grow with what it has.")


def smoothed_here(answer: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, Tensor]:
    """On a worker: what the answer returns, and the rows after it."""
    if dist.get_rank() == 1:
        time.sleep(LATE)
    return answer(x), x


def _one_row_to_each_side(ran: Run) -> None:
    for rank, calls in enumerate(ran.calls):
        told = f"Right; but in the trace rank {rank}"
        others = sorted({call.op for call in calls} - {"send"})
        require(not others, f"{told} calls {', '.join(others)}; messages to the ranks beside it are enough.")
        sizes = [call.size for call in calls]
        sides = sum(0 <= beside < len(HEIGHTS) for beside in (rank - 1, rank + 1))
        require(len(sizes) <= sides, f"{told} sends {count_noun(len(sizes), 'message')}; {sides} are enough.")
        require(sum(sizes) <= 4 * WIDTH * sides, f"{told} sends {sum(sizes)} bytes; a row to each side has "
                f"{4 * WIDTH * sides}.")  # fmt: skip
