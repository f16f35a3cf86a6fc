"""`rpcbench.simulate`: roles, figures of the world, the report."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, distribute_tensor

import rpcbench
from rpcbench.launch.plan_layouts import enumerate_meshes
from rpcbench.launch.simulate_programs import find_roles, play_rank
from rpcbench.simulation.world_pictures import memory_columns, memory_picture


def program(mesh):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    group = mesh.get_group("dp")

    def step():
        model(torch.randn(1024, 256)).sum().backward()
        for each in model.parameters():
            torch.distributed.all_reduce(each.grad, group=group)
        model.zero_grad()

    return step


def test_a_world_has_figures_and_a_report():
    world = rpcbench.simulate(program, mesh={"dp": 16}, hardware="h100", tokens=16 * 1024)
    assert world.ranks == 16
    assert [(row.op, row.group, row.bytes) for row in world.collectives] == [
        ("all_reduce(SUM)", "world", size) for size in (256 * 256 * 4, 1024) * 2
    ]
    assert world.flops == 16 * (2 + 3) * 2 * 1024 * 256 * 256  # the first input needs no gradient
    assert sum(world.causes.values()) == pytest.approx(world.step_seconds)
    assert world.tokens_per_second == pytest.approx(1024 / world.step_seconds)
    assert 0 < world.mfu < 1
    assert world.is_fitting
    text = str(world)
    assert "dp 16: 16 ranks of h100" in text
    assert f"it fits: {world.peak_bytes / 2**20:.1f} MiB of 79.6 GiB" in text
    slower = world.on(rpcbench.hardware("l40s"))
    assert slower.step_seconds > world.step_seconds


def test_ranks_that_count_as_equal_and_are_not_are_told():
    def uneven(mesh):
        step = program(mesh)
        return lambda: (step(), mesh.get_rank() == 3 and torch.distributed.barrier())

    world = rpcbench.simulate(uneven, mesh={"dp": 4})
    assert len(world.remarks) == 1
    assert "ranks 0 and 3 count as equal, and are not" in world.remarks[0]


def test_stages_are_roles():
    assert [(role.name, role.rank, role.ranks) for role in find_roles({"pp": 2, "dp": 2, "tp": 2}, None)] == [
        ("pp=0", 0, 4), ("pp=1", 4, 4),
    ]  # fmt: skip
    assert [(role.rank, role.ranks) for role in find_roles({"dp": 2, "pp": 2}, None)] == [(0, 2), (1, 2)]
    assert [role.rank for role in find_roles({"dp": 4}, [1, 3])] == [1, 3]
    with pytest.raises(ValueError, match="4 is not one of the 4 ranks"):
        find_roles({"dp": 4}, [4])
    with pytest.raises(ValueError, match="sizes of at least 1"):
        rpcbench.simulate(program, mesh={"dp": 0})


def test_a_step_has_pictures_and_a_trace(tmp_path):
    world = rpcbench.simulate(program, mesh={"dp": 16}, hardware="h100")
    lanes = world.timeline.names
    assert [lanes[lane] for lane in world.timeline.lanes] == ["compute", "world"]
    assert "all_reduce" in world.timeline.text(200)
    assert repr(world.timeline) == world.timeline.text()
    assert "<img" in world.timeline._repr_html_()
    assert world._repr_html_().count("<img") == 2
    events = json.loads(world.save(tmp_path / "step.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(world.step_seconds * 1e6, rel=1e-3)
    assert {event["args"]["phase"] for event in spans} == {"forward", "backward"}


def test_the_memory_picture_keeps_the_peak():
    log = play_rank(program, {"dp": 2}, 0)
    columns = memory_columns(log, 3)
    assert max(sum(amounts.values()) for amounts in columns) == log.peak_memory().bytes
    assert len(columns) <= 4
    assert memory_picture(log, 2.0**30).startswith("<svg")


def test_a_plan_has_all_meshes_best_first_and_says_which_are_impossible():
    def cut(mesh):
        if mesh["tp"].size() > 2:
            raise ValueError("64 heads do not go into 4 pieces")
        rows = 4096 // mesh["dp"].size()
        return lambda: nn.Linear(1024, 1024 // mesh["tp"].size())(torch.ones(rows, 1024)).sum().backward()

    plan = rpcbench.plan(cut, 4)
    assert [layout.is_fitting for layout in plan.layouts] == [True, True, False]
    assert {layout.name for layout in plan.layouts} == {"dp 2, tp 2", "dp 4", "tp 4"}
    fastest, second, failed = (layout.world for layout in plan.layouts)
    assert failed is None
    assert plan.best is fastest
    assert fastest.step_seconds <= second.step_seconds
    assert "tp 4        ValueError: 64 heads do not go into 4 pieces" in str(plan)
    with pytest.raises(LookupError, match="no layout fits h100"):
        _ = rpcbench.plan(cut, 2, dataclasses.replace(rpcbench.hardware("h100"), memory_bytes=1.0), most={"tp": 2}).best
    assert [*enumerate_meshes(4, ["dp", "tp", "pp"])][-1] == {"dp": 1, "tp": 1, "pp": 4}
    with pytest.raises(ValueError, match=r"no mesh of dp with at most .* has 4 ranks"):
        rpcbench.plan(cut, 4, dimensions=["dp"], most={"dp": 2})


def stages(mesh, count=4, rows=2**16, **shapes):
    group, place = mesh["pp"], mesh["pp"].get_local_rank()
    whole = {
        "input_args": (torch.ones(rows, 512, requires_grad=place > 0),),
        "output_args": (torch.ones(rows, 512, requires_grad=True),),
    }
    stage = PipelineStage(
        nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), place, group.size(), torch.device("cpu"),
        group=group.get_group(), **(shapes or whole),
    )  # fmt: skip
    schedule = Schedule1F1B(stage, count, lambda output, target: (output - target).square().mean())
    batch = torch.ones(count * rows, 512)
    inputs, target = [batch] * (place == 0), {"target": batch} if place == group.size() - 1 else {}
    return lambda: schedule.step(*inputs, **target)


def test_stages_wait_for_each_other():
    world = rpcbench.simulate(stages, mesh={"pp": 2, "dp": 2}, hardware="a100")
    first, second = world.timelines.values()
    assert [role.ranks for role in world.roles] == [2, 2]
    own = [row.ranks for row in world.collectives if row.role == "pp=0"]
    assert own[:3] == [(0, 2), (0, 2), (2, 0)]  # one forward ahead, then by turns
    assert sorted(own) == [(0, 2)] * 4 + [(2, 0)] * 4
    assert {(row.op, row.bytes) for row in world.collectives} == {("send", 2**16 * 512 * 4)}
    ends = {(row.role, row.ranks, row.end) for row in world.collectives}
    assert {end[1:] for end in ends if end[0] == "pp=0"} == {end[1:] for end in ends if end[0] == "pp=1"}
    idle = {name: timeline.causes["bubble"] / timeline.seconds for name, timeline in world.timelines.items()}
    assert idle["pp=0"] > idle["pp=1"] > 0  # the last stage has the loss besides, and the others wait for it
    assert first.seconds > second.seconds > 0


def test_a_stage_that_would_get_its_shapes_from_another_one_is_an_error():
    text = r"test_simulated_world.py:\d+: stage 1 would get its shapes .*PipelineStage\(..., {}=..., {}=...\)"
    with pytest.raises(rpcbench.SimulationError, match=text.format("input_args", "output_args")):
        play_rank(lambda mesh: stages(mesh, input_args=None), {"pp": 2}, 1)

    def with_dtensors(mesh):
        rows = distribute_tensor(torch.ones(4, 512), mesh["tp"], [Replicate()])
        return stages(mesh, rows=4, input_args=(rows,), output_args=(rows,))

    with pytest.raises(rpcbench.SimulationError, match=text.format("input_grads", "output_grads")):
        play_rank(with_dtensors, {"pp": 2, "tp": 2}, 2)
