"""Members that record random graphs of messages in a context, and run backward passes over them, as an agent does.

A gradient here is a number: how many paths lead from the roots to a send. So a check finds each send that gets no
gradients, gets them twice, or passes them on before they are complete. Some members list the sends behind a message
when they send it; others leave that to the backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any

from simulation import Member, World

from rpcbench.base.ids import Id, global_id, worker_of
from rpcbench.protocol import effects as fx
from rpcbench.protocol.backward import ROOT, Sent
from rpcbench.wire import messages as m
from rpcbench.wire.messages import Body

WITH_TENSORS = Body(b"tensors", b"", [])


class Local:
    """One pass on one member: the recvs that each root reaches, and the gradients that have arrived."""

    def __init__(self, reach: dict[int, frozenset[int]]) -> None:
        self.reach = reach
        self.sums: dict[int, int] = {}
        self.fired: set[int] = set()

    def arrive(self, root: int, paths: int) -> dict[int, int]:
        """Add the gradients of a root; return those that are complete now, by recv."""
        assert root not in self.sums, f"gradients for {root} arrived twice"
        self.sums[root] = paths
        whole = {}
        for recv in set().union(*self.reach.values()) - self.fired:
            roots = [root for root, reached in self.reach.items() if recv in reached]
            if all(root in self.sums for root in roots):
                whole[recv] = sum(self.sums[root] for root in roots)
        self.fired |= whole.keys()
        return whole


class Passer(Member):
    """One member, with its part of the graph."""

    world: Passes

    def __init__(self, world: Passes, id_: int, size: int | None, life: int) -> None:
        super().__init__(world, id_, size, life)
        self.calls = self.messages = 0
        self.recvs: list[int] = []
        self.reach: dict[int, frozenset[int]] = {}
        self.begun: dict[Id, frozenset[int]] = {}
        self.passes: dict[Id, Local] = {}
        self.handlers |= {
            fx.Run: self._run,
            fx.Resolve: lambda effect: self._received(effect.source, effect.answer),
            fx.Explore: lambda e: self._guarded(e.pass_id, e.message, lambda: self._explore(e)),
            fx.Propagate: lambda e: self._guarded(e.pass_id, ROOT, lambda: self._arrive(e.pass_id, ROOT, 1)),
            fx.Accumulate: lambda e: self._guarded(e.message.pass_id, e.message.message, lambda: self._accumulate(e)),
            fx.PassEnded: lambda e: world.ended[e.pass_id].append(e.failure),
        }

    # -- forward
    def act(self) -> None:
        """Call a random member, if this member has the context."""
        if self.world.context in self.node.contexts.contexts:
            to = self.world.random.choice(range(len(self.world.members)))
            scope, body = self._record(to)
            self.calls += 1
            call = m.Call(self.calls, "", None, (), scope, body)
            self.feed(lambda: self.node.start_call(to, call, self.world.now, None))

    def _record(self, to: int) -> tuple[m.Scope | None, Body]:
        """Record the send of a message that depends on some received messages."""
        number, self.messages = global_id(self.id, self.messages), self.messages + 1
        pick = self.world.random
        tensors = pick.random() < 0.85
        reach = frozenset(pick.sample(self.recvs, min(len(self.recvs), pick.choice((0, 1, 1, 2, 3)))))
        seen = reach if pick.random() < self.world.seen else None
        scope: m.Scope | None = None

        def record() -> fx.Effects:
            nonlocal scope
            scope = self.node.contexts.record_send(self.world.context, number, Sent(to, "work"), seen, tensors)
            return []

        self.feed(record)
        if scope is not None and tensors:
            self.reach[number] = reach
        return scope, WITH_TENSORS if tensors else m.EMPTY

    def _run(self, run: fx.Run) -> None:
        self._received(run.source, run.message)
        self.soon(lambda: self._answer(*run))

    def _answer(self, source: int, call: m.Call) -> None:
        scope, body = self._record(source) if call.scope is not None else (None, m.EMPTY)
        answer = m.Result(call.call, (), scope, body)
        self.feed(
            lambda: self.node.send_message(source, answer) if self.node.calls.finish_serving(source, call.call) else []
        )

    def _received(self, source: int, message: m.Call | m.Result | m.Failure) -> None:
        scope = getattr(message, "scope", None)
        if scope is None:
            return
        tensors = message.body is WITH_TENSORS

        def record() -> fx.Effects:
            if self.node.contexts.record_recv(scope, source, tensors) and tensors:
                self.recvs.append(scope.message)
            return []

        self.feed(record)

    # -- backward
    def begin(self, fast: bool = False) -> None:
        """Begin a pass over some of the messages that this member has received."""
        context, pick = self.world.context, self.world.random
        if context not in self.node.contexts.contexts:
            return
        walk = Id(self.id, len(self.begun))
        recvs = self.begun[walk] = frozenset(pick.sample(self.recvs, pick.randint(0, min(3, len(self.recvs)))))
        self.world.tell(f"{self.id} begins pass {walk} from {sorted(recvs)}")
        self.feed(
            lambda: self.node.process_outcome(
                self.node.contexts.backward_passes.begin_pass(context, walk, recvs, False, fast)
            )
        )

    def _guarded(self, walk: Id, message: int, work: object) -> None:
        if self.world.goes_wrong(walk):
            failure = m.BackwardFailed(self.world.context, walk, self.id, "ValueError", "", m.EMPTY)
            self.world.tell(f"{self.id} fails in pass {walk} at {message}")
            outcome = partial(self.node.contexts.backward_passes.pass_failed, failure)
            self.soon(lambda: self.feed(lambda: self.node.process_outcome(outcome())))
        else:
            self.soon(work)

    def _explore(self, effect: fx.Explore) -> None:
        recvs = self.reach[effect.message]
        self.feed(lambda: self.node.process_outcome(self.node.contexts.backward_passes.graph_explored(*effect, recvs)))

    def _accumulate(self, effect: fx.Accumulate) -> None:
        self._arrive(effect.message.pass_id, effect.message.message, int(effect.message.body.payload))

    def _arrive(self, walk: Id, root: int, paths: int) -> None:
        state = self.node.contexts.backward_passes.find_pass(self.world.context, walk)
        if state is None:
            return
        if walk not in self.passes:
            begun = {ROOT: self.begun[walk]} if walk in self.begun else {}
            self.passes[walk] = Local(begun | {send: self.reach[send] for send in state.needed})
        if root != ROOT:
            self.world.arrived[walk][root].append(paths)
        whole = self.passes[walk].arrive(root, paths)
        fired = {recv: Body(b"%d" % count, b"", []) for recv, count in whole.items()}
        walks = self.node.contexts.backward_passes
        self.feed(lambda: self.node.process_outcome(walks.gradients_propagated(self.world.context, walk, root, fired)))


class Passes(World):
    """A world with one context, which a random member begins."""

    members: dict[int, Any]
    kind: type[Passer] = Passer

    def __init__(self, seed: int, size: int, lossy: bool = False) -> None:
        self.arrived: dict[Id, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.ended: dict[Id, list[m.BackwardFailed | None]] = defaultdict(list)
        self.errors = 0.0
        super().__init__(seed, self.kind, size, lossy)
        self.seen = self.random.choice((0.0, 0.5, 0.9, 1.0))
        self.root = self.members[self.random.randrange(size)]
        self.context = global_id(self.root.id, 0)
        self.root.node.contexts.open_context(self.context)

    def goes_wrong(self, walk: Id) -> bool:
        return self.chance(self.errors)

    def record(self, messages: int) -> None:
        self.within(0, self.root.id, self.root.act)
        for _ in range(messages):
            member = self.random.choice(self.alive)
            self.within(3 * messages, member.id, member.act)

    def record_and_walk(self, messages: int, passes: int) -> None:
        """Record; when all messages have arrived, record more and run passes at the same time."""
        self.record(messages)
        self.settle()
        self.record(messages // 2)
        for _ in range(passes):
            self.within(messages, self.root.id, self.root.begin)

    def release(self) -> None:
        contexts = self.root.node.contexts
        self.root.feed(lambda: self.root.node.process_outcome(contexts.release_context(self.context)))

    def run(self, messages: int, passes: int) -> None:
        """Record, run passes while more is recorded, release; every pass must succeed."""
        with self.telling():
            self.record_and_walk(messages, passes)
            self.settle()
            for walk in self.root.begun:
                assert self.ended[walk] == [None], f"pass {walk} ended with {self.ended[walk]}"
                self.check_gradients(walk)
            self._check_walks_are_over()
            self.release()
            self._check_end()

    def check_gradients(self, walk: Id) -> None:
        """Check that each send of the pass got all its gradients, and that no other send got any."""
        expected = {send: [count] for send, count in self.paths(self.root.begun[walk]).items()}
        assert self.arrived[walk] == expected, f"wrong gradients in pass {walk}"

    def run_fast(self, messages: int) -> None:
        """Record, then run a fast pass, which must fail if a worker that takes part has a send without gradients."""
        with self.telling():
            self.record(messages)
            self.settle()
            self.root.begin(fast=True)
            self.settle()
            for walk, recvs in self.root.begun.items():
                ways = self.paths(recvs)
                partners = [self.members[worker] for worker in {self.root.id, *map(worker_of, ways)}]
                sent = [member.node.contexts.contexts[self.context].sends for member in partners]
                unused = set().union(*sent) - ways.keys()
                (ended,) = self.ended[walk]
                if not unused:
                    assert ended is None and self.arrived[walk] == {send: [n] for send, n in ways.items()}
                else:
                    assert ended is not None and "got none" in ended.text, (
                        f"nobody used {unused}; it ended with {ended}"
                    )
            self._check_walks_are_over()
            self.release()
            self._check_end()

    def run_into_trouble(self, messages: int, passes: int, trouble: str) -> None:
        """Run passes while functions fail, a worker dies, connections break, or the context is released."""
        with self.telling():
            self.record_and_walk(messages, passes)
            match trouble:
                case "errors":
                    self.errors = 0.05
                case "death":
                    self.within(5 * messages, -1, partial(self.kill, self.random.randrange(len(self.members))))
                case "cuts":
                    for _ in range(2):
                        pair = self.random.sample(range(len(self.members)), 2)
                        self.within(5 * messages, -1, partial(self.cut, *pair))
                case "release":
                    self.within(5 * messages, self.root.id, self.release)
            self.settle()
            if self.root.id not in self.dead:
                for walk in self.root.begun:
                    assert len(self.ended[walk]) == 1, f"pass {walk} ended {len(self.ended[walk])} times"
                    if self.ended[walk] == [None]:
                        self.check_gradients(walk)
                self._check_walks_are_over()
                self.release()
            self._check_end()

    def paths(self, recvs: Iterable[int]) -> dict[int, int]:
        """Return how many paths lead from the roots to each send that takes part."""
        count: dict[int, int] = defaultdict(int)
        ways = list(recvs)
        while ways:
            send = ways.pop()
            count[send] += 1
            ways += self.members[worker_of(send)].reach[send]
        return count

    def _check_walks_are_over(self) -> None:
        for member in self.alive:
            for context in member.node.contexts.contexts.values():
                assert not context.backward_passes, f"worker {member.id}: still walking: {context.backward_passes}"

    def _check_end(self) -> None:
        self.settle()
        for member in self.alive:
            assert not member.node.contexts.contexts, (
                f"worker {member.id} still has {member.node.contexts.contexts_table()}"
            )
            left = member.node.delivery.describe_unfinished()
            assert not left, f"worker {member.id}: messages left over: {left}"
