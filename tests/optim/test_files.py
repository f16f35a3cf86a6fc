"""Files of checkpoints: a full disk leaves nothing behind; foreign and damaged files are refused with their names."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spoiled import DAMAGE, damaged, disk_of

from rpcbench.base.files import make_file
from rpcbench.optim import optimizer_files
from rpcbench.runtime import current


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "current_agent", lambda: SimpleNamespace(name="worker7"))


class Foreign:
    pass


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_error_on_a_full_disk_names_file_and_worker_and_leaves_nothing(tmp_path: Path, size: int) -> None:
    path, told = tmp_path / "share.pt", pytest.raises(OSError, match="worker7 cannot write this file")
    with disk_of(50), told as caught, optimizer_files.name_faults(path), make_file(path) as file:
        torch.save({"weight": torch.zeros(size)}, file)
    assert caught.value.filename == str(path) and str(path) in str(caught.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("way", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
@pytest.mark.parametrize("make", [lambda path: Foreign(), Evil], ids=["foreign", "evil"])
def test_a_foreign_pickle_is_refused_and_does_not_run(tmp_path: Path, make: Any, way: Any, mmap: bool) -> None:
    path = tmp_path / "share.pt"
    way({"weight": torch.zeros(2), "more": make(tmp_path / "run")}, path)
    with pytest.raises(
        ValueError, match=r"share\.pt (holds objects of .*|is not a checkpoint file).*Nothing"
    ) as caught:
        optimizer_files.load_file(path, mmap)
    assert "weights_only" not in str(caught.value) and caught.value.__cause__ is None
    assert caught.value.__suppress_context__ and [*tmp_path.iterdir()] == [path]


@DAMAGE
@given(data=st.data())
def test_an_error_about_a_damaged_file_is_a_value_error_with_its_path(tmp_path: Path, data: Any) -> None:
    whole, path = tmp_path / "whole.pt", tmp_path / "share.pt"
    if not whole.exists():
        torch.save({"weight": torch.arange(4.0)}, whole)
    path.write_bytes(damaged(whole.read_bytes(), data.draw))
    try:
        optimizer_files.load_file(path)
    except ValueError as error:
        assert str(path) in str(error)


@DAMAGE
@given(data=st.data())
def test_an_error_about_a_damaged_manifest_is_a_value_error_with_its_folder(tmp_path: Path, data: Any) -> None:
    text = json.dumps({"format": 1, "optimizer": "Adam", "parameters": 2, "files": {"worker1.pt": [0], "w2.pt": [1]}})
    path = tmp_path / optimizer_files.MANIFEST
    path.write_bytes(damaged(text.encode(), data.draw))
    try:
        found = optimizer_files.shard_files("Adam", 2, tmp_path)
    except ValueError as error:
        assert str(tmp_path) in str(error)
    else:
        assert all(Path(name).name == name for name in found)


@pytest.mark.parametrize("name", ["../worker1.pt", "/etc/worker1.pt", "..", "a/b.pt"])
def test_a_manifest_that_names_a_file_outside_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    text = json.dumps({"format": 1, "optimizer": "Adam", "parameters": 1, "files": {name: [0]}})
    (tmp_path / optimizer_files.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=r"optimizer\.json names files outside its folder"):
        optimizer_files.shard_files("Adam", 1, tmp_path)


def test_a_manifest_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / optimizer_files.MANIFEST).write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"optimizer\.json is damaged"):
        optimizer_files.shard_files("Adam", 1, tmp_path)


def test_a_state_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path: Path) -> None:
    with disk_of(50), pytest.raises(OSError, match=r"worker7 cannot write.*worker7\.draft"):
        optimizer_files.write_draft({"state": {0: torch.zeros(1000)}, "param_groups": []}, str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_a_write_syncs_its_draft_and_an_adoption_syncs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    optimizer_files.write_draft({"state": {}, "param_groups": []}, str(tmp_path))
    optimizer_files.adopt_draft(str(tmp_path))
    assert synced == [str(tmp_path / "worker7.draft"), str(tmp_path)]
