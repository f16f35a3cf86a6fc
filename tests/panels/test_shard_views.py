"""The view of sharded models: hand-made tables of workers joined, in words, as text, and in records."""

from __future__ import annotations

import json

import pytest
from pictures import shard, watch, world

from rpcbench.base.errors import format_bytes
from rpcbench.telemetry.record_schema import check_delta
from rpcbench.telemetry.recording import flatten_world
from rpcbench.telemetry.shard_views import block_in_box, block_words, element_coordinates, shards_view
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.views import diff_views


def words(view):
    return [row["words"] for row in view["remarks"].values()]


@pytest.mark.parametrize(
    ("offset", "count", "shape", "said"),
    [
        ([0, 0], [4, 2], [4, 2], "all of it"),
        ([16, 0], [16, 8], [64, 8], "rows 16 to 31 of 64"),
        ([3, 4], [1, 4], [4, 8], "row 3 of 4, columns 4 to 7 of 8"),
        ([2], [2], [6], "elements 2 to 3 of 6"),
        ([0, 0, 4], [3, 3, 4], [3, 3, 8], "indices of dimension 2 4 to 7 of 8"),
        ([2], [0], [2], "nothing"),
        ([], [], [], "all of it"),
        ([0, 0], [0, 2], [0, 2], "all of it"),
    ],
)
def test_a_block_in_words(offset, count, shape, said):
    assert block_words(offset, count, shape) == said


@pytest.mark.parametrize(
    ("offset", "count", "shape", "box"),
    [
        ([16, 0], [16, 8], [64, 8], [0, 0.25, 1, 0.25]),
        ([0, 4], [4, 4], [4, 8], [0.5, 0, 0.5, 1]),
        ([0, 0, 4], [3, 3, 4], [3, 3, 8], [0.5, 0, 0.5, 1]),
        ([2], [1], [4], [0, 0.5, 1, 0.25]),
        ([], [], [], [0, 0, 1, 1]),
        ([0, 0], [0, 2], [0, 2], [0, 0, 1, 1]),
    ],
)
def test_where_a_block_stands_in_its_box(offset, count, shape, box):
    assert block_in_box(offset, count, shape) == box


def test_places_and_sizes():
    assert [element_coordinates(index, [2, 3]) for index in (0, 4, 5)] == [[0, 0], [1, 1], [1, 2]]
    sizes = ["0 B", "999 B", "4.1 kB", "2.5 MB", "70.0 TB"]
    assert [format_bytes(count) for count in (0, 999, 4096, 2_500_000, 7 * 10**13)] == sizes


def test_uneven_shares_of_ranks_add_up_to_the_whole():
    at = world(3)
    for worker, rows in ((1, 5), (2, 5), (3, 0)):  # each state has a counter of 4 bytes, too
        watch(at, worker, worker - 1, 3)
        at[worker]["tables"]["shards"] = {}
        size, sizes = [rows, 8], {"gradient": 32 * rows, "state": 64 * rows + 4}
        shard(at, worker, "model/up.weight", 0, [10, 8], [5 * (worker - 1), 0], size, ["Shard(0)"], **sizes)
    view = shards_view(at)
    for part in ("parameter", "gradient", "state"):
        assert view["models"]["model"][part] == sum(rank[part] for rank in view["ranks"].values()), part
    for n in (1, 2):  # a step's gradients come one after another
        at[n]["tables"]["shards"]["model/up.weight"]["gradient"] = 160 * (n == 1)
    assert shards_view(at)["models"]["model"]["gradient"] == 320


def test_sums_of_each_rank_stand_against_the_unsharded_model():
    at = world(2)
    for worker in (1, 2):
        watch(at, worker, worker - 1, 2, steps=3, gathered=192 * (worker == 2), most=192, groups=[[worker == 2, 5]])
        table = at[worker]["tables"]["shards"]
        table["model/up.weight"] |= {"gradient": 192, "state": 384}
    view = shards_view(at)
    model = {"model": "model", "kind": "Net", "params": 2, "parameter": 384 + 48, "gradient": 384, "state": 768}
    assert view["models"] == {"model": model}
    ranks = view["ranks"]
    assert {key: (row["parameter"], row["gradient"], row["state"], row["gathered"]) for key, row in ranks.items()} == {
        "model/1": (240, 192, 384, 0), "model/2": (240, 192, 384, 192),
    }  # fmt: skip
    assert [(row["rank"], row["places"], row["most"], row["steps"]) for row in ranks.values()] == [
        (0, "dp 0", 192, 3), (1, "dp 1", 192, 3),
    ]  # fmt: skip
    pieces = view["pieces"]
    assert [pieces[f"model/up.weight/{n}"]["now"] for n in (1, 2)] == [False, True]
    assert pieces["model/up.weight/2"]["words"] == "rows 6 to 11 of 12"
    assert pieces["model/up.weight/2"]["block"] == [0, 0.5, 1, 0.5]
    assert pieces["model/up.weight/2"]["lit"] == [0, 0, 1, 1]
    assert [row["way"] for row in view["params"].values()] == ["sharded", "replicated"]
    mesh = {"model": "model", "names": ["dp"], "shape": [2], "ranks": [0, 1], "workers": [1, 2]}
    assert list(view["meshes"].values()) == [mesh] and words(view) == []


