"""Simulated worlds in the panels of pipelines, shards and messages: what is shown is what the played ranks did."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import rpcbench
from rpcbench.launch.simulate_programs import describe_hardware, find_roles, play_rank
from rpcbench.panels import MessagesPanel, PipelinePanel, ShardsPanel
from rpcbench.simulation.simulated_world import SimulatedWorld
from rpcbench.telemetry.shard_views import block_words
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.svg import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
WIDTH, ROWS, STAGES = 32, 8, 4


def simulated(program, mesh, ranks=None):
    roles = find_roles(mesh, ranks)
    logs = [play_rank(program, mesh, role.rank) for role in roles]
    return SimulatedWorld(mesh, describe_hardware("h100"), roles, logs)


def view_of(kind, world):
    view = kind.look(kind.find_source(world).world())
    assert json.loads(json.dumps(view)) == view
    return view


def remarks(view):
    return [row["words"] for row in view["remarks"].values()]


def block():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def training(model):
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def staged(mesh):
    """1F1B with a stage on each rank, or with two on each in turn."""
    group, rank, stages = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), mesh["pp"].size()
    example = [torch.ones(ROWS, WIDTH, requires_grad=True) for _ in range(2)]
    many = 2 if stages == 2 else 1
    models = [copy.deepcopy(block()) for _ in range(many)]
    made = [
        PipelineStage(model, rank + stages * n, stages * many, torch.device("cpu"), *example, group=group)
        for n, model in enumerate(models)
    ]

    kind, of = (Schedule1F1B, made[0]) if many == 1 else (ScheduleInterleaved1F1B, made)
    schedule = kind(of, STAGES, loss_fn=lambda x, y: (x - y).square().mean())

    def step():
        x = [torch.ones(STAGES * ROWS, WIDTH)] if rank == 0 else []
        schedule.step(*x, **({"target": torch.ones(STAGES * ROWS, WIDTH)} if rank == stages - 1 else {}))

    return step


@pytest.fixture(scope="module")
def pipeline_world():
    return simulated(staged, {"pp": STAGES})


@pytest.fixture(scope="module")
def pipeline(pipeline_world):
    return view_of(PipelinePanel, pipeline_world)


# -- pipeline
def ops_of(view, rank):
    return sorted((row for row in view["ops"].values() if row["worker"] == rank), key=lambda row: row["begin"])


def test_each_stage_has_its_operations_in_the_order_of_the_schedule(pipeline):
    orders = [" ".join(f"{row['op']}{row['microbatch']}" for row in ops_of(pipeline, rank)) for rank in range(STAGES)]
    assert orders == [
        "F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3",
    ]  # fmt: skip
    assert all(row["stage"] == row["worker"] for row in pipeline["ops"].values())
    (step,) = pipeline["steps"].values()
    assert (step["state"], step["trains"]) == ("complete", True)
    assert step["minimum"] == pytest.approx((STAGES - 1) / (2 * STAGES - 1)) and step["bubble"] > step["minimum"]


def test_operations_wait_for_each_other_in_the_simulated_time(pipeline, pipeline_world):
    at = {(row["stage"], row["op"], row["microbatch"]): row for row in pipeline["ops"].values()}
    for stage, batch in [(s, m) for s in range(1, STAGES) for m in range(STAGES)]:
        assert at[stage, "F", batch]["begin"] >= at[stage - 1, "F", batch]["end"]
        assert at[stage - 1, "B", batch]["begin"] >= at[stage, "B", batch]["end"]
    for rank in range(STAGES):
        own = ops_of(pipeline, rank)
        assert all(one["begin"] < one["end"] <= other["begin"] for one, other in pairwise(own))
    assert max(row["end"] for row in at.values()) <= pipeline_world.step_seconds * (1 + 1e-9)
    slower = view_of(PipelinePanel, pipeline_world.on(rpcbench.hardware("l40s")))
    assert ops_of(slower, 0)[-1]["end"] != ops_of(pipeline, 0)[-1]["end"]


def test_operations_have_the_bytes_that_they_send_and_leave(pipeline):
    size = ROWS * WIDTH * 4
    for row in pipeline["ops"].values():
        is_end = (row["stage"], row["op"]) in ((STAGES - 1, "F"), (0, "B"))
        assert row["bytes"] == (0 if is_end else size)
    first = ops_of(pipeline, 0)
    held = [row["held"] for row in first]
    assert held[:4] == sorted(held[:4]) and held[3] > held[0] > 0 and held[3] > held[-1]
    lanes = {lane["worker"]: lane["peak"] for lane in pipeline["lanes"].values()}
    assert lanes[0] == max(held) > lanes[STAGES - 1] > 0, "the first stage keeps four micro-batches, the last one"


def test_a_rank_with_two_stages_has_both():
    view = view_of(PipelinePanel, simulated(staged, {"pp": 2}))
    assert {lane["worker"]: lane["stages"] for lane in view["lanes"].values()} == {0: [0, 2], 1: [1, 3]}
    assert len(view["ops"]) == 4 * STAGES * 2 and view["steps"]["0"]["minimum"] is not None
    assert all(row["held"] >= 0 for row in view["ops"].values())


def test_a_world_without_a_pipeline_says_so():
    view = view_of(PipelinePanel, simulated(lambda mesh: training(block()), {"dp": 2}))
    assert remarks(view) == ["This world has no pipeline: its mesh, dp 2, is not cut along a dimension pp."]
    assert not view["steps"] and remarks(view)[0] in summarize_view(view)

    def by_hand(mesh):
        def step():
            x = torch.ones(4)
            dist.send(x, 1) if mesh.get_rank() == 0 else dist.recv(x, 0)

        return step

    view = view_of(PipelinePanel, simulated(by_hand, {"pp": 2}))
    assert not view["ops"] and "no stages of torch.distributed.pipelining" in remarks(view)[0]


def test_stages_that_were_not_played_are_told():
    view = view_of(PipelinePanel, simulated(staged, {"pp": STAGES}, ranks=[1]))
    assert view["steps"]["0"]["minimum"] is None and {row["stage"] for row in view["ops"].values()} == {1}
    assert remarks(view)[-1].startswith("Not played were the stages 0, 2, 3.")


# -- shards
def cut(mesh):
    model = nn.Sequential(block(), nn.Linear(WIDTH, 10))
    parallelize_module(model[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for part in model:
        fully_shard(part, mesh=mesh["dp"])
    return training(model)


@pytest.mark.parametrize("mesh", [{"dp": 4, "tp": 2}, {"copies": 2, "dp": 2, "tp": 2}])
def test_the_pieces_of_all_ranks_are_those_that_each_would_have(mesh):
    view = view_of(ShardsPanel, simulated(cut, mesh))
    assert {row["rank"] for row in view["ranks"].values()} == set(range(8))
    for rank in range(8):
        (model,) = play_rank(cut, mesh, rank).models
        for placed in model.parameters:
            row = view["pieces"][f"model/{placed.piece.name}/{rank}"]
            offset, size = map(list, placed.piece.region)
            assert row["words"] == block_words(offset, size, row["shape"]), "uneven ones, too: 10 rows on 4 ranks"
            assert row["parameter"] == placed.piece.held_bytes
    assert view["pieces"]["model/1.weight/7"]["words"] == ("row 9 of 10" if mesh["dp"] == 4 else "rows 5 to 9 of 10")
    assert view["params"]["model/0.0.weight"]["placed"] == "dp: Shard(0), tp: Shard(0)"
    assert {row["way"] for row in view["params"].values()} == {"sharded"}


def test_memory_is_that_of_the_step():
    view = view_of(ShardsPanel, simulated(cut, {"dp": 2, "tp": 2}))
    row = view["pieces"]["model/0.0.weight/3"]
    size = 2 * WIDTH * WIDTH * 4 // 4
    assert (row["parameter"], row["gradient"]) == (size, size), "before `zero_grad`"
    assert row["state"] == 2 * size + 4, "two moments, and AdamW's count of steps"
    assert "gradients that the optimizer has used; rank 0 was played" in remarks(view)[0]


def test_copies_are_whole_on_all_ranks():
    ddp = view_of(ShardsPanel, simulated(lambda mesh: training(DistributedDataParallel(block())), {"dp": 4}))
    assert {row["way"] for row in ddp["params"].values()} == {"replicated"}
    plain = view_of(ShardsPanel, simulated(lambda mesh: training(block()), {"dp": 4}))
    assert {row["way"] for row in plain["params"].values()} == {"plain"}
    for view in (ddp, plain):
        assert len(view["ranks"]) == 4 and {row["words"] for row in view["pieces"].values()} == {"all of it"}
    assert "nothing keeps the copies equal" in remarks(plain)[-1]


def test_the_ranks_of_a_stage_have_its_parameters_alone(pipeline_world):
    view = view_of(ShardsPanel, pipeline_world)
    assert [row["stages"] for row in view["ranks"].values()] == [[stage] for stage in range(STAGES)]
    assert {(row["stage"], row["worker"]) for row in view["pieces"].values()} == {(n, n) for n in range(STAGES)}


def test_of_many_ranks_some_are_drawn():
    def sharded(mesh):
        model = fully_shard(block(), mesh=mesh)
        return training(model)

    world = simulated(sharded, {"dp": 512})
    for kind, found in ((ShardsPanel, "ranks"), (MessagesPanel, "workers")):
        view = view_of(kind, world)
        assert len(view[found]) == 16 and "Drawn are 16 of 512 ranks (dp 512)." in remarks(view)
    assert not view_of(ShardsPanel, world)["meshes"]
    rows = view_of(MessagesPanel, world)["collectives"].values()
    assert rows and {(row["group"], len(row["members"])) for row in rows} == {("world of 512 ranks", 16)}


def test_pieces_whose_place_is_not_known_are_not_drawn():
    def on_own_mesh(mesh):
        own = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        return training(fully_shard(block(), mesh=own["b"]))

    view = view_of(ShardsPanel, simulated(on_own_mesh, {"dp": 4}))
    assert {row["rank"] for row in view["ranks"].values()} == {0, 1}
    assert "Drawn are 2 of 4 ranks (dp 4)." in remarks(view)


# -- messages
def test_a_collective_has_a_mark_for_each_of_its_ranks():
    world = simulated(cut, {"dp": 2, "tp": 2})
    view = view_of(MessagesPanel, world)
    shown = list(view["collectives"].values())
    known = world.collectives
    assert sorted((row["op"], row["bytes"], len(row["members"])) for row in shown) == sorted(
        (row.op, row.bytes, len(row.ranks)) for row in known
    )
    pairs = {row["group"]: row["members"] for row in shown if len(row["members"]) == 2}
    assert pairs == {"dp": ["rank 0", "rank 2"], "tp": ["rank 0", "rank 1"]}
    assert {row["state"] for row in shown} == {"done"} and {row["last"] for row in shown} == {None}
    assert sorted(row["end"] for row in shown) == pytest.approx(sorted(row.end for row in known))
    assert {row["name"] for row in view["workers"].values()} == {"rank 0", "rank 1", "rank 2"}


def test_a_transfer_has_both_ends_and_who_was_late(pipeline_world):
    view = view_of(MessagesPanel, pipeline_world)
    sent = [(tuple(row["members"]), row["bytes"]) for row in view["collectives"].values()]
    size = ROWS * WIDTH * 4
    there = [((f"rank {n}", f"rank {n + 1}"), size) for n in range(STAGES - 1)]
    assert sorted(sent) == sorted((there + [((b, a), size) for (a, b), _ in there]) * STAGES)
    first = next(row for row in view["collectives"].values() if row["members"] == ["rank 2", "rank 3"])
    assert first["last"] == 2 and first["waited"] > 0, "the last stage has waited for its first input"


def test_a_step_without_transfers_says_so():
    view = view_of(MessagesPanel, simulated(lambda mesh: training(block()), {"dp": 2}))
    assert remarks(view) == ["In this step no rank sends anything to another one."] and not view["collectives"]


# -- the panels
@pytest.mark.parametrize(("name", "words"), [
    ("pipeline", "step 0 (complete): 32 ops"), ("shards", "watched model"), ("messages", "24 collectives"),
])  # fmt: skip
def test_a_panel_of_a_world_is_text_still_and_trace(name, words, pipeline_world, tmp_path):
    made = rpcbench.panel(name, pipeline_world)
    assert words in str(made) and repr(made) == str(made) and made.phase["name"] == "simulated"
    assert "rank 3" in made.snapshot().svg
    assert json.loads(made.export(tmp_path / "step.json").read_text())["traceEvents"]
    made.close()


def test_a_still_says_why_nothing_is_there():
    pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
    world = simulated(lambda mesh: training(block()), {"dp": 2})
    assert "has no pipeline" in Snapshot(view_of(PipelinePanel, world)).svg


@pytest.mark.browser
def test_a_browser_draws_them(show, pipeline_world):
    shown = show("pipeline", PipelinePanel.find_source(pipeline_world).world())
    assert shown.count(".rb-blocks .rb-op") == 2 * STAGES * STAGES and shown.count(".rb-lane") == STAGES
    assert shown.texts(".rb-remarks li")[0].startswith("A simulated step on h100.")
    shown = show("messages", MessagesPanel.find_source(pipeline_world).world())
    assert shown.count(".rb-life") == STAGES and shown.count(".rb-dot.rb-last") > 1
    shown = show("shards", ShardsPanel.find_source(pipeline_world).world())
    assert shown.count("tbody tr") == 4 * STAGES and shown.texts(".rb-remarks li")[0].startswith("The end of a sim")
