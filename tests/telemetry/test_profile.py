"""Profiles: operators of all threads of all members, on one clock with their calls; sums, bounds, and lost members."""

from __future__ import annotations

import html
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from leaks import LeakCheck
from sizes import long
from torch import nn
from worlds import until

import rpcbench
from rpcbench import rpc
from rpcbench.base.errors import RpcError, UnknownWorkerError, WorkerLostError
from rpcbench.pipeline import Pipeline, split
from rpcbench.runtime import operator_profile
from rpcbench.runtime.operator_columns import Operator, OperatorColumns
from rpcbench.runtime.operator_profile import bounded_profile, collect_operators
from rpcbench.telemetry.message_views import SHARED, ClockOffset
from rpcbench.telemetry.profile import SHOWN, Profile, profile
from rpcbench.telemetry.trace import Trace

Event = dict[str, Any]

# ---- the sums of one member


def op(name: str, begin: float, seconds: float, track: str = "main", **more: Any) -> Operator:
    return Operator(name, track, begin, seconds, **more)


def own(*found: Operator) -> dict[str, float]:
    return {one.name: round(one.own, 6) for one in OperatorColumns(found).sum_operators()}


def test_the_own_time_of_an_operator_is_without_those_that_it_called() -> None:
    nested = [op("inner", 1.0, 2.0), op("linear", 0.0, 10.0), op("mm", 0.5, 4.0), op("add", 5.0, 1.0)]
    assert own(*nested) == {"linear": 5.0, "mm": 2.0, "inner": 2.0, "add": 1.0}


def test_an_operator_belongs_to_its_thread_alone() -> None:
    assert own(op("linear", 0.0, 10.0), op("mm", 1.0, 2.0, "pool")) == {"linear": 10.0, "mm": 2.0}


def test_operators_that_touch_follow_each_other() -> None:
    assert own(op("a", 0.0, 1.0), op("b", 1.0, 1.0), op("c", 1.0, 0.25)) == {"a": 1.0, "b": 0.75, "c": 0.25}


def test_an_operator_that_ends_on_another_thread_takes_nothing_from_others() -> None:
    gloo = op("gloo:all_reduce", 0.5, 20.0, alone=False)
    assert own(op("a", 0.0, 1.0), gloo, op("b", 2.0, 3.0)) == {"a": 1.0, "b": 3.0, "gloo:all_reduce": 0.0}


def test_sums_have_all_calls_longest_first() -> None:
    first, second = OperatorColumns([op("a", 0.0, 1.0), op("b", 1.0, 5.0), op("a", 6.0, 1.5)]).sum_operators()
    assert (first.name, first.calls) == ("b", 1) and (second.name, second.calls, second.seconds) == ("a", 2, 2.5)


def test_of_too_many_operators_the_longest_are_kept_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_profile, "KEPT", 3)
    made = bounded_profile(OperatorColumns(op("a", float(n), 0.1 * (n + 1)) for n in range(8)), [])
    assert sorted(one.begin for one in made.operators) == [5.0, 6.0, 7.0] and made.left_out == 5
    assert [one.calls for one in made.sums] == [8]


@dataclass
class TorchEvent:
    """An event of torch's profiler, as far as it is read."""

    of: str
    start: int = 0
    device: str = "CPU"
    place: int = 7
    ends_on: int = 1
    hidden: bool = False

    def __getattr__(self, asked: str) -> Any:
        answers = {
            "name": self.of, "start_ns": self.start, "duration_ns": 2000, "device_resource_id": self.place,
            "device_index": 0, "device_type": SimpleNamespace(name=self.device), "is_hidden_event": self.hidden,
            "is_user_annotation": False, "sequence_nr": -1, "correlation_id": 0, "start_thread_id": 1,
            "end_thread_id": self.ends_on, "is_async": False, "activity_type": "cpu_op",
        }  # fmt: skip
        return lambda: answers[asked]


def test_events_of_torch_get_the_names_of_their_threads_and_our_clock() -> None:
    told = [TorchEvent("mm", 5_000_001_000), TorchEvent("add", 6_000_000_000, place=8), TorchEvent("own", hidden=True)]
    (mm, add), _ = collect_operators(
        [*told, TorchEvent("profiler::_record_function_enter_new")], 5_000_000_000, {7: "MainThread"}
    )
    assert (mm.name, mm.track, mm.alone) == ("mm", "MainThread", True)
    assert (mm.begin, mm.seconds) == pytest.approx((1e-6, 2e-6)) and (add.track, add.begin) == ("thread 8", 1.0)


def test_events_of_a_gpu_stand_on_its_stream() -> None:
    (kernel, copied), _ = collect_operators(
        [TorchEvent("gemm", device="CUDA"), TorchEvent("gloo", ends_on=2)], 0, {7: "MainThread"}
    )
    assert (kernel.track, kernel.device, kernel.alone) == ("CUDA 0, stream 7", "CUDA", True)
    assert not copied.alone


# ---- all members


def member(id_: int, name: str, clock: ClockOffset = SHARED) -> dict[str, Any]:
    return {"name": name, "id": id_, "state": "up", "incarnation": 0, "clock": clock, "left_out": 0, "tables": {}}


def made_of(clock: ClockOffset = SHARED, left_out: int = 0, **members: list[Operator]) -> Profile:
    seen = Trace()
    seen.world = {id_: member(id_, name, clock) for id_, name in enumerate(members)}
    seen.complete = True
    found = Profile(seen)
    found.seconds = 2.5
    memory = [(1.0, {"resident": 100 << 20}), (2.0, {"resident": 400 << 20}), (3.0, {"resident": 300 << 20})]
    for name, each in members.items():
        found.members[name] = bounded_profile(OperatorColumns(each), memory)._replace(left_out=left_out)
    return found


def two() -> Profile:
    busy = [op("mm", 10.0, 0.5), op("add", 10.5, 0.25), op("mm", 11.0, 0.5, "pool")]
    return made_of(worker1=busy, worker2=[op("add", 10.0, 2.0), op("mm", 12.0, 0.25)])


def events(of: dict[str, Any], phase: str, **wanted: Any) -> list[Event]:
    found = [event for event in of["traceEvents"] if event["ph"] == phase]
    return [event for event in found if all(event.get(name) == value for name, value in wanted.items())]


def test_the_table_of_operators_sums_over_members_and_has_each() -> None:
    table = two().table()
    assert [(row["operator"], row["calls"], row["self"]) for row in table.rows] == [("add", 2, 2.25), ("mm", 3, 1.25)]
    assert table.rows[1]["workers"] == {"worker1": 1.0, "worker2": 0.25}
    head, add, mm = (" ".join(line.split()) for line in repr(table).splitlines())
    assert head == "operator calls self share total worker1 worker2"
    assert add == "add 2 2.25 s 64.3% 2.25 s 250 ms 2.00 s"
    assert mm == "mm 3 1.25 s 35.7% 1.25 s 1.00 s 250 ms"


def test_the_table_of_workers_has_their_memory() -> None:
    table = two().table("worker")
    assert [(row["worker"], row["calls"], row["self"]) for row in table.rows] == [
        ("worker2", 2, {"CPU": 2.25}), ("worker1", 3, {"CPU": 1.25}),
    ]  # fmt: skip
    assert {(row["memory"], row["peak"], row["growth"]) for row in table.rows} == {(300 << 20, 400 << 20, 200 << 20)}
    assert [row["busy"] for row in table.rows] == [{"CPU": 0.9}, {"CPU": 0.5}]
    assert "+210 MB" in table._repr_html_() and "+210 MB" in repr(table)
    assert " ".join(repr(table).splitlines()[1].split()) == "worker2 2 2.25 s 90 % 315 MB 419 MB +210 MB"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.862718, "2.86 s"),
        (62.5, "62.5 s"),
        (0.0952, "95.2 ms"),
        (0.99996, "1.00 s"),
        (12.3e-6, "12.3 µs"),
        (0.0, "0.00 µs"),
    ],
)
def test_times_have_three_digits_in_the_unit_that_fits(seconds: float, text: str) -> None:
    made = made_of(worker1=[op("mm", 0.0, seconds)])
    assert f" {text} " in repr(made.table())


