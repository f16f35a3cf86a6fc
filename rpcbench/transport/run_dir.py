"""Directories for sockets, logs and secrets, which no other user of the host can enter.

Guarantees
- All have mode 0700, and paths short enough for the name of a unix socket (`SOCKET_NAME` bytes) below them.
- A `RunDirectory` is removed by `remove_directory`, with its object, or when the process that made it exits; a forked
  child that exits removes nothing.
- A shared directory is refused if another user owns it or can enter it. `remove_unused` removes one that was not used
  for a day and where no process listens.
- A shared secret appears once and complete: no reader sees a part of it.
- The secret of a world on several hosts is a file that its user makes once and copies to every host: 64 hexadecimal
  digits and nothing else. TLS keys are derived from it, so a passphrase that can be guessed is refused.
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
from rpcbench.transport.listeners import is_socket_listening

_AGE = 24 * 3600.0  # seconds


def remove_unused(top: Path) -> None:
    """Remove the unused ones among the shared directories of a user, which are in `top`."""
    old = time.time() - _AGE
    for directory in top.iterdir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # another process removes it; not a directory
            if directory.stat().st_mtime < old and not any(map(_may_be_of_use, directory.iterdir())):
                shutil.rmtree(directory)


def _may_be_of_use(path: Path) -> bool:
    if path.is_socket():
        return is_socket_listening(path)
    if path.name == "leader":  # a leader at a unix socket here is found by its socket file; one at TCP may be alive
        return " unix:" not in path.read_text()
    return path.name not in ("secret", "lock", "failure") and path.suffix != ".stacks"  # `launch.worker_main`


SOCKET_NAME = 24  # bytes
_SOCKET_PATH = 103  # the shortest limit among systems, without the closing NUL
_LONGEST_BASE = _SOCKET_PATH - len("/rpcbench-4294967295/") - len("0123456789abcdef/") - SOCKET_NAME
_SECRET_BYTES = 32  # in hexadecimal digits, as in a user's file, twice as many


PREFIX = "rpcbench-"  # of names of run directories


class RunDirectory:
    """A new directory for one cluster, at `path`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=_runtime_base()))
        # A finalizer also runs at exit, in forked children too: hence the id of the process that made the directory.
        self._finalizer = weakref.finalize(self, _remove_own_tree, self.path, os.getpid())

    def remove_directory(self) -> None:
        """Remove the directory with its content. Idempotent."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"


def shared_directory(key: str) -> Path:
    """Return the directory of `key`, common to all processes of this user on this host; create it if necessary.
    PermissionError if another user owns it or can enter it."""
    top = _make_private(_runtime_base() / f"rpcbench-{os.geteuid()}")
    path = _make_private(top / hashlib.sha256(key.encode()).hexdigest()[:16])
    os.utime(path)  # for `remove_unused`: it is in use
    remove_unused(top)
    return path


def shared_secret(directory: Path) -> bytes:
    """Return the 32 random bytes kept in `directory`; the first caller creates them. PermissionError if other users can
    read the file, ValueError if it holds anything else."""
    path = directory / "secret"
    if not path.exists():
        _create_atomically(path, secrets.token_bytes(_SECRET_BYTES))
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        check_private(path, os.fstat(file.fileno()))  # of the open file: the path could be exchanged after a check
        secret = file.read(_SECRET_BYTES + 1)
    if len(secret) != _SECRET_BYTES:
        raise ValueError(f"{path} does not hold a secret of {_SECRET_BYTES} bytes; remove it and start again")
    return secret


def _create_atomically(path: Path, content: bytes) -> None:
    """Create `path` atomically with its content, unless another process was first."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    with contextlib.suppress(FileExistsError):
        os.link(draft, path)  # unlike a rename, it fails if the file exists: all processes use the first secret
    draft.unlink()


def _runtime_base() -> Path:
    """Return the directory for this user's short-lived files. OSError where there is none."""
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(os.fsencode(base)) <= _LONGEST_BASE and os.access(base, os.W_OK | os.X_OK):
            return Path(base)
    raise OSError(
        "found no directory for sockets: set XDG_RUNTIME_DIR to a directory that you can write "
        f"and whose path has at most {_LONGEST_BASE} bytes"
    )


def possible_bases() -> list[Path]:
    """Return the directories in which any process of this user may have its run directory: a session has another
    environment than, for instance, a server that it did not start."""
    bases = (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.geteuid()}", tempfile.gettempdir(), "/tmp")
    return [Path(base) for base in dict.fromkeys(bases) if base and Path(base).is_dir()]


def _make_private(path: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()  # no symbolic link is followed: another user may have made one in /tmp
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{path} is not a directory; remove it, or set XDG_RUNTIME_DIR to a directory of yours")
    check_private(path, status)
    return path


def check_private(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError if another user owns a file or directory, or can use it."""
    if status.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}, not to you; set XDG_RUNTIME_DIR to a directory of yours"
        )
    if status.st_mode & 0o077:
        raise PermissionError(f"others may use {path}; run: chmod go-rwx {path}")


def _remove_own_tree(path: Path, maker: int) -> None:
    if os.getpid() == maker:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


SECRET_VARIABLE = "RPCBENCH_SECRET_FILE"


def make_secret(path: Path) -> None:
    """Write a new secret to a new file that only this user can read. FileExistsError where there is one."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(_SECRET_BYTES) + "\n")


def load_secret() -> bytes | None:
    """Return the secret in the file that RPCBENCH_SECRET_FILE names; None where it names none. FileNotFoundError;
    PermissionError if other users can read it; ValueError if it holds anything else."""
    name = os.environ.get(SECRET_VARIABLE)
    if not name:
        return None
    path = Path(name)
    with path.open() as file:
        check_private(path, os.fstat(file.fileno()))
        text = file.read(1000).strip()  # a limit, as the variable may name any file
    try:
        secret = bytes.fromhex(text)
        if len(secret) != _SECRET_BYTES:
            raise ValueError
    except ValueError:
        raise ValueError(f"{path} does not hold a secret; make one with: rpcbench secret {path}") from None
    return secret


def missing_secret_error(host: str) -> RpcError:
    """Return the error for a world that needs a secret and has none."""
    return RpcError(
        f"{host} is reached over the network, and a process that connects can run code here, so all workers must share "
        f"a secret. Make one with: rpcbench secret ~/.rpcbench-secret; copy the file to every host, and set "
        f"{SECRET_VARIABLE}=~/.rpcbench-secret for every worker"
    )
