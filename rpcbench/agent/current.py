"""Which agent `rpc_sync` and its like speak through: the only module-level state of the runtime.

In order: the agent whose function runs on this thread; the innermost `with` on this thread; the latest one started.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpcbench.agent.core import Agent

NOT_INITIALIZED = (
    "RPC has not been initialized. Call rpcbench.rpc.init_rpc first, or start workers: "
    "rpcbench.Cluster(2), in a notebook %cluster start 2."
)
_innermost: ContextVar[Agent | None] = ContextVar("rpcbench_agent", default=None)
_caller: ContextVar[int | None] = ContextVar("rpcbench_caller", default=None)
_started: list[Agent] = []
_lock = threading.Lock()


def current() -> Agent:
    """The agent to speak through. RuntimeError "RPC has not been initialized…" where there is none."""
    agent = find()
    if agent is None:
        raise RuntimeError(NOT_INITIALIZED)
    return agent


def find() -> Agent | None:
    """As `current`, None where there is none."""
    agent = _innermost.get()
    if agent is not None and agent.running:
        return agent
    with _lock:
        return _started[-1] if _started else None


def caller() -> int:
    """Id of the worker whose call runs on this thread. RuntimeError outside one."""
    source = _caller.get()
    if source is None:
        raise RuntimeError("no call of another worker runs on this thread")
    return source


def started(agent: Agent) -> None:
    with _lock:
        _started.append(agent)


def stopped(agent: Agent) -> None:
    with _lock:
        if agent in _started:
            _started.remove(agent)


def enter_thread(agent: Agent) -> None:
    """All of this thread belongs to one agent's pool."""
    _innermost.set(agent)


@contextlib.contextmanager
def using(agent: Agent) -> Iterator[None]:
    """For `with cluster:`."""
    token = _innermost.set(agent)
    try:
        yield
    finally:
        _innermost.reset(token)


@contextlib.contextmanager
def serving(source: int) -> Iterator[None]:
    """Around a function that `source` asked for."""
    token = _caller.set(source)
    try:
        yield
    finally:
        _caller.reset(token)
