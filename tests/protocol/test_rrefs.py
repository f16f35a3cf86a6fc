from __future__ import annotations

import pytest

from rpcbench.base.errors import WorkerLostError
from rpcbench.base.ids import Id
from rpcbench.protocol.effects import Free, OwnerLost, ValueFailed
from rpcbench.protocol.rrefs import CREATED, NAMED, RRefs
from rpcbench.wire.messages import ChildAccept, Fork, ForkAccept, ForkRequest, UserDelete

OWNER, USER, THIRD = 0, 1, 2
RREF, FIRST = Id(USER, 0), Id(USER, 1)


@pytest.fixture
def owner() -> RRefs:
    """Owns RREF, which USER has created."""
    rrefs = RRefs(OWNER, 0)
    rrefs.made = 1.0
    rrefs.on_create(USER, RREF, FIRST, "Net")
    return rrefs


@pytest.fixture
def user() -> RRefs:
    """Has created RREF on OWNER; its fork FIRST is not confirmed yet."""
    rrefs = RRefs(USER, 0)
    assert rrefs.create_user(OWNER, "Net") == (RREF, FIRST)
    return rrefs


# -- users
def test_a_user_is_deleted_when_it_is_released_and_confirmed(user: RRefs) -> None:
    assert user.release_fork(FIRST) == []
    assert user.on_fork_accept(ForkAccept(RREF, FIRST)) == ([], [(OWNER, UserDelete(RREF, FIRST))])
    assert user.users == {}


def test_a_released_user_is_deleted_only_when_the_owner_knows_its_child(user: RRefs) -> None:
    user.on_fork_accept(ForkAccept(RREF, FIRST))
    child = user.share_rref(RREF, FIRST, "Net", THIRD, made=0)
    assert child == Fork(RREF, OWNER, Id(USER, 2), USER, "Net")
    assert user.release_fork(FIRST) == []
    assert user.child_known(child.fork) == ([], [(OWNER, UserDelete(RREF, FIRST))])
    assert user.users == user.children == {}


def test_an_unshared_fork_is_taken_back_by_its_user_and_by_its_owner(user: RRefs, owner: RRefs) -> None:
    user.on_fork_accept(ForkAccept(RREF, FIRST))
    child = user.share_rref(RREF, FIRST, "Net", THIRD, made=0)
    user.release_fork(FIRST)
    assert user.withdraw_fork(child) == ([], [(OWNER, UserDelete(RREF, FIRST))])
    shared = owner.share_rref(RREF, None, "Net", THIRD, made=0)
    owner.withdraw_fork(shared)
    assert owner.drop_fork(RREF, FIRST) == [Free(RREF)]


def test_a_fork_from_another_user_is_confirmed_by_the_owner_and_reported_to_its_parent() -> None:
    third = RRefs(THIRD, 0)
    fork = Fork(RREF, OWNER, Id(USER, 2), USER, "Net")
    assert third.adopt_fork(fork) == (True, [], [(OWNER, ForkRequest(RREF, fork.fork))])
    assert third.on_fork_accept(ForkAccept(RREF, fork.fork)) == ([], [(USER, ChildAccept(fork.fork))])
    assert third.release_fork(fork.fork) == [(OWNER, UserDelete(RREF, fork.fork))]


def test_a_fork_from_the_owner_is_confirmed_already(owner: RRefs) -> None:
    third = RRefs(THIRD, 0)
    fork = owner.share_rref(RREF, None, "Net", THIRD, made=0)
    assert third.adopt_fork(fork) == (False, [], [])
    assert third.release_fork(fork.fork) == [(OWNER, UserDelete(RREF, fork.fork))]


def test_a_fork_of_a_lost_owner_cannot_be_shared(user: RRefs) -> None:
    user.owner_lost(FIRST)
    with pytest.raises(WorkerLostError, match=r"1\.0"):
        user.share_rref(RREF, FIRST, "Net", THIRD, made=0)
    assert user.release_fork(FIRST) == []


# -- the owner
def test_a_value_is_freed_when_its_last_fork_is_dropped(owner: RRefs) -> None:
    assert owner.on_fork_request(THIRD, ForkRequest(RREF, Id(USER, 2))) == (
        [],
        [(THIRD, ForkAccept(RREF, Id(USER, 2)))],
    )
    assert owner.drop_fork(RREF, FIRST) == []
    assert owner.drop_fork(RREF, Id(USER, 2)) == [Free(RREF)]
    assert owner.owned == {}


def test_a_value_outlives_a_fork_that_is_dropped_before_the_creating_call_arrives() -> None:
    owner = RRefs(OWNER, 0)
    owner.on_fork_request(THIRD, ForkRequest(RREF, Id(USER, 2)))
    assert owner.drop_fork(RREF, Id(USER, 2)) == []
    assert owner.on_create(USER, RREF, FIRST, "Net") == [(USER, ForkAccept(RREF, FIRST, first=True))]
    assert owner.drop_fork(RREF, FIRST) == [Free(RREF)]


