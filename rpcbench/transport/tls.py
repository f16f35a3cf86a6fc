"""TLS 1.3 over TCP, for all traffic between hosts.

The key of a cluster's certificate is derived from its secret, so every process that has the secret can make the
certificate, and no other process can. No file has to be distributed; both sides present the same certificate and accept
no other; a stranger fails before any message of the handshake. Session keys are fresh (forward secrecy): recorded
traffic stays unreadable if the secret leaks later.

An SSL object cannot be read and written at once, nor write several buffers. Here it works on memory, under a lock, and
the socket is used without the lock: one thread reads and one writes, as with any stream.
"""

from __future__ import annotations

import datetime
import hmac
import secrets
import socket
import ssl
import tempfile
import threading
import time

from rpcbench.base.errors import AuthenticationError
from rpcbench.transport import listeners
from rpcbench.transport.base import Stream
from rpcbench.transport.lobby import Refusals
from rpcbench.transport.sockets import SocketStream
from rpcbench.wire.framing import Parts

_PIECE = 1 << 18  # bytes of one read from the socket, and of the plain text encrypted at once
_BEGIN, _END = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 9999))


class Credentials:
    """The certificate of a cluster, ready for both sides of a connection."""

    def __init__(self, secret: bytes) -> None:
        certificate, key, password = _make_certificate(secret)
        self.server = _make_context(ssl.PROTOCOL_TLS_SERVER, certificate, key, password)
        self.client = _make_context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, password)


def _make_certificate(secret: bytes) -> tuple[bytes, bytes, bytes]:
    """Return certificate, key and the password of the key, which only this process uses."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"rpcbench certificate", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "rpcbench")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    certificate = builder.serial_number(1).not_valid_before(_BEGIN).not_valid_after(_END).sign(key, None)
    password = secrets.token_hex(16).encode()
    sealed = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    return certificate.public_bytes(Encoding.PEM), sealed, password


def _make_context(side: int, certificate: bytes, key: bytes, password: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate names the cluster, not a host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    with tempfile.NamedTemporaryFile() as file:  # ssl reads keys from files only; this key is encrypted
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name, password=password)
    return context


class TlsStream:
    """An encrypted stream over a connected socket. AuthenticationError where the peer is not of this cluster."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, deadline: float) -> None:
        self._plain = SocketStream(sock)
        self.store, self.watch, self.share_memory = self._plain.store, self._plain.watch, self._plain.share_memory
        self.set_time_limit, self.silence_seconds = self._plain.set_time_limit, self._plain.silence_seconds
        self.shut_down, self.close_descriptor = self._plain.shut_down, self._plain.close_descriptor
        self._sock = sock
        self._lock = threading.Lock()  # for the SSL object and its two buffers
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        serves = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._received, self._sealed, server_side=serves)
        self._scratch = memoryview(bytearray(_PIECE))  # the reader's
        self._unsent: Parts = []  # encrypted, not yet written
        self._end_received = False  # the peer has announced the end of its data
        try:
            self._shake_hands(deadline)
        except ssl.SSLError as error:
            raise AuthenticationError(f"the peer is not of this cluster: has it another secret? ({error})") from error

    def _shake_hands(self, deadline: float) -> None:
        done = False
        while not done:
            try:
                self._tls.do_handshake()  # on the buffers in memory; the lines below move their bytes over the socket
                done = True
            except ssl.SSLWantReadError:
                pass
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            self._sock.sendall(self._sealed.read())
            if not done and not self._receive_records():
                raise AuthenticationError("the peer ended the TLS handshake: does it use another secret?")

    # -- reading
    @property
    def pending(self) -> bool:
        with self._lock:
            return bool(self._received.pending or self._tls.pending())

    def read_into(self, target: memoryview, /) -> int:
        """Read decrypted bytes. BlockingIOError for a part of a record: the caller may do other work meanwhile."""
        if self._end_received or not (self.pending or self._receive_records()):
            return 0
        count = 0
        with self._lock:
            try:
                while count < len(target):  # one `read` returns one record, of 16 KB at most
                    count += self._tls.read(len(target) - count, target[count:])  # type: ignore[operator]  # an int
            except ssl.SSLWantReadError as error:
                if not count:
                    raise BlockingIOError from error
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                self._end_received = True
        return count

    def _receive_records(self) -> int:
        count = self._sock.recv_into(self._scratch)
        with self._lock:
            self._received.write(self._scratch[:count])
        return count

    # -- writing
    def write(self, parts: Parts, may_wait: bool) -> None:
        """Write all of `parts`; bytes that are encrypted but not yet written are kept for the next call."""
        while True:
            self._plain.write(self._unsent, may_wait)  # first: records must be sent in the order of their encryption
            if not parts:
                return
            self._unsent.append(self._encrypt_parts(parts))

    def _encrypt_parts(self, parts: Parts) -> bytes:
        """Encrypt and remove the first parts, and return the records."""
        size = 0
        with self._lock:
            while parts and size < _PIECE:  # a limit, as the reader waits for the lock meanwhile
                view = memoryview(parts.pop(0))
                piece, rest = view[: _PIECE - size], view[_PIECE - size :]
                if piece.nbytes:
                    size += self._tls.write(piece)
                if rest.nbytes:
                    parts.insert(0, rest)
            return self._sealed.read()


class TlsListener(listeners.TcpListener):
    """A TCP listener whose streams are encrypted."""

    def __init__(self, place: str, secret: bytes, refusals: Refusals, credentials: Credentials) -> None:
        self._credentials = credentials
        super().__init__(place, secret, refusals)

    def open_stream(self, sock: socket.socket, deadline: float) -> Stream:
        return TlsStream(listeners.disable_delay(sock), self._credentials.server, deadline)


def connect_tls(place: str, preamble: bytes, credentials: Credentials, deadline: float) -> TlsStream:
    """Dial a TLS address. OSError where no process listens (yet), AuthenticationError for another cluster."""
    sock = listeners.connect_socket(place, preamble, deadline)
    try:
        return TlsStream(sock, credentials.client, deadline)
    except BaseException:
        sock.close()
        raise
