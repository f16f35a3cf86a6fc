"""Gradients that torch's engine sums: equal to sums one by one, and other code does not see them in `.grad`."""

from __future__ import annotations

from typing import Any

import pytest
import small
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from worlds import until

from rpcbench.pipeline import Pipeline, split, stage
from rpcbench.pipeline import execution as execution_
from rpcbench.pipeline.gradient_sums import EngineSums, Sums, summable_stages
from rpcbench.pipeline.ops import Ops, parse_ops
from rpcbench.runtime.agent import Agent


class Sometimes(nn.Module):
    """Uses the second weight for some inputs only, and the third one never."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList([torch.rand(3, 3, generator=made) for _ in range(3)])

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(value @ self.weights[0] @ self.weights[0])
        return value @ self.weights[1].t() if value[0, 0] > 0 else value


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_engine_sums_equal_sums_one_by_one_to_the_last_bit(positive: list[bool]) -> None:
    net = Sometimes()
    own = list(net.parameters())
    one_by_one, engine = Sums({0: own}, {}), EngineSums(summable_stages({0: own}))
    for number, sign in enumerate(positive):
        value = torch.rand(4, 3, generator=torch.Generator().manual_seed(number)) * (1 if sign else -1)
        value.requires_grad_()
        back = torch.rand(4, 3, generator=torch.Generator().manual_seed(number + 99))
        wanted, *gradients = torch.autograd.grad([net(value)], [value, *own], [back], allow_unused=True)
        one_by_one.add_gradients(0, gradients)
        (found,) = engine.add_microbatch(0, [net(value)], [back], [value])
        assert found is not None and torch.equal(found, wanted)
    sums, wanted_sums = dict(engine.summed_leaves()), dict(one_by_one.summed_leaves())
    assert sums.keys() == wanted_sums.keys() and all(torch.equal(sums[p], wanted_sums[p]) for p in sums)
    assert all(param.grad is None for param in own)


def test_engine_sums_restore_grad_and_do_not_include_it() -> None:
    own = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    own[0].grad = before = torch.full((2,), 5.0)
    engine = EngineSums(summable_stages({0: own}))
    for _ in range(2):
        engine.add_microbatch(0, [own[0] * own[1]], [torch.ones(2)], [])
        assert own[0].grad is before and own[1].grad is None and before.tolist() == [5, 5]
    assert [gradient.tolist() for _, gradient in engine.summed_leaves()] == [[2, 2]] * 2
    with pytest.raises(ZeroDivisionError):
        engine.add_microbatch(0, [divided(own[0])], [torch.ones(2)], [])
    assert own[0].grad is before and own[1].grad is None and before.tolist() == [5, 5]


def divided(value: Tensor) -> Tensor:
    made = value * 2
    made.register_hook(lambda _: 1 / 0)
    return made


def test_a_backward_without_outputs_gives_no_gradients() -> None:
    value, own = torch.ones(2, requires_grad=True), [nn.Parameter(torch.ones(2))]
    engine = EngineSums(summable_stages({0: own, 1: []}))
    assert (
        engine.add_microbatch(0, [], [], [value]) == [None]
        and engine.add_microbatch(1, [value * 2], [torch.ones(2)], []) == []
    )
    assert engine.summed_leaves() == [] and value.grad is None


class Own(nn.Parameter):
    """A parameter class of the user."""


def test_only_stages_with_plain_unshared_parameters_are_summable() -> None:
    plain, shared, twice = (nn.Parameter(torch.ones(2)) for _ in range(3))
    own = Own(torch.ones(2))
    inner = nn.Parameter(torch.ones(2)) * 2
    params = {0: [plain], 1: [shared], 2: [shared], 3: [twice, twice], 4: [own], 5: [inner], 6: []}
    assert list(summable_stages(params)) == [0, 6]


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_stages_with_hooks_on_parameters_are_not_summed_by_the_engine(hook: str) -> None:
    hooked, free = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    params = summable_stages({0: [hooked], 1: [free]})
    handle = getattr(hooked, hook)(lambda *_: None)
    assert 0 not in EngineSums(params) and 1 in EngineSums(params)
    handle.remove()
    assert 0 in EngineSums(params)


def test_stages_with_frozen_parameters_are_not_summed_by_the_engine() -> None:
    param = nn.Parameter(torch.ones(2))
    params = summable_stages({0: [param]})
    param.requires_grad_(False)
    assert 0 not in EngineSums(params)


class TwoInOne(nn.Module):
    """Two weights with gradients that are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(1)
        self.one = nn.Parameter(torch.rand(36, generator=made, dtype=torch.double))
        self.other = nn.Parameter(torch.rand(36, generator=made, dtype=torch.double))

    def forward(self, value: Tensor) -> Tensor:
        return value @ (self.one.view(6, 6) + self.other.view(6, 6))


