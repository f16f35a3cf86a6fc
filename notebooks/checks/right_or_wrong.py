"""Checks of lesson 36. Where a value is wrong first is not kept here: each check asks the report of the comparison."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import silent_bugs
import torch
from torch import Tensor, nn

import rpcbench
from checks import DOTS, NotYet, dots_left, exercise, read, require, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from rpcbench.compare.report import CompareReport

EMPTY = f"Nothing is written down so far. {DOTS}"
LETTERS = ("a", "b", "c")
KINDS = ("left out", "too often", "scale", "own part", "apart")


# -- layouts
def make_layers() -> nn.Module:
    torch.manual_seed(1)
    layers = {"enter": nn.Linear(8, 16), "gelu": nn.GELU(), "up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}
    return nn.Sequential(OrderedDict(layers | {"head": nn.Linear(16, 4)}))


def make_cut_layers() -> nn.Module:
    layers = make_layers()
    layers.enter, layers.up = silent_bugs.Columns(layers.enter), silent_bugs.Rows(layers.up)
    return layers


def step_layers(model: nn.Module) -> Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


WORDS = ("Replicate", "Shard(0)", "Shard(1)", "Partial")
WHY = {
    "enter.weight": "its columns are its outputs, and torch keeps a weight as (outputs, inputs)",
    "enter": "each rank has all rows, and of each row the outputs of its own columns",
    "up.weight": "its rows are its inputs, and torch keeps a weight as (outputs, inputs)",
    "up.bias": "it is added after the sum, on each rank",
    "up": "the layer adds its parts up before it returns them",
    "down": "the layer is not cut, and look at what it is given",
}


@exercise(
    "Draw the two layers as lesson 23 does, by columns and then by rows. What has a rank of each, and after the `add`?",
    "Compare with the report above: `enter` is cut now as `up` is there, and `up` as `down` is there.",
)
def layouts(answer: dict[str, str]) -> None:
    """`answer` has the layout of each of the values of WHY."""
    found: Any = answer
    require(found is not ..., EMPTY)
    require(type(found) is dict, f"A dict from six names to words is wanted, not {shown(found)}.")
    require(set(found) == set(WHY), f"The names are {', '.join(WHY)}; you have {shown(sorted(map(str, found)))}.")
    strange = [word for word in found.values() if word not in WORDS]
    require(not strange, f"The words are {', '.join(WORDS)}, not {shown(strange[:1])}.")
    parallel = {"parallel": (make_cut_layers, step_layers), "mesh": {"tp": 2}}
    report = rpcbench.cluster().compare(reference=(make_layers, step_layers), **parallel)
    for name, why in WHY.items():
        have = report.layouts[name].removeprefix("tp ")
        require(found[name] == have, f"{name} is not {found[name]}: {why}.")
    right("The collective is inside the layer, so nobody outside of it sees summands.")


# -- the first wrong value
def require_place(answer: Any, report: CompareReport, third: str) -> None:
    """Require three things, of which the first two are the place of the report's first difference."""
    found: Any = answer
    require(found is not ..., EMPTY)
    found = read(found, (str, str, object), f"A phase, a name and {third} are wanted, in a tuple")
    assert report.first is not None
    phase, name, _ = found
    phases = list(dict.fromkeys(each.key.phase for each in report.verdicts if each.key.phase != "input"))
    require(phase in phases, f"{phase!r} is no phase of this report; it has {', '.join(phases)}.")
    if (phase, name) == (report.first.phase, report.first.name):
        return
    words = [each.word for each in report.verdicts if (each.key.phase, each.key.name) == (phase, name)]
    place = f"`{phase} {name or '(model)'}`"
    require(words, f"The report has no value {place}: {phase!r} goes with other names.")
    require("wrong" in words, f"{place} is not wrong: the report says {words[0]!r}.")
    raise NotYet(f"{place} is wrong, but another value is wrong before it.")


def require_letter(letter: Any, right_one: str, why: dict[str, str]) -> None:
    require(letter in LETTERS, f"The third part is one of the letters a, b and c, not {shown(letter)}.")
    require(letter == right_one, f"The place is right; it is not {letter!r}. {why.get(letter, '')}")


@exercise(
    "The report has the values in the order of execution. Go down from the top to the first ✗.",
    "Which of the three sentences would still be true if another layer had the largest error, or no collective at all?",
)
def in_forward(answer: tuple[str, str, str], report: CompareReport) -> None:
    """`answer` is the first wrong value of `report`, and why to begin there."""
    require_place(answer, report, "a letter")
    why = {
        "a": "Sizes say little: a small error may become a large one further on, in a layer that is right.",
        "c": "In this layer the collective is missing, and other faults have nothing to do with one.",
    }
    require_letter(answer[2], "b", why)
    right("What it is computed from is right, so the fault is here. `head` is wrong because `down` is.")


@exercise(
    "Gradients of outputs come before gradients of parameters. Which line has the first ✗?",
    "Look at the word behind `backward enter`, and at the table of words. Is that already a mistake?",
)
def in_backward(answer: tuple[str, str, str], report: CompareReport) -> None:
    """`answer` is the first wrong value of `report`, and why the gradient before it is right."""
    require_place(answer, report, "a letter")
    why = {
        "b": "Each rank is far off alone; only the sum of the ranks is near.",
        "c": "It is compared as all others are, and has a layout.",
    }
    require_letter(answer[2], "a", why)
    right("A parameter's gradient goes into the optimizer as it is: there summands are wrong.")


