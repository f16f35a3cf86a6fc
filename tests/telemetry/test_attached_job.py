"""A torchrun job that knows nothing of this project, seen through torch's debug server, while a rank of it hangs."""

from __future__ import annotations

import http.server
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_traces import cpu_job

import rpcbench
from rpcbench.cli.main import main
from rpcbench.panels import panel
from rpcbench.telemetry.attached_job import AttachedJob
from rpcbench.telemetry.cluster_state import check_state, read_job_state, state_text
from rpcbench.telemetry.debug_pages import DebugServer

PROGRAM = """
import sys, time, torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server
dist.init_process_group("gloo")
start_debug_server(port=int(sys.argv[1]))
def load_batch():
    while True: time.sleep(0.1)
for step in range(5):
    dist.all_reduce(torch.ones(8))
if dist.get_rank() == 2:
    load_batch()
dist.all_reduce(torch.ones(8))
"""
BUSY = """
import sys, torch, torch.distributed as dist
from torch.distributed.debug import start_debug_server
dist.init_process_group("gloo")
start_debug_server(port=int(sys.argv[1]))
a = torch.ones(300, 300)
while True:
    for _ in range(20 if dist.get_rank() == 2 else 1):
        a = torch.tanh(a @ a)
    dist.all_reduce(torch.ones(8))
"""
PATIENCE = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedJob]:
    with started_job(tmp_path_factory.mktemp("job"), PROGRAM, hangs) as found:
        yield found


def hangs(found: AttachedJob) -> bool:
    return "load_batch" in found.stack(2) and len(found.collectives().rows) == 6


