"""Checks of lesson 38. The faults are asked of the program, which draws them by a seed; they are not kept here."""

from __future__ import annotations

from typing import Any

import others_job
from others import RANKS

from checks import DOTS, exercise, read, require, right, shown
from checks import hint as hint
from checks import solution as solution

EMPTY = f"Nothing is written down so far. {DOTS}"
FUNCTIONS = {"load": "load_batch", "save": "save_checkpoint", "evaluate": "evaluate"}
LETTERS = {"whiten": "a", "augment": "b"}  # the third one, "c", is never right
HANG, FIRST, SECOND = 45, 43, 36  # seeds of the jobs of the lesson


def _fault(kind: str, seed: int) -> tuple[int, str]:
    """The rank that has the fault, and its fault."""
    faults = [others_job.choose_fault(kind, seed, RANKS, rank) for rank in range(RANKS)]
    return next((rank, fault) for rank, fault in enumerate(faults) if fault)


def _pair(answer: Any, second: str) -> tuple[int, str]:
    """A rank and a word."""
    require(answer is not ..., EMPTY)
    rank, word = read(answer, (object, object), f"The number of a rank and {second} are wanted, in a tuple")
    if isinstance(rank, str) and rank.removeprefix("rank ").isdigit():
        rank = int(rank.removeprefix("rank "))
    rank = read(rank, int, "The number of a rank is wanted")
    require(rank in range(RANKS), f"The ranks are 0 to {RANKS - 1}, not {shown(rank)}.")
    require(isinstance(word, str), f"{second.capitalize()} is a text, not {shown(word)}.")
    return rank, word.removesuffix("()")


@exercise(
    "Three ranks wait in a collective, so they are healthy. Which one has not come to it? `job.explain()` knows.",
    "Below the name of the missing rank stand the lines that it runs, the innermost first. The first line that is no "
    "`sleep` stands in the function.",
)
def hang(answer: tuple[int, str]) -> None:
    """`answer`: the rank that the others wait for, and the innermost function of the program that it is in."""
    rank, function = _pair(answer, "the name of a function")
    late, fault = _fault("hang", HANG)
    if rank != late:
        require(False, f"Rank {rank} waits in a collective itself, as healthy ranks do. Another one is not there.")
    require(
        function != "sleep", f"Rank {rank} sleeps, but `sleep` is Python's. Which function of the program calls it?"
    )
    outer = {"hang", "train", "main"}
    require(function not in outer, f"Rank {rank} is in `{function}`, but that has called another function, and so on.")
    require(function == FUNCTIONS[fault], f"No line of rank {rank} is in `{function}`. Look at its stack.")
    right("The others would wait for half an hour, and then all four would fail, with an error that names no function.")


CAUSES = {
    "a": "its operators take longer than those of the others",
    "b": "its time is lost outside of operators",
    "c": "its collectives take longest",
}


def _straggler(answer: tuple[int, str], seed: int) -> None:
    rank, letter = _pair(answer, "a letter")
    late, fault = _fault("slow", seed)
    require(letter in CAUSES, f"The letters are {', '.join(map(repr, CAUSES))}, not {shown(letter)}.")
    require(
        rank == late,
        f"Rank {rank} spends its time in collectives: it waits there for the one that comes last, which waits least.",
    )
    require(
        letter != "c",
        "No: a collective is long where a rank waits in it. The rank that comes last leaves at once.",
    )
    if letter != LETTERS[fault]:
        with_operators = "Compare its column `compute` with those of the others, and see what `explain` says below."
        without = "Its column `compute` is not larger than those of the others; its time is in another one."
        require(False, f"The rank is right, the cause is not. {with_operators if fault == 'whiten' else without}")


@exercise(
    "Who waits for whom? A rank that comes last to each collective spends the *least* time in communication.",
    "`p.explain()` names the rank. If an operator takes longer there, it stands in the line below.",
)
def straggler(answer: tuple[int, str]) -> None:
    """`answer`: the rank that keeps the others waiting in the first slow job, and a letter of CAUSES."""
    _straggler(answer, FIRST)
    right("It computes what the others do not. So look at that operator's line in the program, not at the network.")


@exercise(
    "As before: first the rank with the least communication, then the column in which its time is.",
    "`idle` is the time in which no operator runs on the rank's threads: Python, or a wait for data.",
)
def second(answer: tuple[int, str]) -> None:
    """`answer`: the same of the second slow job."""
    _straggler(answer, SECOND)
    right("torch sees nothing of Python. A stack of that rank, taken while it runs, would name the line.")
