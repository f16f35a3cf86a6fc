"""Worlds on several hosts: plain scripts in two network namespaces, over TLS."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from netlab import SECONDS, Host, hosts

from rpcbench.base.errors import RpcError
from rpcbench.cli.main import main
from rpcbench.rpc.init import resolve_config
from rpcbench.transport import run_dir

__all__ = ["hosts"]

MASTER = """
import torch
import rpcbench.rpc as rpc

def only_here(x):
    return x * factor

factor = 7
rpc.init_rpc("master", rank=0, world_size=3)
print(rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 2)).tolist())
print(rpc.rpc_sync("worker1", min, (5, 3)), rpc.rpc_sync("worker2", only_here, (6,)))
print(rpc.rpc_sync("worker2", "only_there", (6,)))
print(rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker2", max, (8, 9))))
big = torch.arange(1 << 20)
print(torch.equal(rpc.rpc_sync("worker1", torch.neg, (big,)), -big))
members = rpc._get_current_rpc_agent().machine.read_node(lambda node: sorted(node.members.members.values()))
print([member.remote.split(":")[0] for member in members])
rpc.shutdown()
"""
WORKER = """
import sys
import rpcbench.rpc as rpc

def only_there(x):
    return f"{rpc.get_worker_info().name} says {x}"

rpc.init_rpc("worker" + sys.argv[1], rank=int(sys.argv[1]), world_size=3)
rpc.shutdown()
"""


@pytest.fixture
def env(hosts: tuple[Host, Host], tmp_path: Path, no_leaks: None) -> dict[str, str]:
    run_dir.make_secret(tmp_path / "secret")
    return {
        "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "RPCBENCH_SECRET_FILE": f"{tmp_path}/secret",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def script(directory: Path, name: str, text: str) -> Path:
    path = directory / f"{name}.py"
    path.write_text(text)
    return path


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    try:
        return [process.communicate(timeout=2.5 * SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.process
def test_a_world_of_scripts_works_on_two_hosts(hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path) -> None:
    """worker1 is on the master's host, worker2 on the other: unix sockets and TLS in one world. They write the address
    of the master in another way."""
    master, worker = script(tmp_path, "master", MASTER), script(tmp_path, "worker", WORKER)
    here, there = hosts
    other = {**env, "MASTER_ADDR": f"10.231.{7 * 256 + 1}"}  # by the rules for short addresses: 10.231.7.1
    running = [
        here.start(master, env=env), here.start(worker, "1", env=other), there.start(worker, "2", env=other)
    ]  # fmt: skip
    said = finish(running)
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert said[0][0].splitlines() == [
        "[3.0, 3.0]", "3 42", "worker2 says 6", "9", "True", "['tls', 'tls', 'tls']"
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.process
def test_a_worker_with_another_secret_is_refused(hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path) -> None:
    other = tmp_path / "other"
    run_dir.make_secret(other)
    worker = script(tmp_path, "worker", WORKER)
    master = hosts[0].start(script(tmp_path, "master", MASTER), env=env)
    stranger = hosts[1].start(worker, "1", env={**env, "RPCBENCH_SECRET_FILE": str(other)})
    (said,) = finish([stranger])
    assert "AuthenticationError" in said[1] and "another secret" in said[1], said
    master.send_signal(signal.SIGINT)
    finish([master])


OPEN = """
import builtins, sys, time
import rpcbench.rpc as rpc

builtins.callers = []  # of this process, and no value that a function takes along

def there():
    return [info.name[-1] for info in rpc._get_current_rpc_agent().members()]

def call(caller, called):
    builtins.callers.append(caller)
    return called

rank = sys.argv[1]
rpc.init_rpc("worker" + rank, rank=int(rank))
for sign, other in sys.argv[2:]:  # +2: until 2 has come, who is called then; -2: until it has gone; ?2: has called
    while other not in builtins.callers if sign == "?" else (other in there()) != (sign == "+"):
        time.sleep(0.02)
    if sign == "+":
        print(rpc.rpc_sync("worker" + other, call, (rank, other)), flush=True)
rpc.shutdown()
"""


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(450)  # five interpreters load torch, in three turns
def test_leadership_passes_on_between_hosts(hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path) -> None:
    """Only ranks 0 and 1 are on the master's host: 1 takes its port over; then 2 leads, and its host finds it."""
    here, there = hosts
    path = script(tmp_path, "open", OPEN)
    first = here.start(path, "0", "+1", "+2", "?1", "?2", env=env)
    second = here.start(path, "1", "+0", "-0", "+3", "?3", env=env)
    third = there.start(path, "2", "+0", "-1", "+4", "?4", env=env)
    assert finish([first]) == [("1\n2\n", "")]
    late = there.start(path, "3", "+1", "-1", env=env)
    assert finish([second]) == [("0\n3\n", "")]
    last = there.start(path, "4", "+2", "-2", env=env)
    said = finish([third, late, last])
    assert [out for out, _ in said] == ["0\n4\n", "1\n", "2\n"]
    # rank 4, which leads at the end, may be gone before it reports that
    assert "worker2 leads its world now; newcomers on other hosts will not find it: " in said[0][1]


# -- in this process
def test_an_address_beyond_loopback_is_refused_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RPCBENCH_SECRET_FILE", raising=False)
    with pytest.raises(RpcError, match=r"Make one with: rpcbench secret .*RPCBENCH_SECRET_FILE"):
        resolve_config("me", "tcp://192.0.2.7:29500", 0, 2, 5.0, 3)


def test_the_secret_command_makes_a_private_file_and_keeps_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secret"
    assert main(["secret", str(path)]) == 0
    assert f"RPCBENCH_SECRET_FILE={path}" in capsys.readouterr().out
    assert path.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("RPCBENCH_SECRET_FILE", str(path))
    assert run_dir.load_secret() == bytes.fromhex(path.read_text())
    assert main(["secret", str(path)]) == 1
    assert "File exists" in capsys.readouterr().err
    assert run_dir.load_secret() == bytes.fromhex(path.read_text()), "the old secret stays"


@pytest.mark.parametrize("text", ["", "secret", "ab" * 31, "ab" * 33, "zz" * 32])
def test_a_secret_of_a_wrong_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    monkeypatch.setenv("RPCBENCH_SECRET_FILE", str(path))
    with pytest.raises(ValueError, match="does not hold a secret; make one with: rpcbench secret"):
        run_dir.load_secret()


def test_a_secret_that_other_users_can_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.make_secret(tmp_path / "secret")
    os.chmod(tmp_path / "secret", 0o640)
    monkeypatch.setenv("RPCBENCH_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(PermissionError, match="chmod go-rwx"):
        run_dir.load_secret()


def test_rank_0_listens_at_the_master_address_and_the_others_at_their_bind_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.make_secret(tmp_path / "secret")
    monkeypatch.setenv("RPCBENCH_SECRET_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("RPCBENCH_BIND", "192.0.2.9")
    found = [resolve_config("me", "tcp://192.0.2.7:29500", rank, 2, 5.0, 3) for rank in (0, 1)]
    assert [config.remote for config in found] == ["tls://192.0.2.7:29500", "tls://192.0.2.9:0"]
    assert {config.leader for config in found} == {"tls://192.0.2.7:29500"}
    assert {config.bind for config in found} == {"192.0.2.9"}
    assert found[0].secret == found[1].secret == run_dir.load_secret()


# -- cables that are cut, processes that are stopped
WATCHING = """
import sys, threading
import rpcbench.rpc as rpc
from rpcbench.base.errors import WorkerLostError

def forever():
    threading.Event().wait()

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

rpc.init_rpc("master", rank=0)
rpc._get_current_rpc_agent().on_member(lambda kind, who, reason: kind == "joined" or say(kind, who.name))
rpc.wait_for(2)
say(rpc.rpc_sync("worker1", max, (1, 2)))
future = rpc.rpc_async("worker1", forever, timeout=0)
if sys.stdin.readline() == "ask\\n":
    say(rpc.rpc_sync("worker1", max, (3, 4)), future.done())
else:
    try:
        future.wait()
    except WorkerLostError as error:
        say("raised", error.maybe_executed)
rpc.shutdown(graceful=False)
"""
WATCHED = """
import ctypes, queue, signal
import rpcbench.rpc as rpc
signal.signal(signal.SIGUSR1, lambda *_: ctypes.PyDLL(None).sleep(8))  # and holds Python's lock meanwhile
rpc.init_rpc("worker1", rank=1)
agent, ends = rpc._get_current_rpc_agent(), queue.SimpleQueue()
agent.on_member(lambda kind, who, reason: ends.put(kind) if kind in ("left", "lost") else None)
print("in", flush=True)
if ends.get() == "lost":
    agent.links.closing.wait()  # the world ends with a master that has not said goodbye; else this rank leads it now
print("out", flush=True)
rpc.shutdown(graceful=False)
"""
LOST_SECONDS = 4.0
CUTS = {
    "both ways": lambda here, there: there.cut(),
    "from the worker": lambda here, there: there.mute(here),
    "from the master": lambda here, there: here.mute(there),
}


@pytest.fixture
def pair(hosts: tuple[Host, Host], env: dict[str, str], tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """A master that waits for a call to its worker on the other host."""
    master = hosts[0].start(script(tmp_path, "master", WATCHING), env=env)
    worker = hosts[1].start(script(tmp_path, "worker", WATCHED), env=env)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == "in\n"
        assert heard(master, "2") == ["2"]
        yield [master, worker]
    finally:
        finish([master, worker])


def heard(process: subprocess.Popen[str], last: str) -> list[str]:
    """The lines of a process up to this one."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or lines[-1] != last:
        line = process.stdout.readline()
        assert line, (lines, process.stderr and process.stderr.read())
        lines.append(line.rstrip())
    return lines


def order(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    print(word, file=process.stdin, flush=True)


@pytest.mark.process
@pytest.mark.parametrize("how", [pytest.param(how, marks=pytest.mark.long) if "from" in how else how for how in CUTS])
def test_both_sides_of_a_partition_detect_it_in_time(
    hosts: tuple[Host, Host], pair: list[subprocess.Popen[str]], how: str
) -> None:
    """The master reports the loss, and its call fails; the worker ends its world by itself."""
    master, worker = pair
    CUTS[how](*hosts)
    begin = time.monotonic()
    order(master, "wait")
    told = {*heard(master, "raised True")}
    assert time.monotonic() - begin < 5 * LOST_SECONDS
    assert heard(worker, "out") == ["out"]
    assert time.monotonic() - begin < 10 * LOST_SECONDS, "the worker gets no message about it, and had a call to answer"
    assert {*told, *master.stdout.read().splitlines()} >= {"raised True", "lost worker1"}  # type: ignore[union-attr]
    said = finish([master, worker])
    assert [process.returncode for process in pair] == [0, 0], said


@pytest.mark.long
@pytest.mark.process
def test_a_stopped_worker_that_goes_on_is_suspected_and_not_lost(pair: list[subprocess.Popen[str]]) -> None:
    """It is silent for longer than the limit; but its host acknowledges, so it is not reported as lost."""
    master, worker = pair
    worker.send_signal(signal.SIGSTOP)
    assert heard(master, "suspect worker1") == ["suspect worker1"]
    time.sleep(6)  # nothing must happen in this time
    worker.send_signal(signal.SIGCONT)
    is_there_again(master, worker)


@pytest.mark.long
@pytest.mark.process
def test_a_worker_that_holds_the_gil_is_suspected_and_not_lost(pair: list[subprocess.Popen[str]]) -> None:
    """None of its threads can send a heartbeat; but its host acknowledges."""
    master, worker = pair
    worker.send_signal(signal.SIGUSR1)
    assert heard(master, "suspect worker1") == ["suspect worker1"]
    is_there_again(master, worker)


def is_there_again(master: subprocess.Popen[str], worker: subprocess.Popen[str]) -> None:
    """Check that the worker has recovered, and that the call in flight still is in flight."""
    assert heard(master, "recovered worker1") == ["recovered worker1"]
    order(master, "ask")
    assert heard(master, "4 False") == ["4 False"]
    assert heard(worker, "out") == ["out"]
