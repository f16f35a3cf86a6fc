"""Pipelines that the notebook drives, compared with one process: schedules are right, and wrong twins are explained."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import rpcbench
from rpcbench.pipeline import Pipeline, schedules, split, traced
from rpcbench.testing import assert_same_training

pytestmark = pytest.mark.process

SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.feed, self.dropout = nn.LayerNorm(16), nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(functional.gelu(self.feed(self.norm(x))))


class Branches(nn.Module):
    """A forward that only a trace can be cut from."""

    def __init__(self):
        super().__init__()
        self.enter, self.block, self.leave, self.side = nn.Linear(6, 16), Block(), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(self.block(x)) + self.side(x)


def make_model(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), Block(), Block(), nn.Linear(16, 4))


def make_tied():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), Block(), nn.Linear(16, 16), nn.Linear(16, 4))
    model[3].weight = model[1].weight
    return model


def make_branches():
    torch.manual_seed(3)
    return Branches()


def draw_batch(samples=8):
    drawn = torch.randn(samples, 10, generator=torch.Generator().manual_seed(5))
    return drawn[:, :6], drawn[:, 6:]


def run_backward(model, samples=8):
    x, y = draw_batch(samples)
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def step(model, samples=8):
    if not hasattr(model, "optimizer"):
        model.optimizer = SGD[0](model.parameters(), **SGD[1])
    loss = run_backward(model, samples)
    model.optimizer.step()
    model.zero_grad()
    return loss


def make_pipeline(make=make_model, workers=2, replicas=1, **options):
    stages = split(make(), [f"worker{n}" for n in range(1, workers + 1)], replicas=replicas)
    given = {"microbatches": 4, "loss_fn": functional.mse_loss, "optimizer": SGD, **options}
    return Pipeline(stages, **given)


def step_pipeline(pipe, samples=8):
    return pipe.step(*draw_batch(samples)).loss


def drop_gradients(pipe):
    with pipe.batch(*draw_batch()) as batch:
        return batch.loss


def step_twice_added(pipe):
    x, y = draw_batch()
    with pipe.accumulate() as batch:
        for rows in (slice(0, 5), slice(5, 8)):
            batch.add(x[rows], y[rows])
        batch.apply()
    return batch.loss


@pytest.mark.parametrize("schedule", schedules.schedule_names())
def test_a_pipeline_of_each_schedule_is_right(four, schedule):
    programs = {"reference": (make_model, step), "parallel": (partial(make_pipeline, schedule=schedule), step_pipeline)}
    report = four.compare(**programs, steps=2, driver=True)
    report.raise_if_wrong()
    right = {(each.key.phase, each.key.name) for each in report.verdicts if each.word == "right" and each.key.turn}
    assert {("forward", "1.feed"), ("loss", ""), ("backward", "0"), ("gradient", "2.norm.weight")} <= right
    assert {("step", "3.bias"), ("forward", "2")} <= right


TEN_ROWS = partial(step, samples=10), partial(step_pipeline, samples=10)


@pytest.mark.parametrize(
    ("make", "options", "steps"),
    [
        (make_model, {"recompute": "all"}, (step, step_pipeline)),
        (make_model, {"recompute": "except_last", "schedule": "zbv"}, (step, step_pipeline)),
        (make_model, {"workers": 4, "replicas": 2}, TEN_ROWS),
        (make_model, {"workers": 4, "replicas": 2, "microbatches": 2, "schedule": "gpipe"}, TEN_ROWS),
        (make_model, {"autocast": torch.bfloat16}, (step, step_pipeline)),
        (make_model, {"optimizer": None}, (run_backward, drop_gradients)),
        (make_model, {}, (step, step_twice_added)),
        (make_tied, {}, (step, step_pipeline)),
    ],
)
def test_a_pipeline_with_options_is_right(four, make, options, steps):
    parallel = partial(make_pipeline, make, **options), steps[1]
    four.compare(reference=(make, steps[0]), parallel=parallel, driver=True).raise_if_wrong()


def test_a_traced_model_has_its_parameters_compared(four):
    parallel = partial(make_pipeline, lambda: traced(make_branches(), draw_batch()[0])), step_pipeline
    report = four.compare(reference=(make_branches, step), parallel=parallel, driver=True)
    report.raise_if_wrong()
    right = {(each.key.phase, each.key.name) for each in report.verdicts if each.word == "right"}
    assert {("gradient", "block.feed.weight"), ("step", "side.weight"), ("loss", "")} <= right


def test_replicas_have_layouts_by_the_names_of_a_mesh(four):
    programs = {
        "reference": (make_model, step),
        "parallel": (partial(make_pipeline, workers=4, replicas=2), step_pipeline),
    }
    report = four.compare(**programs, mesh={"dp": 2, "pp": 2}, driver=True)
    assert report.ok and report.layouts["0.weight"] == "dp Replicate"


def all_but_one(named):
    return [{"params": [parameter for name, parameter in named if name != "2.feed.weight"]}]


def make_with_other_block():
    model = make_model()
    model[2].feed.reset_parameters()
    return model


def leave_out_a_microbatch(pipe):
    x, y = draw_batch()
    return pipe.step(x[:6], y[:6]).loss


OTHER_RATE = (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9})
STILL = "has not moved in the step"
WRONG = {
    "not divided": ({"loss_reduction": "sum"}, step_pipeline, "loss", "", "4 times too large, the number of micro-"),
    "forgotten": ({"optimizer": (*SGD, all_but_one)}, step_pipeline, "step", "2.feed.weight", f"{STILL}, on rank 1"),
    "left out": ({}, leave_out_a_microbatch, "forward", "0", "a micro-batch is left out"),
    "own seed": ({"make": make_with_other_block}, step_pipeline, "initial", "2.feed.weight", "with the same seed"),
    "other rate": ({"optimizer": OTHER_RATE}, step_pipeline, "step", "0.weight", "lr is 0.2 on rank 0"),
    "no optimizer": ({"optimizer": None}, drop_gradients, "step", "0.weight", f"{STILL}, on rank 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pipeline_is_explained(four, name):
    options, wrong_step, phase, place, cause = WRONG[name]
    parallel = partial(make_pipeline, **options), wrong_step
    first = four.compare(reference=(make_model, step), parallel=parallel, driver=True).first
    assert (first.phase, first.name) == (phase, place), first
    assert cause in first.cause and first.ranks and first.error > first.allowed


def count_hooks(rref):
    modules = list(rref.local_value().modules())
    return len(modules), sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)


class StepError(Exception):
    pass


def test_the_error_of_a_step_is_raised_and_the_pipeline_goes_on(four):
    made = []

    def make():
        made.append(make_pipeline())
        return made[0]

    def fail(pipe):
        with pipe.batch(*draw_batch()):
            raise StepError("in the driver")

    with pytest.raises(StepError, match="in the driver"):
        four.compare(reference=(make_model, step), parallel=(make, fail), driver=True)
    stages = list(made[0].worker_group.modules.values())
    assert [rref.owner_name() for rref in stages] == ["worker1", "worker2"]
    for rref in stages:
        count, hooks = four.rpc_sync(rref.owner_name(), count_hooks, (rref,))
        assert count > 1 and hooks == 0
    kept = "from rpcbench.launch import compare_programs\nlen(compare_programs.captures)"
    assert set(four.run("all", kept).values()) == {0}
    alone = functional.mse_loss(make_model().eval()(draw_batch()[0]), draw_batch()[1]).item()
    assert made[0].evaluate(*draw_batch())["loss"] == pytest.approx(alone, rel=1e-5)


def make_on_mesh(mesh):
    return make_model()


PIPELINE = make_pipeline, step_pipeline


@pytest.mark.parametrize(
    ("parallel", "options", "kind", "text"),
    [
        (
            (lambda: make_pipeline(), step_pipeline),
            {},
            rpcbench.CompareError,
            "drives, as a pipeline or by RPC, is compared",
        ),
        (
            (make_on_mesh, step),
            {"driver": True},
            rpcbench.CompareError,
            "make_on_mesh runs in this process and gets no arg",
        ),
        ((make_model, step), {"driver": True}, rpcbench.CompareError, "no part on a worker"),
        (
            (make_pipeline, Pipeline.evaluate),
            {"driver": True},
            rpcbench.CompareError,
            "evaluate .* gets the model alone",
        ),
        ((make_pipeline, lambda pipe: pipe), {"driver": True}, rpcbench.CompareError, "and not its loss"),
        (PIPELINE, {"driver": True, "workers": "worker1"}, rpcbench.CompareError, "is on worker2, which is not among"),
        (PIPELINE, {"driver": True, "backend": "gloo"}, ValueError, "without a process group"),
    ],
)
def test_what_cannot_be_driven_is_an_error_that_says_why(four, parallel, options, kind, text):
    with pytest.raises(kind, match=text):
        four.compare(reference=(make_model, step), parallel=parallel, **options)


def test_a_test_of_a_project_asserts_the_same_training_of_a_pipeline():
    assert assert_same_training((make_model, step), PIPELINE, {"pp": 2}, driver=True).ok
