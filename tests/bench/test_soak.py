"""The soak test, in small runs: it finds and reports leaks."""

from __future__ import annotations

import pytest

from benchmarks import command, soak
from benchmarks.soak import SLACK, Plan, Reading, growth
from rpcbench.base.errors import RpcError
from rpcbench.rpc import RRef
from rpcbench.runtime import current

_kept: list[object] = []


@pytest.mark.process
def test_a_soak_without_leaks_leaves_no_rows_after_each_round(
    no_leaks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    readings = soak.soak(Plan(calls=300, rrefs=60, rounds=3))
    assert [list(found) for found in readings] == [["notebook", "worker1", "worker2", "worker3"]] * 3
    assert all(reading.rows == 0 < reading.own for found in readings for reading in found.values())


@pytest.mark.process
def test_an_rref_that_is_never_dropped_is_reported(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_QUIET_SECONDS", 1.0)
    monkeypatch.setattr(soak, "_call", lambda cluster, count: cluster.rpc_sync("worker2", _keep, (RRef([1]),)))
    with pytest.raises(RpcError, match=r"rows that do not go: \{'notebook': 1, 'worker2': 1\}"):
        soak.soak(Plan(calls=1, rrefs=0, rounds=1))


def _keep(rref: RRef[list[int]]) -> None:
    _kept.append(rref)


def test_a_member_that_still_grows_at_the_end_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = Reading(5 << 20, 0)
    filled, leaking = ([flat._replace(own=(5 + n) << 20) for n in grown] for grown in ([0, 4, 6, 7, 7, 7], range(6)))
    readings = [{"a": flat, "b": b, "c": c} for b, c in zip(filled, leaking, strict=True)]
    assert growth(readings) == {"a": 0, "b": 0, "c": 2 << 20} and SLACK < 2 << 20
    monkeypatch.setattr(soak, "soak", lambda plan: readings)
    with pytest.raises(RpcError, match=r"still grew: c by 2\.0 MB$"):
        command.run_soak(quick=True)
    shown = capsys.readouterr().out
    assert "5.00" in shown and "+30.000" in shown, "2 MB in 667 of 2000 calls"
    monkeypatch.setattr(soak, "soak", lambda plan: [{"a": flat}] * 9)
    command.run_soak(quick=True)
    assert current.find_current() is None


@pytest.mark.process
def test_a_small_leak_in_each_call_is_measured(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_call", lambda cluster, count: cluster.rpc_sync("worker2", _keep_more, (count,)))
    grown = growth(soak.soak(Plan(calls=3 * 30_000, rrefs=0, rounds=3)))
    assert grown["worker2"] > SLACK > max(grown["worker1"], grown["worker3"])


def _keep_more(count: int) -> None:
    """Keep as much memory as `count` calls that leave one tuple each."""
    _kept.append([(number,) for number in range(count)])
