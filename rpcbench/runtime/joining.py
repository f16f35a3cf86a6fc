"""How an agent gets into its world, and what it does where the lead passes from one member to another."""

from __future__ import annotations

from collections.abc import Callable

from rpcbench.base.conditions import Flag
from rpcbench.base.config import FLUSH_SECONDS, WorldConfig
from rpcbench.base.errors import (
    AuthenticationError,
    IncompleteWorldError,
    NotConnectedError,
    ProtocolError,
    RpcError,
    TurnedAwayError,
)
from rpcbench.protocol import effects as fx
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.locked_node import LockedNode
from rpcbench.runtime.members import Members
from rpcbench.runtime.pool import Job
from rpcbench.transport.handshake import Identity
from rpcbench.wire.messages import Member, View

_PAUSE = 0.05
_NEWS = 2.0
"""Seconds for which one that hangs up may have had too many half-open connections (see `acceptor`)."""


class Bootstrap:
    """`complete` is set when the world is, or when this process is not let in.

    `ready` says that calls are served; those that come earlier wait, as their callers may know the world sooner. It is
    set by `join`, or with `config.held` by the maker of the agent.
    """

    def __init__(
        self,
        config: WorldConfig,
        machine: LockedNode,
        peers: ConnectionManager,
        roster: Members,
        spawn: Callable[[Job], None],
    ) -> None:
        self.complete = Flag()
        self.ready = Flag()
        self._config = config
        self._machine = machine
        self._peers = peers
        self._roster = roster
        self._spawn = spawn
        self._refusal: fx.Rejected | None = None

    # -- getting in
    def join(self, clock: Callable[[], float], deadline: float) -> None:
        """Found or join the world; returns when it has all the members it waits for, and they know it.

        RpcError where this process is not let in, or `clock` passes the deadline; TurnedAwayError where another leads
        an open world by now, or nobody does.
        """
        config, peers = self._config, self._peers
        founds = config.led_by == config.id
        if founds:
            peers.found()
        addresses = peers.entrance.bind(peers.me.epoch)
        self._machine.ask(lambda node: node.members.found_at(peers.me.host, *addresses))
        if founds:
            self._machine.feed(lambda node: node.start(config.id, config.incarnation))
            peers.listen()  # not before there is a world to let them into
        else:
            peers.listen()
            leader = self._reach_leader(clock, deadline)
            self._machine.feed(lambda node: node.start(leader.id, leader.incarnation))
        if not self.complete.wait(max(0.0, deadline - clock())):
            size, census = config.world_size, self._roster.census() + peers.entrance.half_open.complaint()
            raise IncompleteWorldError(f"{config.name} waited for a world of {size} workers, but {census}")
        if self._refusal is not None:
            kind = TurnedAwayError if self._refusal.again else RpcError
            what = "waits in vain" if founds else "may not join"
            raise kind(f"{config.name} {what}: {self._refusal.reason}")
        if founds:
            self._until_known(min(FLUSH_SECONDS, deadline - clock()))
        if not config.held:
            self.ready.set()

    def give_up(self) -> None:
        """Nobody is to wait any more."""
        self.complete.set()
        self.ready.set()

    def _until_known(self, seconds: float) -> None:
        """Wait until all members know that the world is complete: from then on this process may end without a word.

        No longer than `seconds`: one that is stopped just now learns of it later, if this process is still there.
        """
        known = Flag()
        self._machine.feed(lambda node: node.flush(known.set, _says_complete))
        known.wait(max(0.0, seconds))

    def _reach_leader(self, clock: Callable[[], float], deadline: float) -> Identity:
        open_, name = self._config.world_size is None and not self._config.launched, self._config.name
        patience = clock() + _NEWS
        while True:
            try:
                return self._peers.reach_leader()
            except (NotConnectedError, ProtocolError) as error:
                if open_:
                    raise TurnedAwayError(f"{name} has lost who leads its world: {error}") from error
                hung_up = isinstance(error, AuthenticationError) and clock() < patience  # full of strangers, perhaps
                if isinstance(error, ProtocolError) and not hung_up:
                    raise
                if clock() > deadline:
                    told = f"{name} cannot reach worker {self._config.led_by} of its world: {error}"
                    raise IncompleteWorldError(told) from error
            self.complete.wait(_PAUSE)  # nothing can tell us when it begins to listen

    def rejected(self, effect: fx.Rejected) -> None:
        self._refusal = self._refusal or effect
        self.complete.set()

    # -- the lead passes on
    def handed_over(self, effect: fx.HandedOver) -> None:
        self._peers.entrance.hand_over(self._peers.me, effect.heir, effect.epoch)

    def leads(self, effect: fx.Leads) -> None:
        self._peers.entrance.lead(self._peers.me, effect.epoch)

    def watch(self, effect: fx.Watch) -> None:
        self._spawn(lambda: self._be_in_touch(effect.member))

    def _be_in_touch(self, member: Member) -> None:
        try:
            self._peers.connect(member.id, member.ways(self._peers.me.host))
        except RpcError as error:
            reason = str(error)
            self._machine.feed(lambda node: node.lost(member.id, member.incarnation, reason))


def _says_complete(message: object) -> bool:
    return isinstance(message, View) and message.complete