def test_a_lost_worker_and_one_that_does_not_watch_are_missing():
    at = world(3)
    for worker in (1, 2):
        watch(at, worker, worker - 1, 3)
    assert words(shards_view(at)) == ["rank 2 does not watch model: call rpcbench.watch_model there, too."]
    at[2]["state"] = "lost"
    view = shards_view(at)
    assert words(view) == [
        "rank 1 of model is not shown: worker2 is lost.",
        "rank 2 does not watch model: call rpcbench.watch_model there, too.",
    ]
    assert next(iter(view["meshes"].values()))["workers"] == [1, 2, None]
    at[2] |= {"state": "up", "incarnation": 1, "tables": {}}
    assert words(shards_view(at)) == [
        "ranks 1, 2 do not watch model: call rpcbench.watch_model there, too.",
        "worker2 was started again: what it had of model is lost.",
    ]
    assert list(view["ranks"]) == ["model/1"] and all(key.endswith("/1") for key in view["pieces"])


def test_differences_and_plain_copies_are_told():
    at = world(2)
    for worker in (1, 2):
        watch(at, worker, worker - 1, 2, parameters=4, meshes=[], remarks=["A remark."])
        shard(at, worker, "model/plain", 2, [4, 2 + worker], [0, 0], [4, 2 + worker], [], trainable=False)
        shard(at, worker, "model/meta", 3, [4], [0], [4], [], device="meta", bytes=0)
    view = shards_view(at)
    assert words(view) == [
        "A remark.",
        "plain differs between ranks: float32 [4, 3] on worker1, float32 [4, 4] on worker2.",
        "2 parameters of it are not sharded: each rank has a copy of its own, and nothing keeps the copies equal.",
        "1 parameter of this model needs no gradient.",
    ]
    meta = view["pieces"]["model/meta/1"]
    assert (meta["words"], meta["block"], meta["parameter"]) == ("no memory yet", [0, 0, 0, 0], 0)


def test_stages_of_a_pipeline_keep_their_parameters_apart():
    at = world(2)
    for worker in (1, 2):
        at[worker]["tables"]["models"] = {}
        watch(at, worker, worker - 1, 2, "pipe")
        tables = at[worker]["tables"]
        tables["models"] = {f"pipe {worker - 1}": {**tables["models"]["pipe"], "stage": worker - 1, "parameters": 1}}
        tables["shards"] = {}
        shard(at, worker, f"pipe {worker - 1}/weight", 0, [4, 4], [0, 0], [4, 4], [])
    view = shards_view(at)
    assert [(row["name"], row["way"]) for row in view["params"].values()] == [
        ("stage 0: weight", "alone"), ("stage 1: weight", "alone"),
    ]  # fmt: skip
    assert view["models"]["pipe"]["parameter"] == 128 and words(view) == []
    assert [row["stages"] for row in view["ranks"].values()] == [[0], [1]]


def test_a_model_whose_rows_were_too_many_says_so():
    at = world(1)
    watch(at, 1, 0, 1, parameters=5)
    assert words(shards_view(at)) == ["3 pieces of this model have no row: there are too many."]


def test_as_text():
    at = world(2)
    for worker in (1, 2):
        watch(at, worker, worker - 1, 2, most=192)
    view = shards_view(at)
    assert summarize_view(view).splitlines() == [
        "3 members, 1 watched model",
        "  model, Net: 2 parameters; unsharded 432 B parameters",
        "    DeviceMesh dp=2: ranks 0, 1",
        "    worker1 (rank 0, dp 0): 240 B parameters (56%); gathers at most 192 B at once",
        "    worker2 (rank 1, dp 1): 240 B parameters (56%); gathers at most 192 B at once",
        "  up.weight float32 [12, 8], dp: Shard(0): worker1 rows 0 to 5 of 12; worker2 rows 6 to 11 of 12",
        "  up.bias float32 [12], dp: Replicate: worker1 all of it; worker2 all of it",
    ]


def test_rows_fit_the_schema_of_records():
    at = world(2)
    for worker in (1, 2):
        watch(at, worker, worker - 1, 2)
        at[worker] |= {"clock": []}
    delta = json.loads(json.dumps(diff_views({}, flatten_world(at))))
    assert {"1 models", "2 shards"} <= delta.keys()
    check_delta(delta, "frame 0")
    delta["1 shards"]["set"]["model/up.weight"]["size"] = "wide"
    with pytest.raises(ValueError, match=r"^frame 0, section '1 shards', row 'model/up.weight': .*\$.size"):
        check_delta(delta, "frame 0")
