"""The agent: one member of a world, with its node, its links to the other members, and its calls.

Rules
- The node is fed under its one lock; its effects are carried out after the lock is released.
- No user code, no pickling, no freeing of tensors and no I/O under that lock.
- Finalizers only put a note into `released`; the maintenance thread reads it.
- A thread that reads a connection never waits for a write; it runs users' functions only as `receiver` describes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rpcbench.base.config import FLUSH_SECONDS, JOIN_SECONDS, LAST_WORDS_SECONDS, UNSET_TIMEOUT, WorldConfig
from rpcbench.base.errors import FORKED, NOT_INITIALIZED, RpcError, ShutdownError, count_noun
from rpcbench.base.futures import Future
from rpcbench.base.ids import Tables
from rpcbench.protocol import effects as fx
from rpcbench.protocol.node import Node
from rpcbench.runtime import handles
from rpcbench.runtime.handles import HandleRuntime, RRefHandle, value_lost_error
from rpcbench.runtime.interceptors import AgentHooks
from rpcbench.runtime.links import AgentLinks
from rpcbench.runtime.locked_node import EffectTable, LockedNode, is_interruptible, uninterrupted
from rpcbench.runtime.members import NO_RECORDS, LaunchRecords, To, WorkerInfo
from rpcbench.runtime.pool import Job, Pool
from rpcbench.runtime.requests import AgentCalls, function_label, timeout_seconds, wait_for_call
from rpcbench.runtime.server import MessageDispatcher
from rpcbench.runtime.values import MakeHandle, validate_device_maps
from rpcbench.transport.base import Link
from rpcbench.wire import messages as m
from rpcbench.wire.encoding import encode_plain

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
        self.running, self.is_fork, self.silent = False, False, NOT_INITIALIZED  # `silent`: the error text of calls
        self.owner: object = None  # the object that this agent belongs to, say a cluster
        self.ending = f"{self.name} has shut down"  # the error text of calls that wait when it stops
        self.hooks = AgentHooks()
        self._parts: dict[Any, Any] = {}  # features by their class, see `part`
        self._parts_lock = threading.RLock()  # re-entrant: a part may ask for another one while it is made
        pool = Pool(f"rpcbench-{self.name}", config.threads, self.hooks.enter_thread)
        self.submit: Callable[[Job], None] = pool.spawn_job  # runs a job of the runtime on a pool thread soon
        # Each part registers the effects that it carries out.
        self.effects = EffectTable(lambda effect, may_wait: self.links.send_message(effect, may_wait))
        link, devices = link or Link(), validate_device_maps(config.devices, config.device_maps)
        me = m.Member(self.id, self.name, self.incarnation, "", devices=devices)
        self.machine = LockedNode(Node(me, config.world_size, link.lossy, config.launched), self.effects.perform)
        self.dispatcher = MessageDispatcher(self, self.effects, pool)
        self.links: AgentLinks = AgentLinks(
            self, config, link, records, self.machine, self.effects, pool, self.dispatcher.deliver_message,
            due=lambda: self.calls.pending.has_pending(),
            unsent=lambda message: self.calls.values.withdraw_record(message),
        )  # fmt: skip
        self.calls: AgentCalls = AgentCalls(
            self, config, self.machine, self.effects, pool, self.links, make, self.hooks, self.notify
        )
        self.members = self.links.members.all_members  # returns name and id of all members, by id
        self.on_member = self.links.members.add_watcher  # calls a handler when members join, leave or are lost
        self.on_notice = self.links.channels.register_handler  # (channel, handler)
        # For handles, see `ReleaseToken`.
        self.holds, self.released = self.links.maintenance.holds, self.links.maintenance.released
        self.needing = self.calls.pending.is_keeping
        self.effects.register(fx.MemberLeft, self._member_left)

    # -- start and end
    def start(self, timeout: float = JOIN_SECONDS) -> None:
        """Found or join the world; return when it is complete. RpcError names the members that came, if it is not."""
        self.running = True
        self.links.maintenance.start()
        if self.config.remote:
            self.links.heartbeat.start()
        try:
            self.links.bootstrap.join_world(self.links.clock, self.links.clock() + timeout)
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
            if graceful and (late := self.calls.pending.settle(timeout or None)):
                raise RpcError(f"{count_noun(late, 'call')} of {self.name} still in flight after {timeout} s")
            leaving = not graceful or self.config.world_size is None
            if graceful and leaving:
                self.machine.flush_messages(FLUSH_SECONDS)
            if leaving:  # before other members, which end at the same time, can count as lost
                self.calls.pending.fail_all(ShutdownError(self.ending))
            self.machine.feed_event(lambda node: node.process_outcome(node.members.announce_ready(leaving)))
            if leaving:
                seconds = FLUSH_SECONDS if graceful else LAST_WORDS_SECONDS
                self.links.closing.wait(seconds)  # until the leader, or from the leader all others, have received it
                self.machine.flush_messages(seconds)
            elif not self.links.closing.wait(timeout or None):
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
        self.links.heartbeat.stop()
        self.links.peers.close()
        self.links.maintenance.stop()
        self.calls.pending.fail_all(ShutdownError(self.ending))  # no reply can resolve a call any more
        self.links.bootstrap.release_waiters()
        self.links.closing.set()
        self.links.bus.changes_ready.notify_all()
        self.calls.pool.close(patience)
        self.links.interceptors.close_links()

    def forked(self) -> None:
        """Mark the agent as stopped in a forked child, where none of its threads exist."""
        self.running, self.is_fork, self.silent = False, True, FORKED.format(self.name)
        self.links.peers.after_fork()
        for job in self.hooks.on_fork:
            job()

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
            return self.calls.send_call(
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
        return wait_for_call(lambda: self.calls.send_call(target, function, args, kwargs, label, seconds, holding))

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
            self.calls.sources.check_function(target, function)
            body, forks, scope = self.calls.values.pack_call(target, function, tuple(args), kwargs, label, keeps)
            number = self.calls.pending.new_number()
            future = self.calls.pending.create_future(number, None, keeps, handles.creation_site())
            handle, cell = self.calls.values.make_first_handle(target, label), self.calls.values.current_cell()
            handle._creation = future
            assert handle._fork is not None
            create = m.Create(number, handle._rref, handle._fork, label, seconds, forks, scope, cell, body)
            self.calls.send_request(target, create, seconds)
        return handle

    def fetch(self, handle: RRefHandle, timeout: float = UNSET_TIMEOUT) -> Future[Any]:
        """Return a future of a copy of the value from its owner. WorkerLostError if the owner is lost."""
        owner, seconds = self._aim_at_owner(handle, timeout)
        with uninterrupted:
            return self.calls.send_fetch(owner, handle, seconds, handles.creation_site())

    def get(self, handle: RRefHandle, timeout: float = UNSET_TIMEOUT) -> Any:
        """Do as `fetch`, and wait: return the value, or raise its error. Ctrl-C cancels the call."""
        owner, seconds = self._aim_at_owner(handle, timeout)
        return wait_for_call(lambda: self.calls.send_fetch(owner, handle, seconds))

    def _resolve_callee(
        self, to: To, function: Callable[..., Any], timeout: float, label: str
    ) -> tuple[int, str, float | None]:
        """Return the callee's id, the label, and the seconds that the call has; wait while the callee is far behind."""
        if not self.running:
            raise RuntimeError(self.silent)
        target, label = self.links.members.find_member(to).id, label or function_label(function)
        return target, label, self.calls.wait_for_room(target, label, timeout_seconds(timeout, self.calls.rpc_timeout))

    def _aim_at_owner(self, handle: RRefHandle, timeout: float) -> tuple[int, float | None]:
        owner = self.living_owner(handle)
        return owner, self.calls.wait_for_room(owner, "to_here", timeout_seconds(timeout, self.calls.rpc_timeout))

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
            self.links.send_message(send, True)
            return

        def answer_call(node: Node) -> fx.Effects:
            if node.calls.finish_serving(to, call):
                return node.send_message(to, answer)
            return node.take_back_message(to, answer, ShutdownError("the caller has left the world"))

        self.machine.feed_event(answer_call, may_wait=True)

    # -- members
    def member(self, to: int | str | WorkerInfo | Any) -> WorkerInfo:
        """Return name and id of a member, given either or its WorkerInfo. UnknownWorkerError lists the members."""
        return self.links.members.find_member(to)

    def wait_for(self, count: int, timeout: float = JOIN_SECONDS) -> None:
        """Wait until the world has `count` members. RpcError after `timeout` s names present and missing members."""
        self.links.members.wait_for_members(count, timeout)

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
            self.links.bus.listening = on
            node.set_observers(
                self.links.bus.record_change if on else None, self.links.bus.record_message if messages else None
            )

        self.machine.read_node(switch_listening)

    def snapshot(self) -> tuple[int, Tables]:
        """Return the number of the last batch and all tables, which include it; drop waiting changes."""
        return self.machine.read_node(
            lambda node: (self.links.bus.restart_batches(), {**node.all_tables(), **self.links.bus.feature_tables()})
        )

    def tables(self) -> Tables:
        """Return all tables; waiting changes stay."""
        return self.machine.read_node(lambda node: {**node.all_tables(), **self.links.bus.feature_tables()})

    def _member_left(self, effect: fx.MemberLeft) -> None:
        self.links.peers.drop_member(effect.member.id, effect.member.incarnation, effect.reason)
        self.calls.values.routes.forget_member(effect.member.id)
        self.links.members.member_left(effect)
