"""The ring of events: nothing while nobody listens, the newest when it overflows, and one count over everything."""

from __future__ import annotations

import threading

import pytest

from rpcbench.agent import bus as module
from rpcbench.agent.bus import Bus


@pytest.fixture
def bus() -> Bus:
    made = Bus()
    made.listening = True
    return made


def note(bus: Bus, *keys: int) -> None:
    for key in keys:
        bus.note("Changed", "table", str(key), {"value": key})


def test_nothing_is_kept_while_nobody_listens(bus: Bus) -> None:
    bus.listening = False
    note(bus, 1, 2)
    assert bus.drain(10) == ([], 0) and not bus.filled.is_set()
    bus.listening = True
    note(bus, 3)
    assert [event.seq for event in bus.drain(10)[0]] == [1], "and what nobody heard has no number"


def test_events_come_out_in_order_in_batches(bus: Bus) -> None:
    note(bus, 1, 2, 3)
    first, _ = bus.drain(2)
    assert [(event.seq, event.kind, event.table, event.key, event.row) for event in first] == [
        (1, "Changed", "table", "1", {"value": 1}), (2, "Changed", "table", "2", {"value": 2}),
    ]  # fmt: skip
    assert bus.filled.is_set(), "there is more"
    assert [event.key for event in bus.drain(2)[0]] == ["3"]
    assert not bus.filled.is_set()
    note(bus, 4)
    assert bus.filled.is_set()


def test_the_oldest_are_dropped_and_counted(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CAPACITY", 3)
    note(bus, *range(1, 6))
    events, dropped = bus.drain(10)
    assert ([event.seq for event in events], dropped) == ([3, 4, 5], 2)
    note(bus, 6)
    assert [bus.drain(10)[1], bus.drain(10)[1]] == [0, 0], "each is counted once"


def test_after_a_restart_only_what_is_newer_comes(bus: Bus) -> None:
    note(bus, 1, 2)
    assert bus.restart() == 2
    assert not bus.filled.is_set() and bus.drain(10) == ([], 0)
    note(bus, 3)
    assert [event.seq for event in bus.drain(10)[0]] == [3]


def test_numbers_have_no_gaps_whoever_counts(bus: Bus) -> None:
    threads = [threading.Thread(target=note, args=(bus, *range(500))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [event.seq for event in bus.drain(10_000)[0]] == list(range(1, 2001))


def test_tables_of_features_are_asked_when_wanted(bus: Bus) -> None:
    rows = {"a": {"value": 1}}
    bus.register("ops", lambda: dict(rows))
    rows["b"] = {"value": 2}
    assert bus.feature_tables() == {"ops": {"a": {"value": 1}, "b": {"value": 2}}}
