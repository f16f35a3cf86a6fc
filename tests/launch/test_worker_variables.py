"""`cluster["worker1"]` is a mapping of the variables of its cells; scatter and gather move parts of a value."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import long
from worlds import cluster_fixture, until

import rpcbench
from rpcbench import Cluster, SerializationError, UnknownVariableError, UnknownWorkerError, WorkerLostError

pytestmark = pytest.mark.process
shared = cluster_fixture(2, kinds=["process", *long("kernel")])


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    for name in shared.workers:
        shared[name].clear()


def test_a_variable_is_set_read_and_deleted(cluster: Cluster) -> None:
    there = cluster["worker1"]
    there["x"] = torch.ones(2, 3)
    assert cluster.run("worker1", "x.sum().item()") == 6.0 and "x" not in cluster["worker2"]
    cluster.run("worker1", "x[0, 0] = 5.0\nn = 7")
    assert there["x"][0, 0] == 5.0 and there["n"] == 7
    assert there.pop("n") == 7 and "n" not in there and there.get("n") is None
    del there["x"]
    with pytest.raises(NameError, match="'x'"):
        cluster.run("worker1", "x")


def test_variables_are_listed_without_those_of_ipython(cluster: Cluster) -> None:
    there = cluster["worker1"]
    assert list(there) == [] and len(there) == 0 and repr(there) == "worker1 has no variables"
    cluster.run("worker1", "import torch, numpy\nmodel = torch.nn.Linear(2, 2)\nlong = numpy.ones(3)\n_hidden = 1\n8")
    assert set(there) == {"torch", "numpy", "model", "long"} and len(there) == 4
    lines = repr(there).splitlines()
    assert lines[0] == "worker1 has:"
    assert set(lines[1:]) == {"  torch  module", "  numpy  module", "  model  Linear", "  long   float64[3]"}
    assert there["_hidden"] == 1 and there["_"] == 8
    assert "model" in there and "In" not in list(there)
    there.clear()
    assert list(there) == [] and there["_hidden"] == 1


def test_a_wrong_name_is_a_key_error_with_the_nearest_one(cluster: Cluster) -> None:
    there = cluster["worker1"]
    there["model"] = 1
    wrong: list[Callable[[str], Any]] = [there.__getitem__, there.__delitem__, there.pop]
    for use in wrong:
        with pytest.raises(KeyError) as caught:
            use("modle")
        assert isinstance(caught.value, UnknownVariableError)
        assert str(caught.value) == "worker1 has no variable 'modle': did you mean model? There are model"
    with pytest.raises(ValueError, match=r"'a\.b' is not the name of a variable"):
        there["a.b"] = 1
    with pytest.raises(UnknownWorkerError, match=r"did you mean worker1\? There are notebook, worker1, worker2"):
        cluster["wroker1"]
    with pytest.raises(UnknownWorkerError):
        cluster[cluster.agent.name]
    with pytest.raises(TypeError, match="a cluster has its workers by name, not by 0"):
        list(cluster)


def test_a_value_that_cannot_be_sent_is_named(cluster: Cluster) -> None:
    cluster.run("worker1", "steps = (n for n in range(3))")
    told = r"the value of steps on worker1 cannot be sent \(.*generator.*\): .* %%remote worker1 --rref steps"
    with pytest.raises(SerializationError, match=told):
        cluster["worker1"]["steps"]
    with pytest.raises(SerializationError, match="generator"):
        cluster["worker1"]["mine"] = (n for n in range(3))
    assert list(cluster["worker1"]) == ["steps"]


def test_variables_are_at_hand_while_a_cell_runs(cluster: Cluster, tmp_path: Path) -> None:
    done = tmp_path / "done"
    code = f"""import pathlib, time
step, stop = 0, False
while not stop:
    step += 1
    time.sleep(0.01)
pathlib.Path({str(done)!r}).touch()"""
    running = threading.Thread(target=cluster.run, args=("worker1", code))
    running.start()
    until(lambda: cluster["worker1"].get("step", 0) > 3)
    assert not done.exists() and {"step", "stop"} <= set(cluster["worker1"])
    cluster["worker1"]["stop"] = True
    running.join()
    assert done.exists()


def test_parts_go_to_each_worker_and_come_back_as_one(cluster: Cluster) -> None:
    x = torch.arange(10.0).reshape(5, 2)
    assert cluster.scatter("x", x) == {"worker1": 3, "worker2": 2}
    cluster.run("all", "y = x * 2\nn = len(x)")
    assert torch.equal(cluster.gather("y"), x * 2)
    assert torch.equal(cluster.gather("n", "stack"), torch.tensor([3, 2])) and cluster.gather("n", "sum") == 5
    assert torch.equal(cluster["worker2"]["x"], x[3:])
    assert cluster.scatter("x", x, dim=1, workers=["worker2", "worker1"]) == {"worker2": 1, "worker1": 1}
    assert torch.equal(cluster["worker2"]["x"], x[:, :1])
    assert torch.equal(cluster.gather("x", dim=1, workers=["worker2", "worker1"]), x)
    assert cluster.scatter("x", [1, 2], workers="worker2") == {"worker2": 2}
    assert cluster.gather("x", "list", workers="worker2") == [[1, 2]]


def test_mistakes_change_nothing(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="x has 1 row, and there are 2 workers"):
        cluster.scatter("x", [1])
    with pytest.raises(TypeError, match="x has type int"):
        cluster.scatter("x", 1)
    with pytest.raises(UnknownWorkerError, match="worker9"):
        cluster.scatter("x", [1, 2], workers=["worker1", "worker9"])
    with pytest.raises(ValueError, match=r"by 'mean': .*cat, stack, list, sum"):
        cluster.gather("x", "mean")
    assert [*cluster["worker1"], *cluster["worker2"]] == []
    cluster["worker1"]["x"] = 1
    with pytest.raises(UnknownVariableError, match="worker2 has no variable 'x': there are none"):
        cluster.gather("x")


def test_a_restarted_worker_that_runs_its_cells_again_gets_its_own_parts(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as cluster:
        cluster.scatter("x", torch.arange(4))
        cluster["worker2"]["n"] = 10
        cluster["worker2"]["gone"] = 1
        del cluster["worker2"]["gone"]
        cluster.run("all", "y = x + 1")
        cluster.kill("worker2")
        with pytest.raises(WorkerLostError, match="worker2"):
            cluster["worker2"]
        assert all(rerun.error is None for rerun in cluster.restart("worker2", replay=True))
        there: dict[str, Any] = dict(cluster["worker2"])
        assert set(there) == {"x", "n", "y"} and there["n"] == 10
        assert torch.equal(there["x"], torch.tensor([2, 3])) and torch.equal(cluster.gather("y"), torch.arange(4) + 1)
