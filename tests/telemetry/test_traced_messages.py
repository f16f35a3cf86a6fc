"""Every message between members, told by both ends: each once, joined, bounded, and only while somebody asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from worlds import PATIENCE, config, until, world

from rpcbench.base.ids import MESSAGES, OWN
from rpcbench.protocol.delivery import SEQUENCE_COUNT_BITS
from rpcbench.rpc import remote, rpc_sync
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import events
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry import collector as collect
from rpcbench.telemetry import message_counts, message_views
from rpcbench.telemetry.collector import Collector, TracedCollector
from rpcbench.telemetry.last_trace import LastTrace
from rpcbench.telemetry.message_counts import MessageCount
from rpcbench.telemetry.message_views import (
    SHARED,
    ClockOffset,
    choose_better_clock,
    describe_message,
    estimate_clock,
    gather,
    messages_view,
)
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.trace import _world_since, trace
from rpcbench.testing import Faults, install
from rpcbench.wire.messages import KINDS

Rows = list[dict[str, Any]]


@pytest.fixture
def agents(tmp_path: Path, no_leaks: None) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


@pytest.fixture
def collector(agents: list[Agent]) -> Iterator[Collector]:
    """One that listens to all members already."""
    made = collect.current_collector()
    stop = made.subscribe(lambda: None, MESSAGES)
    assert made.settle(20)
    yield made
    stop()


def shown(collector: Collector, *kinds: str) -> Rows:
    """What the view shows of these kinds of messages, once all have told what they know."""
    assert collector.settle(20)
    return [row for row in messages_view(collector.world())["messages"].values() if row["kind"] in kinds]


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def test_a_call_is_two_messages_with_both_ends(collector: Collector) -> None:
    rpc_sync("worker1", square, (torch.ones(1000),))
    call, result = shown(collector, "Call", "Result")
    assert (call["from"], call["to"], call["label"], call["state"]) == (0, 1, "square", "received")
    assert (result["from"], result["to"], result["label"], result["state"]) == (1, 0, "square", "received")
    assert call["call"] == result["call"] != "" and call["bytes"] > 4000 < result["bytes"]
    assert call["sent"] <= call["received"] <= result["sent"] <= result["received"]
    assert call["tries"] == result["tries"] == 1


def test_messages_name_the_rrefs_they_are_about(collector: Collector) -> None:
    rref = remote("worker1", square, (torch.ones(2),))
    until(rref.confirmed_by_owner)
    name = str(rref._rref)
    rpc_sync("worker2", str, (rref,))
    (create,) = shown(collector, "Create")
    about = [row for row in shown(collector, "Call") if name in row["rrefs"]]
    assert create["rrefs"] == [name] and [row["to"] for row in about] == [2]
    del rref
    until(lambda: [row for row in shown(collector, "UserDelete") if row["rrefs"] == [name]] != [])


def test_a_message_to_oneself_is_one(collector: Collector) -> None:
    rpc_sync("notebook", square, (torch.ones(2),))
    call, result = shown(collector, "Call", "Result")
    assert {(row["from"], row["to"], row["state"]) for row in (call, result)} == {(0, 0, "received")}


def test_nothing_of_the_telemetry_itself_is_told(collector: Collector, agents: list[Agent]) -> None:
    agents[0].notify(1, "other", {"a": 1})
    assert [row["label"] for row in shown(collector, "Notice")] == ["other"]


def test_whoever_does_not_ask_for_messages_makes_none(agents: list[Agent]) -> None:
    collector = collect.current_collector()
    stop = collector.subscribe(lambda: None)
    assert collector.settle(20)
    rpc_sync("worker1", int)
    assert collector.settle(20)
    assert all("messages" not in member["tables"] for member in collector.world().values())
    more = collector.subscribe(lambda: None, MESSAGES)
    assert collector.settle(20)
    rpc_sync("worker1", int)
    assert len(shown(collector, "Call")) == 1
    more()
    until(lambda: not any(agent.machine.read_node(lambda node: node.delivery.observer) for agent in agents))
    assert all("messages" not in member["tables"] for member in collector.world().values())
    stop()


def test_a_message_is_under_way_until_it_has_come(collector: Collector, agents: list[Agent]) -> None:
    faults = install(Faults(), agents[0])
    faults.hold("Call")
    future = agents[0].call(1, square, (torch.ones(1),))
    (call,) = shown(collector, "Call")
    assert (call["state"], call["received"]) == ("under way", None)
    faults.heal()
    future.wait()
    (call,) = shown(collector, "Call")
    assert call["state"] == "received"


_gate = threading.Event()


def wait_at_the_gate() -> None:
    _gate.wait(PATIENCE)


def test_a_message_that_went_twice_is_one_that_was_tried_twice(collector: Collector, agents: list[Agent]) -> None:
    faults = install(Faults(retry_seconds=0.05), agents[0])
    faults.drop("Cancel")
    _gate.clear()
    agents[0].call(1, wait_at_the_gate, timeout=0.05)
    until(lambda: [row["state"] for row in shown(collector, "Cancel")] == ["received"])
    _gate.set()
    (cancel,) = shown(collector, "Cancel")
    assert cancel["tries"] >= 2


def test_a_message_that_is_lost_for_certain_is_told_so(collector: Collector, agents: list[Agent]) -> None:
    faults = install(Faults(retry_seconds=0.02), agents[0])
    faults.drop("Call")
    with pytest.raises(Exception, match="lost"):
        agents[0].call(1, square, (torch.ones(1),), timeout=0).wait()
    (call,) = shown(collector, "Call")
    assert call["state"] == "lost"


def test_a_source_that_was_closed_goes_on_for_the_next_panel_until_it_ends(agents: list[Agent]) -> None:
    last = agents[0].part(LastTrace)
    source = last.source()
    stop = source.subscribe(lambda: None)
    assert source.settle()  # all members report by now: a message of before has only one end in the view
    agents[0].call(1, square, (torch.ones(1),)).wait()
    assert source.settle()
    last.keep(source)
    last.keep(source)  # a page tells twice
    stop()
    agents[0].call(1, square, (torch.ones(1),)).wait()  # while no panel is open
    assert last.source() is source
    stop = source.subscribe(lambda: None)
    assert source.settle()
    calls = [row["state"] for row in messages_view(source.world())["messages"].values() if row["kind"] == "Call"]
    assert calls == ["received", "received"]
    stop()
    last.end()
    assert last.source() is not source and source.world() == {}


def test_what_a_member_left_out_is_counted(
    collector: Collector, agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MESSAGES_KEPT", 5)
    for _ in range(40):
        agents[2].notify(1, "other", None)
    assert collector.settle(20)
    assert collector.world()[2]["missed"] > 0 and collector.world()[2]["left_out"] >= collector.world()[2]["missed"]
    view = messages_view(collector.world())
    assert view["workers"]["2"]["left_out"] > 0


def half(what: str, peer: int, seq: int, time: float, kind: str = "Call", **more: Any) -> tuple[Any, ...]:
    about = {"call": 7, "rrefs": [], "context": 0, "label": "f", "bytes": 10, **more}
    return (what, peer, seq, time, kind, *about.values())


def picture(*halves: tuple[int, tuple[Any, ...]], clocks: dict[int, ClockOffset] | None = None) -> dict[int, Any]:
    made: dict[int, Any] = {}
    for member in range(3):
        clock = (clocks or {}).get(member, SHARED)
        made[member] = {"name": f"m{member}", "id": member, "state": "up", "incarnation": 0, "clock": clock}
        made[member] |= {"left_out": 0, "missed": 0, "trimmed": 0, "counted": 0, "tables": {"messages": {}}}
    count = MessageCount()
    for member, one in halves:
        made[member]["trimmed"] += gather(made[member]["tables"]["messages"], member, [one])
        made[member]["counted"] += count.count_new(member, [one])
    return made


def test_of_one_member_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_views, "KEPT", 10)
    made = picture(*[(0, half("sent", 1, n, float(n))) for n in range(25)])
    assert [row["sent"] for row in made[0]["tables"]["messages"].values()] == [float(n) for n in range(15, 25)]
    view = messages_view(made)
    assert view["counts"] == {"messages": {"all": 25}} and view["workers"]["0"]["left_out"] == 0
    assert summarize_view(view).startswith("3 members, 10 messages, 10 in flight, last 10 of 25 shown\n")


def test_of_all_members_the_latest_are_shown_and_the_others_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_views, "KEPT", 10)
    made = picture(*[(n % 2, half("sent", 2, n, float(n))) for n in range(20)])
    view = messages_view(made)
    assert sorted(row["sent"] for row in view["messages"].values()) == [float(n) for n in range(10, 20)]
    assert view["counts"] == {"messages": {"all": 20}}


def test_a_message_counts_once_though_both_its_ends_drop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_views, "KEPT", 10)
    ends = [(end, n) for n in range(25) for end in ((0, "sent", 1), (1, "received", 0))]
    made = picture(*[(member, half(what, peer, n, float(n))) for (member, what, peer), n in ends])
    assert messages_view(made)["counts"] == {"messages": {"all": 25}}


def test_a_message_counts_once_whichever_end_reports_it_first_and_though_the_sender_never_does() -> None:
    count = MessageCount()
    first = [count.count_new(1, [half("received", 0, n, 1.0)]) for n in (0, 1, 2, 1)]
    assert first == [1, 1, 1, 0]
    assert count.count_new(0, [half("sent", 1, n, 1.0) for n in (1, 2, 3, 4)]) == 2  # it began after the first
    assert count.count_new(0, [half("sent", 1, 2, 2.0), half("lost", 1, 3, 2.0)]) == 0  # again, and lost
    assert count.count_new(1, [half("received", 0, n, 3.0) for n in (0, 3, 4, 5)]) == 1  # the last was not reported
    restarted = 1 << SEQUENCE_COUNT_BITS
    assert count.count_new(0, [half("sent", 1, restarted + n, 4.0) for n in range(3)]) == 3
    assert count.count_new(0, [half("sent", 2, n, 5.0) for n in range(3)]) == 3


def test_calls_of_this_package_do_not_count_but_for_cells() -> None:
    count = MessageCount()
    own, cell = {"call": OWN | 5, "label": "meet"}, {"call": OWN | 6, "label": "this cell"}
    assert [count.count_new(0, [half("sent", 1, n, 1.0, **about)]) for n, about in enumerate((own, cell))] == [0, 1]
    answers = [half("sent", 0, n, 2.0, "Result", call=OWN | n, label="") for n in (5, 6)]
    assert [count.count_new(1, [one]) for one in answers] == [0, 1]
    assert count.count_new(1, [half("sent", 0, 7, 2.0, "View"), half("sent", 0, 8, 2.0, "Notice", label="look")]) == 0


def test_of_a_receiver_that_dropped_rows_only_what_is_older_than_the_kept_ones_is_untold() -> None:
    made = picture((0, half("sent", 1, 1, 4.5)), (0, half("sent", 1, 2, 5.5)), (1, half("sent", 2, 1, 5.0)))
    made[1]["trimmed"] = 3
    states = {key: row["state"] for key, row in messages_view(made)["messages"].items() if row["from"] == 0}
    assert states == {"0>1.1": "untold", "0>1.2": "under way"}
    made[1]["clock"] = ClockOffset(1.0, 0.0)
    assert {row["state"] for row in messages_view(made)["messages"].values()} == {"under way"}


def test_the_zero_of_times_stays_when_its_message_is_dropped() -> None:
    world: dict[int, Any] = {}
    source = TracedCollector(cast(Collector, SimpleNamespace(world=lambda: world)))
    assert "zero" not in str(source.world())
    other = {1: ClockOffset(100.0, 0.25)}
    world |= picture((0, half("sent", 1, 1, 5.0)), (1, half("received", 0, 1, 104.0)), clocks=other)
    first = messages_view(source.world())["zero"]["first"]
    assert first["at"] == 4.0 and abs(first["since_1970"] - time.time() - 4.0 + time.monotonic()) < 5
    world |= picture((0, half("sent", 1, 2, 9.0)))
    world[1]["tables"].clear()
    assert len(rows := messages_view(source.world())["messages"]) == 1 and "0>1.2" in rows
    assert messages_view(source.world())["zero"]["first"] == first


def test_a_trace_counts_only_what_it_left_out_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_views, "KEPT", 10)
    before = picture(*[(0, half("sent", 1, n, float(n))) for n in range(10)])
    few = picture(*[(0, half("sent", 1, n, float(n))) for n in range(15)])
    many = picture(*[(0, half("sent", 1, n, float(n))) for n in range(25)])
    assert messages_view(_world_since(few, before, 10.0))["counts"] == {}
    assert messages_view(_world_since(many, before, 10.0))["counts"] == {"messages": {"all": 15}}


def test_halves_are_joined_whichever_comes_first() -> None:
    one, other = (0, half("sent", 1, 5, 1.0)), (1, half("received", 0, 5, 2.0))
    views = [messages_view(picture(*order))["messages"] for order in ((one, other), (other, one))]
    assert views[0] == views[1]
    ((key, row),) = views[0].items()
    assert (key, row["sent"], row["received"], row["state"]) == ("0>1.5", 1.0, 2.0, "received")


def test_times_of_another_host_are_put_on_our_clock() -> None:
    made = picture(
        (0, half("sent", 1, 5, 1.0)), (1, half("received", 0, 5, 101.5)), clocks={1: ClockOffset(100.0, 0.25)}
    )  # fmt: skip
    view = messages_view(made)
    (row,) = view["messages"].values()
    assert (row["sent"], row["received"]) == (1.0, 1.5) and view["clocks"] == {"1": {"error": 0.25}}


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "under way"),
        ({"state": "lost"}, "untold"),
        ({"state": "suspect"}, "under way"),
        ({"state": "left"}, "untold"),
        ({"missed": 2}, "untold"),
        ({"since": 0.5}, "under way"),
        ({"since": 2.0}, "untold"),
    ],
)
def test_what_has_not_come_is_under_way_or_lost_with_its_end(change: dict[str, Any], state: str) -> None:
    made = picture((0, half("sent", 1, 5, 1.0)))
    made[1] |= change
    assert [row["state"] for row in messages_view(made)["messages"].values()] == [state]


def test_what_a_lost_member_has_sent_and_nobody_has_received_is_lost() -> None:
    made = picture((0, half("sent", 1, 5, 1.0)))
    made[0]["state"] = "lost"
    assert [row["state"] for row in messages_view(made)["messages"].values()] == ["lost"]


@pytest.mark.parametrize(("kind", "state"), [("Call", "lost"), ("UserDelete", "untold"), ("Notice", "untold")])
def test_only_what_somebody_waits_for_is_lost_with_a_member_that_leaves_in_good_order(kind: str, state: str) -> None:
    made = picture((0, half("sent", 1, 5, 1.0, kind)), (0, half("lost", 1, 5, 2.0, kind)))
    made[1]["state"] = "left"
    assert [row["state"] for row in messages_view(made)["messages"].values()] == [state]


@pytest.mark.parametrize(
    ("kind", "about"),
    [("View", {}), ("Ready", {}), ("Notice", {"label": "look"}), ("Notice", {"label": "leave"})],
)
def test_messages_by_which_the_world_holds_together_are_no_programs(kind: str, about: dict[str, Any]) -> None:
    assert messages_view(picture((0, half("sent", 1, 5, 1.0, kind, **about))))["messages"] == {}


def test_calls_of_this_package_are_hidden_but_for_cells() -> None:
    own = {"label": "meet", "call": OWN | 5}, {"label": "this cell", "call": OWN | 6}, {"label": "meet", "call": 5}
    halves = [(0, half("sent", 1, n, float(n), **{"call": 0, **about})) for n, about in enumerate(own)]
    answers = [(1, half("sent", 0, n, 5.0 + n, "Result", call=OWN | n, label="")) for n in (5, 6)]
    rows = messages_view(picture(*halves, *answers))["messages"].values()
    assert [(row["call"], row["words"]) for row in rows] == [
        ("0.cell6", "run this cell"), ("0.5", "call meet"), ("0.cell6", "result of this cell"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "about", "words"),
    [
        ("Call", "train", "call train"),
        ("Create", "Linear", "remote Linear"),
        ("Result", "", "result"),
        ("ForkAccept", "RRef 0.4", "confirmed user of RRef 0.4"),
        ("Parcel", "B2 for stage 0", "gradient of micro-batch 2 → stage 0"),
        ("Parcel", "F11 for stage 1", "activations of micro-batch 11 → stage 1"),
        ("Parcel", "A for replica 2 of stage 1", "ready → replica 2 of stage 1"),
        ("Parcel", "a channel of somebody", "a channel of somebody"),
        ("Notice", "cell", "output of a cell"),
        ("Notice", "other", "other"),
        ("Call", "pipeline run_step", "call pipeline step"),
        ("Unheard", "of", "Unheard"),
    ],
)
def test_a_message_in_plain_words(kind: str, about: str, words: str) -> None:
    assert describe_message(kind, about) == words


def test_gradients_between_stages_are_a_family_of_their_own() -> None:
    family_of = message_views.family_of
    parcels = [family_of("Parcel", describe_message("Parcel", f"{letter}2 for stage 0")) for letter in "FB"]
    assert [*parcels, family_of("Create", ""), family_of("Unknown", "")] == ["pipeline", "gradient", "call", "other"]


def test_each_kind_of_message_has_words_or_is_not_shown() -> None:
    known = {*message_views._WORDS, *message_counts.BENCH_KINDS, "Notice", "Parcel"}
    assert known == {kind.__name__ for kind in KINDS}


def test_what_a_fetch_is_about_is_its_rref() -> None:
    made = picture(
        (0, half("sent", 1, 5, 1.0, "Fetch", label="", rrefs=["0.4"])), (1, half("sent", 0, 6, 2.0, "Result", label=""))
    )  # fmt: skip
    assert [row["words"] for row in messages_view(made)["messages"].values()] == [
        "fetch RRef 0.4",
        "result of RRef 0.4",
    ]


def test_an_answer_has_the_label_of_its_call() -> None:
    made = picture((0, half("sent", 1, 5, 1.0)), (1, half("sent", 0, 6, 2.0, "Result", label="")))
    assert [(row["kind"], row["label"]) for row in messages_view(made)["messages"].values()] == [
        ("Call", "f"), ("Result", "f"),
    ]  # fmt: skip


def test_an_estimate_is_right_where_both_ways_take_as_long_and_says_how_wrong_it_may_be() -> None:
    assert estimate_clock(10.0, 110.5, 110.75, 11.25) == ClockOffset(100.0, 0.5)
    skewed = estimate_clock(10.0, 111.0, 111.0, 11.0)  # all of the second was the way there
    assert abs(skewed.ahead - 100.0) <= skewed.error
    assert (
        choose_better_clock(skewed, ClockOffset(99.0, 0.1)) == ClockOffset(99.0, 0.1)
        and choose_better_clock(ClockOffset(1.0, 0.1), skewed).error == 0.1
    )


def test_the_clock_of_another_host_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members that take each other for one on another host; in truth they have one clock."""
    with world(tmp_path, 1) as (agent,):
        monkeypatch.setenv("RPCBENCH_HOST_ID", "elsewhere")
        other = start_agent(config(tmp_path, 1))
        try:
            collector = collect.current_collector()
            stop = collector.subscribe(lambda: None, MESSAGES)
            until(lambda: 1 in collector.world() and collector.world()[1]["clock"] != SHARED)
            clock = collector.world()[1]["clock"]
            assert clock.error > 0 and abs(clock.ahead) <= clock.error
            assert collector.world()[0]["clock"] == SHARED and agent.running
            stop()
        finally:
            other.stop()


