"""Traces of torch's profiler from all ranks, joined: kinds, stragglers, clocks, comparison, and files that are none."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from made_traces import START, STEP, cpu_job, gpu_job, slice_event, trace_of, write_job
from torch.profiler import ProfilerActivity

import rpcbench
from rpcbench.panels import panel
from rpcbench.telemetry import profile_files
from rpcbench.telemetry.profile_files import TracedProfile


def opened(folder: Path, traces: list[dict[str, Any]], packed: bool = False) -> TracedProfile:
    found: TracedProfile = rpcbench.profile.open(write_job(folder, traces, packed))
    return found


def kinds(found: TracedProfile) -> dict[str, dict[str, float]]:
    """Milliseconds by kind, of each rank."""
    rows = {row["worker"]: row for row in found.table(by="kind").rows}
    return {
        worker: {name: round(each * 1e3, 4) for name, each in row.items() if name != "worker"}
        for worker, row in rows.items()
    }


@pytest.mark.parametrize("packed", [False, True])
def test_kinds_of_gpus_are_those_of_their_streams(tmp_path: Path, packed: bool) -> None:
    found = kinds(opened(tmp_path, gpu_job(steps=3), packed))
    fast, slow = found["rank 0"], found["rank 1"]
    assert fast["span"] == 29 and slow["span"] == 29.6  # the slow rank's last copy is the end
    assert (fast["compute"], fast["communication"], fast["overlap"], fast["exposed"]) == (18, 9, 3, 6)
    assert fast["copies"] == 1.5 and fast["idle"] == 29 - 3 * (4 + 4)
    assert (slow["compute"], slow["communication"], slow["overlap"]) == (24, 3, 3)
    assert slow["copies"] == 1.2 and slow["idle"] == pytest.approx(29.6 - 3 * (6 + 2 + 0.4))


def test_kinds_of_threads_are_those_of_the_innermost_operator_in_the_whole_recording(tmp_path: Path) -> None:
    fast, slow = kinds(opened(tmp_path, cpu_job())).values()
    assert (fast["compute"], fast["communication"], fast["overlap"], fast["span"]) == (2, 6, 0, 10)
    assert (slow["compute"], slow["communication"], slow["idle"]) == (6, 2, 2)


def test_the_straggler_is_named_with_the_operator_that_takes_longer_there(tmp_path: Path) -> None:
    found = opened(tmp_path, gpu_job(size=3, slow=1))
    one, gemm = found.explain().splitlines()
    assert one == "rank 1 kept the others waiting 6.00 ms in 3 of 3 collectives."
    assert gemm.strip() == "gemm on CUDA takes 6.00 ms longer there than on the others (6 calls, 6 elsewhere)"
    assert one in repr(found) and "rank 1" in found.collectives.summary


def test_where_no_operator_is_longer_that_is_said(tmp_path: Path) -> None:
    traces = cpu_job()
    traces[1]["traceEvents"] = copy.deepcopy(traces[0]["traceEvents"])
    for event in traces[1]["traceEvents"]:
        event["ts"] += 3000.0
    assert "No operator takes longer there: look at Python" in opened(tmp_path, traces).explain()


def uneven_job(batches: int, scale: float) -> list[dict[str, Any]]:
    """The second of two ranks has so many batches, the other one has one, and waits in an all_reduce for it."""
    traces = []
    for rank in range(2):
        own = [slice_event("PyTorch Profiler (0)", "Trace", 0, 9500, 0)]
        for n in range(batches if rank else 1):
            for name, begin, seconds in (("mm", 10, 200), ("add", 220, 180), ("relu", 420, 160)):
                at = 600 * n + begin
                own.append(slice_event(f"aten::{name}", "cpu_op", at, at + scale * seconds, 1))
        came, about = 6100 if rank else 700, {"Input Dims": [[1000]], "Input type": ["float"]}
        own.append(slice_event("c10d::allreduce_", "cpu_op", came, 7000, 1))
        own.append(slice_event("gloo:all_reduce", "user_annotation", came, 8000, 2, **about))
        traces.append(trace_of(rank, 2, own))
    return traces


def test_a_rank_that_runs_more_operators_is_not_sent_to_its_data_loader(tmp_path: Path) -> None:
    waits, cause = opened(tmp_path, uneven_job(batches=4, scale=1)).explain().splitlines()
    assert waits.startswith("rank 1 kept the others waiting 5.40 ms")
    assert "mm takes 600 µs longer there than on the others (4 calls, 1 elsewhere)" in cause
    (other := tmp_path / "small").mkdir()
    cause = opened(other, uneven_job(batches=9, scale=0.3)).explain().splitlines()[1]
    assert cause.strip() == (
        "It runs more operators, 27 calls against 3 elsewhere, and is busy in them for 1.46 ms against 162 µs. "
        "The longest of the difference: aten::mm (9 calls, 1 elsewhere), aten::add (9 calls, 1 elsewhere), "
        "aten::relu (9 calls, 1 elsewhere)."
    )


def test_more_operators_that_take_no_longer_are_told_beside_other_causes(tmp_path: Path) -> None:
    cause = opened(tmp_path, uneven_job(batches=2, scale=0.1)).explain().splitlines()[1]
    told = "It runs more operators, 6 calls against 3 elsewhere, but the difference, 108 µs against 54.0 µs, is less"
    assert cause.strip().startswith(told) and "look at Python, data loading" in cause


def test_all_ranks_are_on_one_trace_that_perfetto_shows(tmp_path: Path) -> None:
    saved = opened(tmp_path, gpu_job(size=3)).save(tmp_path / "all.json")
    events = json.loads(saved.read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes == {"rank 0", "rank 1", "rank 2"}
    begins = [event["ts"] for event in events if event["name"] == "gemm" and event["pid"] == 2]
    assert begins == [0.0, 5000.0, 10000.0, 15000.0, 20000.0, 25000.0]
    assert any(event["name"] == "waits for rank 1" for event in events)


def test_tables_by_operator_and_worker_are_those_of_other_profiles(tmp_path: Path) -> None:
    found = opened(tmp_path, gpu_job(steps=3))
    rows = {(row["operator"], row["device"]): row for row in found.table().rows}
    assert rows["gemm", "CUDA"]["calls"] == 12 and rows["gemm", "CUDA"]["workers"]["rank 0"] == pytest.approx(18e-3)
    assert rows["ProfilerStep#*", "CPU"]["calls"] == 6
    assert "memory" not in repr(found.table(by="worker"))
    assert [row["worker"] for row in found.table(by="worker").rows] == ["rank 0", "rank 1"]


def test_mfu_is_the_share_of_the_peak_over_the_whole_span(tmp_path: Path) -> None:
    found = opened(tmp_path, gpu_job(steps=3))
    share = found.mfu("h100", "float32")["rank 0"]
    assert share == pytest.approx(3 * 2 * 64 * 32 * 16 / 494.7e12 / 29e-3)
    with pytest.raises(ValueError, match="there is no hardware 'h9'"):
        found.mfu("h9")
    for trace in (traces := gpu_job()):
        for event in trace["traceEvents"]:
            event["args"].pop("Input Dims", None)
    with pytest.raises(ValueError, match="record_shapes=True"):
        opened(tmp_path, traces).mfu("h100")


def test_two_profiles_are_compared_by_operator_and_by_kind(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    before = opened(tmp_path / "before", gpu_job(slow=-1))
    after = opened(tmp_path, gpu_job(slow=1))
    longest = after.compare(before).rows[0]
    assert (longest["operator"], longest["device"]) == ("gemm", "CUDA")
    assert longest["longer"] == pytest.approx(3e-3)  # 6 ms on one of two ranks
    by_kind = {row["kind"]: row["longer"] for row in after.compare(before, by="kind").rows}
    assert by_kind["compute"] == pytest.approx(3e-3) and by_kind["communication"] == pytest.approx(-3e-3)
    assert "+3.00 ms" in repr(after.compare(before))
    with pytest.raises(ValueError, match="compared by operator or kind, not by 'worker'"):
        after.compare(before, by="worker")


# ---- clocks


def test_clocks_that_disagree_are_told_and_the_times_moved(tmp_path: Path) -> None:
    traces = gpu_job(size=3)
    traces[2]["baseTimeNanoseconds"] += 2_000_000_000
    found = opened(tmp_path, traces)
    (told,) = found.remarks
    assert re.match(r"The clock of rank 2 is 2\.00 s ahead of that of the first rank, to within", told)
    assert told in repr(found) and "rank 1 kept the others waiting 6.00 ms in 3 of 3" in found.explain()
    assert found.collectives.seconds < 0.04


def test_clocks_that_the_collectives_allow_are_left_alone(tmp_path: Path) -> None:
    traces = gpu_job()
    traces[1]["baseTimeNanoseconds"] += 500_000  # less than any collective lasts
    assert opened(tmp_path, traces).remarks == []


def test_a_base_far_from_the_stamps_keeps_their_nanoseconds(tmp_path: Path) -> None:
    found = opened(tmp_path, gpu_job())
    assert found.members["rank 0"].operators[-1].begin == pytest.approx(2 * STEP * 1e-6 + 7.5e-3, abs=1e-9)


# ---- collectives that cannot be matched


def without_number(traces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for trace in traces:
        for event in trace["traceEvents"]:
            event["args"].pop("Seq", None)
    return traces


def test_without_numbers_the_order_counts(tmp_path: Path) -> None:
    assert "rank 1 kept the others waiting 6.00 ms" in opened(tmp_path, without_number(gpu_job(size=3))).explain()


@pytest.mark.parametrize("end", [21, 28])
def test_without_numbers_the_times_say_where_the_order_begins(tmp_path: Path, end: int) -> None:
    one, two = without_number(gpu_job(steps=4))
    one["traceEvents"], two["traceEvents"] = one["traceEvents"][: 1 + end], two["traceEvents"][8:]
    found = opened(tmp_path, [one, two])  # the first rank recorded steps 0 to 2 or 3, the second 1 to 3
    assert found.remarks == [] and f"kept the others waiting {2 * (end // 7 - 1)}.00 ms" in found.explain()
    assert [row["number"] for row in found.collectives.rows.values()] == [1, 2, 3, 4]


def test_ranks_with_other_numbers_of_collectives_are_told(tmp_path: Path) -> None:
    traces = without_number([gpu_job(steps=2)[0], gpu_job(steps=3)[1]])
    traces[1]["baseTimeNanoseconds"] += 1_000_000_000
    found = opened(tmp_path, traces)
    assert found.remarks == [
        "rank 0 has 2 collectives, rank 1 3, so the collectives of group 0 are not matched. Let all ranks record the "
        "same steps, at the same time."
    ]
    assert not found.collectives.rows and kinds(found)["rank 1"]["communication"] == 3


def test_ranks_with_other_collectives_are_told(tmp_path: Path) -> None:
    traces = gpu_job()
    for event in traces[1]["traceEvents"]:
        if event["args"].get("Seq") == 2:
            event["args"]["Collective name"] = "allgather"
    assert "Collective 2 is all_reduce on rank 0 and all_gather on rank 1" in opened(tmp_path, traces).remarks[0]


def test_collectives_that_no_clock_explains_are_told(tmp_path: Path) -> None:
    traces = without_number(gpu_job(steps=3))
    for event in traces[1]["traceEvents"][-7:]:
        event["ts"] += 50_000
    assert "No offset of clocks explains the collectives of rank 1" in opened(tmp_path, traces).remarks[0]


def test_of_many_collectives_the_latest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_files, "PARTS_KEPT", 2)
    found = opened(tmp_path, gpu_job(steps=3))
    assert [row["number"] for row in found.collectives.rows.values()] == [2, 3]
    assert found.remarks == ["Of 3 collectives the latest 2 are shown."]


def test_transfers_between_two_ranks_are_no_collectives(tmp_path: Path) -> None:
    traces = gpu_job()
    for trace in traces:
        for event in trace["traceEvents"]:
            if "Seq" in event["args"]:
                event["args"]["Collective name"] = "send"
    found = opened(tmp_path, traces)
    assert not found.collectives.rows and kinds(found)["rank 0"]["communication"] == 9


# ---- ranks and files


def test_missing_ranks_are_told_in_one_sentence(tmp_path: Path) -> None:
    found = opened(tmp_path, gpu_job(size=8)[:2])
    assert [*found.missing] == [f"rank {n}" for n in range(2, 8)] and not found.complete
    assert "rank 2, rank 3, rank 4, rank 5 and 2 others are missing: not among the files" in repr(found)
    assert "kept the others waiting" in found.explain()  # the two that are there


def test_a_rank_may_stand_in_the_name_of_its_file_alone(tmp_path: Path) -> None:
    traces = [trace_of(None, 2, trace["traceEvents"]) for trace in gpu_job()]
    assert [*opened(tmp_path, traces).members] == ["rank 0", "rank 1"]
    (tmp_path / "a.json").write_text(json.dumps(traces[0]))
    assert [*rpcbench.profile.open(tmp_path / "a.json").members] == ["rank 0"]
    with pytest.raises(ValueError, match=r"a\.json does not say its rank: give its name the rank, as trace_rank3"):
        rpcbench.profile.open([tmp_path / "a.json", tmp_path / "trace_rank1.json"])


def test_files_of_two_jobs_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rank0\.json is of a job of 2 ranks, .*rank1\.json of one of 4"):
        opened(tmp_path, [gpu_job(size=2)[0], gpu_job(size=4)[1]])
    with pytest.raises(ValueError, match="are both of rank 0: give the files of one job"):
        opened(tmp_path, [gpu_job()[0], gpu_job()[0]])


BAD = {
    "empty": (b"", "it is empty"),
    "cut": (json.dumps(gpu_job()[0]).encode()[:-300], "it is cut off"),
    "cut gzip": (b"\x1f\x8b\x08\x00", "it is cut off"),
    "no gzip": (b"\x1f\x8bnonsense", "it is damaged"),
    "another JSON": (b'{"entries": [], "version": "2.4"}', "JSON without a list traceEvents"),
    "a notebook": (b"import torch", "no list traceEvents"),
    "other events": (b'{"traceEvents": [1, 2]}', "Expected `object`, got `int`"),
    "no operators": (json.dumps(trace_of(0, 1, [])).encode(), "neither an operator nor the span"),
    "a text as time": (b'{"traceEvents": [{"ph": "X", "ts": "soon"}]}', "Expected `float`, got `str`"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_is_no_trace_is_told_with_its_name(tmp_path: Path, kind: str) -> None:
    data, said = BAD[kind]
    (tmp_path / "trace_rank0.json").write_bytes(data)
    with pytest.raises(ValueError, match=rf"trace_rank0\.json cannot be read as a trace of torch's profiler: .*{said}"):
        rpcbench.profile.open(tmp_path / "trace_*")


def test_a_rank_that_runs_nothing_is_idle(tmp_path: Path) -> None:
    traces = cpu_job()
    traces[0]["traceEvents"] = [event for event in traces[0]["traceEvents"] if event["cat"] == "Trace"]
    found = opened(tmp_path, traces)
    assert kinds(found)["rank 0"]["idle"] == kinds(found)["rank 0"]["span"] == 10


def test_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        rpcbench.profile.open(tmp_path / "trace_*")


def test_names_of_kernels_with_other_bytes_are_read(tmp_path: Path) -> None:
    data = json.dumps(gpu_job(size=1)[0]).replace("gemm", "ge\\u0001mm").encode()
    (tmp_path / "trace_rank0.json").write_bytes(data.replace(b"\\u0001", b"\xff\x01"))
    found = rpcbench.profile.open(tmp_path / "trace_rank0.json")
    assert "ge\ufffd\x01mm" in {row["operator"] for row in found.table().rows}


def test_a_trace_of_this_torch_is_read(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as recorded:
        _ = torch.ones(64, 32) @ torch.ones(32, 16)
        torch.nn.functional.conv2d(torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3), stride=2)
    recorded.export_chrome_trace(str(tmp_path / "one.json"))
    found: TracedProfile = rpcbench.profile.open(tmp_path / "one.json")
    (made,) = found.members.values()
    assert made.flops == 2 * 64 * 32 * 16 + 2 * (4 * 3 * 3 * 3) * 2 * 3 * 3
    own = {each.name: each.calls for each in made.sums}
    assert own["aten::mm"] == 1 and not any("built-in" in name for name in own)
    assert made.kinds is not None and 0 < made.kinds.compute < made.kinds.span == found.seconds


def test_a_panel_shows_its_collectives(tmp_path: Path) -> None:
    assert "all_reduce" in str(panel("messages", opened(tmp_path, gpu_job())))
    assert slice_event("x", "cpu_op", 1.0, 2.0, 3)["ts"] == START + 1.0
