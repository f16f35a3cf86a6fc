"""Whole nodes on a simulated network: one thread, virtual time, and all randomness from one seed.

Whatever happens here can happen to agents. Messages overtake each other, arrive twice or late; in a lossy world some
are lost. The effects of one feed are carried out in order, those of different feeds in any order. A send may fail. A
connection may break: messages on it are lost, until both sides have noticed and there is a new connection. A member may
die: messages from it may still arrive; messages to it are lost, are refused, or arrive at another process that was
started under its id. The other members learn of the death one after the other.

After every step, the tables of the node must agree with each other, and with the changes that it has reported. An error
carries the history of its run; the same arguments give the same run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rpcbench.base.errors import NotConnectedError, ProtocolError, RpcError
from rpcbench.base.ids import Id, Tables, apply_change
from rpcbench.protocol import effects as fx
from rpcbench.protocol.delivery import SEQUENCE_COUNT_BITS, incarnations_of
from rpcbench.protocol.node import Node
from rpcbench.wire import messages as m

LEADER = 0
STEPS = 20_000
TWICE, LATE, UNSENT, LOST = 0.15, 0.1, 0.04, 0.15
TICK = 12.0
COUNT = (1 << SEQUENCE_COUNT_BITS) - 1
TOO_LARGE = ProtocolError("the message is too large")
GONE = NotConnectedError("it is not in this world")
BROKEN = NotConnectedError("the connection is broken")


class Packet(NamedTuple):
    """A message in flight."""

    source: int
    to: int
    seq: int
    message: m.Message


@dataclass(slots=True, eq=False)
class Event:
    """An event of the future: a packet arrives, or a thread of `actor` continues."""

    due: float
    actor: int
    run: Callable[[], None]
    packet: Packet | None = None


class World:
    """Some members, and the events that are due between and inside them."""

    def __init__(self, seed: int, kind: type[Member], size: int, lossy: bool = False) -> None:
        self.random = random.Random(seed)
        self.lossy = lossy
        self.now = 0.0
        self.events: list[Event] = []
        self.history: list[str] = [f"seed {seed}, {size} members"]
        self.dead: set[int] = set()
        self.down: dict[frozenset[int], list[Member]] = {}  # disconnected pairs, and their members that know
        self.handled: set[tuple[int, int, int]] = set()
        self.calm = False
        self.start = lambda id_, life: kind(self, id_, size, life)
        self.members = {id_: self.start(id_, 0) for id_ in range(size)}
        for member in self.members.values():
            member.feed(member.node.start_node)
        self.settle()

    @property
    def alive(self) -> list[Any]:
        return [member for id_, member in self.members.items() if id_ not in self.dead]

    def chance(self, share: float) -> bool:
        return not self.calm and self.random.random() < share

    # -- time
    def later(self, actor: int, run: Callable[[], None], packet: Packet | None = None) -> None:
        """Run an event soon, in no particular order; sometimes much later."""
        self.within(100 if self.chance(LATE) else 3, actor, run, packet)

    def within(self, span: float, actor: int, run: Callable[[], None], packet: Packet | None = None) -> None:
        """Run an event at a random time before `span` has passed."""
        self.events.append(Event(self.now + self.random.uniform(0, span), actor, run, packet))

    def step(self) -> None:
        """Run one event that is due."""
        self.now = max(self.now + 0.1, min(event.due for event in self.events))
        event = self.random.choice([event for event in self.events if event.due <= self.now])
        if event.packet is not None and self.chance(TWICE):
            event.due = self.now + self.random.uniform(0, 50)
        else:
            self.events.remove(event)
        event.run()

    def settle(self) -> None:
        """Run events until there are none."""
        for _ in range(STEPS):
            if not self.events:
                return
            self.step()
        raise AssertionError(f"still busy after {STEPS} steps")

    # -- network
    def send(self, packet: Packet) -> None:
        self.later(-1, lambda: self._deliver(packet), packet)

    def in_flight(self) -> Iterator[Packet]:
        """Yield the messages that have not been handled yet."""
        for event in self.events:
            if event.packet is not None and event.packet[:3] not in self.handled and self.is_meant(event.packet):
                yield event.packet

    def is_meant(self, packet: Packet) -> bool:
        """Return whether a message is addressed to a live process, and not to its predecessor."""
        return packet.to not in self.dead and incarnations_of(packet.seq)[1] == self.members[packet.to].life

    def _deliver(self, packet: Packet) -> None:
        if packet.to in self.dead:
            return
        if self.lossy and self.chance(LOST):
            self.tell(f"{packet.source} -> {packet.to} #{packet.seq} is lost: {_short(packet.message)}")
            return
        again = " again" if packet[:3] in self.handled else ""
        self.tell(f"{packet.source} -> {packet.to} #{packet.seq}{again} {_short(packet.message)}")
        if not isinstance(packet.message, m.Seen):  # a Seen has the number of another message
            self.handled.add(packet[:3])
        if isinstance(packet.message, m.CancelDelivery):
            numbers = [packet.seq & ~COUNT | count for count in packet.message.counts]
            self.handled.update((packet.source, packet.to, number) for number in numbers)  # without effect now
        member = self.members[packet.to]
        member.feed(lambda: member.handle(packet.source, packet.seq, packet.message))

    def kill(self, worker: int) -> None:
        """End a member at once; the others see their connections end."""
        if worker in self.dead:
            return
        self.tell(f"{worker} dies")
        self.dead.add(worker)
        self.events = [event for event in self.events if not self._dies_with(event, worker)]
        self.down = {pair: noticed for pair, noticed in self.down.items() if worker not in pair}
        self.let_know(self.members[worker])

    def let_know(self, gone: Member) -> None:
        """The other members learn that their connections to a departed member have ended."""
        for member in self.alive:
            lost = partial(member.node.member_lost, gone.id, gone.life, "its connection ended")
            self.later(member.id, partial(member.feed, lost))

    def restart(self, worker: int) -> None:
        """Start a process under the id of a dead one; the others may not know of the death yet."""
        if worker in self.dead and LEADER not in self.dead:
            self.tell(f"{worker} is started again")
            self.dead.discard(worker)
            member = self.members[worker] = self.start(worker, self.members[worker].life + 1)
            member.feed(member.node.start_node)

    def cut(self, one: int, other: int) -> None:
        """Break the connection of two members. Each notices, a new connection follows, each learns of that."""
        pair = frozenset((one, other))
        if len(pair) < 2 or pair & self.dead or pair in self.down:
            return
        self.tell(f"{one} and {other} are cut off from each other")
        noticed = self.down[pair] = []
        self.events = [e for e in self.events if e.packet is None or {e.packet.source, e.packet.to} != pair]
        both = self.members[one], self.members[other]
        for member, peer in (both, both[::-1]):
            self.within(10, member.id, partial(self._notice, member, peer, noticed))

    def _notice(self, member: Member, peer: Member, noticed: list[Member]) -> None:
        noticed.append(member)
        if len(noticed) == 2:
            self.within(10, -1, partial(self._reconnect, noticed))
        member.feed(lambda: member.node.connection_broken(peer.id, peer.life, "cut"))

    def _reconnect(self, noticed: list[Member]) -> None:
        one, other = noticed
        pair = frozenset((one.id, other.id))
        if self.down.get(pair) is not noticed:
            return  # one of them has died since
        del self.down[pair]
        self.tell(f"{one.id} and {other.id} are connected again")
        for member, peer in ((one, other), (other, one)):
            resume = partial(member.node.connection_resumed, peer.id, peer.life)
            self.within(10, member.id, partial(member.feed, resume))

    def _dies_with(self, event: Event, worker: int) -> bool:
        if event.packet is None:
            return event.actor == worker
        return worker in (event.packet.to, event.packet.source) and self.random.random() < 0.3

    # -- telling
    def tell(self, line: str) -> None:
        self.history.append(f"{self.now:8.1f}  {line}")

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Add the history to errors from inside."""
        try:
            yield
        except Exception as error:
            error.add_note("\n".join(self.history))
            raise


