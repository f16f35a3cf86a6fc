"""One torch optimizer for each worker that owns some of the parameters, stepped together.

Parameters are numbered in the order given: a state dict is equal to that of a local torch optimizer over the same
parameters.

Guarantees
- Every owner has all the groups, some of them empty, so a group has one number everywhere. Each parameter goes to its
  owner alone.
- A value that is no optimizer class, or no RRef, is refused before anything is sent.
- `clip_grad_norm_` scales gradients by the norm over all workers, inside an autograd context.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from rpcbench.autograd import recorder
from rpcbench.base.errors import count_noun
from rpcbench.base.futures import Future, settle_all, wait_all
from rpcbench.optim import optimizer_files
from rpcbench.optim.local import LocalOptimizer, check_steps_from_gradients, merge_states
from rpcbench.optim.optimizer_files import State
from rpcbench.rpc import RRef
from rpcbench.rpc.rref_proxy import RRefProxy
from rpcbench.runtime import current


def clip_grad_norm_(
    context_id: int,
    params_rref: Sequence[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> float:
    """Scale the gradients of a context to a norm over all parameters of at most `max_norm`, as
    torch.nn.utils.clip_grad_norm_.

    Args:
        context_id: the autograd context.
        params_rref: parameters on any workers; those without a gradient do not count.
        max_norm: the bound.
        norm_type: as of torch.linalg.vector_norm.
        error_if_nonfinite: whether an infinite norm or nan is an error.

    Returns:
        The norm before.

    Raises:
        RuntimeError: for an unknown context, and with `error_if_nonfinite` for a norm that is not finite.
    """
    owners: dict[int, list[RRef[Any]]] = defaultdict(list)
    for rref in params_rref:
        owners[rref.owner().id].append(rref)  # one call to each owner
    recorder().find_record(context_id)
    with recorder().enter_context(context_id):  # opens the context on an owner that no call in it has reached
        call = partial(current.current_agent().call, label="clip_grad_norm_")
        norms = settle_all(
            [call(owner, _compute_norm, (context_id, rrefs, norm_type)) for owner, rrefs in owners.items()]
        )
    total = total_norm(norms, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total}, so they cannot be clipped")

    def scale_all(factor: float) -> None:
        settle_all([call(owner, _scale_gradients, (context_id, rrefs, factor)) for owner, rrefs in owners.items()])

    limit_norm(total, max_norm, scale_all)
    return total


def local_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> float:
    """Return the norm of the gradients of one worker, as of one vector."""
    norms = [torch.linalg.vector_norm(_stored_values(gradient), norm_type).double().cpu() for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms), norm_type)) if norms else 0.0


def total_norm(norms: Sequence[float], norm_type: float) -> float:
    """Return the norm over all workers; `norms` has each worker's."""
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.double), norm_type)) if norms else 0.0


def limit_norm(total: float, max_norm: float, scale: Callable[[float], object]) -> None:
    """Call `scale_all` with the factor that brings gradients of this norm to `max_norm`, if that is less."""
    factor = max_norm / (total + 1e-6)  # torch's epsilon
    if not factor >= 1:  # also for nan: all gradients become nan then, as with torch, and the norm shows it
        scale(factor)


# -- on the owners
def _compute_norm(context_id: int, rrefs: list[RRef[Any]], norm_type: float) -> float:
    gradients = recorder().named_gradients(context_id)
    return local_norm([gradients[param] for rref in rrefs if (param := rref.local_value()) in gradients], norm_type)


def _stored_values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _scale_gradients(context_id: int, rrefs: list[RRef[Any]], factor: float) -> None:
    recorder().scale_gradients(context_id, [rref.local_value() for rref in rrefs], factor)


Params = Sequence[RRef[Any]] | Sequence[Mapping[str, Any]]
"""RRefs of parameters, or torch's parameter groups: dicts with "params" (RRefs) and their options."""

_MADE = "DistributedOptimizer"  # the label of the calls that make one
_WANTED = (
    "DistributedOptimizer takes a list of RRefs of parameters, such as RemoteModule.remote_parameters() gives, "
    'or groups like {{"params": [rref, ...], "lr": 0.1}}, not {}'
)