def test_a_value_that_is_shared_before_its_creating_call_arrives_is_not_ready() -> None:
    owner = RRefs(OWNER, 0)
    owner.share_rref(RREF, None, "Net", THIRD, made=0)  # its fork returned in a message that overtook the call
    owner.on_create(USER, RREF, FIRST, "Net")
    assert owner.owned[RREF].state is CREATED


def test_a_fork_that_returns_to_its_owner_keeps_the_value_until_it_is_dropped(owner: RRefs) -> None:
    home = Fork(RREF, OWNER, Id(USER, 2), USER, "Net")
    assert owner.adopt_fork(home) == (False, [], [(USER, ChildAccept(home.fork))])
    assert owner.drop_fork(RREF, FIRST) == []
    assert owner.drop_fork(home.rref, home.fork) == [Free(RREF)]


def test_a_fork_that_the_owner_shares_with_itself_keeps_the_value(owner: RRefs) -> None:
    fork = owner.share_rref(RREF, None, "Net", OWNER, made=0)
    assert owner.adopt_fork(fork) == (False, [], [])
    owner.drop_fork(RREF, FIRST)
    assert owner.drop_fork(fork.rref, fork.fork) == [Free(RREF)]


def test_an_owner_can_share_a_value_before_its_own_creating_call_arrives() -> None:
    me = RRefs(OWNER, 0)
    rref, first = me.create_user(OWNER, "Net")
    child = me.share_rref(rref, first, "Net", THIRD, made=0)
    assert child.parent == OWNER and me.owned[rref].state is NAMED
    assert me.drop_fork(rref, child.fork) == []
    me.on_create(OWNER, rref, first, "Net")
    me.on_fork_accept(ForkAccept(rref, first))
    assert me.release_fork(first) == [(OWNER, UserDelete(rref, first))]
    assert me.drop_fork(rref, first) == [Free(rref)]


def test_tables_show_the_forks_holders_and_states(owner: RRefs, user: RRefs) -> None:
    assert user.rref_tables()["users"]["1.1"]["state"] == "pending"
    user.share_rref(RREF, FIRST, "Net", THIRD, made=0)
    user.on_fork_accept(ForkAccept(RREF, FIRST))
    user.release_fork(FIRST)
    row = user.rref_tables()["users"]["1.1"]
    assert row["state"] == "deleting" and row["children"] == [{"fork": "1.2", "to": THIRD}]
    assert owner.rref_tables()["owned"]["1.0"]["ready"] is False
    owner.creation_finished(RREF, "Linear", failed=False, size=12)
    assert owner.rref_tables()["owned"] == {
        "1.0": {
            "rref": "1.0", "ready": True, "failed": False, "type": "Linear", "made": 1.0, "size": 12, "cell": "",
            "number": None,
            "forks": [{"fork": "1.1", "holder": USER}],
        }
    }  # fmt: skip


# -- losses
@pytest.mark.parametrize("maker", [OWNER, USER])
def test_a_fork_request_for_a_freed_value_gets_an_error_as_value(owner: RRefs, maker: int) -> None:
    """A member shared the fork and died; the parent of the fork did not wait for that member any longer."""
    rref, fork = RREF, FIRST
    if maker == OWNER:
        rref = owner.new_id()
        fork = owner.share_rref(rref, None, "Net", USER, made=0).fork
    assert owner.drop_fork(rref, fork) == [Free(rref)]
    late = Id(THIRD, 0)
    effects, _ = owner.on_fork_request(USER, ForkRequest(rref, late))
    assert [type(effect) for effect in effects] == [ValueFailed]
    assert owner.drop_fork(rref, late) == [Free(rref)] and rref not in owner.owned


def test_an_owner_remembers_freed_values_of_lost_holders_longer_than_others(owner: RRefs) -> None:
    def come_and_go(serial: int, holder: int) -> Id:
        rref, fork = Id(THIRD, serial), Id(THIRD, serial, 1)
        owner.on_create(holder, rref, fork, "Net")
        if holder == USER:
            owner.member_lost(USER, 0)
        owner.drop_fork(rref, fork)
        return rref

    rref = come_and_go(0, USER)
    for serial in range(1, 5000):
        come_and_go(serial, THIRD)
    effects, _ = owner.on_fork_request(THIRD, ForkRequest(rref, Id(THIRD, 7000)))
    assert [type(effect) for effect in effects] == [ValueFailed]


def test_a_fork_request_can_arrive_before_the_creating_call(owner: RRefs) -> None:
    rref = Id(USER, 7)
    assert owner.on_fork_request(THIRD, ForkRequest(rref, Id(THIRD, 0)))[0] == []
    owner.on_create(USER, rref, Id(USER, 8), "Net")
    assert len(owner.owned[rref].forks) == 2


