"""Inside the fence a command sees no process and no port of this machine, and leaves none behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from worlds import until

from benchmarks import fence, peers
from benchmarks.__main__ import main
from benchmarks.pairs import BenchError
from benchmarks.peer_notebook import OURS, PEERS, Plan

REACHES = """import socket, sys
def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True
here = socket.create_server(("", 0))
print(reaches(int(sys.argv[1])), reaches(here.getsockname()[1]))"""
LEAVES = """import subprocess, sys
left = subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)
print(left.pid)"""


@pytest.fixture
def fenced() -> None:
    """Skip without namespaces; ask the machine itself, because the fence must work wherever they exist."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("namespaces need util-linux and iproute2")
    probe = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "true"]
    if why := subprocess.run(probe, capture_output=True, text=True, timeout=60).stderr:
        pytest.skip(why)


def _inside(script: str, *arguments: str) -> str:
    return fence.run([sys.executable, "-c", script, *arguments]).strip()


@pytest.mark.usefixtures("fenced")
def test_a_fenced_command_sees_no_other_process() -> None:
    assert _inside("import os, psutil; print(os.getpid(), psutil.pids())") == "1 [1]"


@pytest.mark.usefixtures("fenced")
def test_a_fenced_command_reaches_only_its_own_ports() -> None:
    with socket.create_server(("", 0)) as ours:
        assert _inside(REACHES, str(ours.getsockname()[1])) == "False True"


@pytest.mark.usefixtures("fenced")
def test_processes_that_a_fenced_command_leaves_end_with_it() -> None:
    seconds = f"{3600 + os.getpid()}.5"  # no other process sleeps for this time
    assert _inside(LEAVES, seconds).isdecimal()
    # The system ends the remaining processes with the fence, which may take a moment.
    until(lambda: not any(seconds in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])))


@pytest.mark.usefixtures("fenced")
def test_a_failed_command_raises_an_error_with_its_output() -> None:
    with pytest.raises(BenchError, match="what went wrong"):
        _inside("import sys; sys.exit('what went wrong')")


@pytest.mark.long
@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fenced", "no_leaks")
def test_a_peer_is_measured_inside_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(peers, "measure")  # it cannot be measured outside
    seen = fence.measure(OURS._replace(fenced=True), Plan(calls=2, lines=3))
    assert tuple(seen) == (*peers.CALLS, *peers.TASKS.values(), *peers.STOPPED, *peers.KILLED)
    assert seen[peers.CALLS[2]].endswith("; 3 of 3")


def test_a_peer_that_needs_a_fence_is_not_measured_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(peers, "measure", lambda peer, plan: {"a row": "shown"})
    monkeypatch.setattr(type(OURS), "is_installed", True)
    monkeypatch.setattr(type(OURS), "version", "1.2")
    assert main(["--peers", "nbdistributed"]) == 0
    out = capsys.readouterr().out
    assert "nbdistributed could not be measured: it is a danger to others, and namespaces need unshare and ip" in out
    assert out.count("shown") == 1
    assert PEERS["nbdistributed"].fenced


def test_the_obstacle_is_reported_if_no_namespaces_can_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuses = tmp_path / "unshare"
    refuses.write_text("#!/bin/sh\necho 'unshare failed: not here' >&2\nexit 1\n")
    refuses.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "ip").symlink_to("/bin/true")
    assert fence.obstacle() == "no namespaces can be made: unshare failed: not here"
