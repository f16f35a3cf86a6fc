"""`cluster.spmd` runs a function on all ranks; the first failure ends all, and the next run begins at once."""

from __future__ import annotations

import enum
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from far_commands import LOCAL, provide
from sizes import long
from worlds import PATIENCE, cluster_fixture, until

import rpcbench
import rpcbench.distributed
from rpcbench import Cluster, CollectiveError, RankFailedError, RemoteError, WorkerLostError
from rpcbench.cells.cell_log import CellLog
from rpcbench.cells.tracebacks import Failed
from rpcbench.launch import spmd

pytestmark = pytest.mark.process
shared = cluster_fixture(3, kinds=["process", *long("kernel")])


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """After each test no worker has a group, and all run the next function."""
    yield shared
    assert total(shared) == [3.0] * 3
    assert shared.run("all", "import torch\ntorch.distributed.is_initialized()") == dict.fromkeys(shared.workers, False)


def total(cluster: Cluster, **how: Any) -> list[float]:
    def add() -> float:
        dist.all_reduce(x := torch.ones(()))
        return x.item()

    return cluster.spmd(add, **how)


def place(offset: int, *, name: str) -> tuple[Any, ...]:
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    main = threading.current_thread() is threading.main_thread()
    return dist.get_rank() + offset, name, dist.get_backend(), [os.environ[each] for each in variables], main


