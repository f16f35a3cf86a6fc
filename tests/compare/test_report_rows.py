"""Reports as rows: what panels draw of them, where the first wrong value differs, and the tables of the last report."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rpcbench.compare.layouts import CUT, SUM, WHOLE, Layout, MeshShare
from rpcbench.compare.report_rows import Comparisons, draw_layout, report_tables
from rpcbench.panels import PANELS
from rpcbench.telemetry import collector


def layout(*shares):
    return Layout(tuple(MeshShare(*each) for each in shares), tuple(range(len(shares))))


def test_a_layout_is_drawn_as_blocks_of_a_box():
    assert draw_layout(layout((CUT, 0)), (2,)) == (((0, 0, 1, 0.5),), ((0, 0.5, 1, 0.5),))
    assert draw_layout(layout((CUT, 2)), (2,)) == (((0, 0, 0.5, 1),), ((0.5, 0, 0.5, 1),))
    assert draw_layout(layout((WHOLE,), (SUM,)), (1, 2)) == (((0, 0, 1, 1),),) * 2
    nested = draw_layout(layout((CUT, 0), (CUT, 0)), (2, 2))
    assert [block for (block,) in nested] == [(0, n / 4, 1, 0.25) for n in range(4)]
    assert draw_layout(layout((CUT, 0), (CUT, 1)), (2, 2))[2] == ((0, 0.5, 0.5, 0.5),)
    assert draw_layout(layout((CUT, 0, "zig-zag")), (2,))[0] == ((0, 0, 1, 0.25), (0, 0.75, 1, 0.25))
    assert draw_layout(layout((CUT, 1, "in 2 parts")), (2,))[1] == ((0.25, 0, 0.25, 1), (0.75, 0, 0.25, 1))
    assert len(draw_layout(layout((CUT, 0, "round robin")), (4,))[0]) == 12


# -- with workers
def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 80), nn.GELU(), nn.Linear(80, 2))


def step(model):
    loss = model(torch.randn(8, 4, generator=torch.Generator().manual_seed(5))).square().mean()
    loss.backward()
    return loss


def make_with(change, mesh):
    model = make_model()
    change(model, mesh.get_local_rank())
    return model


def spoil_corner(model, rank):
    if rank == 2:
        model[0].weight.data[:20, 0] += 1.0


def spoil_shape(model, rank):
    model[0], model[2] = nn.Linear(4, 10), nn.Linear(10, 2)


def spoil_number(model, rank):
    if rank == 1:
        model[2].bias.data[1] = torch.nan


def drop_gradient(model, mesh):
    loss = step(model)
    if dist.get_rank() == 3:
        model[0].bias.grad = None
    return loss


def compare(cluster, change=None, parallel_step=step):
    make = partial(make_with, change or (lambda model, rank: None))
    report = cluster.compare(reference=(make_model, step), parallel=(make, parallel_step), mesh={"dp": 4})
    tables = report_tables(report)
    assert json.loads(json.dumps(tables, allow_nan=False)) == tables, "plain, and all numbers finite"
    return report, tables


def first_row(tables):
    return tables["verdicts"][tables["comparisons"]["0"]["first"]]


@pytest.mark.process
def test_a_right_report_as_rows(four):
    report, tables = compare(four)
    (comparison,) = tables["comparisons"].values()
    assert (comparison["ok"], comparison["first"], comparison["names"], comparison["sizes"]) == (True, "", ["dp"], [4])
    assert comparison["words"] == str(report).splitlines()[0] and comparison["values"] == len(tables["verdicts"])
    assert {row["word"] for row in tables["verdicts"].values()} == {"right"}
    assert not any(row["maps"] or row["missing"] or row["phase"] == "input" for row in tables["verdicts"].values())
    assert {row["layout"] for row in tables["verdicts"].values()} == {*tables["layouts"]} == {"dp Replicate"}
    assert tables["layouts"]["dp Replicate"]["boxes"] == [[[0.0, 0.0, 1.0, 1.0]]] * 4


@pytest.mark.process
def test_a_map_shows_where_the_first_wrong_value_differs(four):
    _, tables = compare(four, spoil_corner)
    row = first_row(tables)
    assert (row["phase"], row["name"], [rank for rank, error in row["errors"] if error]) == ("initial", "0.weight", [2])
    assert [(ranks, shape) for ranks, shape, _ in row["maps"]] == [([n], [80, 4]) for n in range(4)]
    cells = [torch.tensor(cells) for _, _, cells in row["maps"]]
    assert [each.shape for each in cells] == [(32, 4)] * 4 and [int(each.sum()) for each in cells][:2] == [0, 0]
    assert cells[2][:8, 0].tolist() == [100] * 8 and int(cells[2].sum()) == 800, "twenty rows of eighty, in one column"
    assert row["largest"] == pytest.approx(1.0, abs=1e-6), "the scale of the maps"
    assert sum(bool(each["maps"]) for each in tables["verdicts"].values()) == 1


@pytest.mark.process
@pytest.mark.parametrize("change", [spoil_shape, spoil_number])
def test_values_that_have_no_number_of_an_error(four, change):
    _, tables = compare(four, change)
    row = first_row(tables)
    assert row["word"] == "wrong" and row["error"] is None
    if change is spoil_shape:
        assert row["errors"] == [] == row["maps"]
    else:
        assert row["errors"][1] == [1, None] and row["maps"][1][2] == [[0, 100]] and row["largest"] is None


@pytest.mark.process
def test_ranks_that_lack_a_value(four):
    _, tables = compare(four, parallel_step=drop_gradient)
    row = first_row(tables)
    assert (row["phase"], row["name"]) == ("gradient", "0.bias")
    assert (row["missing"], row["ranks"], row["error"]) == ([3], [0, 1, 2], None)


@pytest.mark.process
def test_panels_and_records_get_the_last_report(four):
    panel = PANELS["compare"](collector.current_collector())
    _, wrong = compare(four, spoil_corner)
    assert panel.snapshot().text.startswith("comparison of")
    assert four.agent.part(Comparisons).latest_table("comparisons") == wrong["comparisons"]
    _, right = compare(four)
    view = panel.look(panel._collect_world())
    panel.close()
    assert view["values"] == right["verdicts"] and view["comparisons"]["0"]["ok"]
