"""Checks of lesson 16."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import rpcbench
import rpcbench.rpc as rpc
from checks import NotYet, require, returned, right, shown

STATES = torch.eye(30)


def returns(answer: Callable[[Sequence[float], float], Sequence[float]]) -> None:
    """`answer(rewards, gamma)` is the discounted return of each step."""
    for rewards, gamma, wanted in [
        ([0.0, 0.0, 1.0], 0.5, [0.25, 0.5, 1.0]),
        ([1.0, 2.0, 3.0], 1.0, [6.0, 5.0, 3.0]),
        ([1.0, 2.0, 4.0], 0.5, [3.0, 4.0, 4.0]),
        ([5.0], 0.9, [5.0]),
        ([], 0.9, []),
    ]:
        asked = list(rewards)
        found = returned(answer(asked, gamma))
        require(asked == rewards, "It changes the list of rewards that it was given.")
        require(len(found) == len(rewards), f"{len(rewards)} rewards should give as many returns, not {len(found)}.")
        require(
            all(math.isclose(a, b) for a, b in zip(found, wanted, strict=True)),
            f"For rewards {rewards} and gamma={gamma} the returns are {wanted}; yours gave {shown(found)}.",
        )
    right("Each step is judged by what came after it.")


def batched(kind: type[Any], play_round: Callable[[Any, int], dict[str, Any]]) -> None:
    """`kind` is an agent that answers all observers with one call of `choose`."""
    _alone(kind)
    names = rpcbench.cluster().workers
    agent = _counting(kind)(names)
    rewards = play_round(rpc.RRef(agent), 4)
    steps = sum(len(game) for game in rewards[names[0]])
    sizes = agent.sizes
    require(sizes == [len(names)] * steps, f"{steps} steps should take {steps} calls of choose, not {len(sizes)}.")
    right(f"{steps} passes through the policy instead of {steps * len(names)}.")


def _alone(kind: type[Any]) -> None:
    """Three observers that are not there ask by turns; their moves are given."""
    agent = _counting(kind)(["a", "b", "c"])
    agent.choose = agent.given
    for step in range(3):
        futures = []
        for number, name in enumerate("abc"):
            future = returned(agent.act(name, STATES[3 * step + number]))
            require(isinstance(future, torch.futures.Future), f"act should return a Future, not {shown(future)}.")
            futures.append(future)
            if number < 2:
                require(not any(f.done() for f in futures), "It answers before all observers have asked.")
        _look(step, agent, futures)


def _look(step: int, agent: Any, futures: Sequence[Any]) -> None:
    if not all(future.done() for future in futures):
        raise NotYet(f"In step {step + 1} all three observers have asked, and one of them still has no answer.")
    require(agent.sizes == [3] * (step + 1), f"choose got batches of {agent.sizes} states; each should have 3.")
    moves = [future.wait() for future in futures]
    require(moves == [3 * step, 3 * step + 1, 3 * step + 2], "Somebody got the move that was meant for another one.")


def _counting(kind: type[Any]) -> type[Any]:
    class Counting(kind):  # type: ignore[misc, valid-type]
        """Counts batches. As moves, `given` gives numbers by which states can be told apart."""

        def __init__(self, observers: Sequence[str]) -> None:
            super().__init__(observers)
            self.sizes: list[int] = []

        def choose(self, observers: Sequence[str], states: torch.Tensor) -> list[int]:
            self.sizes.append(len(observers))
            return super().choose(observers, states)  # type: ignore[no-any-return]

        def given(self, observers: Sequence[str], states: torch.Tensor) -> list[int]:
            self.sizes.append(len(observers))
            return states.argmax(1).tolist()

    return Counting
