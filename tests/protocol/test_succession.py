"""The succession of leaders of an open world in thousands of interleavings, and mutants that must be found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import simulation
from hypothesis import given
from hypothesis import strategies as st
from sizes import examples
from succession import Comer, Succession

from rpcbench.protocol import effects as fx
from rpcbench.protocol.membership import Membership
from rpcbench.protocol.node import Node
from rpcbench.wire import messages as m

seeds = st.integers(0, 1 << 32)


def run(seed: int, ids: int, actions: int, deaths: int = 0, cuts: int = 0, lossy: bool = False) -> Succession:
    """Processes join and leave at random, some die, some connections break; then all events run out."""
    world = Succession(seed, ids, lossy)
    pick = world.random
    with world.telling():
        for _ in range(actions):
            id_ = pick.choice(world.ids)
            if pick.random() < 0.5 or id_ in world.dead:
                world.within(20, -1, partial(world.come, id_))
            else:
                world.within(20, -1, world.members[id_].leave)
            for _ in range(pick.randrange(12)):
                if world.events:
                    world.step()
            if deaths and pick.random() < 0.1:
                deaths -= 1
                world.kill(pick.choice(world.ids))
            if cuts and pick.random() < 0.1:
                cuts -= 1
                world.cut(pick.choice(world.ids), pick.choice(world.ids))
        world.settle()
        world.check_quiet()
    return world


@given(seeds, st.integers(2, 5), st.integers(1, 40), st.integers(0, 3), st.booleans())
@examples(300)
def test_an_open_world_survives_random_joins_and_leaves(
    seed: int, ids: int, actions: int, cuts: int, lossy: bool
) -> None:
    run(seed, ids, actions, 0, cuts, lossy)


@given(seeds, st.integers(2, 5), st.integers(1, 40), st.integers(1, 3), st.integers(0, 3), st.booleans())
@examples(500)
def test_an_open_world_survives_random_joins_leaves_and_deaths(
    seed: int, ids: int, actions: int, deaths: int, cuts: int, lossy: bool
) -> None:
    run(seed, ids, actions, deaths, cuts, lossy)


def test_worlds_of_the_simulation_are_handed_over_several_times() -> None:
    """The tests above rely on it: on average, a world has more than one hand-over."""
    worlds = [run(seed, 5, 40) for seed in range(20)]
    handed = sum("the world is found at" in line for world in worlds for line in world.history)
    assert handed > sum(world.founded for world in worlds)


# -- mutants
def early_words_are_dropped(patch: pytest.MonkeyPatch) -> None:
    asked = Membership.answer_request

    def drop(self: Membership, source: int, message: Any) -> Any:
        return asked(self, source, message) if self.is_leader or isinstance(message, m.Join) else ([], [])

    patch.setattr(Membership, "answer_request", drop)


def nobody_asks_the_new_leader_again(patch: pytest.MonkeyPatch) -> None:
    follow = Membership._follow_leader
    patch.setattr(Membership, "_follow_leader", lambda self: follow(self) if self.is_leader else (follow(self)[0], []))


def old_views_are_followed(patch: pytest.MonkeyPatch) -> None:
    on_view = Membership.on_view

    def follow(self: Membership, view: m.View) -> Any:
        self.epoch = min(self.epoch, view.epoch - 1)
        return on_view(self, view)

    patch.setattr(Membership, "on_view", follow)


def who_leaves_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    def flush(self: Node, then: Callable[[], object]) -> fx.Effects:
        then()
        return []

    patch.setattr(Node, "request_flush", flush)


def incarnations_are_given_out_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "next_incarnation", lambda self, worker: 0)


def nobody_watches_the_new_leader(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Comer, "_watch", lambda self, effect: None)


def notes_of_old_leaders_count(patch: pytest.MonkeyPatch) -> None:
    def note(self: Succession, by: Comer, effect: fx.HandedOver) -> None:
        self.place = (by.epoch, effect.epoch, effect.heir.id)

    patch.setattr(Succession, "note", note)


MUTANTS = [
    early_words_are_dropped,
    nobody_asks_the_new_leader_again,
    old_views_are_followed,
    who_leaves_waits_for_nobody,
    incarnations_are_given_out_again,
    nobody_watches_the_new_leader,
    notes_of_old_leaders_count,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_simulation_finds_a_bug_in_the_succession(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "STEPS", 2_000)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(2_000):
            run(seed, 4, 30, seed % 2, 0, seed % 3 == 0)
