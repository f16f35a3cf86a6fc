"""The agent: one member of a world, with its node, connections and threads.

Rules
- The node is fed under its one lock; its effects are carried out after the lock is released.
- No user code, no pickling, no freeing of tensors and no I/O under that lock.
- Finalizers only put a note into `released`; the maintenance thread reads it.
- A thread that reads a connection never waits for a write; it runs users' functions only as `receiver` describes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rpcbench.base.conditions import Event
from rpcbench.base.config import FLUSH_SECONDS, JOIN_SECONDS, LAST_WORDS_SECONDS, UNSET_TIMEOUT, WorldConfig
from rpcbench.base.errors import FORKED, NOT_INITIALIZED, NotConnectedError, RpcError, ShutdownError, count_noun
from rpcbench.base.futures import Future
from rpcbench.base.ids import COUNTER_BITS, Tables
from rpcbench.protocol import effects as fx
from rpcbench.protocol.delivery import DEFERRABLE, is_deferrable
from rpcbench.protocol.node import Node
from rpcbench.runtime import handles
from rpcbench.runtime.channels import Channels, Parcels
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.events import EventLog
from rpcbench.runtime.handles import CreationSite, HandleRuntime, RRefHandle, value_lost_error
from rpcbench.runtime.interceptors import AgentHooks, Interceptors
from rpcbench.runtime.joining import Bootstrap
from rpcbench.runtime.locked_node import EffectTable, LockedNode, is_interruptible, uninterrupted
from rpcbench.runtime.members import NO_RECORDS, LaunchRecords, Members, To, WorkerInfo
from rpcbench.runtime.pool import Job, Pool
from rpcbench.runtime.reconnect import PeerEvents
from rpcbench.runtime.requests import (
    PendingCalls,
    RequestSender,
    SourceCheck,
    function_label,
    timeout_seconds,
    wait_for_call,
)
from rpcbench.runtime.server import MessageDispatcher
from rpcbench.runtime.timers import TICK, Heartbeat, MaintenanceThread
from rpcbench.runtime.values import MakeHandle, ObjectStore, validate_device_maps
from rpcbench.transport.base import Link, MemoryConnection, Transmit
from rpcbench.transport.hosts import host_id
from rpcbench.wire import messages as m
from rpcbench.wire.encoding import encode_message, encode_plain
from rpcbench.wire.messages import new_tuple

P = TypeVar("P")


class Agent(HandleRuntime):
    """One member; `make` builds the handles that users hold, `link` may observe or disturb messages."""

    def __init__(
        self,
        config: WorldConfig,
        make: MakeHandle = RRefHandle,
        link: Link | None = None,
        records: LaunchRecords = NO_RECORDS,
    ) -> None:
        self.name, self.id, self.incarnation = config.name, config.id, config.incarnation
        self.config = config
        self.rpc_timeout = config.rpc_timeout
        self.running, self.is_fork, self.silent = False, False, NOT_INITIALIZED  # `silent`: the error text of calls
        self.owner: object = None  # the object that this agent belongs to, say a cluster
        self.hooks = AgentHooks()
        self.asynchronous: set[tuple[int, int]] = set()  # (caller, call) with a Future that is not done
        self.closing = Event()  # the world ends for this member
        self.bus = EventLog()  # rows and messages for watchers
        self._parts: dict[Any, Any] = {}  # features by their class, see `part`
        self._parts_lock = threading.RLock()  # re-entrant: a part may ask for another one while it is made
        self._pool = Pool(f"rpcbench-{self.name}", config.threads, self.hooks.enter_thread)
        self.submit: Callable[[Job], None] = self._pool.spawn_job  # runs a job of the runtime on a pool thread soon
        # on this thread, if a message has caused it
        self.submit_here: Callable[[Job], None] = self._pool.submit_internal
        spawn = self._pool.spawn_job
        self.effects = EffectTable(self._send_message)  # each part registers the effects that it carries out
        self._dispatcher = MessageDispatcher(self, self.effects, self._pool)
        deliver = self._dispatcher.deliver_message
        self.links = Interceptors(link or Link(), self._write_message, deliver, self._links_changed)
        self.clock: Callable[[], float] = lambda: self.links.clock()  # of deadlines: may stand still, never jumps
        devices = validate_device_maps(config.devices, config.device_maps)
        me = m.Member(self.id, self.name, self.incarnation, "", devices=devices)
        node = Node(me, config.world_size, self.links.is_lossy, config.launched)
        self.machine = LockedNode(node, self.effects.perform)
        self.member_table = Members(self.name, self.machine, self.effects, spawn, records)
        self.members = self.member_table.all_members  # returns name and id of all members, by id
        self.on_member = self.member_table.add_watcher  # calls a handler when members join, leave or are lost
        # Numbers of calls differ between incarnations, as a call may outlive its caller.
        first = self.incarnation << COUNTER_BITS
        self.pending = PendingCalls(first, self.effects, spawn, self._cancel_call, self.hooks.report_wait)
        self.needing = self.pending.is_keeping
        self._peer_events = PeerEvents(self.machine, self.member_table, self.links, host_id())
        self._peers = ConnectionManager(config, self._pool, self._peer_events, self.pending.has_pending)
        self._bootstrap = Bootstrap(config, self.machine, self.effects, self._peers, self.member_table, spawn)
        self.ready = self._bootstrap.ready  # calls are served
        self._heartbeat = Heartbeat(config, self._peers, self.clock, self.member_table.suspicion_changed)
        receive = self._peer_events.frame_received
        self._myself = MemoryConnection(lambda frame: receive(self._peers.own_identity, frame), spawn)
        self.values = ObjectStore(self, self.machine, self.effects, spawn, make, self.clock, self.hooks)
        self._channels = Channels(self.effects, spawn)
        self.on_notice = self._channels.register_handler  # (channel, handler)
        self.parcels = Parcels(self.values, self.machine, self.effects)
        self.sources = SourceCheck(self.id, self.member_table, self._channels, self.notify)
        self._maintenance = MaintenanceThread(self.name, self.machine, self.pending.deadlines, self.clock, self._peers)
        self.holds, self.released = self._maintenance.holds, self._maintenance.released  # see `ReleaseToken`
        self.requests = RequestSender(
            self.machine, self._peers, self._maintenance, self.links, self._send_message, lambda: self.running
        )
        self.effects.register(fx.Wake, self._wake_for_tick)
        self.effects.register(fx.MemberLeft, self._member_left)
        self.effects.register(fx.Complete, self._world_completed)

    # -- start and end
    def start(self, timeout: float = JOIN_SECONDS) -> None:
        """Found or join the world; return when it is complete. RpcError names the members that came, if it is not."""
        self.running = True
        self._maintenance.start()
        if self.config.remote:
            self._heartbeat.start()
        try:
            self._bootstrap.join_world(self.clock, self.clock() + timeout)
        except BaseException:
            self.stop()
            raise

    def shutdown(self, graceful: bool = True, timeout: float = 0, last: Job = lambda: None) -> None:
        """Leave the world. Idempotent.

        Args:
            graceful: First wait for calls in flight, and in a closed world for all other members.
            timeout: Bounds each wait, in seconds; 0: no bound.
            last: Runs in a closed world when all members are done and still connected.

        Raises:
            RpcError: The time was too short. The agent has stopped even then.
        """
        if not self.running:
            return
        try:
            for job in self.hooks.on_leave:
                job()
            if graceful and (late := self.pending.settle(timeout or None)):
                raise RpcError(f"{count_noun(late, 'call')} of {self.name} still in flight after {timeout} s")
            leaving = not graceful or self.config.world_size is None
            if graceful and leaving:
                self.machine.flush_messages(FLUSH_SECONDS)
            if leaving:  # before other members, which end at the same time, can count as lost
                self.pending.fail_all(ShutdownError(f"{self.name} has shut down"))
            self.machine.feed_event(lambda node: node.process_outcome(node.members.announce_ready(leaving)))
            if leaving:
                seconds = FLUSH_SECONDS if graceful else LAST_WORDS_SECONDS
                self.closing.wait(seconds)  # until the leader, or from the leader all others, have received it
                self.machine.flush_messages(seconds)
            elif not self.closing.wait(timeout or None):
                raise RpcError(f"{self.name} waited {timeout} s for the others to shut down; some are still running")
            else:
                last()
                self.machine.flush_messages(FLUSH_SECONDS)
        except KeyboardInterrupt:
            self.stop(patience=0.0)
            raise
        finally:
            self.stop()

    def stop(self, patience: float = 1.0) -> None:
        """End at once; all calls in flight fail. Wait at most `patience` seconds for users' functions."""
        if not self.running:
            return
        self.running = False  # first: later calls fail, and calls that are pending then fail below
        for job in self.hooks.on_end:
            job()
        self._heartbeat.stop()
        self._peers.close()
        self._maintenance.stop()
        self.pending.fail_all(ShutdownError(f"{self.name} has shut down"))  # no reply can resolve a call any more
        self._bootstrap.release_waiters()
        self.closing.set()
        self.bus.changes_ready.notify_all()
        self._pool.close(patience)
        self.links.close_links()

    def forked(self) -> None:
        """Mark the agent as stopped in a forked child, where none of its threads exist."""
        self.running, self.is_fork, self.silent = False, True, FORKED.format(self.name)
        self._peers.after_fork()

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
        holding: Sequence[RRefHandle] = (),
    ) -> Future[Any]:
        """Run `function(*args, **kwargs)` on a worker.

        Args:
            to: The worker: its name, id or WorkerInfo.
            function: The function; sent by name if the worker can import it, else with its code.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            timeout: Seconds; 0: no limit, -1: `rpc_timeout` of the agent.
            label: The name of the function in errors and pictures.
            own: The call belongs to rpcbench, not to the user's program.
            holding: Handles on values that the function gets from its owner by name only; kept until the reply.

        Returns:
            A future of the result.
        """
        target, label, seconds = self._resolve_callee(to, function, timeout, label)
        with uninterrupted:
            return self._send_call(
                target, function, args, kwargs, label, seconds, holding, handles.creation_site(), own
            )

    def ask(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        label: str = "",
        holding: Sequence[RRefHandle] = (),
    ) -> Any:
        """Do as `call`, and wait: return the result, or raise the function's error. Ctrl-C cancels the call."""
        target, label, seconds = self._resolve_callee(to, function, timeout, label)
        return wait_for_call(lambda: self._send_call(target, function, args, kwargs, label, seconds, holding))

    def _send_call(
        self, to: int, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None, label: str,
        seconds: float | None, holding: Sequence[RRefHandle], site: CreationSite | None = None, own: bool = False,
    ) -> Future[Any]:  # fmt: skip
        keeps = [*holding]
        self.sources.check_function(to, function)
        body, forks, scope = self.values.pack_call(to, function, tuple(args), kwargs, label, keeps)
        number = self.pending.new_number(own)
        future = self.pending.create_future(number, partial(self.requests.receive_in_place, to), keeps, site)
        self.requests.send_request(to, new_tuple(m.Call, (number, label, seconds, forks, scope, body)), seconds)
        return future

    def create(
        self,
        to: To,
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        timeout: float = UNSET_TIMEOUT,
        label: str = "",
    ) -> RRefHandle:
        """Run a function on a worker (arguments as of `call`) and leave the result there; return a handle at once."""
        target, label, seconds = self._resolve_callee(to, function, timeout, label)
        with uninterrupted:
            keeps: list[RRefHandle] = []
            self.sources.check_function(target, function)
            body, forks, scope = self.values.pack_call(target, function, tuple(args), kwargs, label, keeps)
            number = self.pending.new_number()
            future = self.pending.create_future(number, None, keeps, handles.creation_site())
            handle, cell = self.values.make_first_handle(target, label), self.values.current_cell()
            handle._creation = future
            assert handle._fork is not None
            create = m.Create(number, handle._rref, handle._fork, label, seconds, forks, scope, cell, body)
            self.requests.send_request(target, create, seconds)
        return handle

    def fetch(self, handle: RRefHandle, timeout: float = UNSET_TIMEOUT) -> Future[Any]:
        """Return a future of a copy of the value from its owner. WorkerLostError if the owner is lost."""
        owner, seconds = self._aim_at_owner(handle, timeout)
        with uninterrupted:
            return self._send_fetch(owner, handle, seconds, handles.creation_site())

    def get(self, handle: RRefHandle, timeout: float = UNSET_TIMEOUT) -> Any:
        """Do as `fetch`, and wait: return the value, or raise its error. Ctrl-C cancels the call."""
        owner, seconds = self._aim_at_owner(handle, timeout)
        return wait_for_call(lambda: self._send_fetch(owner, handle, seconds))

    def _send_fetch(
        self, owner: int, handle: RRefHandle, seconds: float | None, site: CreationSite | None = None
    ) -> Future[Any]:
        scope = self.values.message_scope(owner, "to_here")
        receive = partial(self.requests.receive_in_place, owner)
        number, keeps = self.pending.new_number(), (handle,)  # the fork must stay alive until the reply
        future = self.pending.create_future(number, receive, keeps, site)
        self.requests.send_request(owner, m.Fetch(number, handle._rref, seconds, scope), seconds)
        return future

    def _resolve_callee(
        self, to: To, function: Callable[..., Any], timeout: float, label: str
    ) -> tuple[int, str, float | None]:
        """Return the callee's id, the label, and the seconds that the call has; wait while the callee is far behind."""
        if not self.running:
            raise RuntimeError(self.silent)
        target, label = self.member_table.find_member(to).id, label or function_label(function)
        return target, label, self.requests.wait_for_room(target, label, timeout_seconds(timeout, self.rpc_timeout))

    def _aim_at_owner(self, handle: RRefHandle, timeout: float) -> tuple[int, float | None]:
        owner = self.living_owner(handle)
        return owner, self.requests.wait_for_room(owner, "to_here", timeout_seconds(timeout, self.rpc_timeout))

    def living_owner(self, handle: RRefHandle) -> int:
        """Return the id of the value's owner; WorkerLostError if it is lost, even if its name is in use again."""
        owner, fork = self.member(handle._owner), handle._fork
        if fork is not None and not self.machine.read_node(lambda node: fork in node.rrefs.users):
            raise value_lost_error(handle, owner.name)
        return owner.id

    def wanted(self, source: int, call: int) -> bool:
        """Return whether the caller of a call that runs here still waits for it."""
        return self.machine.read_node(lambda node: node.calls.is_wanted(source, call))

    def reply(self, to: int, call: int, answer: m.Result | m.Failure) -> None:
        """Answer a call, unless its caller has left."""
        # The fast path is not interruptible as a whole, so it is only for threads that Ctrl-C cannot reach.
        plain = answer if type(answer) is m.Result and not answer.forks and not is_interruptible() else None
        if plain is not None and (send := self.machine.number_reply(to, plain)) is not None:
            self._send_message(send, True)
            return

        def answer_call(node: Node) -> fx.Effects:
            if node.calls.finish_serving(to, call):
                return node.send_message(to, answer)
            return node.take_back_message(to, answer, ShutdownError("the caller has left the world"))

        self.machine.feed_event(answer_call, may_wait=True)

    # -- members
    def member(self, to: int | str | WorkerInfo | Any) -> WorkerInfo:
        """Return name and id of a member, given either or its WorkerInfo. UnknownWorkerError lists the members."""
        return self.member_table.find_member(to)

    def wait_for(self, count: int, timeout: float = JOIN_SECONDS) -> None:
        """Wait until the world has `count` members. RpcError after `timeout` s names present and missing members."""
        self.member_table.wait_for_members(count, timeout)

    # -- for features
    def part(self, kind: Callable[[Agent], P]) -> P:
        """Return the state that a feature keeps for this agent, made by `kind(agent)` on first use."""
        with self._parts_lock:
            if kind not in self._parts:
                self._parts[kind] = kind(self)
            part: P = self._parts[kind]
            return part

    def has(self, kind: Callable[[Agent], object]) -> bool:
        """Return whether that part exists."""
        return kind in self._parts

    def notify(self, to: int, channel: str, data: Any, may_wait: bool = False) -> None:
        """Send one-way data to the listener of `channel` there.

        Args:
            to: The id of the receiver.
            channel: The name of the channel.
            data: The data, of types that msgpack can pack.
            may_wait: Block this thread while the receiver is far behind in reading (backpressure).
        """
        notice = m.Notice(channel, encode_plain(data))
        self.machine.feed_event(lambda node: node.send_message(to, notice), may_wait)

    def listen(self, on: bool, messages: bool = False) -> None:
        """Start or stop to keep every row that changes, and (`messages`) a row for every message."""

        def switch_listening(node: Node) -> None:
            self.bus.listening = on
            node.set_observers(self.bus.record_change if on else None, self.bus.record_message if messages else None)

        self.machine.read_node(switch_listening)

    def snapshot(self) -> tuple[int, Tables]:
        """Return the number of the last batch and all tables, which include it; drop waiting changes."""
        return self.machine.read_node(
            lambda node: (self.bus.restart_batches(), {**node.all_tables(), **self.bus.feature_tables()})
        )

    def tables(self) -> Tables:
        """Return all tables; waiting changes stay."""
        return self.machine.read_node(lambda node: {**node.all_tables(), **self.bus.feature_tables()})

    # -- messages
    def _links_changed(self) -> None:
        self.machine.read_node(lambda node: node.delivery.set_lossy(self.links.is_lossy))
        self.released.put(None)  # the maintenance thread reads the clock again

    def _send_message(self, effect: fx.Send, may_wait: bool, send: Transmit | None = None) -> None:
        try:
            (send or self.links.outgoing)(effect.to, effect.seq, effect.message, may_wait)
        except RpcError as error:
            self._message_unsent(effect, error)

    def _message_unsent(self, effect: fx.Send, error: RpcError) -> None:
        """Report to the node that a message could not be sent; its call then fails with the best known reason."""
        failure = error
        if isinstance(error, NotConnectedError) and self.running:
            failure = self.member_table.unreachable_error(effect.to, str(error))
        scope = getattr(effect.message, "scope", None)
        if scope is not None and self.values.recorder is not None:
            self.values.recorder.withdraw_send(scope)
        self.machine.feed_event(lambda node: node.send_failed(effect, failure))

    def _write_message(self, to: int, seq: int, message: m.Message, may_wait: bool) -> None:
        """Write a message to the connection of its receiver; open one if there is none. Runs after all interceptors."""
        control, body = encode_message(seq, message)
        # `hold`: it may wait in the connection for the next write.
        hold = type(message) in DEFERRABLE and is_deferrable(message)
        connection = self._myself if to == self.id else self._peers.find(to)
        if connection is not None:
            try:
                connection.send(control, body, may_wait, hold)
                if hold:
                    self._maintenance.flush_soon()
                return
            except NotConnectedError:
                pass  # it has just ended; another one may be open soon
        member = self.machine.read_node(lambda node: node.members.members.get(to))
        if member is None:
            raise NotConnectedError("it is not in this world")
        # A dial blocks, so a thread that may not wait leaves it to another; interceptors have seen the message already.
        if may_wait:
            self._peers.send_message(to, member.addresses_from(self._peers.own_identity.host), control, body)
        else:
            self._pool.spawn_job(lambda: self._send_message(fx.Send(to, seq, message), True, self._write_message))

    # -- effects
    def _wake_for_tick(self, effect: fx.Wake) -> None:
        self._maintenance.schedule_wakeup(TICK, self.links.clock(), self.links.near.retry_seconds / 2)

    def _world_completed(self, effect: fx.Complete) -> None:
        if not effect.closing:
            self._bootstrap.complete.set()
            return
        self._peers.acceptor.close()  # before other members see the end: the next world may use the same address
        self.closing.set()

    def _member_left(self, effect: fx.MemberLeft) -> None:
        self._peers.drop_member(effect.member.id, effect.member.incarnation, effect.reason)
        self.values.routes.forget_member(effect.member.id)
        self.member_table.member_left(effect)

    def _cancel_call(self, call: int) -> None:
        self.machine.feed_event(lambda node: node.cancel_call(call))
