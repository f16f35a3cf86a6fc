"""TLS between hosts: a peer without the certificate of the cluster is refused before any message."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import time

import pytest
from streams import SECRET, pair, spawn
from worlds import PATIENCE

from rpcbench.base.errors import AuthenticationError
from rpcbench.transport import tls
from rpcbench.transport.stream import ConnectionEnd, StreamConnection
from rpcbench.wire.framing import Limits
from rpcbench.wire.messages import Body


def accepted(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[BaseException | None, BaseException | None]:
    """Return the error of the handshake on the server and on the client; None if it succeeds."""
    here, there = socket.socketpair()
    told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def serve() -> None:
        told.put(_error(there, server))

    serving = spawn(serve)
    with here, there:
        error = _error(here, client)
        here.shutdown(socket.SHUT_WR)
        other = told.get(timeout=PATIENCE)
    serving.join(PATIENCE)
    return other, error


def _error(sock: socket.socket, context: ssl.SSLContext) -> BaseException | None:
    try:
        tls.TlsStream(sock, context, time.monotonic() + 5)
    except (AuthenticationError, OSError) as error:
        return error
    return None


def stranger(side: int, **changes: object) -> ssl.SSLContext:
    """An end that accepts every certificate, and has none."""
    context = ssl.SSLContext(side)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for name, value in changes.items():
        setattr(context, name, value)
    return context


OURS, OTHERS = tls.Credentials(SECRET), tls.Credentials(b"o" * 32)


def test_two_ends_with_the_same_secret_complete_the_tls_handshake() -> None:
    assert accepted(tls.Credentials(SECRET).server, OURS.client) == (None, None)


def test_a_client_refuses_a_server_of_another_cluster() -> None:
    _, error = accepted(OTHERS.server, OURS.client)
    assert isinstance(error, AuthenticationError) and "another secret" in str(error)


@pytest.mark.parametrize("client", [OTHERS.client, stranger(ssl.PROTOCOL_TLS_CLIENT)])
def test_a_server_refuses_a_client_without_the_certificate_of_the_cluster(client: ssl.SSLContext) -> None:
    client.verify_mode = ssl.CERT_NONE  # it would accept any certificate
    error, _ = accepted(OURS.server, client)
    assert isinstance(error, AuthenticationError)


def test_a_server_refuses_tls_versions_before_1_3() -> None:
    old = stranger(ssl.PROTOCOL_TLS_CLIENT, maximum_version=ssl.TLSVersion.TLSv1_2)
    error, other = accepted(OURS.server, old)
    assert isinstance(error, AuthenticationError) and other is not None


def test_data_is_encrypted_on_the_connection() -> None:
    one, other = pair("tls")
    words = b"nobody else is to know this" * 100
    seen: list[bytes] = []
    plain = one._plain  # type: ignore[attr-defined]
    write = plain.write
    plain.write = lambda views, may_wait: (seen.extend(map(bytes, views)), write(views, may_wait))[1]
    one.write([memoryview(words)], True)
    got = bytearray()
    while len(got) < len(words):
        piece = memoryview(bytearray(4096))
        with contextlib.suppress(BlockingIOError):  # a part of a record
            got += piece[: other.read_into(piece)]
    assert bytes(got) == words and seen and words[:27] not in b"".join(seen)
    for stream in (one, other):
        stream.shut_down()
        with contextlib.suppress(OSError):
            stream.close_descriptor()


def test_a_read_leaves_no_decrypted_data_behind_in_the_stream() -> None:
    """A thread that waits for the socket would wait for ever for data that was already read from it."""
    one, other = (StreamConnection(stream, Limits(), spawn) for stream in pair("tls"))
    for number in range(5):
        one.send(str(number).encode(), Body(b"", b"", []), True)
    one.send(b"large", Body(b"", b"", [bytes(1 << 18)]), True)
    arrived: list[bytes] = []
    while len(arrived) < 6:
        assert other.watch is not None and other.watch.poll_readable(PATIENCE)
        frames = other.read_frames()
        assert not isinstance(frames, ConnectionEnd) and not other._stream.pending
        arrived += [frame.control for frame in frames]
    assert arrived == [b"0", b"1", b"2", b"3", b"4", b"large"]
    for connection in (one, other):
        connection.break_connection()
        while not isinstance(connection.read_frames(), ConnectionEnd):
            pass
        connection.close_descriptor()


def test_a_read_of_an_incomplete_record_does_not_block() -> None:
    one, other = pair("tls")
    sealed = one._encrypt_parts([memoryview(b"words")])  # type: ignore[attr-defined]
    target = memoryview(bytearray(64))
    one._plain.write([memoryview(sealed[:7])], True)  # type: ignore[attr-defined]
    with pytest.raises(BlockingIOError):
        while True:  # records of the handshake may come first
            other.read_into(target)
    one._plain.write([memoryview(sealed[7:])], True)  # type: ignore[attr-defined]
    assert other.read_into(target) == 5 and target[:5] == b"words"
    for stream in (one, other):
        stream.shut_down()
        stream.close_descriptor()
