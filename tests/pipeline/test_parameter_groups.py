"""Parameter groups: equal to those of one process for any split, also with checkpoints and tied weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import data, model, pipeline, same
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import Pipeline, PipelineError, lazy, split
from rpcbench.pipeline.split import check_patterns, parameter_groups
from rpcbench.runtime.agent import Agent

ADAM: Any = torch.optim.AdamW
OPTIONS = {"lr": 0.05, "weight_decay": 0.5}
PATTERNS = {"*.bias": {"weight_decay": 0.0}, "3.*": {"lr": 0.2}}


def by_dimension(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    return [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]


def named(*names: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.ones(1))) for name in names]


def test_a_parameter_is_in_the_group_of_its_first_pattern_and_each_stage_has_all_groups() -> None:
    own = named("0.weight", "3.bias", "3.weight")
    found = parameter_groups(PATTERNS, own)
    names = [[name for p in group.pop("params") for name, other in own if p is other] for group in found]
    assert names == [["0.weight"], ["3.bias"], ["3.weight"]] and found == [{}, *PATTERNS.values()]
    assert [len(group["params"]) for group in parameter_groups(PATTERNS, named("3.bias"))] == [0, 1, 0]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda named: [parameter for _, parameter in named], r"groups as \{'params': \[...\]\}"),
        (lambda named: [{"params": named}], "not among those it got"),
        (lambda named: [{"params": [nn.Parameter(torch.ones(1))]}], "not among those it got"),
    ],
)
def test_a_group_function_with_an_invalid_result_is_refused(function: Any, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        parameter_groups(function, named("a"))


def test_a_pattern_without_a_matching_parameter_is_refused() -> None:
    stages = split(model(), ["worker1", "worker2"]).cut()
    check_patterns({"0.*": {}, "3.bias": {}}, stages)
    with pytest.raises(PipelineError, match=r"for 'norm\.\*', but no parameter has such a name: 0\.weight"):
        check_patterns({"norm.*": {}}, stages)
    check_patterns({"norm.*": {}}, split([lazy(nn.Linear, 2, 2), nn.Tanh()], ["worker1"], balance=[2]).cut())


def test_invalid_parameter_groups_are_refused(agents: list[Agent]) -> None:
    with pytest.raises(PipelineError, match="third item of optimizer must be a dict"):
        pipeline(optimizer=(ADAM, OPTIONS, [{"params": []}]))


class Grouped(torch.optim.AdamW):
    """An optimizer that makes its own groups of the parameters that it gets."""

    def __init__(self, params: list[nn.Parameter], lr: float, decay: float) -> None:
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": decay},
            {"params": [p for p in params if p.ndim < 2]},
        ]
        super().__init__(groups, lr=lr, weight_decay=0.0)


def test_a_class_that_makes_its_own_groups_trains_like_one_process(agents: list[Agent], tmp_path: Path) -> None:
    net, (x, y) = model(), data(12)
    optimizer = Grouped(list(net.parameters()), lr=0.05, decay=0.5)
    pipe = pipeline(model(), optimizer=(Grouped, {"lr": 0.05, "decay": 0.5}))
    for step in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        pipe.step(x, y)
        if step == 1:
            pipe.save(tmp_path)
            pipe.load(tmp_path)
    same(pipe.state_dict(), dict(net.state_dict()))


@pytest.mark.parametrize("made", [by_dimension, partial(torch.optim.SGD, lr=0.1), lambda params: None])
def test_an_optimizer_that_is_no_class_is_refused(agents: list[Agent], made: Any) -> None:
    with pytest.raises(PipelineError, match=r"must begin with a class such as torch.optim.SGD.* is the third item"):
        pipeline(optimizer=(made, {}))


def reference(net: nn.Sequential, groups: Any) -> torch.optim.Optimizer:
    return ADAM(parameter_groups(groups, list(net.named_parameters())), **OPTIONS)


@pytest.mark.parametrize("groups", [PATTERNS, by_dimension])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_parameter_groups_train_like_one_process_also_after_a_checkpoint(
    agents: list[Agent], tmp_path: Path, schedule: str, groups: Any
) -> None:
    net, (x, y) = model(), data(12)
    optimizer = reference(net, groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    moving = (torch.optim.lr_scheduler.StepLR, {"step_size": 1, "gamma": 0.5})
    pipe = pipeline(schedule=schedule, optimizer=(ADAM, OPTIONS, groups), lr_scheduler=moving)
    for turn in range(4):
        if turn == 2:
            pipe.save(tmp_path)
            pipe = pipeline(schedule="gpipe", optimizer=(ADAM, OPTIONS, groups), lr_scheduler=moving)
            pipe.load(tmp_path)
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        scheduler.step()
        pipe.step(x, y)
        pipe.lr_scheduler.step()
        same(pipe.state_dict(), net.state_dict())
    assert pipe.lr == pytest.approx(OPTIONS["lr"] / 16)


def test_a_checkpoint_with_other_groups_is_refused_and_changes_nothing(agents: list[Agent], tmp_path: Path) -> None:
    pipeline(optimizer=(ADAM, OPTIONS, PATTERNS)).save(tmp_path)
    pipe = pipeline(model().double(), optimizer=(ADAM, OPTIONS))
    pipe.step(*data(12))
    before = pipe.state_dict()
    with pytest.raises(PipelineError, match=r"has 3 groups of parameters, but optimizer= makes 1 here"):
        pipe.load(tmp_path)
    same(pipe.state_dict(), before)


def test_copies_of_a_tied_weight_are_in_the_group_of_the_first_copy(agents: list[Agent]) -> None:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    net[2].weight = net[0].weight
    x = torch.rand(12, 6, dtype=torch.double)
    optimizer = (torch.optim.SGD, {"lr": 0.1}, {"2.*": {"lr": 1.0}})
    pipe = Pipeline(split(net, ["worker1", "worker2"], balance=[1, 2]), "1f1b", 4, functional.mse_loss, optimizer)
    pipe.step(x, x)
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], state["2.weight"])
