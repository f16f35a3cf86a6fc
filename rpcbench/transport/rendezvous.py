"""The rendezvous of processes on one host: a file in their shared directory has the address of the world's leader.

Guarantees
- Of several processes that found a world at once, one succeeds; the file of a leader that listens no more blocks none
  of them. A founder that fails leaves its reason for the processes that wait for it.
- A leader that hands over replaces its address by its successor's atomically: at no time does a new process find no
  leader, and found a second world.
- Two hand-overs in succession may be written in any order: the later view counts.
- A leader that leaves removes its own address only.
- A directory that was removed is not created again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rpcbench.base.config import HANDSHAKE_SECONDS
from rpcbench.base.files import replace_file
from rpcbench.transport.addresses import is_listening


class _Note(NamedTuple):
    world: int  # the leader's epoch: a random number
    view: int  # the number of the membership view from which this process leads
    address: str


class Rendezvous:
    """The leader's address in `directory`, which no other user can enter."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "leader"
        self._lock = directory / "lock"
        self._failure = directory / "failure"

    def find_leader(self) -> str:
        """Return the leader's address. FileNotFoundError where no process leads (yet)."""
        return self._read_note().address

    def claim_leadership(self, world: int, address: str) -> bool:
        """Become the leader of a new world; False if the leader of another one listens already."""
        with self._hold_lock():
            if self._is_led(address):
                return False
            self._write_note(_Note(world, 0, address))
            self._failure.unlink(missing_ok=True)
            return True

    def record_failure(self, reason: str) -> None:
        """Record why this process could not found its world, for the processes that wait for it."""
        with self._hold_lock():
            self._replace_file(self._failure, reason)

    def founding_failure(self, since: float) -> str | None:
        """Return why a world could not be founded here after `since` (of time.time); None if no founder has failed."""
        try:
            text = self._failure.read_text()
            return text if self._failure.stat().st_mtime >= since else None
        except FileNotFoundError:
            return None

    def record_successor(self, world: int, view: int, address: str) -> None:
        """Record that the process at `address` leads from this view of the world on."""
        with contextlib.suppress(FileNotFoundError), self._hold_lock():
            note = self._read_note()
            if note.world == world and note.view < view:  # else a later hand-over was written first
                self._write_note(_Note(world, view, address))

    def record_leadership(self, world: int, view: int, address: str) -> None:
        """Record that this process leads from this view on, after a leader on another host, which has no file here."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._hold_lock(),
        ):  # no directory: no process looks for a leader here
            if not self._is_led(address):
                self._write_note(_Note(world, view, address))

    def remove_address(self, address: str) -> None:
        """Remove this process's address: it leads no more, and has no successor on this host."""
        with contextlib.suppress(FileNotFoundError), self._hold_lock():
            if self._read_note().address == address:
                self.path.unlink()

    @contextlib.contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Hold the directory's file lock. FileNotFoundError where the directory was removed."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # `close` would not unlock while a forked child has the file open
            os.close(descriptor)

    def _is_led(self, mine: str) -> bool:
        """Return whether another process than this one, which listens at `mine`, listens at the recorded address."""
        try:
            found = self.find_leader()
            # The address may be this process's own: then the record is that of a killed one that had the same address.
            return found != mine and is_listening(found, HANDSHAKE_SECONDS)
        except OSError:
            return False

    def _read_note(self) -> _Note:
        world, view, address = self.path.read_text().split(" ", 2)
        return _Note(int(world), int(view), address)

    def _write_note(self, note: _Note) -> None:
        self._replace_file(self.path, " ".join(map(str, note)))

    def _replace_file(self, path: Path, text: str) -> None:
        with replace_file(path, durable=False) as file:  # atomically, as readers take no lock
            file.write(text.encode())
