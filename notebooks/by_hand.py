"""A world of three members, for lesson 10: its members are plain values, and you deliver the messages.

There is no process, no thread and no clock: `notebook`, `worker1` and `worker2` are three `protocol.node.Node`, the
same state machines that run inside real workers. A message that they send stays here until you `deliver` it, in any
order.

At the beginning `notebook` has asked `worker1` to create a value; that value is the RRef `r`, and worker1 owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from chart import Arrow, Chart, Note, tell

from rpcbench.base.ids import Id
from rpcbench.protocol import effects as fx
from rpcbench.protocol.node import Node
from rpcbench.protocol.rrefs import RRefs
from rpcbench.wire import messages as m

NAMES = ["notebook", "worker1", "worker2"]
NOTEBOOK, OWNER, OTHER = range(3)


@dataclass(eq=False)
class Letter:
    """A message in flight."""

    source: int
    to: int
    seq: int
    message: Any
    arrow: Arrow

    @property
    def kind(self) -> str:
        return type(self.message).__name__

    @property
    def key(self) -> tuple[int, int, int]:
        return self.source, self.to, self.seq

    def __str__(self) -> str:
        brings = ", brings r" if getattr(self.message, "forks", ()) else ""
        return f"{self.kind}: {NAMES[self.source]} → {NAMES[self.to]}{brings}"


class World:
    """Three members, the messages between them, and what has happened so far.

    `rules` is the class that keeps the books of references: rpcbench's own, or one that you have changed.
    """

    def __init__(self, rules: Callable[[int, int], RRefs] = RRefs) -> None:
        self.nodes = [Node(m.Member(number, name, 0, ""), len(NAMES)) for number, name in enumerate(NAMES)]
        for number, node in enumerate(self.nodes):
            node.rrefs = rules(number, 0)
        self.letters: list[Letter] = []
        self.history: list[Arrow | Note] = []
        self.held: dict[int, Id] = {}  # members with a Python object for r, and its fork
        self.value = "not made yet"  # or: there, freed
        self.wrong = ""
        self._now = 0
        self._meet()
        self.rref, fork = self.nodes[NOTEBOOK].rrefs.create_user(OWNER, "Tensor")
        self.held[NOTEBOOK] = fork
        self._feed(NOTEBOOK, lambda node: node.start_call(OWNER, _create(self.rref, fork), 0.0, None))

    # -- what you can do
    def deliver(self, kind: str) -> World:
        """Let a message of this kind arrive; the oldest, where there are several."""
        found = [letter for letter in self.letters if letter.kind == kind]
        if not found:
            raise ValueError(f"no {kind} is in flight; these are: {', '.join(x.kind for x in self.letters) or 'none'}")
        return self.hand_over(found[0])

    def share(self) -> World:
        """notebook calls a function on worker2, with r as an argument."""
        if NOTEBOOK not in self.held:
            raise ValueError("notebook has no reference to r any more")
        rrefs = self.nodes[NOTEBOOK].rrefs
        fork = rrefs.share_rref(self.rref, self.held[NOTEBOOK], "Tensor", OTHER, 0.0)
        self._note(NOTEBOOK, "calls worker2 with r")
        return self._feed(NOTEBOOK, lambda node: node.start_call(OTHER, _call(fork), 0.0, None))

    def drop(self, name: str) -> World:
        """A member lets go of its last Python object for r: `del r`."""
        member = NAMES.index(name)
        if member not in self.held:
            raise ValueError(f"{name} has no reference to r")
        fork = self.held.pop(member)
        self._note(member, "drops r")
        return self._feed(member, lambda node: node.process_outcome(([], node.rrefs.release_fork(fork))))

    def settle(self) -> World:
        """Deliver everything, the oldest message first, until no message is in flight."""
        while self.letters:
            self.hand_over(self.letters[0])
        return self

    # -- looking
    def state(self) -> str:
        """What the owner knows, and the messages in flight."""
        row = self.nodes[OWNER].rrefs.owned.get(self.rref)
        counted = ", ".join(NAMES[holder] for holder in row.forks.values()) if row else ""
        lines = [f"the value is {self.value}; users that its owner lists: {counted or 'none'}"]
        lines += [f"in flight: {letter}" for letter in self.letters]
        return "\n".join([*lines, *([f"WRONG: {self.wrong}"] if self.wrong else [])])

    def __repr__(self) -> str:
        return f"{tell(NAMES, self.history)}\n{self.state()}"

    def _repr_html_(self) -> str:
        return Chart(NAMES, self.history)._repr_html_()

    def moves(self) -> Iterator[Callable[[World], Any]]:
        """All that could happen next, for a search: each message that could arrive, each object that could go."""
        for letter in self.letters:
            yield lambda world, key=letter.key: world.hand_over(next(x for x in world.letters if x.key == key))
        for member in self.held:
            yield lambda world, name=NAMES[member]: world.drop(name)

    # -- inside
    def _meet(self) -> None:
        """At the beginning the workers join, and all know each other."""
        for member in range(len(NAMES)):
            self._feed(member, lambda node: node.start_node())
        self.settle()
        self.history.clear()
        self._now = 0

    def hand_over(self, letter: Letter) -> World:
        self.letters.remove(letter)
        self._now += 1
        letter.arrow.arrives = self._now
        return self._feed(letter.to, lambda node: node.handle_message(letter.source, letter.seq, letter.message, 0.0))

    def _feed(self, member: int, event: Callable[[Node], fx.Effects]) -> World:
        for effect in event(self.nodes[member]):
            self._carry_out(member, effect)
        self._look()
        return self

    def _carry_out(self, member: int, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Send):
            self._now += 1
            arrow = Arrow(member, effect.to, type(effect.message).__name__, self._now)
            self.history.append(arrow)
            self.letters.append(Letter(member, *effect, arrow))
        elif isinstance(effect, fx.Enqueue):
            self._feed(member, lambda node: node.begin_serving(effect.source, effect.call, 0.0))
        elif isinstance(effect, fx.Run):
            self._run(member, effect.message)
        elif isinstance(effect, fx.Free):
            self.value = "freed"
            self._note(member, "frees the value")

    def _run(self, member: int, message: m.Create | m.Call) -> None:
        if isinstance(message, m.Create):
            self.nodes[member].rrefs.creation_finished(self.rref, "Tensor", False)
            self.value = "there"
            self._note(member, "makes the value")
        else:
            self._note(member, "runs the function, keeps r")
            self.held[member] = message.forks[0].fork

    def _note(self, member: int, text: str) -> None:
        self._now += 1
        self.history.append(Note(member, text, self._now))

    def _look(self) -> None:
        """The guarantee: a value is there as long as some member can still reach it."""
        reaching = [f"{NAMES[member]} still uses it" for member in self.held]
        reaching += [f"a {x.kind} brings it to {NAMES[x.to]}" for x in self.letters if getattr(x.message, "forks", ())]
        waiting = [user for user in self.nodes[OTHER].rrefs.users.values() if not user.is_released]
        reaching += [f"a call on {NAMES[OTHER]} waits to use it" for _ in waiting if OTHER not in self.held]
        if self.value == "freed" and reaching and not self.wrong:
            self.wrong = f"the value is gone, but {reaching[0]}"
            self._note(OWNER, "too early!")


class Careless(RRefs):
    """rpcbench's rules without the `ChildAccept`: a parent forgets its child at once."""

    def share_rref(self, rref: Id, fork: Id | None, type_: str, to: int, now: float) -> m.Fork:
        child = super().share_rref(rref, fork, type_, to, now)
        self.withdraw_fork(child)  # do not wait for its ChildAccept
        return child

    def is_shared(self, fork: m.Fork) -> bool:
        return True  # send it all the same


