"""The callee's side: dispatches each message that arrives, opens requests, runs functions, sends replies.

Guarantees
- Calls, fetches and results without RRefs take the fast path if possible (see `protocol.node`). A call for which there
  is a place begins at once, on the thread that runs the receive loop; others run on a pool thread.
- Any error of a function, even SystemExit, becomes the caller's error; the worker continues.
- A fork that a function has made ends with the function, if it has not ended before.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from rpcbench.base.config import FORK_MARK
from rpcbench.base.errors import ConnectionLostError, RemoteError, RpcError
from rpcbench.base.futures import Future, release_slot
from rpcbench.base.rebuild import format_traceback, format_value, set_field
from rpcbench.protocol import effects as fx
from rpcbench.runtime import gpus
from rpcbench.runtime.handles import resolve_site
from rpcbench.runtime.interceptors import AgentHooks
from rpcbench.runtime.links import AgentLinks
from rpcbench.runtime.locked_node import EffectTable, LockedNode, is_interruptible
from rpcbench.runtime.pool import CountedCall, Pool
from rpcbench.runtime.requests import AgentCalls
from rpcbench.wire import messages as m
from rpcbench.wire.messages import EMPTY, Call, Create, Failure, Fetch, Result, new_tuple

ASYNC_MARK = "_wrapped_async_rpc_function"
"""torch's name for the attribute that `async_execution` sets: the function returns a Future of its result."""


class Server(Protocol):
    """The part of an agent that serving needs."""

    name: str
    machine: LockedNode
    links: AgentLinks
    calls: AgentCalls
    is_fork: bool  # this process is a fork of the agent's
    hooks: AgentHooks

    def reply(self, to: int, call: int, answer: Result | Failure) -> None:
        """Answer a call, unless its caller has left."""

    def wanted(self, source: int, call: int) -> bool:
        """Return whether the caller of a call that runs here still waits for it."""


class _Running(NamedTuple):
    """The call that runs on this thread."""

    agent: Server
    source: int
    call: int


_running: ContextVar[_Running | None] = ContextVar("rpcbench_running", default=None)


def caller_id() -> int:
    """Return the id of the worker that made the call on this thread. RuntimeError outside of a call."""
    running = _running.get()
    if running is None:
        raise RuntimeError("no call of another worker runs on this thread")
    return running.source


def call_number() -> int:
    """Return the number of the call on this thread, larger than those of earlier calls of its caller; 0 outside."""
    running = _running.get()
    return 0 if running is None else running.call


def cancelled() -> bool:
    """Return whether the call on this thread may stop: its caller has cancelled it, no longer waits, or has left.

    No function is stopped from outside: a long one should check this now and then, and return. False outside of a call.
    """
    running = _running.get()
    return running is not None and not running.agent.wanted(running.source, running.call)


class DeferredResult:
    """The result of a function that returns a Future. RuntimeError if it is not one."""

    def __init__(self, future: Any) -> None:
        if not isinstance(future, torch._C.Future):  # the base class: `then` returns it, too
            raise RuntimeError(
                f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got "
                f"{type(future)}"
            )
        self.future: Any = future


def serve_request(agent: Server, source: int, message: Call | Create | Fetch) -> None:
    """Serve a request of `source`, and reply."""
    if isinstance(message, Fetch):
        _serve_fetch(agent, source, message)
        return
    token = _running.set(new_tuple(_Running, (agent, source, message.call)))
    try:
        try:
            result = _run_call(agent, source, message)
        finally:
            for job in agent.hooks.on_called:
                job()
    except BaseException as error:  # noqa: BLE001  (any error goes to the caller)
        end_fork(agent, error)
        _send_failure(agent, source, message, error)
        return
    finally:
        _running.reset(token)
    end_fork(agent, None)
    if type(result) is DeferredResult:
        agent.calls.asynchronous.add((source, message.call))
        result.future.add_done_callback(lambda done: _answer_later(agent, source, message, done))
        return
    _answer_call(agent, source, message, result)


