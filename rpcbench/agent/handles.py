"""References held by this process, and how they travel inside messages.

A `Handle` is one hold on an RRef: the last reference to it releases the fork. That may happen in any thread, inside any
lock and at exit, so nothing but `SimpleQueue.put` runs then: no Python, where Ctrl-C could be lost, or the fork.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

from rpcbench.agent import sites
from rpcbench.base.errors import ProtocolError, RpcError, WorkerLostError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.wire.messages import Fork


class Home(Protocol):
    """What a handle needs of its agent."""

    @property
    def id(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def running(self) -> bool: ...

    def needing(self, handle: Handle) -> bool:
        """Whether a call in flight goes by the name of what this one holds."""

    @property
    def released(self) -> SimpleQueue[Any]:
        """Takes the holds whose handle is gone."""

    @property
    def holds(self) -> set[Hold]:
        """Keeps holds until then."""


class Hold(weakref.ref["Handle"]):
    """Puts itself into the agent's queue when its handle goes."""

    __slots__ = ("fork",)

    fork: Id


class Handle:
    """A hold on one RRef: a user's, with its `fork`, or the owner's, with the future of the `value` itself."""

    def __init__(
        self, agent: Home, rref: Id, owner: int, fork: Id | None, value: Future[Any] | None, type_: str = ""
    ) -> None:
        self._agent = agent
        self._rref = rref
        self._owner = owner
        self._fork = fork
        self._value = value
        self._type = type_
        self._site: sites.Site | None = None  # where the user's program came to have it
        self._creation: Future[Any] | None = None  # on the user that called remote(): done when the value is there
        self._released = False
        if fork is not None:
            hold = Hold(self, agent.released.put)
            hold.fork = fork
            agent.holds.add(hold)

    def release(self) -> None:
        """Let go of the value now, not when the last reference to this object goes; it cannot be used after that.

        Calls of its methods that are under way have it yet.
        """
        self._released = True
        self._value = None
        self.let_go()

    def let_go(self) -> None:
        """Runtime only: see to what was released, unless a call in flight needs it; the last such call tells."""
        if not self._released or self._agent.needing(self):
            return
        for hold in weakref.getweakrefs(self):
            if isinstance(hold, Hold):
                self._agent.released.put(hold)

    def _check_alive(self, use: str) -> None:
        """RpcError where the value was let go of, or all were when the agent shut down."""
        if self._released or (self._fork is not None and not self._agent.running):
            raise RpcError(f"{self!r} has been let go of. Cannot call {use} after deletion.")


class Outgoing:
    """Collects the handles inside a value while it is pickled: index for index what the message's forks will be.

    `name_of`: the name of one that needs no fork, else None.
    """

    def __init__(
        self, agent: Home, handles: list[Handle], name_of: Callable[[object], tuple[int | str, ...] | None] | None
    ) -> None:
        self._agent = agent
        self._name_of = name_of
        self.handles = handles

    def give(self, value: object) -> tuple[int | str, ...] | None:
        if not isinstance(value, Handle):
            return None
        if self._name_of is not None and (name := self._name_of(value)) is not None:
            return name
        value._check_alive("fork an UserRRef")
        if value._agent is not self._agent:
            raise RpcError(f"{value!r} belongs to another world and cannot be sent in this one")
        self.handles.append(value)
        return (len(self.handles) - 1,)

    def take(self, *name: Any) -> object:
        raise AssertionError("nothing is taken while a value is pickled")


class Incoming:
    """Makes handles for the forks of a message while it is unpickled, and for names of values that are here."""

    def __init__(
        self, agent: Home, forks: Sequence[Fork], make: Callable[[Fork], Handle], named: Callable[..., Handle]
    ) -> None:
        self._agent = agent
        self._make = make
        self._named = named
        self._forks = forks
        self._handles: dict[int, Handle] = {}

    def give(self, value: object) -> None:
        return None

    def take(self, index: int, *name: Any) -> Handle:
        if name:
            return self._named(index, *name)
        if not 0 <= index < len(self._forks):
            raise ProtocolError(f"a message mentions RRef {index}, but brings {len(self._forks)}")
        if index not in self._handles:
            self._handles[index] = self._make(self._forks[index])
        return self._handles[index]

    def unopened(self) -> list[Fork]:
        """Users' forks that no handle was made for."""
        me = self._agent.id
        return [fork for i, fork in enumerate(self._forks) if i not in self._handles and fork.owner != me]


def value_lost(handle: Handle, owner: str) -> WorkerLostError:
    """Of a value whose owner is gone, and works again under the same name."""
    return WorkerLostError(
        f"the value of RRef {handle._rref} was lost with the {owner} that held it; {owner} has been started again "
        "since: make the value anew"
    )
