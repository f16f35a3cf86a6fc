"""The faults that workers and their users may meet, in real processes: one test for each row of the fault table.

After each test the cluster is used again, and it leaves nothing behind. Rows with tests elsewhere:

     3  a stopped worker                tests/rpc/test_hosts.py: test_a_stopped_worker_that_goes_on_...
     4  Python's lock held elsewhere    tests/rpc/test_hosts.py: test_a_worker_that_holds_the_gil_...
     5, 6  partitions                   tests/rpc/test_hosts.py: test_both_sides_of_a_partition_detect_it_in_time
     9  a broken connection             tests/runtime/test_reconnection.py
    10  the driver is killed            tests/launch/test_cluster.py: test_a_driver_leaves_nothing_however_it_ends
    11  Ctrl-C in a call                tests/launch/test_cluster.py: test_ctrl_c_...
    16, 17  too large; strangers        tests/runtime/test_strangers.py
    21, 22  backward                    tests/autograd/test_pass_faults.py
    30  shutdown with calls in flight   tests/launch/test_cluster.py: test_shutdown_...
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deeds
import psutil
import pytest
from worlds import stop, until

import rpcbench
from rpcbench.base.errors import (
    DeadlockError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    ShutdownError,
    WorkerLostError,
)
from rpcbench.rpc import RRef

pytestmark = pytest.mark.process
BOUND = 5.0
"""Seconds; what the table asks for is 0.5 for a lost process."""


@pytest.fixture
def cluster(no_leaks: None) -> Iterator[rpcbench.Cluster]:
    """Two workers; after the test the cluster still works, its tables become empty, and it leaves nothing behind."""
    with rpcbench.Cluster(2) as made:
        yield made
        made.scale(2)
        names = made.workers
        assert [made.rpc_sync(name, deeds.pid_there, (other,)) for name, other in zip(names, names[::-1], strict=True)]
        until(lambda: not any(left(made)), "the tables to be empty")


def left(cluster: rpcbench.Cluster) -> list[Any]:
    gc.collect()
    mine = {n: t for n, t in cluster.agent.tables().items() if t and n not in ("ops", "steps", "jobs", "cells")}
    return [mine, *(cluster.rpc_sync(name, deeds.left) for name in cluster.workers)]


@pytest.fixture
def bound() -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 5 * BOUND


def lost(future: Any, reason: str) -> WorkerLostError:
    begin = time.monotonic()
    with pytest.raises(WorkerLostError, match=reason) as caught:
        future.wait()
    assert time.monotonic() - begin < BOUND
    return caught.value


def test_row_01_calls_to_a_killed_worker_fail_and_the_others_go_on(cluster: rpcbench.Cluster) -> None:
    kept: RRef[list[int]] = cluster.remote("worker1", list, ((1, 2),))
    assert kept.to_here() == [1, 2]
    theirs = cluster.rpc_async("worker2", deeds.call_there, ("worker1",))
    mine = cluster.rpc_async("worker1", deeds.stand_still)
    until(lambda: cluster.rpc_sync("worker1", deeds.begun) == 2)
    os.kill(cluster.pid("worker1"), signal.SIGKILL)
    assert lost(mine, r"worker1 was lost before stand_still had finished.*killed by SIGKILL").maybe_executed
    lost(theirs, r"worker1 was lost before stand_still had finished.*killed by SIGKILL")
    with pytest.raises(WorkerLostError, match="worker1"):
        kept.to_here()
    assert cluster.rpc_sync("worker2", max, (1, 2)) == 2, "the other worker goes on"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (deeds.segfault, r"(?s)killed by SIGSEGV.*Fatal Python error: Segmentation fault.*in segfault"),
    ],
    ids=["exit", "segfault"],
)
def test_row_02_a_call_whose_worker_exits_fails_with_the_reason(
    cluster: rpcbench.Cluster, function: Any, reason: str
) -> None:
    lost(cluster.rpc_async("worker1", function), reason)


def test_row_03_a_stopped_worker_is_not_lost_and_answers_once_when_it_goes_on(cluster: rpcbench.Cluster) -> None:
    """On one host, silence is no sign of a loss; a deadline still ends a wait."""
    stop(cluster.pid("worker1"))
    try:
        waiting = cluster.rpc_async("worker1", deeds.count)
        with pytest.raises(RpcTimeoutError, match="worker1"):
            cluster.rpc_sync("worker1", max, (1, 2), timeout=0.5)
        assert cluster.rpc_sync("worker2", max, (1, 2)) == 2 and not waiting.done()
    finally:
        os.kill(cluster.pid("worker1"), signal.SIGCONT)
    assert waiting.wait() == 1
    assert cluster.rpc_sync("worker1", deeds.count) == 2


def test_row_04_a_worker_that_holds_the_gil_is_not_reported_as_lost(cluster: rpcbench.Cluster) -> None:
    """For seconds no thread of the worker can run, not even one that sends heartbeats."""
    told: list[str] = []
    cluster.agent.on_member(lambda kind, who, reason: told.append(f"{kind} {who.name}"))
    count = 300_000_000
    busy = cluster.rpc_async("worker1", sum, (range(count),))
    assert cluster.rpc_sync("worker2", deeds.pid_there, ("worker1",)) == cluster.pid("worker1")
    assert busy.wait() == count * (count - 1) // 2 and told == []


@pytest.mark.alone
def test_row_11_ctrl_c_ends_each_kind_of_wait_at_once(no_leaks: None) -> None:
    """The fault table asks for a fifth of a second."""
    script = Path(__file__).with_name("waits.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    after = {name: float(seconds) for name, seconds in map(str.split, done.stdout.splitlines())}
    waits = ["init_rpc", "wait", "then", "wait_all", "rpc_sync", "to_here", "wait_for", "usable", "shutdown", "done"]
    assert list(after) == waits and done.returncode == 0, done.stderr
    assert all(seconds < 1 for seconds in after.values()), after


@pytest.mark.long
def test_row_12_a_worker_does_not_grow_when_the_driver_reads_no_telemetry(no_leaks: None) -> None:
    driver = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("slow_driver.py"))], stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        worker = psutil.Process(int(driver.stdout.readline()))
        stop(driver.pid)
        try:
            sizes = [worker.memory_info().rss for _ in range(20) if not time.sleep(0.25)]
        finally:
            driver.send_signal(signal.SIGCONT)
        assert driver.stdout.read() == "usable\n"
        assert max(sizes[4:]) - sizes[4] < 16 << 20, [size >> 20 for size in sizes]
    assert driver.returncode == 0


def test_row_13_a_worker_that_runs_out_of_memory_raises_memory_error_and_goes_on(cluster: rpcbench.Cluster) -> None:
    before = cluster.pid("worker1")
    with pytest.raises(MemoryError):
        cluster.rpc_sync("worker1", deeds.with_less_memory, (1 << 30,))
    assert cluster.rpc_sync("worker1", deeds.with_less_memory, (1 << 20,)) == 1 << 20
    assert cluster.pid("worker1") == before


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group with 700 MB."""
    group = GROUPS / f"rpcbench-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(700 << 20))
    except OSError as error:
        pytest.skip(f"no control group for memory can be made here: {error}")
    yield group
    group.rmdir()


