"""Drills: faults on all members, only for messages of the program, and equal for equal seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import config, nothing_left, until, world

from rpcbench.base.errors import ConnectionLostError, RpcTimeoutError
from rpcbench.base.ids import OWN
from rpcbench.rpc import rpc_async, rpc_sync
from rpcbench.rpc.init import start_agent
from rpcbench.runtime.agent import Agent
from rpcbench.testing import Drill, faults
from rpcbench.testing.faults import DrillFaults, Settings
from rpcbench.wire import messages as m


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made


def fates(seed: int, between: bool = False) -> list[str]:
    """The fates of fifty messages; `between` them rpcbench sends its own, which take sequence numbers, too."""
    link = DrillFaults(0, Settings(drop=0.3, duplicate=0.3, seed=seed))
    link.attach_callbacks(lambda *sent: None, lambda *came: None)
    seq = iter(range(1000))
    for call in range(50):
        for _ in range(call % 3 if between else 0):
            link.handle_outgoing(1, next(seq), m.Notice("cell", b""), False)
        link.handle_outgoing(1, next(seq), m.Cancel(call), False)
    return [line.rpartition(")")[2] for line in link.history]


def test_a_seed_gives_the_same_faults_with_and_without_messages_of_rpcbench_itself() -> None:
    assert fates(7) == fates(7) == fates(7, between=True) != fates(8)
    assert len(fates(7, between=True)) == 50 and len(set(fates(7))) > 2


def test_a_drill_spares_the_messages_of_rpcbench_itself() -> None:
    link = DrillFaults(0, Settings(drop=1.0))
    sent: list[m.Message] = []
    link.attach_callbacks(lambda to, seq, message, may_wait: sent.append(message), lambda *came: None)
    spared = [m.Notice("cell", b""), m.Seen(3, ()), m.Cancel(OWN | 4), m.Ready(True)]
    for seq, message in enumerate([*spared, m.Cancel(4)]):
        link.handle_outgoing(1, seq, message, False)
    assert sent == spared
    assert link.message_counts() == {"sent": 1, "lost": 1, "late": 0, "twice": 0}


def test_a_long_drill_keeps_the_latest_messages_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_REMEMBERED", 3)
    link = DrillFaults(0, Settings(drop=1.0))
    for seq in range(10):
        link.handle_outgoing(1, seq, m.Cancel(seq), False)
    assert link.message_counts() == {"sent": 10, "lost": 10, "late": 0, "twice": 0}
    assert len(link._tries) == len(link._numbers) == len(link.history) == 3


def test_a_drill_disturbs_all_members_until_it_is_switched_off(agents: list[Agent]) -> None:
    drill = Drill.on(drop=1.0)
    assert agents[0].call(1, divmod, (17, 5), own=True).wait() == (3, 2)
    for agent in agents:
        with pytest.raises(RpcTimeoutError):
            agent.call(1 - agent.id, divmod, (17, 5), timeout=0.05).wait()
    until(lambda: not any(agent.tables()["calls"] for agent in agents))
    counts = drill.off()
    assert drill.settings is None and counts["lost"] == counts["sent"] >= 2
    assert [len(agent.links.interceptors.all) for agent in agents] == [1, 1]
    assert rpc_sync("worker1", divmod, (17, 5)) == (3, 2)
    assert drill.off() == {}


def test_a_call_that_a_drill_has_lost_fails_after_the_end_of_the_drill(agents: list[Agent]) -> None:
    drill = Drill.on(drop=1.0)
    future = rpc_async("worker1", divmod, (17, 5), timeout=0)
    drill.off()
    with pytest.raises(ConnectionLostError, match="divmod"):
        future.wait()
    nothing_left(agents)


def test_a_second_drill_replaces_the_first(agents: list[Agent]) -> None:
    Drill.on(drop=1.0)
    drill = Drill.on(delay=0.01, seed=3)
    assert rpc_sync("worker1", divmod, (17, 5)) == (3, 2)
    assert drill is Drill.of() and drill.settings == Settings(delay=0.01, seed=3)
    assert drill.off()["late"] == 2
    nothing_left(agents)


def test_a_drill_also_disturbs_members_that_join_later(agents: list[Agent], tmp_path: Path) -> None:
    drill = Drill.on(drop=1.0)
    with contextlib.ExitStack() as undo:
        late = start_agent(config(tmp_path, 2))
        undo.callback(late.stop)
        until(lambda: len(late.links.interceptors.all) == 2, "the faults")
        drill.off()
        assert len(late.links.interceptors.all) == 1
