"""The log of changed rows: none without listeners, each row once, and the newest if there are too many."""

from __future__ import annotations

import threading

import pytest

from rpcbench.base.ids import ChangedRows
from rpcbench.runtime import events as module
from rpcbench.runtime.events import EventLog


@pytest.fixture
def bus() -> EventLog:
    made = EventLog()
    made.listening = True
    return made


def note(bus: EventLog, *keys: int) -> None:
    for key in keys:
        bus.record_change("Changed", "table", str(key), lambda key=key: {"value": key})


def drained(bus: EventLog, most: int = 10) -> list[str]:
    return [key for rows in bus.drain_changes(most).rows.values() for key in rows]


def test_a_log_keeps_no_changes_while_it_is_not_listening(bus: EventLog) -> None:
    bus.listening = False
    note(bus, 1, 2)
    assert bus.drain_changes(10) == ChangedRows(0, {}, 0) and not bus.filled
    bus.listening = True
    note(bus, 3)
    assert bus.drain_changes(10) == ChangedRows(1, {"table": {"3": {"value": 3}}}, 0)


def test_changed_rows_are_drained_in_order_and_in_batches(bus: EventLog) -> None:
    note(bus, 1, 2, 3)
    assert bus.drain_changes(2) == ChangedRows(1, {"table": {"1": {"value": 1}, "2": {"value": 2}}}, 0)
    assert bus.filled, "there are more rows"
    assert bus.drain_changes(2) == ChangedRows(2, {"table": {"3": {"value": 3}}}, 0)
    assert not bus.filled and bus.drain_changes(2) == ChangedRows(2, {}, 0), "an empty batch has no number"
    note(bus, 4)
    assert bus.filled


def test_a_row_that_changes_often_is_built_once_with_its_latest_value(bus: EventLog) -> None:
    state, made = {"value": 0}, []

    def row() -> dict[str, int] | None:
        made.append(dict(state))
        return made[-1] if state else None

    for value in range(5):
        state["value"] = value
        bus.record_change("Changed", "table", "a", row)
    assert made == []
    assert bus.drain_changes(10).rows == {"table": {"a": {"value": 4}}} and made == [{"value": 4}]
    bus.record_change("Changed", "table", "a", row)
    state.clear()
    assert bus.drain_changes(10).rows == {"table": {"a": None}}


def test_the_oldest_changes_beyond_the_capacity_are_dropped_and_counted(
    bus: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CAPACITY", 3)
    note(bus, *range(1, 6), 5)
    batch = bus.drain_changes(10)
    assert ([*batch.rows["table"]], batch.dropped) == (["3", "4", "5"], 2)
    note(bus, 6)
    assert [bus.drain_changes(10).dropped, bus.drain_changes(10).dropped] == [0, 0], (
        "each dropped change is counted once"
    )


def test_only_later_changes_are_drained_after_a_restart(bus: EventLog) -> None:
    note(bus, 1, 2)
    assert drained(bus) == ["1", "2"]
    note(bus, 3)
    assert bus.restart_batches() == 1
    assert not bus.filled and drained(bus) == []
    note(bus, 4)
    assert bus.drain_changes(10) == ChangedRows(2, {"table": {"4": {"value": 4}}}, 0)


def test_no_change_from_several_threads_is_missed(bus: EventLog) -> None:
    threads = [threading.Thread(target=note, args=(bus, *range(n * 500, n * 500 + 500))) for n in range(4)]
    for thread in threads:
        thread.start()
    seen: list[str] = []
    while any(thread.is_alive() for thread in threads):
        seen += drained(bus)
    seen += drained(bus, 10_000)
    assert sorted(map(int, seen)) == list(range(2000))


def test_the_tables_of_features_are_built_on_request(bus: EventLog) -> None:
    rows = {"a": {"value": 1}}
    bus.register_table("ops", lambda: dict(rows))
    rows["b"] = {"value": 2}
    assert bus.feature_tables() == {"ops": {"a": {"value": 1}, "b": {"value": 2}}}


def test_a_feature_may_add_its_table_while_a_snapshot_is_made(bus: EventLog) -> None:
    bus.register_table("first", lambda: bus.register_table("second", dict) or {})
    assert bus.feature_tables() == {"first": {}}
    assert bus.feature_tables().keys() == {"first", "second"}
