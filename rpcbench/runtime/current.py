"""The agent that `rpc_sync` and the other module-level functions use: the only module-level state of the runtime.

It is the agent whose function runs on this thread, or of the innermost `with` on it; else the latest that was started.
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
from rpcbench.runtime.server import caller_id, cancelled

__all__ = [
    "caller_id", "cancelled", "current_agent", "find_current", "make_current", "running_agents", "start_agent",
    "use_agent",
]  # fmt: skip
_innermost: ContextVar[Agent | None] = ContextVar("rpcbench_agent", default=None)
_started: list[Agent] = []  # in the order of `start_agent`; the last one is current
_lock = threading.Lock()  # for changes of `_started`; a read is one step
_silent = NOT_INITIALIZED
"""The error text of `current_agent` without an agent."""


def current_agent() -> Agent:
    """Return the agent to use. RuntimeError "RPC has not been initialized…" if there is none."""
    agent = find_current()
    if agent is None:
        raise RuntimeError(_silent)
    return agent


def find_current() -> Agent | None:
    """Do as `current_agent`, but return None if there is none."""
    agent = _innermost.get()
    if agent is not None and agent.running:
        return agent
    try:
        return _started[-1]  # one step, so agents may start or end meanwhile
    except IndexError:
        return None


def running_agents() -> list[Agent]:
    """Return the agents of this process that run; the current one of threads without their own is the last."""
    return [agent for agent in list(_started) if agent.running]


def start_agent(agent: Agent, timeout: float) -> None:
    """Start an agent: it is current for its own threads, and for other threads until a later one starts."""
    register_agent(agent)
    agent.start(timeout)


def register_agent(agent: Agent) -> None:
    """Register an agent that is started elsewhere, as `start_agent` does."""
    agent.hooks.on_thread.append(lambda: _innermost.set(agent))
    agent.hooks.on_end.append(lambda: _unregister_agent(agent))
    with _lock:
        _started.append(agent)


def _unregister_agent(agent: Agent) -> None:
    with _lock:
        if agent in _started:
            _started.remove(agent)


def make_current(agent: Agent) -> None:
    """Make a running agent the current one, as if it were the latest started."""
    with _lock:
        if agent in _started:
            _started.remove(agent)
            _started.append(agent)


@contextlib.contextmanager
def use_agent(agent: Agent) -> Iterator[None]:
    """Make an agent the current one for a `with` block, as `with cluster:` does."""
    token = _innermost.set(agent)
    try:
        yield
    finally:
        _innermost.reset(token)


def _reset_after_fork() -> None:
    """Drop all agents in a forked child: their threads do not run there, and their sockets are the parent's."""
    global _silent
    for agent in _started:
        agent.forked()
        _silent = agent.silent
    _started.clear()


os.register_at_fork(after_in_child=_reset_after_fork)


@atexit.register
def _stop_all_agents() -> None:
    """Stop agents at exit without a shutdown: at least their socket files are removed."""
    for agent in list(_started):
        agent.stop()
