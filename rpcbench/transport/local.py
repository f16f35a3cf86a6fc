"""Connections over unix sockets between processes of one host.

Rules
- One thread reads a connection (`read_forever`); it never writes, and nothing it does may wait for a write.
- Any thread may send. Who finds the line free writes, and then writes what others have queued meanwhile; a thread
  that must not wait passes an unfinished write to a helper thread. So two peers that send each other more than the
  sockets hold always have a reader.
- Small messages go between the chunks of large ones.
- A descriptor is given back when nobody reads or writes it any more: its number may stand for another file then.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rpcbench.transport.handshake import Handshake, Identity, dial, listen
from rpcbench.wire.body import Body
from rpcbench.wire.frames import Decoder, Frame, Limits, Parts, encode
from rpcbench.words.config import HANDSHAKE_SECONDS
from rpcbench.words.errors import AuthenticationError, NotConnectedError, ProtocolError

BUFFER = 1 << 20
_HELD_BACK = 64 << 20
_MOST_PARTS = 512
_CLOSE_SECONDS = 5.0
_CRED = struct.Struct("3i")


class LocalConnection:
    """One authenticated peer on a stream socket."""

    def __init__(self, sock: socket.socket, limits: Limits, helper: Callable[[Callable[[], None]], object]) -> None:
        self._sock = sock
        self._limits = limits
        self._helper = helper
        self._state = threading.Lock()
        self._drained = threading.Condition(self._state)
        self._small: collections.deque[Parts] = collections.deque()
        self._large: collections.deque[Iterator[Parts]] = collections.deque()
        self._queued = 0
        self._writing = False
        self._ended = False
        self._streams = 0
        sock.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER)

    # -- writing
    def send(self, control: bytes, body: Body, may_wait: bool) -> None:
        with self._state:
            self._streams = (self._streams + 1) & 0xFFFFFFFF
            stream = self._streams
        first, chunks = encode(stream, control, body, self._limits)
        large = len(first) == 1 and bool(body.buffers)
        with self._state:
            if may_wait:
                self._drained.wait_for(self._has_room)
            if self._ended:
                raise NotConnectedError("the connection has ended")
            self._small.append(first)
            self._queued += _size(first)
            if large:
                self._large.append(chunks)
                self._queued += sum(memoryview(buffer).nbytes for buffer in body.buffers)
            if self._writing:
                return
            self._writing = True
        self._write([], may_wait)

    def await_room(self) -> None:
        """Wait while the peer is far behind, as `send` with `may_wait` does. Ctrl-C ends the wait and nothing else."""
        with self._state:
            self._drained.wait_for(self._has_room)

    def _has_room(self) -> bool:
        return self._ended or self._queued <= _HELD_BACK

    def _write(self, views: list[memoryview], may_wait: bool) -> None:
        """Write `views`, then all that is queued. Only for the thread that set `_writing`, and the helper it names."""
        try:
            self._push(views, may_wait)
            while parts := self._next():
                views = [memoryview(part) for part in parts]
                self._push(views, may_wait)
        except BlockingIOError:
            self._helper(lambda: self._write(views, True))
        except OSError:
            self._end()
            self._stop_writing()

    def _next(self) -> Parts:
        """What to write next: all small messages, else a chunk of a large one, in turn. Nothing: writing ends."""
        with self._state:
            parts = self._few_small() if self._small else self._chunk()
            if not parts:
                self._writing = False
            self._drained.notify_all()
            return parts

    def _few_small(self) -> Parts:
        parts = self._small.popleft()
        while self._small and len(parts) + len(self._small[0]) <= _MOST_PARTS:
            parts += self._small.popleft()
        self._queued -= _size(parts)
        return parts

    def _chunk(self) -> Parts:
        while self._large:
            source = self._large.popleft()
            chunk = next(source, None)
            if chunk is not None:
                self._large.append(source)
                self._queued -= len(chunk[1])
                return chunk
        return []

    def _push(self, views: list[memoryview], may_wait: bool) -> None:
        """All of `views`, in order. BlockingIOError, with what is left in `views`, where it would have to wait."""
        while views:
            try:
                sent = self._sock.sendmsg(views[:_MOST_PARTS], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                if not may_wait:
                    raise
                poller = select.poll()
                poller.register(self._sock, select.POLLOUT)
                poller.poll()
                continue
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    # -- reading
    def read_forever(self, receive: Callable[[Frame], None]) -> str:
        """Hand every frame to `receive` until the stream ends; say how it ended."""
        decoder = Decoder(self._limits)
        try:
            while True:
                count = self._sock.recv_into(decoder.target())
                if count == 0:
                    return "its connection closed" if decoder.idle else "its connection closed in mid-message"
                for frame in decoder.received(count):
                    receive(frame)
        except OSError as error:
            return f"its connection broke ({error.strerror or error})"
        except ProtocolError as error:
            return f"it sent nonsense ({error})"
        finally:
            self._end()

    # -- ends
    def close(self) -> None:
        with self._state:
            self._drained.wait_for(lambda: self._ended or not self._writing, _CLOSE_SECONDS)
        self._end()

    def _end(self) -> None:
        with self._state:
            self._ended = True
            self._small.clear()
            self._large.clear()
            self._drained.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _stop_writing(self) -> None:
        with self._state:
            self._writing = False
            self._drained.notify_all()

    def release(self) -> None:
        """Give the descriptor back; only after `read_forever` has returned."""
        with self._state:
            self._drained.wait_for(lambda: not self._writing, _CLOSE_SECONDS)
        self._sock.close()

    def forked(self) -> None:
        """In a forked child: the parent's connection is not ours; do not keep it open."""
        self._sock.close()


