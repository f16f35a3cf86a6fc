"""One torch optimizer for each worker that owns some of the parameters, stepped together.

Parameters are numbered in the order given: a state dict is the one that a local torch optimizer over the same
parameters would have.

Guarantees
- Every owner has all the groups, some of them empty, so a group has one number everywhere. Each parameter goes to its
  owner alone.
- What is no optimizer class, or no RRef, is refused before anything is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rpcbench.autograd import recorder
from rpcbench.base.errors import counted
from rpcbench.base.futures import Future, wait_all
from rpcbench.optim import optimizer_files
from rpcbench.optim.local import LocalOptimizer, State, check_steps_from_gradients, merged
from rpcbench.rpc import RRef, remote, rpc_async

Params = Sequence[RRef[Any]] | Sequence[Mapping[str, Any]]
"""RRefs of parameters, or torch's parameter groups: dicts with "params" (RRefs) and options of their own."""

_WANTED = (
    "DistributedOptimizer takes a list of RRefs of parameters, such as RemoteModule.remote_parameters() gives, "
    'or groups like {{"params": [rref, ...], "lr": 0.1}}, not {}'
)


class Share(NamedTuple):
    """What one owner gets: the groups with its RRefs only, and the numbers of those."""

    groups: list[dict[str, Any]]
    numbers: list[int]


def check_class(optimizer_class: Any) -> None:
    """TypeError for anything but a class, ValueError for one that cannot step from gradients alone."""
    if not isinstance(optimizer_class, type):
        raise TypeError(
            f"DistributedOptimizer takes a class such as torch.optim.SGD, not {_named(optimizer_class)}; each owner "
            "makes an optimizer of that class, with the arguments that follow the parameters"
        )
    check_steps_from_gradients(optimizer_class)


def shares(params_rref: Params) -> dict[int, Share]:
    """What each owner gets, by worker id. ValueError for no parameters, TypeError for what is no RRef."""
    groups = _groups(params_rref)
    found: dict[int, Share] = defaultdict(lambda: Share([{**group, "params": []} for group in groups], []))
    for number, (place, rref) in enumerate(_numbered(groups)):
        share = found[rref.owner().id]
        share.groups[place]["params"].append(rref)
        share.numbers.append(number)
    if not found:
        raise ValueError("optimizer got an empty parameter list")
    return found


def _groups(params_rref: Any) -> list[dict[str, Any]]:
    if isinstance(params_rref, RRef | torch.Tensor | Mapping | str):
        raise TypeError(_WANTED.format(_named(params_rref)))
    given = list(params_rref)
    if not any(isinstance(one, Mapping) for one in given):
        return [{"params": given}]
    for one in given:
        if not isinstance(one, Mapping) or "params" not in one:
            raise TypeError(_WANTED.format(f"{_named(one)} among groups"))
    return [dict(one) for one in given]


def _numbered(groups: list[dict[str, Any]]) -> Iterator[tuple[int, RRef[Any]]]:
    """Each parameter with the place of its group, in the order that counts."""
    for place, group in enumerate(groups):
        params = group["params"]
        for rref in [params] if isinstance(params, RRef) else params:
            if not isinstance(rref, RRef):
                raise TypeError(
                    _WANTED.format(_named(rref)) + ": make one of your own parameters an rpc.RRef(parameter)"
                )
            yield place, rref


