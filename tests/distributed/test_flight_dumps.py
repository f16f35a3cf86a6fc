"""Dumps of torch's flight recorder: real ones of a torchrun job, damaged ones, hostile ones, and those of NCCL."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rpcbench
from rpcbench.distributed.flight_dumps import FlightDump, describe_gaps, parse_dump, read_dumps
from rpcbench.panels import panel
from rpcbench.telemetry.trace import CollectiveTimeline, dumped_world

PROGRAM = """
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
dist.init_process_group("gloo")
rank, pair = dist.get_rank(), dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(torch.ones(4, 8))
if rank < 2:
    dist.broadcast(torch.ones(2), 0, group=pair)
open(f"nccl_trace_rank_{rank}", "wb").write(_dump_fr_trace(True, True, False))
dist.barrier()
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the dumps of three ranks of a job that knows nothing of this project."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "job.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "job.py"]
    subprocess.run(torchrun, cwd=folder, check=True, capture_output=True, timeout=120)
    return folder


def test_a_jobs_dumps_are_its_collectives(dumps: Path) -> None:
    timeline = rpcbench.collectives.open(dumps / "nccl_trace_rank_*")
    reduced = [row for row in timeline.rows.values() if row["op"] == "all_reduce"]
    assert [(row["group"], row["number"], row["shape"], row["bytes"]) for row in reduced] == [
        ("world", number, "float32[4, 8]", 128) for number in (1, 2, 3)
    ]
    assert all(row["members"] == ["rank 0", "rank 1", "rank 2"] and row["site"] == "job.py:7" for row in reduced)
    (sent,) = (row for row in timeline.rows.values() if row["op"] == "broadcast")
    assert sent["members"] == ["rank 0", "rank 1"] and sent["group"] == "group 1" and sent["site"] == "job.py:9"
    assert not any(row["missing"] for row in timeline.rows.values())
    assert "rank 2 │" in str(timeline)


def test_the_messages_panel_shows_a_jobs_dumps(dumps: Path) -> None:
    text = str(panel("messages", rpcbench.collectives.open(str(dumps / "nccl_trace_rank_*"))))
    assert "4 collectives" in text


def test_a_rank_without_a_dump_is_named(dumps: Path) -> None:
    found = read_dumps([dumps / f"nccl_trace_rank_{rank}" for rank in (0, 2)])
    groups = {"0": {"name": "0", "desc": "", "ranks": [0, 1, 2]}}
    listed = [FlightDump(one.rank, one.source, one.entries, groups) for one in found]
    assert describe_gaps(listed) == ["1 rank without a dump: 1. Each ended before it wrote one."]


def nccl_entry(**fields: Any) -> dict[str, Any]:
    """An entry as NCCL's recorder has it, with the times of its kernels."""
    return {
        "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_gather", "collective_seq_id": 7,
        "p2p_seq_id": 0, "op_id": 7, "time_created_ns": 10**18, "time_discovered_started_ns": 10**18 + 5,
        "time_discovered_completed_ns": 10**18 + 2_000_000, "state": "completed", "retired": True, "is_p2p": False,
        "input_sizes": [[16]], "input_dtypes": ["BFloat16"], "frames": [],
    } | fields  # fmt: skip


def nccl_dump(rank: int, *entries: dict[str, Any]) -> bytes:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return pickle.dumps({"version": "2.4", "pg_config": groups, "entries": [*entries], "rank": rank}, protocol=2)


def test_nccls_recorder_knows_ends_and_what_never_ended() -> None:
    late = nccl_entry(collective_seq_id=8, state="started", retired=False, time_discovered_completed_ns=None)
    dumps = [parse_dump(nccl_dump(0, nccl_entry(), late), "a"), parse_dump(nccl_dump(1, nccl_entry()), "b")]
    timeline = CollectiveTimeline.from_world(dumped_world(dumps, 2))
    done, hangs = timeline.rows.values()
    assert done["end"] - done["begin"] == pytest.approx(0.002, abs=1e-6)
    assert done["state"] == "done" and done["end_known"]
    assert hangs["state"] == "open" and hangs["missing"] == ["rank 1"]
    assert "all_gather #8 of world is under way; rank 1 not there yet" in timeline.summary


class Hostile:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


def test_a_pickle_that_names_a_function_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    data = pickle.dumps({"version": "2.4", "entries": [Hostile()]})
    with pytest.raises(ValueError, match=r"bad_3 cannot be read .* it names builtins\.print, .* nothing of it ran"):
        parse_dump(data, "bad_3")
    assert "it ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "dump_0 is empty"),
        (nccl_dump(0, nccl_entry())[:-40], "it is cut off"),
        (b'{"version": "2.4", "entr', "cannot be read"),
        (b"no dump", "cannot be read"),
        (json.dumps([1]).encode(), "cannot be read"),
        (json.dumps({"entries": []}).encode(), "no list of entries with a version"),
        (json.dumps({"version": "2", "entries": []}).encode(), "does not say its rank"),
        (json.dumps({"version": "2", "rank": 0, "entries": [3]}).encode(), "entry 0: it is no dict"),
        (json.dumps({"version": "2", "rank": 0, "entries": [{}]}).encode(), "entry 0: process_group is missing"),
        (nccl_dump(0, nccl_entry()).replace(b"[0, 1]", b"[0, x]"), "the ranks of group '0' cannot be read"),
    ],
)
def test_what_is_no_dump_is_told(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_dump(data, "dump_0")


def test_two_files_of_one_rank_and_none(tmp_path: Path) -> None:
    for name in ("a_rank_0", "b_rank_0"):
        (tmp_path / name).write_bytes(nccl_dump(0))
    with pytest.raises(ValueError, match=r"are both of rank 0: give the files of one job"):
        rpcbench.collectives.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        rpcbench.collectives.open(tmp_path / "trace_*")


def test_empty_recorders_say_how_to_switch_them_on() -> None:
    (remark,) = describe_gaps([parse_dump(nccl_dump(rank), "x") for rank in (0, 1)])
    assert remark.startswith("The recorders of rank 0, rank 1 are empty: TORCH_FR_BUFFER_SIZE=2000")
