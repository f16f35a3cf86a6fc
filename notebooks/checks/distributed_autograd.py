"""Checks of lesson 11."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rpcbench
from checks import NotYet, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.meetings import read_too_late, watching

Gradients = list["Tensor | None"]
CarryBack = Callable[[list[Tensor], list[Tensor], Gradients], Gradients]
Graph = dict[str, list[str]]


@exercise(
    "`torch.autograd.backward` takes a list of tensors and a list of their gradients, and runs them in one pass.",
    "Leave out the pairs whose gradient is None; after one pass over the others, each received tensor has its `.grad`.",
)
def carry_back(answer: CarryBack) -> None:
    """`answer(received, returned, gradients)` is one local backward pass in the middle of a distributed one."""
    _one_to_two(answer)
    torch.manual_seed(0)
    a, b, lonely = received = [torch.rand(3, dtype=torch.double, requires_grad=True) for _ in range(3)]
    runs: list[Tensor] = []
    trunk = a * b
    trunk.register_hook(runs.append)
    sine, unused, power = computed = [trunk.sin(), lonely * trunk, trunk.exp()]
    gradients = [torch.tensor([1.0, -2.0, 3.0], dtype=torch.double), None, torch.rand(3, dtype=torch.double)]
    wanted = [*torch.autograd.grad([sine, power], [a, b], gradients[::2], retain_graph=True), None]
    runs.clear()
    found = _carried(answer, received, computed, gradients)
    require(len(runs) == 1, f"The part that two of the tensors share ran {len(runs)} times. One pass does it.")
    require(found[2] is None, "One received tensor is used only for what was not needed: its gradient is None.")
    for name, got, right_one in zip(("first", "second"), found, wanted, strict=False):
        require(got is not None and torch.allclose(got, right_one),
                f"The gradient of the {name} tensor should be {shown(right_one)}, and it is {shown(got)}.")  # fmt: skip
    require(unused.grad_fn is not None, "The returned tensors should stay as they are.")
    _own_weight(answer)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    nothing = _carried(answer, [x], [3 * x], [None])
    told = "One tensor came and one was returned, which was not used. So there is no gradient, and the list is [None]"
    require(nothing == [None], f"{told}; yours gave {shown(nothing)}.")
    right("So a worker in the middle does its part.")


def _one_to_two(answer: CarryBack) -> None:
    """One tensor in, two out."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = _carried(answer, [x], [3 * x, x * x], [torch.tensor([1.0, 1.0]), torch.tensor([10.0, 100.0])])
    wanted = torch.tensor([23.0, 403.0])
    told = (
        f"x = [1, 2] came, 3x and x² were returned, with gradients [1, 1] and [10, 100]. That of x is {wanted.tolist()}"
    )
    require(found[0] is not None and torch.equal(found[0], wanted), f"{told}; yours gave {shown(found[0])}.")


def _own_weight(answer: CarryBack) -> None:
    """The worker computes with a weight of its own."""
    x, weight = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0], requires_grad=True)
    found = _carried(answer, [x], [x * weight], [torch.tensor([1.0, 10.0])])
    told = "x = [1, 2] came, and x · weight was returned, with weight = [3, 4] on the worker and the gradient [1, 10]"
    require(found[0] is not None and found[0].tolist() == [3.0, 40.0],
            f"{told}. The gradient of x is [3, 40]; yours gave {shown(found[0])}.")  # fmt: skip
    got = None if weight.grad is None else weight.grad.tolist()
    require(got == [1.0, 20.0], f"{told}. Afterwards `weight.grad` should be [1, 20], and it is {got}.")


def _carried(answer: CarryBack, received: list[Tensor], computed: list[Tensor], gradients: Gradients) -> Gradients:
    try:
        with trying("The function"):
            found = returned(answer(list(received), list(computed), list(gradients)))
    except NotYet as hint:
        raise NotYet(f"{hint}{_why_raised(str(hint), gradients)}") from None
    found = read(found, [object], "The answer should be a list")
    require(len(found) == len(received), f"{len(received)} tensors were received, so the list has {len(received)} "
            f"entries, not {len(found)}.")  # fmt: skip
    return found


