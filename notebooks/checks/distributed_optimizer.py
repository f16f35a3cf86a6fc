"""Checks of lesson 12."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rpcbench
import rpcbench.autograd as dist_autograd
import rpcbench.rpc as rpc
from checks import (
    NotYet,
    differ,
    dots_left,
    exercise,
    name_slip,
    read,
    reads_attribute,
    require,
    returned,
    right,
    shown,
    trying,
)
from checks import hint as hint
from checks import solution as solution
from checks.meetings import watching
from rpcbench.optim import DistributedOptimizer
from rpcbench.rpc import RRef

Weights = Sequence[Any]
Values = list[list[float]]
LARGE = 1000  # numbers of a weight whose gradient should not travel
NO_GRAD = "It reads `.grad`, which is None here: backward has put the gradients into the context."


@exercise(
    "The weight itself is `weight.local_value()`. Its gradient is in the context, not in `.grad`: `get_gradients` is a "
    "dict. And torch should record nothing.",
    "Begin with `values = weight.local_value()` and `gradient = dist_autograd.get_gradients(context_id).get(values)`.",
)
def descend(answer: Callable[[Any, int, float], Any]) -> None:
    """`answer(weight, context_id, lr)`, on the owner of the weight, is one step of gradient descent."""
    used, unused = rpc.remote("worker1", _weight, (1.0,)), rpc.remote("worker1", _weight, (5.0,))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", _square_sum, (used,))])
        with _reads_no_grad(answer), trying("On worker1 it"):
            result = returned(rpc.rpc_sync("worker1", answer, (used, context_id, 0.25)))
            other = _unused(answer, unused, context_id)
        left = rpc.rpc_sync("worker1", _gradient_left, (context_id, used))
        before, after = (1.0, 2.0, 3.0), (0.5, 1.0, 1.5)
        now = tuple(used.to_here().tolist())
        made = isinstance(result, Tensor) and tuple(result.tolist()) != before
        reason = ("The step made a new tensor." if made else NO_GRAD if reads_attribute(answer, "grad") else
                  "Did the step change another tensor, or find no gradient?")  # fmt: skip
        require(now != before, f"The weight itself has not changed. {reason}")
        require(now == after, f"From {before}, with the gradient (2, 4, 6) and lr=0.25, it goes to {after}, not {now}.")
        require(not isinstance(result, RRef), "It returns the RRef. Return the parameter itself, its local value.")
        require(isinstance(result, Tensor) and tuple(result.tolist()) == after, "Return the parameter.")
        require(isinstance(other, Tensor), "Return the parameter of a weight that took no part too.")
        require(left == [2.0, 4.0, 6.0], f"The gradient in the context was [2, 4, 6], and is now {left}. Leave it as "
                "it is: others may read it.")  # fmt: skip
        require(unused.to_here().tolist() == [5.0, 6.0, 7.0], "A weight that took no part should stay as it is.")
        require(other.tolist() == [5.0, 6.0, 7.0], f"For a weight that took no part, {shown(other.tolist())} was "
                "returned. Return its parameter, (5, 6, 7).")  # fmt: skip
    right("This is what an optimizer does on each owner.")


@contextlib.contextmanager
def _reads_no_grad(answer: object) -> Iterator[None]:
    """Give the reason if the answer computes with `.grad`."""
    try:
        yield
    except NotYet as hint:
        none = "NoneType" in str(hint) and reads_attribute(answer, "grad")
        raise NotYet(f"{hint} {NO_GRAD}" if none else str(hint)) from None


def _unused(answer: Callable[[Any, int, float], Any], weight: Any, context_id: int) -> Any:
    try:
        return rpc.rpc_sync("worker1", answer, (weight, context_id, 0.25))
    except KeyError:
        raise NotYet("A weight that took no part has no entry in the context, and that was an error.") from None


@exercise(
    "Which single number of each owner is enough, if you want the root of the sum of *all* squares in the end?",
    "Begin with a function for the owner that returns the sum of squares of one gradient, a number, or 0.0. Call it "
    "with `rpc.rpc_async` for each weight before you wait for the first number.",
)
def global_norm(answer: Callable[[int, Weights], Any]) -> None:
    """`answer(context_id, weights)` is the norm over all workers."""
    for owners, unused, beside in (
        (["worker1", "worker2", "worker2"], [], 0), (["worker2"], [], 0), (["worker1", "worker2"], ["worker1"], 0),
        (["worker1", "worker2"], [], 1), (["worker1"], ["worker2"], 0),
    ):  # fmt: skip
        weights = [rpc.remote(owner, _weight, (2.0 + place, LARGE)) for place, owner in enumerate(owners)]
        extra = [rpc.remote(owner, _weight, (3.0,)) for owner in unused]
        with dist_autograd.context() as context_id:
            others = [rpc.remote("worker1", _weight, (1000.0,)) for _ in range(beside)]
            parts = [rpc.rpc_sync(weight.owner(), _square_sum, (weight,)) for weight in [*weights, *others]]
            dist_autograd.backward(context_id, [torch.stack(parts).sum()])
            where = f"For weights on {owners}" + (f", and one on {unused[0]} without a gradient," if unused else "")
            with watching(owners) as watch, rpcbench.trace() as seen, trying(f"{where} the function"):
                found = returned(answer(context_id, [*weights, *extra]))
            left = [rpc.rpc_sync(weight.owner(), _gradient_left, (context_id, weight)) for weight in weights]
        before = [[2 * (2.0 + place + step) for step in range(LARGE)] for place in range(len(owners))]
        gradients = [value for each in before for value in each]
        wanted = math.sqrt(sum(value * value for value in gradients))
        found = read(found, float, "The norm should be a number")
        where += ", with another one in the context that is not asked for," if beside else ""
        told = differ(wanted, found, ", and yours gave ")
        slip = name_slip(found, _slips_of_norm(before, owners), within=1e-6)
        require(math.isclose(found, wanted, rel_tol=1e-6), f"{where} it is {told}.{slip}")
        largest = max((row["bytes"] for row in seen.view["messages"].values()), default=0)
        require(largest < 6 * LARGE, f"A message of {largest} bytes has travelled: a gradient of {LARGE} numbers, "
                "where a single number is enough.")  # fmt: skip
        require(watch.at_once, "One owner had answered before the other one was asked.")
        require(left == before, "Afterwards a gradient in the context is another one. Leave it as it is.")
    right("One number from each, one number in the end.")


def _slips_of_norm(gradients: Sequence[Sequence[float]], owners: Sequence[str]) -> dict[str, float]:
    """Return the results of natural mistakes."""
    squares = [sum(value * value for value in gradient) for gradient in gradients]
    of_owners = [sum(s for s, each in zip(squares, owners, strict=True) if each == owner) for owner in set(owners)]
    return {
        "Norms of weights do not add up; squares do.": sum(map(math.sqrt, squares)),
        "Norms of owners do not add up; squares do.": sum(map(math.sqrt, of_owners)),
        "That is the largest of the norms, and the others count, too.": math.sqrt(max(squares)),
        "That is a sum of squares, without the root.": sum(squares),
        "That is the norm of the weights, not of their gradients.": math.sqrt(sum(squares)) / 2,
    }


Save = Callable[[str, DistributedOptimizer, Weights], None]


@exercise(
    "Two things were saved, in two ways. The weights have to change in place, on their owners, and not in a copy.",
    "Begin with a function for the owner that does `weight.local_value().copy_(values)` under `torch.no_grad()`. The "
    "optimizer has a method for the other half.",
)
def restore(answer: Save, checkpoint: Save) -> None:
    """`answer(directory, optimizer, weights)` undoes what has happened since `checkpoint`."""
    _restored(answer, checkpoint, ("worker1", "worker2"), ("worker2", "worker1"))
    _restored(answer, checkpoint, ("worker1", "worker2", "worker2"), ("worker2", "worker1", "worker2"))
    right("It goes on as if nothing had happened.")


def _restored(answer: Save, checkpoint: Save, before: Sequence[str], after: Sequence[str]) -> None:
    weights, optimizer = _training(before)
    _train(weights, optimizer)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint(directory, optimizer, weights)
        saved = _everything(weights, optimizer)
        _train(weights, optimizer)
        wanted = _values(weights)

        weights, optimizer = _training(after)
        fresh = _everything(weights, optimizer)
        places = f"{', '.join(after[:-1])} and {after[-1]}"
        with trying(f"With weights that now live on {places}, in this order, the function"):
            given = list(weights)
            answer(directory, optimizer, given)
    values, momentum = _everything(weights, optimizer)
    require((values, momentum) != fresh, f"Nothing has been restored.{dots_left()}")
    wrong = sum(mine != right_one for mine, right_one in zip(values, saved[0], strict=True))
    others = len(given) != len(weights) or any(a is not b for a, b in zip(given, weights, strict=True))
    require(not wrong, f"Of {len(before)} weights on the workers {wrong} are not those that were saved."
            f"{_why_not_restored(answer, values, saved[0], fresh[0], others)}")  # fmt: skip
    require(momentum == saved[1], "The weights are back, but the optimizer has lost its momentum.")
    _train(weights, optimizer)
    require(_values(weights) == wanted, "The training does not go on as it would have without the break.")


def _why_not_restored(answer: Save, values: Values, saved: Values, fresh: Values, others: bool) -> str:
    """Return the sentence on a mistake of `restore`; empty if none is known. `others`: the list has new references."""
    if others:
        return " The list now has references to new weights; the optimizer keeps those that it has, and steps these."
    if values == fresh and reads_attribute(answer, "to_here"):
        return " None has changed: `to_here()` gives this notebook a copy, and what is done to a copy stays here."
    if values == fresh and reads_attribute(answer, "remote"):
        return " None has changed: new weights were made beside them, and the optimizer keeps those that it has."
    if values == fresh:
        return " None has changed."
    crossed = sorted(values) == sorted(saved)
    return " Each was put into another weight: saved weights stand in the order of the list." if crossed else ""


@exercise(
    "Look at one weight: which of its three numbers changes first? And what is kept between two steps, and where?",
    "Begin with `for place, gradient in enumerate(gradients):`, skip `None`, and set `velocities[place]` to a new "
    "tensor; then change the weight under `torch.no_grad()`.",
)
def momentum_step(answer: Callable[..., object]) -> None:
    """`answer(weights, gradients, velocities, lr, momentum)` is a step of torch's SGD with momentum."""
    ours = [nn.Parameter(torch.tensor(values)) for values in ([1.0, -2.0], [[4.0]], [3.0])]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    optimizer = torch.optim.SGD(theirs, lr=0.5, momentum=0.5)
    velocities: list[Tensor | None] = [None, None, None]
    handed: list[tuple[Tensor, Tensor]] = []  # all gradients so far, and what they were
    steps: list[Step] = [  # the third weight has its first gradient in the second step
        (0.5, [8.0, 16.0, None]), (0.25, [-16.0, None, 4.0]), (0.125, [None, 8.0, 8.0]), (0.5, [16.0, 4.0, None])
    ]  # fmt: skip
    for number, (lr, values) in enumerate(steps, 1):
        gradients = [
            None if value is None else torch.full_like(weight, value)
            for value, weight in zip(values, theirs, strict=True)
        ]
        given = [None if gradient is None else gradient.clone() for gradient in gradients]
        optimizer.param_groups[0]["lr"] = lr
        for weight, gradient in zip(theirs, gradients, strict=True):
            weight.grad = None if gradient is None else gradient.clone()
        optimizer.step()
        before, mine = [weight.detach().clone() for weight in ours], list(ours)
        with trying("The function"):
            answer(mine, given, velocities, lr, 0.5)
        require(
            all(a is b for a, b in zip(mine, ours, strict=True)), "A weight is now another object. Change it in place."
        )
        unchanged = all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
        require(number > 1 or not unchanged, f"The weights have not changed.{dots_left()} Change them in place.")
        where = f"Step {number}, with lr={lr}, momentum=0.5 and the gradients {_plain(gradients)}:"
        same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        require(same, f"{where} the weights {_plain(before)} become {_plain(theirs)}; yours are {_plain(ours)}."
                + _slip_of_momentum([each.flatten().tolist()[0] for each in ours], steps[:number]))  # fmt: skip
        kept = all(a is None or torch.equal(a, b) for a, b in zip(gradients, given, strict=True) if b is not None)
        require(kept, f"{where} afterwards the gradients are {_plain(given)}. They should stay as they were.")
        handed += [(a, b) for a, b in zip(given, gradients, strict=True) if a is not None and b is not None]
        require(
            all(torch.equal(a, b) for a, b in handed),
            f"{where} a gradient of an earlier step has changed: a velocity is the same tensor. It begins as a copy.",
        )
        require(
            not any(each is not None and each.requires_grad for each in velocities), "A velocity is part of a graph."
        )
    right_ones = [optimizer.state[weight]["momentum_buffer"] for weight in theirs]
    same = all(a is not None and torch.equal(a, b) for a, b in zip(velocities, right_ones, strict=True))
    require(same, f"After four steps the list of velocities should be {_plain(right_ones)}, and it is "
            f"{_plain(velocities)}. The owner keeps this list.")  # fmt: skip
    right("Four steps, equal to those of torch's SGD.")