@contextmanager
def started_job(folder: Path, program: str, is_ready: Callable[[AttachedJob], bool]) -> Iterator[AttachedJob]:
    """Run a program on four ranks, and attach to it once it is ready."""
    port = free_port()
    (folder / "hang.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*torchrun, "hang.py", str(port)], cwd=folder, stdout=log, stderr=log)
    try:
        yield attach_once_ready(f"127.0.0.1:{port}", process, folder / "log", is_ready)
    finally:
        process.terminate()
        process.wait(PATIENCE)


def attach_once_ready(
    address: str, process: subprocess.Popen[bytes], log: Path, is_ready: Callable[[AttachedJob], bool]
) -> AttachedJob:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            found = rpcbench.attach(address)
            if is_ready(found):
                return found
        except ConnectionError:
            pass  # it still starts
        time.sleep(0.2)
    raise AssertionError(f"the job did not come up:\n{log.read_text()}")


def test_it_says_its_ranks_and_hosts(job: AttachedJob) -> None:
    assert job.ranks == ["rank 0", "rank 1", "rank 2", "rank 3"] and set(job.hosts) == {socket.gethostname()}
    assert "A job of 4 ranks on" in repr(job) and "read only" in repr(job)


def test_stacks_are_those_of_the_program(job: AttachedJob) -> None:
    waits, works = str(job.stack(0)), str(job.stack("rank2"))
    assert "hang.py:12" in waits and "site-packages" not in waits
    assert "hang.py:7 in load_batch" in works and "hang.py:11" in works
    assert str(job.stack()).count("MainThread") == 4
    with pytest.raises(ValueError, match="the job has no rank 9: it has 0 to 3"):
        job.stack(9)


def test_the_rank_that_hangs_is_named_with_its_line(job: AttachedJob) -> None:
    found = job.explain()
    assert "all_reduce #6 of world is under way; rank 2 not there yet" in found
    assert "hang.py:7 in load_batch" in found and "hang.py:12" not in found


def test_its_collectives_are_a_timeline_and_a_panel(job: AttachedJob) -> None:
    timeline = job.collectives(last=2)
    assert [row["state"] for row in timeline.rows.values()] == ["done", "open"]
    assert "rank 2 not there yet" in timeline.summary
    assert "all_reduce" in str(panel("messages", job))


def test_its_state_is_read_from_a_shell(job: AttachedJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", job.address]) == 0
    said = capsys.readouterr().out
    assert f"A job of 4 ranks at {job.address}, at " in said
    assert "all_reduce #6 of world is under way; rank 2 not there yet" in said
    assert re.search(r"^  rank 2 on .*hang.py:7 in load_batch: while True", said, re.MULTILINE)
    assert main(["state", "--json", job.address]) == 0
    document = json.loads(capsys.readouterr().out)
    check_state(document)
    assert document["cluster"]["workers"] == job.ranks
    assert [row["name"] for row in document["sections"]["members"].values()] == job.ranks
    (hangs,) = [row for row in document["sections"]["collectives"].values() if row["state"] == "open"]
    assert 0 < document["at"] - (document["epoch"] + hangs["begin"]) < PATIENCE


def test_of_a_job_without_a_recorder_the_state_has_its_stacks(job: AttachedJob, monkeypatch: Any) -> None:
    def refuse() -> None:
        raise ConnectionError("no rank has sent its flight recorder: rank 0: it is off")

    monkeypatch.setattr(job, "read_world", refuse)
    document = read_job_state(job)
    check_state(document)
    assert "load_batch" in document["sections"]["stacks"]["rank 2"]["text"]
    assert "it is off" in state_text(document)


def test_a_job_that_hangs_has_a_profile_that_is_idle(job: AttachedJob) -> None:
    made = job.profile(0.5)
    assert [*made.members] == job.ranks and not made.missing and made.seconds >= 0.5
    assert all(row["compute"] == 0 and row["idle"] > 0 for row in made.table(by="kind").rows)


def test_the_ranks_of_a_job_that_works_are_profiled_on_one_clock(tmp_path: Path) -> None:
    with started_job(tmp_path, BUSY, lambda found: len(found.collectives().rows) > 3) as found:
        # On a busy machine the first profile may begin on one rank when it has ended on another.
        made = next(made for made in (found.profile(2.0) for _ in range(10)) if not made.remarks)
    assert [*made.members] == found.ranks and not made.missing
    compute = {row["worker"]: row["compute"] for row in made.table(by="kind").rows}
    assert max(compute, key=compute.__getitem__) == "rank 2"
    said = made.explain()
    assert said.startswith("rank 2 kept the others waiting") and "aten::" in said


@pytest.mark.parametrize("seconds", [0.0, -1.0, 46.0])
def test_a_profile_of_no_time_or_too_long_is_refused(job: AttachedJob, seconds: float) -> None:
    with pytest.raises(ValueError, match="give more than 0 s, and 45 s at most"):
        job.profile(seconds)


def test_a_closed_port_is_told() -> None:
    with pytest.raises(ConnectionError, match=r"no debug server of torch answers at 127.* calls .*start_debug_server"):
        rpcbench.attach(f"127.0.0.1:{free_port()}")


@pytest.mark.parametrize("address", ["", "host:port", "host:99999", "https://host:1", "host:1/path", "ftp://host"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(ValueError, match="no address of a debug server"):
        DebugServer.at_address(address)


def test_addresses_may_be_hosts_urls_and_of_ipv6() -> None:
    assert DebugServer.at_address("node7") == DebugServer("node7", 25999)
    assert DebugServer.at_address("http://node7:8000/") == DebugServer("node7", 8000)
    assert str(DebugServer.at_address("[::1]:80")) == "[::1]:80"


class Pages(http.server.BaseHTTPRequestHandler):
    """A server of other pages, or of torch's with a rank that did not answer."""

    page = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def pages() -> Iterator[type[Pages]]:
    kind = type("ThesePages", (Pages,), {"port": 0})
    with http.server.HTTPServer(("127.0.0.1", 0), kind) as server:
        kind.port = server.server_port  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield kind
        server.shutdown()
        thread.join()


def test_another_server_is_told(pages: type[Pages]) -> None:
    pages.page = b"<h1>nginx</h1>"
    with pytest.raises(ConnectionError, match=r"answers, but it is no debug server of torch .*nginx"):
        rpcbench.attach(f"127.0.0.1:{pages.port}")  # type: ignore[attr-defined]
    pages.page = b"<h1>Torch Distributed Debug Server</h1> in another form"
    with pytest.raises(ConnectionError, match="of another form"):
        rpcbench.attach(f"127.0.0.1:{pages.port}")  # type: ignore[attr-defined]


def test_a_rank_that_sends_no_profile_is_missing_with_its_reason(pages: type[Pages]) -> None:
    head, trace = b"<h1>Torch Distributed Debug Server</h1>", json.dumps(cpu_job()[0]).encode()
    refused = b"""<h2>Rank 1: http://b:1/handler/torch_profile?duration=1</h2>
        <p>Failed to fetch: status=500</p> <pre>RuntimeError: a profiler runs</pre>"""
    sent = b"""<h2>Rank 0: http://a:1/handler/torch_profile?duration=1</h2>
        <script>
        function run0() {
            var data = %b;
            openPerfetto(data);
        }</script>"""
    pages.page = head + sent % trace + refused
    found = rpcbench.attach(f"127.0.0.1:{pages.port}")  # type: ignore[attr-defined]
    made = found.profile()
    assert [*made.members] == ["rank 0"]
    assert "rank 1 is missing: RuntimeError: a profiler runs (status 500)" in repr(made)
    pages.page = head + refused
    with pytest.raises(ConnectionError, match=r"no rank has sent its profile: RuntimeError: a profiler runs"):
        found.profile()
    pages.page = head + sent % b'{"traceEvents": [' + refused
    with pytest.raises(ValueError, match=r"the profile of rank 0 cannot be read .* it is cut off"):
        found.profile()


def test_a_rank_that_does_not_answer_its_server_is_told(pages: type[Pages]) -> None:
    pages.page = b"""<h1>Torch Distributed Debug Server</h1>
        <h2>Rank 0: http://a:1/handler/dump_traceback?</h2> <pre>Thread 0x1 (most recent call first):
  File "/x/train.py", line 3 in step
</pre>
        <h2>Rank 1: http://b:1/handler/dump_traceback?</h2>
            <p>Failed to fetch: status=503</p>
            <pre>ConnectionError: refused</pre>"""
    found = rpcbench.attach(f"127.0.0.1:{pages.port}")  # type: ignore[attr-defined]
    assert found.hosts == ["a", "b"]
    assert str(found.stack()).splitlines() == [
        "rank 0 (a):", "  MainThread", "      /x/train.py:3 in step",
        "rank 1 (b) did not answer its debug server: ConnectionError: refused (status 503)",
    ]  # fmt: skip
