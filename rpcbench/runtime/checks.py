"""What an agent finds wrong in a user's program: RRefs that have leaked, and functions that differ between workers.

Leaks are of two kinds: values that this member owns and others use, and references held here to values of others; each
with the place in the program where this process got hold of it. A member that leaves the world in good order lets go of
the second kind itself; what is left of the first kind then has leaked.

A function that goes by name may be another one on the worker that runs it: a module that was changed after the worker
had loaded it, or another version of it on another host. The caller asks once for each function and worker, beside the
first call, and is answered only where the two differ. After that a call costs one look into a set.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple, Protocol

from rpcbench.base.errors import RpcError
from rpcbench.base.ids import Id
from rpcbench.protocol.node import Node
from rpcbench.protocol.rrefs import Owned
from rpcbench.runtime.channels import Channels
from rpcbench.runtime.handles import Home
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.members import GONE, Members
from rpcbench.runtime.values import ObjectStore
from rpcbench.serialization.importable import fingerprint, importable, load_packages_of


class Member(Home, Protocol):
    """What this needs of an agent."""

    @property
    def name(self) -> str: ...

    @property
    def machine(self) -> LockedNode: ...

    @property
    def roster(self) -> Members: ...

    @property
    def values(self) -> ObjectStore: ...


class Leak(NamedTuple):
    """One RRef that is alive. `held`: a reference to another's value; else a value of this member, and its `holders`.

    `site` is the line, or the cell, of this process that made it; empty where a message of another member did.
    """

    rref: Id
    forks: tuple[Id, ...]
    owner: str
    holders: tuple[str, ...]
    type: str
    site: str
    held: bool

    def __str__(self) -> str:
        made = f"made at {self.site}" if self.site else "which came in a message"
        if self.held:
            return f"RRef {self.rref} of {self.type or 'a value'} on {self.owner}, held by {self.holders[0]}, {made}"
        users = ", ".join(dict.fromkeys(self.holders))
        return f"RRef {self.rref} of {self.type or 'a value'}, owned by {self.owner}, used by {users}, {made}"


def leaks(agent: Member) -> list[Leak]:
    """All RRefs alive here that another member is part of, values owned here first."""
    return _owned(agent) + _held(agent)


def _owned(agent: Member) -> list[Leak]:
    names = agent.roster.name

    def rows(node: Node) -> list[tuple[Id, Owned, dict[Id, int]]]:
        return [(rref, owned, dict(owned.forks)) for rref, owned in node.rrefs.owned.items()]

    found = []
    for rref, owned, forks in agent.machine.ask(rows):
        site = agent.values.site(rref)
        holders = tuple(names(holder) for holder in forks.values())
        found.append(Leak(rref, tuple(forks), agent.name, holders, owned.type, str(site or ""), False))
    return found


def _held(agent: Member) -> list[Leak]:
    users = agent.machine.ask(lambda node: {f: u for f, u in node.rrefs.users.items() if u.owner != agent.id})
    found = []
    for handle in filter(None, [hold() for hold in list(agent.holds)]):
        fork = handle._fork
        user = users.get(fork) if fork is not None else None
        if fork is not None and user is not None and not handle._released:  # the owner may not know yet
            owner, site = agent.roster.name(user.owner), str(handle._site or "")
            found.append(Leak(handle._rref, (fork,), owner, (agent.name,), user.type, site, True))
    return found


def leak_report(found: Sequence[Leak]) -> str:
    """For people, one line for each."""
    return "\n".join(f"  {leak}" for leak in found)


_ASK, _DIFFERS = "source", "source differs"
_MOST_WRAPPERS = 100
_OURS = __name__.partition(".")[0] + "."  # the handshake compares versions of these
Notify = Callable[[int, str, Any], object]
"""(receiver, channel, data): one-way words."""


class SourceCheck:
    """What one agent has asked of others."""

    def __init__(self, me: int, roster: Members, channels: Channels, notify: Notify) -> None:
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
