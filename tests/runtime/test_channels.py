"""Parcels: one-way, in order, opened on demand and recorded; a lost parcel is reported to its sender."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import until, world

from rpcbench import autograd
from rpcbench.base.errors import ConnectionLostError, SerializationError
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.channels import Opened, Place
from rpcbench.testing import Faults

pytestmark = pytest.mark.timeout(60)


class Inbox:
    """Keeps the parcels unopened, and the names of the threads on which they arrived."""

    def __init__(self) -> None:
        self.here: dict[Place, Opened] = {}
        self.lost: dict[Place, Exception] = {}
        self.threads: set[str] = set()

    def parcel_received(self, place: Place, values: Opened) -> None:
        self.threads.add(threading.current_thread().name)
        self.here[place] = values

    def delivery_failed(self, place: Place, error: Exception) -> None:
        self.lost[place] = error


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made


def inbox(agent: Agent, channel: str = "box") -> Inbox:
    made = Inbox()
    agent.calls.parcels.add_listener(channel, made)
    return made


def test_parcels_arrive_in_order_and_open_to_their_values(agents: list[Agent]) -> None:
    box = inbox(agents[1])
    for number in range(20):
        agents[0].calls.parcels.send_parcel(
            1, "box", (number,), "word", (torch.full((3,), float(number)), number, None)
        )
    until(lambda: len(box.here) == 20)
    assert list(box.here) == [(number,) for number in range(20)]
    tensor, number, nothing = box.here[7,]()
    assert tensor.tolist() == [7.0] * 3 and number == 7 and nothing is None


class Opens:
    """Counts how often it is unpickled."""

    made = 0

    def __reduce__(self) -> Any:
        return _open, ()


def _open() -> Opens:
    Opens.made += 1
    return Opens()


def test_a_parcel_is_unpickled_only_when_it_is_opened(agents: list[Agent]) -> None:
    box = inbox(agents[1])
    before = Opens.made
    agents[0].calls.parcels.send_parcel(1, "box", (0,), "word", Opens())
    agents[0].calls.parcels.send_parcel(1, "nobody listens", (1,), "word", Opens())
    agents[0].calls.parcels.send_parcel(1, "box", (2,), "word", 2)
    until(lambda: (2,) in box.here)
    assert Opens.made == before and (1,) not in box.here
    assert isinstance(box.here[0,](), Opens) and Opens.made == before + 1


def test_a_listener_that_stops_receives_no_more_parcels(agents: list[Agent]) -> None:
    box, other = inbox(agents[1]), inbox(agents[1], "other")
    agents[1].calls.parcels.remove_listener("box", other)
    assert agents[1].calls.parcels.open_channels() == ["box", "other"]
    agents[1].calls.parcels.remove_listener("box", box)
    agents[0].calls.parcels.send_parcel(1, "box", (0,), "word", 0)
    agents[0].calls.parcels.send_parcel(1, "other", (1,), "word", 1)
    until(lambda: bool(other.here))
    assert not box.here


def test_a_parcel_is_a_recorded_send_and_recv_that_cuts_the_graph(agents: list[Agent]) -> None:
    box = inbox(agents[1])
    weight = torch.ones(2, requires_grad=True)
    here, there = autograd.recorder(agents[0]), autograd.recorder(agents[1])
    context = here.new_context()
    with here.enter_context(context):
        agents[0].calls.parcels.send_parcel(1, "box", (0,), "activations", weight * 3)
    until(lambda: bool(box.here))
    found = box.here[0,]()
    assert found.requires_grad and found.is_leaf
    (sent,) = agents[0].tables()["contexts"][str(context)]["sends"]
    (received,) = agents[1].tables()["contexts"][str(context)]["recvs"]
    assert sent["message"] == received["message"] and (sent["to"], received["from"]) == (1, 0)
    here.release_context(context)
    until(lambda: str(context) not in agents[1].tables()["contexts"] and there.context_ids() == [])


def test_a_release_is_not_sent_to_the_members_listed_as_told(agents: list[Agent]) -> None:
    box = inbox(agents[1])
    here = autograd.recorder(agents[0])
    context = here.new_context()
    with here.enter_context(context):
        agents[0].calls.parcels.send_parcel(1, "box", (0,), "activations", torch.ones(2, requires_grad=True) * 3)
    until(lambda: bool(box.here))
    box.here[0,]()
    here.release_context(context, notified=[1])
    assert agents[0].call(1, abs, (-1,)).wait() == 1  # a release would have been sent before this
    assert str(context) in agents[1].tables()["contexts"]
    autograd.recorder(agents[1]).release_context(context, notified=[0])
    assert str(context) not in agents[1].tables()["contexts"]


def test_an_unpicklable_parcel_is_refused_with_its_path(agents: list[Agent]) -> None:
    with pytest.raises(SerializationError, match=r"activations\[1\].*lock"):
        agents[0].calls.parcels.send_parcel(1, "box", (0,), "activations", (1, threading.Lock()))


def test_a_lost_parcel_is_reported_to_its_sender(agents: list[Agent]) -> None:
    faults = Faults(seed=7, retry_seconds=0.02)
    agents[0].links.interceptors.replace_links(faults)
    faults.drop(lambda message: getattr(message, "place", None) == (0,))
    mine, box = inbox(agents[0]), inbox(agents[1])
    agents[0].calls.parcels.send_parcel(1, "box", (0,), "activations", torch.ones(2))
    agents[0].calls.parcels.send_parcel(1, "box", (1,), "activations", torch.ones(2))
    until(lambda: bool(mine.lost) and bool(box.here))
    assert list(mine.lost) == [(0,)] and type(mine.lost[0,]) is ConnectionLostError
    assert list(box.here) == [(1,)]