def test_a_long_name_breaks_between_its_words() -> None:
    assert "aten::<wbr>add_<wbr>in_<wbr>place<" in made_of(worker1=[op("aten::add_in_place", 0.0, 1.0)])._repr_html_()


def test_the_head_has_the_wall_time_and_how_busy_each_member_was_in_it() -> None:
    busy, memory = two().head
    assert busy == "Wall time 2.50 s. In operators: worker1 50 %, worker2 90 %."
    assert memory == "Peak resident memory (growth): worker1 419 MB (+315 MB), worker2 419 MB (+315 MB)."
    beside = made_of(worker1=[op("mm", 0.0, 2.0), op("mm", 0.0, 2.0, "pool"), op("k", 0.0, 1.0, "s", device="CUDA")])
    assert beside.head[0] == "Wall time 2.50 s. In operators: worker1 160 %, CUDA 40 %."
    beside.seconds = 0.0  # its block runs
    assert beside.head[0].endswith("worker1 ?.") and made_of().head == []


def test_bytes_have_a_column_where_they_were_asked_for() -> None:
    made = two()
    assert "allocated" not in repr(made) and {row["allocated"] for row in made.table().rows} == {None}
    made.members["worker1"] = made.members["worker1"]._replace(allocated={"mm": 3_000_000, "other": 5})
    head, add, mm = (" ".join(line.split()) for line in repr(made.table()).splitlines())
    assert head == "operator calls self share total allocated worker1 worker2"
    assert "s 250 ms" in add and " 3.0 MB " in mm and "3.0 MB" in made._repr_html_()
    assert [row["allocated"] for row in made.table().rows] == [None, 3_000_000]


def test_a_table_in_html_has_the_columns_of_the_text_and_a_bar_for_each_share() -> None:
    made = two()
    shown = made._repr_html_()
    assert re.findall("width:([0-9.]+)px;height", shown) == ["51.4", "28.6"]  # of 80, for 64.3 % and 35.7 %
    cells = [re.findall("<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", shown)]
    texts = [[cell for n, cell in enumerate(row) if n != 1] for row in cells]  # without the bars
    lines = [re.split(" {2,}", line) for line in repr(made.table()).splitlines()]
    assert texts == lines and all(line in html.unescape(shown) for line in made.head)
    assert "Python between operators is in none" in shown and "Python between operators is in none" in repr(made)


def test_time_on_a_gpu_is_apart() -> None:
    table = made_of(worker1=[op("mm", 0.0, 1.0), op("gemm", 0.5, 3.0, "CUDA 0, stream 7", device="CUDA")]).table()
    head, gemm, mm = (" ".join(line.split()) for line in repr(table).splitlines())
    assert head == "operator on calls self share total"
    assert (gemm, mm) == (
        "gemm CUDA 1 3.00 s 100.0% 3.00 s", "mm CPU 1 1.00 s 100.0% 1.00 s"
    )  # fmt: skip


def test_there_are_no_other_tables() -> None:
    with pytest.raises(ValueError, match="by operator, worker, kind, group or module, not by 'layer'"):
        two().table(by="layer")


def test_the_file_has_a_track_for_each_thread_and_the_memory(tmp_path: Path) -> None:
    saved = json.loads(two().save(tmp_path / "profile.json").read_text())
    assert {event["ph"] for event in saved["traceEvents"]} == {"M", "X", "C"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(saved, "M", name="thread_name")}
    slices = {(e["pid"], tracks[e["pid"], e["tid"]], e["name"]): (e["ts"], e["dur"]) for e in events(saved, "X")}
    # The first event of all is the first sample of memory, at 1 s.
    assert slices[0, "main", "mm"] == (9e6, 5e5) and slices[0, "pool", "mm"] == (10e6, 5e5)
    assert slices[1, "main", "add"] == (9e6, 2e6)
    sizes = (104.858, 419.43, 314.573)
    assert [e["args"] for e in events(saved, "C", pid=1)] == [{"resident (MB)": mb} for mb in sizes]