OUT_OF_MEMORY = """
import sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
import deeds, rpcbench
with rpcbench.Cluster(1) as cluster:
    try:
        cluster.rpc_sync("worker1", deeds.take, (2 << 30,))
    except rpcbench.WorkerLostError as error:
        print(error)
    cluster.scale(1)
    assert cluster.rpc_sync("worker1", max, (1, 2)) == 2
"""


@pytest.mark.long
def test_row_13_a_worker_that_the_kernel_kills_for_memory_is_lost_with_that_reason(
    memory_group: Path, no_leaks: None
) -> None:
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(memory_group)]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    lost = "before take had finished: its process ended (killed by SIGKILL, likely out of memory"
    assert lost in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


def test_row_14_an_unpicklable_value_is_named_at_the_caller(cluster: rpcbench.Cluster) -> None:
    held = cluster.remote("worker2", list)
    with pytest.raises(SerializationError, match=r"^args\[0\]\['lock'\]: cannot pickle '_thread.lock'"):
        cluster.rpc_sync("worker1", print, (deeds.make_lock(), held))
    with pytest.raises(SerializationError, match=r"^result\['lock'\]: cannot pickle '_thread.lock'"):
        cluster.rpc_sync("worker1", deeds.make_lock)
    with pytest.raises(ValueError, match=r"held by.*<unlocked _thread.lock object") as caught:
        cluster.rpc_sync("worker1", deeds.fail_with_lock)
    assert isinstance(caught.value.__cause__, RemoteError) and "in fail_with_lock" in str(caught.value.__cause__)