class Share(NamedTuple):
    """What one owner gets: the groups with its RRefs only, and the numbers of those."""

    groups: list[dict[str, Any]]
    numbers: list[int]


def check_class(optimizer_class: Any) -> None:
    """Raise TypeError unless given a class, ValueError for an optimizer that cannot step from gradients alone."""
    if not isinstance(optimizer_class, type):
        raise TypeError(
            "DistributedOptimizer takes a class such as torch.optim.SGD, not "
            f"{_describe_value(optimizer_class)}; each owner "
            "makes an optimizer of that class, with the arguments that follow the parameters"
        )
    check_steps_from_gradients(optimizer_class)


def shares_by_owner(params_rref: Params) -> dict[int, Share]:
    """Return each owner's share, by worker id. ValueError without parameters, TypeError for other values."""
    groups = _parse_groups(params_rref)
    found: dict[int, Share] = defaultdict(lambda: Share([{**group, "params": []} for group in groups], []))
    for number, (place, rref) in enumerate(_number_parameters(groups)):
        share = found[rref.owner().id]  # made at its first use, with all groups
        share.groups[place]["params"].append(rref)
        share.numbers.append(number)
    if not found:
        raise ValueError("optimizer got an empty parameter list")
    return found


def _parse_groups(params_rref: Any) -> list[dict[str, Any]]:
    if isinstance(params_rref, RRef | torch.Tensor | Mapping | str):
        raise TypeError(_WANTED.format(_describe_value(params_rref)))
    given = list(params_rref)
    if not any(isinstance(one, Mapping) for one in given):
        return [{"params": given}]
    for one in given:
        if not isinstance(one, Mapping) or "params" not in one:
            raise TypeError(_WANTED.format(f"{_describe_value(one)} among groups"))
    return [dict(one) for one in given]


def _number_parameters(groups: list[dict[str, Any]]) -> Iterator[tuple[int, RRef[Any]]]:
    """Yield each parameter with the number of its group, in the order of their numbers."""
    for place, group in enumerate(groups):
        params = group["params"]
        for rref in [params] if isinstance(params, RRef) else params:
            if not isinstance(rref, RRef):
                raise TypeError(
                    _WANTED.format(_describe_value(rref)) + ": make one of your own parameters an rpc.RRef(parameter)"
                )
            yield place, rref


