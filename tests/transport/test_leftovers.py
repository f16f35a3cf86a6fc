"""What worlds of the past have left in the directory of a user goes; what may be of use stays."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcbench.transport.listeners import LocalListener
from rpcbench.transport.run_dir import shared_directory, shared_secret

DAYS = 24 * 3600.0


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # short enough for the names of sockets
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield


@pytest.fixture
def past() -> Iterator[Path]:
    """The directory of a world; a socket in it is that of a process that was killed."""
    path = shared_directory("past")
    shared_secret(path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path / "1.0.sock"))
    yield path


def ago(path: Path, days: float) -> None:
    os.utime(path, (time.time() - days * DAYS,) * 2)


def test_what_a_world_of_the_past_has_left_goes(past: Path) -> None:
    ago(past, 2)
    new = shared_directory("new")
    assert not past.exists() and new.exists()


def test_what_is_not_old_or_in_use_stays(past: Path) -> None:
    ago(past, 0.9)
    shared_directory("new")
    ago(past, 2)
    assert shared_directory("past") == past, "whoever comes makes it new"
    shared_directory("new")
    assert (past / "secret").exists()


def test_what_is_neither_secret_nor_socket_stays(past: Path) -> None:
    (past / "0.address").touch()
    ago(past, 2)
    shared_directory("new")
    assert (past / "secret").exists()


def test_where_somebody_listens_nothing_goes(past: Path) -> None:
    listener = LocalListener(past / "0.sock")
    ago(past, 2)
    shared_directory("new")
    assert (past / "secret").exists()
    listener.close()
    ago(past, 2)
    shared_directory("new")
    assert not past.exists()
