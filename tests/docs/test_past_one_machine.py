"""Each block of docs/past-one-machine.md runs, with commands that only pretend to reach other hosts."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from pathlib import Path

import pytest

import rpcbench
from rpcbench.cells.targets import Targets
from rpcbench.launch.registry import OWN
from rpcbench.notebook.cluster_magic import Commands
from rpcbench.transport import hosts

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "launch"))
from far_commands import LINES, PAGE, provide  # noqa: E402  (beside the tests of launchers)

ALL = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = [block for block in ALL if '"ray"' not in block]  # that one runs with the tests of Ray, tests/launch
HOSTS = ["node1", "node2", "node3", "pod-1", "pod-2", "box1"]

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def commands(no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provide(tmp_path, monkeypatch.setenv, HOSTS)
    monkeypatch.setenv(hosts.BIND_VARIABLE, "127.0.0.1")  # no interface of the machine that runs this is used


def test_the_page_has_a_block_for_each_kind_of_launcher() -> None:
    words = " ".join(ALL)
    assert all(word in words for word in ('"ssh ', '"srun ', '"kubectl ', '"docker ')) and LINES
    assert all(f'launcher="{name}"' in words for name in OWN)


@pytest.mark.long
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_start_workers(block: str) -> None:
    names = {"rpcbench": rpcbench}
    exec(block, names)
    with names["cluster"] as cluster:
        assert cluster.run("all", "6 * 7") == dict.fromkeys(cluster.workers, 42)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


@pytest.mark.long
@pytest.mark.parametrize("line", LINES)
def test_cluster_magic_lines_start_workers(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = Commands(Targets(), lambda cluster: None)
    _, action, *words = shlex.split(line.replace("\\\n", "").replace("29500", free_port()))
    hosts = next((word.partition("=")[2].split(",") for word in words if word.startswith("hosts=")), HOSTS[:1])
    try:
        assert f"{words[0]} worker" in commands.by_name[action](words)
        found = commands.started[0].run("all", "import os\nos.environ['RPCBENCH_HOST_ID']")
        assert [*found.values()] == [hosts[0], hosts[-1]][: len(found)] and len(found) == int(words[0])
    finally:
        commands.stop_started_clusters()
