"""The place where the leader is found: by many processes at once, during a hand-over, and after a death."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from rpcbench.transport.addresses import Opener
from rpcbench.transport.rendezvous import Rendezvous

WORLD, OTHER = 77, 78


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[list[str]]:
    """Addresses with a listener."""
    with ExitStack() as undo:
        addresses = []
        for number in range(8):
            listener, address = Opener(b"").open_listener(f"unix:{tmp_path}/{number}.0.sock")
            undo.callback(listener.close)
            addresses.append(address)
        yield addresses


@pytest.fixture
def meeting(tmp_path: Path) -> Rendezvous:
    return Rendezvous(tmp_path)


def dead(tmp_path: Path) -> str:
    """The address of a process that has died."""
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    return f"unix:{path}"


def test_a_new_rendezvous_has_no_leader(meeting: Rendezvous) -> None:
    with pytest.raises(FileNotFoundError):
        meeting.find_leader()


@pytest.mark.parametrize("left_over", [False, True])
def test_one_of_many_simultaneous_processes_founds_the_world(
    tmp_path: Path, listening: list[str], left_over: bool
) -> None:
    if left_over:
        assert Rendezvous(tmp_path).claim_leadership(OTHER, dead(tmp_path))
    start = threading.Barrier(len(listening))

    def come(address: str) -> bool:
        start.wait(20)
        return Rendezvous(tmp_path).claim_leadership(WORLD, address)

    with ThreadPoolExecutor(len(listening)) as comers:
        founded = list(comers.map(come, listening))
    assert sum(founded) == 1 and Rendezvous(tmp_path).find_leader() == listening[founded.index(True)]


def test_a_leader_is_found_at_each_moment_of_a_hand_over(tmp_path: Path, listening: list[str]) -> None:
    meeting, over = Rendezvous(tmp_path), threading.Event()
    assert meeting.claim_leadership(WORLD, listening[0])
    found: set[str] = set()

    def look() -> None:
        while not over.is_set():
            found.add(Rendezvous(tmp_path).find_leader())

    with ThreadPoolExecutor(1) as looking:
        seen = looking.submit(look)
        for view in range(1, 200):
            meeting.record_successor(WORLD, view, listening[view % 8])
            meeting.remove_address(listening[(view - 1) % 8])
        over.set()
        seen.result(20)
    assert found <= set(listening) and meeting.find_leader() == listening[199 % 8]


def test_the_record_of_the_latest_view_of_the_world_counts(meeting: Rendezvous, listening: list[str]) -> None:
    first, second, third, *_ = listening
    assert meeting.claim_leadership(WORLD, first)
    meeting.record_successor(WORLD, 9, third)  # the record of the second leader, which overtook that of the first
    meeting.record_successor(WORLD, 5, second)
    meeting.record_successor(OTHER, 11, first)  # a leader of a world that is over
    assert meeting.find_leader() == third


def test_a_leader_does_not_remove_the_record_of_another(meeting: Rendezvous, listening: list[str]) -> None:
    here, there, *_ = listening
    meeting.record_leadership(WORLD, 5, here)
    assert meeting.find_leader() == here
    meeting.record_leadership(WORLD, 7, there)
    assert meeting.find_leader() == here, "the leader of the record listens"
    meeting.remove_address(there)
    assert meeting.find_leader() == here
    meeting.remove_address(here)
    meeting.remove_address(here)
    with pytest.raises(FileNotFoundError):
        meeting.find_leader()


def test_a_removed_directory_is_not_created_again(tmp_path: Path, listening: list[str]) -> None:
    gone = tmp_path / "gone"
    meeting = Rendezvous(gone)
    meeting.record_leadership(WORLD, 1, listening[0])
    meeting.record_successor(WORLD, 2, listening[1])
    meeting.remove_address(listening[1])
    with pytest.raises(FileNotFoundError):
        meeting.claim_leadership(WORLD, listening[0])
    assert not gone.exists()
