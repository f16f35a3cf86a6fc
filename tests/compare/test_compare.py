"""`cluster.compare`: reports, what it refuses and how it says so, captures of cells, and the assertion of tests."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rpcbench
from rpcbench.cells.cell_log import CellLog
from rpcbench.testing import assert_same_training

pytestmark = pytest.mark.process


def make_model(seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def draw_rows():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(5))


def step(model):
    loss = model(draw_rows()).square().mean()
    loss.backward()
    return loss


def make_copy(mesh):
    return make_model()


def step_on_rows(model, mesh):
    rows = draw_rows().chunk(mesh.size())[mesh.get_local_rank()]
    loss = model(rows).square().mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= mesh.size()
    return loss


def step_without_reduction(model, mesh):
    loss = model(draw_rows().chunk(mesh.size())[mesh.get_local_rank()]).square().mean()
    loss.backward()
    return loss


RIGHT = {"reference": (make_model, step), "parallel": (make_copy, step_on_rows)}
WRONG = {**RIGHT, "parallel": (make_copy, step_without_reduction)}


def test_a_right_program_has_a_report_with_the_learnt_layouts(four):
    report = four.compare(**RIGHT, mesh={"dp": 4})
    assert report.ok and report.first is None
    report.raise_if_wrong()
    *_, listed = four.agent.part(CellLog).table().values()
    assert listed["code"] == "# cluster.compare(step_on_rows), on each rank"
    assert report.layouts["0"] == "dp Shard(0)" and report.layouts["0.weight"] == "dp Replicate"
    text = str(report)
    assert text.startswith("Right: the ranks (dp=4) compute what one process computes, within round-off")
    assert "gradient 2.bias" in text and text.count("\n") > 10
    assert all(len(repr(each)) < 300 and each.word in repr(each) for each in report.verdicts)


def step_momentum(model, rate=0.1):
    loss = step(model)
    torch.optim.SGD(model.parameters(), rate, momentum=0.9).step()
    return loss


def step_at_other_rates(model, mesh):
    return step_momentum(model, 0.1 / (1 + mesh.get_local_rank()))


def test_one_of_two_replicas_that_steps_otherwise_has_drifted(four):
    """The other one is right: that is no other order of its rows."""
    programs = {"reference": (make_model, step_momentum), "parallel": (make_copy, step_at_other_rates)}
    report = four.compare(**programs, workers=["worker1", "worker2"])
    assert report.first.phase == "step" and "lr is 0.05 on rank 1 alone, and 0.1" in report.first.cause
    assert "step     0.weight momentum_buffer  rank Replicate" in str(report)


def step_on_uneven_rows(model, mesh):
    loss = model(draw_rows().split([1, 2, 2, 3])[mesh.get_local_rank()]).square().mean()
    loss.backward()
    return loss


def step_on_other_rows(model, mesh):
    wanted = torch.arange(8.0).flip(0).chunk(4)[mesh.get_local_rank()][:, None]
    loss = (model(draw_rows().chunk(4)[mesh.get_local_rank()]) - wanted).square().mean()
    loss.backward()
    return loss


def step_to_targets(model):
    loss = (model(draw_rows()) - torch.arange(8.0)[:, None]).square().mean()
    loss.backward()
    return loss


def test_a_mean_of_means_is_told_with_the_weights_that_are_right(four):
    first = four.compare(**{**RIGHT, "parallel": (make_copy, step_on_uneven_rows)}).first
    assert (first.phase, "A mean of means: ranks with" in first.cause) == ("loss", True)
    assert first.cause.endswith("show the weights: 1/8 on rank 0, 2/8 on ranks 1 and 2, 3/8 on rank 3")
    programs = {"reference": (make_model, step_to_targets), "parallel": (make_copy, step_on_other_rows)}
    first = four.compare(**programs).first
    assert first.phase == "loss" and "weights" not in first.cause and "or has other targets than" in first.cause


class WithPlaces(nn.Module):
    """Positions are read from a table, as many as the rows that are there."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.layers = make_model()

    def forward(self, rows):
        return self.layers(rows + self.table(torch.arange(len(rows))))


def make_with_places():
    torch.manual_seed(3)
    return WithPlaces()


def test_positions_that_begin_with_0_on_each_rank_are_no_same_rows(four):
    report = four.compare(reference=(make_with_places, step), parallel=(make_with_places, step_on_rows))
    assert (report.first.phase, report.first.name) == ("forward", "table")
    assert "rows, positions or masks do not move along" in report.first.cause