def ruled(may_delete: Callable[[bool, bool, int], object]) -> type[RRefs]:
    """rpcbench's rules except one: when a user may send `UserDelete` to the owner."""

    class Ruled(RRefs):
        def _retire_if_unused(self, fork: Id) -> fx.Outbox:
            user = self.users[fork]
            if not may_delete(user.is_released, user.is_confirmed, len(user.children)):
                return []
            self._forget_user(fork)
            return [(user.owner, m.UserDelete(user.rref, fork))]

    return Ruled


class Trial(NamedTuple):
    """What a search has found: how many states it saw, and the history of one that is wrong."""

    states: int
    wrong: str
    history: World | None


def every_order(rules: Callable[[int, int], RRefs] = RRefs) -> Trial:
    """Try every order in which things can happen, from `remote()` to the end, where notebook shares r once or never.

    The shortest history that goes wrong is found first. Worlds in the same state go on in the same way, so each
    state is tried once.
    """
    todo: deque[list[Callable[[World], Any]]] = deque([[]])
    seen: set[str] = set()
    while todo:
        moves = todo.popleft()
        world = World(rules)
        for move in moves:
            move(world)
        if world.wrong:
            return Trial(len(seen), world.wrong, world)
        key = _key(world)
        if key in seen:
            continue
        seen.add(key)
        ahead = [*world.moves()]
        if NOTEBOOK in world.held and World.share not in moves:
            ahead.append(World.share)
        if not ahead and world.value != "freed":
            return Trial(
                len(seen), "all users have dropped it and no message is in flight, but the value is still kept", world
            )
        todo += [[*moves, move] for move in ahead]
    return Trial(len(seen), "", None)


def _key(world: World) -> str:
    """A world without its past."""
    tables = [(node.rrefs.rref_tables(), sorted(node.rrefs.children)) for node in world.nodes]
    under_way = sorted(letter.key for letter in world.letters)
    return repr((tables, under_way, sorted(world.held), world.value))


def _create(rref: Id, fork: Id) -> m.Create:
    return m.Create(0, rref, fork, "make", None, (), None, None, m.EMPTY)


def _call(fork: m.Fork) -> m.Call:
    return m.Call(1, "use", None, (fork,), None, m.EMPTY)