def _why_raised(hint: str, gradients: Gradients) -> str:
    """Return the sentence on the mistake behind an error of torch's; empty if none is known."""
    unused = [gradient is None for gradient in gradients]
    if "second time" in hint:
        return " The returned tensors share a part of the graph, and it was gone when the second pass came to it."
    if "implicitly created" in hint and any(unused):
        return (" A None in `gradients` belongs to a tensor that was not needed. torch takes None for a gradient of 1, "
                "which only a single number may go without.")  # fmt: skip
    return " Here no gradient came at all, so nothing is left to run." if all(unused) else ""


class _Asked(Graph):
    """`nearest`, which refuses to be asked twice about a message."""

    def __init__(self, nearest: Graph) -> None:
        super().__init__(nearest)
        self.questions: list[str] = []

    def __getitem__(self, message: str) -> list[str]:
        require(message not in self.questions, f"It asked twice about the message {message}.")
        self.questions.append(message)
        return super().__getitem__(message)

    def get(self, message: str, default: Any = None) -> Any:
        return self[message] if message in self else default  # noqa: SIM401

    def items(self) -> Any:
        return [(message, self[message]) for message in self]

    def values(self) -> Any:
        return [self[message] for message in self]


CHAIN: Graph = {"a": ["b"], "b": ["c"], "c": [], "unused": ["c"]}
DIAMOND: Graph = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": ["e"], "e": [], "unused": []}
TWO_ROOTS: Graph = {"a": ["c"], "b": ["c", "d"], "c": [], "d": [], "unused": ["a"]}
SKIP: Graph = {"a": ["b"], "b": ["c"], "c": [], "unused": ["a", "b", "c"]}  # the loss is computed from a and from c


@exercise(
    "This is a search through a graph. What do you have to remember so that no message is asked about twice?",
    "Begin with `known, todo = set(), list(found)`, and take messages from `todo` until it is empty.",
)
def discover(answer: Callable[[list[str], Graph], set[str]]) -> None:
    """`answer(found, nearest)` is all that can be reached."""
    _discovered(answer, ["a"], CHAIN, {"a", "b", "c"})
    _discovered(answer, ["a"], DIAMOND, {"a", "b", "c", "d", "e"})
    _discovered(answer, ["a", "b"], TWO_ROOTS, {"a", "b", "c", "d"})
    _discovered(answer, ["a", "c"], SKIP, {"a", "b", "c"})
    _discovered(answer, ["c", "a"], {"a": ["b", "c"], "b": ["c"], "c": []}, {"a", "b", "c"})
    _discovered(answer, [], {"unused": []}, set())
    right("A call that was not used is never found, and nothing waits for it.")


def _discovered(answer: Any, found: list[str], nearest: Graph, wanted: set[str]) -> None:
    where = f"With found={found} and nearest={nearest}:"
    sends = _tried(answer, found, _Asked(copy.deepcopy(nearest)), where)
    sends = set(read(sends, {str}, "The answer should be a set of names"))
    for name in sorted(sends - wanted):
        raise NotYet(f"{where} no gradient will ever come to {name}.")
    for name in sorted(wanted - sends):
        raise NotYet(f"{where} {name} is missing; the loss depends on it.")


def _tried(answer: Any, found: list[str], nearest: Graph, where: str) -> Any:
    mine, before = list(found), copy.deepcopy(dict(nearest))
    with trying("The function"):
        result = returned(answer(mine, nearest))
    require(mine == found, f"{where} afterwards `found` is {mine}. It should stay as it was.")
    require(dict(nearest) == before, f"{where} afterwards `nearest` is another one: {dict(nearest)}.")
    return result


