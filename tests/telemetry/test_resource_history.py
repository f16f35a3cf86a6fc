"""The history of figures: bounded, true of each second, with gaps where nobody looked; and its views as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from worlds import until, world

from rpcbench.base.errors import format_bytes
from rpcbench.rpc import rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.events import EventLog
from rpcbench.telemetry import collector
from rpcbench.telemetry.recording import Player, load_record, record
from rpcbench.telemetry.resource_history import ResourceHistory
from rpcbench.telemetry.resource_views import resources_view, traffic_view
from rpcbench.telemetry.summary import summarize_view

GPU = {"name": "0 H100", "memory": 20_000_000_000, "total": 80_000_000_000, "use": 0.5}


class Polled:
    """A history, and members that answer twice a second, in a time of their own."""

    def __init__(self, members: int) -> None:
        self.history = ResourceHistory(
            EventLog(), zero=0.0
        )  # else the first second would be a part of one, of any length
        self.now, self.question = 1000.0, 0
        self.figures: dict[int, dict[str, Any]] = {i: {} for i in range(members + 1)}
        self.states = dict.fromkeys(self.figures, "up")
        self.lives = dict.fromkeys(self.figures, 0)
        self.late: set[int] = set()
        self.sent: dict[int, dict[str, list[int]]] = {i: {} for i in self.figures}

    def world(self) -> dict[int, Any]:
        return {
            i: {
                "id": i, "name": f"w{i}", "state": self.states[i], "incarnation": self.lives[i], "left_out": 0,
                "tables": {"health": {str(i): dict(row)}} if row else {},
            }
            for i, row in self.figures.items()
        }  # fmt: skip

    def run(self, seconds: float, rate: int = 0) -> None:
        """Let time pass; each worker sends `rate` bytes a second to the notebook."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            self.question += 1
            for i in self.figures.keys() - self.late:
                if i:
                    count = self.sent[i].setdefault("0", [0, 0])
                    self.sent[i]["0"] = [count[0] + rate // 2, 0]
                self.figures[i] = self.figures[i] | {
                    "question": self.question, "pid": 100 + i + 1000 * self.lives[i], "host": "h",
                    "cpu": self.figures[i].get("cpu", 0.5), "memory": 1000 * (i + 1), "cores": 4, "ram": 8000,
                    "clock": self.now, "peers": dict(self.sent[i]),
                }  # fmt: skip
            self.history.add_answers(self.world(), self.now)

    def rows(self, step: int = 1) -> list[dict[str, Any]]:
        found = self.history.copy_table("samples").values()
        return sorted((row for row in found if row["step"] == step), key=lambda row: row["at"])

    def with_tables(self) -> dict[int, Any]:
        """The world with the history as the notebook's tables."""
        at = self.world()
        names = ("samples", "traffic")
        at[0]["tables"] |= json.loads(json.dumps({name: self.history.copy_table(name) for name in names}))
        return at


def test_a_second_has_the_figures_of_all_and_what_their_machine_has():
    polled = Polled(2)
    polled.run(4, rate=1000)
    row = polled.rows()[-1]
    assert row["of"] == {
        "cpu": {"0": 0.5, "1": 0.5, "2": 0.5}, "memory": {"0": 1000, "1": 2000, "2": 3000},
        "bytes": {"0": 0.0, "1": 1000, "2": 1000},
    }  # fmt: skip
    assert row["limits"] == {"cpu": 4, "memory": 8000} and row["began"] == [] and row["step"] == 1


def test_machines_and_gpus_count_once_each():
    polled = Polled(3)
    for i, gpu in ((1, GPU), (2, GPU), (3, {**GPU, "name": "1 H100"})):
        polled.figures[i] = {"gpu": gpu}
    polled.run(2)
    limits = polled.rows()[-1]["limits"]
    assert limits == {"cpu": 4, "memory": 8000, "gpu_memory": 160_000_000_000, "gpu_use": 2}


def test_a_gpu_that_workers_share_is_divided_among_them():
    polled = Polled(2)
    for i in (1, 2):
        polled.figures[i] = {"gpu": GPU}
    polled.run(2)
    assert polled.rows()[-1]["of"]["gpu_memory"] == {"1": 10_000_000_000, "2": 10_000_000_000}


def test_the_memory_is_bounded_and_told():
    polled = Polled(4)
    polled.run(960, rate=123_457)
    seconds, means = polled.rows(1), polled.rows(5)
    assert len(seconds) == 60 and len(means) == 180
    assert {b["at"] - a["at"] for a, b in pairwise(means)} == {5}
    size = polled.history.count_bytes()
    assert 100_000 < size < 250_000 + 5 * 45_000
    polled.run(60, rate=123_457)
    assert abs(polled.history.count_bytes() - size) < 0.02 * size


def test_a_mean_is_that_of_its_seconds():
    polled = Polled(1)
    polled.run(4)
    for share in (0.1, 0.9) * 10:
        polled.figures[1]["cpu"] = share
        polled.run(1)
    assert polled.rows(5)[-1]["of"]["cpu"]["1"] == pytest.approx(0.5, abs=0.1)


def test_a_time_in_which_nobody_looked_has_no_sample_and_no_mean_over_it():
    polled = Polled(1)
    polled.run(10)
    before = polled.rows()[-1]["at"]
    polled.now += 100
    polled.figures[1]["cpu"] = 0.25  # of the whole pause, as the first answer tells it
    polled.run(0.5)
    polled.figures[1]["cpu"] = 0.75
    polled.run(10)
    after = [row for row in polled.rows() if row["at"] > before]
    assert after[0]["at"] - before >= 100 and 0.25 not in [row["of"]["cpu"]["1"] for row in after]
    assert not [row for row in polled.rows(5) if before < row["at"] < after[0]["at"]]


def test_a_restart_is_marked_once_and_a_lost_member_has_no_figures():
    polled = Polled(2)
    polled.run(5)
    polled.states[1] = "lost"
    polled.run(3)
    assert "1" not in polled.rows()[-1]["of"]["cpu"] and "2" in polled.rows()[-1]["of"]["cpu"]
    polled.states[1], polled.lives[1], polled.sent[1] = "up", 1, {}
    polled.run(8)
    assert [row["began"] for row in polled.rows() if row["began"]] == [[1]]
    assert [row["began"] for row in polled.rows(5) if row["began"]] == [[1]]
    assert polled.rows()[-1]["of"]["bytes"]["1"] == 0


def test_a_late_member_keeps_its_figures_for_a_moment_and_then_has_none():
    polled = Polled(2)
    polled.run(5)
    polled.late = {1}
    polled.run(2)
    assert polled.rows()[-1]["of"]["cpu"]["1"] == 0.5
    polled.run(4)
    assert "1" not in polled.rows()[-1]["of"]["cpu"]
    assert polled.history.copy_table("traffic")["1"]["silent"]


def test_traffic_of_a_second_of_ten_and_of_all_time():
    polled = Polled(1)
    polled.run(20, rate=1000)
    polled.run(4, rate=0)
    second, ten, all_, shared = polled.history.copy_table("traffic")["1"]["to"]["0"]
    assert (second, shared) == (0, 0) and 500 <= ten <= 700 and all_ == 20_000


def test_a_counter_that_begins_again_counts_what_is_new():
    polled = Polled(1)
    polled.run(5, rate=1000)
    polled.sent[1] = {}  # a new connection
    polled.run(5, rate=1000)
    assert all(row["of"]["bytes"]["1"] == 1000 for row in polled.rows())


def test_views_as_text():
    polled = Polled(2)
    assert summarize_view(resources_view(polled.with_tables())).startswith("3 members, 0 samples: the first one comes")
    polled.run(6, rate=2_000_000)
    lines = summarize_view(resources_view(polled.with_tables())).splitlines()
    assert lines[0].startswith("3 members, ") and " samples in " in lines[0]
    assert lines[1] == "  CPU 150 % of 400 % (at most 150 %): w0 50 %, w1 50 %, w2 50 %"
    assert lines[2].startswith("  memory 6.0 kB of 8.0 kB") and lines[3].startswith(
        "  bytes sent and received per second 4.0 MB/s"
    )
    lines = summarize_view(traffic_view(polled.with_tables())).splitlines()
    assert lines == [
        "3 members, 4.0 MB/s in the last 6 s, 24.0 MB in all",
        "  w1 → w0: 2.0 MB/s, 12.0 MB in all", "  w2 → w0: 2.0 MB/s, 12.0 MB in all",
    ]  # fmt: skip
    polled.run(4, rate=0)
    view = traffic_view(polled.with_tables())
    first, *pairs = summarize_view(view).splitlines()
    rates = [flow[1] for row in view["flows"].values() for flow in row["to"].values()]
    assert f" {format_bytes(sum(rates))}/s in the last 10 s" in first and min(rates) > 0
    assert [line.split(": ")[1].split("/s")[0] for line in pairs] == list(map(format_bytes, rates)), "of the same span"


# ---- real members


@pytest.fixture
def agents(tmp_path: Path, no_leaks: None) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


def test_who_looks_gets_samples_and_a_record_has_them(agents: list[Agent], tmp_path: Path) -> None:
    poller = collector.current_poller()
    assert poller.world() == {} and poller.history.copy_table("samples") == {}
    stop = poller.subscribe(lambda: None)
    with record(tmp_path / "lesson.json"):
        rpc_sync("worker1", len, (b"x" * 50_000,))
        until(lambda: len(resources_view(poller.world())["samples"]) >= 2)
    row = list(resources_view(poller.world())["samples"].values())[-1]
    assert row["of"]["cpu"].keys() == {"0", "1", "2"} and row["limits"]["cpu"] > 0
    flow = traffic_view(poller.world())["flows"]["0"]["to"]["1"]
    assert flow[2] > 50_000
    stop()
    player = Player(load_record(tmp_path / "lesson.json"))
    player.go_to_frame(10**6)
    assert len(resources_view(player.world())["samples"]) >= 2
    assert traffic_view(player.world())["flows"]["0"]["to"]["1"][2] > 50_000
