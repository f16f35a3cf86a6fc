"""The lead of an open world passes on: newcomers find somebody at every moment, and who dies is seen to by all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import address_of, config, until

from rpcbench.agent.core import Agent
from rpcbench.rpc.start import start_agent
from rpcbench.transport.meeting import Meeting
from rpcbench.words.errors import TurnedAwayError


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    """Three members of an open world; the first leads."""
    made = [start_agent(config(tmp_path, number, launched=False)) for number in range(3)]
    until(lambda: all(len(agent.members()) == 3 for agent in made))
    yield made
    for agent in reversed(made):
        agent.stop()


def test_newcomers_find_the_heir_before_it_has_done_anything(
    agents: list[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, heir, _ = agents
    monkeypatch.setattr(heir._peers.entrance, "lead", lambda me, view: None)
    first.shutdown()
    assert Meeting(tmp_path).find() == address_of(heir)


def test_who_asks_the_one_that_led_is_turned_away(agents: list[Agent], tmp_path: Path) -> None:
    agents[0].shutdown()
    with pytest.raises(TurnedAwayError, match="has lost who leads its world"):
        start_agent(config(tmp_path, 3, launched=False, led_by=0))


def test_the_heir_is_seen_to_die_by_those_who_had_no_connection_to_it(agents: list[Agent]) -> None:
    first, heir, third = agents
    first.shutdown()
    until(lambda: all(agent._peers.find(other) is not None for agent, other in ((heir, 2), (third, 1))))
    heir.stop()
    until(lambda: third.machine.ask(lambda node: node.members.ended))
    assert third.closing.wait(20)
