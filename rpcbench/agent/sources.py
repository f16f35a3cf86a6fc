"""Says so where a function that goes by name is another one on the worker that runs it: a module that was changed after
the worker had loaded it, or another version of it on another host.

The caller asks once for each function and worker, beside the first call, and is answered only where the two differ.
After that a call costs one look into a set.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any

from rpcbench.agent.channels import Channels
from rpcbench.agent.roster import GONE, Roster
from rpcbench.base.errors import RpcError
from rpcbench.serialization.importable import fingerprint, importable, load_packages_of

_ASK, _DIFFERS = "source", "source differs"
_MOST_WRAPPERS = 100
_OURS = __name__.partition(".")[0] + "."  # the handshake compares versions of these
Notify = Callable[[int, str, Any], object]
"""(receiver, channel, data): one-way words."""


class Sources:
    """What one agent has asked of others."""

    def __init__(self, me: int, roster: Roster, channels: Channels, notify: Notify) -> None:
        self._me = me
        self._roster = roster
        self._notify = notify
        self._asked: dict[int, set[FunctionType]] = {}
        channels.listen(_ASK, self._compare)
        channels.listen(_DIFFERS, self._warn)
        roster.watch(lambda kind, who, reason: self._asked.pop(who.id, None) if kind in GONE else None)

    def use(self, to: int, function: Any) -> None:
        """A function is about to be called there."""
        if type(function) is FunctionType and function not in self._asked.get(to, ()):
            self._ask(to, function)

    def _ask(self, to: int, function: FunctionType) -> None:
        if not importable(function):
            return  # its code goes along
        self._asked.setdefault(to, set()).add(function)
        if to == self._me or function.__module__.startswith(_OURS):
            return
        name, code = f"{function.__module__}:{function.__qualname__}", function.__code__
        asked = {"name": name, "mark": _mark(function), "at": [code.co_filename, code.co_firstlineno]}
        self._notify(to, _ASK, asked)

    def _compare(self, source: int, asked: dict[str, Any]) -> None:
        try:
            mine = _found(*asked["name"].split(":"))
        except Exception:  # noqa: BLE001  (it cannot be had here, whyever: the call itself fails, and says so)
            return
        if isinstance(mine, FunctionType) and _mark(mine) != asked["mark"]:
            with contextlib.suppress(RpcError):  # who has asked is gone
                self._notify(source, _DIFFERS, {**asked, "there": mine.__code__.co_filename})

    def _warn(self, worker: int, answer: dict[str, Any]) -> None:
        who, (file, line) = self._roster.name(worker), answer["at"]
        module = answer["name"].partition(":")[0]
        warnings.warn_explicit(
            f"{who} runs another version of {answer['name'].replace(':', '.')}: it has loaded {answer['there']}, and "
            f"this process {file}. Have the same on both sides, say by cluster.reload({module!r}), "
            f"or restart {who}",
            RuntimeWarning,
            file,
            line,
        )


def _found(module: str, name: str) -> Any:
    load_packages_of(module)
    return attrgetter(name)(importlib.import_module(module))


def _mark(function: Any) -> bytes:
    """What a function says, and those that decorators have wrapped in it."""
    codes: list[Any] = []
    while function is not None and len(codes) < _MOST_WRAPPERS:
        codes.append(getattr(function, "__code__", None))
        function = getattr(function, "__wrapped__", None)
    return fingerprint(codes)
