"""One owner's share of a distributed optimizer: a torch optimizer over the parameters of this process.

It steps with the gradients of an autograd context; `.grad` is used only inside a step and is None after it. Steps of
one process are serialised, as in torch, so two trainers never mix their gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from rpcbench.autograd import recorder
from rpcbench.optim import optimizer_files
from rpcbench.optim.optimizer_files import State
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent


class _StepLock:
    """The lock of all steps of one agent: optimizers may share parameters."""

    def __init__(self, agent: Agent) -> None:
        self.lock = threading.Lock()


def _between_steps() -> threading.Lock:
    return current.current_agent().part(_StepLock).lock


class LocalOptimizer:
    """A torch optimizer over `params`, tensors or torch's group dicts, some of which may be empty here.

    Args:
        optimizer_class: a class of torch.optim.
        params: as its constructor takes.
        args: further arguments of the constructor.
        numbers: the number of each parameter in the whole distributed optimizer, in order; by default 0, 1, 2, …
        kwargs: keyword arguments of the constructor.

    Raises:
        ValueError: for an optimizer that cannot step from gradients alone.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Sequence[Any],
        *args: Any,
        numbers: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        check_steps_from_gradients(optimizer_class)
        self.optimizer = optimizer_class(params, *args, **kwargs)
        self.params: list[torch.Tensor] = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.numbers = list(range(len(self.params)) if numbers is None else numbers)
        self.schedulers: list[Any] = []  # of learning rates

    def step(self, context_id: int) -> None:
        """Step once; parameters without a gradient in the context stay. Hooks of the torch optimizer run inside the
        context. RuntimeError for an unknown context."""
        gradients = recorder().named_gradients(context_id)
        with recorder().enter_context(context_id), _between_steps():  # for `.grad`, which all optimizers share
            try:
                for param in self.params:
                    param.grad = gradients.get(param)
                self.optimizer.step()
            finally:  # a step that fails leaves no gradient behind
                for param in self.params:
                    param.grad = None

    # -- learning rates
    @property
    def scheduler(self) -> Any:
        """The first scheduler; None if there is none."""
        return self.schedulers[0] if self.schedulers else None

    def schedule(self, scheduler_class: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Let a torch scheduler set the learning rates from now on. Returns its number, for the other methods."""
        with _between_steps():  # a scheduler sets the first rates when it is made
            self.schedulers.append(scheduler_class(self.optimizer, *args, **kwargs))
            return len(self.schedulers) - 1

    def advance(self, args: tuple[Any, ...], number: int = 0) -> list[float]:
        """Advance a scheduler. Returns the new learning rate of each group."""
        with _between_steps():
            self.schedulers[number].step(*args)
        return self.rates()

    def schedule_state(self, number: int = 0) -> dict[str, Any]:
        with _between_steps():
            return dict(self.schedulers[number].state_dict())

    def load_schedule(self, state: dict[str, Any], number: int = 0) -> None:
        """Load the state of a scheduler of the same class."""
        with _between_steps():
            self.schedulers[number].load_state_dict(state)

    def rates(self) -> list[float]:
        """Return the learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    # -- state
    def state(self) -> State:
        """Return this share's state, by the numbers of the whole optimizer."""
        with _between_steps():
            found = self.optimizer.state_dict()  # numbers from 0 in this share
        groups = [{**group, "params": [self.numbers[n] for n in group["params"]]} for group in found["param_groups"]]
        return {"state": {self.numbers[n]: kept for n, kept in found["state"].items()}, "param_groups": groups}

    def load(self, state: State) -> None:
        """Load this share's part of the state of a whole optimizer, or of several shares of one."""
        local = {number: place for place, number in enumerate(self.numbers)}  # number → place in this share
        groups = [
            {**group, "params": [local[n] for n in group["params"] if n in local]} for group in state["param_groups"]
        ]
        kept = {local[number]: value for number, value in state["state"].items() if number in local}
        with _between_steps():
            self.optimizer.load_state_dict({"state": kept, "param_groups": groups})

    # -- files
    def write(self, directory: str) -> tuple[str, list[int]]:
        """Write a draft of this share. Returns the name of its file, and the numbers in it."""
        return optimizer_files.write_draft(self.state(), directory), self.numbers

    def adopt(self, directory: str) -> None:
        optimizer_files.adopt_draft(directory)

    def restore(self, directory: str, files: dict[str, list[int]]) -> None:
        """Load this share from files of any owners."""
        self.load(merge_states(optimizer_files.read_shares(directory, files, self.numbers)))


def check_steps_from_gradients(optimizer_class: type) -> None:
    """Raise ValueError for an optimizer whose step needs more than gradients."""
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss itself, again and again, by a closure: it cannot step from gradients alone. "
            "Choose another optimizer, or use torch.optim.LBFGS in a process that has all parameters"
        )


def merge_states(states: Sequence[State]) -> State:
    """Return the shares of several owners as one state: that of one torch optimizer over all the parameters."""
    kept = {number: value for state in states for number, value in state["state"].items()}
    groups = [
        {**same[0], "params": sorted(number for group in same for number in group["params"])}
        for same in zip(*(state["param_groups"] for state in states), strict=True)
    ]
    return {"state": dict(sorted(kept.items())), "param_groups": groups}