def end_fork(agent: Server, error: BaseException | None) -> None:
    """End this process if it is a fork of the agent's, in which a call or a cell has come to its end, by `error` or
    None. It never goes on with the work of its parent. Its error goes to stderr, marked: the log is the parent's too.
    """
    if not agent.is_fork:
        return
    code = 1
    try:
        status = error.code if isinstance(error, SystemExit) else format_traceback(error) if error else None
        code = status & 0xFF if isinstance(status, int) else int(status is not None)
        if status is not None and not isinstance(status, int):
            _write_marked(agent.name, str(status))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the function may have closed it, or removed it
                stream.flush()
    finally:
        os._exit(code)


def _write_marked(name: str, text: str) -> None:
    mark = f"{FORK_MARK}{name}, process {os.getpid()}] "
    with suppress(Exception):  # as above: there is no other place for the text
        sys.stderr.write("".join(f"{mark}{line}\n" for line in text.splitlines()))


def _run_call(agent: Server, source: int, message: Call | Create) -> Any:
    scope, values = message.scope, agent.calls.values
    function, args, kwargs = values.unpack_message(source, message.body, message.forks, scope, False)
    if scope is None and not values.around:
        result = function(*args, **kwargs)
    else:
        with values.enter_context(scope.context if scope else None):
            result = function(*args, **kwargs)
    if type(result) is DeferredResult or getattr(function, ASYNC_MARK, None) is None:
        return result
    return DeferredResult(result)


def _answer_later(agent: Server, source: int, message: Call | Create, done: torch.futures.Future[Any]) -> None:
    agent.calls.asynchronous.discard((source, message.call))
    for job in agent.hooks.on_deferred:
        job()
    try:
        value = done.value()
    except Exception as error:  # noqa: BLE001  (as above)
        _send_failure(agent, source, message, error)
    else:
        _answer_call(agent, source, message, value)


def _answer_call(agent: Server, source: int, message: Call | Create, value: Any) -> None:
    if isinstance(message, Create):
        agent.calls.values.resolve_value(message.rref, value, None)
        agent.reply(source, message.call, Result(message.call, (), None, EMPTY))
        return
    _send_value(agent, source, message, value)


def _send_value(agent: Server, source: int, message: Call | Fetch, value: Any) -> None:
    label = "to_here" if isinstance(message, Fetch) else message.label
    call, scope = message.call, message.scope
    try:
        body, forks, scope = agent.calls.values.pack_reply(source, value, label, scope.context if scope else None)
    except Exception as error:  # noqa: BLE001  (a result that cannot travel is the caller's error)
        agent.reply(source, call, make_failure(agent, call, error))
        return
    agent.reply(source, call, new_tuple(Result, (call, forks, scope, body)))


def _send_failure(agent: Server, source: int, message: Call | Create, error: BaseException) -> None:
    gpus.explain(error, agent.name)
    for handler in agent.hooks.on_error:
        handler(error)
    if isinstance(message, Create):
        agent.calls.values.resolve_value(message.rref, None, make_stored_error(agent, error))
    agent.reply(source, message.call, make_failure(agent, message.call, error))


def _serve_fetch(agent: Server, source: int, message: Fetch) -> None:
    value: Future[Any] = agent.calls.values.owned_future(message.rref)

    def ready(done: torch.futures.Future[Any]) -> None:
        try:
            result = done.value()
        except Exception as error:  # noqa: BLE001  (as above)
            agent.reply(source, message.call, make_failure(agent, message.call, error))
        else:
            _send_value(agent, source, message, result)

    value.add_done_callback(ready)


def make_failure(agent: Server, call: int, error: BaseException) -> Failure:
    """Make a message of an exception: the exception itself if its class can be pickled, and always its text."""
    body = agent.calls.values.codec.encode_error(error) if isinstance(error, Exception) else EMPTY
    return Failure(call, type(error).__name__, format_traceback(error), body)


def make_stored_error(agent: Server, error: BaseException) -> Exception:
    """Make an error to keep as a value: its traceback as text, and no frames, which would keep variables alive."""
    kept = error if isinstance(error, Exception) else RuntimeError(format_value(error))
    set_field(kept, "__cause__", RemoteError(agent.name, format_traceback(error)))
    return kept.with_traceback(None)


