"""Members that create, share and drop RRefs at random, each in the way of an agent.

Checked during the run: an owner keeps a value as long as a live handle, or an RRef in flight, can reach it; a call runs
at most once. Checked at the end, when all handles are dropped and no message is in flight: each call has had exactly
one answer, and all tables of the nodes, all receive windows and all stores of values are empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from simulation import LEADER, Event, Member, World

from rpcbench.base.errors import WorkerLostError
from rpcbench.base.ids import Id
from rpcbench.protocol import effects as fx
from rpcbench.protocol.rrefs import DELETING, RELEASED
from rpcbench.wire import messages as m

Forks = tuple[m.Fork, ...]
Request = m.Call | m.Create | m.Fetch
ACTIONS = [*["create"] * 2, *["call"] * 3, "fetch", "keep", *["drop"] * 3, "give_up"]


@dataclass(eq=False)
class Handle:
    """A reference of user code. `fork` is None if the member owns the value and did not create it by a call."""

    rref: Id
    owner: int
    fork: Id | None
    busy: bool = False  # a fetch through it is in flight


class Sharer(Member):
    """One member, with its values and handles."""

    world: Sharing

    def __init__(self, world: Sharing, id_: int, size: int | None, life: int) -> None:
        super().__init__(world, id_, size, life)
        self.handles: list[Handle] = []
        self.kept: set[Id] = set()  # values kept for others
        self.parked: dict[Id, list[tuple[int, m.Fetch]]] = defaultdict(list)
        self.first = self.calls = life << 16
        self.answers: Counter[int] = Counter()
        self.runs: Counter[tuple[int, int]] = Counter()
        self.fetching: dict[int, Handle] = {}
        self.handlers |= {
            fx.Run: self._run,
            fx.Resolve: self._resolve,
            fx.Reject: lambda effect: self._answered(effect.call),
            fx.Free: self._free,
            fx.ValueFailed: lambda effect: self._made(effect.rref),
            fx.OwnerLost: lambda effect: None,
        }

    def has(self, rref: Id) -> bool:
        return rref in self.kept or any(h.rref == rref and h.owner == self.id for h in self.handles)

    # -- actions of its users
    def act(self) -> None:
        pick = self.world.random
        to = pick.choice(range(len(self.world.members)))
        if to not in self.node.members.members and to not in self.node.gone:
            return  # an agent does not know this worker yet
        idle = [handle for handle in self.handles if not handle.busy]
        theirs = [handle for handle in idle if handle.owner != self.id and not self._failed(handle)]
        match pick.choice(ACTIONS):
            case "create":
                self._pack(to, self._create)
            case "call":
                self._pack(to, self._call)
            case "fetch" if theirs:
                self._fetch(pick.choice(theirs))
            case "keep":
                rref = self.node.rrefs.new_id()
                self.world.made.add(rref)
                self.handles.append(Handle(rref, self.id, None))
            case "drop" if idle:
                self.drop(pick.choice(idle))
            case "give_up" if self.node.calls.outgoing:
                self._give_up(pick.choice(list(self.node.calls.outgoing)))

    def _failed(self, handle: Handle) -> bool:
        """Return whether its value cannot be requested: its use raises the error, and no message is sent."""
        return handle.fork not in self.node.rrefs.users and handle.owner not in self.world.dead

    def drop(self, handle: Handle) -> None:
        self.handles.remove(handle)
        if handle.fork is not None:
            fork = handle.fork
            self.world.tell(f"{self.id} drops {handle.rref} (fork {fork})")
            self.soon(lambda: self.feed(lambda: self.node.process_outcome(([], self.node.rrefs.release_fork(fork)))))

    def _give_up(self, call: int) -> None:
        end = self.world.random.choice([self.node.call_expired, self.node.cancel_call])
        self.world.tell(f"{self.id} gives call {call} up")
        self.feed(lambda: end(call))

    def _pack(self, to: int, then: Callable[[int, Forks], None]) -> None:
        """Share some handles, and use the forks a moment later."""
        count = min(len(self.handles), self.world.random.choice((0, 1, 1, 2)))
        handles = self.world.random.sample(self.handles, count)
        forks = tuple(fork for handle in handles for fork in self._share(handle, to))
        self.soon(lambda: then(to, forks))

    def _share(self, handle: Handle, to: int) -> Iterator[m.Fork]:
        try:
            yield self.node.rrefs.share_rref(handle.rref, handle.fork, "", to, self.world.now)
        except WorkerLostError:
            assert handle.fork not in self.node.rrefs.users
        else:
            if handle.owner == self.id:
                self.kept.add(handle.rref)

    def _number(self) -> int:
        self.calls += 1
        return self.calls

    def _create(self, to: int, forks: Forks) -> None:
        rref, fork = self.node.rrefs.create_user(to, "")
        message = m.Create(self._number(), rref, fork, "", None, forks, None, None, m.EMPTY)
        self._begin(to, message, lambda: self.handles.append(Handle(rref, to, fork)))

    def _call(self, to: int, forks: Forks) -> None:
        self._begin(to, m.Call(self._number(), "", None, forks, None, m.EMPTY))

    def _fetch(self, handle: Handle) -> None:
        handle.busy = True
        call = self._number()
        self.fetching[call] = handle
        self._begin(handle.owner, m.Fetch(call, handle.rref, None, None))

    def _begin(self, to: int, message: Request, then: Callable[[], None] | None = None) -> None:
        def beginning() -> fx.Effects:
            send = self.node.fast_call(to, message, self.world.now, None) if self._briefly(message) else None
            return [send] if send is not None else self.node.start_call(to, message, self.world.now, None)

        self.feed(beginning, then)

    def _briefly(self, message: m.Message) -> bool:
        """Return whether to try the fast path with this message."""
        return not getattr(message, "forks", ()) and self.world.chance(0.5)

    def handle(self, source: int, seq: int, message: m.Message) -> fx.Effects:
        briefly, now = self._briefly(message), self.world.now
        match message:
            case m.Call() | m.Fetch() if briefly and self.node.fast_take(source, seq, message, now):
                return [fx.Run(source, message)]
            case m.Result() if briefly and self.node.fast_resolve(source, seq, message):
                return [fx.Resolve(message.call, source, message)]
        return super().handle(source, seq, message)

    # -- answers
    def _resolve(self, effect: fx.Resolve) -> None:
        self._answered(effect.call)
        if isinstance(effect.answer, m.Result):
            self._open(effect.answer.forks)

    def _answered(self, call: int) -> None:
        self.answers[call] += 1
        handle = self.fetching.pop(call, None)
        if handle is not None:
            handle.busy = False

    def _open(self, forks: Forks) -> None:
        """Unpickle: make handles for the forks, except for those that the value turned out not to contain."""
        taken = [fork for fork in forks if self.world.random.random() < 0.9]
        for fork in taken:
            mine = fork.owner == self.id
            if mine and fork.rref in self.world.made:
                self.world.expect(self.has(fork.rref), fork.rref, "is gone before it came home")
            self.handles.append(Handle(fork.rref, fork.owner, None if mine else fork.fork))
        self.feed(lambda: self.node.body_opened(forks))
        self.feed(lambda: self.node.body_dropped([f for f in forks if f not in taken and f.owner != self.id]))

    # -- serving
    def _run(self, run: fx.Run) -> None:
        source, message = run
        self.runs[source, message.call] += 1
        assert self.runs[source, message.call] == 1, f"call {message.call} of {source} runs twice"
        self._confirmed(() if isinstance(message, m.Fetch) else message.forks)
        if isinstance(message, m.Fetch):
            self._serve_fetch(source, message)
        else:
            self._open(message.forks)
            self.soon(partial(self._return, source, message))

    def _confirmed(self, forks: Iterable[m.Fork]) -> None:
        for fork in forks:
            user = self.node.rrefs.users.get(fork.fork)
            assert user is None or user.is_confirmed, f"a function runs before fork {fork.fork} is confirmed"

    def _serve_fetch(self, source: int, message: m.Fetch) -> None:
        if message.rref not in self.world.made:
            self.parked[message.rref].append((source, message))
            return
        wanted = source not in self.world.dead and message.call in self.world.members[source].node.calls.outgoing
        self.world.expect(self.has(message.rref) or not wanted, message.rref, "is gone, but fetched")
        self._pack(source, partial(self._reply, message.call))

    def _return(self, source: int, message: m.Call | m.Create) -> None:
        if isinstance(message, m.Create):
            self._made(message.rref)
            self._reply(message.call, source, ())
        elif self.world.chance(0.1):
            failure = m.Failure(message.call, "ValueError", "", m.EMPTY)
            self.feed(
                lambda: (
                    self.node.send_message(source, failure)
                    if self.node.calls.finish_serving(source, message.call)
                    else []
                )
            )
        else:
            self._pack(source, partial(self._reply, message.call))

    def _made(self, rref: Id) -> None:
        self.node.rrefs.creation_finished(rref, "", False)
        self.world.made.add(rref)
        if rref in self.node.rrefs.owned:
            self.kept.add(rref)
        for source, fetch in self.parked.pop(rref, ()):
            self._pack(source, partial(self._reply, fetch.call))

    def _reply(self, call: int, to: int, forks: Forks) -> None:
        result = m.Result(call, forks, None, m.EMPTY)

        def answering() -> fx.Effects:
            send = self.node.fast_answer(to, result) if self._briefly(result) else None
            if send is not None:
                return [send]
            if self.node.calls.finish_serving(to, call):
                return self.node.send_message(to, result)
            return self.node.take_back_message(to, result, WorkerLostError("the caller has gone"))

        self.feed(answering)

    def _free(self, effect: fx.Free) -> None:
        if effect.rref not in self.node.rrefs.owned:  # otherwise the owner has shared it again since
            self.kept.discard(effect.rref)


class Sharing(World):
    """A world of sharers, and its invariants."""

    members: dict[int, Sharer]

    def __init__(self, seed: int, size: int, lossy: bool = False) -> None:
        self.made: set[Id] = set()
        self.orphaned: set[Id] = set()  # shared by a member that died before the owner knew: may be freed too early
        super().__init__(seed, Sharer, size, lossy)

    def run(self, actions: int, deaths: int, cuts: int = 0, restarts: int = 0) -> None:
        """Run all actions, deaths, restarts and cuts; then drop the remaining handles and check."""
        with self.telling():
            for _ in range(actions):
                member = self.random.choice(self.alive)
                self.within(2 * actions, member.id, member.act)
            for worker in self.random.sample(range(len(self.members)), deaths):
                self.within(2 * actions, -1, partial(self.kill, worker))
            for _ in range(restarts):
                worker, after = self.random.randrange(1, len(self.members)), self.random.uniform(0, 2 * actions)
                self.events.append(Event(self.now + after, -1, partial(self.kill, worker)))
                again = self.now + after + self.random.uniform(1, 60)
                self.events.append(Event(again, -1, partial(self.restart, worker)))
                for _ in range(actions // 2):
                    late = again + self.random.uniform(0, 2 * actions)
                    self.events.append(Event(late, -1, partial(self._act, worker)))
            for _ in range(cuts):
                self.within(2 * actions, -1, partial(self.cut, *self.random.sample(range(len(self.members)), 2)))
            self.settle()
            self.calm = True
            while any(member.handles for member in self.alive):
                for member in self.alive:
                    for handle in list(member.handles):
                        member.drop(handle)
                self.settle()
            self._check_end()

    def _act(self, worker: int) -> None:
        if worker not in self.dead:
            self.members[worker].act()

    def step(self) -> None:
        super().step()
        for rref, owner in self._reachable():
            if rref in self.made and owner not in self.dead:
                there = self.members[owner].has(rref) and rref in self.members[owner].node.rrefs.owned
                self.expect(there, rref, "is gone, but can be reached")

    def expect(self, true: bool, rref: Id, what: str) -> None:
        assert true or rref in self.orphaned or LEADER in self.dead, f"{rref} {what}"

    def kill(self, worker: int) -> None:
        super().kill(worker)
        self.orphaned.update(f.rref for p in self.in_flight() for f in _forks(p.message) if f.owner == worker)
        for member in self.members.values():
            self.orphaned.update(user.rref for user in member.node.rrefs.users.values() if user.owner == worker)
            self.orphaned.update(handle.rref for handle in member.handles if handle.owner == worker)
        self.orphaned.update(f.rref for p in self.in_flight() for f in _forks(p.message) if f.parent == worker)
        for member in self.alive:
            users = member.node.rrefs.users.values()
            self.orphaned.update(user.rref for user in users if user.parent == worker and not user.is_confirmed)

    def _reachable(self) -> Iterator[tuple[Id, int]]:
        """Yield each RRef in flight, or held by a user, and its owner."""
        for packet in self.in_flight():
            for fork in _forks(packet.message):
                yield fork.rref, fork.owner
        for member in self.alive:
            for user in member.node.rrefs.users.values():
                if user.state not in (RELEASED, DELETING):
                    yield user.rref, user.owner
            for handle in member.handles:
                if handle.fork is not None:
                    yield handle.rref, handle.owner

    def _check_end(self) -> None:
        for member in self.alive:
            node, at = member.node, f"worker {member.id}"
            calls = range(member.first + 1, member.calls + 1)
            wrong = {call: member.answers[call] for call in calls if member.answers[call] != 1}
            assert not wrong, f"{at}: numbers of answers to calls: {wrong}"
            left = {name: table for name, table in node.all_tables().items() if table}
            assert not left, f"{at}: left over: {left}"
            inside = [node.calls.serving, node.calls._held, node.rrefs.children, member.kept]
            assert not any(inside), f"{at}: left over inside: {inside}"
            assert not node.delivery.describe_unfinished(), (
                f"{at}: messages left over: {node.delivery.describe_unfinished()}"
            )


def _forks(message: m.Message) -> Forks:
    forks: Forks = getattr(message, "forks", ())
    return forks
