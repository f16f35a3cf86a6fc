"""The socket at which a process answers questions of other programs of its user, such as `rpcbench state`.

Guarantees
- It stands in the run directory, which only its user can enter; even there, a process of another user gets no answer.
- A thread of its own answers, so a cell that runs delays nothing, unless its code lets no other thread run. Until a
  question comes, that thread sleeps.
- An asker that sends no question keeps others waiting for `ASK_SECONDS` at most.
- An answer that cannot be made is an error with its reason at the asker, and does not end the thread.

A question is a line of text. The answer is a line of JSON, `{"answer": …}` or `{"error": text}`. Its end is marked, as
a fork of this process may hold the connection open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpcbench.base.errors import AuthenticationError, NotConnectedError, RpcError, RpcTimeoutError
from rpcbench.transport import run_dir
from rpcbench.transport.listeners import LocalListener, check_peer_user

_log = logging.getLogger("rpcbench")
_NAME = "state"  # of the socket, in the run directory
ASK_SECONDS = 5.0
_LONGEST_QUESTION = 100  # bytes
_PIECE = 1 << 16  # bytes


class QuestionSocket:
    """A socket in `directory`, from its creation until `close`. `answer` returns plain data, or raises."""

    def __init__(self, directory: Path, answer: Callable[[str], Any]) -> None:
        self._answer = answer
        self._listener = LocalListener(directory / _NAME)
        self.close = self._listener.close
        self.after_fork = self._listener.after_fork
        threading.Thread(target=self._answer_forever, name="rpcbench-questions", daemon=True).start()

    def _answer_forever(self) -> None:
        while (sock := self._listener.accept()) is not None:
            try:
                with sock:
                    check_peer_user(sock)
                    question = _receive_line(sock, _LONGEST_QUESTION, time.monotonic() + ASK_SECONDS)
                    sock.settimeout(ASK_SECONDS)
                    sock.sendall(self._make_reply(question))
            except (AuthenticationError, OSError) as error:  # a stranger, or an asker that has gone
                _log.info("a question had no answer: %s", error)

    def _make_reply(self, question: str) -> bytes:
        try:
            reply = {"answer": self._answer(question)}
        except Exception as error:  # noqa: BLE001  (the asker is told, whatever it is)
            reply = {"error": f"{type(error).__name__}: {error}"}
        return json.dumps(reply).encode() + b"\n"


def _receive_line(sock: socket.socket, most: float, until: float) -> str:
    """Return the line that comes until that time, or until the stream ends, with `most` bytes and some."""
    received = bytearray()
    while not received.endswith(b"\n") and len(received) < most:
        sock.settimeout(max(0.001, until - time.monotonic()))
        if not (more := sock.recv(_PIECE)):
            break
        received += more
    return received.decode(errors="replace").strip()


def find_askable() -> list[Path]:
    """Return the run directories of this user with such a socket, earliest first; their processes may have ended."""
    found: dict[Path, float] = {}
    for path in [path for base in run_dir.possible_bases() for path in base.glob(f"{run_dir.PREFIX}*")]:
        with contextlib.suppress(FileNotFoundError):  # it is removed just now
            status = path.lstat()
            if status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode) and (path / _NAME).is_socket():
                found[path] = status.st_ctime
    return sorted(found, key=lambda path: found[path])


def ask_question(directory: Path, question: str, seconds: float) -> Any:
    """Ask the process whose run directory this is, and return the answer.

    Raises:
        NotConnectedError: It has ended, and left the directory.
        RpcTimeoutError: It does not answer within so many seconds.
        PermissionError: It is another user's.
        RpcError: It could not make the answer.
    """
    until = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(seconds)
            sock.connect(str(directory / _NAME))
            sock.sendall(f"{question}\n".encode())
            reply = json.loads(_receive_line(sock, math.inf, until))
        except TimeoutError:
            raise RpcTimeoutError(
                f"the process of {directory.name} has not answered within {seconds:g} s: it is stopped, or its code "
                "lets no other thread run"
            ) from None
        except PermissionError:
            raise PermissionError(f"{directory.name} belongs to another user, who alone may read its state") from None
        except (OSError, ValueError):  # ValueError: it ended in the midst of the answer
            raise NotConnectedError(f"{directory.name} is gone: its process has ended") from None
    if "error" in reply:
        raise RpcError(f"the process of {directory.name} could not tell its state: {reply['error']}")
    return reply["answer"]