class Gate(nn.Module):
    """The gradients of input and weight are views of one memory, for micro-batches of two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(12, generator=torch.Generator().manual_seed(2), dtype=torch.double))

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(value.flatten() + self.weight.view(12)).view(2, 6)


class OwnLoss(nn.Module):
    """The gradient of its weight is a view of the gradient of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.double))

    def forward(self, value: Tensor) -> Tensor:
        return value.square().mean() + self.weight.squeeze()


def test_weights_that_are_first_used_by_a_later_micro_batch_are_summed_separately() -> None:
    net, early = TwoInOne(), nn.Parameter(torch.ones(6, dtype=torch.double))
    own = [early, *net.parameters()]
    one_by_one, engine = Sums({0: own}, {}), EngineSums(summable_stages({0: own}))
    for number in range(4):
        value = torch.rand(2, 6, dtype=torch.double)

        def output(value: Tensor = value, number: int = number) -> Tensor:
            return net(value * early) if number else value * early

        back = torch.rand(2, 6, dtype=torch.double)
        one_by_one.add_gradients(0, torch.autograd.grad([output()], own, [back], allow_unused=True))
        engine.add_microbatch(0, [output()], [back], [])
    found, wanted = dict(engine.summed_leaves()), dict(one_by_one.summed_leaves())
    assert found.keys() == wanted.keys() and all(torch.equal(found[param], wanted[param]) for param in own)


def test_gradients_that_a_hook_keeps_are_not_written_to() -> None:
    weight, kept = nn.Parameter(torch.rand(16)), []
    engine = EngineSums(summable_stages({0: [weight]}))
    for _ in range(3):
        square = weight.view(4, 4)
        square.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
        engine.add_microbatch(0, [torch.rand(4, 4) @ square], [torch.rand(4, 4)], [])
    assert len(kept) == 3 and all(torch.equal(gradient, copy) for gradient, copy in kept)


def test_a_sparse_sum_shares_no_memory_with_the_gradients() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    own, kept = [table.weight], []
    engine = EngineSums(summable_stages({0: own}))
    for number in range(2):
        rows = table(torch.tensor([number, 2]))
        rows.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
        engine.add_microbatch(0, [rows * 1.5], [torch.ones(2, 2)], [])
        (found,) = [gradient for _, gradient in engine.summed_leaves()]
        found._values().mul_(1)
        memories = {gradient.untyped_storage().data_ptr() for gradient, _ in kept}
        assert found._values().untyped_storage().data_ptr() not in memories
    assert found.to_dense().tolist() == [[1.5, 1.5], [1.5, 1.5], [3, 3]]
    assert all(torch.equal(gradient, copy) for gradient, copy in kept)


# -- in a pipeline
@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The stages with gradients that the engine has summed, once for each micro-batch."""
    stages: list[int] = []

    class Told(EngineSums):
        def add_microbatch(self, stage: int, *how: Any) -> list[Tensor | None]:
            stages.append(stage)
            return super().add_microbatch(stage, *how)

    monkeypatch.setattr(execution_, "EngineSums", Told)
    return stages


def modules(agents: list[Agent]) -> dict[int, nn.Module]:
    """Return the modules of the only pipeline, from its workers."""
    return {
        number: module
        for agent in agents[1:]
        for worker in agent.part(stage._Directory).workers.values()
        for number, module in worker.modules.items()
    }


class Writes(torch.autograd.Function):
    """Writes to the gradient that it gets, as no function should."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].mul_(2)


