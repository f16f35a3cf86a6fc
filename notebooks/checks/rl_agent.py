"""Checks of lesson 16."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import rpcbench
import rpcbench.rpc as rpc
from checks import NotYet, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.interleaving import TOGETHER, Call, interleaved
from rpcbench.runtime.server import ASYNC_MARK

STATES = torch.eye(30)
PATIENCE = 3.0


@exercise(
    "The last step's return is its reward. What is the return of the step before it?",
    "Go from the last step to the first, with `later = 0.0`; mind the order of the list at the end.",
)
def returns(answer: Callable[[Sequence[float], float], Sequence[float]]) -> None:
    """`answer(rewards, gamma)` is the discounted return of each step."""
    for rewards, gamma, wanted in [
        ([0.0, 0.0, 1.0], 0.5, [0.25, 0.5, 1.0]),
        ([1.0, 2.0, 3.0], 1.0, [6.0, 5.0, 3.0]),
        ([1.0, 2.0, 4.0], 0.5, [3.0, 4.0, 4.0]),
        ([5.0], 0.9, [5.0]),
        ([1.0, 0.0, 0.0, 2.0], 0.0, [1.0, 0.0, 0.0, 2.0]),
        ([], 0.9, []),
        ([0, 0, 1], 0.5, [0.25, 0.5, 1.0]),
        ([-1.0, 2.0, 0.0, -4.0], 0.5, [-0.5, 1.0, -2.0, -4.0]),
    ]:
        asked = list(rewards)
        with trying():
            found = returned(answer(asked, gamma))
        require(asked == rewards, "It changes the list of rewards that it was given.")
        found = read(found, [float], "The answer should be a list of numbers")
        require(len(found) == len(rewards), f"{len(rewards)} rewards should give as many returns, not {len(found)}.")
        require(
            all(math.isclose(a, b) for a, b in zip(found, wanted, strict=True)),
            f"For rewards {rewards} and gamma={gamma} the returns are {wanted}; yours gave {shown(found)}.",
        )
    right("Each step is judged by what came after it.")


@exercise(
    "All observers but the last one get their move in the last one's call. What must be kept of each until then?",
    "Keep `self.waiting[observer] = state, future` for a new `rpc.Future()`, with the lock. When there are "
    "`self.size` of them, take all of them out, choose, and set the result of each future.",
)
def batched(kind: type[Any], play_round: Callable[[Any, int], dict[str, Any]]) -> None:
    """`kind` is an agent that answers all observers with one call of `choose`."""
    marked = getattr(kind.act, ASYNC_MARK, None) is not None
    require(marked, "`act` should be marked with `async_execution`, so that no thread waits.")
    _alone(kind)
    _again(kind)
    names = rpcbench.cluster().workers
    agent = _counting(kind)(names)
    with trying("A round"):
        rewards = play_round(rpc.RRef(agent), 4)
    steps = sum(len(game) for game in rewards[names[0]])
    sizes = agent.sizes
    require(sizes == [len(names)] * steps, f"{steps} steps should take {steps} calls of choose, not {len(sizes)}.")
    right(f"{steps} passes through the policy instead of {steps * len(names)}.")


def _alone(kind: type[Any]) -> None:
    """Three observers that are not there ask by turns, in another order each time; their moves are given."""
    agent = _counting(kind)(["a", "b", "c"])
    agent.choose = agent.given
    for step, order in enumerate(("abc", "cab", "bca")):
        futures = {}
        for place, name in enumerate(order):
            future = returned(_called(agent, name, STATES[3 * step + "abc".index(name)]), agent.act)
            require(isinstance(future, torch.futures.Future), f"act should return a Future, not {shown(future)}.")
            futures[name] = future
            if place < 2:
                require(not any(f.done() for f in futures.values()), "It answers before all observers have asked.")
        _look(step, agent, [futures[name] for name in "abc"])


def _again(kind: type[Any]) -> None:
    """One observer asks for its next move as soon as it has the first, while the last call of the step still runs."""
    agent: Any = None
    futures: dict[str, Any] = {}

    def calls() -> tuple[Call, Call]:
        nonlocal agent
        agent = _counting(kind)(["a", "b", "c"])
        agent.choose = agent.given
        futures.clear()
        futures.update({name: _called(agent, name, STATES["abc".index(name)]) for name in "ab"})
        return lambda: futures.update(c=agent.act("c", STATES[2])), second

    def second() -> None:
        futures["a"].wait()
        futures["a again"] = agent.act("a", STATES[3])

    for _ in interleaved(kind, calls):
        first = [futures[name] for name in "abc"]
        later = [futures["a again"], *(_called(agent, name, STATES[4 + place]) for place, name in enumerate("bc"))]
        case = f"{TOGETHER}: a asked for its next move while the call of c, the last one of the step before, still ran"
        require(all(future.done() for future in [*first, *later]), f"{case}. One of them has no answer now.")
        moves = [future.wait() for future in [*first, *later]]
        require(moves == [*range(6)] and agent.sizes == [3, 3], f"{case}. There should be two batches of 3, with the "
                f"moves {[*range(6)]}; there were batches of {agent.sizes}, with the moves {moves}.")  # fmt: skip


def _called(agent: Any, name: str, state: Tensor) -> Any:
    """What `act` returns, on a thread of its own as in a real call: a thread that waits is told of."""
    found: list[Any] = []

    def call() -> None:
        try:
            with trying("act"):
                found.append(agent.act(name, state))
        except NotYet as told:
            found.append(told)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    require(found, "A call of act does not return: its thread waits. Return a future instead.")
    if isinstance(found[0], NotYet):
        raise found[0]
    return found[0]


def _look(step: int, agent: Any, futures: Sequence[Any]) -> None:
    if not all(future.done() for future in futures):
        raise NotYet(f"In step {step + 1} all three observers have asked, and one of them still has no answer.")
    require(agent.sizes == [3] * (step + 1), f"choose got batches of {agent.sizes} states; each should have 3.")
    moves = [future.wait() for future in futures]
    require(moves == [3 * step, 3 * step + 1, 3 * step + 2], "An observer got the move that was meant for another one.")
    for name, state in agent.pairs:
        require("abc"[state % 3] == name, f"In a call of choose the name {name} stands with the state of "
                f"{'abc'[state % 3]}: names and states are in different orders.")  # fmt: skip


def _counting(kind: type[Any]) -> type[Any]:
    class Counting(kind):  # type: ignore[misc, valid-type]
        """Counts batches, and looks that `waiting` is used with the lock. As moves, `given` gives numbers by which
        states can be told apart."""

        def __init__(self, observers: Sequence[str]) -> None:
            self._kept: Any = None
            self._ready = False
            super().__init__(observers)
            self.sizes: list[int] = []
            self.pairs: list[tuple[str, int]] = []  # of `given`: a name, and the number of its state
            self._ready = True

        @property
        def waiting(self) -> Any:
            self._locked()
            return self._kept

        @waiting.setter
        def waiting(self, kept: Any) -> None:
            self._locked()
            self._kept = kept

        def _locked(self) -> None:
            require(not self._ready or self.lock.locked(), "`self.waiting` is used without the lock.")

        def choose(self, observers: Sequence[str], states: Tensor) -> list[int]:
            self.sizes.append(len(observers))
            return super().choose(observers, states)  # type: ignore[no-any-return]

        def given(self, observers: Sequence[str], states: Tensor) -> list[int]:
            self.sizes.append(len(observers))
            moves: list[int] = states.argmax(1).tolist()
            self.pairs += zip(observers, moves, strict=True)
            return moves

    return Counting


@exercise(
    "A ratio of probabilities is `exp` of a difference of their logarithms. Which of the two lies on top?",
    "Three lines do: the weight, detached and clamped; the worth less its mean; the mean of the product.",
)
def lagged_loss(answer: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> None:
    """`answer(now, then, worth, most)` is the loss of REINFORCE with clipped importance weights."""
    made = torch.Generator().manual_seed(16)
    for size, most, same in ((4, 10.0, True), (5, 10.0, False), (6, 1.0, False), (3, 1.2, False)):
        now = (torch.rand(size, generator=made, dtype=torch.double) * 0.8 + 0.1).log().requires_grad_()
        then = (torch.rand(size, generator=made, dtype=torch.double) * 0.8 + 0.1).log()
        then = now.detach().clone() if same else then
        worth = torch.randint(0, 2, (size,), generator=made).double() + torch.arange(size)
        given = [each.detach().clone() for each in (now, then, worth)]
        with trying():
            loss = returned(answer(now, then, worth, most))
        kept = all(torch.equal(a, b.detach()) for a, b in zip(given, (now, then, worth), strict=True))
        require(kept, "It changes a tensor that it was given.")
        require(isinstance(loss, Tensor) and loss.numel() == 1, f"A tensor of one number is wanted, not {shown(loss)}.")
        weight = (now - then).exp().detach().clamp(max=most)
        above = worth - worth.mean()
        wanted = -(weight * now * above).mean()
        case = "Where the copy is as new as the policy" if same else f"With weights of at most {most:g}"
        _compare(case, loss, wanted.item(), -(weight * above) / size, now)
    right("The same correction keeps IMPALA's actors useful while they lag behind.")


def _compare(case: str, loss: Tensor, wanted: float, gradient: Tensor, now: Tensor) -> None:
    factor = loss.item() / wanted
    whole = abs(factor - round(factor)) <= 1e-6
    times = "" if not 1.5 < factor < 100 or not whole else f", {round(factor)} times as much"
    times = ", with the other sign" if abs(factor + 1) < 1e-9 else times
    right_value = abs(factor - 1) < 1e-6  # `most` may have been a float32
    require(right_value, f"{case}, the loss should be {wanted:.4f}, and yours is {loss.item():.4f}{times}.")
    require(loss.requires_grad, f"{case}, the loss is right, but no graph leads back to `now`.")
    (found,) = torch.autograd.grad(loss, now)
    require(torch.allclose(found, gradient), f"{case}, the loss is right, but its gradient is not: a gradient goes "
            "through the weights.")  # fmt: skip