def test_a_wrong_program_is_an_assertion_with_the_report(four):
    report = four.compare(**WRONG)
    assert (report.first.phase, report.first.name, report.first.ranks) == ("gradient", "0.weight", (0, 1, 2, 3))
    assert report.first.error > report.first.allowed > 0
    assert "mean of the ranks' values along rank is the reference" in report.first.cause
    with pytest.raises(AssertionError, match=r"Wrong, first at gradient 0\.weight"):
        report.raise_if_wrong()
    assert "✗ gradient 0.weight" in str(report)


def no_loss(model):
    step(model)


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.other = make_model()


def another_name(mesh):
    return Other()


def step_of_other(model, mesh):
    return step_on_rows(model.other, mesh)


def random_model():
    torch.seed()
    return nn.Linear(4, 2)


def random_step(model):
    torch.seed()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"reference": (make_model, no_loss)}, rpcbench.CompareError, "no_loss has returned None, and not its loss"),
        ({"parallel": (make_copy, no_loss)}, rpcbench.CompareError, "None on all ranks.*rank of the last stage"),
        ({"reference": (list, step)}, rpcbench.CompareError, "returned \\[\\], which is no torch.nn.Module"),
        ({"reference": (random_model, random_step)}, rpcbench.CompareError, "random: weight begins with other values"),
        ({"reference": (make_model, random_step)}, rpcbench.CompareError, "random: the model gets other inputs"),
        ({"parallel": (another_name, step_of_other)}, rpcbench.CompareError, "no module and no parameter in common"),
        ({"parallel": make_copy}, TypeError, "parallel is a pair of functions"),
        ({"mesh": {"dp": 3}}, ValueError, "3 places, and this cluster has 4 workers"),
        ({"steps": 0}, ValueError, "at least one step"),
    ],
)
def test_what_cannot_be_compared_is_an_error_that_says_why(four, change, kind, text):
    with pytest.raises(kind, match=text):
        four.compare(**{**RIGHT, **change})
    assert four.compare(**RIGHT).ok, "the workers are as before"


def fail_on_rank(model, mesh):
    if mesh.get_local_rank() == 2:
        raise ArithmeticError("of rank 2")
    return step_on_rows(model, mesh)


def test_the_error_of_a_rank_is_raised_and_the_workers_keep_nothing(four):
    with pytest.raises(ArithmeticError, match="of rank 2"):
        four.compare(**{**RIGHT, "parallel": (make_copy, fail_on_rank)})
    count = "from rpcbench.launch import compare_programs\nlen(compare_programs.captures)"
    assert set(four.run("all", count).values()) == {0}


CELL = """
import torch.distributed as dist, rpcbench
from rpcbench.distributed import init_process_group, destroy_process_group
from test_compare import make_copy, step_on_rows, step_without_reduction
from torch.distributed.device_mesh import init_device_mesh
init_process_group()
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
model = make_copy(mesh)
with rpcbench.capture(model) as run:
    for _ in range(2):
        run.end_step({step}(model, mesh))
        model.zero_grad()
destroy_process_group()
"""


def step_and_zero(model):
    model.zero_grad()
    return step(model)


def test_cells_of_ones_own_are_captured_and_compared(four):
    four.run("all", CELL.format(step="step_on_rows"))
    report = four.compare_captures("run", (make_model, step_and_zero), mesh={"dp": 4})
    report.raise_if_wrong()
    assert {each.key.turn for each in report.verdicts} == {0, 1}
    four.run("all", CELL.format(step="step_without_reduction"))
    assert four.compare_captures("run", (make_model, step_and_zero)).first.name == "0.weight"
    with pytest.raises(rpcbench.CompareError, match="'nothing' is no capture on this worker"):
        four.compare_captures("nothing", (make_model, step))


def test_a_capture_that_has_ended_forgets_the_model_and_takes_no_step():
    model = make_model()
    with rpcbench.capture(model) as run:
        loss = step(model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None, "a model with its gradients is large"
    with pytest.raises(rpcbench.CompareError, match="inside of the block"):
        run.end_step(loss)


def test_a_test_of_a_project_asserts_the_same_training():
    assert assert_same_training((make_model, step), (make_copy, step_on_rows), {"dp": 2}).ok
    with pytest.raises(AssertionError, match="a reduction is left out"):
        assert_same_training((make_model, step), (make_copy, step_without_reduction), {"dp": 2})


def test_functions_of_one_argument_and_partial_functions(four):
    report = four.compare(
        reference=(partial(make_model, 4), step), parallel=(lambda: make_model(4), lambda model: step(model))
    )
    assert report.ok, "every rank computes all of it"


def test_workers_that_are_kernels_and_functions_of_a_notebook():
    with rpcbench.Cluster(2, kind="kernel") as cluster:
        assert cluster.compare(**RIGHT, mesh={"dp": 2}).ok
        first = cluster.compare(**WRONG, mesh={"dp": 2}).first
        assert (first.phase, first.name) == ("gradient", "0.weight")
