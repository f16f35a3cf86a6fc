"""Whole worlds in thousands of interleavings, and bugs that must be found there."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passes import Passes
from sharing import Sharing
from simulation import Member, World

from rpcbench.protocol import effects as fx
from rpcbench.protocol import walks
from rpcbench.protocol.calls import Calls
from rpcbench.protocol.contexts import Contexts
from rpcbench.protocol.delivery import Delivery, Pair
from rpcbench.protocol.node import Node
from rpcbench.protocol.rrefs import RRefs
from rpcbench.protocol.walks import Tally, Walks, union
from rpcbench.wire import messages as m

seeds = st.integers(0, 1 << 32)


def examples(count: int) -> Callable[[Any], Any]:
    return settings(max_examples=count, deadline=None, derandomize=True, database=None)


# -- RRefs and calls
@given(seeds, st.integers(2, 4), st.integers(1, 60))
@examples(300)
def test_rrefs(seed: int, size: int, actions: int) -> None:
    Sharing(seed, size).run(actions, deaths=0)


@given(seeds, st.integers(2, 4), st.integers(1, 60), st.integers(1, 2))
@examples(300)
def test_rrefs_where_members_die(seed: int, size: int, actions: int, deaths: int) -> None:
    Sharing(seed, size).run(actions, min(deaths, size - 1))


@given(seeds, st.integers(2, 4), st.integers(1, 50), st.integers(0, 3), st.booleans(), st.integers(0, 1))
@examples(500)
def test_rrefs_where_messages_are_lost(seed: int, size: int, actions: int, cuts: int, lossy: bool, deaths: int) -> None:
    Sharing(seed, size, lossy).run(actions, min(deaths, size - 1), cuts)


# -- contexts
@given(seeds, st.integers(2, 5), st.integers(1, 40), st.integers(1, 3))
@examples(150)
def test_passes(seed: int, size: int, messages: int, passes: int) -> None:
    Passes(seed, size).run(messages, passes)


@given(seeds, st.integers(2, 5), st.integers(1, 40), st.integers(1, 3), st.sampled_from(["errors", "death", "release"]))
@examples(300)
def test_passes_in_trouble(seed: int, size: int, messages: int, passes: int, trouble: str) -> None:
    Passes(seed, size).run_into_trouble(messages, passes, trouble)


@given(seeds, st.integers(2, 4), st.integers(1, 30), st.integers(1, 2), st.sampled_from(["loss", "cuts"]))
@examples(150)
def test_passes_where_messages_are_lost(seed: int, size: int, messages: int, passes: int, trouble: str) -> None:
    Passes(seed, size, lossy=trouble == "loss").run_into_trouble(messages, passes, trouble)


@given(seeds, st.integers(2, 5), st.integers(1, 12))
@examples(150)
def test_fast_passes(seed: int, size: int, messages: int) -> None:
    Passes(seed, size).run_fast(messages)


# -- members
def noted(member: Member, kind: type[Any]) -> list[Any]:
    return [effect for effect in member.noted if isinstance(effect, kind)]


@given(seeds, st.integers(2, 5), st.data())
@examples(80)
def test_members_agree_who_is_there(seed: int, size: int, data: st.DataObject) -> None:
    world = World(seed, Member, size)
    dying = data.draw(st.sets(st.integers(1, size - 1), max_size=size - 2))
    with world.telling():
        for member in world.alive:
            assert noted(member, fx.Complete) == [fx.Complete(False)]
            assert sorted(joined.member.id for joined in noted(member, fx.Joined)) == [
                other for other in range(size) if other != member.id
            ]
        for worker in dying:
            world.within(50, -1, partial(world.kill, worker))
        for member in world.alive:
            world.within(50, member.id, partial(_ready, member))
        world.settle()
        assert all(member.node.members.members == world.alive[0].node.members.members for member in world.alive)
        for member in world.alive:
            assert noted(member, fx.Complete) == [fx.Complete(False), fx.Complete(True)]
            gone = [effect.member.id for effect in noted(member, fx.Gone) if effect.lost]
            assert len(gone) == len(set(gone)) and set(gone) <= dying


@given(seeds, st.integers(3, 5))
@examples(40)
def test_a_loss_is_told_to_everyone(seed: int, size: int) -> None:
    world = World(seed, Member, size)
    with world.telling():
        world.kill(size - 1)
        world.settle()
        for member in world.alive:
            assert [effect.member.id for effect in noted(member, fx.Gone)] == [size - 1]
            assert sorted(member.node.members.members) == list(range(size - 1))


def _ready(member: Member) -> None:
    member.feed(lambda: member.node.outcome(member.node.members.ready(leaving=False)))


# -- the simulation bites
def users_go_before_they_are_confirmed(patch: pytest.MonkeyPatch) -> None:
    def retire(self: RRefs, fork: Any) -> Any:
        user = self.users[fork]
        if not user.released or user.children:
            return []
        self._forget_user(fork)
        return [(user.owner, m.UserDelete(user.rref, fork))]

    patch.setattr(RRefs, "_retire", retire)


def parents_do_not_wait_for_children(patch: pytest.MonkeyPatch) -> None:
    def retire(self: RRefs, fork: Any) -> Any:
        user = self.users[fork]
        if not (user.released and user.confirmed):
            return []
        self._forget_user(fork)
        return [(user.owner, m.UserDelete(user.rref, fork))]

    patch.setattr(RRefs, "_retire", retire)


def numbers_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    first_time = Delivery.first_time
    patch.setattr(Delivery, "first_time", lambda self, pair, seq: first_time(self, pair, seq) or True)


def calls_run_before_their_forks_are_confirmed(patch: pytest.MonkeyPatch) -> None:
    arrived = Calls.arrived
    patch.setattr(Calls, "arrived", lambda self, src, message, pending, now: arrived(self, src, message, set(), now))


def nothing_takes_the_number_of_what_was_not_sent(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Pair, seq: int, instead: m.Message) -> fx.Send:
        del self.kept[seq]
        return self.seen()

    patch.setattr(Pair, "replace", forget)


def last_words_are_heard(patch: pytest.MonkeyPatch) -> None:
    handle = Node.handle

    def hear(self: Node, source: int, *rest: Any) -> Any:
        self._gone.pop(source, None)
        return handle(self, source, *rest)

    patch.setattr(Node, "handle", hear)


def rrefs_that_come_home_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    adopt = RRefs.adopt

    def forget(self: RRefs, fork: m.Fork) -> Any:
        outcome = adopt(self, fork)
        if fork.owner == self.me:
            return outcome[0], outcome[1] + self.came_home(fork), outcome[2]
        return outcome

    patch.setattr(RRefs, "adopt", forget)


def discovery_does_not_wait_for_answers(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Walks, context: int, walk: Any, message: int, recvs: Any) -> Any:
        known, state = self._contexts[context], self._contexts[context].walks[walk]
        new = [recv for recv in recvs if recv not in state.asked]
        state.asked.update(dict.fromkeys(new, message))
        effects, outbox = self._answer(context, walk, state, message)
        return effects, [(known.recvs[recv].source, m.Discover(context, walk, recv)) for recv in new] + outbox

    patch.setattr(Walks, "_ask", hasty)


def messages_say_only_what_is_right_behind_them(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(walks, "union", lambda parts, *more: tuple({*more, *(part[0] for part in parts if part)}))


def what_is_unknown_is_taken_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(walks, "union", lambda parts, *more: union((part or () for part in parts), *more))


def reports_count_once_for_all_gradients(patch: pytest.MonkeyPatch) -> None:
    def add(self: Tally, report: m.Settled) -> None:
        self.open.discard(report.message)
        self.open.update(report.fired)
        self.settled.add(report.message)
        self.awaited.update((one.message, one) for one in report.awaited)

    patch.setattr(Tally, "add", add)


def the_root_trusts_that_all_have_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tally, "unused", lambda self: [])


def failed_passes_begin_again(patch: pytest.MonkeyPatch) -> None:
    failed = Walks.failed

    def forget(self: Walks, context: int, walk: Any, *rest: Any) -> Any:
        outcome = failed(self, context, walk, *rest)
        if context in self._contexts:
            self._contexts[context].failed.clear()
        return outcome

    patch.setattr(Walks, "failed", forget)


def failures_are_told_to_the_root_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Walks, "_neighbours", lambda self, known, state: set())


def late_calls_revive_contexts(patch: pytest.MonkeyPatch) -> None:
    release = Contexts.release

    def forget(self: Contexts, context: int) -> Any:
        outcome = release(self, context)
        self._released.clear()
        return outcome

    patch.setattr(Contexts, "release", forget)


def lost_control_messages_are_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pair, "again", lambda self, counts: [])


def data_that_is_late_counts_as_lost(patch: pytest.MonkeyPatch) -> None:
    settled = Pair.settled
    patch.setattr(Pair, "settled", lambda self, fate: settled(self, m.Fate((*fate.lost, *fate.had), ())))


def numbers_that_are_given_up_are_not_burnt(patch: pytest.MonkeyPatch) -> None:
    def fate(self: Pair, message: m.Forget) -> m.Fate:
        had = {count for count in message.counts if count < self.window.floor or count in self.window._early}
        return m.Fate(tuple(set(message.counts) - had), tuple(had))

    patch.setattr(Pair, "fate", fate)


def nothing_is_acknowledged_twice(patch: pytest.MonkeyPatch) -> None:
    first_time = Delivery.first_time

    def once(self: Delivery, pair: Pair, seq: int) -> bool:
        new = first_time(self, pair, seq)
        pair.owed -= 0 if new else 1
        return new

    patch.setattr(Delivery, "first_time", once)


def share(seed: int, deaths: int, cuts: int = 0, lossy: bool = False) -> None:
    Sharing(seed, 3, lossy).run(40, deaths, cuts)


def walk(seed: int, trouble: str) -> None:
    world = Passes(seed, 3)
    if trouble == "fast":
        world.run_fast(8)
    elif trouble:
        world.run_into_trouble(20, 2, trouble)
    else:
        world.run(20, 2)


BUGS = [
    (users_go_before_they_are_confirmed, partial(share, deaths=0), "left over"),
    (parents_do_not_wait_for_children, partial(share, deaths=0), "is gone, but can be reached"),
    (numbers_are_not_checked, partial(share, deaths=0), "runs twice|answers"),
    (calls_run_before_their_forks_are_confirmed, partial(share, deaths=0), "before fork .* is confirmed"),
    (nothing_takes_the_number_of_what_was_not_sent, partial(share, deaths=0), "answers|left over|still busy"),
    (last_words_are_heard, partial(share, deaths=2), "left over|still busy"),
    (rrefs_that_come_home_are_not_kept, partial(share, deaths=1), "is gone before it came home"),
    (parents_do_not_wait_for_children, partial(share, deaths=0, lossy=True), "is gone, but can be reached"),
    (lost_control_messages_are_not_sent_again, partial(share, deaths=0, cuts=2), "left over|still busy"),
    (data_that_is_late_counts_as_lost, partial(share, deaths=0, lossy=True), "is gone, but can be reached|answers"),
    (numbers_that_are_given_up_are_not_burnt, partial(share, deaths=0, lossy=True), "left over"),
    (nothing_is_acknowledged_twice, partial(share, deaths=0, lossy=True), "still busy"),
    (discovery_does_not_wait_for_answers, partial(walk, trouble=""), "before it knows|ended with"),
    (messages_say_only_what_is_right_behind_them, partial(walk, trouble=""), "ended with"),
    (what_is_unknown_is_taken_for_nothing, partial(walk, trouble=""), "ended with"),
    (reports_count_once_for_all_gradients, partial(walk, trouble=""), "ended with"),
    (the_root_trusts_that_all_have_come, partial(walk, trouble="fast"), "AssertionError"),
    (failed_passes_begin_again, partial(walk, trouble="errors"), "still walking"),
    (failures_are_told_to_the_root_alone, partial(walk, trouble="errors"), "still walking"),
    (failures_are_told_to_the_root_alone, partial(walk, trouble="death"), "ended 0 times|still walking"),
    (late_calls_revive_contexts, partial(walk, trouble="release"), "still has|KeyError"),
]


def first_error(run: Callable[[int], None], seeds: range) -> tuple[int, Exception]:
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            return seed, error
    raise AssertionError(f"nothing was found in {len(seeds)} runs")


@pytest.mark.parametrize(("bug", "run", "symptom"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS])
def test_the_simulation_finds(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[Any], None], run: Callable[[int], None], symptom: str
) -> None:
    bug(monkeypatch)
    _, error = first_error(run, range(200))
    assert re.search(symptom, repr(error)), repr(error)


def test_an_error_tells_its_history_and_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parents_do_not_wait_for_children(monkeypatch)
    seed, error = first_error(partial(share, deaths=0), range(200))
    history = error.__notes__[0]
    assert history.startswith(f"seed {seed}, 3 members\n") and " UserDelete(" in history
    with pytest.raises(AssertionError) as again:
        share(seed, deaths=0)
    assert str(again.value) == str(error) and again.value.__notes__ == error.__notes__
