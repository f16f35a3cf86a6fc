"""The lobby of a TCP listener: the connections that leave it, those that it ends, and the order in which it does."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import time
from collections.abc import Iterator

import pytest
from streams import SECRET, spawn
from worlds import PATIENCE, until

from rpcbench.base.errors import AuthenticationError
from rpcbench.transport import listeners, lobby
from rpcbench.transport.lobby import WELCOME, Refusals
from rpcbench.transport.preambles import PREAMBLE, make_preamble


class Entrance:
    """A listener, and the sockets that it has accepted."""

    def __init__(self) -> None:
        self.refusals = Refusals()
        self.listener = listeners.TcpListener("127.0.0.1:0", SECRET, self.refusals)
        self.accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.dialled: list[socket.socket] = []
        self._accepting = spawn(self._accept)

    def _accept(self) -> None:
        while (sock := self.listener.accept()) is not None:
            self.accepted.put(sock)

    def dial(self, data: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.listener.port), PATIENCE, (host, 0))
        self.dialled.append(sock)
        sock.sendall(data)
        return sock

    def waiting(self) -> int:
        return len(self.listener._lobby._visitors)

    def close(self) -> None:
        self.listener.close()
        self._accepting.join(PATIENCE)
        for sock in self.dialled:
            sock.close()
        while not self.accepted.empty():
            self.accepted.get().close()


@pytest.fixture
def entrance(monkeypatch: pytest.MonkeyPatch, no_leaks: None) -> Iterator[Entrance]:
    monkeypatch.setattr(lobby, "_MOST", 8)
    with contextlib.closing(Entrance()) as entrance:
        yield entrance


def test_a_right_preamble_is_answered_whole_or_in_pieces_and_what_follows_it_stays_to_be_read(
    entrance: Entrance,
) -> None:
    for end in (PREAMBLE, 1, 40):
        data = make_preamble(SECRET)
        sock = entrance.dial(data[:end])
        if end < PREAMBLE:
            until(lambda: entrance.waiting() == 1)
        sock.sendall(data[end:] + b"hello")
        assert sock.recv(10) == WELCOME
        with entrance.accepted.get(timeout=PATIENCE) as accepted:
            assert accepted.recv(10) == b"hello"


@pytest.mark.parametrize(
    "data", [make_preamble(b"another" * 4), b"GET / HTTP/1.1\r\n".ljust(PREAMBLE)], ids=["secret", "http"]
)
def test_a_wrong_preamble_ends_the_connection_orderly(entrance: Entrance, data: bytes) -> None:
    assert entrance.dial(data).recv(10) == b""
    assert (entrance.refusals.count, entrance.accepted.empty()) == (1, True)


def test_a_dialler_with_another_secret_is_told_so(entrance: Entrance) -> None:
    place = f"127.0.0.1:{entrance.listener.port}"
    with pytest.raises(AuthenticationError, match="another secret"):
        listeners.connect_socket(place, make_preamble(b"another" * 4), time.monotonic() + PATIENCE)


def test_a_dialler_that_meets_another_service_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH\r\n")
                sock.recv(PREAMBLE)

        serving = spawn(serve)
        with pytest.raises(AuthenticationError, match=f"another service answers at {place}"):
            listeners.connect_socket(place, make_preamble(SECRET), time.monotonic() + PATIENCE)
        serving.join(PATIENCE)


def test_a_preamble_is_accepted_once(entrance: Entrance) -> None:
    data = make_preamble(SECRET)
    assert [entrance.dial(data).recv(10) for _ in range(3)] == [WELCOME, b"", b""]


def test_strangers_displace_each_other_and_nobody_of_another_host(entrance: Entrance) -> None:
    slow, data = entrance.dial(), make_preamble(SECRET)
    strangers = []
    for _ in range(40):
        strangers.append(entrance.dial(host="127.0.0.9"))
        until(lambda: entrance.waiting() + entrance.refusals.count == len(entrance.dialled))
    for sock in strangers[:33]:
        with pytest.raises(ConnectionResetError):  # a member would dial again
            sock.recv(10)
    assert (entrance.refusals.count, entrance.waiting()) == (33, 8), "the last seven, and the slow one"
    slow.sendall(data)
    assert slow.recv(10) == WELCOME
    assert (
        entrance.refusals.describe_strangers()
        == "; 33 connections from 127.0.0.9 did not prove to belong to this world"
    )


def test_a_silent_connection_ends_in_time(entrance: Entrance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "HANDSHAKE_SECONDS", 0.2)
    for data in (b"", b"some"):
        with pytest.raises(ConnectionResetError):
            entrance.dial(data).recv(10)
    assert entrance.waiting() == 0


def test_the_end_of_the_listener_ends_all_that_wait(entrance: Entrance) -> None:
    sock = entrance.dial()
    until(lambda: entrance.waiting() == 1)
    entrance.listener.close()
    with pytest.raises(ConnectionResetError):
        sock.recv(10)


def test_a_default_timeout_of_sockets_lets_nobody_wait_for_a_stranger(entrance: Entrance) -> None:
    """The default is longer than a member has patience here, so that one wait for a stranger is enough to fail."""
    default = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10 * PATIENCE)
    try:
        entrance.dial()
        until(lambda: entrance.waiting() == 1)
        assert entrance.dial(make_preamble(SECRET)).recv(10) == WELCOME
        with entrance.accepted.get(timeout=PATIENCE) as accepted:
            assert accepted.gettimeout() is None
    finally:
        socket.setdefaulttimeout(default)


def test_connections_that_cannot_be_watched_or_reset_are_closed(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system refuses to watch one, or to change one that its peer has reset."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(entrance.listener._lobby._selector, "register", refuse)
        with pytest.raises(ConnectionResetError):
            entrance.dial().recv(10)
    sock = entrance.dial()
    until(lambda: entrance.waiting() == 1)
    monkeypatch.setattr(lobby, "_AT_ONCE", b"")  # the system refuses that
    entrance.listener.close()
    assert sock.recv(10) == b""
    assert (entrance.refusals.count, entrance.waiting()) == (2, 0)


def test_complaints_name_a_bounded_number_of_hosts() -> None:
    refusals = Refusals()
    for number in range(40):
        refusals.count_stranger(f"10.0.0.{number}")
    assert refusals.count == 40 and "24 connections from other addresses" in refusals.describe_strangers()
