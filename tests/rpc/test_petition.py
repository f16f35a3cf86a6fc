"""What a process that comes by itself hears before it is a member, and how long it takes "no" for a "not yet"."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcbench.rpc import petition
from rpcbench.transport.handshake import Identity
from rpcbench.transport.host import host_id
from rpcbench.words.config import WorldConfig
from rpcbench.words.errors import RefusedError

HELD = RefusedError("worker1 does not let this process in: rank 0 is not unique: notebook has it already")
LEADER = Identity("c", 1, "worker1", 0, host_id(), offer=3)


@pytest.fixture
def config(tmp_path: Path) -> WorldConfig:
    return WorldConfig("notebook", 0, "c", str(tmp_path), b"secret")


def answers(monkeypatch: pytest.MonkeyPatch, *said: Identity | RefusedError) -> Iterator[Identity | RefusedError]:
    """The last one again and again."""
    left = iter([*said, *[said[-1]] * 1000])

    def answer(*_: object) -> Identity:
        if isinstance(found := next(left), RefusedError):
            raise found
        return found

    monkeypatch.setattr(petition, "_first_answer", answer)
    return left


def test_who_had_the_rank_may_only_just_have_died(config: WorldConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, HELD, HELD, LEADER)
    asked = petition.ask(config, False, time.monotonic() + 60)
    assert (asked.led_by, asked.incarnation) == (1, 3)


def test_who_has_it_still_a_little_later_is_alive(config: WorldConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    left = answers(monkeypatch, HELD)
    begun = time.monotonic()
    with pytest.raises(RefusedError, match="notebook has it already"):
        petition.ask(config, False, begun + 60)
    assert len(list(left)) > 500, "it does not ask for all of the time that it has"