def test_each_rank_has_its_place_and_results_come_by_rank(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.spmd(place, 10, name="a") == [
        (10 + rank, "a", "gloo", [str(rank), "3", str(rank), "3"], True) for rank in range(3)
    ]
    assert cluster.spmd(place, 0, name="b", workers=["worker3", "worker2"], backend="gloo") == [
        (rank, "b", "gloo", [str(rank), "2", str(rank), "2"], True) for rank in range(2)
    ]
    assert cluster.run("worker3", "import os\nos.environ['RANK'], os.environ['WORLD_SIZE']") == ("2", "3")
    assert total(cluster, workers="[1:]") == [2.0, 2.0] and total(cluster, workers="worker2") == [1.0]
    cluster.spmd(lambda: print("rank", dist.get_rank()))
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[worker{rank + 1}] rank {rank}" for rank in range(3)]
    cluster.spmd(place, 0, name="d")
    listed = [row["code"] for row in cluster.agent.part(CellLog).table().values()]
    assert listed[-2:] == ["# cluster.spmd(), on each rank", "# cluster.spmd(place), on each rank"]
    assert list(cluster["worker1"]) == [] and list(cluster["worker3"]) == ["os"]


def test_objects_of_collectives_are_of_the_classes_that_the_function_knows(cluster: Cluster) -> None:
    class Mode(enum.Enum):
        TRAIN = 1

    def share() -> tuple[bool, bool]:
        mine = Mode.TRAIN if dist.get_rank() == 0 else None
        rpcbench.distributed.broadcast_object_list(objects := [mine])
        rpcbench.distributed.all_gather_object(each := [None] * 3, Mode.TRAIN)
        return objects[0] is Mode.TRAIN, all(one is Mode.TRAIN for one in each)

    assert cluster.spmd(share) == [(True, True)] * 3


def test_a_run_leaves_no_store_and_no_connection_without_the_garbage_collector(cluster: Cluster) -> None:
    def opened() -> int:
        return len(psutil.Process().net_connections("inet"))

    cluster.run("all", "import gc; gc.disable()")
    before = cluster.rpc_sync("worker1", opened)
    for _ in range(3):
        total(cluster)
    until(lambda: cluster.rpc_sync("worker1", opened) <= before)
    cluster.run("all", "gc.enable()")


def seen_by_libraries() -> tuple[Any, ...]:
    names = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    return hasattr(sys, "ps1"), dist.is_torchelastic_launched(), [os.environ[name] for name in names]


def test_libraries_see_a_rank_of_torchrun_and_no_prompt(cluster: Cluster) -> None:
    cluster.run("all", "1")  # IPython has begun there
    assert cluster.spmd(seen_by_libraries) == [(False, True, ["0", "1", f"{rank}", "3", "0"]) for rank in range(3)]
    assert cluster.rpc_sync("worker1", dist.is_torchelastic_launched) is False


def in_torch() -> None:
    dist.all_reduce(torch.ones(2))


def in_ours() -> None:
    rpcbench.distributed.all_reduce(torch.ones(2))


def computing() -> None:
    for _ in range(round(PATIENCE / 0.01)):  # without an interrupt it returns, and the test fails
        time.sleep(0.01)


@pytest.mark.parametrize("waiting", [in_torch, in_ours, computing])
def test_one_rank_that_fails_ends_all_and_its_error_is_raised(cluster: Cluster, waiting: Callable[[], None]) -> None:
    def train(path: str) -> None:
        if dist.get_rank() == 1:
            raise KeyError(path)
        waiting()

    with pytest.raises(KeyError, match="data") as caught:
        cluster.spmd(train, "data")
    assert isinstance(caught.value.__cause__, RemoteError) and caught.value.__cause__.worker == "worker2"
    ended = "RankFailedError: rank 1 (worker2) failed in train: KeyError: 'data'"
    assert caught.value.__notes__ == [f"also on worker1: {ended}", f"also on worker3: {ended}"]


def test_a_rank_that_imports_when_another_fails_ends_the_import_first(cluster: Cluster, tmp_path: Path) -> None:
    package = tmp_path / "half_package"
    package.mkdir()
    waits = (  # until the other rank has failed, and then as long as an interrupt needs to arrive
        "import time\nfrom pathlib import Path\nfrom rpcbench.distributed import groups\n"
        f"Path({str(tmp_path / 'begun')!r}).touch(exist_ok=False)\n"  # a second import, after one that was cut, fails
        "world = groups.member_of(None, at_work=False).world\nwhile world.failure_reason() is None: time.sleep(0.01)\n"
        "for _ in range(50): time.sleep(0.01)\nvalue = 7\n"
    )
    (package / "__init__.py").write_text(waits)

    def train(path: str) -> int:
        if dist.get_rank() == 1:
            until(Path(path, "begun").exists)
            raise KeyError("data")
        if dist.get_rank() == 0:
            load(path)
        in_torch()
        return 0

    def load(path: str) -> int:
        sys.path.insert(0, path)
        try:
            import half_package

            value: int = half_package.value
            return value
        finally:
            sys.path.remove(path)

    with pytest.raises(KeyError, match="data"):
        cluster.spmd(train, str(tmp_path))
    assert cluster.spmd(load, str(tmp_path), workers="worker1") == [7]


def at_its_end(then: Callable[[], Any]) -> float:
    """Destroy the group, as programs for torchrun do, and go on."""
    dist.all_reduce(x := torch.ones(()))
    rpcbench.distributed.destroy_process_group()
    time.sleep(0.2)  # an interrupt would come meanwhile
    then()
    return x.item()


def test_the_function_may_destroy_its_group(cluster: Cluster) -> None:
    assert cluster.spmd(at_its_end, lambda: None) == [3.0] * 3
    with pytest.raises(ZeroDivisionError):
        cluster.spmd(at_its_end, lambda: 1 / 0)


def test_a_change_of_the_cluster_ends_the_ranks_which_have_their_new_places(no_leaks: None, tmp_path: Path) -> None:
    def train() -> None:
        (tmp_path / str(dist.get_rank())).touch()
        computing()

    with Cluster(2) as cluster:

        def grow() -> None:
            until(lambda: len([*tmp_path.iterdir()]) == 2)
            cluster.scale(3)

        grower = threading.Thread(target=grow)
        grower.start()
        with pytest.raises(CollectiveError, match="earlier generation"):
            cluster.spmd(train)
        grower.join()
        sizes = cluster.run("all", "import os\nos.environ['WORLD_SIZE']")
        assert sizes == dict.fromkeys(["worker1", "worker2", "worker3"], "3")


def test_a_worker_that_is_lost_before_the_function_begins_is_named(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_group = spmd._make_group

    def lose(*args: Any) -> str:
        token = make_group(*args)
        cluster.kill("worker2")
        until(lambda: cluster.lost == ["worker2"] and cluster.workers == ["worker1"])
        return token

    monkeypatch.setattr(spmd, "_make_group", lose)
    with Cluster(2) as cluster, pytest.raises(WorkerLostError, match="worker2"):
        cluster.spmd(in_torch)


def unread() -> None:
    if rpcbench.rpc.get_worker_info().name == "worker2":
        raise ModuleNotFoundError("worker2 has no such module")


class Unreadable:
    """An argument that worker2 cannot unpickle."""

    def __reduce__(self) -> Any:
        return unread, ()


def test_a_rank_whose_arguments_cannot_be_read_ends_the_others(cluster: Cluster) -> None:
    def train(_: Any) -> None:
        in_torch()

    with pytest.raises(Exception, match="worker2 has no such module") as caught:
        cluster.spmd(train, Unreadable())
    (first, last) = caught.value.__notes__
    assert first.startswith("also on worker1: RankFailedError: rank 1 (worker2) failed in train: ")
    assert last.startswith("also on worker3: RankFailedError: rank 1 (worker2) failed in train: ")


def test_a_group_that_is_there_after_the_end_of_its_run_is_ended(cluster: Cluster) -> None:
    """After Ctrl-C the end of a run can overtake the making of its group."""
    place = cluster.rpc_sync("worker1", spmd.open_store)
    cluster.rpc_sync("worker1", note_as_over, (place,))
    with pytest.raises(CollectiveError, match="the notebook has ended this run"):
        cluster.rpc_sync("worker1", spmd.init_default_group, (place, 0, 1, "gloo"))
    cluster.rpc_sync("worker1", spmd.end_group, (place,))


def note_as_over(place: spmd.StorePlace) -> None:
    spmd._over.append(place)


def interrupt_once_begun(cluster: Cluster, noted: Path, train: Callable[[], None]) -> str:
    """Run a function on all ranks, and press Ctrl-C once each has noted its begin; return the error's text."""

    def press() -> None:
        until(lambda: len([*noted.iterdir()]) == 3)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        cluster.spmd(train)
    presser.join()
    return str(caught.value)


@pytest.mark.parametrize("waiting", [in_torch, in_ours, computing])
def test_ctrl_c_interrupts_all_ranks(cluster: Cluster, tmp_path: Path, waiting: Callable[[], None]) -> None:
    def train() -> None:
        (tmp_path / str(dist.get_rank())).touch()
        if dist.get_rank() == 0:
            computing()
        waiting()

    interrupt_once_begun(cluster, tmp_path, train)


def test_the_prompt_comes_back_from_ranks_that_all_wait_in_torch(cluster: Cluster, tmp_path: Path) -> None:
    def train() -> None:
        (tmp_path / str(dist.get_rank())).touch()
        dist.recv(torch.ones(2), (dist.get_rank() + 1) % 3)  # no rank sends

    assert "the cell was interrupted" in interrupt_once_begun(cluster, tmp_path, train)


def test_an_error_of_all_ranks_alike_is_raised_once(cluster: Cluster) -> None:
    with pytest.raises(ZeroDivisionError):
        cluster.spmd(lambda: 1 / 0)
    with pytest.raises(TypeError, match="missing 1 required"):
        cluster.spmd(lambda lr: lr)


def test_a_group_that_is_there_already_is_left_alone(cluster: Cluster) -> None:
    cluster.mesh(dp=3)
    with pytest.raises(CollectiveError, match=r"worker1, worker2, worker3 are in a process group already, .*destroy"):
        cluster.spmd(in_torch)
    assert cluster.run("worker3", "mesh.size()") == 3
    cluster.run("all", "import rpcbench.distributed\nrpcbench.distributed.destroy_process_group()")


def test_a_worker_that_is_left_in_a_group_of_torch_is_refused_at_once(no_leaks: None) -> None:
    """Its program was stopped, another rank has been started again, and torch's store answers no more."""
    with Cluster(2) as cluster:
        cluster.run("all", "import torch\ntorch.distributed.init_process_group()\ntorch.distributed.barrier()")
        cluster.restart("worker2")
        cluster.scale(3)
        said = r"^worker1 is in a process group already, .*destroy_process_group\(\) there .*restart\('worker1'\)"
        with pytest.raises(CollectiveError, match=said):
            cluster.spmd(in_torch)
        assert "call of notebook" not in str(cluster.stack("worker1"))
        code = "import rpcbench.distributed\nrpcbench.distributed.get_world_size()"
        assert cluster.run("worker1", code, timeout=PATIENCE) == 2, "taking it over does not wait for its store"
        cluster.run("worker1", "import rpcbench.distributed\nrpcbench.distributed.destroy_process_group()")
        assert total(cluster) == [3.0] * 3


def test_bad_arguments_are_refused_before_anything_runs(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match=r"spmd runs a function on each rank, and 'train.py' is none: cluster.spmd"):
        cluster.spmd("train.py")
    with pytest.raises(CollectiveError, match="there is no backend 'glo': use 'gloo'"):
        cluster.spmd(in_torch, backend="glo")
    with pytest.raises(rpcbench.UnknownWorkerError, match="worker9"):
        cluster.spmd(in_torch, workers=["worker1", "worker9"])
    with pytest.raises(rpcbench.SerializationError, match="generator"):
        cluster.spmd(place, (n for n in range(3)), name="c")


def test_a_worker_that_is_lost_ends_all_and_is_named(no_leaks: None) -> None:
    def train() -> None:
        if dist.get_rank() == 1:
            os._exit(1)
        dist.all_reduce(torch.ones(2))

    with Cluster(2) as cluster:
        with pytest.raises(WorkerLostError, match="worker2"):
            cluster.spmd(train)
        with pytest.raises(WorkerLostError, match=r"worker2 is lost: start it again with cluster.restart\('worker2'\)"):
            cluster.spmd(in_torch)
        assert total(cluster, workers="worker1") == [1.0]
        assert cluster.restart("worker2", replay=True) == []
        assert total(cluster) == [2.0, 2.0]


@pytest.mark.long
def test_ranks_on_several_hosts_have_their_places_there(
    no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(tmp_path, monkeypatch.setenv, ["h1", "h2"], LOCAL)
    options = {"template": "srun -w {host} {cmd}", "hosts": "h1,h1,h2"}
    with Cluster(3, launcher="command", options=options, address="127.0.0.1") as cluster:
        found = cluster.spmd(place, 0, name="c")
        assert [places[0] + places[2] + places[3] for _, _, _, places, _ in found] == ["002", "112", "201"]
        assert total(cluster, workers="[1:]") == [2.0, 2.0]
        cluster.scatter("x", torch.arange(3))
        assert cluster["worker3"]["x"].item() == 2 and torch.equal(cluster.gather("x"), torch.arange(3))


def test_the_first_cause_comes_before_those_that_it_ended() -> None:
    ended = Failed("worker1", RankFailedError("rank 1"), ["a line"], False)
    stopped = Failed("worker2", RuntimeError(), ["a line"], True)
    cause = Failed("worker3", ValueError("bad"), ["a line"], False)
    assert spmd._first_cause_first([ended, stopped, cause]) == [cause, stopped, ended._replace(lines=[])]
