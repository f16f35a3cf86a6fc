"""The least that a program must do: `sendall` here, `recv_into` there, a word back. No runtime that sleeps is quicker.

Over TCP between hosts, over a unix socket on one.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from benchmarks.rows import Api, Operation, Prepare

_HEADER = struct.Struct("!cQ")
_REPLY = struct.Struct("!d")
_BYTES, _CLOCK, _WORD = b"b", b"c", b"w"
_MEET_SECONDS = 30.0
Address = str | tuple[str, int]


class Peer:
    """One of two processes with a connection at `tcp://host:port` or `file://path`: rank 0 listens and sends, rank 1
    dials and receives.

    It stands where the bench has an RPC module, and can do one call: the CPU seconds of the other process.
    """

    def __init__(self, rank: int, url: str) -> None:
        place = urlsplit(url)
        address = place.path if place.scheme == "file" else (place.hostname or "", place.port or 0)
        self._receives = rank == 1
        self._connection = _dial(address) if self._receives else _await(address)
        if place.scheme != "file":
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> int:
        """Send all; returns the last byte, as the receiver has it."""
        return int(self._ask(_BYTES, data))

    def word(self) -> float:
        """A word there, one back."""
        return self._ask(_WORD, b"")

    def rpc_sync(self, to: str, function: Callable[[], float]) -> float:
        assert function is time.process_time, "a plain loop runs no functions"
        return self._ask(_CLOCK, b"")

    def _ask(self, kind: bytes, data: bytes) -> float:
        self._connection.sendall(_HEADER.pack(kind, len(data)))
        if data:
            self._connection.sendall(data)
        reply: float = _REPLY.unpack(self._receive(memoryview(bytearray(_REPLY.size))))[0]
        return reply

    def shutdown(self) -> None:
        """Rank 1 serves until the other one is done."""
        with self._connection:
            if self._receives:
                with contextlib.suppress(EOFError):
                    self._serve()

    def _serve(self) -> None:
        room = memoryview(bytearray(1))
        header = memoryview(bytearray(_HEADER.size))
        while True:
            kind, size = _HEADER.unpack(self._receive(header))
            if size > len(room):
                room = memoryview(bytearray(size))
            data = self._receive(room[:size])
            self._connection.sendall(_REPLY.pack(_answer(kind, data)))

    def _receive(self, room: memoryview) -> memoryview:
        have = 0
        while have < len(room):
            got = self._connection.recv_into(room[have:])
            if not got:
                raise EOFError("the other process has closed the connection")
            have += got
        return room


def _answer(kind: bytes, data: memoryview) -> float:
    if kind == _WORD:
        return 1.0
    return data[-1] if kind == _BYTES else time.process_time()


def join(rank: int, url: str) -> Peer:
    return Peer(rank, url)


def send(size: int) -> Prepare:
    """`size` bytes go there, one comes back."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        peer: Any = api.rpc
        data = draw.randbytes(1 << 16) * (size >> 16)
        return Operation(lambda: peer.send(data), lambda last: bool(last == data[-1]))

    return prepare


def word(api: Api, draw: random.Random) -> Operation:
    """A word there, one back."""
    peer: Any = api.rpc
    return Operation(peer.word, lambda came: bool(came == 1.0))


def _await(address: Address) -> socket.socket:
    with _listener(address) as listener:
        listener.settimeout(_MEET_SECONDS)
        connection, _ = listener.accept()
        connection.settimeout(None)
        return connection


def _listener(address: Address) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_server(address)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    return listener


def _dial(address: Address) -> socket.socket:
    deadline = time.monotonic() + _MEET_SECONDS
    while True:
        try:
            return _connected(address)
        except (ConnectionRefusedError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)  # nothing announces that the other one listens


def _connected(address: Address) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection
