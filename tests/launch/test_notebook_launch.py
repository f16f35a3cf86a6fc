"""`rpcbench.notebook_launcher`: accelerate's arguments, honoured or refused; workers of a cluster or its own."""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from worlds import cluster_fixture

import rpcbench
from rpcbench import Cluster, RemoteError

pytestmark = pytest.mark.process
cluster = cluster_fixture(3)

PARAMETERS = {
    "args": (), "num_processes": None, "mixed_precision": "no", "use_port": "29500", "master_addr": "127.0.0.1",
    "node_rank": 0, "num_nodes": 1, "rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_conf": None,
    "rdzv_id": "none", "max_restarts": 0, "monitor_interval": 0.1, "log_line_prefix_template": None,
}  # fmt: skip
"""Of accelerate 1.15, in its order."""


def tell(prefix: str = "") -> None:
    total = torch.ones(())
    dist.all_reduce(total)
    print(f"{prefix}rank {dist.get_rank()} of {total.item():g}, {os.environ['ACCELERATE_MIXED_PRECISION']}")


def parameters(function: Any) -> dict[str, Any]:
    found = [*inspect.signature(function).parameters.values()]
    assert found[0].name == "function"
    return {each.name: each.default for each in found[1:]}


def test_its_parameters_are_those_of_accelerate() -> None:
    assert [*parameters(rpcbench.notebook_launcher).items()] == [*PARAMETERS.items()]


def test_an_accelerate_that_is_installed_has_them_too() -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate")
    assert parameters(accelerate.notebook_launcher) == parameters(rpcbench.notebook_launcher)


# those that need that no cluster runs come before the fixture of the others
def test_without_a_cluster_it_starts_workers_and_ends_them(
    no_leaks: None, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        (tmp_path / str(os.getpid())).touch()
        tell()
        raise KeyError("at the end")

    with pytest.raises(KeyError, match="at the end"):
        rpcbench.notebook_launcher(train, num_processes=2, max_restarts=1)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 4, "each attempt has new processes"
    assert not any(map(psutil.pid_exists, pids))
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        ["[worker1] rank 0 of 2, no", "[worker2] rank 1 of 2, no"] * 2
    )
    with pytest.raises(RuntimeError, match="no cluster is running"):
        rpcbench.cluster()


def test_without_a_cluster_and_gpus_it_needs_a_number() -> None:
    with pytest.raises(ValueError, match="this host shows no GPU to count: say how many ranks"):
        rpcbench.notebook_launcher(tell)


def test_a_lost_worker_is_started_again_for_the_next_attempt(no_leaks: None) -> None:
    def train() -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os._exit(1)
        dist.barrier()

    with Cluster(2) as cluster:
        rpcbench.notebook_launcher(train, max_restarts=1)
        assert cluster.lost == []


def test_it_runs_on_the_first_workers_of_the_cluster(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert rpcbench.notebook_launcher(tell, ("a ",), 2, "BF16", use_port=1, rdzv_backend="c10d") is None  # type: ignore[func-returns-value]
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[worker1] a rank 0 of 2, bf16", "[worker2] a rank 1 of 2, bf16",
    ]  # fmt: skip
    rpcbench.notebook_launcher(tell)
    assert len(capsys.readouterr().out.splitlines()) == 3
    code = "import os\nos.environ.get('ACCELERATE_MIXED_PRECISION')"
    assert cluster.run("all", code) == dict.fromkeys(cluster.workers)


def test_the_error_of_a_rank_names_it(cluster: Cluster) -> None:
    def train() -> None:
        if dist.get_rank() == 1:
            raise KeyError("data")
        dist.barrier()

    with pytest.raises(KeyError, match="data") as caught:
        rpcbench.notebook_launcher(train, num_processes=2)
    assert isinstance(caught.value.__cause__, RemoteError) and caught.value.__cause__.worker == "worker2"
    assert "also on worker1: RankFailedError: rank 1 (worker2) failed in train" in caught.value.__notes__[0]


def test_all_ranks_begin_again_after_an_error(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def train() -> None:
        count, most = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"]
        if count != "2" and dist.get_rank() == 1:
            raise KeyError(count)
        dist.barrier()
        print(f"{count} of {most}")

    rpcbench.notebook_launcher(train, num_processes=2, max_restarts=2)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[worker1] 2 of 2", "[worker2] 2 of 2"]
    assert "attempt 1 of 3 has failed on worker2: KeyError: '0'\nAll ranks begin again." in err
    with pytest.raises(KeyError, match="1"):
        rpcbench.notebook_launcher(train, num_processes=2, max_restarts=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_processes": 4}, "has 3 workers: %cluster scale 4 starts more"),
        ({"num_processes": 0}, "it is the number of ranks"),
        ({"num_nodes": 2}, "call notebook_launcher once"),
        ({"node_rank": 1}, "call notebook_launcher once"),
        ({"master_addr": "10.0.0.1"}, "call notebook_launcher once"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd': the ranks meet through the notebook"),
        ({"rdzv_endpoint": "a:1"}, "rdzv_endpoint='a:1': the ranks meet through the notebook"),
        ({"rdzv_conf": {"timeout": 1}}, "rdzv_conf=.*the ranks meet through the notebook"),
        ({"rdzv_id": "7"}, "rdzv_id='7': the ranks meet through the notebook"),
        ({"log_line_prefix_template": "[${rank}]"}, "each line has the name of its worker"),
        ({"mixed_precision": "fp4"}, "it is one of no, fp8, fp16, bf16"),
        ({"max_restarts": -1}, "it is 0 or more"),
    ],
)
def test_what_cannot_be_honoured_is_refused(cluster: Cluster, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rpcbench.notebook_launcher(tell, **given)


def test_only_a_function_can_run() -> None:
    with pytest.raises(TypeError, match="runs a function, and 3 is none"):
        rpcbench.notebook_launcher(3)  # type: ignore[arg-type]


def find_accelerate() -> tuple[int, str | None]:
    """Stand in for accelerate: how often its state was reset here, and whether it is told to use the CPU."""
    import types

    module = sys.modules.setdefault("accelerate.state", types.ModuleType("accelerate.state"))
    vars(module).setdefault("resets", [])

    class State:
        @staticmethod
        def _reset_state(**how: bool) -> None:
            module.resets.append(how)

    vars(module).update(AcceleratorState=State, GradientState=State)
    return len(module.resets), os.environ.get("ACCELERATE_USE_CPU")


def test_an_accelerator_of_an_earlier_run_is_forgotten(cluster: Cluster) -> None:
    use = None if torch.accelerator.is_available() else "yes"
    assert cluster.spmd(find_accelerate) == [(0, use)] * 3
    assert cluster.spmd(find_accelerate) == [(2, use)] * 3
    cluster.run("all", "import sys\ndel sys.modules['accelerate.state']")
