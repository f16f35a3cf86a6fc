"""Models cut into stages: equal outputs, the same names, and invalid cuts are refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.split import Stage, Stages, split

TWO = ["worker1", "worker2"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def nested() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    return nn.Sequential(OrderedDict(embed=nn.Linear(8, 4), layers=layers, head=nn.Linear(4, 2)))


def names(stages: list[Stage]) -> list[tuple[str, ...]]:
    return [stage.names for stage in stages]


def run(stages: list[Stage], x: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        x = stage.module(x)
    return x


@pytest.mark.parametrize("model", [mlp(), nested()], ids=["flat", "nested"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_the_stages_in_sequence_compute_the_same_as_the_model(model: nn.Sequential, workers: int) -> None:
    stages = split(model, [f"worker{n}" for n in range(1, workers + 1)]).cut()
    assert [(stage.index, stage.worker) for stage in stages] == [(n, f"worker{n + 1}") for n in range(workers)]
    x = torch.randn(5, 8)
    assert torch.equal(run(stages, x), model(x))


@pytest.mark.parametrize("model", [mlp(), nested()], ids=["flat", "nested"])
def test_the_state_dicts_of_all_stages_together_equal_that_of_the_model(model: nn.Sequential) -> None:
    stages = split(model, TWO).cut()
    gathered = {stage.unsplit_name(own): value for stage in stages for own, value in stage.module.state_dict().items()}
    assert list(gathered) == list(model.state_dict())
    assert all(gathered[name].data_ptr() == value.data_ptr() for name, value in model.state_dict().items())


def test_a_stage_lists_its_tensors_under_the_names_of_the_model() -> None:
    model = nested()
    told = dict(split(model, TWO, at=["layers.1"]).cut()[1].named_tensors())
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert set(told) == {name for name in own if not name.startswith(("embed.", "layers.0."))}
    assert all(told[name] is own[name] for name in told)


def test_the_default_balance_is_by_parameters() -> None:
    assert names(split(mlp(), TWO).cut()) == [("0", "1"), ("2", "3", "4")]


def test_a_list_as_balance_counts_modules() -> None:
    assert names(split(mlp(), TWO, balance=[1, 4]).cut()) == [("0",), ("1", "2", "3", "4")]
    assert names(split(nested(), TWO, balance=[2, 1]).cut()) == [
        ("embed", "layers.0", "layers.1", "layers.2"),
        ("head",),
    ]


def test_names_in_at_are_the_first_modules_of_stages() -> None:
    assert names(split(nested(), TWO, at=["layers.2"]).cut()) == [
        ("embed", "layers.0", "layers.1"),
        ("layers.2", "head"),
    ]
    assert names(split(nested(), TWO, at=["layers"]).cut())[0] == ("embed",)
    three = split(nested(), [*TWO, "worker3"], at=["layers", "head"]).cut()
    assert names(three) == [("embed",), ("layers.0", "layers.1", "layers.2"), ("head",)]


def test_a_name_in_at_does_not_match_a_longer_name() -> None:
    model = nn.Sequential(OrderedDict(first=nn.Tanh(), conv10=nn.Tanh(), conv1=nn.Tanh()))
    assert names(split(model, TWO, at=["conv1"]).cut()) == [("first", "conv10"), ("conv1",)]


def test_several_chunks_are_placed_on_the_workers_in_turn() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    assert [stage.worker for stage in split(model, TWO).cut([0, 1, 0, 1])] == TWO * 2
    assert names(split(model, TWO, balance=[1, 2, 2, 3]).cut([0, 1, 0, 1]))[3] == ("5", "6", "7")


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList])
def test_lists_of_modules_can_be_split(kind: type) -> None:
    model = kind([nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)])
    assert names(split(model, TWO).cut()) == [("0", "1"), ("2",)]


def test_a_module_used_twice_is_run_twice() -> None:
    shared = nn.Tanh()
    model = nn.Sequential(nn.Linear(4, 4), shared, nn.Linear(4, 4), shared)
    stages = split(model, TWO).cut()
    assert names(stages) == [("0", "1"), ("2", "3")]
    x = torch.randn(3, 4)
    assert torch.equal(run(stages, x), model(x))


def test_a_sequential_with_its_own_forward_or_a_hook_is_not_cut() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + super().forward(x)

    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked.register_forward_hook(lambda module, args, out: 2 * out)
    model = nn.Sequential(Residual(nn.Linear(4, 4), nn.ReLU()), hooked, nn.Sequential())
    stages = split(model, [*TWO, "worker3"]).cut()
    assert names(stages) == [("0",), ("1",), ("2",)]
    x = torch.randn(3, 4)
    assert torch.equal(run(stages, x), model(x))


def test_a_cut_between_tied_buffers_is_refused() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    with pytest.raises(PipelineError, match=r"'2\.running_mean' of stage 1 is tied to '0\.running_mean'"):
        split(nn.Sequential(norm, nn.Linear(4, 4), norm), TWO, balance=[2, 1]).cut()


def test_parameters_of_two_stages_in_one_memory_are_refused_unless_they_are_the_same() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = nn.Parameter(net[0].weight.data)
    split(net, ["a", "b"], balance=[2, 1]).cut()  # both in one stage
    with pytest.raises(PipelineError, match=r"'1\.weight' of stage 1 has the memory of '0\.weight' of stage 0, but is"):
        split(net, ["a", "b"], balance=[1, 2]).cut()
    net[1].weight = net[0].weight
    split(net, ["a", "b"], balance=[1, 2]).cut()


@pytest.mark.parametrize("balance", ["params", [1, 2]])
def test_a_parameter_without_a_shape_is_refused_with_the_remedy(balance: Any) -> None:
    with pytest.raises(PipelineError, match=r"'weight' of module '0' \(LazyLinear\) has no shape yet: call the model"):
        split(nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 2)), ["a", "b"], balance)


def test_tied_parameters_are_counted_once() -> None:
    big = nn.Linear(10, 10)
    model = nn.Sequential(big, big, big, nn.Linear(10, 5), nn.Linear(5, 10))
    assert names(split(model, TWO).cut()) == [("0", "1", "2"), ("3", "4")]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"balance": [2, 2]}, "shares out 4 modules, but the model has 5"),
        ({"balance": [5, 0]}, "at least 1"),
        ({"balance": [2.5, 2.5]}, "at least 1"),
        ({"balance": [1, 1, 3]}, "3 stages for 2 workers"),
        ({"balance": [5]}, "1 stage for 2 workers"),
        ({"balance": "speed"}, "unknown balance 'speed'; there is 'params', 'time', 'memory'"),
        ({"balance": [2, 3], "at": ["2"]}, "not both"),
        ({"at": ["layer.2"]}, "cannot be cut at 'layer.2'; its modules are 0, 1, 2, 3, 4"),
        ({"at": ["0"]}, "no module is left for the stage before '0'"),
        ({"at": ["3", "1"]}, "no module is left for the stage before '1'"),
        ({"at": "2"}, r"at=\['2'\]"),
        ({"at": ["1", "2"]}, "3 stages for 2 workers"),
        ({"workers": []}, "list of names"),
        ({"workers": "worker1"}, "list of names"),
        ({"workers": [1, 2]}, "list of names"),
        ({"workers": ["worker1", "worker1"]}, "'worker1' is named twice"),
        ({"workers": [f"worker{n}" for n in range(6)]}, "6 stages need at least 6 modules, but the model has 5"),
    ],
)
def test_invalid_arguments_of_split_are_refused(arguments: dict, told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        split(mlp(), **{"workers": TWO, **arguments})


def test_a_split_with_more_stages_than_the_schedule_is_refused() -> None:
    plan = split(mlp(), TWO, balance=[1, 1, 1, 2])
    with pytest.raises(PipelineError, match=r"the split has 4 stages, but this schedule runs 2 on worker1, worker2"):
        plan.cut()
    assert len(plan.cut([0, 1, 0, 1])) == 4


def test_more_chunks_than_modules_are_refused() -> None:
    with pytest.raises(PipelineError, match="6 stages need at least 6 modules, but the model has 5"):
        split(mlp(), TWO).cut([0, 1] * 3)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ReLU(), nn.ModuleDict(), "model"])
def test_a_model_that_is_no_sequence_of_modules_is_refused(model: object) -> None:
    with pytest.raises(PipelineError, match=f"{type(model).__name__} cannot be cut.*nn.Sequential"):
        split(model, TWO)  # type: ignore[arg-type]


def test_a_list_with_an_item_that_is_no_module_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"item 1 of the list is <built-in .*relu.*>, not a torch\.nn\.Module"):
        split([nn.Linear(2, 2), torch.relu], TWO)  # type: ignore[list-item]


def test_split_cuts_the_model_only_when_cut_is_called() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    plan = split(model, TWO)
    assert isinstance(plan, Stages)
    model[1].running_mean = model[0].running_mean
    with pytest.raises(PipelineError, match="tied"):
        plan.cut()