@exercise(
    "The outputs of all layers are right. Which value comes next? Its name is empty.",
    "The mean over all 40 rows is (32 · mean of rank 0 + 8 · mean of rank 1) / 40.",
)
def in_loss(answer: tuple[str, str, list[float]], report: CompareReport) -> None:
    """`answer` is the first wrong value of `report`, and the weights of the two means."""
    require_place(answer, report, "a list of two weights")
    weights = answer[2]
    weights = read(weights, (float, float), "A list of two numbers is wanted")
    require(
        abs(sum(weights) - 1) < 1e-9,
        f"If both means were 1, the mean over all rows would be 1, and yours would be {sum(weights):.4g}.",
    )
    require(weights[0] != weights[1], "Equal weights are the mean of means, and rank 1 has fewer rows that count.")
    require(weights[0] > weights[1], "The rank with more rows that count has the larger weight.")
    require(
        abs(weights[0] - 32 / 40) < 1e-9,
        f"With {weights[0]:.4g} and {weights[1]:.4g} a row of rank 0 does not count as much as one of rank 1.",
    )
    right("Or each rank divides its sum by the number of rows that count on all ranks.")


# -- five programs
@functools.cache
def report_on(number: int) -> CompareReport:
    return rpcbench.cluster().compare(**silent_bugs.programs[number])


def check_program(number: int, answer: Any, kind: str, evidence: str, praise: str) -> None:
    require_place(answer, report_on(number), "a kind")
    found = answer[2]
    require(found in KINDS, f"The kinds are {', '.join(map(repr, KINDS))}; {shown(found)} is none.")
    require(found == kind, f"The place is right, and the kind is not {found!r}. {evidence}")
    right(praise)


@exercise(
    "The first line has the phase, then the name, then the cause.",
    "Both ranks have the same wrong value. Take what is added on each of them away: then the value is right.",
)
def program1(answer: tuple[str, str, str]) -> None:
    check_program(
        1, answer, "too often",
        "The ranks agree, so a reduction has run; and what is left over is a bias, not the whole value.",
        "The bias went in before the all-reduce, so it is in the sum once for each rank.",
    )  # fmt: skip


@exercise(
    "The embedding of the words is right, and cut. The next value is not.",
    "Each rank has three words of six. At which position does a rank believe its first word to be?",
)
def program2(answer: tuple[str, str, str]) -> None:
    check_program(
        2, answer, "own part",
        "Both ranks have the values of the first piece, as if the sentence began with what each has.",
        "Each rank numbers its words from 0, as if its three words were the sentence.",
    )  # fmt: skip


@exercise(
    "Forward and backward are right in the whole. Which phase comes after them?",
    "The cause has a factor, and says of what it is the number.",
)
def program3(answer: tuple[str, str, str]) -> None:
    check_program(
        3, answer, "scale",
        "All gradients are twice what they should be, the ranks agree, and no summand is in them twice.",
        "The sum of two means is twice the mean. A learning rate tuned to that hides it, for this number of ranks.",
    )  # fmt: skip


@exercise(
    "All parameters are wrong in one phase, and nothing is wrong before it.",
    "Each rank's factor is its own. From which gradients does it know the norm?",
)
def program4(answer: tuple[str, str, str]) -> None:
    check_program(
        4, answer, "own part",
        "The factors of the ranks are no whole numbers, and no gradient lacks a summand. Whose norm do the ranks take?",
        "Each rank clips by the norm of the gradients that it has, as if they were all.",
    )  # fmt: skip


@exercise(
    "All gradients are right. What happens to parameters after that?",
    "Before this step the two ranks have the same parameters, and afterwards they do not.",
)
def program5(answer: tuple[str, str, str]) -> None:
    check_program(
        5, answer, "apart",
        "One rank has what one process has, and the other one does not, from gradients that are the same.",
        "The ranks step at rates of their own. From the next step on they train two models.",
    )  # fmt: skip


# -- mend one
Clip = Callable[[list[Tensor], list[Tensor], float, Callable[[Tensor], object]], None]


NORMS = "Norms are added up. The norm of a whole is less than the sum of the norms of its parts: only squares add up."
SLIPS = {  # by what a rank gives to `all_reduce` that has the norm 3 in `cut`, and 4 in `whole`
    3.0: NORMS,
    5.0: NORMS,
    25.0: "What each rank has whole is in the sum once for each rank.",
}


def _find_slip(answer: Clip) -> str:
    given: list[float] = []
    with contextlib.suppress(Exception):  # the comparison has told of it
        answer([torch.tensor([3.0])], [torch.tensor([4.0])], 0.1, lambda tensor: given.append(tensor.sum().item()))
    return next((f" {words}" for sent, words in SLIPS.items() if any(abs(each - sent) < 1e-3 for each in given)), "")


@exercise(
    "The norm of all gradients is the root of a sum of squares. Which of these squares has a rank not seen, and which "
    "have all ranks seen?",
    "`square` is the sum over `cut` alone; `all_reduce(square)`; then add the squares of `whole`, which count once.",
)
def mend(answer: Clip) -> None:
    """`answer(cut, whole, limit, all_reduce)` clips the gradients of program 4 as one process does."""
    given = [torch.ones(2), torch.ones(2)]
    with trying():
        answer(given[:1], given[1:], 0.1, lambda tensor: None)
    require(not torch.equal(given[0], torch.ones(2)), f"The gradients are as they were.{dots_left()}")
    for limit in (silent_bugs.LIMIT, 1000.0):
        with trying():
            report = rpcbench.cluster().compare(**silent_bugs.clipped_by(answer, limit))
        told = f"With a limit of {limit:g}, the program is wrong, first at {report.first}"
        require(report.ok, f"{told}{'' if report.ok else _find_slip(answer)}")
    right("Now the report of program 4 has no ✗.")
