"""One owner's share of a distributed optimizer: a torch optimizer over the parameters of this process.

It steps with the gradients of an autograd context; `.grad` is used only inside a step and is None after it. Steps of
one process are serialised, as torch does, so two trainers never mix their gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rpcbench.autograd import recorder
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

State = dict[str, Any]
"""As torch's `Optimizer.state_dict()`: {"state": {number: ...}, "param_groups": [{..., "params": [numbers]}]}."""


class _StepLock:
    """One lock for each agent: parameters may be shared between optimizers."""

    def __init__(self, agent: Agent) -> None:
        self.lock = threading.Lock()


class LocalOptimizer:
    """A torch optimizer over `params`, tensors or torch's group dicts, some of which may be empty here.

    numbers: the number of each parameter in the whole distributed optimizer, in order; by default 0, 1, 2, …
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
        self.scheduler: Any = None

    def step(self, context_id: int) -> None:
        """One step; parameters without a gradient in the context are left alone.

        RuntimeError for an unknown context.
        """
        agent = current.current()
        self._step(agent, recorder(agent).gradients(context_id))

    def step_with(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """One step with these gradients; parameters without one are left alone."""
        self._step(current.current(), gradients)

    def _step(self, agent: Agent, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        with agent.part(_StepLock).lock:
            try:
                for param in self.params:
                    param.grad = gradients.get(param)
                self.optimizer.step()
            finally:
                for param in self.params:
                    param.grad = None

    # -- learning rates
    def schedule(self, scheduler_class: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let a torch scheduler set the learning rates from now on."""
        self.scheduler = scheduler_class(self.optimizer, *args, **kwargs)

    def advance(self, args: tuple[Any, ...]) -> list[float]:
        """A step of the scheduler; the learning rate of each group after it."""
        with current.current().part(_StepLock).lock:
            self.scheduler.step(*args)
        return self.rates()

    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    # -- state
    def state(self) -> State:
        """This share's state, by the numbers of the whole optimizer."""
        with current.current().part(_StepLock).lock:
            found = self.optimizer.state_dict()
        groups = [{**group, "params": [self.numbers[n] for n in group["params"]]} for group in found["param_groups"]]
        return {"state": {self.numbers[n]: kept for n, kept in found["state"].items()}, "param_groups": groups}

    def load(self, state: State) -> None:
        """Take what belongs to this share out of the state of a whole optimizer, or of several shares of one."""
        local = {number: place for place, number in enumerate(self.numbers)}
        groups = [
            {**group, "params": [local[n] for n in group["params"] if n in local]} for group in state["param_groups"]
        ]
        kept = {local[number]: value for number, value in state["state"].items() if number in local}
        with current.current().part(_StepLock).lock:
            self.optimizer.load_state_dict({"state": kept, "param_groups": groups})


def check_steps_from_gradients(optimizer_class: type) -> None:
    """ValueError for an optimizer whose step needs more than the gradients of a context."""
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss itself, again and again, by a closure: it cannot step from gradients alone. "
            "Choose another optimizer, or use torch.optim.LBFGS in a process that has all parameters"
        )


def merged(states: Sequence[State]) -> State:
    """The shares of several owners as one state: what one torch optimizer over all the parameters would have."""
    kept = {number: value for state in states for number, value in state["state"].items()}
    groups = [
        {**same[0], "params": sorted(number for group in same for number in group["params"])}
        for same in zip(*(state["param_groups"] for state in states), strict=True)
    ]
    return {"state": dict(sorted(kept.items())), "param_groups": groups}
