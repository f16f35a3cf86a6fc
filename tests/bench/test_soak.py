"""The soak in small: it finds what stays, and says so."""

from __future__ import annotations

import pytest

from rpcbench.agent import current
from rpcbench.bench import command, soak
from rpcbench.bench.soak import SLACK, Plan, Reading, growth
from rpcbench.rpc import RRef
from rpcbench.words.errors import RpcError

_kept: list[object] = []


@pytest.mark.process
def test_a_small_soak_is_quiet_after_each_round(no_leaks: None, capsys: pytest.CaptureFixture[str]) -> None:
    readings = soak.soak(Plan(calls=300, rrefs=60, rounds=3))
    assert [list(found) for found in readings] == [["notebook", "worker1", "worker2", "worker3"]] * 3
    assert all(reading.rows == 0 < reading.uss <= reading.rss for found in readings for reading in found.values())


@pytest.mark.process
def test_an_rref_that_stays_is_found(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_QUIET_SECONDS", 1.0)
    monkeypatch.setattr(soak, "_call", lambda cluster, count: cluster.rpc_sync("worker2", _keep, (RRef([1]),)))
    with pytest.raises(RpcError, match=r"rows that do not go: \{'notebook': 1, 'worker2': 1\}"):
        soak.soak(Plan(calls=1, rrefs=0, rounds=1))


def _keep(rref: RRef[list[int]]) -> None:
    _kept.append(rref)


def test_who_grows_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flat = Reading(9 << 20, 5 << 20, 0)
    readings = [{"a": flat, "b": flat._replace(uss=(5 + n) << 20)} for n in range(9)]
    assert growth(readings) == {"a": 0, "b": 6 << 20} and SLACK < 6 << 20, "the first rounds fill caches"
    monkeypatch.setattr(soak, "soak", lambda plan: readings)
    with pytest.raises(RpcError, match=r"^b has grown by 6\.0 MB$"):
        command.run_soak(quick=True)
    assert "9.0 / 5.0" in capsys.readouterr().out
    monkeypatch.setattr(soak, "soak", lambda plan: [{"a": flat}] * 9)
    command.run_soak(quick=True)
    assert current.find() is None
