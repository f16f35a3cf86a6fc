"""Checks of lesson 10."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from by_hand import World, every_order, ruled
from tables import settled

import rpcbench.rpc as rpc
from checks import NotYet, require, returned, right, shown
from rpcbench.protocol.rrefs import RRefs

history: list[Any] = []


def entry(answer: Callable[[Any], Any]) -> None:
    """`answer(loss)` is what worker2 should keep of the RRef of a loss."""
    loss = rpc.remote("worker1", torch.tensor, (0.25,))
    number = str(loss).partition("local_id=")[2].partition(")")[0]
    returned(rpc.rpc_sync("worker2", note, (answer, loss)))
    del loss
    kept = [leak for leak in settled() if str(leak.rref) == f"0.{number}"]
    require(not kept, "The list on worker2 still holds the reference, so worker1 has to keep the tensor.")
    value = rpc.rpc_sync("worker2", last)
    require(not isinstance(value, torch.Tensor), "That is a tensor. It is safe, but a plain number is all one needs.")
    require(value == 0.25, f"The loss was 0.25; in the list stands {shown(value)}.")
    right("The number stays, the tensor may go.")


def bad_order(answer: Sequence[str], careless: Callable[[int, int], RRefs]) -> None:
    """Delivering messages in this order makes the careless owner free a value that is needed."""
    require(list(answer) != [...], "The list is empty so far. Replace the three dots.")
    world = World(careless)
    world.deliver("Create").deliver("ForkAccept").share().drop("notebook")
    require(any(letter.kind == "UserDelete" for letter in world.letters), "Careless is not careless any more.")
    for step, kind in enumerate(answer, 1):
        try:
            world.deliver(kind)
        except ValueError as error:
            raise NotYet(f"Step {step}: {error}.") from None
    require(world.wrong, f"Nothing goes wrong in this order. In the end {world.state()}")
    right(f"{world.wrong[0].upper()}{world.wrong[1:]}.")


def may_say_goodbye(answer: Callable[[bool, bool, int], object]) -> None:
    """`answer(released, confirmed, children)` says when a user may tell the owner that it is gone."""
    returned(answer(False, False, 0))
    trial = every_order(ruled(answer))
    require(not trial.wrong, f"In {trial.states} states one was found where {trial.wrong}.")
    right(f"All {trial.states} states that can be reached are fine: never too early, and nothing stays for ever.")


# -- what runs on worker2
def note(answer: Callable[[Any], Any], loss: Any) -> str | None:
    history.append(answer(loss))
    return None if history[-1] in (None, ...) else type(history[-1]).__name__


def last() -> Any:
    return history[-1]
