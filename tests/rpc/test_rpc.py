"""`init_rpc` to `shutdown` in separate processes, and refused arguments; tests/runtime tests the calls themselves."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import rpcbench.rpc as rpc
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import IncompleteWorldError, RpcError
from rpcbench.launch.process import ProcessLauncher
from rpcbench.rpc import init
from rpcbench.rpc.init import resolve_config
from rpcbench.transport import run_dir
from rpcbench.transport.run_dir import RunDirectory

pytestmark = pytest.mark.process
SECONDS = 30.0
Run = Callable[..., None]


@pytest.fixture(scope="module")
def launcher() -> Iterator[ProcessLauncher]:
    with contextlib.closing(ProcessLauncher(RunDirectory(), entry="rpc_ranks:main")) as made:
        made.warm()  # the files of its fork server belong to no test
        yield made


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for the sockets of this test; afterwards none may be left."""
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)
        for meeting in Path(path).glob("meeting*"):  # torch's own files, which a busy machine may leave
            meeting.unlink()
        assert {file.name for file in Path(path).rglob("*") if not file.is_dir()} <= {"secret", "lock"}


@pytest.fixture
def run(launcher: ProcessLauncher, runtime: Path) -> Run:
    """Run a function of `rpc_ranks` in several processes at once; only a killed process may leave its socket."""

    def run_all(function: str, ranks: int = 3, killed: int | None = None) -> None:
        configs = [WorldConfig(f"{function}{i}", i, function, str(runtime), b"") for i in range(ranks)]
        handles = [launcher.start(config) for config in reversed(configs)]
        try:
            ends = {handle.name: handle.wait(SECONDS) for handle in handles}
        finally:
            words = "\n".join(handle.last_words() for handle in handles)
            print(words)
        assert ends == {config.name: -9 if config.id == killed else 0 for config in configs}, words
        for left in runtime.rglob(f"{killed}.*.sock"):
            left.unlink()

    return run_all


@pytest.mark.parametrize(
    "function", ["calls", "rrefs", "asynchronous", "again", "served_until_all_are_ready", "waited_for"]
)
def test_three_ranks_call_each_other(run: Run, function: str) -> None:
    run(function)


@pytest.mark.parametrize("function", ["lets_go", "leaks", "old_ways", "by_store", "same_names"])
def test_three_ranks_join_and_shut_down(run: Run, function: str) -> None:
    run(function)


def test_calls_end_at_their_timeouts(run: Run) -> None:
    run("timeouts", ranks=2)


def test_a_killed_rank_is_named_and_shutdown_does_not_wait_for_it(run: Run) -> None:
    run("dies", killed=1)


@pytest.mark.parametrize("function", ["leader_dies", "leader_dies_as_soon_as_it_is_in"])
def test_ranks_do_not_wait_for_a_killed_leader(run: Run, runtime: Path, function: str) -> None:
    """Their shutdown raises, or, if the leader had joined, they have joined, too. A later world can use the address."""
    run(function, killed=0)
    assert list(runtime.rglob("leader"))
    run("calls")


def test_a_rank_can_leave_early(run: Run) -> None:
    run("goes_early")


def test_shutdown_waits_for_the_other_ranks_up_to_its_timeout(run: Run) -> None:
    run("forgets_to_shut_down", ranks=2)


def test_ranks_can_join_and_leave_a_world_without_a_size(run: Run) -> None:
    run("comers_and_goers")


def test_leadership_passes_on_when_the_leader_leaves(run: Run) -> None:
    run("lead_passes_on", ranks=4)


def test_an_open_world_ends_when_its_leader_is_killed(run: Run) -> None:
    run("leader_of_an_open_world_dies", killed=0)


def test_all_ranks_can_join_and_leave_repeatedly(run: Run) -> None:
    run("come_and_go", ranks=4)


SCRIPT = """
import torch
import rpcbench.rpc as rpc
import contextlib
import os
rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}")
if rank == 0:
    print(rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 3)).tolist(), rpc.get_worker_info("worker1"))
    rpc.remote("worker1", int, args=(4,))
rpc.shutdown()
"""


