"""Logs of workers: levels of lines, text, and what real workers write, are lost with, and write after a restart."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from leaks import LeakCheck
from worlds import until

import rpcbench
from rpcbench.cells.log_reader import MOST_BYTES
from rpcbench.telemetry.log_follower import MOST_LINES, LogFollower
from rpcbench.telemetry.log_view import LevelFinder, logs_view
from rpcbench.telemetry.summary import summarize_view

LEVELS = """
 |a plain line, with an error in its words
e|ERROR:train:loss is nan
w|WARNING:root:careful
e|2026-11-30 18:13:04,437 - train - CRITICAL - out of disk
w|2026-11-30 18:13:04,437 WARNING [train] slow
 |INFO:train:no ERRORS yet
w|[W1130 18:13:04.437246227 CPUAllocator.cpp:245] Memory block of unknown size
e|[rank3]:[E1130 18:13:04.4 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout
w|/home/me/train.py:12: UserWarning: call the scheduler after the optimizer
v|  scheduler.step()
 |plain again
 |  indented, of nobody
e|Exception in thread Thread-1 (bg):
f|Traceback (most recent call last):
f|  File "x.py", line 1, in bg
f|    1/0
f|ZeroDivisionError: division by zero
 |after it
e|[rank0]: Traceback (most recent call last):
f|[rank0]:   File "x.py", line 1, in bg
f|[rank0]: torch.OutOfMemoryError: CUDA out of memory
 |
f|The above exception was the direct cause of the following exception:
 |
f|Traceback (most recent call last):
f|KeyError: 1
e|Traceback (most recent call last):
f|KeyError: of another one
 |next
e|terminate called after throwing an instance of 'c10::Error'
f|  what():  oh
e|RuntimeError: alone
w|Warning: of a script
e|Fatal Python error: Segmentation fault
f|
f|Current thread 0x00007f (most recent call first):
f|anything
"""


def test_each_line_has_the_level_of_the_rule() -> None:
    finder = LevelFinder()
    expected = [line.partition("|") for line in LEVELS.strip("\n").split("\n")]
    expected = [one for one in expected if one[2]]
    assert [(finder.find_level(line), line) for _, _, line in expected] == [
        (level, line) for level, _, line in expected
    ]


def test_a_traceback_goes_on_in_the_next_block() -> None:
    finder = LevelFinder()
    assert finder.find_levels(["Traceback (most recent call last):", "  File"]) == "ef"
    assert finder.find_levels(["    x()", "", "KeyError: 1", "fine"]) == "fff "


def test_the_text_has_the_counts_and_the_last_lines() -> None:
    block = {"worker": 1, "kind": "", "first": 0, "order": 1, "at": None}
    lines = [f"line {n}" for n in range(30)]
    event = {**block, "kind": "event", "order": 2, "lines": ["worker2 was lost: killed by SIGKILL"], "levels": "e"}
    file = {"name": "worker1", "path": "/x", "missing": "", "lost": "", "skipped": 0, "lines": 30}
    view = {
        "workers": {},
        "files": {"1": file},
        "lines": {"b": event, "a": {**block, "lines": lines, "levels": "w" * 30}},
    }
    first, *rest = summarize_view(view).splitlines()
    assert first == "1 worker, 30 lines outside cells, 30 warnings; the last 12:" and len(rest) == 12
    assert rest[0] == "  worker1: line 19" and rest[-1] == "  worker2 was lost: killed by SIGKILL"
    states = {key: {"state": state, "left_out": 0} for key, state in (("1", "up"), ("2", "left"))}
    two = {**view, "files": {"1": file, "2": file}, "workers": states}
    assert summarize_view(two).startswith("1 worker, 1 stopped, 30 lines")
    elsewhere = {"1": {**file, "path": "", "missing": "its output is elsewhere"}}
    assert summarize_view({"workers": {}, "files": elsewhere, "lines": {}}).splitlines() == [
        "1 worker, 0 lines outside cells", "  worker1: its output is elsewhere",
    ]  # fmt: skip
    assert summarize_view(logs_view({})) == "0 members, no output of workers here"


# ---- real workers


@pytest.fixture
def cluster(no_leaks: None) -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(2) as made:
        yield made


class Followed:
    """A cluster's logs, followed as by a panel."""

    def __init__(self, cluster: rpcbench.Cluster) -> None:
        self.follower = cluster.agent.part(LogFollower)
        self.wakes = 0
        self.end = self.follower.subscribe(self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def view(self) -> dict[str, Any]:
        return logs_view(self.follower.world())

    def lines(self, worker: int) -> list[str]:
        blocks = [row for row in self.view["lines"].values() if row["worker"] == worker]
        return [line for row in sorted(blocks, key=lambda row: row["order"]) for line in row["lines"]]


def write_outside(cluster: rpcbench.Cluster, worker: str, text: str) -> None:
    """Write to the worker's own output, as its threads and C code do."""
    cluster.run(worker, f"import threading, os\nthreading.Timer(0.01, os.write, (2, {text.encode()!r})).start()")


@pytest.mark.process
def test_what_workers_write_outside_cells_is_followed(cluster: rpcbench.Cluster) -> None:
    write_outside(cluster, "worker1", "before it was opened\n")
    until(lambda: "before" in cluster.log("worker1"))
    seen = Followed(cluster)
    until(lambda: seen.lines(1) == ["before it was opened"])
    assert [row["at"] for row in seen.view["lines"].values()] == [None]
    write_outside(
        cluster, "worker2", "WARNING:train:slow\nTraceback (most recent call last):\n  File\nKeyError: 1\nbegun"
    )
    until(lambda: len(seen.lines(2)) == 5)
    (block, begun) = [row for row in seen.view["lines"].values() if row["worker"] == 2]
    assert block["levels"] == "weff" and begun["lines"] == ["begun"] and time.time() - block["at"] < 60
    wakes = seen.wakes
    seen.follower.settle()
    assert seen.wakes == wakes, "nobody is woken while nothing is new"
    seen.end()
    until(lambda: "rpcbench-logs" not in {thread.name for thread in threading.enumerate()})
    write_outside(cluster, "worker1", "while nobody looks\n")
    until(lambda: "while nobody looks" in cluster.log("worker1"))
    assert seen.lines(1) == ["before it was opened"]
    seen = Followed(cluster)
    until(lambda: seen.lines(1) == ["before it was opened", "while nobody looks"])
    seen.end()


@pytest.mark.process
def test_a_lost_workers_last_words_and_what_its_successor_writes(cluster: rpcbench.Cluster) -> None:
    seen = Followed(cluster)
    cluster.run(
        "worker2",
        "import threading, os\nthreading.Timer(0.1, lambda: (os.write(2, b'last words'), os.abort())).start()",
    )
    until(lambda: any("was lost" in line for line in seen.lines(2)))
    last, lost = [line for line in seen.lines(2) if "last words" in line or "was lost" in line]
    assert last.startswith("last words") and lost == "worker2 was lost: killed by SIGABRT"
    assert any(row["levels"] == "e" for row in seen.view["lines"].values() if row["kind"] == "event")
    cluster.restart("worker2")
    write_outside(cluster, "worker2", "as new\n")
    until(lambda: seen.lines(2)[-1] == "as new")
    restarted = seen.lines(2)[-2]
    assert restarted.startswith("worker2 was restarted at ") and len(restarted) == len("worker2 was restarted at 14:03")
    seen.end()
    # a panel that is opened only now has the lines of the earlier process, too
    late = Followed.__new__(Followed)
    late.follower, late.wakes = LogFollower(cluster.agent), 0
    late.end = late.follower.subscribe(late._wake)
    until(lambda: late.lines(2)[-1:] == ["as new"])
    assert late.lines(2)[-2].startswith("worker2 was restarted at ") and late.lines(2)[0].startswith("last words")
    late.end()


@pytest.mark.process
def test_of_ten_thousand_lines_at_once_the_last_are_kept(cluster: rpcbench.Cluster) -> None:
    seen = Followed(cluster)
    write_outside(cluster, "worker1", "".join(f"line {n}\n" for n in range(10_000)))
    until(lambda: seen.lines(1)[-1:] == ["line 9999"])
    kept = seen.lines(1)
    assert (
        kept == [f"line {n}" for n in range(10_000 - len(kept), 10_000)] and MOST_LINES <= len(kept) <= MOST_LINES + 100
    )
    row = seen.view["files"]["1"]
    assert row["skipped"] == sum(len(f"line {n}\n") for n in range(10_000 - len(kept)))
    write_outside(cluster, "worker1", "".join("y" * 1000 + "\n" for _ in range(1000)))
    until(lambda: seen.lines(1)[-1] == "y" * 1000)
    assert sum(map(len, seen.lines(1))) <= MOST_BYTES
    seen.end()


@pytest.mark.process
def test_workers_that_were_ended_keep_their_lines_and_the_end_of_the_cluster_stops(no_leaks: LeakCheck) -> None:
    with rpcbench.Cluster(2) as cluster:
        seen = Followed(cluster)
        write_outside(cluster, "worker2", "mine\n")
        until(lambda: seen.lines(2) == ["mine"])
        cluster.scale(1)
        seen.follower.settle()
        assert seen.lines(2) == ["mine"]
        write_outside(cluster, "worker1", "at the end\n")
        until(lambda: "at the end" in cluster.log("worker1"))
    assert seen.follower.phase.name == "stopped" and seen.lines(1) == ["at the end"]
    seen.end()


@pytest.mark.process
def test_a_panel_of_a_cluster_prints_the_lines(cluster: rpcbench.Cluster) -> None:
    panel = rpcbench.panel("logs")
    try:
        write_outside(cluster, "worker1", "RuntimeError: of a thread\n")
        until(lambda: "1 error" in str(panel))
        assert str(panel).splitlines() == [
            "2 workers, 1 line outside cells, 1 error", "  worker1: RuntimeError: of a thread",
        ]  # fmt: skip
        assert cluster.find_log("worker1").read_text() == "RuntimeError: of a thread\n"
    finally:
        panel.close()
