"""Leadership: a closed world begins when all members know that it is complete. In an open world it passes on: newcomers
find a leader at each moment, and all members notice its death."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import address_of, config, until

from rpcbench.base.errors import TurnedAwayError
from rpcbench.rpc.init import start_agent
from rpcbench.runtime.agent import Agent
from rpcbench.transport.base import Link
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.wire.messages import View


class LateNews(Link):
    """Views are not sent until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def handle_outgoing(self, to: int, seq: int, message: Any, may_wait: bool) -> None:
        if isinstance(message, View):
            threading.Thread(target=self._pass_on, args=(to, seq, message), daemon=True).start()
        else:
            super().handle_outgoing(to, seq, message, may_wait)

    def _pass_on(self, to: int, seq: int, message: Any) -> None:
        assert self.go.wait(20)
        super().handle_outgoing(to, seq, message, True)


def test_the_leader_of_a_closed_world_is_ready_only_when_all_members_know_it_is_complete(tmp_path: Path) -> None:
    made: list[Agent] = []
    link = LateNews()

    def join(number: int, link: Link | None = None) -> None:
        start_agent(config(tmp_path, number, world_size=2, launched=False), link, parts=(made.append,))

    leading, following = (threading.Thread(target=join, args=each) for each in ((0, link), (1,)))
    try:
        leading.start()
        until(lambda: bool(made))
        following.start()
        assert made[0].links.bootstrap.complete.wait(20)
        leading.join(0.5)  # time to return, for a member that does not wait for the others
        assert leading.is_alive()
        link.go.set()
        leading.join(20)
        following.join(20)
        assert not leading.is_alive() and not following.is_alive()
    finally:
        for agent in made:
            agent.stop()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    """Three members of an open world; the first one leads it."""
    made = [start_agent(config(tmp_path, number, launched=False)) for number in range(3)]
    until(lambda: all(len(agent.members()) == 3 for agent in made))
    yield made
    for agent in reversed(made):
        agent.stop()


def test_newcomers_find_the_heir_before_it_begins_to_lead(
    agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, heir, _ = agents
    monkeypatch.setattr(heir.links.peers.acceptor, "publish_leadership", lambda me, view: None)
    first.shutdown()
    assert Rendezvous(tmp_path).find_leader() == address_of(heir)


def test_a_join_at_the_former_leader_is_turned_away(agents: list[Agent], tmp_path: Path) -> None:
    agents[0].shutdown()
    with pytest.raises(TurnedAwayError, match="has lost the leader of its world"):
        start_agent(config(tmp_path, 3, launched=False, led_by=0))


def test_the_death_of_the_heir_ends_the_world_of_the_remaining_member(agents: list[Agent]) -> None:
    first, heir, third = agents
    first.shutdown()
    until(lambda: all(agent.links.peers.find(other) is not None for agent, other in ((heir, 2), (third, 1))))
    heir.stop()
    until(lambda: third.machine.read_node(lambda node: node.members.ended))
    assert third.links.closing.wait(20)
