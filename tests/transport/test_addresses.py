"""Listening and dialling by address: admission, cleanup, and errors for addresses that are taken."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from streams import SECRET, spawn
from worlds import PATIENCE, until

from rpcbench.base.errors import AuthenticationError, NotConnectedError
from rpcbench.transport import addresses, listeners
from rpcbench.transport.handshake import Identity
from rpcbench.transport.listeners import LocalListener, SocketListener
from rpcbench.transport.preambles import make_preamble

OPENER = addresses.Opener(SECRET)
HERE, THERE = Identity("c", 1, "worker1", 0), Identity("c", 0, "notebook", 0, epoch=5)


@pytest.fixture(params=["unix", "tcp", "tls"])
def wanted(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address to listen at."""
    return f"unix:{tmp_path}/0.sock" if request.param == "unix" else f"{request.param}://127.0.0.1:0"


@pytest.fixture
def listening(wanted: str, request: pytest.FixtureRequest, tmp_path: Path):
    """A listener, and the address for dialling it."""
    listener, address = OPENER.open_listener(wanted)
    yield listener, address
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_listener_admits_a_dialler_with_its_secret_and_no_other(
    listening: tuple[addresses.Listener, str], no_leaks: None
) -> None:
    listener, address = listening
    told: queue.SimpleQueue[object] = queue.SimpleQueue()

    def accept() -> None:
        if (sock := listener.accept()) is None:
            told.put(None)
            return
        try:
            stream, identity = OPENER.authenticate_peer(listener, sock, THERE)
            stream.close_descriptor()
            told.put(identity)
        except AuthenticationError as error:
            told.put(error)

    accepting = spawn(accept)
    stream, identity = OPENER.dial_peer(address, HERE)
    stream.close_descriptor()
    assert (identity, told.get(timeout=PATIENCE)) == (THERE, HERE)
    accepting.join(PATIENCE)
    accepting = spawn(accept)
    with pytest.raises(AuthenticationError, match="another secret"):
        addresses.Opener(b"another" * 4).dial_peer(address, HERE)
    listener.close()
    refusal = told.get(timeout=PATIENCE)
    assert isinstance(refusal, AuthenticationError) if address.startswith("unix") else refusal is None
    accepting.join(PATIENCE)
    with pytest.raises(OSError, match=r"No such file|refused"):
        OPENER.dial_peer(address, HERE)


def test_closing_a_listener_ends_the_wait_for_peers(listening: tuple[addresses.Listener, str]) -> None:
    listener, _ = listening
    accepted: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
    waiting = spawn(lambda: accepted.put(listener.accept()))
    listener.close()
    assert accepted.get(timeout=PATIENCE) is None
    waiting.join(PATIENCE)


def test_closing_a_listener_ends_the_wait_where_the_system_shuts_down_no_listening_socket(
    wanted: str, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    def refuse(self: socket.socket, how: int) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    listener, _ = OPENER.open_listener(wanted)
    assert isinstance(listener, SocketListener)
    waiting = spawn(listener.accept)
    until(listener._turn.locked)
    monkeypatch.setattr(socket.socket, "shutdown", refuse)
    listener.close()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    listener.close()


_CLOSES_ALL = """
import os, sys, threading
from rpcbench.transport.addresses import Opener
listener, _ = Opener(b"s" * 32).open_listener(sys.argv[1])
waiting = threading.Thread(target=listener.accept)
waiting.start()
os.closerange(3, 1000)
listener.close()
waiting.join()
"""


def test_closing_a_listener_ends_the_wait_after_the_program_has_closed_all_descriptors(wanted: str) -> None:
    subprocess.run([sys.executable, "-c", _CLOSES_ALL, wanted], check=True, timeout=60)


def test_accepted_sockets_have_no_default_timeout(wanted: str) -> None:
    listener, address = OPENER.open_listener(wanted)
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10 * PATIENCE)
    try:
        with _knock(address):
            sock = listener.accept()
            assert sock is not None
            with sock:
                assert sock.gettimeout() is None
    finally:
        socket.setdefaulttimeout(default)
        listener.close()


def test_a_process_with_a_full_backlog_listens(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as dialled:
        busy.bind(str(tmp_path / "0.sock"))
        busy.listen(0)
        with pytest.raises(BlockingIOError):
            while True:
                sock = dialled.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(str(tmp_path / "0.sock"))
        assert addresses.is_listening(f"unix:{tmp_path}/0.sock", 5.0)


def test_a_second_listener_at_one_address_is_refused(listening: tuple[addresses.Listener, str], tmp_path: Path) -> None:
    _, address = listening
    with pytest.raises(NotConnectedError, match="another process already listens"):
        OPENER.open_listener(address)
    assert addresses.is_listening(address, 5.0)


def test_a_socket_file_that_a_dead_process_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "0.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    listener = LocalListener(path)
    listeners.connect_unix(str(path), time.monotonic() + 5).close_descriptor()
    assert path.stat().st_mode & 0o777 == 0o600
    listener.close()
    assert not path.exists()


def test_a_listener_refuses_processes_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = LocalListener(tmp_path / "0.sock")
    mine, theirs = socket.socketpair()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with mine, pytest.raises(AuthenticationError, match=f"a process of user {os.geteuid()} tried"):
        OPENER.authenticate_peer(listener, theirs, THERE)
    assert theirs.fileno() == -1
    listener.close()


@pytest.mark.parametrize("address", ["host:1", "tcp:/", "", "tls:", "tcp://host"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises((NotConnectedError, ValueError), match="is no"):
        OPENER.dial_peer(address, HERE)


def test_an_unknown_transport_is_named_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCBENCH_TRANSPORT", "pigeon")
    with pytest.raises(ValueError, match="'pigeon' is not a transport"):
        addresses.transport_kind()


class _Closed(threading.Event):
    """Counts the pauses between attempts, and shortens them."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        return super().wait(0.001)


def test_a_listener_without_free_descriptors_accepts_the_peer_later(
    wanted: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener, address = OPENER.open_listener(wanted)
    assert isinstance(listener, SocketListener)
    listener._closed = closed = _Closed()
    accepted: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _knock(address):
        os.close(free := os.dup(0))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            waiting = spawn(lambda: accepted.put(listener.accept()))
            until(lambda: len(closed.pauses) > 5, "tries to let the peer in")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        sock = accepted.get(timeout=PATIENCE)
        assert sock is not None and min(closed.pauses) > 0.1
        sock.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "Too many open files" in caplog.text
    waiting.join(PATIENCE)
    listener.close()
    assert listener.accept() is None


def _knock(address: str) -> socket.socket:
    """Open a connection on which nothing is sent, but over TCP the preamble."""
    kind, _, place = address.partition(":")
    if kind != "unix":
        sock = socket.create_connection(listeners.split_address(place.removeprefix("//")))
        sock.sendall(make_preamble(SECRET))
        return sock
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(place)
    return sock