def _named(value: Any) -> str:
    """What to call it in an error."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    return f"the string {value!r}" if isinstance(value, str) else f"an object of class {type(value).__name__}"


class DistributedOptimizer:
    """`optimizer_class(params, *args, **kwargs)` over parameters on any number of workers.

    params_rref: RRefs, or parameter groups of RRefs. Any optimizer of torch.optim but LBFGS, which evaluates the loss
    itself (ValueError). Errors of an owner's optimizer are raised here, when it is made and when it steps.

    >>> from rpcbench.optim import DistributedOptimizer
    >>> weights = [rpc.remote(name, torch.ones, (2,), {"requires_grad": True}) for name in ("worker1", "worker2")]
    >>> optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.5)
    >>> with dist_autograd.context() as context_id:
    ...     loss = sum(weight.to_here().sum() for weight in weights)
    ...     dist_autograd.backward(context_id, [loss])
    ...     optimizer.step(context_id)
    >>> weights[0].to_here()
    tensor([0.5000, 0.5000], requires_grad=True)
    """

    def __init__(
        self, optimizer_class: type[torch.optim.Optimizer], params_rref: Params, *args: Any, **kwargs: Any
    ) -> None:
        check_class(optimizer_class)
        owned = shares(params_rref)
        self.name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        self.size = sum(len(share.numbers) for share in owned.values())
        self.remote_optimizers: list[RRef[Any]] = [
            remote(owner, _make, (optimizer_class, share, args, kwargs)) for owner, share in owned.items()
        ]
        self._on_each(_made)

    def step(self, context_id: int) -> None:
        """Step on all owners at once, with the gradients of the context. RuntimeError for an unknown context."""
        recorder().recorded(context_id)
        here: list[RRef[Any]] = []
        stepped: list[Future[Any]] = []
        for rref in self.remote_optimizers:
            if rref.is_owner():
                here.append(rref)
            else:
                stepped.append(rref.rpc_async().step(context_id))
        try:
            for rref in here:  # on this thread, while the others are at it
                rref.local_value().step(context_id)
        finally:
            wait_all(stepped)

    def lr_scheduler(self, scheduler_class: Any, *args: Any, **kwargs: Any) -> DistributedScheduler:
        """`scheduler_class(optimizer, *args, **kwargs)` on every owner, such as torch.optim.lr_scheduler.StepLR."""
        self._on_each(_schedule, scheduler_class, args, kwargs)
        return DistributedScheduler(self)

    # -- state
    def state_dict(self) -> State:
        """The state of all owners, copied here: what one torch optimizer over the same parameters would have."""
        return merged(self._on_each(_state))

    def load_state_dict(self, state_dict: State) -> None:
        """Give every owner its part of a state. ValueError where it is of other parameters or groups."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        if sorted(numbers) != list(range(self.size)):
            raise ValueError(f"the state is of {counted(len(numbers), 'parameter')}, this optimizer has {self.size}")
        self._on_each(_load, state_dict)

    def save(self, directory: str | Path) -> None:
        """Let every owner write its own part into `directory`, as it sees it; the manifest comes last."""
        optimizer_files.save(self.name, self.size, directory, lambda: self._on_each(_save, str(directory)))

    def load(self, directory: str | Path) -> None:
        """Let every owner read what it needs of a saved state, whoever wrote it. ValueError where it does not fit."""
        files = optimizer_files.files(self.name, self.size, directory)
        self._on_each(_restore, str(directory), files)

    def _on_each(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return wait_all([rpc_async(rref.owner(), function, (rref, *args)) for rref in self.remote_optimizers])


class DistributedScheduler:
    """Learning rate schedulers on the owners, advanced together."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer

    def step(self, *args: Any) -> None:
        """Once for each epoch (or batch), after the optimizer's step; `args` as the scheduler's own `step` takes."""
        self._optimizer._on_each(_advance, args)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        rates: list[float] = self._optimizer._on_each(_rates)[0]
        return rates

    def state_dict(self) -> dict[str, Any]:
        """The state of the schedulers, which is the same on all owners."""
        state: dict[str, Any] = self._optimizer._on_each(_schedule_state)[0]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the schedulers go on from a state. The optimizer has one of its own, with the rates."""
        self._optimizer._on_each(_load_schedule, state_dict)


# -- on the owners
def _make(
    optimizer_class: type[torch.optim.Optimizer], share: Share, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalOptimizer:
    groups = [{**group, "params": [rref.local_value() for rref in group["params"]]} for group in share.groups]
    return LocalOptimizer(optimizer_class, groups, *args, numbers=share.numbers, **kwargs)


def _made(rref: RRef[LocalOptimizer]) -> None:
    """Raises what went wrong when it was made."""
    rref.local_value()


def _schedule(rref: RRef[LocalOptimizer], scheduler_class: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    rref.local_value().schedule(scheduler_class, args, kwargs)


def _advance(rref: RRef[LocalOptimizer], args: tuple[Any, ...]) -> list[float]:
    return rref.local_value().advance(args)


def _schedule_state(rref: RRef[LocalOptimizer]) -> dict[str, Any]:
    state: dict[str, Any] = rref.local_value().scheduler.state_dict()
    return state


def _load_schedule(rref: RRef[LocalOptimizer], state: dict[str, Any]) -> None:
    rref.local_value().scheduler.load_state_dict(state)


def _rates(rref: RRef[LocalOptimizer]) -> list[float]:
    return rref.local_value().rates()


def _state(rref: RRef[LocalOptimizer]) -> State:
    return rref.local_value().state()


def _load(rref: RRef[LocalOptimizer], state: State) -> None:
    rref.local_value().load(state)


def _save(rref: RRef[LocalOptimizer], directory: str) -> tuple[str, list[int]]:
    optimizer = rref.local_value()
    return optimizer_files.write(optimizer.state(), directory), optimizer.numbers


def _restore(rref: RRef[LocalOptimizer], directory: str, files: dict[str, list[int]]) -> None:
    optimizer = rref.local_value()
    optimizer.load(optimizer_files.read(directory, files, optimizer.numbers))
