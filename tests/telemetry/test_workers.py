"""How workers are: the view is a function of the tables; who looks is answered, who does not asks nobody."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import PATIENCE, until, world

import rpcbench
from rpcbench.launch.actions import Actions
from rpcbench.rpc import rpc_async, rpc_sync
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry import collector
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.views import workers_view
from rpcbench.telemetry.worker_columns import activity_words

# ---- the view


def member(id_: int, state: str = "up", **tables: Any) -> dict[str, Any]:
    return {"id": id_, "name": f"w{id_}", "incarnation": 0, "state": state, "tables": tables, "left_out": 0}


def health(id_: int, question: int = 9, **changes: Any) -> dict[str, Any]:
    row = {
        "question": question, "pid": 100 + id_, "host": "h", "cpu": 0.5, "memory": 1000, "busy": 0, "waiting": 0,
        "queued": 0, "cells": 0, "peers": {},
    }  # fmt: skip
    return {str(id_): {**row, **changes}}


def process(id_: int, state: str = "ready", log: str = "") -> dict[str, Any]:
    return {str(id_): {"name": f"w{id_}", "pid": 100 + id_, "incarnation": 2, "state": state, "log": log}}


def rows(at: dict[int, Any]) -> dict[str, Any]:
    view = workers_view(at)
    assert json.loads(json.dumps(view)) == view
    return view["workers"]


def test_a_member_that_has_told_nothing_has_no_figures():
    row = rows({0: member(0)})["0"]
    assert (row["state"], row["doing"]) == ("up", "")
    assert {row[name] for name in ("pid", "cpu", "memory", "busy", "waiting", "queued", "cells")} == {None}


def test_a_gpu_is_seen_with_its_figures_and_in_the_text():
    gpu = {"name": "0 H100", "memory": 20_000_000_000, "total": 80_000_000_000, "use": 0.5}
    at = {1: member(1, health=health(1, gpu=gpu)), 2: member(2, health=health(2, gpu=None)), 3: member(3)}
    seen = rows(at)
    names = ("gpu", "gpu_memory", "gpu_memory_whole", "gpu_use")
    assert [seen["1"][name] for name in names] == [*gpu.values()]
    assert [seen[key][name] for key in ("2", "3") for name in names] == [None] * 8
    lines = summarize_view(workers_view(at)).splitlines()
    assert lines[1].startswith(
        "  w1: idle, CPU 50 %, memory 1.0 kB, GPU 0 H100, GPU memory 20.0 of 80.0 GB, GPU use 50 %, 0 busy"
    ) and "GPU" not in "".join(lines[2:])
    unknown = {1: member(1, health=health(1, gpu={"name": "MIG-1", "memory": None, "total": None, "use": None}))}
    assert ", memory 1.0 kB, GPU MIG-1, 0 busy" in summarize_view(workers_view(unknown))


@pytest.mark.parametrize(
    ("figures", "doing"),
    [
        ({}, "idle"),
        ({"busy": 1, "waiting": 3}, "busy"),
        ({"waiting": 1}, "waits"),
        ({"cells": 1, "waiting": 1}, "cell"),
        ({"cells": 1, "busy": 4}, "cell"),
    ],
)
def test_what_it_does_is_said_in_a_word(figures, doing):
    assert rows({1: member(1, health=health(1, **figures))})["1"]["doing"] == doing


@pytest.mark.parametrize(("figures", "threads"), [({}, (0, 0)), ({"cells": 2, "waiting": 3, "busy": 1}, (2, 1))])
def test_the_cell_that_runs_counts_as_a_busy_thread(figures, threads):
    row = rows({1: member(1, health=health(1, **figures))})["1"]
    assert (row["busy"], row["waiting"]) == threads


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "idle"),
        ({"under_way": 1}, "1 call under way"),
        ({"doing": "cell", "cells": 1}, "runs a cell"),
        ({"doing": "cell", "cells": 3}, "runs a cell, 2 more wait"),
        ({"doing": "cell", "cells": 1, "awaits": "w3"}, "runs a cell, waits for w3"),
        ({"doing": "busy"}, "runs a call"),
        ({"doing": "waits", "awaits": "w3", "under_way": 2}, "waits for w3"),
        ({"doing": "waits"}, "waits"),
        ({"doing": "silent", "silent": 3}, "no answer for 3 s"),
        ({"doing": "", "cells": None}, "no report yet"),
        ({"state": "left"}, "stopped"),
        ({"state": "stopped"}, "suspended"),
        ({"state": "starts"}, "starts …"),
        ({"state": "lost"}, "lost"),
        ({"state": "lost", "ended": "killed by SIGKILL"}, "lost: killed by SIGKILL"),
    ],
)
def test_the_activity_in_words(changes, words):
    row = {"state": "up", "doing": "idle", "awaits": "", "cells": 0, "under_way": 0, "silent": 0, "ended": ""}
    assert activity_words(row | changes) == words


def test_the_thread_that_waits_for_a_cell_is_not_counted():
    assert rows({1: member(1, health=health(1, cells=1, waiting=3))})["1"]["waiting"] == 2


def test_who_does_not_answer_is_silent_for_as_long_as_others_have():
    at = {0: member(0, health=health(0, 20)), 1: member(1, health=health(1, 17)), 2: member(2, health=health(2, 12))}
    assert [(row["doing"], row["silent"]) for row in rows(at).values()] == [("idle", 0), ("idle", 0), ("silent", 4)]


def test_a_stopped_process_is_seen_by_who_started_it():
    at = {0: member(0, health=health(0), launched=process(1, "stopped")), 1: member(1, health=health(1))}
    assert rows(at)["1"]["state"] == "stopped"


def test_how_a_lost_one_ended_is_told_also_if_it_was_lost_before_anybody_looked():
    at = {0: member(0, launched={**process(1, "killed by SIGKILL"), **process(2, "exit code 3")}), 1: member(1, "lost")}
    found = rows(at)
    assert [(found[i]["state"], found[i]["ended"]) for i in "12"] == [
        ("lost", "killed by SIGKILL"), ("lost", "exit code 3"),
    ]  # fmt: skip
    assert found["2"]["incarnation"] == 2


@pytest.mark.parametrize("lives", ["ready", "stopped"])
def test_a_lost_one_of_whose_end_its_launcher_has_not_heard_yet_is_lost_without_a_reason(lives):
    found = rows({0: member(0, launched=process(1, lives)), 1: member(1, "lost")})["1"]
    assert (found["state"], found["ended"], found["now"]) == ("lost", "", "lost")


def test_one_that_is_about_to_join_starts():
    assert rows({0: member(0, launched=process(3))})["3"]["state"] == "starts"


def test_who_left_is_not_listed_unless_the_world_is_over():
    assert [*rows({0: member(0), 1: member(1, "left", health=health(1))})] == ["0"]
    assert [*rows({0: member(0, "left"), 1: member(1, "left")})] == ["0", "1"]


def test_bytes_are_counted_for_each_pair_and_in_sum():
    at = {1: member(1, health=health(1, peers={"0": [5, 7], "2": [1, 2]})), 2: member(2)}
    view = workers_view(at)
    assert view["links"]["1/2"] == {"worker": 1, "peer": 2, "sent": 1, "received": 2}
    assert (view["workers"]["1"]["sent"], view["workers"]["1"]["received"]) == (6, 9)


def test_calls_that_wait_for_a_worker_are_counted_wherever_they_come_from():
    call = {"to": 2, "label": "f"}
    at = {0: member(0, calls={"1": call, "2": call}), 1: member(1, calls={"1": call}), 2: member(2)}
    assert [row["calls"] for row in rows(at).values()] == [0, 0, 3]


def test_a_member_says_for_which_others_it_waits():
    calls = [
        {str(n): {"to": to, "label": "f"} for n, to in enumerate(ends)} for ends in ([3], [1, 3, 2, 0, 3], [], [0, 1])
    ]
    waits = [[3], [0, 2, 3], [], [0, 1, 7]]  # 7 has left
    at = {i: member(i, health=health(i, cells=int(i == 3), awaits=waits[i]), calls=calls[i]) for i in range(4)}
    found = rows(at)
    assert [(row["doing"], row["awaits"], row["under_way"]) for row in found.values()] == [
        ("waits", "w3", 1), ("waits", "3 workers", 4), ("idle", "", 0), ("cell", "w0, w1", 2),
    ]  # fmt: skip
    assert summarize_view(workers_view(at)).splitlines()[1].startswith("  w0: waits for w3, CPU")


def test_calls_that_no_thread_waits_for_are_under_way():
    calls = {"1": {"to": 2, "label": "f"}, "2": {"to": 0, "label": "g"}, "3": {"to": 1, "label": "h"}}
    at = {i: member(i, health=health(i, awaits=[]), calls=calls if i == 0 else {}) for i in range(3)}
    found = rows(at)
    assert [(row["doing"], row["awaits"], row["under_way"]) for row in found.values()] == [
        ("idle", "", 2), ("idle", "", 0), ("idle", "", 0),
    ]  # fmt: skip
    assert summarize_view(workers_view(at)).splitlines()[1].startswith("  w0: 2 calls under way, CPU")


def test_logs_and_actions_are_those_of_who_started_the_workers():
    act = {"restart w1": {"action": "restart", "target": "w1", "state": "runs", "error": ""}}
    view = workers_view({0: member(0, launched=process(1, log="x\ny"), actions=act), 1: member(1)})
    assert view["logs"] == {"1": {"worker": 1, "text": "x\ny"}}
    assert view["actions"] == act


def test_the_view_in_words():
    at = {
        0: member(0, health=health(0), launched={**process(1), **process(2, "exit code 3")}),
        1: {**member(1, health=health(1, busy=2, waiting=1, queued=3)), "incarnation": 1, "left_out": 4},
    }
    at[0]["tables"]["actions"] = {
        "restart w2": {"action": "restart", "target": "w2", "state": "failed", "error": "E: x"}
    }
    assert summarize_view(workers_view(at)).splitlines() == [
        "3 members, 2 ready (4 events left out)",
        "  w0: idle, CPU 50 %, memory 1.0 kB, 0 busy, 0 waiting, 0 queued",
        "  w1 (start 2): runs a call, CPU 50 %, memory 1.0 kB, 2 busy, 1 waiting, 3 queued",
        "  w2 (start 3): lost: exit code 3",
        "  restart w2 failed: E: x",
    ]
    assert summarize_view(workers_view({})) == "0 members, 0 ready"


# ---- who asks


@pytest.fixture
def agents(tmp_path: Path, no_leaks: None) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


def tables(agents: list[Agent]) -> list[Any]:
    return [agent.tables()["health"] for agent in agents]


def test_members_are_measured_while_somebody_looks_and_not_else(agents: list[Agent]) -> None:
    source = collector.current_poller()
    assert tables(agents) == [{}, {}, {}]
    stop = source.subscribe(lambda: None)
    until(
        lambda: all(row["pid"] for row in workers_view(source.world())["workers"].values()) and len(source.world()) == 3
    )
    until(lambda: [m["tables"]["health"] for m in source.world().values()] == tables(agents))
    stop()
    until(lambda: "rpcbench-health" not in {thread.name for thread in threading.enumerate()})
    asked = tables(agents)
    assert source.world() == {}
    again = source.subscribe(lambda: None)
    until(lambda: tables(agents) != asked)
    again()


def test_a_picture_taken_at_once_knows_how_all_members_are(agents: list[Agent]) -> None:
    for _ in range(5):
        panel = rpcbench.panel("workers")
        lines = panel.snapshot().text.splitlines()
        panel.close()
        assert lines[0] == "3 members, 3 ready" and all("idle" in line and "CPU" in line for line in lines[1:])


def test_who_settles_does_not_wait_for_ever(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    source = collector.current_poller()
    notify = agents[0].notify

    def deaf(to: int, channel: str, data: Any, may_wait: bool = False) -> None:
        if (to, channel) != (2, "look"):
            notify(to, channel, data, may_wait)

    monkeypatch.setattr(agents[0], "notify", deaf)
    stop = source.subscribe(lambda: None)
    assert not source.settle(timeout=0.2)
    until(lambda: [row["doing"] for row in workers_view(source.world())["workers"].values()] == ["idle", "idle", ""])
    stop()
    monkeypatch.undo()
    again = source.subscribe(lambda: None)
    assert source.settle()
    again()


def wait_here(gate: str) -> None:
    GATES[gate].wait(4 * PATIENCE)


GATES: dict[str, threading.Event] = {}


def test_threads_and_queues_are_those_of_the_pool(agents: list[Agent]) -> None:
    GATES["busy"] = threading.Event()
    source = collector.current_poller()
    stop = source.subscribe(lambda: None)

    def row() -> dict[str, Any]:
        return workers_view(source.world())["workers"].get("1", {})

    futures = [rpc_async("worker1", wait_here, ("busy",)) for _ in range(6)]  # four threads
    futures.append(rpc_async("worker2", rpc_sync, ("worker1", wait_here, ("busy",))))
    until(lambda: (row().get("busy"), row().get("queued"), row().get("calls")) == (4, 3, 7))
    until(lambda: workers_view(source.world())["workers"]["2"]["waiting"] == 1)
    GATES["busy"].set()
    for future in futures:
        future.wait()
    until(lambda: (row()["doing"], row()["busy"], row()["queued"], row()["calls"]) == ("idle", 0, 0, 0))
    until(lambda: workers_view(source.world())["workers"]["2"]["waiting"] == 0)
    stop()


def test_a_member_waits_only_while_a_thread_of_it_does(agents: list[Agent]) -> None:
    GATES["own"] = threading.Event()
    source = collector.current_poller()
    stop = source.subscribe(lambda: None)

    def told(id_: str) -> list[Any]:
        row = workers_view(source.world())["workers"].get(id_, {})
        return [row.get(name) for name in ("doing", "awaits", "under_way")]

    futures = [rpc_async(f"worker{n}", wait_here, ("own",)) for n in (1, 2, 1)]
    until(lambda: told("0") == ["idle", "", 3])
    waits = threading.Thread(target=futures[1].wait)
    waits.start()
    until(lambda: told("0") == ["waits", "worker2", 3])
    futures.append(rpc_async("worker2", rpc_sync, ("worker1", wait_here, ("own",))))
    until(lambda: told("2") == ["busy", "worker1", 1])
    until(lambda: told("1") == ["busy", "", 0])
    GATES["own"].set()
    for future in futures:
        future.wait()
    waits.join()
    until(lambda: told("0") == ["idle", "", 0])
    stop()


def test_bytes_count_those_in_shared_memory(agents: list[Agent]) -> None:
    source = collector.current_poller()
    stop = source.subscribe(lambda: None)
    rpc_sync("worker1", torch.sum, (torch.ones(1 << 20),))

    def seen() -> bool:
        links = workers_view(source.world())["links"]
        return links.get("0/1", {}).get("sent", 0) > 4 << 20 and links.get("1/0", {}).get("received", 0) > 4 << 20

    until(seen)
    links = workers_view(source.world())["links"]
    assert links["0/1"]["received"] < 1 << 20 and links["1/0"]["sent"] < 1 << 20
    stop()


def test_a_member_that_does_not_answer_is_not_asked_again(agents: list[Agent], monkeypatch: Any) -> None:
    source = collector.current_poller()
    asked: list[tuple[int, int]] = []
    notify = agents[0].notify

    def heard(to: int, channel: str, data: Any, may_wait: bool = False) -> None:
        if channel == "look":
            asked.append((to, data))
        if to != 2 or channel != "look":
            notify(to, channel, data, may_wait)

    monkeypatch.setattr(agents[0], "notify", heard)
    stop = source.subscribe(lambda: None)
    until(lambda: workers_view(source.world())["workers"].get("1", {}).get("pid") is not None)
    until(lambda: sum(to == 1 for to, _ in asked) >= 4)
    assert sum(to == 2 for to, _ in asked) == 1
    monkeypatch.undo()
    stop()


# ---- processes


def spin(gate: str) -> None:
    while not GATES[gate].is_set():
        pass


def test_stacks_are_those_of_all_threads_that_run_the_users_program(agents: list[Agent]) -> None:
    """The agents of this test share a process, and so its threads."""
    GATES["spin"] = threading.Event()
    actions, future = agents[0].part(Actions), rpc_async("worker1", spin, ("spin",))

    texts: list[str] = []

    def said() -> str:
        actions.begin_action("stacks", "worker1").result(20)
        texts.append(str(actions.table()["stacks worker1"]["text"]))
        return texts[-1]

    until(lambda: "in spin: while not GATES" in said())
    lines = texts[-1].splitlines()
    assert re.fullmatch(r"At \S+( \w+)?, worker1:", lines[0])
    assert any("spin, a call of notebook, which has run" in line for line in lines)
    assert any(line.startswith("  MainThread runs") for line in lines) and "in said: actions.begin" in "".join(lines)
    GATES["spin"].set()
    future.wait()
    actions.begin_action("stacks", "worker9")
    until(lambda: "worker9" in actions.table()["stacks worker9"]["error"])


@pytest.mark.process
def test_a_cluster_tells_of_its_processes_and_does_what_is_asked(no_leaks: None) -> None:
    with rpcbench.Cluster(2) as cluster:
        source, actions = collector.current_poller(), cluster.agent.part(Actions)
        stop = source.subscribe(lambda: None)

        def row(worker: int) -> dict[str, Any]:
            return workers_view(source.world())["workers"].get(str(worker), {})

        until(lambda: [row(i).get("doing") for i in (1, 2)] == ["idle", "idle"])
        assert [row(i)["pid"] for i in (1, 2)] == [cluster.pid("worker1"), cluster.pid("worker2")]
        os.kill(cluster.pid("worker2"), signal.SIGSTOP)
        until(lambda: row(2)["state"] == "stopped")
        until(lambda: row(2)["silent"] > 0)
        os.kill(cluster.pid("worker2"), signal.SIGCONT)
        until(lambda: (row(2)["state"], row(2)["doing"]) == ("up", "idle"))
        rpc_sync("worker2", os.write, (2, b"last words\n"))
        os.kill(cluster.pid("worker2"), signal.SIGKILL)
        until(lambda: (row(2)["state"], row(2)["ended"]) == ("lost", "killed by SIGKILL"))
        assert workers_view(source.world())["logs"]["2"]["text"] == "last words"

        actions.begin_action("restart", "worker2")
        until(lambda: row(2)["incarnation"] == 1 and row(2)["pid"] == cluster.pid("worker2"))
        until(lambda: actions.table() == {})
        actions.begin_action("scale", "3")
        until(lambda: row(3).get("state") == "up")
        actions.begin_action("scale", "1")
        until(lambda: [*workers_view(source.world())["workers"]] == ["0", "1"])
        actions.begin_action("interrupt", "worker9")
        until(lambda: "destination name worker9" in actions.table()["interrupt worker9"]["error"])
        assert abs(actions.table()["interrupt worker9"]["ended"] - time.time()) < PATIENCE
        until(lambda: workers_view(source.world())["actions"] == actions.table())
        with pytest.raises(ValueError, match="unknown action 'end'"):
            actions.begin_action("end", "worker1")
        stop()


def test_an_action_that_runs_is_not_begun_twice_and_failures_do_not_heap_up(agents: list[Agent]) -> None:
    gate, calls = threading.Event(), []

    class Owner:
        def restart(self, name: str) -> None:
            calls.append(name)
            gate.wait(PATIENCE)
            raise RuntimeError("no way")

    agents[0].owner = Owner()
    actions = agents[0].part(Actions)
    first, second = (actions.begin_action("restart", "worker1") for _ in range(2))
    assert actions.table()["restart worker1"]["state"] == "runs"
    gate.set()
    with pytest.raises(RuntimeError, match="no way"):
        second.result(20)
    assert first is second and actions.begin_action("restart", "worker1") is not first
    until(lambda: actions.table()["restart worker1"]["state"] == "failed")
    assert calls == ["worker1", "worker1"]
    for i in range(2, 12):
        actions.begin_action("restart", f"worker{i}")
        until(lambda i=i: actions.table()[f"restart worker{i}"]["state"] == "failed")
    assert [row["target"] for row in actions.table().values()] == [f"worker{i}" for i in range(4, 12)]
