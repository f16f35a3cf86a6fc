"""The links of an agent to the other members: connections, messages, joining, failure detector, event bus.

Guarantees
- Messages pass all interceptors in both directions, between the node and the connections.
- A message that cannot be sent is reported to the node; its call then fails with the best known reason.
- A thread that may not block never dials: it leaves that to another thread.
"""

from __future__ import annotations

from collections.abc import Callable

from rpcbench.base.conditions import Event
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import NotConnectedError, RpcError
from rpcbench.protocol import effects as fx
from rpcbench.protocol.delivery import DEFERRABLE, is_deferrable
from rpcbench.runtime.channels import Channels
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.events import EventLog
from rpcbench.runtime.handles import HandleRuntime
from rpcbench.runtime.interceptors import Interceptors
from rpcbench.runtime.joining import Bootstrap
from rpcbench.runtime.locked_node import EffectTable, LockedNode
from rpcbench.runtime.members import LaunchRecords, Members
from rpcbench.runtime.pool import Pool
from rpcbench.runtime.reconnect import PeerEvents
from rpcbench.runtime.timers import TICK, Deadlines, Heartbeat, MaintenanceThread
from rpcbench.transport.base import Deliver, Link, MemoryConnection, Transmit
from rpcbench.transport.hosts import host_id
from rpcbench.wire import messages as m
from rpcbench.wire.encoding import encode_message


class AgentLinks:
    """The links of one agent. `deliver` takes the messages that arrive, `unsent` those that could not be sent; `due`:
    whether replies are to come."""

    def __init__(
        self, agent: HandleRuntime, config: WorldConfig, link: Link, records: LaunchRecords, machine: LockedNode,
        effects: EffectTable, pool: Pool, deliver: Deliver, due: Callable[[], bool], unsent: Callable[[m.Message], None]
    ) -> None:  # fmt: skip
        self._agent, self._machine, self._spawn, self._unsent = agent, machine, pool.spawn_job, unsent
        self.bus = EventLog()  # rows and messages for watchers
        self.closing = Event()  # the world ends for this member
        self.interceptors = Interceptors(link, self._write_message, deliver, self._interceptors_changed)
        self.clock: Callable[[], float] = lambda: self.interceptors.clock()  # may stand still, never jumps
        self.members = Members(config.name, machine, effects, pool.spawn_job, records)
        self.channels = Channels(effects, pool.spawn_job)
        self.peer_events = PeerEvents(machine, self.members, self.interceptors, host_id())
        self.peers = ConnectionManager(config, pool, self.peer_events, due)
        self.bootstrap = Bootstrap(config, machine, effects, self.peers, self.members, pool.spawn_job)
        self.heartbeat = Heartbeat(config, self.peers, self.clock, self.members.suspicion_changed)
        self.maintenance = MaintenanceThread(config.name, machine, Deadlines(), self.clock, self.peers)
        receive = self.peer_events.frame_received
        self._myself = MemoryConnection(lambda frame: receive(self.peers.own_identity, frame), pool.spawn_job)
        effects.register(fx.Wake, self._wake_for_tick)
        effects.register(fx.Complete, self._world_completed)

    def _interceptors_changed(self) -> None:
        self._machine.read_node(lambda node: node.delivery.set_lossy(self.interceptors.is_lossy))
        self.maintenance.released.put(None)  # the maintenance thread reads the clock again

    # -- messages
    def send_message(self, effect: fx.Send, may_wait: bool, send: Transmit | None = None) -> None:
        """Send a numbered message of the node."""
        try:
            (send or self.interceptors.outgoing)(effect.to, effect.seq, effect.message, may_wait)
        except RpcError as error:
            self._message_unsent(effect, error)

    def _message_unsent(self, effect: fx.Send, error: RpcError) -> None:
        """Report to the node that a message could not be sent; its call then fails with the best known reason."""
        failure = error
        if isinstance(error, NotConnectedError) and self._agent.running:
            failure = self.members.unreachable_error(effect.to, str(error))
        self._unsent(effect.message)
        self._machine.feed_event(lambda node: node.send_failed(effect, failure))

    def _write_message(self, to: int, seq: int, message: m.Message, may_wait: bool) -> None:
        """Write a message to the connection of its receiver; open one if there is none. Runs after all interceptors."""
        control, body = encode_message(seq, message)
        # `hold`: it may wait in the connection for the next write.
        hold = type(message) in DEFERRABLE and is_deferrable(message)
        connection = self._myself if to == self._agent.id else self.peers.find(to)
        if connection is not None:
            try:
                connection.send(control, body, may_wait, hold)
                if hold:
                    self.maintenance.flush_soon()
                return
            except NotConnectedError:
                pass  # it has just ended; another one may be open soon
        member = self._machine.read_node(lambda node: node.members.members.get(to))
        if member is None:
            raise NotConnectedError("it is not in this world")
        # A dial blocks, so a thread that may not wait leaves it to another; interceptors have seen the message already.
        if may_wait:
            self.peers.send_message(to, member.addresses_from(self.peers.own_identity.host), control, body)
        else:
            self._spawn(lambda: self.send_message(fx.Send(to, seq, message), True, self._write_message))

    # -- effects
    def _wake_for_tick(self, effect: fx.Wake) -> None:
        self.maintenance.schedule_wakeup(TICK, self.interceptors.clock(), self.interceptors.near.retry_seconds / 2)

    def _world_completed(self, effect: fx.Complete) -> None:
        if not effect.closing:
            self.bootstrap.complete.set()
            return
        self.peers.acceptor.close()  # before other members see the end: the next world may use the same address
        self.closing.set()