@exercise(
    "One cut is a call outside of the context, the other a tensor without a history. What ends with the block?",
    "Begin with `with dist_autograd.context() as context_id:`, and keep all of it inside: both calls, `backward`, and "
    "`return gradients(context_id)`.",
)
def step(answer: Callable[[Tensor, Any, Any], Sequence[Tensor]], weights: Sequence[Any]) -> None:
    """`answer(x, weight1, weight2)` is both gradients."""
    for rows in (3, 5):
        x = torch.rand(rows, 4, dtype=torch.double)
        near = [weight.to_here().detach().requires_grad_() for weight in weights]
        wanted = torch.autograd.grad((torch.tanh(x @ near[0]) @ near[1]).square().mean(), near)
        owners = [weight.owner_name() for weight in weights]
        with watching(owners) as watch, rpcbench.trace() as seen, trying("The function"):
            try:
                found = returned(answer(x, *weights))
            except RuntimeError as error:
                late = "The gradients were asked for after the context had ended; they go with it."
                require(not read_too_late(watch, error), late)
                raise
        found = read(found, (object, object), "The answer should be a list of two")
        for name, gradient, right_one in zip(("weight1", "weight2"), found, wanted, strict=True):
            cut = f"{name} is still without a gradient: its part of the graph is cut off."
            require(isinstance(gradient, Tensor), cut)
            same = gradient.shape == right_one.shape and torch.allclose(gradient, right_one)
            require(same, f"The gradient of {name} is not that of the whole loss.")
        require(watch.ended, "There was no context: the gradients are those of another pass.")
        crossed = any(row["kind"] == "Gradients" for row in seen.view["messages"].values())
        require(crossed, "The gradients are right, but none has travelled: the workers had no part in the step.")
        require(watch.at_once, "One owner had answered before the other was asked for its gradient.")
    right("No cut is left.")


@exercise(
    "Begin with the messages that take part, as `discover` finds them. Only these give parts to those "
    "nearest behind them.",
    "Begin with `counts = {message: int(message in found) for message in taking_part}`; then each message that takes "
    "part adds one to each message nearest behind it.",
)
def parts(answer: Callable[[list[str], Graph], dict[str, int]]) -> None:
    """`answer(found, nearest)` is the number of gradients that add up to that of each message."""
    _counted(answer, ["a"], DIAMOND, {"a": 1, "b": 1, "c": 1, "d": 2, "e": 1})
    _counted(answer, ["a"], CHAIN, {"a": 1, "b": 1, "c": 1})
    _counted(answer, ["a", "b"], TWO_ROOTS, {"a": 1, "b": 1, "c": 2, "d": 1})
    _counted(answer, ["a", "c"], SKIP, {"a": 1, "b": 1, "c": 2})
    _counted(answer, ["a", "b"], {"a": ["b", "c"], "b": ["c"], "c": [], "unused": ["c"]}, {"a": 1, "b": 2, "c": 2})
    _counted(answer, [], {"unused": ["other"], "other": []}, {})
    right("A worker that waits for these, and for no more, neither stalls nor goes on too early.")


def _counted(answer: Any, found: list[str], nearest: Graph, wanted: dict[str, int]) -> None:
    where = f"With found={found} and nearest={nearest}:"
    counts = _tried(answer, found, copy.deepcopy(nearest), where)
    require(isinstance(counts, dict), f"The answer should be a dict, not {shown(counts)}.")
    for name in sorted(set(counts) - set(wanted)):
        raise NotYet(f"{where} {name} does not take part, and should not be in the dict.")
    for name, count in wanted.items():
        told = f"{where} the gradient of {name} is the sum of {count}; yours gave {counts.get(name)}."
        require(counts.get(name) == count, told + _slip_of_parts(counts, found, nearest, wanted))


def _slip_of_parts(counts: dict[str, int], found: list[str], nearest: Graph, wanted: dict[str, int]) -> str:
    """Return the sentence on the mistake that leads to these numbers; empty if none is known."""
    reached = {message: _reached(nearest[message], nearest) for message in nearest}
    mistakes = {
        " Yours counts messages that do not take part, too.":
            {m: (m in found) + sum(m in others for others in nearest.values()) for m in wanted},
        " In yours the loss itself gives no part.": {m: sum(m in nearest[other] for other in wanted) for m in wanted},
        " Yours counts the messages nearest behind it; they come after it, and get a part from it.":
            {m: len(nearest[m]) for m in wanted},
        " Yours counts one part for each message.": dict.fromkeys(wanted, 1),
        " Yours counts each way from the loss; a message sends its gradient once, when all its parts are there.":
            {m: sum([_ways(start, m, nearest) for start in found]) for m in wanted},
        " Yours counts messages that have it further behind them, too; only those that meet it first send it a part.":
            {m: (m in found) + sum(m in reached[other] for other in wanted) for m in wanted},
    }  # fmt: skip
    return next((said for said, numbers in mistakes.items() if numbers == counts), "")


def _reached(begin: list[str], nearest: Graph) -> set[str]:
    return set(begin).union(*(_reached(nearest[message], nearest) for message in begin))


def _ways(begin: str, end: str, nearest: Graph) -> int:
    return (begin == end) + sum(_ways(message, end, nearest) for message in nearest[begin])
