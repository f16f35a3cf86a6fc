"""The callee's side: dispatches each message that arrives, opens a request, runs the function, sends the reply.

Calls, fetches and results that bring no RRefs take the fast path, where there is one (see `protocol.node`). A call
that finds room then begins at once, on the thread that runs the receive loop; others run on a pool thread. Whatever the
function raises, even SystemExit, becomes the caller's error; the worker lives on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import ConnectionLostError, RemoteError, RpcError
from rpcbench.base.futures import Future
from rpcbench.base.rebuild import set_field, story, words
from rpcbench.runtime.interceptors import Interceptors
from rpcbench.runtime.interrupts import interruptible
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.members import Members
from rpcbench.runtime.pool import CountedCall, Pool
from rpcbench.runtime.requests import PendingCalls
from rpcbench.runtime.values import ObjectStore
from rpcbench.wire import messages as m
from rpcbench.wire.messages import EMPTY, Call, Create, Failure, Fetch, Result

ASYNC_MARK = "_wrapped_async_rpc_function"
"""torch's name for the attribute that `async_execution` sets: the function returns a Future of its result."""


_new = tuple.__new__  # a step less than the class itself takes


class Server(Protocol):
    """What serving needs of an agent."""

    @property
    def name(self) -> str: ...

    @property
    def values(self) -> ObjectStore: ...

    @property
    def asynchronous(self) -> set[tuple[int, int]]:
        """(caller, call) whose function has returned a Future that is not done yet."""

    @property
    def on_error(self) -> Callable[[BaseException], object]:
        """Told what a caller's function has raised."""

    def reply(self, to: int, call: int, answer: Result | Failure) -> None:
        """Answer a call, unless its caller has gone."""

    def wanted(self, source: int, call: int) -> bool:
        """Whether the caller of a call that runs here still waits for it."""


class _Running(NamedTuple):
    """The call that runs on this thread."""

    agent: Server
    source: int
    call: int


_running: ContextVar[_Running | None] = ContextVar("rpcbench_running", default=None)


def caller() -> int:
    """Id of the worker whose call runs on this thread. RuntimeError outside one."""
    running = _running.get()
    if running is None:
        raise RuntimeError("no call of another worker runs on this thread")
    return running.source


def cancelled() -> bool:
    """Whether the call that runs on this thread may stop: its caller has cancelled it, waits no longer, or is gone.

    Nothing stops a function from outside, so a long one asks now and then, and returns. False outside a call.
    """
    running = _running.get()
    return running is not None and not running.agent.wanted(running.source, running.call)


class DeferredResult:
    """What a function returns whose result is not there yet. RuntimeError where it returned no Future."""

    def __init__(self, future: Any) -> None:
        if not isinstance(future, torch._C.Future):  # what `then` returns, too
            raise RuntimeError(
                f"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got "
                f"{type(future)}"
            )
        self.future: Any = future


def serve(agent: Server, source: int, message: Call | Create | Fetch) -> None:
    """Do what `source` asked for and answer."""
    if isinstance(message, Fetch):
        _fetch(agent, source, message)
        return
    token = _running.set(_new(_Running, (agent, source, message.call)))
    try:
        result = _run(agent, source, message)
    except BaseException as error:  # noqa: BLE001  (the caller gets it, whatever it is)
        _fail(agent, source, message, error)
        return
    finally:
        _running.reset(token)
    if type(result) is DeferredResult:
        agent.asynchronous.add((source, message.call))
        result.future.add_done_callback(lambda done: _answer_later(agent, source, message, done))
        return
    _answer(agent, source, message, result)


def _run(agent: Server, source: int, message: Call | Create) -> Any:
    scope, values = message.scope, agent.values
    function, args, kwargs = values.unpack(source, message.body, message.forks, scope, False)
    if scope is None and values.around is None:
        result = function(*args, **kwargs)
    else:
        with values.inside(scope.context if scope else None):
            result = function(*args, **kwargs)
    if type(result) is DeferredResult or getattr(function, ASYNC_MARK, None) is None:
        return result
    return DeferredResult(result)


def _answer_later(agent: Server, source: int, message: Call | Create, done: torch.futures.Future[Any]) -> None:
    agent.asynchronous.discard((source, message.call))
    try:
        value = done.value()
    except Exception as error:  # noqa: BLE001  (as above)
        _fail(agent, source, message, error)
    else:
        _answer(agent, source, message, value)


def _answer(agent: Server, source: int, message: Call | Create, value: Any) -> None:
    if isinstance(message, Create):
        agent.values.made(message.rref, value, None)
        agent.reply(source, message.call, Result(message.call, (), None, EMPTY))
        return
    _send_value(agent, source, message, value)


def _send_value(agent: Server, source: int, message: Call | Fetch, value: Any) -> None:
    label = "to_here" if isinstance(message, Fetch) else message.label
    call, scope = message.call, message.scope
    try:
        body, forks, scope = agent.values.pack(source, value, label, scope.context if scope else None)
    except Exception as error:  # noqa: BLE001  (a result that cannot travel is the caller's error)
        agent.reply(source, call, failure(agent, call, error))
        return
    agent.reply(source, call, _new(Result, (call, forks, scope, body)))