def test_operators_of_another_host_are_put_on_our_clock() -> None:
    here, there = made_of(w=[op("mm", 8.0, 1.0)]), made_of(ClockOffset(5.0, 0.001), w=[op("mm", 8.0, 1.0)])
    saved = [each.trace()["traceEvents"] for each in (here, there)]
    assert saved[0] == saved[1]  # all of one member, moved alike
    stamps = [{event["ts"] for event in each._member_events(0, each.members["w"])} for each in (here, there)]
    assert {stamp - 5.0 for stamp in stamps[0]} == stamps[1]


def test_an_operator_that_overlaps_others_is_a_span() -> None:
    made = made_of(w=[op("gloo:all_reduce", 2.0, 1.0, alone=False)]).trace()
    (begin,), (end,) = events(made, "b"), events(made, "e")
    assert begin["id"] == end["id"] and (begin["ts"], end["ts"]) == (1e6, 2e6) and not events(made, "X")


def test_a_profile_shows_its_longest_operators_and_says_how_many_more_there_are() -> None:
    many = made_of(left_out=4, worker1=[op(f"op{n}", float(n), 0.5 - 0.001 * n) for n in range(SHOWN + 3)])
    many.missing["worker2"] = "it was <lost>"
    lines = repr(many).splitlines()
    assert lines[3].startswith("op0 ") and lines[SHOWN + 3 : -1] == [
        "… and 3 more operators: 1.45 s, in .table()",
        "worker2 is missing: it was <lost>",
        "the file that .save() writes lacks 4 operators of worker1, the shortest",
    ]
    assert repr(made_of(worker1=[])).splitlines()[3:] == ["no operator of torch ran"]
    assert "it was &lt;lost&gt;" in many._repr_html_() and not many.complete
    assert many.trace()["otherData"] == {
        "left_out": {}, "operators_left_out": {"worker1": 4}, "missing": {"worker2": "it was <lost>"},
    }  # fmt: skip


# ---- real members


OTHER_HOSTS = {"template": "env RPCBENCH_HOST_ID={host} {cmd}", "hosts": "h1,h2"}  # this one, under other names
WORKERS: dict[str, dict[str, Any]] = {
    "process": {}, "kernel": {"kind": "kernel"},
    "command": {"launcher": "command", "options": OTHER_HOSTS, "address": "127.0.0.1"},
}  # fmt: skip


@pytest.fixture(scope="module", params=["process", *long("kernel", "command")])
def cluster(request: pytest.FixtureRequest, leak_check: LeakCheck) -> Iterator[rpcbench.Cluster]:
    with pytest.MonkeyPatch.context() as patch, leak_check(descriptors=False):
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # a command's python3
        with rpcbench.Cluster(2, **WORKERS[request.param]) as made:
            yield made


def within(made: dict[str, Any], pid: int, call: str, operator: str) -> list[Event]:
    """The operators of a member that lie within a call that it ran."""
    (begin,) = events(made, "b", pid=pid, cat="calls run", name=call)
    (end,) = [event for event in events(made, "e", pid=pid, cat="calls run") if event["id"] == begin["id"]]
    slices = events(made, "X", pid=pid, name=operator)
    return [one for one in slices if begin["ts"] <= one["ts"] and one["ts"] + one["dur"] <= end["ts"]]


@pytest.mark.process
def test_operators_of_calls_and_of_cells_lie_within_them(cluster: rpcbench.Cluster, tmp_path: Path) -> None:
    with profile() as made:
        rpc.rpc_sync("worker1", torch.mm, (torch.ones(8, 8), torch.ones(8, 8)))
        cluster.run("worker2", "import torch\n_ = torch.ones(4, 4).cumsum(0)")
    assert made.complete and [*made.members] == ["notebook", "worker1", "worker2"] and made.left_out == {}
    saved = json.loads(made.save(tmp_path / "p.json").read_text())
    assert len(within(saved, 1, "torch.mm", "aten::mm")) == len(within(saved, 2, "this cell", "aten::cumsum")) == 1
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(saved, "M", name="thread_name")}
    (cumsum,) = events(saved, "X", name="aten::cumsum")
    assert tracks[2, cumsum["tid"]] == "MainThread"
    calls = {row["operator"]: (row["calls"], [*row["workers"]]) for row in made.table().rows}
    assert calls["aten::mm"] == (1, ["worker1"]) and calls["aten::cumsum"] == (1, ["worker2"])
    assert {e["pid"] for e in events(saved, "C", name="memory")} == {0, 1, 2}
    assert all(row["peak"] > 1 << 20 for row in made.table("worker").rows)