Step = tuple[float, Sequence[float | None]]
Rule = Callable[["float | None", "float | None", float], tuple["float | None", float]]
DAMPED = "In your velocity the gradient counts with 1 - momentum only."
RULES: list[tuple[str, Rule]] = [  # velocity, gradient, lr -> velocity, and what is taken from the weight
    ("The learning rate is in your velocity, so an older one goes on acting after it has changed.",
     lambda v, g, lr: (v, 0.0) if g is None else (0.5 * (v or 0.0) + lr * g, 0.5 * (v or 0.0) + lr * g)),
    (DAMPED, lambda v, g, lr: (v, 0.0) if g is None else (0.5 * (v or 0.0) + 0.5 * g, lr * 0.5 * ((v or 0.0) + g))),
    (DAMPED, lambda v, g, lr: (v, 0.0) if g is None else (g, lr * g) if v is None else
        (0.5 * v + 0.5 * g, lr * (0.5 * v + 0.5 * g))),
    ("A weight without a gradient has moved: no gradient is not a gradient of zero.",
     lambda v, g, lr: (0.5 * (v or 0.0) + (g or 0.0), lr * (0.5 * (v or 0.0) + (g or 0.0)))),
    ("Yours steps with the gradient alone, as if no velocity were kept.", lambda v, g, lr: (v, lr * (g or 0.0))),
    ("Yours steps with the velocity of the step before.",
     lambda v, g, lr: (v, 0.0) if g is None else (0.5 * (v or g) + g, lr * (v or g))),
]  # fmt: skip


