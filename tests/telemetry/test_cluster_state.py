"""`rpcbench state`: what a cluster's own process tells another program, and the sentences where there is no cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import PATIENCE, until

import rpcbench
from rpcbench.base.errors import NotConnectedError, RpcError, WorkerLostError
from rpcbench.cli import state_command
from rpcbench.cli.main import main
from rpcbench.protocol.calls import CallKey, Fact, Need
from rpcbench.runtime.deadlocks import OtherWait, list_waits
from rpcbench.telemetry.cluster_state import STATE_SHAPES, check_state
from rpcbench.telemetry.panel_json import describe_fields
from rpcbench.transport import question_socket, run_dir
from rpcbench.transport.question_socket import QuestionSocket, ask_question, find_askable

BASES = run_dir.possible_bases
pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]  # programs here import torch: minutes on a busy machine


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """The only directory in which clusters are looked for; its path is short, as those of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="rb-", dir="/tmp") as base, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", base)
        patch.setattr(run_dir, "possible_bases", lambda: [Path(base)])
        yield Path(base)


Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(home: Path, capfd: pytest.CaptureFixture[str]) -> Ask:
    """Run `rpcbench state`; return its exit status, and what it has printed."""

    def run(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(["state", *words])
        said = capfd.readouterr()
        return status, said.err if status else said.out

    return run


def enter_all_but_one() -> None:
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        threading.Event().wait(PATIENCE)
    dist.all_reduce(torch.ones(4))


@pytest.fixture(scope="module")
def hanging(home: Path) -> Iterator[rpcbench.Cluster]:
    """Two workers; one waits in a collective that the other never enters. This process waits for both."""
    with rpcbench.Cluster(2) as cluster:
        with pytest.raises(ZeroDivisionError):
            cluster.run("worker1", "x = 1\n1 / 0")
        thread = threading.Thread(target=run_until_stopped, args=[cluster], daemon=True)
        thread.start()
        until(lambda: "Event().wait" in cluster.stack("worker2") and is_in_second_collective())
        yield cluster
        for name in cluster.workers:
            cluster.kill(name)
        thread.join(PATIENCE)


def run_until_stopped(cluster: rpcbench.Cluster) -> None:
    with pytest.raises(WorkerLostError):
        cluster.spmd(enter_all_but_one)


def is_in_second_collective() -> bool:
    return any(row["state"] == "open" and row["number"] == 2 for row in rpcbench.collectives().rows.values())


def test_the_rank_that_is_missing_is_named_with_the_line_that_it_runs(ask: Ask, hanging: rpcbench.Cluster) -> None:
    status, said = ask()
    assert status == 0
    assert f"{hanging.directory.name}: 2 workers of " in said and f"process {os.getpid()}" in said
    assert re.search(r"all_reduce.* #2 of world.* is under way; worker2 not there yet", said)
    assert "worker2 is in no collective" in said
    assert "in enter_all_but_one: threading.Event().wait(PATIENCE)" in said
    assert "cell worker1[1]: ZeroDivisionError: division by zero, in the cell: x = 1" in said


def test_the_same_as_json_has_the_fields_of_the_schema_and_no_others(ask: Ask, hanging: rpcbench.Cluster) -> None:
    status, said = ask("--json", hanging.directory.name)
    document = json.loads(said)
    check_state(document)
    assert status == 0 and document["cluster"]["workers"] == ["worker1", "worker2"]
    sections = document["sections"]
    for name, rows in sections.items():
        known = {field for field, _ in describe_fields(STATE_SHAPES[name])}
        assert {field for row in rows.values() for field in row} <= known
    (hangs,) = [row for row in sections["collectives"].values() if row["state"] == "open"]
    assert hangs["missing"] == ["worker2"]
    assert 0 <= document["at"] - (document["epoch"] + hangs["begin"]) < PATIENCE
    places = [row["places"] for row in sections["waits"].values() if row["member"] == "worker2" and row["thread"]]
    assert any("enter_all_but_one" in place for each in places for place in each)


def test_a_document_with_a_fault_is_refused(ask: Ask, hanging: rpcbench.Cluster) -> None:
    document = json.loads(ask("--json")[1])
    document["sections"]["members"]["1"]["now"] = None
    with pytest.raises(ValueError, match=r"section members, row '1': Expected `str`, got `null`"):
        check_state(document)
    with pytest.raises(ValueError, match="of version 2"):
        check_state({**document, "version": 2})


def test_a_cluster_is_named_by_its_directory_its_process_or_its_notebooks_name(
    ask: Ask, hanging: rpcbench.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hanging, "label", "main")
    whole = hanging.directory.name
    for name in (whole, whole.removeprefix("rpcbench-"), str(os.getpid()), "main"):
        assert ask(name)[0] == 0
    status, said = ask("mian")
    assert status == 2 and "no cluster is called mian: did you mean main?" in said
    assert f"{whole} (main): " in said


def test_of_two_clusters_one_must_be_named(ask: Ask, hanging: rpcbench.Cluster) -> None:
    with rpcbench.Cluster(1) as other:
        status, said = ask()
        assert status == 2 and "2 clusters of yours run here: name one by its first word" in said
        assert all(f"  {each.directory.name}: " in said for each in (hanging, other))
        status, said = ask(str(os.getpid()))
        assert status == 2 and f"2 clusters of yours run here as {os.getpid()}" in said
        assert ask(other.directory.name)[1].startswith(f"{other.directory.name}: 1 worker of ")
        name = other.directory.name
    assert "is called" in ask(name)[1]


def test_a_worker_that_was_lost_or_stopped_is_told(ask: Ask, home: Path) -> None:
    with rpcbench.Cluster(2) as cluster:
        cluster.kill("worker1")
        os.kill(cluster.pid("worker2"), signal.SIGSTOP)
        try:
            said = ask(cluster.directory.name)[1]
        finally:
            os.kill(cluster.pid("worker2"), signal.SIGCONT)
    assert "worker worker1: lost: killed by SIGKILL" in said
    assert "worker2: suspended" in said and "worker2 is stopped, by a signal or a debugger" in said


BUSY = """
import os, sys
sys.path[:0] = {path!r}
import rpcbench
cluster = rpcbench.Cluster(1, patience=300)
print("up", flush=True)
if {forks}:
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
while not {forks}:
    pass
sys.stdin.read()
"""


@pytest.fixture
def program(home: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a program with a cluster of its own, whose main thread is busy; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(forks: bool = False) -> subprocess.Popen[str]:
        code = BUSY.format(path=[str(Path(rpcbench.__file__).parents[1])], forks=forks)
        one = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(one)
        assert one.stdout is not None and one.stdout.readline() == "up\n"
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_it_is_told_while_a_cell_is_busy_and_not_once_its_process_has_ended(
    ask: Ask, program: Callable[..., subprocess.Popen[str]]
) -> None:
    busy = program()
    status, said = ask(str(busy.pid))
    assert status == 0 and f"process {busy.pid}" in said and "<string>:11" in said
    name = said.partition(":")[0]
    busy.kill()
    busy.wait(PATIENCE)
    status, said = ask(name)
    assert status and (f"{name} is gone" in said or "no cluster is called" in said)


def test_a_fork_of_the_program_does_not_keep_the_cluster_alive(
    home: Path, program: Callable[..., subprocess.Popen[str]]
) -> None:
    before = set(find_askable())
    forked = program(forks=True)
    (directory,) = set(find_askable()) - before
    assert ask_question(directory, "name", PATIENCE)["process"] == forked.pid
    forked.kill()
    forked.wait(PATIENCE)
    with pytest.raises(NotConnectedError, match="is gone: its process has ended"):
        ask_question(directory, "name", PATIENCE)


def test_a_process_that_is_stopped_is_told(
    ask: Ask, program: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(find_askable())
    stopped = program()
    (directory,) = set(find_askable()) - before
    monkeypatch.setattr(state_command, "_STATE_SECONDS", 0.5)
    monkeypatch.setattr(state_command, "_NAME_SECONDS", 0.5)
    stopped.send_signal(signal.SIGSTOP)
    status, said = ask(directory.name)
    assert status == 1 and "has not answered within 0.5 s: it is stopped" in said
    assert f"{directory.name}: a process that does not answer" in ask("nobody")[1]


def test_where_no_cluster_runs_it_is_told_where_it_looked(ask: Ask, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_dir, "possible_bases", lambda: [tmp_path])
    status, said = ask()
    assert status == 1 and f"none has a run directory in {tmp_path}" in said and "rpcbench state HOST:25999" in said
    assert "rpcbench-abc is gone" in ask("rpcbench-abc")[1]
    (tmp_path / "rpcbench-other").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    assert "rpcbench-other belongs to user" in ask("other")[1]


def test_a_job_that_does_not_answer_and_an_address_that_is_none_are_told(ask: Ask) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    status, said = ask(f"127.0.0.1:{port}")
    assert status == 1 and "no debug server of torch answers" in said
    status, said = ask("host:port")
    assert status == 2 and "is no address of a debug server" in said


def test_the_directories_are_looked_for_wherever_a_process_may_have_made_them(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert {tmp_path, Path("/tmp")} <= {*BASES()}


# -- the socket
def test_a_question_that_cannot_be_answered_is_told_and_others_are_answered(tmp_path: Path) -> None:
    def answer(question: str) -> str:
        if question == "why":
            raise KeyError(question)
        return question.upper()

    asked = QuestionSocket(tmp_path, answer)
    try:
        with pytest.raises(RpcError, match="could not tell its state: KeyError: 'why'"):
            ask_question(tmp_path, "why", PATIENCE)
        assert ask_question(tmp_path, "who", PATIENCE) == "WHO"
    finally:
        asked.close()
    with pytest.raises(NotConnectedError):
        ask_question(tmp_path, "who", PATIENCE)


def test_a_silent_asker_and_a_stranger_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_socket, "ASK_SECONDS", 0.1)
    asked = QuestionSocket(tmp_path, str.upper)
    try:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(tmp_path / "state"))
            assert ask_question(tmp_path, "who", PATIENCE) == "WHO"
        with monkeypatch.context() as other:
            other.setattr(os, "getuid", lambda: 4242)
            with pytest.raises(NotConnectedError):
                ask_question(tmp_path, "who", PATIENCE)
        assert ask_question(tmp_path, "who", PATIENCE) == "WHO"
    finally:
        asked.close()


# -- waits
def test_waits_are_rows_of_threads_and_of_calls() -> None:
    first, second = CallKey(0, 1), CallKey(1, 7)
    needs = Need(second, 2), Need(CallKey(9, 9), 1)
    found = {
        0: ([], [OtherWait("MainThread", (Need(first, 1),), ("Cell 3, line 1",))]),
        1: ([Fact(first, 1, "train", "waits", 2.5, needs, ("train.py:4",))], []),
        2: ([Fact(second, 2, "load", "runs", 1.0, (), ())], [OtherWait("reader", (), ("read.py:1",))]),
    }
    rows = list_waits({0: "notebook", 1: "worker1", 2: "worker2"}, found)
    assert [(row["member"], row["thread"], row["call"], row["caller"], row["state"]) for row in rows] == [
        ("notebook", "MainThread", "", "", "waits"), ("worker1", "", "train", "notebook", "waits"),
        ("worker2", "reader", "", "", "runs"), ("worker2", "", "load", "worker1", "runs"),
    ]  # fmt: skip
    assert rows[0]["needs"] == [{"call": "train", "on": "worker1"}]
    assert rows[1]["needs"] == [{"call": "load", "on": "worker2"}, {"call": "", "on": "worker1"}]
    assert (rows[1]["seconds"], rows[1]["places"]) == (2.5, ["train.py:4"])
