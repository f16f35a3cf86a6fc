from __future__ import annotations

import re

import pytest

from rpcbench.protocol.effects import Complete, Effects, MemberJoined, MemberLeft, Rejected
from rpcbench.protocol.membership import Membership
from rpcbench.wire.messages import Join, Member, Past, Ready, Refused, Report, View

LEADER, ONE, TWO = (Member(id_, f"worker{id_}", 0, "") for id_ in range(3))


def world(size: int | None, *joined: Member) -> Membership:
    """The membership of member 0, the leader, after these joins."""
    leader = Membership(LEADER, size)
    leader.start_membership()
    for member in joined:
        leader.on_join(member.id, Join(member, size))
    return leader


def seen(member: Membership, view: View) -> Effects:
    """Return the effects of this view on a member, which must send nothing."""
    effects, outbox = member.on_view(view)
    assert outbox == []
    return effects


def objection(leader: Membership, member: Member, size: int | None, source: int | None = None) -> str:
    _, [(to, refused), *_] = leader.on_join(member.id if source is None else source, Join(member, size))
    assert isinstance(refused, Refused)
    assert to == (member.id if source is None else source)
    return refused.reason


# -- joining
def test_the_leader_publishes_a_view_with_the_new_member_to_all_members() -> None:
    leader = world(3, ONE)
    effects, outbox = leader.on_join(2, Join(TWO, 3))
    assert effects == [MemberJoined(TWO), Complete(False)]
    view = View(3, (LEADER, ONE, TWO), (), False, True)
    assert outbox == [(1, view), (2, view)]


def test_a_member_asks_to_join_and_follows_the_newest_view() -> None:
    one = Membership(ONE, 2)
    assert one.start_membership() == ([], [(0, Join(ONE, 2))])
    assert seen(one, View(2, (LEADER, ONE), (), False, True)) == [MemberJoined(LEADER), Complete(False)]
    assert seen(one, View(1, (LEADER,), (), False, True)) == []
    assert list(one.members) == [0, 1]


def test_an_open_world_is_complete_at_once() -> None:
    assert Membership(LEADER, None).start_membership()[0] == [Complete(False)]


@pytest.mark.parametrize(
    ("size", "member", "asked", "words"),
    [
        (3, Member(2, "worker1", 0, ""), 3, "name worker1 is not unique"),
        (3, Member(1, "other", 0, ""), 3, "id 1 of other is not unique: worker1"),
        (3, Member(3, "worker3", 0, ""), 3, "does not fit a world of 3"),
        (3, TWO, None, r"closed \(world_size=3\), but worker2 .* open"),
        (3, TWO, 4, r"world_size=4"),
        (None, TWO, 3, r"open \(world_size=None\), but worker2 .* closed \(world_size=3\)"),
    ],
)
def test_a_join_that_does_not_fit_the_world_is_refused_with_a_reason(
    size: int | None, member: Member, asked: int | None, words: str
) -> None:
    leader = world(size, ONE)
    assert re.search(words, objection(leader, member, asked))
    assert list(leader.members) == [0, 1]


def test_all_members_of_a_world_that_cannot_become_complete_are_refused() -> None:
    leader = world(4, ONE)
    twin, double = (Member(id_, "worker1", 0, "") for id_ in (2, 3))
    assert leader.on_join(2, Join(twin, 4)) == leader.on_join(2, Join(twin, 4))  # they wait, as worker 3 may still join
    effects, outbox = leader.on_join(3, Join(double, 4))
    reason = "worker name worker1 is not unique: another worker has it already"
    assert effects == [] and outbox == [(to, Refused(reason)) for to in (3, 1, 0)]  # the leader itself last


def test_members_of_a_world_that_cannot_become_complete_are_refused_even_if_the_last_fits() -> None:
    leader = world(3)
    leader.on_join(2, Join(Member(2, "worker0", 0, ""), 3))
    effects, outbox = leader.on_join(1, Join(ONE, 3))
    reason = Refused("worker name worker0 is not unique: another worker has it already")
    assert effects == [MemberJoined(ONE)] and outbox[-2:] == [(1, reason), (0, reason)]


def test_a_refused_process_can_join_under_another_name() -> None:
    leader = world(3, ONE)
    _, outbox = leader.on_join(2, Join(Member(2, "worker1", 0, ""), 3))
    assert [to for to, _ in outbox] == [2, 1, 0]
    leader = world(4, ONE)
    leader.on_join(2, Join(Member(2, "worker1", 0, ""), 4))
    assert leader.on_join(2, Join(TWO, 4))[0] == [MemberJoined(TWO)]
    assert leader.on_join(3, Join(Member(3, "worker3", 0, ""), 4))[0][-1] == Complete(False)


def test_a_join_for_another_id_and_a_join_of_an_ending_world_are_refused() -> None:
    leader = world(None, ONE)
    assert "asks for id 2" in objection(leader, TWO, None, source=1)
    leader.announce_ready(leaving=True)
    assert "about to end" in objection(leader, TWO, None)


