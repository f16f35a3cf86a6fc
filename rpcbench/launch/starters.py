"""The starter of this process, kept warm: a cluster that comes later finds torch loaded.

Guarantees
- A launcher has one starter for as long as that lives. Launchers share it as long as a new one would be no different:
  same mode and entry, same variables that count when torch is loaded, no change of a file that it has loaded.
- At most one starter serves nobody. All end with this process at the latest, however that ends.
- A fork of this process has none of them.
"""

from __future__ import annotations

import atexit
import os
import threading

from rpcbench.launch.starter import Kind, Starter

_READ_WHILE_LOADING = (
    "ATEN_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH"
)  # fmt: skip


class _Starters:
    def __init__(self) -> None:
        # Held while a starter is made: whoever comes meanwhile needs that one starter and could only wait.
        self._lock = threading.Lock()
        self._warm: Starter | None = None
        self._users: dict[Starter, int] = {}

    def take(self, kind: Kind, users: int) -> Starter:
        with self._lock:
            if self._warm is None or self._warm.kind != kind or not self._warm.is_good():
                self._warm = Starter(kind)
            warm = self._warm
            self._users[warm] = self._users.get(warm, 0) + users
            idle = self._take_idle()
        _stop(idle)
        return warm

    def take_any(self) -> Starter:
        with self._lock:
            if self._warm is None or self._warm.lost or self._warm.hangs:
                self._warm = Starter(Kind("spawn", "", frozenset()))
            self._users[self._warm] = self._users.get(self._warm, 0) + 1
            return self._warm

    def give_back(self, starter: Starter) -> None:
        with self._lock:
            if starter in self._users:
                self._users[starter] -= 1
            idle = self._take_idle()
        _stop(idle)

    def cool(self) -> None:
        with self._lock:
            self._warm = None
            idle = self._take_idle()
        _stop(idle)

    def end(self) -> None:
        with self._lock:
            self._warm = None
            starters = list(self._users)
            self._users.clear()
        _stop(starters)

    def _take_idle(self) -> list[Starter]:
        """Those that serve nobody and will not."""
        idle = [starter for starter, users in self._users.items() if not users and starter is not self._warm]
        for starter in idle:
            del self._users[starter]
        return idle


def _stop(starters: list[Starter]) -> None:
    for starter in starters:
        starter.stop()


_ours = _Starters()


def warm(mode: str, entry: str) -> None:
    """Begin to start a starter, if a fitting one is not there; returns at once."""
    _ours.take(_kind(mode, entry), users=0)


def take(mode: str, entry: str) -> Starter:
    """A starter of this mode ("fork" or "spawn") and entry, to be given back."""
    return _ours.take(_kind(mode, entry), users=1)


def take_any() -> Starter:
    """A starter to guard what others start, to be given back: the warm one, else one that loads nothing."""
    return _ours.take_any()


def give_back(starter: Starter) -> None:
    """Whoever took it needs it no more."""
    _ours.give_back(starter)


def cool() -> None:
    """Keep none warm: those that serve nobody end now, the others when they serve nobody any more."""
    _ours.cool()


def _kind(mode: str, entry: str) -> Kind:
    counting = {name: value for name, value in os.environ.items() if name.startswith(_READ_WHILE_LOADING)}
    return Kind(mode, entry, frozenset(counting.items()))


def _end() -> None:
    _ours.end()


def _forget() -> None:
    global _ours
    _ours = _Starters()


os.register_at_fork(after_in_child=_forget)
atexit.register(_end)
