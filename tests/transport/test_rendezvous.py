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
            listener, address = Opener(b"").listen(f"unix:{tmp_path}/{number}.0.sock")
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
        meeting.find()


@pytest.mark.parametrize("left_over", [False, True])
def test_one_of_many_simultaneous_processes_founds_the_world(
    tmp_path: Path, listening: list[str], left_over: bool
) -> None:
    if left_over:
        assert Rendezvous(tmp_path).found(OTHER, dead(tmp_path))
    start = threading.Barrier(len(listening))

    def come(address: str) -> bool:
        start.wait(20)
        return Rendezvous(tmp_path).found(WORLD, address)

    with ThreadPoolExecutor(len(listening)) as comers:
        founded = list(comers.map(come, listening))
    assert sum(founded) == 1 and Rendezvous(tmp_path).find() == listening[founded.index(True)]


def test_a_leader_is_found_at_each_moment_of_a_hand_over(tmp_path: Path, listening: list[str]) -> None:
    meeting, over = Rendezvous(tmp_path), threading.Event()
    assert meeting.found(WORLD, listening[0])
    found: set[str] = set()

    def look() -> None:
        while not over.is_set():
            found.add(Rendezvous(tmp_path).find())

    with ThreadPoolExecutor(1) as looking:
        seen = looking.submit(look)
        for view in range(1, 200):
            meeting.hand_over(WORLD, view, listening[view % 8])
            meeting.leave(listening[(view - 1) % 8])
        over.set()
        seen.result(20)
    assert found <= set(listening) and meeting.find() == listening[199 % 8]


def test_the_record_of_the_latest_view_of_the_world_counts(meeting: Rendezvous, listening: list[str]) -> None:
    first, second, third, *_ = listening
    assert meeting.found(WORLD, first)
    meeting.hand_over(WORLD, 9, third)  # the record of the second leader, which overtook that of the first
    meeting.hand_over(WORLD, 5, second)
    meeting.hand_over(OTHER, 11, first)  # a leader of a world that is over
    assert meeting.find() == third


def test_a_leader_does_not_remove_the_record_of_another(meeting: Rendezvous, listening: list[str]) -> None:
    here, there, *_ = listening
    meeting.lead(WORLD, 5, here)
    assert meeting.find() == here
    meeting.lead(WORLD, 7, there)
    assert meeting.find() == here, "the leader of the record listens"
    meeting.leave(there)
    assert meeting.find() == here
    meeting.leave(here)
    meeting.leave(here)
    with pytest.raises(FileNotFoundError):
        meeting.find()


def test_a_removed_directory_is_not_created_again(tmp_path: Path, listening: list[str]) -> None:
    gone = tmp_path / "gone"
    meeting = Rendezvous(gone)
    meeting.lead(WORLD, 1, listening[0])
    meeting.hand_over(WORLD, 2, listening[1])
    meeting.leave(listening[1])
    with pytest.raises(FileNotFoundError):
        meeting.found(WORLD, listening[0])
    assert not gone.exists()