# -- leaving
def test_a_world_closes_when_all_are_ready() -> None:
    leader = world(3, ONE, TWO)
    assert leader.on_ready(1, Ready(False)) == leader.announce_ready(leaving=False) == ([], [])
    effects, outbox = leader.on_ready(2, Ready(False))
    assert effects == [Complete(True)] and leader.closing
    assert [(to, view.closing) for to, view in outbox] == [(1, True), (2, True)]


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_a_world_closes_without_waiting_for_a_departed_member(how: str) -> None:
    leader = world(None, ONE, TWO)
    leader.on_ready(1, Ready(False))
    leader.announce_ready(leaving=False)
    effects, _ = leader.on_ready(2, Ready(True)) if how == "leaves" else leader.member_lost(2, "killed")
    assert effects == [MemberLeft(TWO, how == "is lost", "it left" if how == "leaves" else "killed"), Complete(True)]


def test_the_end_of_a_world_is_reported_once() -> None:
    leader = world(None, ONE, TWO)
    leader.on_ready(1, Ready(False))
    leader.on_ready(2, Ready(False))
    assert leader.announce_ready(leaving=False)[0] == [Complete(True)]
    effects, outbox = leader.on_ready(1, Ready(True))
    assert effects == [MemberLeft(ONE, False, "it left")]
    assert outbox == [], "all know of the end; further views would be quadratic in the number of members"
    scripts = Membership(LEADER, 3, launched=False)
    scripts.start_membership()
    for member in (ONE, TWO):
        scripts.on_join(member.id, Join(member, 3))
    scripts.announce_ready(leaving=True)
    _, outbox = scripts.on_ready(1, Ready(True))
    assert [to for to, _ in outbox] == [2], "it may be calling the member that has left"
    one = Membership(ONE, None)
    one.on_view(View(2, (LEADER, ONE), (), False, True))
    assert seen(one, View(3, (LEADER, ONE), (), True, True)) == [Complete(True)]
    assert seen(one, View(4, (LEADER, ONE), (), True, True)) == []


# -- losses
def test_a_new_incarnation_replaces_the_old_one_and_the_old_one_is_refused() -> None:
    leader = world(3, ONE, TWO)
    again = TWO._replace(incarnation=1)
    effects, _ = leader.on_join(2, Join(again, 3))
    assert effects == [MemberLeft(TWO, True, "it was started again"), MemberJoined(again)]
    assert leader.members[2] == again and not leader.past
    assert isinstance(leader.on_join(2, Join(TWO, 3))[1][-1][1], Refused)


def test_a_member_reports_a_loss_to_the_leader_which_publishes_it_once() -> None:
    one = Membership(ONE, 3)
    one.on_view(View(3, (LEADER, ONE, TWO), (), False, True))
    assert one.member_lost(2, "killed") == ([], [(0, Report(2, 0, "killed"))])
    leader = world(3, ONE, TWO)
    effects, outbox = leader.on_report(Report(2, 0, "killed"))
    assert effects == [MemberLeft(TWO, True, "killed")]
    assert outbox == [(1, View(4, (LEADER, ONE), ((2, "killed"),), False, True, (Past(2, 0),)))]
    assert seen(one, outbox[0][1]) == [MemberLeft(TWO, True, "killed")]
    assert leader.on_report(Report(2, 0, "killed")) == ([], [])


def test_a_new_incarnation_does_not_inherit_the_loss_and_readiness_of_the_old_one() -> None:
    again = TWO._replace(incarnation=1)
    leader = world(None, ONE, TWO)
    leader.on_ready(2, Ready(False))
    leader.member_lost(2, "killed")
    assert leader.on_join(2, Join(again, None))[0] == [MemberJoined(again)]
    assert leader.on_report(Report(2, 0, "killed")) == ([], []), "the report is about the old incarnation"
    leader.announce_ready(leaving=False)
    assert leader.on_ready(1, Ready(False)) == ([], []), "the old incarnation was ready, not the new one"
    assert leader.on_ready(2, Ready(True))[0] == [MemberLeft(again, False, "it left"), Complete(True)]


def test_a_member_that_missed_a_view_sees_one_incarnation_leave_and_the_next_join() -> None:
    one, again = Membership(ONE, None), TWO._replace(incarnation=1)
    one.on_view(View(3, (LEADER, ONE, TWO), (), False, True))
    effects = seen(one, View(5, (LEADER, ONE, again), (), False, True))
    assert [type(effect) for effect in effects] == [MemberLeft, MemberJoined]
    assert effects[0].member == TWO and effects[1].member == again


def test_a_world_ends_when_its_leader_is_lost() -> None:
    one = Membership(ONE, 3)
    one.on_view(View(3, (LEADER, ONE, TWO), (), False, True))
    why = "its world ended with its leader, worker0: killed"
    assert one.member_lost(0, "killed") == (
        [MemberLeft(LEADER, True, "killed"), MemberLeft(TWO, True, why), Complete(True)],
        [],
    )
    assert one.members == {}


def test_connections_that_end_after_the_world_has_closed_are_no_losses() -> None:
    leader = world(None, ONE)
    leader.announce_ready(leaving=True)
    assert leader.member_lost(1, "its connection ended") == ([], [])


def test_a_later_view_completes_the_world_if_the_complete_view_was_missed() -> None:
    one = Membership(ONE, 3)
    assert Complete(False) not in seen(one, View(2, (LEADER, ONE), (), False, False))
    assert Complete(False) in seen(one, View(5, (LEADER, ONE), (), False, True)), (
        "the third member joined, and has left again"
    )


def test_a_leader_that_is_lost_before_the_world_is_complete_fails_the_join() -> None:
    one = Membership(ONE, 3)
    (told, over), _ = one.member_lost(0, "its process ended")
    assert over == Complete(True)
    assert isinstance(told, Rejected) and "its process ended" in told.reason
