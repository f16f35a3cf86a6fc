"""The calls of an agent: sends requests, holds the futures of pending calls, and receives replies (`server` serves).

Guarantees
- A request is sent as a whole or not at all, even if Ctrl-C comes meanwhile.
- The thread that waits for a reply receives it itself, if it has no other work and no other thread reads the connection
  (see `receiver`); else the receive loop resolves the future.

A function that is sent by name, or that a function of a notebook finds in a module, may differ on the worker that runs
it: its module was changed after the worker had loaded it, or another host has another version. `SourceCheck` asks once
for each function and worker, beside the first call, and receives a reply only if the two differ. After that a call of a
function by name costs one lookup in a set.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from rpcbench.base.conditions import Condition
from rpcbench.base.config import UNSET_TIMEOUT, WorldConfig
from rpcbench.base.errors import NOT_INITIALIZED, RpcError
from rpcbench.base.futures import Answer, Future, HelpAlong, Later, Waits, make_future
from rpcbench.base.ids import COUNTER_BITS, OWN, Counter
from rpcbench.protocol import effects as fx
from rpcbench.protocol.calls import not_sent_error
from rpcbench.protocol.node import Node
from rpcbench.runtime.channels import Channels, Parcels
from rpcbench.runtime.handles import CreationSite, HandleRuntime, RRefHandle
from rpcbench.runtime.interceptors import AgentHooks
from rpcbench.runtime.links import AgentLinks
from rpcbench.runtime.locked_node import EffectTable, LockedNode, uninterrupted
from rpcbench.runtime.members import GONE, Members
from rpcbench.runtime.pool import LONG, Pool, PoolThread
from rpcbench.runtime.timers import Deadlines
from rpcbench.runtime.values import MakeHandle, ObjectStore
from rpcbench.serialization.functions_used import module_functions
from rpcbench.serialization.importable import content_fingerprint, is_importable, load_packages_of
from rpcbench.wire.messages import Call, Create, Fetch, new_tuple

_LEAST_SECONDS = 0.0001  # left, at least, for a call that has waited for its receiver


def wait_for_call(begin: Callable[[], Future[Any]]) -> Any:
    """Wait for the call that `begin` starts, and return its result. Ctrl-C cancels it, but never interrupts `begin`."""
    future: Future[Any] | None = None
    try:
        with uninterrupted:
            future = begin()
        return future.wait()
    except KeyboardInterrupt:
        if future is not None:
            future.cancel()
        raise


def timeout_seconds(timeout: float, default: float) -> float | None:
    """Convert a timeout in torch's terms, -1 for the default and 0 for none. ValueError for another negative number."""
    if timeout == UNSET_TIMEOUT:
        timeout = default
    if timeout < 0:
        raise ValueError(f"a timeout is a number of seconds, 0 for none, or -1 for the default; not {timeout}")
    return timeout or None


def function_label(function: Any) -> str:
    """Return a short name for a function, for errors and pictures."""
    if type(function) is FunctionType:
        return function.__qualname__
    if type(function) is BuiltinFunctionType:  # its __qualname__ names an internal class of torch
        return f"torch.{function.__name__}" if function.__module__ == "torch" else function.__qualname__
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.name)  # its __qualname__ is that of its class
    names = (getattr(function, attribute, None) for attribute in ("__qualname__", "__name__", "original_name"))
    return next((name for name in names if name and isinstance(name, str)), type(function).__name__)


class PendingCalls:
    """The pending calls of this member, with deadlines. `first`: the number of the first call."""

    def __init__(
        self, first: int, machine: LockedNode, effects: EffectTable, later: Later, deadlines: Deadlines,
        on_long: Callable[[float], object],
    ) -> None:  # fmt: skip
        self._machine, self._later, self._on_long = machine, later, on_long
        self.deadlines = deadlines
        self._numbers, self._own_numbers = Counter(first), Counter(first | OWN)  # own: of calls that rpcbench makes
        self._idle = Condition()  # notified when no call is left
        self._calls: dict[int, Future[Any]] = {}  # no lock: each step is one of Python's
        effects.register(fx.Reject, lambda effect: self._fail(effect.call, effect.error))

    def new_number(self, own: bool = False) -> int:
        """Return a new number, which shows whether the call is rpcbench's `own`."""
        return self._own_numbers.next() if own else self._numbers.next()

    def create_future(
        self,
        number: int,
        receive: HelpAlong | None = None,
        keeps: Sequence[RRefHandle] = (),
        site: CreationSite | None = None,
    ) -> Future[Any]:
        """Make the future of a call. `receive`: its `help_along`; `keeps`: handles that the call needs until its
        reply; `site`: where the call was made; the opener of the reply looks it up if the caller waits for it."""
        cancel = partial(self._cancel, number)
        future: Future[Any] = make_future(on_cancel=cancel, on_long=self._on_long, help_along=receive)
        future.keeps, future.site = keeps, site or threading.get_ident()
        self._calls[number] = future
        return future

    def resolve_call(self, number: int, answer: Answer, lazy: bool = True) -> None:
        """Resolve a call with its reply, or an `answer` that raises. Not `lazy`: open it unasked."""
        self.deadlines.clear_deadline(number)
        call = self._calls.pop(number, None)
        if not self._calls:
            self._idle.notify_all()
        if call is None:  # resolved before: say, its deadline has passed
            return
        keeps, call.keeps = call.keeps, ()
        call.deliver_answer(answer, self._later, lazy)
        for kept in keeps:
            kept.give_up_fork()

    def find_future(self, number: int) -> Future[Any] | None:
        return self._calls.get(number)

    def is_keeping(self, kept: RRefHandle) -> bool:
        """Return whether any pending call keeps this handle."""
        return any(one is kept for call in list(self._calls.values()) for one in call.keeps)

    def has_pending(self) -> bool:
        return bool(self._calls)

    def _cancel(self, call: int) -> None:
        self._machine.feed_event(lambda node: node.cancel_call(call))

    def _fail(self, number: int, error: Exception) -> None:
        def answer() -> None:
            raise error

        self.resolve_call(number, answer)

    def fail_all(self, error: Exception) -> None:
        for number in list(self._calls):
            self._fail(number, error)

    def find_number(self, future: Future[Any]) -> int | None:
        return next((number for number in [*self._calls] if self._calls.get(number) is future), None)

    def settle(self, timeout: float | None) -> int:
        """Wait at most `timeout` seconds until no call is pending; return how many still are."""
        self._idle.wait_for(lambda: not self._calls, timeout)
        return len(self._calls)