def _describe_value(value: Any) -> str:
    """Return a name for a value in errors."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    return f"the string {value!r}" if isinstance(value, str) else f"an object of class {type(value).__name__}"


class DistributedOptimizer:
    """An optimizer, `optimizer_class(params, *args, **kwargs)`, over parameters on any number of workers.

    Args:
        optimizer_class: an optimizer of torch.optim, or one like them, except LBFGS, which evaluates the loss itself.
        params_rref: RRefs of parameters, or parameter groups of RRefs.
        args: arguments of the class, for all owners.
        kwargs: keyword arguments of the class.

    Raises:
        TypeError: for a value that is no class or no RRef.
        ValueError: for LBFGS, and without parameters.
        Exception: the error of an owner's optimizer, when it is made and when it steps.

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
        owned = shares_by_owner(params_rref)
        self.name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
        create = partial(current.current_agent().create, function=_make_optimizer, label=_MADE)
        made = [create(owner, args=(optimizer_class, share, args, kwargs)) for owner, share in owned.items()]
        self.remote_optimizers = cast("list[RRef[Any]]", made)
        # The number of parameters; also waits for the owners, and raises their errors.
        self.size = sum(len(numbers) for numbers in self._on_each(_MADE, "attr", "numbers"))

    def step(self, context_id: int) -> None:
        """Step on all owners at once, with the gradients of the context. RuntimeError for an unknown context."""
        recorder().find_record(context_id)  # raises before any owner steps
        here: list[RRef[Any]] = []
        stepped: list[Future[Any]] = []
        with recorder().enter_context(context_id):  # opens the context on an owner that no call in it has reached
            for rref in self.remote_optimizers:
                if rref.is_owner():
                    here.append(rref)
                else:
                    stepped.append(_make_labelled_proxy(rref, "DistributedOptimizer.step").step(context_id))
        try:
            for rref in here:  # on this thread, while the other owners step
                rref.local_value().step(context_id)
        finally:  # no owner steps any more when this returns
            settle_all(stepped)

    def lr_scheduler(self, scheduler_class: Any, *args: Any, **kwargs: Any) -> DistributedScheduler:
        """Make a learning rate scheduler, `scheduler_class(optimizer, *args, **kwargs)`, on every owner.

        There may be several, which all set the rates, as with torch's own optimizers.

        Args:
            scheduler_class: such as torch.optim.lr_scheduler.StepLR.
            args: arguments after the optimizer.
            kwargs: keyword arguments.

        Returns:
            The handle that advances all of them.
        """
        numbers: list[int] = self._on_each(
            "DistributedOptimizer.lr_scheduler", "schedule", scheduler_class, args, kwargs
        )
        return DistributedScheduler(self, numbers[0])

    # -- state
    def state_dict(self) -> State:
        """Return the state of all owners: equal to that of one torch optimizer over the same parameters."""
        return merge_states(self._on_each("DistributedOptimizer.state_dict", "state"))

    def load_state_dict(self, state_dict: State) -> None:
        """Give every owner its part of a state. ValueError if it is of other parameters or groups."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        if sorted(numbers) != list(range(self.size)):
            raise ValueError(f"the state is of {count_noun(len(numbers), 'parameter')}, this optimizer has {self.size}")
        self._on_each("DistributedOptimizer.load_state_dict", "load", state_dict)

    def save(self, directory: str | Path) -> None:
        """Write the state: each owner its part, into `directory` as seen from there, and the manifest last."""
        optimizer_files.save_optimizer(
            self.name, self.size, directory, partial(self._on_each, "DistributedOptimizer.save")
        )

    def load(self, directory: str | Path) -> None:
        """Load a saved state: each owner reads its part, from the files of any. ValueError if it does not fit."""
        files = optimizer_files.shard_files(self.name, self.size, directory)
        self._on_each("DistributedOptimizer.load", "restore", str(directory), files)

    def _on_each(self, label: str, method: str, *args: Any) -> list[Any]:
        """Call a method of every owner's `LocalOptimizer`. `label`: the name of the user's call, for errors."""
        return wait_all([getattr(_make_labelled_proxy(rref, label), method)(*args) for rref in self.remote_optimizers])


class DistributedScheduler:
    """Learning rate schedulers on the owners, advanced together."""

    def __init__(self, optimizer: DistributedOptimizer, number: int = 0) -> None:
        self._optimizer, self._number = optimizer, number  # among the schedulers of the optimizer

    def step(self, *args: Any) -> None:
        """Advance after the optimizer's step, once per epoch or batch; `args` as of the scheduler's own `step`."""
        self._optimizer._on_each("DistributedScheduler.step", "advance", args, self._number)

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        rates: list[list[float]] = self._optimizer._on_each("DistributedScheduler.get_last_lr", "rates")
        return rates[0]  # equal on all owners

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedulers, which is equal on all owners."""
        state: dict[str, Any] = self._optimizer._on_each(
            "DistributedScheduler.state_dict", "schedule_state", self._number
        )[0]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into all schedulers. The rates themselves are in the state of the optimizer."""
        self._optimizer._on_each("DistributedScheduler.load_state_dict", "load_schedule", state_dict, self._number)


def _make_labelled_proxy(rref: RRef[Any], label: str) -> RRefProxy:
    """Return a proxy as `rref.rpc_async()` does, whose calls have this label."""
    return RRefProxy(rref, partial(rref._call_owner, label=label))


# -- on an owner
def _make_optimizer(
    optimizer_class: type[torch.optim.Optimizer], share: Share, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LocalOptimizer:
    groups = [{**group, "params": [rref.local_value() for rref in group["params"]]} for group in share.groups]
    return LocalOptimizer(optimizer_class, groups, *args, numbers=share.numbers, **kwargs)