class Member:
    """A node, and the part of its agent; subclasses act as an agent's users and features."""

    def __init__(self, world: World, id_: int, size: int | None, life: int) -> None:
        self.world, self.id, self.life = world, id_, life
        self.node = Node(m.Member(id_, f"worker{id_}", life, ""), size, world.lossy)
        self.told: Tables = self.node.all_tables()
        self.node.set_observers(lambda kind, table, key, row: apply_change(self.told, table, key, row()))
        self.noted: list[fx.Effect] = []
        self.handlers: dict[type[Any], Callable[[Any], None]] = {
            fx.Send: self._send,
            fx.Wake: self._wake,
            fx.Enqueue: self._enqueue,
        }

    def feed(self, event: Callable[[], fx.Effects], then: Callable[[], None] | None = None) -> None:
        """Feed the node; then, on the same thread, carry out the effects and call `then`."""
        effects = event()
        self.node.check_tables()
        assert self.told == self.node.all_tables(), (
            "the tables rebuilt from the reported changes differ from those of the node"
        )
        jobs = [lambda effect=effect: self._perform(effect) for effect in effects] + ([then] if then else [])
        if jobs:
            self.soon(lambda: self._work(jobs))

    def handle(self, source: int, seq: int, message: m.Message) -> fx.Effects:
        """Feed the node a message that has arrived."""
        return self.node.handle_message(source, seq, message, self.world.now)

    def soon(self, run: Callable[[], None]) -> None:
        """Run this on some thread of this member."""
        self.world.later(self.id, run)

    def _work(self, jobs: list[Callable[[], None]]) -> None:
        jobs.pop(0)()
        if jobs:
            self.soon(lambda: self._work(jobs))

    def _perform(self, effect: fx.Effect) -> None:
        self.handlers.get(type(effect), self.noted.append)(effect)

    def _wake(self, wake: fx.Wake) -> None:
        self.world.events.append(Event(self.world.now + TICK, self.id, lambda: self.feed(self.node.tick_delivery)))

    def _enqueue(self, queued: fx.Enqueue) -> None:
        """Begin a queued call when a thread is free; the caller may have cancelled it or died by then."""
        self.soon(lambda: self.feed(lambda: self.node.begin_serving(*queued, self.world.now)))

    def _send(self, send: fx.Send) -> None:
        error = self._obstacle(send)
        if error is not None:
            self.world.tell(f"{self.id} cannot send #{send.seq} to {send.to}: {_short(send.message)}")
            self.feed(lambda: self.node.send_failed(send, error))
        elif send.to not in self.world.dead and frozenset((self.id, send.to)) not in self.world.down:
            self.world.send(Packet(self.id, *send))

    def _obstacle(self, send: fx.Send) -> RpcError | None:
        if self in self.world.down.get(frozenset((self.id, send.to)), ()):
            return BROKEN
        if isinstance(send.message, m.Join | m.View):
            return None
        known = send.to == self.id or send.to in self.node.members.members
        if not known or (send.to in self.world.dead and self.world.chance(0.5)):
            return GONE
        large = isinstance(send.message, m.Call | m.Create | m.Fetch | m.Result)
        return TOO_LARGE if large and self.world.chance(UNSENT) else None


def _short(value: Any) -> str:
    """Format a message as one line of a history."""
    if not isinstance(value, tuple) or isinstance(value, Id):
        return str(value)
    name = type(value).__name__ if hasattr(value, "_fields") else ""
    return f"{name}({', '.join(_short(field) for field in value if field is not m.EMPTY)})"