def test_a_program_for_torch_joins_by_environment_variables(runtime: Path) -> None:
    base = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    ranks = [
        subprocess.Popen(command, env={**base, "RANK": rank}, text=True, stdout=pipe, stderr=pipe) for rank in "01"
    ]
    done = [rank.communicate(timeout=SECONDS) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], done
    assert done == [("[4.0, 4.0] WorkerInfo(id=1, name=worker1)\n", ""), ("", "")]


FAILS = """
import atexit, time
import torch.multiprocessing as mp

def run(rank):
    if rank == 0:
        atexit.register(time.sleep, 1)  # runs last, when the other has long seen that the connection has ended
    import rpcbench.rpc as rpc
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("w1", max, (1, 2))
        1 / 0
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
"""


@pytest.mark.long
def test_a_program_that_spawns_ranks_shows_the_first_error(runtime: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ZeroDivisionError: division by zero"), done.stderr


# -- in this process
@pytest.fixture
def alone(runtime: Path, no_leaks: None) -> Iterator[rpc.TensorPipeRpcBackendOptions]:
    """Options for a world in this process alone."""
    yield rpc.TensorPipeRpcBackendOptions(init_method="file:///nowhere/meeting", rpc_timeout=0.3)
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown(graceful=False)


def test_a_world_of_one_member_serves_its_own_calls(alone: rpc.TensorPipeRpcBackendOptions) -> None:
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=alone)
    assert rpc.rpc_sync("me", int, ("7",), timeout=SECONDS) == 7 and rpc.get_worker_info() == rpc.WorkerInfo("me", 0)
    rpc.shutdown()


@pytest.mark.parametrize(
    ("rank", "message", "census"),
    [
        (
            0,
            r"rank0 waited for a world of 2 workers, but only 1 came: rank0; missing: rank 1\. With this",
            "rank 1",
        ),
        (1, r"rank1 cannot reach worker 0 of its world: nobody answers at", "not even member 0 answered"),
    ],
)
def test_init_rpc_fails_if_its_world_stays_incomplete(
    alone: rpc.TensorPipeRpcBackendOptions,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    message: str,
    census: str,
) -> None:
    monkeypatch.setattr(init, "JOIN_SECONDS", 4.0)
    monkeypatch.setattr(init, "_LONG_SECONDS", 1.5)  # by then this process is in its world, alone
    with pytest.raises(IncompleteWorldError, match=message) as caught:
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=alone)
    assert f"rank{rank} waits for its world; only" in caplog.text and census in caplog.text
    assert f"one host, here {socket.gethostname()!r}" in str(caught.value) and "'tcp://ADDRESS" in str(caught.value)
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.get_worker_info()
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=alone)


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "must be non-empty"), ("with space", "must match"), ("ü", "must match"), ("n" * 128, "shorter than 128")],
)
def test_an_invalid_worker_name_is_refused(alone: rpc.TensorPipeRpcBackendOptions, name: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        rpc.init_rpc(name, rank=0, world_size=1, rpc_backend_options=alone)
    rpc.init_rpc("n" * 127, rank=0, world_size=1, rpc_backend_options=alone)
    assert rpc.get_worker_info().name == "n" * 127


def test_a_taken_rank_is_refused(alone: rpc.TensorPipeRpcBackendOptions) -> None:
    rpc.init_rpc("first", rank=0, rpc_backend_options=alone)
    from rpcbench.rpc.init import start_agent

    with pytest.raises(RpcError, match="another process already listens"):
        start_agent(resolve_config("second", alone.init_method, 0, None, 0.3, 4))


ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize("url", ["env://", "tcp://localhost:29500", "tcp://127.0.0.1:29500?rank=1&world_size=4"])
def test_urls_of_one_address_lead_to_one_world(runtime: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    found = resolve_config("me", url, *((1, 4) if url.endswith("29500") else (-1, None)), 5.0, 3)
    assert (found.id, found.world_size, found.rpc_timeout, found.threads) == (1, 4, 5.0, 3)
    assert found.cluster == resolve_config("me", "env://", 0, None, 5.0, 3).cluster
    assert found.secret == resolve_config("me", "env://", 0, None, 5.0, 3).secret
    assert found.cluster != resolve_config("me", "tcp://localhost:29501", 0, 4, 5.0, 3).cluster


def test_all_names_and_addresses_of_a_host_lead_to_one_world(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCBENCH_SECRET_FILE", str(runtime / "secret"))
    run_dir.make_secret(runtime / "secret")
    known = {"box": "192.0.2.7", "box.lan": "192.0.2.7", "192.0.2.7": "192.0.2.7", "other": "192.0.2.8"}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (known[host], 0))])
    monkeypatch.setattr(init.hosts, "address_towards", lambda leader: "")
    found = {host: resolve_config("me", f"tcp://{host}:29500", 1, 2, 5.0, 3) for host in known}
    assert len({each.directory for each in found.values()}) == 2 and len({each.cluster for each in found.values()}) == 1
    assert found["box"].directory == found["box.lan"].directory == found["192.0.2.7"].directory


