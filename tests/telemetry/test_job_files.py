"""Files that a job has left, opened by `rpcbench open` and played by `rpcbench.replay`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from made_traces import gpu_job, write_job

import rpcbench
from rpcbench.cli.main import main
from rpcbench.telemetry.job_files import DUMPS, RECORD, TRACES, identify_files, make_record, record_collectives
from rpcbench.telemetry.recording import FORMAT, Player

RECORD_TEXT = json.dumps({"format": FORMAT, "version": 1, "holds": {}, "leaves_out": ["values"], "frames": []})


def dump_of(rank: int) -> str:
    entries = [
        {"process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "collective_seq_id": n,
         "time_created_ns": 10**18 + n * 10**9, "time_discovered_completed_ns": 10**18 + n * 10**9 + 10**8,
         "input_sizes": [[4]], "input_dtypes": ["Float"], "is_p2p": False, "state": "completed"}
        for n in range(1, 4 - rank)
    ]  # fmt: skip
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return json.dumps({"version": "2.4", "pg_config": groups, "rank": rank, "entries": entries})


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    for rank in range(2):
        (tmp_path / f"fr_{rank}").write_text(dump_of(rank))
    return tmp_path / "fr_*"


def test_kinds_are_told_by_the_content(tmp_path: Path, dumps: Path) -> None:
    (tmp_path / "record").write_text(RECORD_TEXT)
    (tmp_path / "packed").mkdir()
    assert identify_files(write_job(tmp_path, gpu_job())) == TRACES
    assert identify_files(write_job(tmp_path / "packed", gpu_job(), packed=True)) == TRACES
    assert identify_files(dumps) == DUMPS and identify_files(tmp_path / "record") == RECORD


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "is empty"), (b"import torch", "no trace of"), (b"\x1f\x8bnonsense", "no trace of")]
)
def test_other_files_are_told_by_name(
    tmp_path: Path, data: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(data)
    assert main(["open", "--text", str(tmp_path / "file")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("rpcbench open: ") and str(tmp_path / "file") in told and said in told
    assert told.count("\n") == 1


def test_files_of_several_kinds_are_told(tmp_path: Path, dumps: Path) -> None:
    write_job(tmp_path, gpu_job())
    with pytest.raises(
        ValueError, match=r"fr_0 is one of dumps, .*trace_rank0\.json one of traces: give one record, or"
    ):
        identify_files([dumps, tmp_path / "trace_rank*"])
    with pytest.raises(FileNotFoundError, match="there is no file"):
        identify_files(tmp_path / "absent*")


def test_open_prints_the_summary(tmp_path: Path, dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["open", "--text", write_job(tmp_path, gpu_job())]) == 0
    said = capsys.readouterr().out
    assert "rank 1 kept the others waiting" in said and "gemm" in said
    assert main(["open", "--text", str(dumps)]) == 0
    assert "3 collectives in" in capsys.readouterr().out
    (tmp_path / "record").write_text(RECORD_TEXT)
    assert main(["open", "--text", str(tmp_path / "record")]) == 0
    assert "record of 0.0 s" in capsys.readouterr().out


def test_open_makes_a_notebook_that_shows_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))  # for the signature
    monkeypatch.setattr(os, "execv", lambda _, arguments: started.append(arguments))
    pattern = write_job(tmp_path, gpu_job())
    for name in ("opened.ipynb", "opened-2.ipynb"):
        assert main(["open", pattern]) == 0
        assert started.pop()[1:] == ["-m", "jupyterlab", name]
    notebook = nbformat.read(tmp_path / "opened.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"  # else JupyterLab asks for a kernel
    _, profile, collectives, replay = notebook.cells
    assert "rank 1 kept the others waiting" in profile.outputs[0].data["text/html"]
    assert "image/svg+xml" in collectives.outputs[0].data["text/html"]
    names: dict[str, Any] = {"rpcbench": rpcbench}
    for cell in (profile, collectives, replay):
        exec(cell.source, names)
    assert names["p"].explain().startswith("rank 1")


def test_a_job_is_played_from_its_traces(tmp_path: Path) -> None:
    played = rpcbench.replay(write_job(tmp_path, gpu_job(size=2, steps=3)))
    assert "all_reduce" in str(played)
    record = played.player.record
    assert len(record.frames) == 9 and record.frames[0][0] == 0.0  # two entries and the ends of both for each
    states = []
    for at in range(3):
        played.go(at)
        rows = [member["tables"]["collectives"].values() for member in played.player.world().values()]
        states.append([[row["end"] is None for row in each] for each in rows])
    assert states == [[[True], []], [[True], [True]], [[False], [False]]]
    played.close()


def test_a_job_is_played_from_its_dumps(dumps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(dumps)
    player = Player(record)
    player.go_to_frame(len(record.frames) - 1)
    assert [len(member["tables"]["collectives"]) for member in player.world().values()] == [3, 2]
    with pytest.raises(ValueError, match="no panel is called 'x'"):
        rpcbench.replay(dumps, "x")


def test_a_long_job_has_few_frames_and_the_last_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rpcbench.telemetry.job_files.MOST_FRAMES", 4)
    found = rpcbench.profile.open(write_job(tmp_path, gpu_job(steps=20)))
    record = record_collectives(found.world)
    assert len(record.frames) <= 5
    player = Player(record)
    player.go_to_frame(len(record.frames) - 1)
    assert all(row["end"] is not None for row in player.world()[0]["tables"]["collectives"].values())
    assert record_collectives({}).frames == ()
