"""The admission of a process that no launcher has started: refusals, repeated requests, worlds without a founder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import IncompleteWorldError, RefusedError, TurnedAwayError
from rpcbench.rpc import init
from rpcbench.rpc.init import start_agent
from rpcbench.transport.addresses import Opener
from rpcbench.transport.handshake import Identity
from rpcbench.transport.hosts import host_id
from rpcbench.transport.rendezvous import Rendezvous

HELD = RefusedError("worker1 does not let this process in: rank 0 is not unique: notebook has it already")
LEADER = Identity("c", 1, "worker1", 0, host_id(), offer=3)


@pytest.fixture
def config(tmp_path: Path) -> WorldConfig:
    return WorldConfig("notebook", 0, "c", str(tmp_path), b"secret")


def answers(monkeypatch: pytest.MonkeyPatch, *said: Identity | RefusedError) -> Iterator[Identity | RefusedError]:
    """Let the leader give these answers, and the last one repeatedly."""
    left = iter([*said, *[said[-1]] * 1000])

    def answer(*_: object) -> Identity:
        if isinstance(found := next(left), RefusedError):
            raise found
        return found

    monkeypatch.setattr(init, "_first_answer", answer)
    return left


def test_a_process_asks_again_for_a_rank_whose_holder_may_just_have_died(
    config: WorldConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, HELD, HELD, LEADER)
    asked = init.request_incarnation(config, False, time.monotonic() + 60)
    assert (asked.led_by, asked.incarnation) == (1, 3)


def test_a_rank_that_stays_taken_is_refused_long_before_the_deadline(
    config: WorldConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = answers(monkeypatch, HELD)
    begun = time.monotonic()
    with pytest.raises(RefusedError, match="notebook has it already"):
        init.request_incarnation(config, False, begun + 60)
    assert len(list(left)) > 500, "it stops asking long before its deadline"


def test_a_rank_that_waits_for_a_world_gets_the_error_of_its_founder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str, rank: int) -> WorldConfig:
        return WorldConfig(name, rank, "c", str(tmp_path), b"secret", world_size=2, launched=False)

    waiting = threading.Event()
    told: list[IncompleteWorldError] = []
    ask = init._first_answer

    def first_answer(*args: Any) -> Any:
        waiting.set()  # from here on it sees failures of founders
        return ask(*args)

    monkeypatch.setattr(init, "_first_answer", first_answer)

    def wait() -> None:
        with pytest.raises(IncompleteWorldError) as error:
            init.request_incarnation(config("worker1", 1), False, time.monotonic() + 60)
        told.append(error.value)

    waiter = threading.Thread(target=wait)
    listener, address = Opener(b"").open_listener(f"unix:{tmp_path}/other.sock")
    try:
        waiter.start()
        assert waiting.wait(20)
        time.sleep(0.05)  # times of files are coarser than the clock of the waiting thread
        (tmp_path / "draft").write_text(f"77 0 {address}")
        (tmp_path / "draft").replace(Rendezvous(tmp_path).path)  # atomically, as the waiting thread reads it repeatedly
        with pytest.raises(TurnedAwayError, match="already listens where this world meets"):
            start_agent(config("notebook", 0))
    finally:
        listener.close()
    waiter.join(20)
    assert "worker1: worker 0 could not found the world: another process already listens" in str(told[0])
    Rendezvous(tmp_path).path.unlink()
    start_agent(WorldConfig("notebook", 0, "c", str(tmp_path), b"secret", launched=False)).stop()
    assert Rendezvous(tmp_path).founding_failure(0.0) is None