def writing_loss(output: Tensor, target: Tensor) -> Tensor:
    writes: Any = Writes.apply
    return torch.as_tensor(writes(functional.cross_entropy(output, target)))


def test_a_loss_that_writes_to_its_gradient_does_not_change_other_gradients(agents: list[Agent]) -> None:
    x, y = small.data(16)
    net = small.model()
    small.step_alike(small.pipeline(loss_fn=writing_loss, optimizer=small.SGD), net, writing_loss(net(x), y), x, y)


def first_of(output: Tensor, _target: Tensor) -> Tensor:
    return output


def mean_square(output: Tensor, _target: Tensor) -> Tensor:
    return output.square().mean()


SHARED = {
    "two weights": ([nn.Linear(6, 6), TwoInOne()], mean_square),
    "value and weight": ([nn.Linear(6, 6), Gate(), nn.Linear(6, 6), Gate()], mean_square),
    "loss and weight": ([nn.Linear(6, 6), OwnLoss()], first_of),
}


@pytest.mark.parametrize("workers", [small.WORKERS, ["worker1"]], ids=["two workers", "one"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("what", SHARED)
def test_gradients_that_share_memory_are_summed_separately(
    agents: list[Agent], used: list[int], what: str, schedule: str, workers: list[str]
) -> None:
    layers, loss_fn = SHARED[what]
    net, x = nn.Sequential(*layers).double(), torch.rand(8, 6, dtype=torch.double)
    names, params = zip(*net.named_parameters(), strict=True)
    wanted = [torch.zeros_like(param) for param in params]
    for part in x.split(2):
        for total, gradient in zip(wanted, torch.autograd.grad(loss_fn(net(part), part) / 4, params), strict=True):
            total += gradient
    chunks = len(layers) // len(workers)
    stages = split(net, workers, balance=[1] * len(layers))
    looped = {"gpipe": "bfs", "1f1b": "interleaved"}
    name = schedule if chunks == 1 else looped[schedule]
    with Pipeline(stages, name, 4, loss_fn, chunks=chunks).batch(x, torch.zeros(8)) as batch:
        small.same(batch.gradients(), dict(zip(names, wanted, strict=True)))
    assert sorted(set(used)) == [*range(len(layers))]


class Trains(nn.Module):
    """Runs a backward of its own loss in its forward, too; `.grad` keeps the latest gradients of that loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

    def forward(self, value: Tensor) -> Tensor:
        self.zero_grad()
        self.head(value.detach()).square().mean().backward()
        return self.body(value) + self.head(value)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p"])
def test_a_forward_that_runs_its_own_backward_sees_only_its_own_gradients(agents: list[Agent], schedule: str) -> None:
    net = nn.Sequential(Trains(), nn.Linear(6, 6).double())
    pipe = Pipeline(split(net, small.WORKERS, balance=[1, 1]), schedule, 4, functional.mse_loss, chunks=1)
    there = modules(agents)[0]
    x = torch.rand(8, 6, dtype=torch.double)
    with pipe.batch(x, x) as batch:
        found = batch.gradients()
    wanted = {name: torch.zeros_like(param) for name, param in net.named_parameters()}
    for part in x.split(2):
        loss = functional.mse_loss(net(part), part) / 4
        for total, gradient in zip(wanted.values(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
            total += gradient
    small.same(found, wanted)
    assert isinstance(there, nn.Sequential)
    for param, own in zip(there.parameters(), net[0].parameters(), strict=True):
        assert (param.grad is None) == (own.grad is None)
        torch.testing.assert_close(param.grad, own.grad)


def alike(pipe: Pipeline, samples: int = 21) -> None:
    x, y = small.data(samples)
    net = small.model()
    small.step_alike(pipe, net, functional.cross_entropy(net(x), y), x, y)


WAYS = {"gpipe": {}, "1f1b": {}, "interleaved": {}, "recompute": {"schedule": "gpipe", "recompute": "all"}}


@pytest.mark.parametrize("way", WAYS)
def test_plain_stages_are_summed_by_the_engine(agents: list[Agent], used: list[int], way: str) -> None:
    pipe = small.pipeline(optimizer=small.SGD, **(WAYS[way] or {"schedule": way}))
    alike(pipe)
    assert sorted(used) == sorted(4 * [*range(len(pipe.stages))])


@pytest.mark.parametrize("schedule", ["zb1p", "zbv"])
def test_schedules_with_split_backwards_are_not_summed_by_the_engine(
    agents: list[Agent], used: list[int], schedule: str
) -> None:
    pipe = small.pipeline(schedule=schedule, optimizer=small.SGD)
    pipe.step(*small.data(8))
    assert used == []


def test_a_schedule_with_whole_and_split_backwards_loses_no_gradients(agents: list[Agent], used: list[int]) -> None:
    def mixed(workers: int, microbatches: int, chunks: int = 1) -> Ops:
        return parse_ops("0F0 0F1 0B0 0I1 0W1\n1F0 1B0 1F1 1I1 1W1")

    alike(small.pipeline(schedule=mixed, microbatches=2, optimizer=small.SGD))
    assert used == []


def test_the_second_batch_of_an_accumulation_is_summed_one_by_one(agents: list[Agent], used: list[int]) -> None:
    pipe = small.pipeline(optimizer=small.SGD)
    x, y = small.data(16)
    net = small.model()
    for begin in (0, 8):
        (functional.cross_entropy(net(x[begin : begin + 8]), y[begin : begin + 8]) / 2).backward()
    with pipe.accumulate() as batch:
        batch.add(x[:8], y[:8])
        assert len(used) == 8
        batch.add(x[8:], y[8:])
        assert len(used) == 8
        small.same(batch.gradients(), small.grads(net))


def test_tied_weights_and_replicas_are_not_summed_by_the_engine(agents: list[Agent], used: list[int]) -> None:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    layers[2].weight = layers[0].weight
    x = torch.rand(8, 6)
    for stages in (split(layers, small.WORKERS, balance=[2, 1]), split(layers[:1], small.WORKERS, replicas=2)):
        with Pipeline(stages, "gpipe", 2, functional.mse_loss).batch(x, x):
            assert used == []


def test_a_weight_hook_sees_each_gradient_and_can_keep_it(agents: list[Agent], used: list[int]) -> None:
    pipe, kept = small.pipeline(optimizer=small.SGD), []
    weight = next(modules(agents)[1].parameters())
    weight.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))
    alike(pipe)
    assert len(kept) == 4 and all(torch.equal(gradient, copy) for gradient, copy in kept) and set(used) == {0}


class Checked(torch.autograd.Function):
    """Fails in the backward of large values."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.large = bool(value.abs().max() > 10)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if ctx.large:
            raise ValueError("too large")
        return gradients[0]


class Fails(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        checked: Any = Checked.apply
        return torch.as_tensor(checked(super().forward(value)))


@pytest.mark.parametrize("fails", [False, True])
def test_grad_on_the_workers_is_restored_after_a_step(agents: list[Agent], used: list[int], fails: bool) -> None:
    layers = [nn.Linear(6, 6), Fails(6, 6)]
    pipe = Pipeline(split(layers, small.WORKERS, balance=[1, 1]), "1f1b", 4, functional.mse_loss)
    params = [param for module in modules(agents).values() for param in module.parameters()]
    for param in params:
        param.grad = torch.full_like(param, 700.0)
    before = [param.grad for param in params]
    x = torch.ones(8, 6)
    x[5] = 1000.0 if fails else 1.0
    try:
        with pipe.batch(x, torch.zeros(8, 6)) as batch:
            assert not fails and all(gradient.abs().max() < 100 for gradient in batch.gradients().values())
    except ValueError:
        assert fails
    assert used
    until(lambda: all(param.grad is one for param, one in zip(params, before, strict=True)))
    assert all(bool((one == 700).all()) for one in before if one is not None)
