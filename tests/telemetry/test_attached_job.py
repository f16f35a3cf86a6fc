"""A torchrun job that knows nothing of this project, seen through torch's debug server, while a rank of it hangs."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rpcbench
from rpcbench.panels import panel
from rpcbench.telemetry.attached_job import AttachedJob
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
PATIENCE = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachedJob]:
    folder, port = tmp_path_factory.mktemp("job"), free_port()
    (folder / "hang.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*torchrun, "hang.py", str(port)], cwd=folder, stdout=log, stderr=log)
    try:
        yield attach_once_it_hangs(f"127.0.0.1:{port}", process, folder / "log")
    finally:
        process.terminate()
        process.wait(PATIENCE)


def attach_once_it_hangs(address: str, process: subprocess.Popen[bytes], log: Path) -> AttachedJob:
    """Attach when the job's server answers and rank 2 has reached its loop."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            found = rpcbench.attach(address)
            if "load_batch" in found.stack(2) and len(found.collectives().rows) == 6:
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