class LocalListener:
    """A unix socket in a directory of its owner alone; lets in only processes of the same user."""

    def __init__(self, path: Path) -> None:
        _clear_stale(path)
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(str(path))
        path.chmod(0o600)
        self._sock.listen(128)

    def accept(self) -> socket.socket | None:
        """The next peer's socket, not yet authenticated; None once the listener is closed."""
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return None
        return sock

    def close(self) -> None:
        """Stop listening and remove the socket file."""
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def forked(self) -> None:
        """In a forked child: the socket is the parent's."""
        self._sock.close()


def _clear_stale(path: Path) -> None:
    """Remove the socket file of a process that died; OSError where somebody still listens on it."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise NotConnectedError(f"another process already listens on {path}")


def connect(path: Path, me: Identity, secret: bytes) -> tuple[socket.socket, Identity]:
    """Dial and authenticate. OSError where nobody listens (yet)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.connect(str(path))
        return sock, _run(sock, dial(me, secret))
    except BaseException:
        sock.close()
        raise


def authenticate(sock: socket.socket, me: Identity, secret: bytes) -> Identity:
    """The listener's side of a new connection: who is it? Closes the socket where that stays open."""
    try:
        if hasattr(socket, "SO_PEERCRED"):
            _same_user(sock)
        return _run(sock, listen(me, secret))
    except BaseException:
        sock.close()
        raise


def _same_user(sock: socket.socket) -> None:
    _, uid, _ = _CRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CRED.size))
    if uid != os.getuid():
        raise AuthenticationError(f"a process of user {uid} tried to connect")


def _run(sock: socket.socket, handshake: Handshake) -> Identity:
    """Drive a handshake over a socket, in HANDSHAKE_SECONDS at most; then TimeoutError."""
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    data, count = next(handshake)
    while True:
        _limit(sock, deadline)
        sock.sendall(data)
        answer = _exactly(sock, count, deadline)
        try:
            data, count = handshake.send(answer)
        except StopIteration as done:
            identity: Identity = done.value
            return identity


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        _limit(sock, deadline)
        piece = sock.recv(count - len(data))
        if not piece:
            raise AuthenticationError("the peer hung up during the handshake: has it another secret or cluster?")
        data += piece
    return data


def _limit(sock: socket.socket, deadline: float) -> None:
    """The next operation of `sock` ends at the deadline of the whole handshake: a peer may send it byte by byte."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the handshake took more than {HANDSHAKE_SECONDS:g} s")
    sock.settimeout(left)


def _size(parts: Parts) -> int:
    return sum(len(part) for part in parts)
