"""Each event of an RRef and of a fork in each state, by the inputs of `RRefs`; the tables say what is possible."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from rpcbench.base.errors import InvalidTransitionError, WorkerLostError
from rpcbench.base.ids import Id
from rpcbench.protocol.rrefs import (
    ACCEPTED,
    CALL_DROPPED,
    CHILDREN_GONE,
    CONFIRMED,
    CREATE_ARRIVED,
    CREATED,
    DELETED,
    DELETING,
    FAILED,
    FORKS_GONE,
    FREED,
    HANDLES_GONE,
    NAMED,
    OWNER_GONE,
    PENDING,
    RAISED,
    READY,
    RELEASED,
    RETURNED,
    ForkEvent,
    ForkState,
    Owned,
    RRefEvent,
    RRefs,
    RRefState,
    User,
)
from rpcbench.wire.messages import ForkAccept, ForkRequest

OWNER, USER, THIRD = 0, 1, 2
RREF, FIRST, CHILD = Id(USER, 0), Id(USER, 1), Id(USER, 2)

# -- a fork at its holder
FORK_INPUTS: dict[ForkEvent, Callable[[RRefs], object]] = {
    ACCEPTED: lambda rrefs: rrefs.on_fork_accept(ForkAccept(RREF, FIRST)),
    HANDLES_GONE: lambda rrefs: rrefs.release_fork(FIRST),
    CHILDREN_GONE: lambda rrefs: rrefs.child_known(CHILD),
    OWNER_GONE: lambda rrefs: rrefs.owner_lost(FIRST),
}
FORK_ROUTES: dict[ForkState, list[ForkEvent]] = {
    PENDING: [],
    CONFIRMED: [ACCEPTED],
    RELEASED: [HANDLES_GONE],
    DELETING: [HANDLES_GONE, ACCEPTED],
}


def fork_in(state: ForkState) -> tuple[RRefs, User]:
    """A user with a fork in this state, and with a child."""
    rrefs = RRefs(USER, 0)
    assert rrefs.create_user(OWNER, "Net") == (RREF, FIRST)
    assert rrefs.share_rref(RREF, FIRST, "Net", THIRD, made=0).fork == CHILD
    user = rrefs.users[FIRST]
    for event in FORK_ROUTES[state]:
        FORK_INPUTS[event](rrefs)
    assert user.state is state
    return rrefs, user


@pytest.mark.parametrize(
    ("state", "event"), [(state, event) for state, row in User.transitions.items() for event in row]
)
def test_a_fork_follows_its_table(state: ForkState, event: ForkEvent) -> None:
    rrefs, user = fork_in(state)
    FORK_INPUTS[event](rrefs)
    assert user.state is User.transitions[state][event]
    assert (FIRST in rrefs.users) == (user.state is not DELETED)
    assert user.history[-1] == (event, user.state) and len(user.history) == len(FORK_ROUTES[state]) + 1


@pytest.mark.parametrize("state", [CONFIRMED, DELETING])
def test_a_second_accept_of_a_fork_is_an_error_with_its_history(state: ForkState) -> None:
    rrefs, user = fork_in(state)
    with pytest.raises(InvalidTransitionError) as caught:
        FORK_INPUTS[ACCEPTED](rrefs)
    past = ", ".join(f"{event} → {after}" for event, after in user.history)
    assert str(caught.value) == f"User 1.1 is {state}, and 'accepted' is impossible then. Its last events: {past}"
    assert user.state is state


@pytest.mark.parametrize("state", [PENDING, CONFIRMED, RELEASED])
def test_the_end_of_the_children_is_no_event_before_a_fork_is_deleting(state: ForkState) -> None:
    rrefs, user = fork_in(state)
    FORK_INPUTS[CHILDREN_GONE](rrefs)
    assert user.state is state and not user.children


# -- an RRef at its owner
def drop_forks(owner: RRefs) -> None:
    for fork in [*owner.owned[RREF].forks]:
        owner.drop_fork(RREF, fork)


RREF_INPUTS: dict[RRefEvent, Callable[[RRefs], object]] = {
    CREATE_ARRIVED: lambda owner: owner.on_create(USER, RREF, FIRST, "Net"),
    CALL_DROPPED: lambda owner: owner.creation_failed(RREF, WorkerLostError("gone")),
    RETURNED: lambda owner: owner.creation_finished(RREF, "Net", failed=False),
    RAISED: lambda owner: owner.creation_finished(RREF, "", failed=True),
    FORKS_GONE: drop_forks,
}
RREF_ROUTES: dict[RRefState, list[RRefEvent]] = {
    NAMED: [],
    CREATED: [CREATE_ARRIVED],
    READY: [CREATE_ARRIVED, RETURNED],
    FAILED: [CREATE_ARRIVED, RAISED],
}


def rref_in(state: RRefState) -> tuple[RRefs, Owned]:
    """An owner with an RRef in this state, which THIRD has named first."""
    owner = RRefs(OWNER, 0)
    owner.on_fork_request(THIRD, ForkRequest(RREF, CHILD))
    owned = owner.owned[RREF]
    for event in RREF_ROUTES[state]:
        RREF_INPUTS[event](owner)
    assert owned.state is state
    return owner, owned


@pytest.mark.parametrize(("state", "event"), [*product(RREF_ROUTES, RREF_INPUTS)])
def test_an_rref_follows_its_table(state: RRefState, event: RRefEvent) -> None:
    owner, owned = rref_in(state)
    after = Owned.transitions[state].get(event)
    if after is None:
        with pytest.raises(InvalidTransitionError, match=rf"^Owned 1\.0 is {state}, and '{event}' is impossible"):
            RREF_INPUTS[event](owner)
        assert owned.state is state
    else:
        RREF_INPUTS[event](owner)
        assert owned.state is after and (RREF in owner.owned) == (after is not FREED)


def test_a_value_is_impossible_before_its_create_and_after_an_error() -> None:
    for state, past in ((NAMED, "none"), (FAILED, "create_arrived → created, raised → failed")):
        owner, _ = rref_in(state)
        with pytest.raises(InvalidTransitionError, match=f"'returned' is impossible then. Its last events: {past}$"):
            owner.creation_finished(RREF, "Net", failed=False)


def test_a_value_that_its_owner_shares_is_ready() -> None:
    owner = RRefs(OWNER, 0)
    rref = owner.new_id()
    fork = owner.share_rref(rref, None, "Net", USER, made=0)
    owned = owner.owned[rref]
    assert owned.state is READY
    owner.drop_fork(rref, fork.fork)
    assert owned.history == ((FORKS_GONE, FREED),)
