"""Where processes on one host find the one that leads their world: a note in the directory that they share.

Guarantees
- Of several that want to found a world one does; a note of a process that listens no more hinders nobody. Where it
  cannot be founded, those that wait for it are told.
- Who hands over changes the note from its own address to that of its heir in one step: at no time does a newcomer find
  nobody, and found a second world.
- Notes of two who hand over one after the other may be written in any order: the later view counts.
- Who leads takes the note away when it goes, and nobody else's.
- A directory that has gone stays gone: nothing here makes it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rpcbench.base.config import HANDSHAKE_SECONDS
from rpcbench.transport.addresses import Opener


class _Note(NamedTuple):
    world: int
    view: int
    address: str


class Rendezvous:
    """`directory` is one that no other user can enter."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "leader"
        self._lock = directory / "lock"
        self._failure = directory / "failure"

    def find(self) -> str:
        """The address of the one who leads. FileNotFoundError where nobody does (yet)."""
        return self._read().address

    def found(self, world: int, address: str) -> bool:
        """Lead a new world from now on; False where a process that leads one listens already."""
        with self._locked():
            if self._is_led(address):
                return False
            self._write(_Note(world, 0, address))
            self._failure.unlink(missing_ok=True)
            return True

    def fail(self, reason: str) -> None:
        """The process that was to found a world could not: those that wait for it are told."""
        with self._locked():
            self._failure.write_text(reason)

    def failure(self, since: float) -> str | None:
        """Why a world could not be founded here after `since` (of time.time); None where nobody has failed."""
        try:
            told = self._failure.read_text()
            return told if self._failure.stat().st_mtime >= since else None
        except FileNotFoundError:
            return None

    def hand_over(self, world: int, view: int, address: str) -> None:
        """From this view of the world on another process leads it."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            note = self._read()
            if note.world == world and note.view < view:
                self._write(_Note(world, view, address))

    def lead(self, world: int, view: int, address: str) -> None:
        """From this view on this process leads; one on another host, which has no note here, has handed over to it.

        Where the directory has gone, nobody will look for it here.
        """
        with contextlib.suppress(FileNotFoundError), self._locked():
            if not self._is_led(address):
                self._write(_Note(world, view, address))

    def leave(self, address: str) -> None:
        """This process leads no more, and nobody does after it here."""
        with contextlib.suppress(FileNotFoundError), self._locked():
            if self._read().address == address:
                self.path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The note is this process's alone for a moment. FileNotFoundError where the directory has gone."""
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork of this process may have it open, too
            os.close(descriptor)

    def _is_led(self, mine: str) -> bool:
        """Whether another process listens where the note says. This process listens at `mine`: then the note is of
        one that was killed, and had the same address."""
        try:
            if self.find() == mine:
                return False
            Opener(b"").connect(self.find(), time.monotonic() + HANDSHAKE_SECONDS).release()
        except OSError:
            return False
        return True

    def _read(self) -> _Note:
        world, view, address = self.path.read_text().split(" ", 2)
        return _Note(int(world), int(view), address)

    def _write(self, note: _Note) -> None:
        draft = self.path.with_name(f"leader.{secrets.token_hex(4)}")
        draft.write_text(" ".join(map(str, note)))
        draft.replace(self.path)