def test_arguments_take_precedence_over_the_environment(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    found = resolve_config("me", "env://", 3, 8, 5.0, 3)
    assert (found.id, found.world_size) == (3, 8)


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("env://", ValueError, "variable RANK expected, but not set: it needs RANK, MASTER_ADDR, MASTER_PORT;"),
        ("file://", ValueError, "path missing: .* names no file"),
        ("file:///tmp/x", ValueError, "rank parameter missing: pass rank="),
        ("tcp://localhost", ValueError, "port number missing"),
        ("tcp://10.1.2.3:29500?rank=1", RpcError, r"rpcbench secret .*RPCBENCH_SECRET_FILE"),
        ("zmq://x", RuntimeError, "use env://, file:///path or tcp://"),
    ],
)
def test_an_invalid_url_is_refused(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, url: str, error: type[Exception], message: str
) -> None:
    for key in ENVIRONMENT:
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(error, match=message):
        resolve_config("me", url, -1, None, 5.0, 3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_worker_threads": 0}, RuntimeError),
        ({"rpc_timeout": -1.0}, RuntimeError),
        ({"device_maps": {"a": {"cuda:0": "cuda:1", "cuda:1": "cuda"}, "b": {"cuda:0": "nowhere"}}}, RuntimeError),
        ({"device_maps": {"a": {"cuda:0": "cuda:1", "cpu": "cuda:1"}}}, ValueError),
        ({"devices": ["cuda:0", "cpu"]}, ValueError),
        ({"colour": "red"}, TypeError),
    ],
)
def test_invalid_options_are_refused(options: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        rpc.TensorPipeRpcBackendOptions(**options)  # type: ignore[arg-type]


def test_device_maps_can_grow_and_stay_one_to_one() -> None:
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"a": {"cuda": "cuda:1"}}, devices=["cuda:1"])
    options.set_device_map("a", {torch.device("cuda:1"): "cpu", "cuda:0": torch.device("cuda", 1)})
    options.set_device_map("b", {"cpu": "cuda:0"})
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("a", {"cuda:0": "cuda:0"})
    options.set_devices(["cuda:0"])
    zero, one, cpu = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    assert options.device_maps == {"a": {zero: one, one: cpu}, "b": {cpu: zero}} and options.devices == [zero]


def test_same_modes_sends_the_callers_grad_mode_with_each_call(runtime: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{runtime}/meet", same_modes=True)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with torch.no_grad():
            assert not rpc.rpc_sync("me", torch.is_grad_enabled)
    finally:
        rpc.shutdown()


def test_init_rpc_keeps_valid_device_maps_and_refuses_invalid_ones(runtime: Path) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{runtime}/meet", device_maps={"me": {"cpu": "cpu"}})
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    try:
        cpu = torch.device("cpu")
        assert rpc._get_current_rpc_agent()._get_device_map(rpc.get_worker_info()) == {cpu: cpu}
        assert rpc.rpc_sync("me", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    finally:
        rpc.shutdown()
    options.set_device_map("nobody", {"cpu": "cpu"})
    with pytest.raises(ValueError, match=r"^Node me has invalid target node names in its device maps: .'nobody'"):
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    assert not rpc._is_current_rpc_agent_set()
