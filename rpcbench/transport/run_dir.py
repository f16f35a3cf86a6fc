"""Directories for sockets, logs and secrets, which no other user of the host can enter.

Guarantees
- All are 0700, and their paths short enough for the name of a unix socket (`SOCKET_NAME` bytes) below them.
- A `RunDirectory` goes when `remove` is called, when its object goes, or when the process that made it exits; a
  forked child that exits removes nothing.
- A shared directory is refused if another user made it or may look into it. `sweep` removes one that nobody has used
  for a day, and where no process listens; each use makes it new by that.
- A reader of a shared secret sees all of it or waits for none: the file appears complete, once.
- The secret of a world on several hosts is a file that its user makes once and copies to every host: 64 hexadecimal
  digits and nothing else, as TLS keys are made from it, so it must not be one that can be guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path

from rpcbench.base.errors import RpcError
from rpcbench.transport.listeners import somebody_listens

_AGE = 24 * 3600.0


def sweep(top: Path) -> None:
    """Look through all the shared directories of a user, which are in `top`."""
    old = time.time() - _AGE
    for directory in top.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process does the same; no directory
            if directory.stat().st_mtime < old and not any(map(_may_be_of_use, directory.iterdir())):
                shutil.rmtree(directory)


def _may_be_of_use(path: Path) -> bool:
    if path.is_socket():
        return somebody_listens(path)
    if path.name == "leader":  # where one listens at a socket here, that tells
        return " unix:" not in path.read_text()
    return path.name not in ("secret", "lock", "failure")


SOCKET_NAME = 24
_SOCKET_PATH = 103  # the shortest limit among systems, without the closing NUL
_LONGEST_BASE = _SOCKET_PATH - len("/rpcbench-4294967295/") - len("0123456789abcdef/") - SOCKET_NAME
_SECRET_BYTES = 32


class RunDirectory:
    """A new directory of one cluster, at `path`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="rpcbench-", dir=_runtime()))
        self._finalizer = weakref.finalize(self, _remove, self.path, os.getpid())

    def remove(self) -> None:
        """Remove the directory and all in it; harmless if it has gone."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"


def shared_directory(key: str) -> Path:
    """The directory that all processes of this user on this host find under `key`, made by the first.

    Errors: PermissionError if someone else made it, or others may enter it.
    """
    top = _private(_runtime() / f"rpcbench-{os.geteuid()}")
    path = _private(top / hashlib.sha256(key.encode()).hexdigest()[:16])
    os.utime(path)  # it is in use
    sweep(top)
    return path


def shared_secret(directory: Path) -> bytes:
    """The 32 random bytes kept in `directory`, made by whoever asks first.

    Errors: PermissionError if the file is not this user's alone, ValueError if it holds anything else.
    """
    path = directory / "secret"
    if not path.exists():
        _publish(path, secrets.token_bytes(_SECRET_BYTES))
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        check_private(path, os.fstat(file.fileno()))
        secret = file.read(_SECRET_BYTES + 1)
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{path} does not hold a secret of {_SECRET_BYTES} bytes; remove it and start again")
    return secret


def _publish(path: Path, content: bytes) -> None:
    """Make `path` appear with all its content, unless another process was first."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)
    draft.unlink()


def _runtime() -> Path:
    """Where this user's short-lived files belong."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(os.fsencode(base)) <= _LONGEST_BASE and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    raise OSError(
        "found no directory for sockets: set XDG_RUNTIME_DIR to a directory that you can write "
        f"and whose path has at most {_LONGEST_BASE} bytes"
    )


def _private(path: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{path} is not a directory; remove it, or set XDG_RUNTIME_DIR to a directory of yours")
    check_private(path, status)
    return path


def check_private(path: Path, status: os.stat_result) -> None:
    """PermissionError where a file or directory is not this user's alone."""
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, not to you; set XDG_RUNTIME_DIR to a directory of yours"
        )
    if status.st_mode & 0o077:
        raise PermissionError(f"others may use {path}; run: chmod go-rwx {path}")


def _remove(path: Path, maker: int) -> None:
    if os.getpid() == maker:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


SECRET_VARIABLE = "RPCBENCH_SECRET_FILE"
_BYTES = 32


def make_secret(path: Path) -> None:
    """A new secret in a new file that only its user can read. FileExistsError where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_BYTES) + "\n")


def load_secret() -> bytes | None:
    """The secret in the file that RPCBENCH_SECRET_FILE names; None where it names none.

    Errors: FileNotFoundError, PermissionError if others may read it, ValueError if it holds anything else.
    """
    name = os.environ.get(SECRET_VARIABLE)
    if not name:
        return None
    path = Path(name)
    with path.open() as file:
        check_private(path, os.fstat(file.fileno()))
        text = file.read(1000).strip()
    try:
        secret = bytes.fromhex(text)
        if len(secret) != _BYTES:
            raise ValueError
    except ValueError:
        raise ValueError(f"{path} does not hold a secret; make one with: rpcbench secret {path}") from None
    return secret


def demand_secret(host: str) -> RpcError:
    """What to say to a user whose world needs a secret and has none."""
    return RpcError(
        f"{host} is reached over the network, and whoever gets in can run code here, so all workers must share a "
        f"secret. Make one with: rpcbench secret ~/.rpcbench-secret; copy the file to every host, and set "
        f"{SECRET_VARIABLE}=~/.rpcbench-secret for every worker"
    )