def _slip_of_momentum(found: Sequence[float], steps: Sequence[Step]) -> str:
    """Return the sentence on the mistake that leads to these first numbers of the three weights, or nothing."""
    for said, rule in RULES:
        weights = [1.0, 4.0, 3.0]
        velocities: list[float | None] = [None, None, None]
        for lr, gradients in steps:
            for place, gradient in enumerate(gradients):
                velocities[place], taken = rule(velocities[place], gradient, lr)
                weights[place] -= taken
        if weights == list(found):
            return f" {said}"
    return ""


def _plain(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if tensor is None else tensor.tolist() for tensor in tensors]


# -- what the answers are tried with
def _weight(first: float, size: int = 3) -> nn.Parameter:
    return nn.Parameter(torch.arange(size, dtype=torch.double) + first)


def _gradient_left(context_id: int, weight: RRef[Tensor]) -> list[float]:
    return dist_autograd.get_gradients(context_id)[weight.local_value()].tolist()


def _square_sum(weight: RRef[Tensor]) -> Tensor:
    """Its gradient is twice the weight."""
    return weight.local_value().square().sum()


def _training(owners: Sequence[str]) -> tuple[list[Any], DistributedOptimizer]:
    weights = [rpc.remote(owner, _weight, (1.0 + 3 * place,)) for place, owner in enumerate(owners)]
    return weights, DistributedOptimizer(torch.optim.SGD, weights, lr=0.125, momentum=0.5)


def _train(weights: Weights, optimizer: DistributedOptimizer) -> None:
    for _ in range(3):
        with dist_autograd.context() as context_id:
            parts = [rpc.rpc_sync(weight.owner(), _square_sum, (weight,)) for weight in weights]
            dist_autograd.backward(context_id, [torch.stack(parts).sum()])
            optimizer.step(context_id)


def _values(weights: Weights) -> Values:
    return [weight.to_here().tolist() for weight in weights]


def _everything(weights: Weights, optimizer: DistributedOptimizer) -> tuple[Values, list[Any]]:
    """Weights, and the optimizer's momentum."""
    state = optimizer.state_dict()["state"]
    return _values(weights), [kept["momentum_buffer"].tolist() for _, kept in sorted(state.items())]
