"""Sharded models of four workers: FSDP times tensor parallel, DDP and plain copies, as the panel's view has them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rpcbench
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.recording import Player, load_record
from rpcbench.telemetry.shard_views import shards_view

pytestmark = pytest.mark.process
View = dict[str, dict[str, dict[str, Any]]]
Look = Callable[[], View]

START = """
import warnings
import torch
import rpcbench
import rpcbench.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
sharded = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
parallelize_module(sharded, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer, mesh=mesh["dp"])
optimizer = torch.optim.Adam(sharded.parameters())

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        sharded(torch.ones(2, 8)).sum().backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def four() -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(4) as cluster:
        cluster.run("all", START)
        yield cluster


@pytest.fixture
def look(four: rpcbench.Cluster) -> Iterator[Look]:
    """A function that returns the view once all members have reported."""
    collector = four.agent.part(Collector)
    stop = collector.subscribe(lambda: None)

    def now() -> View:
        assert collector.settle(20)
        return shards_view(collector.world())

    yield now
    stop()


def each(four: rpcbench.Cluster, code: str) -> None:
    four.run("all", textwrap.dedent(code))


def test_a_variable_of_cells_is_shown_with_all_that_each_rank_holds(four: rpcbench.Cluster, look: Look) -> None:
    each(four, "train(1)")
    rpcbench.shards("sharded")  # it finds the optimizer, too, whose step it has not seen
    view = look()
    assert [row["words"] for key, row in view["pieces"].items() if key.startswith("sharded/0.weight/")] == [
        "rows 0 to 3 of 16", "rows 8 to 11 of 16", "rows 4 to 7 of 16", "rows 12 to 15 of 16",
    ]  # fmt: skip
    pieces = [row for key, row in view["pieces"].items() if key.startswith("sharded/2.weight/")]
    assert [row["block"] for row in pieces] == [[0, 0, 0.5, 0.5], [0.5, 0, 0.5, 0.5], [0, 0.5, 0.5, 0.5], [0.5] * 4]
    assert {(row["parameter"], row["gradient"], row["state"]) for row in pieces} == {(64, 64, 132)}
    whole = 4 * (16 * 8 + 16 + 4 * 16 + 4)
    assert view["models"]["sharded"]["parameter"] == view["models"]["sharded"]["gradient"] == whole
    ranks = [row for row in view["ranks"].values() if row["model"] == "sharded"]
    assert [(row["rank"], row["places"]) for row in ranks] == [
        (0, "dp 0, tp 0"), (1, "dp 0, tp 1"), (2, "dp 1, tp 0"), (3, "dp 1, tp 1"),
    ]  # fmt: skip
    assert {row["parameter"] for row in ranks} == {4 * (32 + 4 + 16 + 2)}, "2.bias has a copy in both places of tp"
    (mesh,) = [row for row in view["meshes"].values() if row["model"] == "sharded"]
    assert (mesh["names"], mesh["shape"], mesh["workers"]) == (["dp", "tp"], [2, 2], [1, 2, 3, 4])
    assert [row for row in view["remarks"].values() if row["model"] == "sharded"] == []


def test_steps_and_gathering_are_followed(four: rpcbench.Cluster, look: Look) -> None:
    each(four, "rpcbench.watch_model(sharded, 'sharded')")
    before = look()

    def counts(view: View) -> list[tuple[int, int]]:
        rows = [row for row in view["ranks"].values() if row["model"] == "sharded"]
        times = [row["times"] for key, row in view["pieces"].items() if key.startswith("sharded/2.weight/")]
        return [(row["steps"], count) for row, count in zip(rows, times, strict=True)]

    each(four, "train(3)")
    after = look()
    assert [(b[0] - a[0], b[1] - a[1]) for a, b in zip(counts(before), counts(after), strict=True)] == [(3, 6)] * 4
    assert not any(row["now"] for row in after["pieces"].values())
    each(four, "sharded[2].unshard(); None")
    whole = [row for row in look()["pieces"].values() if row["now"]]
    assert sorted({row["name"] for row in whole}) == ["2.bias", "2.weight"] and len(whole) == 8
    lit = [row["lit"] for row in whole if row["name"] == "2.weight"]
    assert lit == [[0, 0, 0.5, 1], [0.5, 0, 0.5, 1]] * 2, "the part of each rank of tensor parallel"
    assert {row["gathered"] for row in look()["ranks"].values() if row["model"] == "sharded"} == {4 * (4 * 8 + 4)}
    each(four, "sharded[2].reshard(); optimizer.zero_grad()")
    view = look()
    assert not any(row["now"] for row in view["pieces"].values())
    assert {row["gradient"] for row in view["pieces"].values() if row["model"] == "sharded"} == {0}, "by the cell's end"


def test_replicas_plain_copies_and_models_that_differ(four: rpcbench.Cluster, look: Look) -> None:
    each(four, """
        replicas = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        rpcbench.watch_model(replicas, "replicas")
        replicas(torch.ones(1, 4)).sum().backward()
        torch.manual_seed(rank)
        copies = nn.Linear(4, 2 + (rank == 3))
        rpcbench.watch_model(copies, "copies")
        if rank == 0:
            alone = nn.Linear(2, 2)
            rpcbench.watch_model(alone, "alone")
    """)  # fmt: skip
    view = look()
    assert {key: row["way"] for key, row in view["params"].items() if row["model"] != "sharded"} == {
        "replicas/weight": "replicated", "replicas/bias": "replicated", "copies/weight": "plain",
        "copies/bias": "plain", "alone/weight": "plain", "alone/bias": "plain",
    }  # fmt: skip
    gradients = {row["gradient"] for key, row in view["pieces"].items() if key.startswith("replicas/weight")}
    assert gradients == {32}
    said = {(row["model"], row["words"].partition(":")[0]) for row in view["remarks"].values()}
    assert said >= {
        ("copies", "weight differs between ranks"), ("copies", "This model is not sharded"),
        ("alone", "ranks 1, 2, 3 do not watch alone"),
    }  # fmt: skip
    each(four, "del replicas, copies\nimport gc; gc.collect(); None")
    assert not {"replicas", "copies"} & look()["models"].keys()


def test_a_record_plays_the_sharding(four: rpcbench.Cluster, look: Look, tmp_path: Path) -> None:
    each(four, "rpcbench.watch_model(sharded, 'sharded')")
    with rpcbench.record(tmp_path / "shards.json"):
        each(four, "train(1)")
    player = Player(load_record(tmp_path / "shards.json"))
    player.go_to_frame(len(player.record.frames) - 1)
    assert shards_view(player.world())["params"].keys() == look()["params"].keys() > set()


def test_what_there_is_not_is_told(four: rpcbench.Cluster) -> None:
    for name, words in {
        "nothing": "no worker has a model nothing: on worker1 there is no variable nothing",
        "mesh": "no worker has a model mesh: on worker1 mesh is no model but a DeviceMesh",
        "a b": "a variable of the workers' cells is shown, and 'a b' is not the name of one",
    }.items():
        with pytest.raises(ValueError, match=words):
            rpcbench.shards(name)
    each(four, "only = nn.Linear(1, 1) if rank == 1 else None")
    assert "ranks 0, 2, 3 do not watch only" in rpcbench.shards("only").text
