"""Preambles: the first bytes of a dialler over TCP, which show that it has the cluster's secret. Without I/O.

Guarantees
- Only a process with the secret can make one. A listener accepts each once; a recorded one serves an eavesdropper once
  for each other listener, and gives it no more than a handshake (`handshake`), for which it lacks the secret.
- A listener tells members from strangers in microseconds, before it spends a thread and TLS on them (`lobby`).
- This file loads neither torch nor the wire: the supervisor of a worker, which is a small process, uses it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE = 32  # bytes
PROOF = 32  # bytes of an HMAC-SHA256
PREAMBLE = NONCE + PROOF
WELCOME = b"\1"
"""The listener's answer to a right preamble."""
_MOST_NONCES = 1 << 16  # a member would have to dial one listener as often before one of them is accepted again


def make_proof(secret: bytes, role: bytes, *said: bytes) -> bytes:
    """Return the proof, PROOF bytes, that the maker has the secret.

    Args:
        secret: The cluster's.
        role: In which the maker speaks, so that a proof of one side does not serve the other.
        said: The messages that the proof covers.
    """
    return hmac.new(secret, role + b"".join(said), hashlib.sha256).digest()


def make_preamble(secret: bytes) -> bytes:
    """Return the first PREAMBLE bytes of a dialler over TCP. Each is for one connection."""
    nonce = secrets.token_bytes(NONCE)
    return nonce + make_proof(secret, b"preamble", nonce)


class Preambles:
    """The preambles that one listener accepts: each once, from processes with the secret. For one thread.

    Args:
        secret: The cluster's.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._used: dict[bytes, None] = {}  # nonces, by age; only processes with the secret can add any

    def is_acceptable(self, given: bytes) -> bool:
        """Return whether a preamble is right and was not used before."""
        nonce, proof = given[:NONCE], given[NONCE:]
        if nonce in self._used or not hmac.compare_digest(proof, make_proof(self._secret, b"preamble", nonce)):
            return False
        self._used[nonce] = None
        if len(self._used) > _MOST_NONCES:
            del self._used[next(iter(self._used))]
        return True