def test_the_forks_of_a_lost_holder_are_dropped(owner: RRefs) -> None:
    owner.on_fork_request(THIRD, ForkRequest(RREF, Id(USER, 2)))
    assert owner.member_lost(USER, 0) == ([], [], [])
    assert owner.member_lost(THIRD, 0) == ([Free(RREF)], [], [])


def test_a_parent_does_not_wait_for_a_lost_child(user: RRefs) -> None:
    user.on_fork_accept(ForkAccept(RREF, FIRST))
    user.share_rref(RREF, FIRST, "Net", THIRD, made=0)
    user.release_fork(FIRST)
    assert user.member_lost(THIRD, 0) == ([], [(OWNER, UserDelete(RREF, FIRST))], [])


def test_the_users_of_a_lost_owner_are_dropped_and_reported(user: RRefs) -> None:
    child = user.share_rref(RREF, FIRST, "Net", THIRD, made=0)
    assert user.member_lost(OWNER, 0) == ([OwnerLost(RREF)], [], [FIRST])
    assert user.users == user.children == {}
    assert user.child_known(child.fork) == ([], [])


def test_the_loss_of_an_owner_confirms_the_child_to_its_parent() -> None:
    third = RRefs(THIRD, 0)
    third.adopt_fork(Fork(RREF, OWNER, Id(USER, 2), USER, "Net"))
    assert third.owner_lost(Id(USER, 2)) == ([OwnerLost(RREF)], [(USER, ChildAccept(Id(USER, 2)))])


@pytest.mark.parametrize("request_first", [True, False])
def test_a_value_is_an_error_if_its_creator_is_lost_before_the_creating_call_arrives(request_first: bool) -> None:
    owner = RRefs(OWNER, 0)
    steps = [
        lambda: owner.on_fork_request(THIRD, ForkRequest(RREF, Id(USER, 2)))[0],
        lambda: owner.member_lost(USER, 0)[0],
    ]
    effects = [effect for step in (steps if request_first else reversed(steps)) for effect in step()]
    assert [(type(effect), effect.rref) for effect in effects] == [(ValueFailed, RREF)]
    assert isinstance(effects[0].error, WorkerLostError)
    assert owner.drop_fork(RREF, Id(USER, 2)) == [Free(RREF)]


def test_a_value_without_users_fails_and_is_freed_if_its_creator_is_lost_before_its_call() -> None:
    owner = RRefs(OWNER, 0)
    home = Fork(RREF, OWNER, Id(USER, 2), USER, "Net")
    owner.adopt_fork(home)
    assert owner.drop_fork(home.rref, home.fork) == []
    assert [type(effect) for effect in owner.member_lost(USER, 0)[0]] == [ValueFailed, Free]
    assert not owner.owned


def test_a_fork_request_for_a_value_freed_after_a_loss_is_accepted_with_an_error_as_value(owner: RRefs) -> None:
    owner.on_fork_request(THIRD, ForkRequest(RREF, Id(USER, 2)))
    assert owner.member_lost(THIRD, 0)[0] == []
    assert owner.drop_fork(RREF, FIRST) == [Free(RREF)]
    fork = Id(THIRD, 0)  # which the lost member had shared just before
    effects, outbox = owner.on_fork_request(3, ForkRequest(RREF, fork))
    assert [type(effect) for effect in effects] == [ValueFailed]
    assert outbox == [(3, ForkAccept(RREF, fork))]
    assert owner.drop_fork(RREF, fork) == [Free(RREF)]


# -- names
def test_a_call_can_name_a_value_before_its_creating_call_arrives(owner: RRefs) -> None:
    late = Id(USER, 5)
    assert owner.note_reference(RREF) and owner.note_reference(late)
    owner.on_create(USER, late, Id(USER, 6), "Net")
    owner.check_rrefs()
    assert owner.drop_fork(late, Id(USER, 6)) == [Free(late)]


def test_a_call_cannot_name_a_freed_value(owner: RRefs) -> None:
    own = owner.new_id()
    shared = owner.share_rref(own, None, "Net", THIRD, made=0)
    assert owner.note_reference(own) and owner.note_reference(RREF)
    assert owner.drop_fork(RREF, FIRST) == [Free(RREF)]
    assert owner.drop_fork(own, shared.fork) == [Free(own)]
    assert not owner.note_reference(own) and not owner.note_reference(RREF) and owner.owned == {}


def test_a_named_value_is_an_error_if_its_creator_is_lost_before_the_creating_call_arrives(owner: RRefs) -> None:
    late = Id(USER, 5)
    assert owner.note_reference(late)
    effects, _, _ = owner.member_lost(USER, 0)
    (unmade,) = (effect for effect in effects if isinstance(effect, ValueFailed))
    assert unmade.rref == late and isinstance(unmade.error, WorkerLostError)
    assert owner.owned == {} and not owner.note_reference(late)
