"""Whole worlds in thousands of interleavings, and mutants that the simulation must find."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import mutants
import pytest
from hypothesis import given
from hypothesis import strategies as st
from passes import Passes
from sharing import Sharing
from simulation import Member, World
from sizes import examples

from rpcbench.protocol import effects as fx

seeds = st.integers(0, 1 << 32)


# -- RRefs and calls
@given(seeds, st.integers(2, 4), st.integers(1, 60))
@examples(300)
def test_random_sharing_frees_each_value_and_answers_each_call_once(seed: int, size: int, actions: int) -> None:
    Sharing(seed, size).run(actions, deaths=0)


@given(seeds, st.integers(2, 4), st.integers(1, 60), st.integers(1, 2))
@examples(300)
def test_random_sharing_holds_when_members_die(seed: int, size: int, actions: int, deaths: int) -> None:
    Sharing(seed, size).run(actions, min(deaths, size - 1))


@given(seeds, st.integers(2, 4), st.integers(1, 50), st.integers(0, 3), st.booleans(), st.integers(0, 1))
@examples(500)
def test_random_sharing_holds_when_messages_are_lost(
    seed: int, size: int, actions: int, cuts: int, lossy: bool, deaths: int
) -> None:
    Sharing(seed, size, lossy).run(actions, min(deaths, size - 1), cuts)


@given(
    seeds, st.integers(2, 4), st.integers(1, 50), st.integers(1, 3), st.booleans(), st.integers(0, 2), st.integers(0, 1)
)
@examples(500)
def test_random_sharing_holds_when_members_restart(
    seed: int, size: int, actions: int, restarts: int, lossy: bool, cuts: int, deaths: int
) -> None:
    """A member may also die for good; if it is the leader, no member restarts any more."""
    Sharing(seed, size, lossy).run(actions, deaths, cuts, restarts)


# -- contexts
@given(seeds, st.integers(2, 5), st.integers(1, 40), st.integers(1, 3))
@examples(150)
def test_random_passes_give_each_send_all_its_gradients(seed: int, size: int, messages: int, passes: int) -> None:
    Passes(seed, size).run(messages, passes)


@given(seeds, st.integers(2, 5), st.integers(1, 40), st.integers(1, 3), st.sampled_from(["errors", "death", "release"]))
@examples(300)
def test_random_passes_are_correct_or_fail_in_trouble(
    seed: int, size: int, messages: int, passes: int, trouble: str
) -> None:
    Passes(seed, size).run_into_trouble(messages, passes, trouble)


@given(seeds, st.integers(2, 4), st.integers(1, 30), st.integers(1, 2), st.sampled_from(["loss", "cuts"]))
@examples(150)
def test_random_passes_are_correct_or_fail_when_messages_are_lost(
    seed: int, size: int, messages: int, passes: int, trouble: str
) -> None:
    Passes(seed, size, lossy=trouble == "loss").run_into_trouble(messages, passes, trouble)


@given(seeds, st.integers(2, 5), st.integers(1, 12))
@examples(150)
def test_random_fast_passes_fail_exactly_when_a_send_is_unused(seed: int, size: int, messages: int) -> None:
    Passes(seed, size).run_fast(messages)


# -- members
def noted(member: Member, kind: type[Any]) -> list[Any]:
    return [effect for effect in member.noted if isinstance(effect, kind)]


@given(seeds, st.integers(2, 5), st.data())
@examples(80)
def test_members_agree_on_the_view_and_close_together_when_some_die(seed: int, size: int, data: st.DataObject) -> None:
    world = World(seed, Member, size)
    dying = data.draw(st.sets(st.integers(1, size - 1), max_size=size - 2))
    with world.telling():
        for member in world.alive:
            assert noted(member, fx.Complete) == [fx.Complete(False)]
            assert sorted(joined.member.id for joined in noted(member, fx.MemberJoined)) == [
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
            gone = [effect.member.id for effect in noted(member, fx.MemberLeft) if effect.lost]
            assert len(gone) == len(set(gone)) and set(gone) <= dying


@given(seeds, st.integers(3, 5))
@examples(40)
def test_a_loss_is_reported_to_all_other_members(seed: int, size: int) -> None:
    world = World(seed, Member, size)
    with world.telling():
        world.kill(size - 1)
        world.settle()
        for member in world.alive:
            assert [effect.member.id for effect in noted(member, fx.MemberLeft)] == [size - 1]
            assert sorted(member.node.members.members) == list(range(size - 1))


def _ready(member: Member) -> None:
    member.feed(lambda: member.node.process_outcome(member.node.members.announce_ready(leaving=False)))


# -- mutants
def share(seed: int, deaths: int, cuts: int = 0, lossy: bool = False, restarts: int = 0) -> None:
    Sharing(seed, 3, lossy).run(40, deaths, cuts, restarts)


def walk(seed: int, trouble: str) -> None:
    world = Passes(seed, 3)
    if trouble == "fast":
        world.run_fast(8)
    elif trouble:
        world.run_into_trouble(20, 2, trouble)
    else:
        world.run(20, 2)


BUGS = [
    (mutants.users_go_before_they_are_confirmed, partial(share, deaths=0), "left over"),
    (mutants.parents_do_not_wait_for_children, partial(share, deaths=0), "can be reached"),
    (mutants.numbers_are_not_checked, partial(share, deaths=0), "twice|left over|is impossible then"),
    (mutants.calls_run_before_their_forks_are_confirmed, partial(share, deaths=0), "before fork .* is confirmed"),
    (mutants.nothing_takes_the_number_of_what_was_not_sent, partial(share, deaths=0), "messages left over"),
    (mutants.last_words_are_heard, partial(share, deaths=2), "left over|still busy|runs twice"),
    (mutants.rrefs_that_come_home_are_not_kept, partial(share, deaths=1), "is gone before it came home"),
    (mutants.parents_do_not_wait_for_children, partial(share, deaths=0, lossy=True), "can be reached"),
    (mutants.lost_control_messages_are_not_sent_again, partial(share, deaths=0, cuts=2), "still busy"),
    (mutants.data_that_is_late_counts_as_lost, partial(share, deaths=0, lossy=True), "can be reached|left over"),
    (mutants.numbers_that_are_given_up_are_not_burnt, partial(share, deaths=0, lossy=True), "messages left over"),
    (mutants.nothing_is_acknowledged_twice, partial(share, deaths=0, lossy=True), "still busy"),
    (mutants.numbers_do_not_tell_incarnations, partial(share, deaths=0, restarts=2), "still busy|can be reached"),
    (
        mutants.owners_are_taken_for_their_predecessors,
        partial(share, deaths=0, restarts=2),
        "left over|is impossible then",
    ),
    (mutants.what_was_shared_with_a_predecessor_is_sent, partial(share, deaths=0, restarts=2), "left over|is gone"),
    (mutants.messages_taken_briefly_may_come_again, partial(share, deaths=0), "still busy|twice"),
    (mutants.messages_taken_briefly_may_come_early, partial(share, deaths=0), "still busy|twice"),
    (
        mutants.messages_taken_briefly_may_be_for_a_predecessor,
        partial(share, deaths=0, restarts=2),
        "numbers of answers|left over",
    ),
    (mutants.messages_taken_briefly_are_not_acknowledged, partial(share, deaths=0), "still busy"),
    (mutants.answers_are_sent_briefly_to_who_waits_no_more, partial(share, deaths=0), "left over inside"),
    (mutants.answers_taken_briefly_leave_the_call, partial(share, deaths=0), "numbers of answers|left over"),
    (mutants.calls_begun_briefly_are_not_known, partial(share, deaths=0), "numbers of answers|left over"),
    (mutants.discovery_does_not_wait_for_answers, partial(walk, trouble=""), "before its discovery"),
    (mutants.messages_say_only_what_is_right_behind_them, partial(walk, trouble=""), "ended with"),
    (mutants.what_is_unknown_is_taken_for_nothing, partial(walk, trouble=""), "ended with"),
    (mutants.reports_count_once_for_all_gradients, partial(walk, trouble=""), r"ended with \[\]"),
    (mutants.the_root_trusts_that_all_have_come, partial(walk, trouble="fast"), "nobody used .* ended with None"),
    (mutants.failed_passes_begin_again, partial(walk, trouble="errors"), "still walking"),
    (mutants.failures_are_told_to_the_root_alone, partial(walk, trouble="errors"), "still walking"),
    (mutants.failures_are_told_to_the_root_alone, partial(walk, trouble="death"), "ended 0 times|still walking"),
    (mutants.late_calls_revive_contexts, partial(walk, trouble="release"), "still has"),
]


def first_error(run: Callable[[int], None], seeds: range) -> tuple[int, Exception]:
    for seed in seeds:
        try:
            run(seed)
        except Exception as error:
            return seed, error
    raise AssertionError(f"nothing was found in {len(seeds)} runs")


@pytest.mark.parametrize(("bug", "run", "symptom"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS])
def test_the_simulation_finds_a_bug_in_the_protocol(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[Any], None], run: Callable[[int], None], symptom: str
) -> None:
    bug(monkeypatch)
    _, error = first_error(run, range(600))
    assert re.search(symptom, repr(error)), repr(error)


def test_an_error_carries_its_history_and_is_reproduced_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.parents_do_not_wait_for_children(monkeypatch)
    seed, error = first_error(partial(share, deaths=0), range(200))
    history = error.__notes__[0]
    assert history.startswith(f"seed {seed}, 3 members\n") and " UserDelete(" in history
    with pytest.raises(AssertionError) as again:
        share(seed, deaths=0)
    assert str(again.value) == str(error) and again.value.__notes__ == error.__notes__
