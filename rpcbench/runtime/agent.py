"""The agent: one member of a world, with its machine, connections and threads.

Rules
- The machine is fed under its one lock; its effects are carried out after the lock is let go.
- No user code, no pickling, no freeing of tensors and no I/O under that lock.
- Finalizers only put a note into `released`; the keeper thread reads it.
- A thread that reads a connection never waits for a write; users' functions run on it only as `receiver` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgpack

from rpcbench.base.conditions import Flag
from rpcbench.base.config import FLUSH_SECONDS, JOIN_SECONDS, LAST_WORDS_SECONDS, UNSET_TIMEOUT, WorldConfig, seconds_of
from rpcbench.base.errors import FORKED, NOT_INITIALIZED, NotConnectedError, RpcError, ShutdownError, counted
from rpcbench.base.events import Tables
from rpcbench.base.futures import Future, blocked
from rpcbench.base.ids import COUNTER_BITS, Id
from rpcbench.protocol import effects as fx
from rpcbench.protocol.node import Node
from rpcbench.runtime import handles
from rpcbench.runtime.channels import Channels, NoticeHandler, Parcels
from rpcbench.runtime.checks import Leak, SourceCheck, leaks
from rpcbench.runtime.connections import ConnectionManager, PeerEvents
from rpcbench.runtime.events import EventLog
from rpcbench.runtime.handles import CreationSite, Handle, label_of, value_lost
from rpcbench.runtime.interceptors import Interceptors, Recorder
from rpcbench.runtime.interrupts import interruptible, uninterrupted
from rpcbench.runtime.joining import Bootstrap
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.members import MemberHandler, Members, To, WorkerInfo
from rpcbench.runtime.pool import Job, Pool
from rpcbench.runtime.requests import PendingCalls, RequestSender, waited_for
from rpcbench.runtime.server import MessageDispatcher
from rpcbench.runtime.timers import TICK, Heartbeat, MaintenanceThread
from rpcbench.runtime.values import MakeHandle, ObjectStore, validate_device_maps
from rpcbench.transport.base import Link, MemoryConnection, Transmit
from rpcbench.transport.hosts import host_id
from rpcbench.wire import messages as m
from rpcbench.wire.encoding import pack

P = TypeVar("P")
_new = tuple.__new__  # a step less than the class itself takes


class Agent:
    """Made from a `WorldConfig`; `make` builds the handles that users hold; `link` may watch or disturb messages."""

    def __init__(self, config: WorldConfig, make: MakeHandle = Handle, link: Link | None = None) -> None:
        self.name, self.id, self.incarnation = config.name, config.id, config.incarnation
        self.config = config
        self.rpc_timeout = config.rpc_timeout
        self.running, self.silent = False, NOT_INITIALIZED  # and what to say of a call while it does not run
        self.owner: object = None  # what this agent belongs to, say a cluster
        self.on_thread: Job = lambda: None  # first on each thread that runs users' functions
        self.on_error: Callable[[BaseException], object] = lambda error: None  # what a caller's function raised here
        self.asynchronous: set[tuple[int, int]] = set()  # (caller, call) whose function has returned a Future
        self.on_leave: list[Job] = []  # before others can hear of it
        self.on_end: list[Job] = []
        self.on_long_wait: Callable[[float], object] = lambda seconds: None  # called by the thread that waits
        self.closing = Flag()
        self.bus = EventLog()
        self._parts: dict[Any, Any] = {}
        self._parts_lock = threading.RLock()
        self._pool = Pool(f"rpcbench-{self.name}", config.threads, lambda: self.on_thread())
        self._arrivals = MessageDispatcher(self, self._pool)
        self.links = Interceptors(link or Link(), self._transmit, self._arrivals.deliver)
        self.clock: Callable[[], float] = lambda: self.links.clock()  # of deadlines: may stand still, never jumps
        me = m.Member(
            self.id, self.name, self.incarnation, "", devices=validate_device_maps(config.devices, config.device_maps)
        )
        node = Node(me, config.world_size, self.links.lossy, config.launched)
        self.machine = LockedNode(node, self._perform)
        self.roster = Members(self.name, self.machine, self._pool.spawn)
        self._pairs = PeerEvents(self.machine, self.roster, self.links, host_id())
        self._peers = ConnectionManager(config, self._pool, self._pairs)
        self._pairs.give_up = self._peers.give_up
        self.connection = self._peers.find  # what carries messages to a member
        self._lead = Bootstrap(config, self.machine, self._peers, self.roster, self._pool.spawn)
        self.ready = self._lead.ready  # to serve calls
        self._heartbeat = Heartbeat(config, self._peers, self.clock, self._pairs.judged)
        self._myself = MemoryConnection(lambda frame: self._pairs.arrived(self._peers.me, frame), self._pool.spawn)
        self.values = ObjectStore(self, self.machine, make, self.clock, lambda long: self.on_long_wait(long))
        first = self.incarnation << COUNTER_BITS
        self.pending = PendingCalls(first, self._pool.spawn, self._cancel, lambda long: self.on_long_wait(long))
        self._pool.due = self.pending.due
        self._channels = Channels(self._pool.spawn)
        self.parcels = Parcels(self.values, self.machine)
        self._sources = SourceCheck(self.id, self.roster, self._channels, self.notify)
        self._effects = self._effect_table()
        self._keeper = MaintenanceThread(self.name, self.machine, self.pending.deadlines, self.clock, self._peers)
        self.holds, self.released = self._keeper.holds, self._keeper.released
        self.requests = RequestSender(
            self.machine, self._peers, self._keeper, self.links, self._send, lambda: self.running
        )
        self.links.changed = self._relinked

    # -- life
    def start(self, timeout: float = JOIN_SECONDS) -> None:
        """Found or join the world; returns when it has all the members it waits for.

        RpcError where it is not let in, or where `timeout` seconds pass; it names who came.
        """
        self.running = True
        self._keeper.start()
        if self.config.remote:
            self._heartbeat.start()
        try:
            self._lead.join(self.clock, self.clock() + timeout)
        except BaseException:
            self.stop()
            raise

    def shutdown(self, graceful: bool = True, timeout: float = 0, last: Job = lambda: None) -> None:
        """Leave the world. Graceful: first wait for calls in flight, and in a closed world for all others.

        `timeout` in seconds bounds each wait; 0 waits as long as the others take. `last` runs in a closed world when
        all are done and still hear each other. Idempotent. RpcError where the time was too short; the agent has
        stopped then, too.
        """
        if not self.running:
            return
        try:
            for job in self.on_leave:
                job()
            if graceful and (late := self.pending.settle(timeout or None)):
                raise RpcError(f"{counted(late, 'call')} of {self.name} still in flight after {timeout} s")
            leaving = not graceful or self.config.world_size is None
            if graceful and leaving:
                self.machine.flush(FLUSH_SECONDS)
            if leaving:  # before the others, who end with us, can be taken for lost
                self.pending.fail_all(ShutdownError(f"{self.name} has shut down"))
            self.machine.feed(lambda node: node.outcome(node.members.ready(leaving)))
            if leaving:
                seconds = FLUSH_SECONDS if graceful else LAST_WORDS_SECONDS
                self.closing.wait(seconds)  # until the leader has heard of it; or, of the leader itself, all others
                self.machine.flush(seconds)
            elif not self.closing.wait(timeout or None):
                raise RpcError(f"{self.name} waited {timeout} s for the others to shut down; some are still at work")
            else:
                last()
                self.machine.flush(FLUSH_SECONDS)
        except KeyboardInterrupt:
            self.stop(patience=0.0)
            raise
        finally:
            self.stop()

    def stop(self, patience: float = 1.0) -> None:
        """End at once: whatever is still in flight fails. Waits `patience` seconds at most for users' functions."""
        if not self.running:
            return
        self.running = False
        for job in self.on_end:
            job()
        self._heartbeat.stop()
        self._peers.close()
        self._keeper.stop()
        self.pending.fail_all(ShutdownError(f"{self.name} has shut down"))
        self._lead.give_up()
        self.closing.set()
        self.bus.filled.set()
        self._pool.close(patience)
        self.links.closed()

    def forked(self) -> None:
        """In a forked child, where none of our threads exist."""
        self.running, self.silent = False, FORKED.format(self.name)
        self._peers.forked()

    # -- calling
    def call(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        label: str = "",
        own: bool = False,
        holding: Sequence[Handle] = (),
    ) -> Future[Any]:
        """Run `function(*args, **kwargs)` on a worker; a future of what it returns.

        `label` is what errors and pictures call the function. `own`: it is no call of a program, but the bench's own.
        `holding`: keeps the value that the function asks its owner for, by the name of the RRef alone; held until there
        is an answer.
        """
        target, label, seconds = self._aim(to, function, timeout, label)
        with uninterrupted:
            return self._call(target, function, args, kwargs, label, seconds, holding, handles.creation_site(), own)

    def ask(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        label: str = "",
        holding: Sequence[Handle] = (),
    ) -> Any:
        """As `call`, and wait: what the function returns, or its error raised. Ctrl-C gives the call up."""
        target, label, seconds = self._aim(to, function, timeout, label)
        return waited_for(lambda: self._call(target, function, args, kwargs, label, seconds, holding))

    def _call(
        self, to: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None, label: str,
        seconds: float | None, holding: Sequence[Handle], site: CreationSite | None = None, own: bool = False,
    ) -> Future[Any]:  # fmt: skip
        keeps = [*holding]
        self._sources.use(to, function)
        body, forks, scope = self.values.pack_call(to, function, tuple(args), kwargs, label, keeps)
        number = self.pending.number(own)
        future = self.pending.promise(number, partial(self.requests.receive_in_place, to), keeps, site)
        self.requests.send(to, _new(m.Call, (number, label, seconds, forks, scope, body)), seconds)
        return future

    def create(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        label: str = "",
    ) -> Handle:
        """Run a function on a worker and leave what it returns there; a handle on that value, at once."""
        target, label, seconds = self._aim(to, function, timeout, label)
        with uninterrupted:
            keeps: list[Handle] = []
            self._sources.use(target, function)
            body, forks, scope = self.values.pack_call(target, function, tuple(args), kwargs, label, keeps)
            future = self.pending.promise(number := self.pending.number(), None, keeps, handles.creation_site())
            handle, cell = self.values.first(target, label), self.values.cell()
            handle._creation = future
            assert handle._fork is not None
            create = m.Create(number, handle._rref, handle._fork, label, seconds, forks, scope, cell, body)
            self.requests.send(target, create, seconds)
        return handle

    def fetch(self, handle: Handle, timeout: float = UNSET_TIMEOUT) -> Future[Any]:
        """A future of a copy of the value, from its owner. WorkerLostError where that is gone."""
        owner, seconds = self._aim_at_owner(handle, timeout)
        with uninterrupted:
            return self._fetch(owner, handle, seconds, handles.creation_site())

    def get(self, handle: Handle, timeout: float = UNSET_TIMEOUT) -> Any:
        """As `fetch`, and wait: the value, or its error raised. Ctrl-C gives the call up."""
        owner, seconds = self._aim_at_owner(handle, timeout)
        return waited_for(lambda: self._fetch(owner, handle, seconds))

    def _fetch(
        self, owner: int, handle: Handle, seconds: float | None, site: CreationSite | None = None
    ) -> Future[Any]:
        scope = self.values.asks(owner, "to_here")
        receive = partial(self.requests.receive_in_place, owner)
        number, keeps = self.pending.number(), (handle,)  # its fork must live on
        future = self.pending.promise(number, receive, keeps, site)
        self.requests.send(owner, m.Fetch(number, handle._rref, seconds, scope), seconds)
        return future

    def _aim(self, to: To, function: Callable[..., Any], timeout: float, label: str) -> tuple[int, str, float | None]:
        """Id of the callee, what the function is called, and in how many seconds the call is to end."""
        if not self.running:
            raise RuntimeError(self.silent)
        target, label = self.roster.find(to).id, label or label_of(function)
        return target, label, self.requests.await_room(target, label, seconds_of(timeout, self.rpc_timeout))

    def _aim_at_owner(self, handle: Handle, timeout: float) -> tuple[int, float | None]:
        owner = self.living_owner(handle)
        return owner, self.requests.await_room(owner, "to_here", seconds_of(timeout, self.rpc_timeout))

    def living_owner(self, handle: Handle) -> int:
        """The owner of the value; WorkerLostError where that is gone, though another may work under its name by now."""
        owner, fork = self.member(handle._owner), handle._fork
        if fork is not None and not self.machine.ask(lambda node: fork in node.rrefs.users):
            raise value_lost(handle, owner.name)
        return owner.id

    def wanted(self, source: int, call: int) -> bool:
        """Whether the caller of a call that runs here still waits for it."""
        return self.machine.ask(lambda node: node.calls.wanted(source, call))

    def reply(self, to: int, call: int, answer: m.Result | m.Failure) -> None:
        """Answer a call, unless its caller has gone."""
        plain = answer if type(answer) is m.Result and not answer.forks and not interruptible() else None
        if plain is not None and (send := self.machine.answer(to, plain)) is not None:
            self._send(send, True)
            return

        def answering(node: Node) -> fx.Effects:
            if node.calls.served(to, call):
                return node.send(to, answer)
            return node.never_sent(to, answer, ShutdownError("the caller has gone"))

        self.machine.feed(answering, may_wait=True)

    def release(self, fork: Id) -> None:
        """Give up a reference held here."""
        self.machine.feed(lambda node: node.outcome(([], node.rrefs.release(fork))))

    def needing(self, handle: Handle) -> bool:
        """Whether a call in flight goes by the name of what this one holds."""
        return self.pending.keeping(handle)

    def leaks(self) -> list[Leak]:
        """RRefs that are alive here and that another member is part of, each with where it was made."""
        return leaks(self)

    # -- members
    def members(self) -> list[WorkerInfo]:
        return self.roster.all()

    def member(self, to: int | str | WorkerInfo | Any) -> WorkerInfo:
        """Name and id of a member given by either, or by its WorkerInfo. UnknownWorkerError names those there are."""
        return self.roster.find(to)

    def wait_for(self, count: int, timeout: float = JOIN_SECONDS) -> None:
        """Wait until the world has `count` members. RpcError after `timeout` s that names who came and who did not."""
        self.roster.wait_for(count, timeout)

    def on_member(self, handler: MemberHandler) -> None:
        """Call `handler` (on a pool thread) when members join, leave or are lost."""
        self.roster.watch(handler)

    # -- for features
    def part(self, kind: Callable[[Agent], P]) -> P:
        """What a feature keeps for this agent, made by `kind(agent)` on first use."""
        with self._parts_lock:
            if kind not in self._parts:
                self._parts[kind] = kind(self)
            part: P = self._parts[kind]
            return part

    def has(self, kind: Callable[[Agent], object]) -> bool:
        """Whether that part has been made."""
        return kind in self._parts

    def submit(self, job: Job) -> None:
        """Run a job of the runtime on a pool thread soon."""
        self._pool.spawn(job)

    def submit_here(self, job: Job) -> None:
        """As `submit`; on this thread, if it has just received the message that asks for it."""
        self._pool.submit_own(job)

    def notify(self, to: int, channel: str, data: Any, may_wait: bool = False) -> None:
        """One-way words to whoever listens on `channel` there. `data`: what msgpack can hold.

        `may_wait`: hold this thread back while the receiver is far behind in reading.
        """
        notice = m.Notice(channel, msgpack.packb(data))
        self.machine.feed(lambda node: node.send(to, notice), may_wait)

    def on_notice(self, channel: str, handler: NoticeHandler) -> None:
        """Listen on a channel; one handler call at a time, in order of arrival, on a pool thread."""
        self._channels.listen(channel, handler)

    def listen(self, on: bool, messages: bool = False) -> None:
        """Keep every row that changes (or stop), and tell of every message (or not)."""

        def switch(node: Node) -> None:
            self.bus.listening = on
            self.bus.telling = messages
            node.listen(self.bus.note if on else None, self.bus.tell if messages else None)

        self.machine.ask(switch)

    def snapshot(self) -> tuple[int, Tables]:
        """All tables as they are now, and the number of the last batch in them; waiting changes are dropped."""
        return self.machine.ask(lambda node: (self.bus.restart(), {**node.tables(), **self.bus.feature_tables()}))

    def tables(self) -> Tables:
        """All tables as they are now; waiting changes stay."""
        return self.machine.ask(lambda node: {**node.tables(), **self.bus.feature_tables()})

    # -- messages
    def _relinked(self) -> None:
        self.machine.ask(lambda node: node.delivery.may_lose(self.links.lossy))
        self.released.put(None)  # the keeper looks at the clock anew

    def _send(self, effect: fx.Send, may_wait: bool, send: Transmit | None = None) -> None:
        try:
            (send or self.links.outgoing)(effect.to, effect.seq, effect.message, may_wait)
        except RpcError as error:
            self._unsent(effect, error)

    def _unsent(self, effect: fx.Send, error: RpcError) -> None:
        failure = error
        if isinstance(error, NotConnectedError) and self.running:
            failure = self.roster.unreachable(effect.to, str(error))
        scope = getattr(effect.message, "scope", None)
        if scope is not None and self.values.recorder is not None:
            self.values.recorder.unsent(scope)
        self.machine.feed(lambda node: node.unsent(effect, failure))

    def _transmit(self, to: int, seq: int, message: m.Message, may_wait: bool) -> None:
        control, body = pack(seq, message)
        hold = type(message) in m.UNHURRIED and m.unhurried(message)
        connection = self._myself if to == self.id else self._peers.find(to)
        if connection is not None:
            try:
                connection.send(control, body, may_wait, hold)
                if hold:
                    self._keeper.flush_soon()
                return
            except NotConnectedError:
                pass  # it has just ended; another may stand soon
        member = self.machine.ask(lambda node: node.members.members.get(to))
        if member is None:
            raise NotConnectedError("it is not in this world")
        if may_wait:
            self._peers.send(to, member.ways(self._peers.me.host), control, body)
        else:
            self._pool.spawn(lambda: self._send(fx.Send(to, seq, message), True, self._transmit))  # the link has had it

    # -- effects
    def _perform(self, effect: fx.Effect, may_wait: bool) -> None:
        if type(effect) is fx.Send:
            self._send(effect, may_wait)
        else:
            self._effects[type(effect)](effect)

    def _effect_table(self) -> dict[type[Any], Callable[[Any], object]]:
        return {
            fx.Wake: lambda e: self._keeper.wake_in(TICK, self.links.clock(), self.links.near.retry_seconds / 2),
            fx.Enqueue: lambda e: self._pool.submit(lambda: self._serve(e)),
            fx.Run: lambda e: self._arrivals.run(e.source, e.message),
            fx.Resolve: lambda e: self._arrivals.answered(e.source, e.answer),
            fx.Reject: lambda e: self.pending.fail(e.call, e.error),
            fx.Free: lambda e: self.released.put(self.values.forget(e.rref)),  # the keeper frees the value
            fx.Unmade: lambda e: self._pool.spawn(lambda: self.values.unmade(e.rref, e.error)),  # answers who waits
            fx.OwnerLost: lambda e: None,
            fx.Came: self.parcels.came,
            fx.Undelivered: self.parcels.undelivered,
            fx.Heard: lambda e: self._channels.heard(e.source, e.notice.channel, e.notice.data),
            fx.Joined: lambda e: self.roster.came(e.member),
            fx.Gone: self._gone,
            fx.Complete: self._completed,
            fx.Rejected: self._lead.rejected,
            fx.HandedOver: self._lead.handed_over,
            fx.Leads: self._lead.leads,
            fx.Watch: self._lead.watch,
            fx.Explore: lambda e: self._autograd.passes.explore(e.context, e.walk, e.message),
            fx.Propagate: lambda e: self._autograd.passes.propagate(e.context, e.walk),
            fx.Accumulate: lambda e: self._autograd.passes.accumulate(e.message),
            fx.WalkEnded: lambda e: self._autograd.passes.ended(e.walk, e.failure),
            fx.ForgetWalk: lambda e: self._autograd.passes.forget(e.context, e.walk),
            fx.ForgetContext: lambda e: self._autograd.forget(e.context),
        }

    def _serve(self, effect: fx.Enqueue) -> None:
        if not self.ready.is_set():  # the caller knew the world sooner than we do
            with blocked():
                self.ready.wait()
        now = self.links.clock()
        self.machine.feed(lambda node: node.begin(effect.source, effect.call, now))

    def _completed(self, effect: fx.Complete) -> None:
        if not effect.closing:
            self._lead.complete.set()
            return
        self._peers.entrance.close()  # before others learn of it: the next world may meet at the same address
        self.closing.set()

    def _gone(self, effect: fx.Gone) -> None:
        self._peers.drop(effect.member.id, effect.member.incarnation, effect.reason)
        self.values.routes.forget(effect.member.id)
        self.roster.went(effect)

    @property
    def _autograd(self) -> Recorder:
        assert self.values.recorder is not None, "an agent that records nothing was sent a message of a backward pass"
        return self.values.recorder

    def _cancel(self, call: int) -> None:
        self.machine.feed(lambda node: node.cancel(call))
