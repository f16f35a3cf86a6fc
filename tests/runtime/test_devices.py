"""Device maps. The fake accelerator cannot be removed again, so its cases run in a separate process."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current, values
from rpcbench.transport.base import Link
from rpcbench.wire.messages import Member, View
from tests.worlds import config

CASES = Path(__file__).with_name("device_cases.py")
ROOT = CASES.parent.parent.parent


def test_device_maps_work_on_a_fake_accelerator() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def member(id_: int, count: int, maps: dict[str, dict[str, str]] | None = None, used: tuple[str, ...] = ()) -> Member:
    devices = values.validate_device_maps(used, maps or {})._replace(kind="cuda", number=count)
    return Member(id_, f"worker{id_}", 0, "", devices=devices)


BASE = "Node worker0 has"


@pytest.mark.parametrize(
    ("maps", "used", "other", "said"),
    [
        ({"worker1": {"cuda:0": "cuda:1", "cpu": "cpu"}}, (), (), None),
        ({"worker1": {"cuda:0": "cpu"}}, ("cuda:0", "cuda:1"), ("cuda:0",), None),
        (
            {"worker7": {"cuda:0": "cuda:1"}},
            (),
            (),
            f"{BASE} invalid target node names in its device maps: ['worker7']",
        ),
        (
            {"worker1": {"cuda:2": "cuda:0"}},
            (),
            (),
            f"{BASE} source devices with invalid indices in its device map for",
        ),
        (
            {"worker1": {"cuda:0": "cuda:2"}},
            (),
            (),
            f"{BASE} target devices with invalid indices in its device map for",
        ),
        ({"worker1": {"xpu:0": "cuda:0"}}, (), (), f"{BASE} source devices with invalid indices"),
        (
            {"worker1": {"cuda:0": "cuda:0", "cuda:1": "cuda:0"}},
            (),
            (),
            f"{BASE} duplicated target devices in its device",
        ),
        ({}, ("cuda:0", "cuda:0"), (), f"{BASE} duplicated devices: cuda:0, cuda:0"),
        ({}, ("cuda:0", "cuda:2"), (), f"{BASE} devices with invalid indices: cuda:2; worker0 has 2 of cuda"),
        ({"worker1": {"cuda:1": "cuda:0"}}, ("cuda:0",), (), f"{BASE} unexpected source devices in its device map for"),
        ({"worker1": {"cuda:0": "cuda:0"}}, (), ("cuda:1",), f"{BASE} unexpected target devices in its device map for"),
    ],
)
def test_invalid_device_maps_are_refused_with_a_reason(
    maps: Any, used: tuple[str, ...], other: tuple[str, ...], said: str | None
) -> None:
    found = values.find_map_error([member(0, 2, maps, used), member(1, 2, used=other)], closed=True)
    assert found == said or (said is not None and found is not None and found.startswith(said))


def test_a_map_in_an_open_world_can_name_unknown_workers() -> None:
    maps = {"worker7": {"cuda:0": "cuda:1"}}
    assert values.find_map_error([member(0, 2, maps)], closed=False) is None
    assert values.find_map_error([member(0, 0, maps)], closed=False) is not None


class LateView(Link):
    """The view of the complete world is delayed on its way to the last member."""

    def __init__(self, sender: list[threading.Thread]) -> None:
        super().__init__()
        self._sender = sender

    def handle_outgoing(self, to: int, seq: int, message: Any, may_wait: bool) -> None:
        slow = to == 2 and isinstance(message, View) and message.complete
        if slow and self._sender[0] is not threading.current_thread():
            self._sender[0].join(0.5)  # time to leave, for a member that does not wait for the others
        super().handle_outgoing(to, seq, message, may_wait)


def test_all_members_of_a_closed_world_get_the_same_error_about_a_map(tmp_path: Path) -> None:
    heard: dict[int, str] = {}
    threads: list[threading.Thread] = []

    def join(number: int, maps: dict[str, dict[str, str]]) -> None:
        try:
            start_agent(config(tmp_path, number, world_size=3, device_maps=maps), LateView(threads))
        except ValueError as error:
            heard[number] = str(error)

    wrong = {"worker2": {"cuda:99": "cpu"}}
    threads += [threading.Thread(target=join, args=(i, wrong if i == 1 else {})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(heard) == 3 and len(set(heard.values())) == 1
    assert heard[0].startswith("Node worker1 has source devices with invalid indices in its device map for worker2")
    assert current.find_current() is None