class AgentCalls:
    """The calls of one agent, by it and to it: the pending ones, the threads that run functions, and the values.
    `send_request` transmits a numbered message."""

    def __init__(
        self, agent: HandleRuntime, config: WorldConfig, machine: LockedNode, effects: EffectTable, pool: Pool,
        links: AgentLinks, make: MakeHandle, hooks: AgentHooks, notify: Notify,
    ) -> None:  # fmt: skip
        self.rpc_timeout = config.rpc_timeout
        self.asynchronous: set[tuple[int, int]] = set()  # (caller, call) with a Future that is not done
        self.pool = pool
        # Numbers of calls differ between incarnations, as a call may outlive its caller.
        first, deadlines = agent.incarnation << COUNTER_BITS, links.maintenance.deadlines
        self.pending = PendingCalls(first, machine, effects, pool.spawn_job, deadlines, hooks.report_wait)
        self.values = ObjectStore(agent, machine, effects, pool.spawn_job, make, hooks)
        self.parcels = Parcels(self.values, machine, effects)
        self.sources = SourceCheck(agent.id, links.members, links.channels, notify)
        self._agent, self._machine, self._links = agent, machine, links

    def send_call(
        self, to: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None, label: str,
        seconds: float | None, holding: Sequence[RRefHandle], site: CreationSite | None = None, own: bool = False,
    ) -> Future[Any]:  # fmt: skip
        keeps = [*holding]
        self.sources.check_function(to, function)
        body, forks, scope = self.values.pack_call(to, function, tuple(args), kwargs, label, keeps)
        number = self.pending.new_number(own)
        future = self.pending.create_future(number, partial(self.receive_in_place, to), keeps, site)
        self.send_request(to, new_tuple(Call, (number, label, seconds, forks, scope, body)), seconds)
        return future

    def send_fetch(
        self, owner: int, handle: RRefHandle, seconds: float | None, site: CreationSite | None = None
    ) -> Future[Any]:
        scope = self.values.message_scope(owner, "to_here")
        receive = partial(self.receive_in_place, owner)
        number, keeps = self.pending.new_number(), (handle,)  # the fork must stay alive until the reply
        future = self.pending.create_future(number, receive, keeps, site)
        self.send_request(owner, Fetch(number, handle._rref, seconds, scope), seconds)
        return future

    def wait_for_room(self, to: int, label: str, seconds: float | None) -> float | None:
        """Wait, before a call, while its receiver is far behind (backpressure); return the seconds that the call then
        has. RpcTimeoutError if none are left; nothing has been sent then. Later steps never block, so they can defer
        Ctrl-C."""
        if (connection := self._links.peers.find(to)) is None or not connection.is_full:
            return seconds
        began = time.monotonic()
        if not connection.wait_for_room(seconds):
            raise not_sent_error(label, self._machine.read_node(lambda node: node.member_name(to)), seconds or 0.0)
        return seconds and max(_LEAST_SECONDS, seconds - (time.monotonic() - began))

    def send_request(self, to: int, message: Call | Create | Fetch, seconds: float | None) -> None:
        """Send a request that is already pending. RuntimeError if the agent has stopped."""
        if (
            not self._agent.running
        ):  # checked now: an agent that stops fails all pending calls after it has cleared this
            raise RuntimeError(NOT_INITIALIZED)
        now = self._links.interceptors.clock()
        plain = isinstance(message, Fetch) or not message.forks
        numbered = self._machine.begin_call(to, message, now, seconds) if plain else None
        if numbered is None:
            self._send_slowly(to, message, now, seconds)
        else:
            self._links.maintenance.schedule_wakeup(message.call, now, seconds)
            self._links.send_message(numbered, False)

    def _send_slowly(self, to: int, message: Call | Create | Fetch, now: float, seconds: float | None) -> None:
        """Send a request that changes more than the tables of calls (see `protocol.node`)."""

        def begin(node: Node) -> fx.Effects:  # a deadline that passes before the node has the call would be missed
            self._links.maintenance.schedule_wakeup(message.call, now, seconds)
            return node.start_call(to, message, now, seconds)

        self._machine.feed_event(begin)

    # -- threads that wait
    def receive_until(self, to: int, waiting: Waits, quiet: float = LONG) -> None:
        """Receive on a thread that waits for a member and has no other work: see `Receiver`."""
        connection = self._links.peers.find(to)
        if connection is not None and connection.receive_until is not None:
            connection.receive_until(waiting, quiet)

    def receive_in_place(self, to: int, waiting: Waits) -> None:
        """Do as `receive_until` on any thread, unless other threads would have to take over its work."""
        thread = threading.current_thread()
        if not isinstance(thread, PoolThread) or thread.may_wait():
            self.receive_until(to, waiting)