def received(world: Any) -> set[str]:
    return {row["kind"] for row in messages_view(world)["messages"].values() if row["state"] == "received"}


def test_a_trace_has_what_followed_from_its_body_and_nothing_from_before(agents: list[Agent]) -> None:
    collector = collect.current_collector()
    stop = collector.subscribe(lambda: None, MESSAGES)
    rpc_sync("worker1", abs, (-1,))
    with trace() as seen:
        rref = remote("worker1", dict)
        rref.to_here()
        del rref
        until(lambda: "UserDelete" in received(collector.world()))
    assert seen.complete
    rows = seen.view["messages"].values()
    assert {"Create", "Fetch", "UserDelete"} <= {row["kind"] for row in rows}
    assert "abs" not in {row["label"] for row in rows} and {row["state"] for row in rows} == {"received"}
    assert str(seen).startswith(f"3 members, {len(rows)} messages\n")
    stop()


def test_a_trace_says_where_not_all_have_told(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    settled = Collector.settle
    monkeypatch.setattr(Collector, "settle", lambda self: settled(self, 0.2))
    faults = install(Faults(), agents[2])
    faults.hold("Notice")
    with trace() as seen:
        until(lambda: all(agent.machine.read_node(lambda node: node.delivery.observer) for agent in agents[:2]))
        rpc_sync("worker1", abs, (-1,))
        until(lambda: "abs" in str(messages_view(collect.current_collector().world())))
    assert not seen.complete and any(row["label"] == "abs" for row in seen.view["messages"].values())
    faults.heal()


def test_a_message_of_which_only_the_loss_was_reported_has_its_line() -> None:
    made = messages_view(picture((0, half("sent", 1, 4, 1.0)), (0, half("lost", 1, 5, 1.5))))
    told = summarize_view(made)
    assert "500.0 ms  m0 → m1: " in told and "lost" in told