def _fail(agent: Server, source: int, message: Call | Create, error: BaseException) -> None:
    agent.on_error(error)
    if isinstance(message, Create):
        agent.values.made(message.rref, None, stored(agent, error))
    agent.reply(source, message.call, failure(agent, message.call, error))


def _fetch(agent: Server, source: int, message: Fetch) -> None:
    value: Future[Any] = agent.values.owned(message.rref)

    def ready(done: torch.futures.Future[Any]) -> None:
        try:
            result = done.value()
        except Exception as error:  # noqa: BLE001  (as above)
            agent.reply(source, message.call, failure(agent, message.call, error))
        else:
            _send_value(agent, source, message, result)

    value.add_done_callback(ready)


def failure(agent: Server, call: int, error: BaseException) -> Failure:
    """An exception as a message: itself where its class can travel, and always its story."""
    body = agent.values.codec.encode_error(error) if isinstance(error, Exception) else EMPTY
    return Failure(call, type(error).__name__, story(error), body)


def stored(agent: Server, error: BaseException) -> Exception:
    """An error to keep as a value: its story as text, and no frames, which would keep their variables alive."""
    kept = error if isinstance(error, Exception) else RuntimeError(words(error))
    set_field(kept, "__cause__", RemoteError(agent.name, story(error)))
    return kept.with_traceback(None)


def reraise(agent: Server, worker: str, answer: Failure) -> NoReturn:
    """Raise what a Failure stands for, with the remote traceback as its cause."""
    error: object = None
    if answer.body.payload:
        try:
            error = agent.values.codec.decode(answer.body)
        except Exception:  # noqa: BLE001  (its class cannot be rebuilt here; its story can be shown)
            error = None
    if not isinstance(error, Exception):
        told = (
            f"{answer.type} on {worker}, which cannot be made anew here. Original exception on remote side was:\n"
            f"{answer.text}"
        )
        lost = answer.type == ConnectionLostError.__name__  # the answer itself was
        error = ConnectionLostError(answer.text) if lost else RpcError(told)
    raise error from RemoteError(worker, answer.text)


class Receiving(Server, Protocol):
    """What this needs of an agent."""

    links: Interceptors
    machine: LockedNode
    roster: Members
    pending: PendingCalls
    ready: Flag


class MessageDispatcher:
    """`run` runs a call, on this thread."""

    def __init__(self, agent: Receiving, pool: Pool) -> None:
        self.run: Callable[[int, Any], object] = partial(serve, agent)
        self._agent = agent
        self._pool = pool

    def deliver(self, source: int, seq: int, message: m.Message) -> None:
        """A message has come."""
        kind = type(message)
        if kind is m.Result:
            if self._settle(source, seq, message):
                return
        elif kind is m.Fetch or (kind is m.Call and not message.forks):
            if self._take(source, seq, message):
                return
        elif kind is m.Report:  # whoever knows why may have to wait for the exit status
            self._pool.spawn(lambda: self._handle(source, seq, self._agent.roster.explained(message)))
            return
        self._handle(source, seq, message)

    def _handle(self, source: int, seq: int, message: m.Message) -> None:
        now = self._agent.links.clock()
        self._agent.machine.feed(lambda node: node.handle(source, seq, message, now))

    def answered(self, source: int, answer: m.Result | m.Failure) -> None:
        """A call that waits has its answer."""
        if isinstance(answer, m.Result):
            # What it brings besides values must reach the protocol, whether anybody asks for the values or not.
            lazy = not answer.forks and answer.scope is None
            asked = self._agent.pending.asked(answer.call) if answer.forks else None
            self._agent.pending.finish(answer.call, partial(self._open, source, answer, asked), lazy)
        else:
            name = self._agent.roster.name
            failure = answer
            self._agent.pending.finish(failure.call, lambda: reraise(self._agent, name(source), failure))

    def _open(self, source: int, answer: m.Result, asked: Future[Any] | None) -> Any:
        if not answer.body.payload:
            return None
        site = None if asked is None else asked.site
        return self._agent.values.unpack(source, answer.body, answer.forks, answer.scope, True, site)

    # -- the short way; False where nothing has been done, as where Ctrl-C could come between two steps
    def _take(self, source: int, seq: int, message: m.Call | m.Fetch) -> bool:
        if not self._agent.ready.is_set():  # the caller knew the world sooner than we do
            return False
        loop = self._pool.let_in()
        if loop is None:
            return False
        taken = self._agent.machine.take(source, seq, message, self._agent.links.clock())
        if taken:
            loop.calls.append(CountedCall(self.run, source, message))
        else:
            self._pool.end()
        return taken

    def _settle(self, source: int, seq: int, result: m.Result) -> bool:
        if result.forks or interruptible() or not self._agent.machine.resolve(source, seq, result):
            return False
        self.answered(source, result)
        return True