@pytest.mark.process
def test_a_worker_is_profiled_while_it_runs_a_cell(cluster: rpcbench.Cluster, tmp_path: Path) -> None:
    asked, answered, over = (tmp_path / name for name in ("asked", "answered", "over"))
    cell = f"""
import time, torch
from pathlib import Path
Path({str(tmp_path / "begun")!r}).touch()
while not Path({str(over)!r}).exists():
    if Path({str(asked)!r}).exists():
        torch.ones(3).cumprod(0)
        Path({str(answered)!r}).touch()
    time.sleep(0.001)
"""
    running = threading.Thread(target=cluster.run, args=("worker1", cell))
    running.start()
    try:
        until((tmp_path / "begun").exists)
        with profile("worker1") as made:
            asked.touch()
            until(answered.exists)
    finally:
        over.touch()
        running.join()
    assert made.complete and [*made.members] == ["worker1"]
    assert "aten::cumprod" in {row["operator"] for row in made.table().rows}


@pytest.mark.process
def test_steps_of_a_pipeline_have_their_operators(cluster: rpcbench.Cluster) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe, x = Pipeline(split(model, cluster.workers), microbatches=2, loss_fn=nn.functional.mse_loss), torch.ones(4, 4)
    with profile("all") as made, pipe.batch(x, x) as batch:
        batch.gradients()
    found = made.trace()
    for pid in (1, 2):
        (first,) = events(found, "X", pid=pid, cat="pipeline", name="F0")
        inside = [
            e for e in events(found, "X", pid=pid, name="aten::addmm")
            if first["ts"] <= e["ts"] and e["ts"] + e["dur"] <= first["ts"] + first["dur"]
        ]  # fmt: skip
        assert len(inside) == 1
        assert events(found, "X", pid=pid, name="AddmmBackward0")


@pytest.mark.process
def test_a_profile_of_workers_has_kinds_of_time_and_the_straggler(cluster: rpcbench.Cluster) -> None:
    cell = """if True:
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
    """
    cluster.run("all", cell)
    late = "import time\nif dist.get_rank() == 1: time.sleep(0.5)\ndist.all_reduce(torch.ones(4))"
    with rpcbench.profile("all") as made:
        cluster.run("all", late)
    cluster.run("all", "dist.destroy_process_group()")
    rows = {row["worker"]: row for row in made.table(by="kind").rows}
    assert rows["worker1"]["communication"] > 0.4 > rows["worker2"]["communication"]
    assert rows["worker2"]["idle"] > 0.4 and rows["worker1"]["span"] < made.seconds + 60
    groups = {row["worker"]: row for row in made.table(by="group").rows}
    assert groups["worker1"]["collectives"] == 1 and groups["worker1"]["bytes"] == 16
    assert groups["worker1"]["exposed"] > 0.4 and groups["worker2"]["members"] == ["worker1", "worker2"]
    said = made.explain()
    assert said.startswith("worker2 kept the others waiting") and "No operator takes longer there" in said


@pytest.mark.process
def test_parts_of_workers_are_annotations_with_the_backward_of_their_forward(cluster: rpcbench.Cluster) -> None:
    cell = """if True:
        import torch
        from torch.profiler import record_function
        weight = torch.ones(64, 64, requires_grad=True)
        with record_function("model"):
            with record_function("layer"):
                loss = (weight @ weight).sum()
        loss.backward()
    """
    with rpcbench.profile("all") as made:
        cluster.run("all", cell)
    rows = {row["path"]: row for row in made.table(by="module").rows}
    assert rows["model", "layer"]["runs"] == 2 and rows["model", "layer"]["backward"] > 0
    assert rows[("model",)]["backward"] == pytest.approx(rows["model", "layer"]["backward"])
    assert rows[()]["part"] == "not named (torch.profiler.record_function names parts)" and rows[()]["seconds"] > 0


