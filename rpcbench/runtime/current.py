"""Which agent `rpc_sync` and its like speak through: the only module-level state of the runtime.

Looked for in this order: the agent whose function runs on this thread, or the innermost `with` on it; else the latest
one started.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from rpcbench.base.errors import NOT_INITIALIZED
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.server import caller, cancelled

__all__ = ["caller", "cancelled", "current", "find", "prefer", "start", "using"]
_innermost: ContextVar[Agent | None] = ContextVar("rpcbench_agent", default=None)
_started: list[Agent] = []
_lock = threading.Lock()
_silent = NOT_INITIALIZED
"""What to say where there is no agent."""


def current() -> Agent:
    """The agent to speak through. RuntimeError "RPC has not been initialized…" where there is none."""
    agent = _innermost.get() or _newest()
    if agent is None or not agent.running:
        agent = find()
    if agent is None:
        raise RuntimeError(_silent)
    return agent


def find() -> Agent | None:
    """As `current`, None where there is none."""
    agent = _innermost.get()
    if agent is not None and agent.running:
        return agent
    return _newest()


def _newest() -> Agent | None:
    try:
        return _started[-1]  # one step, whoever starts or ends meanwhile
    except IndexError:
        return None


def start(agent: Agent, timeout: float) -> None:
    """Start an agent: it is the current one for its own threads, and for others until a later one starts."""
    adopt(agent)
    agent.start(timeout)


def adopt(agent: Agent) -> None:
    """As `start`, for an agent that is started elsewhere."""
    agent.on_thread = lambda: _enter(agent)
    agent.on_end.append(lambda: _leave(agent))
    with _lock:
        _started.append(agent)


def _enter(agent: Agent) -> None:
    _innermost.set(agent)


def _leave(agent: Agent) -> None:
    with _lock:
        if agent in _started:
            _started.remove(agent)


def prefer(agent: Agent) -> None:
    """Make one that runs the current one, as if it were the latest started."""
    with _lock:
        if agent in _started:
            _started.remove(agent)
            _started.append(agent)


@contextlib.contextmanager
def using(agent: Agent) -> Iterator[None]:
    """For `with cluster:`."""
    token = _innermost.set(agent)
    try:
        yield
    finally:
        _innermost.reset(token)


def _forked() -> None:
    """In a forked child no thread of an agent runs, and its sockets are the parent's."""
    global _silent
    for agent in _started:
        agent.forked()
        _silent = agent.silent
    _started.clear()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _exit() -> None:
    """A program that ends without a word to the others leaves no socket file, at least."""
    for agent in list(_started):
        agent.stop()
