"""`cluster.mesh`: each worker gets its DeviceMesh and the notebook a picture; one that does not fit is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch

import rpcbench
import rpcbench.distributed
from rpcbench.base.errors import CollectiveError, WorkerLostError
from rpcbench.launch import meshes
from rpcbench.launch.meshes import ClusterMesh

FOUR = ("worker1", "worker2", "worker3", "worker4")


def drawn(sizes: dict[str, int], workers: Sequence[str] = FOUR) -> ClusterMesh:
    return ClusterMesh("mesh", tuple(sizes), tuple(sizes.values()), tuple(workers), "cpu")


def test_a_mesh_says_which_worker_is_where() -> None:
    mesh = drawn({"dp": 2, "tp": 2})
    assert mesh.coordinates["worker3"] == {"dp": 1, "tp": 0}
    assert mesh.at(dp=1) == ["worker3", "worker4"] and mesh.at(dp=0, tp=1) == ["worker2"]
    assert mesh.at() == list(FOUR)
    assert repr(mesh).splitlines() == [
        "mesh(dp=2, tp=2) on cpu",
        "      tp=0     tp=1",
        "dp=0  worker1  worker2",
        "dp=1  worker3  worker4",
    ]
    with pytest.raises(ValueError, match="this mesh has no dimension 'pp': did you mean "):
        mesh.at(pp=0)
    with pytest.raises(ValueError, match="tp=2 is outside the mesh: tp counts from 0 to 1"):
        mesh.at(tp=2)


def test_a_mesh_of_one_or_three_dimensions_is_drawn_as_rows() -> None:
    assert repr(drawn({"dp": 4})).splitlines() == [
        "mesh(dp=4) on cpu", "  dp=0     dp=1     dp=2     dp=3", "  worker1  worker2  worker3  worker4"
    ]  # fmt: skip
    deep = repr(drawn({"pp": 2, "dp": 1, "tp": 2}))
    assert [line.split("  ")[0] for line in deep.splitlines()[2:]] == ["pp=0 dp=0", "pp=1 dp=0"]


def test_the_table_for_notebooks_has_the_same_cells() -> None:
    table = drawn({"d": 2, "tp": 2}, ["<b>", *FOUR[1:]])._repr_html_()
    assert ">mesh(d=2, tp=2) on cpu</caption>" in table
    assert "<tr><th>d=0</th><td>&lt;b&gt;</td><td>worker2</td></tr>" in table
    assert "<tr><th></th><th>tp=0</th><th>tp=1</th></tr>" in table


@pytest.mark.parametrize(
    ("sizes", "count", "fits"),
    [
        ({"dp": 2, "tp": 3}, 4, {"dp": 2, "tp": 2}),
        ({"dp": 8}, 4, {"dp": 4}),
        ({"dp": 2, "tp": 2}, 3, {"dp": 3, "tp": 1}),
        ({"pp": 2, "dp": 2, "tp": 2}, 4, {"pp": 1, "dp": 2, "tp": 2}),
        ({"dp": 9, "tp": 1}, 6, {"dp": 6, "tp": 1}),
    ],
)
def test_an_example_that_fits_is_near_the_sizes_that_were_given(
    sizes: dict[str, int], count: int, fits: dict[str, int]
) -> None:
    assert meshes.fit_sizes(sizes, count) == fits and list(meshes.fit_sizes(sizes, count)) == list(sizes)
    meshes.check_mesh("mesh", fits, [f"worker{i}" for i in range(count)], [])


@pytest.mark.parametrize(
    ("name", "sizes", "told"),
    [
        ("mesh", {"dp": 2, "tp": 3}, r"has 6 places, and this cluster has 4 workers: cluster.mesh\(dp=2, tp=2\) fits"),
        ("mesh", {}, "a mesh has at least one dimension, with a name and a size"),
        ("mesh", {"dp": 4, "tp": 0}, "tp=0: each dimension of a mesh has at least one worker"),
        ("mesh", {"dp": -4}, "dp=-4: each dimension"),
        ("2d", {"dp": 4}, "'2d' cannot be a name in a mesh: pass a Python identifier"),
        ("class", {"dp": 4}, "'class' cannot be a name"),
        ("mesh", {"data parallel": 4}, "'data parallel' cannot be a name"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_a_sentence(name: str, sizes: dict[str, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        meshes.check_mesh(name, sizes, FOUR, [])


def test_sizes_are_whole_numbers_and_no_worker_may_be_lost() -> None:
    for size in 4.0, "4", True:
        with pytest.raises(TypeError, match=f"dp={size!r}: the size of a dimension is a whole number"):
            meshes.check_mesh("mesh", {"dp": size}, FOUR, [])  # type: ignore[dict-item]
    with pytest.raises(WorkerLostError, match=r"worker2 is lost, .*cluster.restart\(name\), then call mesh again"):
        meshes.check_mesh("mesh", {"dp": 4}, ["worker1", "worker3", "worker4"], ["worker2"])


# -- on workers
@pytest.fixture(scope="module")
def four() -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(4) as cluster:
        yield cluster


def sums(cluster: rpcbench.Cluster, mesh: str, dimension: str) -> list[float]:
    """Of the ranks along a dimension, as each worker computes it."""
    code = f"""import torch, torch.distributed as dist
x = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(x, group={mesh}[{dimension!r}].get_group())
x.item()"""
    return [*cluster.run("all", code).values()]


@pytest.mark.process
def test_each_worker_has_the_mesh_and_its_groups(four: rpcbench.Cluster) -> None:
    mesh = four.mesh(dp=2, tp=2)
    assert (mesh.shape, mesh.dimensions, mesh.workers, mesh.device) == ((2, 2), ("dp", "tp"), FOUR, "cpu")
    assert mesh._repr_html_().count("worker") == 4
    places = four.run("all", "dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))")
    assert places == mesh.coordinates
    assert sums(four, "mesh", "tp") == [11.0, 11.0, 1100.0, 1100.0]
    assert sums(four, "mesh", "dp") == [101.0, 1010.0, 101.0, 1010.0]


@pytest.mark.process
def test_another_shape_and_another_name_can_follow(four: rpcbench.Cluster) -> None:
    four.mesh(dp=2, tp=2)
    assert repr(four.mesh(name="line", dp=4)).startswith("line(dp=4) on cpu")
    four.mesh(pp=2, dp=1, tp=2)
    shapes = dict.fromkeys(FOUR, ((2, 1, 2), (4,)))
    assert four.run("all", "(mesh.shape, line.shape)") == shapes
    assert sums(four, "line", "dp") == [1111.0] * 4
    assert sums(four, "mesh", "pp") == [101.0, 1010.0, 101.0, 1010.0]
    with pytest.raises(ValueError, match="has 6 places, and this cluster has 4 workers"):
        four.mesh(dp=2, tp=3)
    assert four.run("all", "(mesh.shape, line.shape)") == shapes


@pytest.mark.process
def test_a_mesh_is_asked_for_again_after_a_loss(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as cluster:
        cluster.mesh(tp=2)
        cluster.kill("worker2")
        with pytest.raises(WorkerLostError, match="worker2 is lost, and a mesh is of all workers"):
            cluster.mesh(tp=2)
        cluster.restart("worker2")
        cluster.mesh(dp=2)
        assert sums(cluster, "mesh", "dp") == [11.0, 11.0]


@pytest.mark.process
def test_torchs_own_world_is_used_and_torn_ones_are_named(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as cluster:
        cluster.run("all", "import torch\ntorch.distributed.init_process_group('gloo')")
        cluster.mesh(tp=2)
        assert sums(cluster, "mesh", "tp") == [11.0, 11.0]
        cluster.rpc_sync("worker2", torch.distributed.destroy_process_group)
        with pytest.raises(CollectiveError, match=r"\(worker1 in one of 2, worker2 in none\): run rpcbench\.d"):
            cluster.mesh(tp=2)
        cluster.rpc_sync("worker1", rpcbench.distributed.destroy_process_group)


@pytest.mark.long
@pytest.mark.process
def test_a_kernel_worker_has_the_mesh_among_its_variables(no_leaks: None) -> None:
    with rpcbench.Cluster(2, kind="kernel") as cluster:
        cluster.mesh(tp=2)
        assert cluster.run("all", "mesh.get_local_rank()") == {"worker1": 0, "worker2": 1}


def ends() -> None:
    """On a worker, instead of its part of a mesh."""
    os._exit(1)


@pytest.mark.process
def test_the_loss_of_a_worker_meanwhile_ends_the_waits(no_leaks: None) -> None:
    with rpcbench.Cluster(4) as cluster:
        cluster.mesh(dp=4)
        waiting = ("worker2", "worker3")  # each has a group with worker4
        calls = [cluster.rpc_async(name, meshes.make_local_mesh, ("mesh", ("dp", "tp"), (2, 2))) for name in waiting]
        lost = cluster.rpc_async("worker4", ends)
        for call in [*calls, lost]:
            with pytest.raises(WorkerLostError, match="worker4"):
                call.wait()
        cluster.restart("worker4")
        assert cluster.mesh(dp=2, tp=2).workers == FOUR
