"""The agent: one member of a world, with its machines, connections and threads.

Rules
- One lock round the machines. `_feed` takes it, feeds an event, lets it go, then carries out the effects.
- No user code, no pickling, no freeing of tensors and no I/O under that lock.
- Finalizers only put a note into `released`; the keeper thread reads it.
- Reading threads never wait for a write, and run nothing of a user's.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgpack

from rpcbench.agent import current, serve
from rpcbench.agent.bus import Bus
from rpcbench.agent.deadlines import Deadlines
from rpcbench.agent.handles import Handle, Incoming, Outgoing
from rpcbench.agent.peers import Peers
from rpcbench.agent.pool import Pool
from rpcbench.agent.publish import Publisher
from rpcbench.protocol import effects as fx
from rpcbench.protocol.node import Node
from rpcbench.transport.base import Link
from rpcbench.transport.handshake import Identity
from rpcbench.transport.memory import MemoryConnection
from rpcbench.wire import messages as m
from rpcbench.wire.body import Body
from rpcbench.wire.frames import Frame
from rpcbench.wire.pickling import Codec
from rpcbench.words.config import JOIN_SECONDS, UNSET_TIMEOUT, WorldConfig
from rpcbench.words.errors import (
    NotConnectedError, RpcError, ShutdownError, UnknownWorkerError, WorkerLostError,
)  # fmt: skip
from rpcbench.words.events import Tables
from rpcbench.words.futures import Future
from rpcbench.words.ids import Counter, Id

if TYPE_CHECKING:
    import torch

    from rpcbench.agent.hooks import Recorder

P = TypeVar("P")
NoticeHandler = Callable[[int, Any], None]


class WorkerInfo(NamedTuple):
    """Name and id of one worker."""

    name: str
    id: int


MemberHandler = Callable[[str, WorkerInfo, str], None]
"""("joined" | "left" | "lost", who, reason)"""


class Agent:
    def __init__(self, config: WorldConfig, handle: Callable[..., Handle] = Handle, link: Link | None = None) -> None:
        self.name, self.id, self.incarnation = config.name, config.id, config.incarnation
        self.rpc_timeout = config.rpc_timeout
        self.config = config
        self.running = False
        self.bus = Bus()
        self.codec = Codec()
        self.recorder: Recorder | None = None
        self.owner: object = None  # what this agent belongs to, say a cluster
        self.explain: Callable[[str, str], str] = lambda name, reason: reason  # knows more of why a member went
        self.released: queue.SimpleQueue[Id | None | Future[Any]] = queue.SimpleQueue()
        self._handle = handle
        self._pool = Pool(f"rpcbench-{self.name}", config.threads, lambda: current.enter_thread(self))
        identity = Identity(config.cluster, self.id, self.name, self.incarnation)
        self._peers = Peers(identity, config.secret, Path(config.directory), self._pool, self._arrived, self._ended)
        self._myself = MemoryConnection(lambda frame: self._arrived(identity, frame), self._pool.spawn)
        self._node = Node(m.Member(self.id, self.name, self.incarnation, self._peers.address), config.world_size)
        self._link = link or Link()
        self._link.attach(self._transmit, self._deliver)
        self._lock = threading.Lock()
        self._futures: dict[int, Future[Any]] = {}
        self._values: dict[Id, Future[Any]] = {}
        self._lost: dict[int, str] = {}
        self._idle = threading.Condition(threading.Lock())
        self._numbers = Counter()
        self._deadlines = Deadlines()
        self._parts: dict[Any, Any] = {}
        self._parts_lock = threading.RLock()
        self._channels: dict[str, _Channel] = {}
        self._watchers: list[MemberHandler] = []
        self.complete, self.closing = threading.Event(), threading.Event()
        self._refusal: str | None = None
        self._effects: dict[type[Any], Callable[[Any], object]] = {
            fx.Run: self._run,
            fx.Resolve: self._resolve,
            fx.Reject: self._reject,
            fx.Free: self._free,
            fx.OwnerLost: lambda effect: None,
            fx.Heard: self._heard,
            fx.Joined: self._joined,
            fx.Gone: self._gone,
            fx.Complete: lambda effect: (self.closing if effect.closing else self.complete).set(),
            fx.Rejected: self._rejected,
            fx.Explore: lambda e: self._record(lambda r: r.explore(e.context, e.walk, e.message)),
            fx.Propagate: lambda e: self._record(lambda r: r.propagate(e.context, e.walk)),
            fx.Accumulate: lambda e: self._record(lambda r: r.accumulate(e.source, e.message)),
            fx.WalkEnded: lambda e: self._record(lambda r: r.ended(e.context, e.walk, e.failure, e.source)),
            fx.ForgetWalk: lambda e: self.recorder and self.recorder.forget(e.context, e.walk),
            fx.ForgetContext: lambda e: self.recorder and self.recorder.forget(e.context, None),
        }
        self.part(Publisher)
        self._keeper = threading.Thread(target=self._keep, name=f"rpcbench-{self.name}-keeper", daemon=True)

    # -- life
    def start(self, timeout: float = JOIN_SECONDS) -> None:
        """Found or join the world; returns when it has all the members it waits for.

        RpcError where member 0 refuses, or where `timeout` seconds pass; it names who is missing.
        """
        self.running = True
        self._keeper.start()
        current.started(self)
        try:
            self._join(self._link.clock() + timeout)
        except BaseException:
            self.stop()
            raise

    def _join(self, deadline: float) -> None:
        if self.id != 0:
            self._dial_leader(deadline)
        self._feed(self._node.start)
        if not self.complete.wait(max(0.0, deadline - self._link.clock())):
            have = sorted(info.name for info in self.members())
            raise RpcError(
                f"{self.name} waited for a world of {self.config.world_size} workers, but only {len(have)} came: "
                f"{', '.join(have) or 'not even member 0 answered'}"
            )
        if self._refusal is not None:
            raise RpcError(f"{self.name} may not join: {self._refusal}")

    def _dial_leader(self, deadline: float) -> None:
        address = str(Path(self.config.directory) / "0.sock")
        pause = threading.Event()
        while True:
            try:
                self._peers.connect(0, address)
                return
            except NotConnectedError as error:
                if self._link.clock() > deadline:
                    raise RpcError(f"{self.name} cannot reach worker 0 of its world: {error}") from error
                pause.wait(0.02)  # nothing on this host can tell us when member 0 begins to listen

    def shutdown(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leave the world. Graceful: first wait for calls in flight, and in a closed world for all others.

        `timeout` in seconds bounds each wait; 0 waits as long as the others take. Idempotent.
        """
        if not self.running:
            return
        try:
            if graceful:
                self._finish_calls(timeout)
            leaving = not graceful or self.config.world_size is None
            self._feed(lambda: self._node.outcome(self._node.members.ready(leaving)))
            if not leaving and not self.closing.wait(timeout or None):
                raise RpcError(f"{self.name} waited {timeout} s for the others to shut down; some are still at work")
        finally:
            self.stop()

    def _finish_calls(self, timeout: float) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: not self._futures, timeout or None):
                raise RpcError(f"{len(self._futures)} calls of {self.name} were still in flight after {timeout} s")

    def stop(self) -> None:
        """End at once: whatever is still in flight fails."""
        if not self.running:
            return
        self.running = False
        current.stopped(self)
        self._peers.close()
        self.released.put(None)
        if threading.current_thread() is not self._keeper:
            self._keeper.join(5)
        error = ShutdownError(f"{self.name} has shut down")
        for number in list(self._futures):
            self._reject(fx.Reject(number, error))
        self.complete.set()
        self.closing.set()
        self._pool.close(patience=1.0)

    def forked(self) -> None:
        """In a forked child, where none of our threads exist."""
        self.running = False
        self._peers.forked()

    # -- calling
    def call(
        self,
        to: int | str | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Future[Any]:
        """Run `function(*args, **kwargs)` on a worker; a future of what it returns."""
        target, label, seconds = self.member(to).id, label_of(function), self._seconds(timeout)
        body, forks, scope = self.pack(target, (function, tuple(args), kwargs or {}), self._context())
        number, future = self._new_future()
        self._begin(target, m.Call(number, label, seconds, forks, scope, body), seconds)
        return future

    def create(
        self,
        to: int | str | WorkerInfo,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
    ) -> Handle:
        """Run a function on a worker and leave what it returns there; a handle on that value, at once."""
        target, label, seconds = self.member(to).id, label_of(function), self._seconds(timeout)
        body, forks, scope = self.pack(target, (function, tuple(args), kwargs or {}), self._context())
        number, future = self._new_future()
        with self._lock:
            rref, fork = self._node.rrefs.create_user(target, label)
        handle = self._handle(self, rref, target, fork, self.value(rref) if target == self.id else None)
        handle._creation = future
        self._begin(target, m.Create(number, rref, fork, label, seconds, forks, scope, body), seconds)
        return handle

    def fetch(self, handle: Handle, timeout: float = UNSET_TIMEOUT) -> Future[Any]:
        """A future of a copy of the value, from its owner."""
        self.member(handle._owner)
        seconds = self._seconds(timeout)
        context = self._context()
        scope = self.recorder.sending(context, [], handle._owner) if self.recorder and context is not None else None
        number, future = self._new_future()
        future.handle = handle  # type: ignore[attr-defined]  # the fork must live until the value is here
        self._begin(handle._owner, m.Fetch(number, handle._rref, seconds, scope), seconds)
        return future

    def keep(self, value: Any, type_: str) -> Handle:
        """A handle on a value of this process's own, as its owner."""
        future: Future[Any] = Future()
        future.set_result(value)
        with self._lock:
            rref = self._node.rrefs.new_id()
        return self._handle(self, rref, self.id, None, future, type_)

    def _begin(self, to: int, message: m.Call | m.Create | m.Fetch, seconds: float | None) -> None:
        if not self.running:
            raise RuntimeError(current.NOT_INITIALIZED)
        now = self._link.clock()
        if seconds is not None and self._deadlines.set(message.call, now + seconds):
            self.released.put(None)  # wakes the keeper
        self._feed(lambda: self._node.call(to, message, now, seconds), may_wait=True)

    def _new_future(self) -> tuple[int, Future[Any]]:
        number = self._numbers.next()
        future: Future[Any] = Future(on_cancel=lambda: self._feed(lambda: self._node.cancel(number)))
        with self._idle:
            self._futures[number] = future
        return number, future

    def _seconds(self, timeout: float) -> float | None:
        """A timeout as torch counts it: -1 the agent's default, 0 none."""
        if timeout == UNSET_TIMEOUT:
            timeout = self.rpc_timeout
        if timeout < 0:
            raise ValueError(f"a timeout is a number of seconds, 0 for none, or -1 for the default; not {timeout}")
        return timeout or None

    # -- values in and out
    def pack(self, to: int, value: Any, context: int | None) -> tuple[Body, tuple[m.Fork, ...], m.Scope | None]:
        """A value as the parts of a message: its RRefs forked, its tensors recorded."""
        outgoing = Outgoing(self)
        encoded = self.codec.encode(value, outgoing)
        scope = None
        if context is not None and self.recorder is not None:
            scope = self.recorder.sending(context, encoded.tensors, to)
        if not outgoing.handles:
            return encoded.body, (), scope
        now = self._link.clock()
        with self._lock:
            forks = tuple(self._share(handle, to, now) for handle in outgoing.handles)
        return encoded.body, forks, scope

    def _share(self, handle: Handle, to: int, now: float) -> m.Fork:
        owned = handle._owner == self.id
        if owned and handle._value is not None:
            self._values[handle._rref] = handle._value
        return self._node.rrefs.share(handle._rref, None if owned else handle._fork, handle._type, to, now)

    def unpack(self, source: int, body: Body, forks: tuple[m.Fork, ...], scope: m.Scope | None) -> Any:
        """The value of a message, with handles for its RRefs and its tensors attached to the graph."""
        incoming = Incoming(self, forks)

        def adopt(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            if scope is None or self.recorder is None:
                return tensors
            return self.recorder.received(scope, tensors, source)

        try:
            return self.codec.decode(body, incoming, adopt)
        finally:
            if forks:
                self._feed(lambda: self._node.opened(forks))
                self._feed(lambda: self._node.dropped(incoming.unopened()))

    def handle(self, fork: m.Fork) -> Handle:
        """A handle on a fork that a message brought."""
        if fork.owner == self.id:
            return self._handle(self, fork.rref, self.id, None, self.value(fork.rref), fork.type)
        return self._handle(self, fork.rref, fork.owner, fork.fork, None, fork.type)

    def value(self, rref: Id) -> Future[Any]:
        """The future of a value that this member owns; it may not be made yet."""
        with self._lock:
            future = self._values.get(rref)
            if future is None:
                future = self._values[rref] = Future()
            return future

    def value_made(self, rref: Id, value: Any, error: BaseException | None) -> None:
        """The function that makes an owned value has returned, or raised."""
        future = self.value(rref)
        with self._lock:
            self._node.rrefs.value_set(rref, type(value).__name__ if error is None else "", error is not None)
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(serve.stored(self, error))

    def reply(self, to: int, call: int, answer: m.Result | m.Failure) -> None:
        """Answer a call, unless its caller has gone."""

        def answering() -> fx.Effects:
            if self._node.calls.served(to, call):
                return self._node.send(to, answer)
            return self._node.unsent(to, answer, ShutdownError("the caller has gone"))

        self._feed(answering, may_wait=True)

    def inside(self, context: int | None) -> AbstractContextManager[None]:
        """Around a function that a message of an autograd context asked for."""
        if context is None or self.recorder is None:
            return contextlib.nullcontext()
        return self.recorder.inside(context)

    def _context(self) -> int | None:
        return self.recorder.current() if self.recorder is not None else None

    def confirmed(self, fork: Id | None) -> bool:
        """Whether the owner knows of a fork held here."""
        with self._lock:
            user = self._node.rrefs.users.get(fork) if fork is not None else None
            return user is None or user.confirmed

    def part(self, kind: Callable[[Agent], P]) -> P:
        """What a feature keeps for this agent, made by `kind(agent)` on first use."""
        with self._parts_lock:
            if kind not in self._parts:
                self._parts[kind] = kind(self)
            part: P = self._parts[kind]
            return part

    # -- members
    def members(self) -> list[WorkerInfo]:
        with self._lock:
            members = list(self._node.members.members.values())
        return [WorkerInfo(member.name, member.id) for member in sorted(members)]

    def member(self, to: int | str | WorkerInfo | Any) -> WorkerInfo:
        """Name and id of a member given by either, or by its WorkerInfo. UnknownWorkerError names those there are."""
        key = to if isinstance(to, str) else getattr(to, "id", to)
        if not isinstance(key, int | str) or isinstance(key, bool):
            raise ValueError(f"a worker is given by name, id or WorkerInfo, not by {to!r}")
        members = self._node.members.members
        if isinstance(key, int) and key in members:
            return WorkerInfo(members[key].name, key)
        for info in self.members():
            if info.name == key:
                return info
        raise self._unknown(key)

    def _unknown(self, key: int | str) -> RpcError:
        for id_, story in self._lost.items():
            name, _, reason = story.partition(": ")
            if key in (id_, name):
                return WorkerLostError(f"{name} is gone ({reason}); start it again or use another worker")
        known = ", ".join(info.name for info in self.members())
        return UnknownWorkerError(f"{self.name} could not find destination {key!r}; this world has: {known}")

    def on_member(self, handler: MemberHandler) -> None:
        """Call `handler` (on a pool thread) when members join, leave or are lost."""
        self._watchers.append(handler)

    # -- notices and telemetry
    def notify(self, to: int, channel: str, data: Any) -> None:
        """One-way words to whoever listens on `channel` there. `data`: what msgpack can hold."""
        notice = m.Notice(channel, msgpack.packb(data))
        self._feed(lambda: self._node.send(to, notice))

    def on_notice(self, channel: str, handler: NoticeHandler) -> None:
        """Listen on a channel; one handler call at a time, in order of arrival, on a pool thread."""
        self._channels[channel] = _Channel(handler, self._pool)

    def listen(self, on: bool) -> None:
        """Make events of every change (or stop)."""
        with self._lock:
            self.bus.listening = on
            self._node.listen(self.bus.note if on else None)

    def snapshot(self) -> tuple[int, Tables]:
        """All tables as they are now, and the number of the last event in them; waiting events are dropped."""
        with self._lock:
            return self.bus.restart(), self._all_tables()

    def tables(self) -> Tables:
        """All tables as they are now; waiting events stay."""
        with self._lock:
            return self._all_tables()

    def _all_tables(self) -> Tables:
        return {**self._node.tables(), **self.bus.feature_tables()}

    def with_node(self, use: Callable[[Node], fx.Effects]) -> None:
        """For features with a machine of their own in the node (autograd): feed it under the lock."""
        self._feed(lambda: use(self._node))

    def submit(self, job: Callable[[], object]) -> None:
        """Run a job of the runtime on a pool thread soon."""
        self._pool.spawn(job)

    # -- the machines
    def _feed(self, event: Callable[[], fx.Effects], may_wait: bool = False) -> None:
        with self._lock:
            effects = event()
        for effect in effects:
            if type(effect) is fx.Send:
                self._send(effect, may_wait)
            else:
                self._effects[type(effect)](effect)

    def _send(self, effect: fx.Send, may_wait: bool) -> None:
        try:
            self._link.outgoing(effect.to, effect.seq, effect.message, may_wait)
        except RpcError as error:
            self._unsent(effect, error)

    def _unsent(self, effect: fx.Send, error: RpcError) -> None:
        name, _, _ = self._lost.get(effect.to, self._node.name(effect.to)).partition(": ")
        failure = WorkerLostError(f"{name} cannot be reached: {error}") if self.running else error
        scope = getattr(effect.message, "scope", None)
        if scope is not None and self.recorder is not None:
            self.recorder.unsent(scope)
        self._feed(lambda: self._node.unsent(effect.to, effect.message, failure))

    def _transmit(self, to: int, seq: int, message: m.Message, may_wait: bool) -> None:
        control, body = m.pack(seq, message)
        connection = self._myself if to == self.id else self._peers.find(to)
        if connection is not None:
            connection.send(control, body, may_wait)
            return
        member = self._node.members.members.get(to)
        if member is None:
            raise NotConnectedError("it is not in this world")
        if may_wait:
            self._peers.connect(to, member.address).send(control, body, may_wait)
        else:
            self._pool.spawn(lambda: self._send(fx.Send(to, seq, message), True))

    def _arrived(self, source: Identity, frame: Frame) -> None:
        seq, message = m.unpack(frame.control, frame.body)
        self._link.incoming(source.id, seq, message)

    def _deliver(self, source: int, seq: int, message: m.Message) -> None:
        now = self._link.clock()
        self._feed(lambda: self._node.handle(source, seq, message, now))

    def _ended(self, peer: Identity, reason: str) -> None:
        if self.running:
            told = self.explain(peer.name, reason)
            self._feed(lambda: self._node.lost(peer.id, told))

    # -- effects
    def _run(self, effect: fx.Run) -> None:
        self._pool.submit(lambda: serve.serve(self, effect.source, effect.message))

    def _resolve(self, effect: fx.Resolve) -> None:
        answer = effect.answer
        if isinstance(answer, m.Result):
            found: m.Result = answer
            self._finish(answer.call, lambda: self._open_result(effect.source, found))
        else:
            worker = self._node.name(effect.source)
            failed: m.Failure = answer
            self._finish(answer.call, lambda: _raise(serve.rebuild(self, worker, failed)))

    def _open_result(self, source: int, answer: m.Result) -> Any:
        if answer.body is m.EMPTY or not answer.body.payload:
            return None
        return self.unpack(source, answer.body, answer.forks, answer.scope)

    def _reject(self, effect: fx.Reject) -> None:
        self._finish(effect.call, lambda: _raise(effect.error))

    def _finish(self, call: int, answer: Callable[[], Any]) -> None:
        self._deadlines.clear(call)
        with self._idle:
            future = self._futures.pop(call, None)
            if not self._futures:
                self._idle.notify_all()
        if future is not None:
            future.deliver(answer, self._pool.spawn)

    def _free(self, effect: fx.Free) -> None:
        with self._lock:
            value = self._values.pop(effect.rref, None)
        if value is not None:
            self.released.put(value)  # the keeper lets go of it: a user's __del__ may run then

    def _heard(self, effect: fx.Heard) -> None:
        channel = self._channels.get(effect.notice.channel)
        if channel is not None:
            channel.put(effect.source, effect.notice.data)

    def _joined(self, effect: fx.Joined) -> None:
        self._lost.pop(effect.member.id, None)
        self._tell_watchers("joined", effect.member, "")

    def _gone(self, effect: fx.Gone) -> None:
        member = effect.member
        self._lost[member.id] = f"{member.name}: {effect.reason}"
        self._peers.drop(member.id)
        if member.id == 0:
            self.closing.set()
        self._tell_watchers("lost" if effect.lost else "left", member, effect.reason)

    def _tell_watchers(self, kind: str, member: m.Member, reason: str) -> None:
        info = WorkerInfo(member.name, member.id)
        for watcher in self._watchers:
            self._pool.spawn(lambda tell=watcher: tell(kind, info, reason))  # type: ignore[misc]

    def _rejected(self, effect: fx.Rejected) -> None:
        self._refusal = effect.reason
        self.complete.set()

    def _record(self, use: Callable[[Recorder], None]) -> None:
        if self.recorder is not None:
            recorder = self.recorder
            self._pool.spawn(lambda: use(recorder))

    # -- the keeper
    def _keep(self) -> None:
        """Release what finalizers have noted, and end calls whose deadline has passed."""
        pause: float | None = None
        while self.running:
            try:
                item = self.released.get(timeout=pause)
            except queue.Empty:
                item = None
            if isinstance(item, Id):
                fork = item
                self._feed(lambda: self._node.outcome(([], self._node.rrefs.release(fork))))
            del item
            due, pause = self._deadlines.pop_due(self._link.clock())
            for call in due:
                self._feed(lambda late=call: self._node.expired(late))  # type: ignore[misc]


class _Channel:
    """Runs one handler, one notice at a time, in order of arrival."""

    def __init__(self, handler: NoticeHandler, pool: Pool) -> None:
        self._handler = handler
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: collections.deque[tuple[int, bytes]] = collections.deque()
        self._busy = False

    def put(self, source: int, data: bytes) -> None:
        with self._lock:
            self._waiting.append((source, data))
            if self._busy:
                return
            self._busy = True
        self._pool.spawn(self._drain)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                source, data = self._waiting.popleft()
            try:
                self._handler(source, msgpack.unpackb(data))
            except BaseException:
                with self._lock:
                    self._busy = bool(self._waiting)
                    again = self._busy
                if again:
                    self._pool.spawn(self._drain)
                raise


def label_of(function: Any) -> str:
    """A short name for a function, for errors and pictures."""
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(name) if name else type(function).__name__


def _raise(error: Exception) -> Any:
    raise error