_ASK, _DIFFERS = "source", "source differs"  # channels
_MOST_WRAPPERS = 100  # a bound, as `__wrapped__` may form a cycle
_OURS = __name__.partition(".")[0] + "."  # not asked about: the handshake compares versions of rpcbench
Notify = Callable[[int, str, Any], object]
"""(receiver, channel, data): send a notice."""


class SourceCheck:
    """The questions that one agent has asked, and its answers to others."""

    def __init__(self, me: int, member_table: Members, channels: Channels, notify: Notify) -> None:
        self._me = me
        self._member_table = member_table
        self._notify = notify
        self._checked_functions: dict[int, set[FunctionType]] = {}  # worker → functions
        channels.register_handler(_ASK, self._compare_source)
        channels.register_handler(_DIFFERS, self._warn_of_difference)
        member_table.add_watcher(
            lambda kind, who, reason: self._checked_functions.pop(who.id, None) if kind in GONE else None
        )

    def check_function(self, to: int, function: Any) -> None:
        """Ask about a function that is sent to `to`, unless that was done before: if its code travels with the call,
        about those of modules that it uses."""
        while type(function) is partial:
            function = function.func
        if type(function) is not FunctionType or function in self._checked_functions.get(to, ()):
            return
        for named in (function,) if is_importable(function) else module_functions(function):
            if named not in self._checked_functions.get(to, ()):
                self._request_comparison(to, named)

    def _request_comparison(self, to: int, function: FunctionType) -> None:
        self._checked_functions.setdefault(to, set()).add(function)
        if to == self._me or function.__module__.startswith(_OURS):
            return
        name, code = f"{function.__module__}:{function.__qualname__}", function.__code__
        question = {"name": name, "mark": _code_fingerprint(function), "at": [code.co_filename, code.co_firstlineno]}
        self._notify(to, _ASK, question)

    def _compare_source(self, source: int, question: dict[str, Any]) -> None:
        mine = _load_function(question["name"])  # if there is none, the call itself fails with the reason
        if mine is not None and _code_fingerprint(mine) != question["mark"]:
            with contextlib.suppress(RpcError):  # the asking member has left
                self._notify(source, _DIFFERS, {**question, "there": mine.__code__.co_filename})

    def _warn_of_difference(self, worker: int, answer: dict[str, Any]) -> None:
        if (mine := _load_function(answer["name"])) is None or _code_fingerprint(mine) != answer["mark"]:
            return  # reloaded after the question: the next call asks about the new function
        who, (file, line) = self._member_table.member_name(worker), answer["at"]
        module = answer["name"].partition(":")[0]
        warnings.warn_explicit(
            f"{who} runs another version of {answer['name'].replace(':', '.')}: it has loaded {answer['there']}, and "
            f"this process {file}. Load the same version on both sides, say by cluster.reload({module!r}), "
            f"or restart {who}",
            RuntimeWarning,
            file,
            line,
        )


def _load_function(name: str) -> FunctionType | None:
    """Load a function by its name, `module:qualified.name`; None if that fails."""
    module, _, attributes = name.partition(":")
    try:
        load_packages_of(module)
        found = attrgetter(attributes)(importlib.import_module(module))
    except Exception:  # noqa: BLE001  (any error that the module raises when it is loaded)
        return None
    return found if isinstance(found, FunctionType) else None


def _code_fingerprint(function: Any) -> bytes:
    """Return a fingerprint of the code of a function and of the functions that decorators wrapped in it."""
    codes: list[Any] = []
    while function is not None and len(codes) < _MOST_WRAPPERS:
        codes.append(getattr(function, "__code__", None))
        function = getattr(function, "__wrapped__", None)
    return content_fingerprint(codes)
