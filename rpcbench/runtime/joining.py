"""How an agent joins its world, and the leader election: its part when another member becomes the leader."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rpcbench.base.conditions import Event
from rpcbench.base.config import FLUSH_SECONDS, HANDSHAKE_SECONDS, WorldConfig
from rpcbench.base.errors import (
    IncompleteWorldError,
    NotConnectedError,
    ProtocolError,
    RpcError,
    TurnedAwayError,
)
from rpcbench.protocol import effects as fx
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.locked_node import EffectTable, LockedNode
from rpcbench.runtime.members import Members
from rpcbench.runtime.pool import Job
from rpcbench.transport.handshake import Identity
from rpcbench.wire.messages import Member, View

_log = logging.getLogger("rpcbench")
_PAUSE = 0.05  # seconds between attempts to reach the leader


class Bootstrap:
    """The start of one agent. `complete` is set when the world is complete, or this process is rejected; `ready` when
    calls are served, by `join_world`, or with `config.held` by the agent's maker. Earlier calls wait, as their callers
    may see the complete world first."""

    def __init__(
        self,
        config: WorldConfig,
        machine: LockedNode,
        effects: EffectTable,
        peers: ConnectionManager,
        member_table: Members,
        spawn: Callable[[Job], None],
    ) -> None:
        self.complete = Event()
        self.ready = Event()
        self._config = config
        self._machine = machine
        self._peers = peers
        self._member_table = member_table
        self._refusal: fx.Rejected | None = None
        effects.register(fx.Rejected, self._join_rejected)
        effects.register(fx.Leads, lambda effect: peers.acceptor.publish_leadership(peers.own_identity, effect.epoch))
        effects.register(
            fx.HandedOver,
            lambda effect: peers.acceptor.hand_over_leadership(peers.own_identity, effect.heir, effect.epoch),
        )
        effects.register(fx.WatchMember, lambda effect: spawn(lambda: self._connect_to(effect.member)))

    # -- joining
    def join_world(self, clock: Callable[[], float], deadline: float) -> None:
        """Found or join the world; return when it is complete and all its members have received that. RpcError if this
        process is rejected, or `clock` passes the deadline; TurnedAwayError if an open world has another leader, or
        none."""
        config, peers = self._config, self._peers
        founds = config.led_by == config.id
        if founds:
            peers.found_world()
        addresses = peers.acceptor.bind_listeners(peers.own_identity.epoch)
        self._machine.read_node(lambda node: node.members.set_addresses(peers.own_identity.host, *addresses))
        if founds:
            self._machine.feed_event(lambda node: node.start_node(config.id, config.incarnation))
            peers.start_accepting()  # not before there is a world to let them into
        else:
            peers.start_accepting()
            leader = self._reach_leader(clock, deadline)
            self._machine.feed_event(lambda node: node.start_node(leader.id, leader.incarnation))
        if not self.complete.wait(max(0.0, deadline - clock())):
            size, census = (
                config.world_size,
                self._member_table.describe_members() + peers.acceptor.refusals.describe_strangers(),
            )
            raise IncompleteWorldError(f"{config.name} waited for a world of {size} workers, but {census}")
        if self._refusal is not None:
            kind = TurnedAwayError if self._refusal.again else RpcError
            what = "cannot complete its world" if founds else "may not join"
            raise kind(f"{config.name} {what}: {self._refusal.reason}")
        if founds:
            self._until_known(min(FLUSH_SECONDS, deadline - clock()))
        if not config.held:
            self.ready.set()

    def release_waiters(self) -> None:
        self.complete.set()
        self.ready.set()

    def _until_known(self, seconds: float) -> None:
        """Wait until all members have received that the world is complete: then this process may end at any time. At
        most `seconds`: a member that is stopped just now receives it later, if this process still runs."""
        known = Event()
        self._machine.feed_event(
            lambda node: node.request_flush(known.set, lambda each: isinstance(each, View) and each.complete)
        )
        known.wait(max(0.0, seconds))

    def _reach_leader(self, clock: Callable[[], float], deadline: float) -> Identity:
        open_, name = self._config.world_size is None and not self._config.launched, self._config.name
        report_at = clock() + HANDSHAKE_SECONDS
        while True:
            try:
                return self._peers.reach_leader()
            except (NotConnectedError, ProtocolError) as error:
                if open_:
                    raise TurnedAwayError(f"{name} has lost the leader of its world: {error}") from error
                if isinstance(error, ProtocolError):
                    error.add_note(f"{name} met this at {self._config.leader or 'the place where its world meets'}")
                    raise
                if clock() > deadline:
                    reason = f"{name} cannot reach worker {self._config.led_by} of its world: {error}"
                    raise IncompleteWorldError(reason) from error
                if self._config.leader and self._config.launched and clock() > report_at:
                    _log.warning("%s has not reached its world yet: %s", name, error)  # in the error of a late start
                    report_at = deadline
            self.complete.wait(_PAUSE)  # polled: no event reports that it begins to listen

    def _join_rejected(self, effect: fx.Rejected) -> None:
        self._refusal = self._refusal or effect  # the first reason counts
        self.complete.set()

    # -- a new leader
    def _connect_to(self, member: Member) -> None:
        try:
            self._peers.connect_to_member(member.id, member.addresses_from(self._peers.own_identity.host))
        except RpcError as error:
            reason = str(error)
            self._machine.feed_event(lambda node: node.member_lost(member.id, member.incarnation, reason))
