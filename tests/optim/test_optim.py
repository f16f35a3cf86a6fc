"""A distributed optimizer equals one local optimizer over the same parameters."""

from __future__ import annotations

import inspect
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worlds import nothing_left, until, world

from rpcbench import autograd
from rpcbench.optim import DistributedOptimizer, DistributedScheduler, LocalOptimizer, clip_grad_norm_
from rpcbench.optim.local import _between_steps
from rpcbench.rpc import RRef, get_worker_info, remote, rpc_async, rpc_sync
from rpcbench.runtime.agent import Agent

SHAPES = [(4, 3), (3, 3), (2, 3)]
OWNERS = ["notebook", "worker1", "worker2"]


@pytest.fixture
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Agent]]:
    with world(tmp_path_factory.mktemp("world"), 3) as made:
        yield made
        nothing_left(made)


def test_calls_of_an_optimizer_have_the_names_of_the_users_calls(agents: list[Agent], tmp_path: Path) -> None:
    """So that the error of a loss or a timeout names no internal method."""
    labels: set[str] = set()
    agents[0].machine.read_node(
        lambda node: node.set_observers(None, lambda how, to, seq, m: labels.add(getattr(m, "label", "")))
    )
    rrefs = spread()
    until(lambda: all(rref.confirmed_by_owner() for rref in rrefs), "the end of the calls that create the parameters")
    labels.clear()
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    assert labels - {""} == {"DistributedOptimizer"}
    scheduler = optimizer.lr_scheduler(torch.optim.lr_scheduler.StepLR, step_size=1)
    with autograd.context() as context_id:
        backward(context_id, rrefs, 1.0)
        labels -= {"part"}
        clip_grad_norm_(context_id, rrefs, 0.001)
        optimizer.step(context_id)
    scheduler.step()
    scheduler.get_last_lr()
    scheduler.load_state_dict(scheduler.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.save(tmp_path)
    optimizer.load(tmp_path)
    ours = {name for kind in (DistributedOptimizer, DistributedScheduler) for name in _public(kind)}
    assert labels - {""} == {"clip_grad_norm_", "DistributedOptimizer", *ours}


def _public(kind: type[Any]) -> set[str]:
    return {f"{kind.__name__}.{name}" for name, member in vars(kind).items() if name[0] != "_" and callable(member)}


def start(number: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(number)
    return nn.Parameter(torch.rand(SHAPES[number], dtype=torch.double, generator=generator))


def spread() -> list[RRef[Any]]:
    """Create the same parameters as `local`, one on each worker."""
    return [remote(owner, start, (number,)) for number, owner in enumerate(OWNERS)]


def local() -> list[nn.Parameter]:
    return [start(number) for number in range(len(SHAPES))]


def loss_of(weights: list[torch.Tensor], scale: float) -> torch.Tensor:
    return torch.stack([(weight * scale).sin().square().sum() for weight in weights]).sum()


def part(weight: RRef[Any], scale: float) -> torch.Tensor:
    return loss_of([weight.local_value()], scale)


def backward(context_id: int, rrefs: list[RRef[Any]], scale: float) -> None:
    parts = [rpc_sync(rref.owner(), part, (rref, scale)) for rref in rrefs]
    autograd.backward(context_id, [torch.stack(parts).sum()])


def train(rrefs: list[RRef[Any]], after: Callable[[int], object], steps: int = 3) -> None:
    for step in range(steps):
        with autograd.context() as context_id:
            backward(context_id, rrefs, 1.0 + step)
            after(context_id)


def train_locally(weights: list[nn.Parameter], after: Callable[[], object], steps: int = 3) -> None:
    for step in range(steps):
        for weight in weights:
            weight.grad = None
        loss_of(list(weights), 1.0 + step).backward()
        after()


def check(rrefs: list[RRef[Any]], weights: list[nn.Parameter]) -> None:
    for rref, weight in zip(rrefs, weights, strict=True):
        torch.testing.assert_close(rref.to_here(), weight, rtol=0, atol=1e-12)
        assert rpc_sync(rref.owner(), _has_no_grad, (rref,))


def _has_no_grad(rref: RRef[Any]) -> bool:
    return rref.local_value().grad is None


EVERY = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    (torch.optim.Adam, {"lr": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.Adamax, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (torch.optim.Muon, {"lr": 0.1}),
    (torch.optim.NAdam, {"lr": 0.1}),
    (torch.optim.RAdam, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    (torch.optim.Rprop, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("kind", "options"), EVERY, ids=lambda value: getattr(value, "__name__", None))
def test_each_optimizer_of_torch_steps_like_a_local_one(
    agents: list[Agent], kind: Any, options: dict[str, Any]
) -> None:
    rrefs, weights = spread(), local()
    train(rrefs, DistributedOptimizer(kind, rrefs, **options).step)
    train_locally(weights, kind(weights, **options).step)
    check(rrefs, weights)


@pytest.mark.parametrize(("way", "least"), [("foreach", 12), ("maximize", 12), ("fused", 4)])
def test_each_implementation_of_an_optimizer_steps_like_a_local_one(agents: list[Agent], way: str, least: int) -> None:
    kinds = [kind for kind in {kind: None for kind, _ in EVERY} if way in inspect.signature(kind).parameters]
    assert len(kinds) >= least
    for kind in kinds:
        rrefs, weights = spread(), local()
        train(rrefs, DistributedOptimizer(kind, rrefs, **{way: True}).step, steps=1)
        train_locally(weights, kind(weights, **{way: True}).step, steps=1)
        check(rrefs, weights)


class Halving(torch.optim.Optimizer):
    """An optimizer of the user, without a learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.5)


def test_a_user_defined_optimizer_steps_like_a_local_one(agents: list[Agent]) -> None:
    rrefs, weights = spread(), local()
    train(rrefs, DistributedOptimizer(Halving, rrefs).step)
    train_locally(weights, Halving(weights).step)
    check(rrefs, weights)


def test_these_tests_know_all_optimizers_of_torch() -> None:
    known = {kind for kind, _ in EVERY} | {torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Optimizer}
    there = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    assert {kind for kind in there if issubclass(kind, torch.optim.Optimizer)} == known


def lookup(table: RRef[Any], rows: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(rows, table.local_value(), sparse=True).sum()


def test_sparse_gradients_are_clipped_and_applied(agents: list[Agent]) -> None:
    table, weight, rows = remote("worker1", start, (0,)), start(0), torch.tensor([0, 2, 2])
    optimizer = DistributedOptimizer(torch.optim.SparseAdam, [table], lr=0.1)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc_sync("worker1", lookup, (table, rows))])
        assert clip_grad_norm_(context_id, [table], 1.0) == pytest.approx(math.sqrt(3 + 3 * 4))
        optimizer.step(context_id)
    nn.functional.embedding(rows, weight, sparse=True).sum().backward()
    assert weight.grad is not None
    weight.grad = weight.grad * (1 / (math.sqrt(15) + 1e-6))
    torch.optim.SparseAdam([weight], lr=0.1).step()
    check([table], [weight])


def test_parameter_groups_have_their_own_options(agents: list[Agent]) -> None:
    rrefs, weights = spread(), local()
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [{"params": rrefs[:2], "lr": 0.5}, {"params": rrefs[2]}], lr=0.01, momentum=0.9
    )
    alone = torch.optim.SGD([{"params": weights[:2], "lr": 0.5}, {"params": weights[2]}], lr=0.01, momentum=0.9)
    train(rrefs, optimizer.step)
    train_locally(weights, alone.step)
    check(rrefs, weights)
    assert optimizer.state_dict()["param_groups"] == alone.state_dict()["param_groups"]


def test_schedulers_run_on_the_owners(agents: list[Agent]) -> None:
    rrefs, weights = spread(), local()
    optimizer, alone = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.5), torch.optim.SGD(weights, lr=0.5)
    schedule = optimizer.lr_scheduler(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    beside = torch.optim.lr_scheduler.StepLR(alone, step_size=1, gamma=0.5)
    train(rrefs, lambda context_id: (optimizer.step(context_id), schedule.step()))
    train_locally(weights, lambda: (alone.step(), beside.step()))
    check(rrefs, weights)
    assert schedule.get_last_lr() == beside.get_last_lr() == [0.0625]


SCHEDULERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.lr_scheduler.LambdaLR, {"lr_lambda": lambda epoch: 0.9**epoch}),
    (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 4}),
    (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": 0.5, "total_steps": 8}),  # sets the momentum, too
]


@pytest.mark.parametrize(("kind", "options"), SCHEDULERS, ids=lambda value: getattr(value, "__name__", None))
def test_schedulers_respect_the_learning_rates_of_groups(agents: list[Agent], kind: Any, options: Any) -> None:
    rrefs, weights = spread(), local()
    optimizer = DistributedOptimizer(torch.optim.SGD, groups(rrefs), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(groups(weights), lr=0.1, momentum=0.9)
    schedule, beside = optimizer.lr_scheduler(kind, **options), kind(alone, **options)
    train(rrefs, lambda context_id: (optimizer.step(context_id), schedule.step()))
    train_locally(weights, lambda: (alone.step(), beside.step()))
    check(rrefs, weights)
    assert schedule.get_last_lr() == beside.get_last_lr()


def test_training_resumes_from_the_states_of_optimizer_and_scheduler(agents: list[Agent]) -> None:
    rrefs, weights = spread(), local()
    alone = torch.optim.SGD(groups(weights), lr=0.1, momentum=0.9)
    beside = torch.optim.lr_scheduler.CosineAnnealingLR(alone, T_max=6)
    for _ in range(2):
        optimizer = DistributedOptimizer(torch.optim.SGD, groups(rrefs), lr=7.0, momentum=0.9)
        schedule = optimizer.lr_scheduler(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=6)
        optimizer.load_state_dict(alone.state_dict())
        schedule.load_state_dict(beside.state_dict())
        train(rrefs, lambda context_id: (optimizer.step(context_id), schedule.step()), steps=2)  # noqa: B023
        train_locally(weights, lambda: (alone.step(), beside.step()), steps=2)
    check(rrefs, weights)
    assert schedule.state_dict() == beside.state_dict()


def groups(params: Any) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 0.05}, {"params": params[2:]}]


def test_a_scheduler_can_use_the_loss(agents: list[Agent]) -> None:
    rrefs = spread()
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.5)
    schedule = optimizer.lr_scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)
    rates = []
    for loss in (3.0, 2.0, 2.5):
        schedule.step(loss)
        rates.append(schedule.get_last_lr())
    assert rates == [[0.5], [0.5], [0.05]]


def test_a_schedule_changes_only_between_steps(agents: list[Agent]) -> None:
    held = []

    class Watching(torch.optim.lr_scheduler.StepLR):
        def __init__(self, *args: Any) -> None:
            held.append(_between_steps().locked())
            super().__init__(*args)

        def load_state_dict(self, state: Any) -> None:
            held.append(_between_steps().locked())
            super().load_state_dict(state)

    optimizer = LocalOptimizer(torch.optim.SGD, [start(0)], lr=0.5)
    optimizer.schedule(Watching, (1,), {})
    optimizer.load_schedule(optimizer.scheduler.state_dict())
    assert held == [True, True]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("bound", [0.01, 1e6])
def test_clipping_uses_the_norm_over_all_workers(agents: list[Agent], norm_type: float, bound: float) -> None:
    rrefs, weights = spread(), local()
    optimizer, alone = DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0), torch.optim.SGD(weights, lr=1.0)
    norms: list[float] = []

    def clip_and_step(context_id: int) -> None:
        norms.append(clip_grad_norm_(context_id, rrefs, bound, norm_type))
        optimizer.step(context_id)

    train(rrefs, clip_and_step, steps=1)
    loss_of(list(weights), 1.0).backward()
    assert norms == [pytest.approx(float(nn.utils.clip_grad_norm_(weights, bound, norm_type)))]
    alone.step()
    check(rrefs, weights)


def shared(context_id: int, rrefs: list[RRef[Any]]) -> bool:
    """Run a backward that gives both leaves the same tensor as gradient."""
    first, second = (rref.local_value() for rref in rrefs)
    autograd.backward(context_id, [(first + second).sum()])
    return True


def test_gradients_that_are_the_same_tensor_are_scaled_once(agents: list[Agent]) -> None:
    pair = [remote("worker1", start, (1,)) for _ in range(2)]
    with autograd.context() as context_id:
        assert rpc_sync("worker1", shared, (context_id, pair))
        total = clip_grad_norm_(context_id, pair, 1.0)
        assert clip_grad_norm_(context_id, pair, 9.0) == pytest.approx(1.0)
    assert total == pytest.approx(math.sqrt(18))


def test_a_norm_that_is_not_finite_raises_an_error_on_request(agents: list[Agent]) -> None:
    rrefs = spread()
    with autograd.context() as context_id:
        backward(context_id, rrefs, math.inf)
        with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
            clip_grad_norm_(context_id, rrefs, 1.0, error_if_nonfinite=True)


def test_the_state_equals_that_of_a_local_optimizer(agents: list[Agent]) -> None:
    rrefs, weights = spread(), local()
    optimizer, alone = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.1), torch.optim.Adam(weights, lr=0.1)
    train(rrefs, optimizer.step)
    train_locally(weights, alone.step)
    state = optimizer.state_dict()
    torch.testing.assert_close(state["state"], alone.state_dict()["state"], rtol=0, atol=1e-12)
    assert state["param_groups"] == alone.state_dict()["param_groups"]

    anew = DistributedOptimizer(torch.optim.Adam, rrefs, lr=9.0)
    anew.load_state_dict(alone.state_dict())
    train(rrefs, anew.step)
    train_locally(weights, alone.step)
    check(rrefs, weights)


def test_a_saved_state_can_be_loaded_by_other_owners(agents: list[Agent], tmp_path: Path) -> None:
    rrefs, weights = spread(), local()
    optimizer, alone = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.1), torch.optim.Adam(weights, lr=0.1)
    train(rrefs, optimizer.step)
    train_locally(weights, alone.step)
    optimizer.save(tmp_path / "state")
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "notebook.pt",
        "optimizer.json",
        "worker1.pt",
        "worker2.pt",
    ]
    pairs = zip(OWNERS[::-1], rrefs, strict=True)
    moved = [remote(owner, nn.Parameter, (rref.to_here().detach(),)) for owner, rref in pairs]
    anew = DistributedOptimizer(torch.optim.Adam, moved, lr=9.0)
    anew.load(tmp_path / "state")
    train(moved, anew.step)
    train_locally(weights, alone.step)
    check(moved, weights)


def test_a_failed_save_keeps_the_previous_state(
    agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rrefs = spread()
    optimizer = DistributedOptimizer(torch.optim.Adam, rrefs, lr=0.1)
    optimizer.save(tmp_path)
    train(rrefs, optimizer.step)
    write, numbers = torch.save, itertools.count(1)  # the owners write side by side

    def fails_in_the_middle(state: Any, path: Path) -> None:
        if next(numbers) == 2:
            raise OSError("no space left")
        write(state, path)

    monkeypatch.setattr(torch, "save", fails_in_the_middle)
    with pytest.raises(OSError, match="no space left"):
        optimizer.save(tmp_path)
    monkeypatch.undo()
    kept = optimizer.state_dict()
    optimizer.load(tmp_path)
    assert not optimizer.state_dict()["state"]  # the state from before the training
    optimizer.load_state_dict(kept)
    optimizer.save(tmp_path)
    optimizer.load(tmp_path)
    assert len(optimizer.state_dict()["state"]) == 3 and not [*tmp_path.glob("*.draft")]


def test_a_state_that_does_not_fit_is_refused(agents: list[Agent], tmp_path: Path) -> None:
    rrefs = spread()
    two = DistributedOptimizer(torch.optim.SGD, rrefs[:2], lr=0.1)
    two.save(tmp_path / "two")
    three = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1)
    with pytest.raises(ValueError, match=r"over 2 parameters; wanted: .*SGD over 3"):
        three.load(tmp_path / "two")
    with pytest.raises(ValueError, match="no complete optimizer state"):
        three.load(tmp_path)
    with pytest.raises(ValueError, match="of 2 parameters, this optimizer has 3"):
        three.load_state_dict(two.state_dict())


@pytest.mark.parametrize(
    ("kind", "params", "options", "error", "words"),
    [
        (torch.optim.SGD, list, {"lr": 0.1}, ValueError, "empty parameter list"),
        (
            torch.optim.SGD,
            lambda: [torch.ones(1)],
            {"lr": 0.1},
            TypeError,
            r"not .* Tensor: make .* rpc.RRef\(parameter",
        ),
        (torch.optim.SGD, lambda: spread()[0], {"lr": 0.1}, TypeError, "a list of RRefs of .*, not .* class RRef"),
        (torch.optim.SGD, lambda: [{"params": spread()}, *spread()], {}, TypeError, "class RRef among groups"),
        (torch.optim.SGD, lambda: [{"parms": spread()}], {}, TypeError, r"the keys \['parms'\] among groups"),
        (torch.optim.SGD([torch.ones(1)]), spread, {}, TypeError, "a class such as .*, not an object of class SGD"),
        ("SGD", spread, {}, TypeError, "a class such as .*, not the string 'SGD'"),
        (torch.optim.SGD, spread, {"speed": 1}, TypeError, "speed"),
        (torch.optim.SGD, spread, {"lr": -1}, ValueError, "Invalid learning rate"),
        (torch.optim.LBFGS, spread, {}, ValueError, "LBFGS evaluates the loss itself.*another optimizer"),
        (type("Mine", (torch.optim.LBFGS,), {}), spread, {}, ValueError, "LBFGS evaluates the loss itself"),
    ],
)
def test_invalid_arguments_are_refused(
    agents: list[Agent], kind: Any, params: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        DistributedOptimizer(kind, params(), **options)


def test_a_step_in_an_unknown_context_is_refused(agents: list[Agent]) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, spread(), lr=0.1)
    with pytest.raises(RuntimeError, match="context"):
        optimizer.step(123)


class Alone(torch.optim.SGD):
    """Records whether two of its steps ever run at once; each waits a little for another."""

    meeting = threading.Barrier(2)
    met = False

    def step(self, closure: Any = None) -> None:
        try:
            self.meeting.wait(0.2)
            Alone.met = True
        except threading.BrokenBarrierError:
            self.meeting.reset()
        super().step()


def test_two_trainers_step_one_after_the_other_each_with_its_own_gradients(agents: list[Agent]) -> None:
    weight, before = remote("worker1", start, (1,)), start(1)
    Alone.met = False
    for done in [rpc_async(f"worker{n}", trains_alone, (weight, 10.0**n)) for n in (1, 2)]:
        done.wait()
    assert not Alone.met
    torch.testing.assert_close(weight.to_here().detach(), before.detach() - 10 - 100)


_both_have_gradients = threading.Barrier(2)


def trains_alone(weight: RRef[Any], scale: float) -> None:
    """Train a parameter that another trainer trains too, with a separate optimizer."""
    optimizer = DistributedOptimizer(Alone, [weight], lr=1.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc_sync("worker1", part_sum, (weight, scale))])
        _both_have_gradients.wait(20)
        optimizer.step(context_id)


def part_sum(weight: RRef[Any], scale: float) -> torch.Tensor:
    return weight.local_value().sum() * scale


class Refusing(torch.optim.SGD):
    """Fails on the workers in `refuse`, before it has changed anything."""

    def __init__(self, params: Any, refuse: list[str]) -> None:
        super().__init__(params, lr=0.1)
        self._refuse = refuse

    def step(self, closure: Any = None) -> None:
        if get_worker_info().name in self._refuse:
            raise ArithmeticError(f"{get_worker_info().name} refuses")
        super().step()


@pytest.mark.parametrize("refuse", [["notebook"], ["worker1"], ["notebook", "worker1"]])
def test_an_error_of_one_owner_is_raised_after_the_others_have_stepped(agents: list[Agent], refuse: list[str]) -> None:
    rrefs, before = spread(), local()
    optimizer = DistributedOptimizer(Refusing, rrefs, refuse)
    with pytest.raises(ArithmeticError, match="refuses"):
        train(rrefs, optimizer.step, steps=1)
    for owner, rref, weight in zip(OWNERS, rrefs, before, strict=True):
        assert torch.equal(rref.to_here(), weight) == (owner in refuse)
        assert rpc_sync(rref.owner(), _has_no_grad, (rref,))


class Slow(torch.optim.SGD):
    """Fails on worker1, and takes long on worker2."""

    def step(self, closure: Any = None) -> None:
        if get_worker_info().name == "worker1":
            raise ArithmeticError("worker1 refuses")
        if get_worker_info().name == "worker2":
            time.sleep(0.3)
        super().step()


def test_a_slow_owner_has_stepped_when_the_error_of_another_is_raised(agents: list[Agent]) -> None:
    rrefs, before = spread(), local()
    optimizer = DistributedOptimizer(Slow, rrefs, lr=0.1)
    with pytest.raises(ArithmeticError, match="worker1 refuses"):
        train(rrefs, optimizer.step, steps=1)
    changed = [not torch.equal(rref.to_here(), weight) for rref, weight in zip(rrefs, before, strict=True)]
    assert changed == [owner != "worker1" for owner in OWNERS]


def test_several_schedulers_set_the_rates_together(agents: list[Agent]) -> None:
    rrefs, weights = spread(), local()
    optimizer, alone = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.5), torch.optim.SGD(weights, lr=0.5)
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.lr_scheduler.LinearLR, {"total_iters": 2}), (torch.optim.lr_scheduler.StepLR, {"step_size": 1}),
    ]  # fmt: skip
    theirs = [optimizer.lr_scheduler(kind, **options) for kind, options in kinds]
    beside = [kind(alone, **options) for kind, options in kinds]
    train(rrefs, lambda context_id: (optimizer.step(context_id), [each.step() for each in theirs]))
    train_locally(weights, lambda: (alone.step(), [each.step() for each in beside]))
    check(rrefs, weights)
    assert theirs[-1].get_last_lr() == [alone.param_groups[0]["lr"]]
    assert [each.state_dict()["last_epoch"] for each in theirs] == [each.last_epoch for each in beside]


def test_the_caller_of_a_step_sends_no_message_to_itself(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, spread(), lr=0.1)
    asked: list[int] = []
    begin = agents[0].call
    monkeypatch.setattr(agents[0], "call", lambda to, *args, **how: asked.append(to) or begin(to, *args, **how))
    with autograd.context() as context_id:
        optimizer.step(context_id)
    assert asked == [1, 2]
