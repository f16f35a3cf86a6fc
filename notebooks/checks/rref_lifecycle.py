"""Checks of lesson 10."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from by_hand import Careless, World, every_order, ruled
from tables import settled

import rpcbench.rpc as rpc
from checks import EMPTY, NotYet, dots_left, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

history: list[Any] = []
Message = tuple[str, str]


@exercise(
    "`loss` is an RRef. What you append should hold neither the reference nor a function that uses it.",
    "`loss.to_here()` fetches a copy of the tensor, and a tensor with one number has a method that returns it.",
)
def entry(answer: Callable[[Any], Any]) -> None:
    """`answer(loss)` is what worker2 should keep of the RRef of a loss."""
    for given in (0.25, 0.0, -3.5, [0.1328125], [[-7.0]]):
        _entry(answer, given)
    right("The number stays, and the tensor can be freed.")


def _entry(answer: Callable[[Any], Any], given: Any) -> None:
    number = torch.tensor(given).item()
    loss = rpc.remote("worker1", torch.tensor, (given,))
    local_id = str(loss).partition("local_id=")[2].partition(")")[0]
    try:
        with trying("On worker2 it"):
            kind = returned(rpc.rpc_sync("worker2", note, (answer, loss)))
        loss.release()
        kept = [leak for leak in settled() if str(leak.rref) == f"0.{local_id}"]
        require(not kept, "The list on worker2 still holds the reference, so worker1 has to keep the tensor.")
        require(kind != "Tensor", "That is a tensor. It leaks nothing, but a plain number is enough.")
        with trying("To fetch what stands in the list"):
            value = rpc.rpc_sync("worker2", last)
    finally:  # the check itself leaves no reference behind
        loss.release()
        rpc.rpc_sync("worker2", forget)
    require(isinstance(value, float) and value == number,
            f"The loss was {given}; in the list stands {shown(value)}, of type {kind}.")  # fmt: skip


@exercise(
    "Two messages are in flight. What does the owner know when the one arrives first, and when the other does?",
    'The owner frees the value when its list is empty. Which of the two messages empties it? `return ["...", ...]`.',
)
def bad_order(answer: Callable[[], Sequence[str]]) -> None:
    """Delivering messages in this order makes the careless owner free a value that is needed."""
    with trying("The function"):
        order = returned(answer())
    order = read(order, [str], "The answer should be a list of kinds of messages")
    world = World(Careless)
    world.deliver("Create").deliver("ForkAccept").share().drop("notebook")
    for step, kind in enumerate(order, 1):
        try:
            world.deliver(kind)
        except ValueError as error:
            raise NotYet(f"Step {step}: {error}.") from None
        if world.wrong:
            break
    require(world.wrong, f"Nothing goes wrong in this order. In the end {world.state()}")
    right(f"{world.wrong[0].upper()}{world.wrong[1:]}.")


@exercise(
    "Each of the three facts forbids something. Look at the history below: which member needed the value there, or "
    "which user stays in the list of the owner although it is gone?",
    "The rule is one line, `return ... and ... and ...`: object gone, known to the owner, no child to wait for.",
)
def may_delete(answer: Callable[[bool, bool, int], object]) -> None:
    """`answer(released, confirmed, children)` says when a user may send its `UserDelete`."""
    with trying("The function"):
        returned(answer(True, True, 0))
        trial = every_order(ruled(answer))
    require(not trial.wrong, f"The search went through {trial.states} states, and found one where {trial.wrong}.")
    for children in (1, 2, 5):
        with trying("The function"):
            many = answer(True, True, children)
        require(not many, f"With {children} children that the owner may not know yet it says {shown(many)}.")
    for released, confirmed, children in itertools.product((False, True), (False, True), (0, 1, 2, 5)):
        with trying("The function"):
            said = answer(released, confirmed, children)
        wanted = released and confirmed and not children
        require(bool(said) == wanted, f"For released = {released}, confirmed = {confirmed}, children = {children} it "
                f"says {shown(said)}; a user {'may' if wanted else 'must not'} send its UserDelete then.")  # fmt: skip
    right(f"All {trial.states} states that can be reached are fine: never too early, and nothing stays for ever.")


@exercise(
    "A number cannot tell a second arrival from a new user. What has to be remembered of a fork that is gone?",
    "Begin with two empty sets: forks that were ever requested, and forks that were deleted. The value is needed while "
    "the first has a fork that the second has not.",
)
def freed_after(answer: Callable[[list[Message]], int | None]) -> None:
    """`answer(messages)` is the number of messages after which the owner frees the value."""
    for text, wanted, why in (
        ("+a -a", 2, "The second message removes the only user. (The first one has the number 1.)"),
        ("+a", None, "a is still a user."),
        ("+a +b -a -b", 4, "After three messages b is still a user."),
        ("+a +b -b", None, "a is still a user."),
        ("+a +b +b -a -b", 5, "The request of b arrives twice, and b is one user."),
        ("+a +b -a -a", None, "The delete of a arrives twice, and b is still a user."),
        ("+a +b -b +b -a", 5, "The request of b arrives again after its delete, and b is gone for good."),
        ("+a +b +c -b -c +c -b -a", 8, "What arrives again of b and of c changes nothing."),
        ("+a +b +c -b -c +b -a", 7, "The request of b arrives again, and b is gone, though c went later."),
        ("+a -a +a -a", 2, "What arrives after the value was freed changes nothing."),
        ("+a +a -a +a", 3, "What arrives after the value was freed changes nothing."),
        ("+a +b -a +c -b +a", None, "c is still a user."),
    ):
        messages = [("ForkRequest" if each[0] == "+" else "UserDelete", each[1]) for each in text.split()]
        with trying("The function"):
            found = answer(list(messages))
        require(found is not ..., EMPTY)
        told = f"For {text}, with + for ForkRequest and - for UserDelete, it is {wanted}; yours gave {shown(found)}."
        require(found == wanted and not isinstance(found, bool), _empty(answer, f"{told} {why}"))
    right("A second arrival changes nothing, however late it is.")


def _empty(answer: Callable[[list[Message]], object], told: str) -> str:
    """`None` is a possible answer, so the empty function is told by an example that has another one."""
    empty = answer([("ForkRequest", "a"), ("UserDelete", "a")]) is None
    return EMPTY if empty and dots_left() else told


# -- what runs on worker2
def note(answer: Callable[[Any], Any], loss: Any) -> str | None:
    history.append(answer(loss))
    return None if history[-1] in (None, ...) else type(history[-1]).__name__


def last() -> Any:
    return history[-1]


def forget() -> None:
    history.clear()