def raise_failure(agent: Server, worker: str, answer: Failure) -> NoReturn:
    """Raise the error in a Failure, with the remote traceback as its cause."""
    error: object = None
    if answer.body.payload:
        try:
            error = agent.calls.values.codec.decode_value(answer.body)
        except Exception:  # noqa: BLE001  (its class cannot be rebuilt here; its text can be shown)
            error = None
    if not isinstance(error, Exception):
        note = (
            f"{answer.type} on {worker}, which cannot be rebuilt here. Original exception on remote side was:\n"
            f"{answer.text}"
        )
        lost = answer.type == ConnectionLostError.__name__  # the reply itself was lost
        error = ConnectionLostError(answer.text) if lost else RpcError(note)
    raise error from RemoteError(worker, answer.text)


class MessageDispatcher:
    """Dispatches the messages of one agent. `run` runs a call on this thread."""

    def __init__(self, agent: Server, effects: EffectTable, pool: Pool) -> None:
        self.run: Callable[[int, Any], object] = partial(serve_request, agent)
        self._agent = agent
        self._pool = pool
        effects.register(fx.Enqueue, lambda effect: pool.submit_call(lambda: self._begin_call(effect)))
        effects.register(fx.Run, lambda effect: self.run(effect.source, effect.message))
        effects.register(fx.Resolve, lambda effect: self._reply_received(effect.source, effect.answer))

    def deliver_message(self, source: int, seq: int, message: m.Message) -> None:
        kind = type(message)
        if kind is m.Result:
            if self._resolve_fast(source, seq, message):
                return
        elif kind is m.Fetch or (kind is m.Call and not message.forks):
            if self._take_call(source, seq, message):
                return
        elif kind is m.Report:  # `explain_report` may block until the exit status is known
            self._pool.spawn_job(
                lambda: self._handle_message(source, seq, self._agent.links.members.explain_report(message))
            )
            return
        self._handle_message(source, seq, message)

    def _handle_message(self, source: int, seq: int, message: m.Message) -> None:
        now, made = self._agent.links.interceptors.clock(), time.monotonic()
        self._agent.machine.feed_event(lambda node: node.handle_message(source, seq, message, now, made))

    def _begin_call(self, effect: fx.Enqueue) -> None:
        ready = self._agent.links.bootstrap.ready
        if not ready.is_set():  # the caller may have seen the complete world before this member
            with release_slot():
                ready.wait()
        now = self._agent.links.interceptors.clock()
        self._agent.machine.feed_event(lambda node: node.begin_serving(effect.source, effect.call, now))

    def _reply_received(self, source: int, answer: m.Result | m.Failure) -> None:
        """Resolve a pending call with its reply."""
        pending = self._agent.calls.pending
        if isinstance(answer, m.Result):
            # Forks and autograd scopes must reach the protocol, even if no thread asks for the values.
            lazy = not answer.forks and answer.scope is None
            asked = pending.find_future(answer.call) if answer.forks else None
            pending.resolve_call(answer.call, partial(self._decode_result, source, answer, asked), lazy)
        else:
            name = self._agent.links.members.member_name
            failure = answer
            pending.resolve_call(failure.call, lambda: raise_failure(self._agent, name(source), failure))

    def _decode_result(self, source: int, answer: m.Result, future: Future[Any] | None) -> Any:
        if not answer.body.payload:
            return None
        site = None if future is None else resolve_site(future.site)
        return self._agent.calls.values.unpack_message(source, answer.body, answer.forks, answer.scope, True, site)

    # -- the fast path; False if nothing has been done, as if Ctrl-C could come between two steps
    def _take_call(self, source: int, seq: int, message: m.Call | m.Fetch) -> bool:
        if not self._agent.links.bootstrap.ready.is_set():  # the caller may have seen the complete world first
            return False
        calls = self._pool.admit_call()
        if calls is None:  # not on a receive loop, or the pool is full
            return False
        taken = self._agent.machine.accept_request(source, seq, message, self._agent.links.interceptors.clock())
        if taken:
            calls.append(CountedCall(self.run, source, message))
        else:
            self._pool.give_back_place()  # gives the place back
        return taken

    def _resolve_fast(self, source: int, seq: int, result: m.Result) -> bool:
        if result.forks or is_interruptible() or not self._agent.machine.accept_reply(source, seq, result):
            return False
        self._reply_received(source, result)
        return True
