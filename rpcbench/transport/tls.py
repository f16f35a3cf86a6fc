"""TLS 1.3 over TCP, for everything that leaves this host.

Who knows the secret of a cluster can make its certificate, and nobody else can: the key is derived from the secret. So
no file has to be carried around, both sides show the same certificate and accept no other, and a stranger fails before
he has said a word of ours. Keys of a session are fresh, so what was recorded stays closed if the secret leaks later.

An SSL object cannot be read and written at once, nor write several buffers: it works in memory under a lock here, and
the socket outside of it. One thread reads and one writes, as with any stream.
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
from rpcbench.transport.sockets import SocketStream
from rpcbench.wire.framing import Parts

_PIECE = 1 << 18
_BEGIN, _END = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2000, 9999))


class Credentials:
    """The certificate of a cluster, ready for both sides of a connection."""

    def __init__(self, secret: bytes) -> None:
        certificate, key, password = _make(secret)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, password)
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, password)


def _make(secret: bytes) -> tuple[bytes, bytes, bytes]:
    """Certificate, key and the password of the key, for use in this process alone."""
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


def _context(side: int, certificate: bytes, key: bytes, password: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is the cluster's, wherever its members run
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    with tempfile.NamedTemporaryFile() as file:  # ssl reads keys from files only; this one is encrypted
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name, password=password)
    return context


class TlsStream:
    """An encrypted stream on a connected socket. AuthenticationError where the other side is not of this cluster."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, deadline: float) -> None:
        self._plain = SocketStream(sock)
        self.store, self.watch = self._plain.store, self._plain.watch
        self._sock = sock
        self._lock = threading.Lock()
        self._received, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        serves = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._received, self._sealed, server_side=serves)
        self._scratch = memoryview(bytearray(_PIECE))
        self._unsent: Parts = []
        self._over = False  # the peer has said that nothing comes any more
        try:
            self._shake_hands(deadline)
        except ssl.SSLError as error:
            raise AuthenticationError(f"the peer is not of this cluster: has it another secret? ({error})") from error

    def _shake_hands(self, deadline: float) -> None:
        done = False
        while not done:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            self._sock.sendall(self._sealed.read())
            if not done and not self._more():
                raise AuthenticationError("the peer hung up during the TLS handshake: has it another secret?")

    # -- reading
    @property
    def pending(self) -> bool:
        with self._lock:
            return bool(self._received.pending or self._tls.pending())

    def read_into(self, target: memoryview, /) -> int:
        """BlockingIOError where a part of a record has come: who reads may have something else to do meanwhile."""
        if self._over or not (self.pending or self._more()):
            return 0
        count = 0
        with self._lock:
            try:
                while count < len(target):  # a record has 16 KB at most
                    count += self._tls.read(len(target) - count, target[count:])  # type: ignore[operator]  # an int
            except ssl.SSLWantReadError as error:
                if not count:
                    raise BlockingIOError from error
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                self._over = True
        return count

    def _more(self) -> int:
        count = self._sock.recv_into(self._scratch)
        with self._lock:
            self._received.write(self._scratch[:count])
        return count

    # -- writing
    def write(self, parts: Parts, may_wait: bool) -> None:
        """All of `parts`; what is encrypted already, and could not be written, is kept here for the next call."""
        while True:
            self._plain.write(self._unsent, may_wait)
            if not parts:
                return
            self._unsent.append(self._seal(parts))

    def _seal(self, parts: Parts) -> bytes:
        """The first parts, encrypted; a piece at a time, as the reader waits meanwhile."""
        size = 0
        with self._lock:
            while parts and size < _PIECE:
                view = memoryview(parts.pop(0))
                piece, rest = view[: _PIECE - size], view[_PIECE - size :]
                if piece.nbytes:
                    size += self._tls.write(piece)
                if rest.nbytes:
                    parts.insert(0, rest)
            return self._sealed.read()

    def silence(self) -> float | None:
        return self._plain.silence()

    def share(self, deadline: float, last: bool) -> None:
        """There is nothing to share with another host."""

    # -- ends
    def limit(self, seconds: float | None) -> None:
        self._plain.limit(seconds)

    def shut(self) -> None:
        self._plain.shut()

    def release(self) -> None:
        self._plain.release()


class TlsListener(listeners.TcpListener):
    """A TCP listener whose streams are encrypted."""

    def __init__(self, place: str, credentials: Credentials) -> None:
        self._credentials = credentials
        super().__init__(place)

    def open(self, sock: socket.socket, deadline: float) -> Stream:
        return TlsStream(listeners.tuned(sock), self._credentials.server, deadline)


def connect(place: str, credentials: Credentials, deadline: float) -> TlsStream:
    """Dial. OSError where nobody listens (yet), AuthenticationError where it is another cluster's."""
    sock = listeners.connect_socket(place, deadline)
    try:
        return TlsStream(sock, credentials.client, deadline)
    except BaseException:
        sock.close()
        raise