@pytest.mark.process
def test_bytes_are_those_of_cells_calls_and_the_block(cluster: rpcbench.Cluster) -> None:
    cell = "import torch\n_ = torch.ones(100, 100).cumsum(0)"
    cluster.run("worker1", cell)
    with profile("all", memory=True) as made:
        cluster.run("worker1", cell)
        rpc.rpc_sync("worker2", torch.zeros, (50, 50))
        held = torch.eye(10)
    rows = {row["operator"]: row for row in made.table().rows}
    assert made.complete and rows["aten::cumsum"]["allocated"] == 40_000 and rows["aten::zeros"]["allocated"] == 10_000
    assert rows["aten::eye"]["allocated"] == 4 * held.numel()
    assert not [name for name in rows if name.startswith("rpc_")]  # the second profiler must not record calls
    busy = {row["worker"]: row["busy"]["CPU"] for row in made.table("worker").rows}
    assert [*made.members] == sorted(busy) and all(0 < share < 1 for share in busy.values())
    with profile("all") as made:
        cluster.run("worker1", cell)
    assert {row["allocated"] for row in made.table().rows} == {None}


@pytest.mark.process
def test_one_profile_at_a_time_and_the_next_one_works(cluster: rpcbench.Cluster) -> None:
    with profile("worker1"):
        with pytest.raises(RpcError, match="notebook profiles already: end that block"), profile("worker2"):
            pass
        with pytest.raises(RpcError, match="worker1 is being profiled by another member"):
            rpc.rpc_sync("worker1", operator_profile.begin_profile, (5, 0))
    with pytest.raises(UnknownWorkerError, match="worker1"), profile("worker9"):
        pass
    with pytest.raises(ZeroDivisionError), profile("all"):
        _ = 1 / 0
    with profile("worker1") as made:
        rpc.rpc_sync("worker1", torch.mm, (torch.ones(2, 2), torch.ones(2, 2)))
    assert made.complete and "aten::mm" in repr(made)


@pytest.mark.process
def test_a_profile_whose_end_was_interrupted_gives_way_to_the_next(cluster: rpcbench.Cluster) -> None:
    rpc.rpc_sync("worker1", operator_profile.begin_profile, (0, -1))
    with profile("worker1") as made:
        rpc.rpc_sync("worker1", torch.mm, (torch.ones(2, 2), torch.ones(2, 2)))
    assert made.complete and [row["calls"] for row in made.table().rows if row["operator"] == "aten::mm"] == [1]


@pytest.mark.process
def test_a_profile_that_ends_before_it_begins_never_begins(cluster: rpcbench.Cluster) -> None:
    """After Ctrl-C the request to end it can overtake the one to begin."""
    with pytest.raises(RpcError, match="was ended before its time"):
        rpc.rpc_sync("worker1", operator_profile.end_profile, (0, -2))
    with pytest.raises(RpcError, match="the profile of worker1 has ended before it began"):
        rpc.rpc_sync("worker1", operator_profile.begin_profile, (0, -2))
    with profile("worker1") as made:
        pass
    assert made.complete


@pytest.mark.process
def test_a_profiler_of_torch_is_left_alone(cluster: rpcbench.Cluster) -> None:
    with torch.profiler.profile() as theirs:
        with pytest.raises(RpcError, match="a profiler of torch runs on notebook already"), profile("all"):
            pass
        torch.ones(2).cumsum(0)
    assert "aten::cumsum" in {event.name for event in theirs.events()}
    with profile("worker1") as made:  # its profile ended, too
        pass
    assert made.complete


@pytest.mark.process
def test_a_member_lost_meanwhile_is_missing_and_the_others_are_there(no_leaks: None, tmp_path: Path) -> None:
    with rpcbench.Cluster(2) as cluster:
        with profile() as made:
            cluster.kill("worker2")
            rpc.rpc_sync("worker1", torch.mm, (torch.ones(8, 8), torch.ones(8, 8)))
        assert not made.complete and [*made.missing] == ["worker2"] and [*made.members] == ["notebook", "worker1"]
        assert "worker2 is missing: " in repr(made) and "aten::mm" in repr(made)
        assert "worker2" in json.loads(made.save(tmp_path / "p.json").read_text())["otherData"]["missing"]
        with pytest.raises(WorkerLostError, match="worker2"), profile("worker2"):
            pass