def test_row_15_a_value_that_fails_while_it_is_unpickled_fails_only_its_call(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(deeds.Untidy, match=r"^7: seven$"):
        cluster.rpc_sync("worker1", deeds.fail, (deeds.Untidy, 7, "seven"))
    with pytest.raises(RpcError, match="ExplosiveError on worker1"):
        cluster.rpc_sync("worker1", deeds.fail, (deeds.ExplosiveError,))
    with pytest.raises(ValueError, match="explosive"):
        cluster.rpc_sync("worker1", print, (deeds.Explosive(),))
    with pytest.raises(ValueError, match="explosive"):
        cluster.rpc_sync("worker1", deeds.Explosive)


def test_row_19_calls_can_nest_far_deeper_than_the_number_of_threads(cluster: rpcbench.Cluster) -> None:
    assert cluster.rpc_sync("worker1", deeds.nest, (200, "worker1", "worker2")) == 200
    calls = [cluster.rpc_async("worker1", deeds.call_back, ("notebook", number)) for number in range(64)]
    assert [call.wait() for call in calls] == list(range(64))


def test_row_20_waits_in_a_circle_raise_deadlock_error(cluster: rpcbench.Cluster) -> None:
    one, two = cluster.remote("worker1", deeds.wait_for_held), cluster.remote("worker2", deeds.wait_for_held)
    cluster.rpc_sync("worker1", deeds.hold, (two,))
    cluster.rpc_sync("worker2", deeds.hold, (one,))
    begin = time.monotonic()
    for rref in (one, two):
        with pytest.raises(DeadlockError, match="wait_for_held on worker1 → to_here on worker2 → wait_for_held on wor"):
            rref.to_here()
    assert time.monotonic() - begin < 5 * BOUND
    own = cluster.remote("worker1", deeds.use_held)
    del one, two, rref, own
    for name in cluster.workers:
        cluster.rpc_sync(name, deeds.drop_held)


def test_row_23_users_of_a_killed_owner_raise_at_once(cluster: rpcbench.Cluster) -> None:
    kept = cluster.remote("worker1", list, ((1,),))
    cluster.rpc_sync("worker2", deeds.hold, (kept,))
    making = cluster.remote("worker1", deeds.stand_still)
    fetch = making.to_here_async()
    os.kill(cluster.pid("worker1"), signal.SIGKILL)
    lost(fetch, "worker1")
    for use in (kept.to_here, lambda: cluster.rpc_sync("worker2", deeds.fetch, (kept,)), making.to_here):
        with pytest.raises(WorkerLostError, match=r"worker1|its owner is lost"):
            use()
    with pytest.raises(WorkerLostError, match="worker1"):
        cluster.rpc_sync("worker2", deeds.use_held)
    cluster.rpc_sync("worker2", deeds.drop_held)


def test_row_24_owners_drop_the_forks_of_a_killed_user(cluster: rpcbench.Cluster) -> None:
    kept, own = cluster.remote("worker2", list, ((1,),)), RRef([2])
    for rref in (kept, own):
        cluster.rpc_sync("worker1", deeds.hold, (rref,))
    rref_id = str(kept._rref)
    until(lambda: _holders(cluster, rref_id) == [0, 1])
    os.kill(cluster.pid("worker1"), signal.SIGKILL)
    until(lambda: _holders(cluster, rref_id) == [0], "worker2 to drop the forks of worker1")
    until(lambda: not cluster.agent.tables()["owned"], "the driver to let go of its value")
    assert kept.to_here() == [1]
    del kept, rref, own


def _holders(cluster: rpcbench.Cluster, rref: str) -> list[int]:
    owned = cluster.rpc_sync("worker2", deeds.left)["owned"]
    return sorted(fork["holder"] for fork in owned[rref]["forks"])


def test_row_26_a_call_without_a_free_descriptor_fails_with_that_reason(cluster: rpcbench.Cluster) -> None:
    words = cluster.rpc_sync("worker1", deeds.without_descriptors, ("worker2",))
    assert "Too many open files" in words and "worker2" in words


FEW_FILES = """
import os, resource, sys, rpcbench
before, have = resource.getrlimit(resource.RLIMIT_NOFILE), len(os.listdir("/proc/self/fd"))
for more in range(4, 60):  # with fewer even the run directory can be neither made nor removed
    resource.setrlimit(resource.RLIMIT_NOFILE, (have + more, before[1]))
    try:
        with rpcbench.Cluster(1) as cluster:
            print("usable", cluster.rpc_sync("worker1", max, (1, 2)))
        break
    except (OSError, rpcbench.RpcError) as error:
        print(repr(str(error)))
"""


def test_row_26_a_cluster_without_enough_descriptors_fails_and_leaves_nothing(no_leaks: None) -> None:
    """Each attempt has one more descriptor, until it works: each failure names the reason and leaves nothing behind."""
    done = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, timeout=120)
    *words, last = done.stdout.splitlines()
    assert last == "usable 2" and words, done.stdout + done.stderr
    assert all("Too many open files" in line for line in words), words
    assert done.returncode == 0


def test_row_29_a_restarted_worker_is_reachable_and_its_old_values_are_lost(cluster: rpcbench.Cluster) -> None:
    kept = cluster.remote("worker1", list, ((1,),))
    cluster.rpc_sync("worker2", deeds.hold, (kept,))
    for _ in range(2):
        before = cluster.pid("worker1")
        cluster.restart("worker1")
        assert cluster.rpc_sync("worker2", deeds.pid_there, ("worker1",)) == cluster.pid("worker1") != before
        with pytest.raises(WorkerLostError, match="was lost with the worker1 that held it"):
            kept.to_here()
        with pytest.raises(WorkerLostError, match="was lost with the worker1 that held it"):
            cluster.rpc_sync("worker2", deeds.use_held)
    cluster.rpc_sync("worker2", deeds.drop_held)


def test_row_30_calls_and_rrefs_fail_after_shutdown(no_leaks: None) -> None:
    with rpcbench.Cluster(1) as made:
        busy = made.rpc_async("worker1", deeds.stand_still)
        kept = made.remote("worker1", list)
    with pytest.raises(ShutdownError, match="the cluster was stopped while this ran"):
        busy.wait()
    for late in (kept.to_here, lambda: made.rpc_sync("worker1", max, (1, 2))):
        with pytest.raises(RuntimeError, match=r"is gone: RPC was shut down|RPC has not been initialized"):
            late()
    made.shutdown()
