"""A process group of torch's gloo among some workers, beside whatever groups their user has.

Guarantees
- It needs no `init_process_group`, no port that is known beforehand, and no file: members tell each other their
  addresses over calls of this world, which only its members can make.
- It listens on loopback where all are on one host, else where the worker itself is found by the others.
- An operation ends in bounded time: a member that dies ends it for all at once, one that hangs after `SECONDS`.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch._C import _distributed_c10d as c10d

from rpcbench.base.errors import ConnectionLostError
from rpcbench.protocol.node import Node
from rpcbench.runtime.agent import Agent
from rpcbench.transport import listeners

SECONDS = 120.0
"""So long may one all-reduce take, of 25 MB at most."""
Made = tuple[Any, Exception | None]
"""A group, or the error that its making has ended with."""
LOOPBACK = "127.0.0.1"


class Meeting(c10d.Store):
    """Where gloo's members leave their addresses, under a key of its own each, and look for those of all others.

    `exchange(key, value)` tells all others of one, and waits for what they tell.
    """

    def __init__(self, exchange: Callable[[str, bytes], Iterable[tuple[str, bytes]]]) -> None:
        super().__init__()
        self._exchange = exchange
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._known |= {key: value, **dict(self._exchange(key, value))}

    def get(self, key: str) -> bytes:
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """They are there already."""


def make(store: Meeting, rank: int, size: int, host: str, done: Callable[[Made], None]) -> None:
    """Make a new group, when all its members are there; it listens at `host`. `done` gets it, or the error.

    All of it happens on a thread of its own: if a member leaves when others know where it was, these wait inside gloo
    for `SECONDS`, and nothing can end that.
    """

    def made() -> None:
        try:
            told: Made = (_group(store, rank, size, host), None)
        except Exception as error:  # noqa: BLE001  (raised by who waits for it)
            told = None, error
        done(told)

    threading.Thread(target=made, name="rpcbench gloo", daemon=True).start()


def _group(store: Meeting, rank: int, size: int, host: str) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stub lacks it
    options._timeout = datetime.timedelta(seconds=SECONDS)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    return c10d.ProcessGroupGloo(store, rank, size, options)


def host_for(agent: Agent, others: Sequence[int]) -> str:
    """Where this worker is to listen for these others. Loopback, unless one is on another host."""

    def near(node: Node) -> bool:
        members = node.members
        return all(members.members[other].host == members.me.host for other in others if other in members.members)

    if agent.machine.ask(near):
        return LOOPBACK
    remote: str = agent.machine.ask(lambda node: node.members.me.remote)
    return listeners.split_address(remote.partition("://")[2])[0]


def then(work: Any, done: Callable[[ConnectionLostError | None], None]) -> None:
    """Call `done` when the group's work is over, on a thread of gloo's, with the error that has ended it."""
    work.get_future().add_done_callback(lambda future: done(_error(future)))


def _error(future: Any) -> ConnectionLostError | None:
    try:
        future.value()
    except RuntimeError as error:
        return ConnectionLostError(f"gradients could not be added up over the replicas: {error}")
    return None


def let_go(groups: list[Any]) -> None:
    """Forget these groups, which nothing but this list has. Gloo waits for what they are still at, so that is for a
    thread of its own to wait for."""
    threading.Thread(target=groups.clear, name="rpcbench gloo", daemon=True).start()
