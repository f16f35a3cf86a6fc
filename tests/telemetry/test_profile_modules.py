"""The table by part of the model: nested modules and annotations, backward operators, kernels, what nothing names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from made_traces import START, Event, kernel, slice_event, trace_of, write_job
from torch import nn
from torch.profiler import ProfilerActivity, record_function

import rpcbench
from rpcbench.runtime import operator_parts
from rpcbench.runtime.operator_columns import OperatorColumns
from rpcbench.runtime.operator_parts import PartColumns
from rpcbench.telemetry.profile_files import TracedProfile

COLUMNS = "runs", "seconds", "own", "backward", "communication", "on_device"
Table = dict[str, dict[str, float]]


def opened(folder: Path, events: list[Event]) -> TracedProfile:
    found: TracedProfile = rpcbench.profile.open(write_job(folder, [trace_of(0, 1, events)]))
    return found


def table(found: Any, depth: int = 9) -> Table:
    """Milliseconds by path, without the columns that are 0."""
    rows = {}
    for row in found.table(by="module", depth=depth).rows:
        scaled = {name: row[name] if name == "runs" else round(row[name] * 1e3, 6) for name in COLUMNS}
        rows["/".join(row["path"])] = {name: value for name, value in scaled.items() if value}
    return rows


def module(name: str, begin: float, end: float, tid: int = 1) -> Event:
    return slice_event(f"nn.Module: {name}", "python_function", begin, end, tid)


def operator(name: str, begin: float, end: float, tid: int = 1) -> Event:
    return slice_event(name, "cpu_op", begin, end, tid)


def link(number: int, forward: float, backward: float, thread: int) -> list[Event]:
    """An operator at `forward` of thread 1 has caused the one at `backward` of another thread."""
    at = {"cat": "fwdbwd", "name": "fwdbwd", "pid": 0, "id": number}
    return [
        {**at, "ph": "s", "tid": 1, "ts": START + forward},
        {**at, "ph": "f", "tid": thread, "ts": START + backward},
    ]


def model() -> list[Event]:
    """A forward of 8 ms within an annotation of 10 ms on thread 1; a backward of 6 ms on thread 2; 1 ms of others."""
    return [
        slice_event("forward", "user_annotation", 0, 10_000, 1),
        operator("aten::linear", 1000, 3000),  # in Linear_0
        operator("aten::mm", 1500, 2500),  # within it
        operator("c10d::allreduce_", 5000, 6500),  # in Linear_1
        operator("_c10d_functional::wait_tensor", 5100, 6000),  # within it, so it counts once
        operator("aten::add", 8200, 8700),  # in Net_0 alone
        operator("autograd::engine::evaluate_function: MmBackward0", 12_000, 16_000, 2),
        operator("MmBackward0", 12_500, 15_000, 2),
        operator("c10d::allreduce_", 13_000, 14_000, 2),
        operator("autograd::engine::evaluate_function: AddBackward0", 16_000, 18_000, 2),
        operator("aten::randn", 19_000, 20_000),
        *link(1, 1500, 12_500, 2),
        *link(2, 8200, 16_000, 2),
        module("Net_0", 1000, 9000),
        module("Linear_0", 1000, 3500),
        module("Linear_1", 4500, 7000),
    ]


def test_parts_have_their_time_own_time_backward_and_communication(tmp_path: Path) -> None:
    assert table(opened(tmp_path, model())) == {
        "forward": {"runs": 1, "seconds": 10, "own": 2, "backward": 6, "communication": 2.5},
        "forward/Net_0": {"runs": 1, "seconds": 8, "own": 3, "backward": 6, "communication": 2.5},
        "forward/Net_0/Linear_0": {"runs": 1, "seconds": 2.5, "own": 2.5, "backward": 4, "communication": 1},
        "forward/Net_0/Linear_1": {"runs": 1, "seconds": 2.5, "own": 2.5, "communication": 1.5},
        "": {"runs": 1, "seconds": 1, "own": 1},
    }


def test_runs_and_steps_of_one_name_are_one_row(tmp_path: Path) -> None:
    steps = [slice_event(f"ProfilerStep#{n}", "user_annotation", n * 1000, n * 1000 + 900, 1) for n in range(3)]
    found = opened(tmp_path, [*steps, *(module("Net_0", n * 1000, n * 1000 + 500) for n in range(3))])
    assert table(found) == {
        "ProfilerStep#*": {"runs": 3, "seconds": 2.7, "own": 1.2},
        "ProfilerStep#*/Net_0": {"runs": 3, "seconds": 1.5, "own": 1.5},
    }


def test_a_backward_within_the_annotation_of_its_forward_counts_its_communication_once(tmp_path: Path) -> None:
    step = slice_event("step", "user_annotation", 0, 30_000, 1)
    step2 = {**step, "tid": 2}  # as the engine's thread has no ranges, this one makes it the same part
    found = table(opened(tmp_path, [step, step2, *model()]))
    assert found["step"]["communication"] == 2.5 and found["step/forward/Net_0/Linear_0"]["communication"] == 1


def test_backward_operators_within_a_backward_operator_count_once(tmp_path: Path) -> None:
    engine = "autograd::engine::evaluate_function: "
    events = [
        module("Net_0", 0, 1000), module("Linear_0", 100, 200),
        operator("checkpoint", 10, 20), operator("mm", 110, 120),
        operator(f"{engine}CheckpointBackward", 2000, 5000, 2), operator(f"{engine}MmBackward0", 3000, 4000, 2),
        *link(1, 10, 2000, 2), *link(2, 110, 3000, 2),
    ]  # fmt: skip
    found = table(opened(tmp_path, events))
    assert found["Net_0"]["backward"] == 3 and found["Net_0/Linear_0"]["backward"] == 1


def test_kernels_count_where_they_were_launched_and_those_of_backward_where_the_forward_was(tmp_path: Path) -> None:
    def launch(number: int, begin: float, tid: int) -> Event:
        return slice_event("cudaLaunchKernel", "cuda_runtime", begin, begin + 10, tid, correlation=number)

    events = [
        *model(), launch(7, 2000, 1), launch(8, 12_600, 2), launch(9, 13_500, 2), launch(10, 19_500, 1),
        kernel("gemm", 3000, 4000, 7, correlation=7), kernel("gemm", 13_000, 15_000, 7, correlation=8),
        kernel("ncclDevKernel_AllReduce", 15_000, 15_500, 20, correlation=9),
        kernel("rand", 21_000, 21_250, 7, correlation=10), kernel("graph", 30_000, 34_000, 7),
    ]  # fmt: skip
    found = opened(tmp_path, events)
    rows = table(found)
    assert {path: row.get("on_device") for path, row in rows.items()} == {
        "forward": 3, "forward/Net_0": 3, "forward/Net_0/Linear_0": 3, "forward/Net_0/Linear_1": None, "": 0.25
    }  # fmt: skip
    assert rows["forward"]["communication"] == rows["forward/Net_0/Linear_0"]["communication"] == 0.5
    assert "on CUDA" in repr(found.table(by="module"))


def test_a_table_shows_parts_down_to_its_depth_and_marks_those_that_have_more(tmp_path: Path) -> None:
    found = opened(tmp_path, model())
    shown = repr(found.table(by="module", depth=2)).splitlines()
    assert [line.split("  ")[0].rstrip() for line in shown] == [
        "part", "forward", "\u00a0\u00a0Net_0 …", "not named (record with_stack=True, or record_function)"
    ]  # fmt: skip
    assert table(found, depth=1)["forward"]["own"] == 2
    with pytest.raises(ValueError, match="of depth 0 has no rows: give 1 or more"):
        found.table(by="module", depth=0)


def test_ranks_are_summed_and_each_has_a_column(tmp_path: Path) -> None:
    found = rpcbench.profile.open(write_job(tmp_path, [trace_of(n, 2, model()) for n in range(2)]))
    row = found.table(by="module").rows[0]
    assert row["runs"] == 2 and row["seconds"] == pytest.approx(20e-3)
    assert {name: round(each * 1e3, 6) for name, each in row["workers"].items()} == {"rank 0": 10, "rank 1": 10}


def test_of_too_many_parts_the_time_of_the_others_stays_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_parts, "MOST_PARTS", 2)
    parts = PartColumns()
    for name, begin, seconds in [("a", 0.0, 10.0), ("b", 1.0, 2.0), ("c", 4.0, 3.0), ("d", 12.0, 1.0)]:
        parts.add_range(name, "main", begin, seconds)
    assert [(each.path, each.seconds, each.own) for each in parts.sum_parts(OperatorColumns())] == [
        (("a",), 10.0, 8.0), (("a", "b"), 2.0, 2.0)
    ]  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(given).relu())
        return result


def test_parts_of_this_torch_are_those_of_its_events(tmp_path: Path) -> None:
    net = Net()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True) as recorded:
        for _ in range(3):
            with record_function("forward"):
                loss = net(torch.ones(32, 64)).sum()
            with record_function("backward"):
                loss.backward()
    recorded.export_chrome_trace(str(tmp_path / "one.json"))
    rows = {row["path"]: row for row in rpcbench.profile.open(tmp_path / "one.json").table(by="module").rows}
    assert {path: row["runs"] for path, row in rows.items() if path} == {
        ("forward",): 3, ("forward", "Net_0"): 3, ("forward", "Net_0", "Linear_0"): 3,
        ("forward", "Net_0", "Linear_1"): 3, ("backward",): 3,
    }  # fmt: skip
    inner = [rows["forward", "Net_0", f"Linear_{n}"] for n in range(2)]
    outer, forward = rows["forward", "Net_0"], rows[("forward",)]
    assert outer["own"] == pytest.approx(outer["seconds"] - sum(row["seconds"] for row in inner))
    assert all(row["backward"] > 0 for row in inner) and forward["backward"] > outer["backward"]  # that of sum
    assert forward["backward"] < rows[("backward",)]["seconds"] and not rows[("backward",)]["backward"]
