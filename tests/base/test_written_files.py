"""Files are whole or not there: a failure leaves nothing behind, and keeps the file before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from spoiled import disk_of

from rpcbench.base.files import make_file, rename_draft, replace_file


def test_a_failed_write_leaves_no_file_and_keeps_an_existing_one(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="own"), make_file(tmp_path / "new"):
        raise KeyError("own")
    assert not [*tmp_path.iterdir()]
    (tmp_path / "there").write_text("x")
    with pytest.raises(FileExistsError), make_file(tmp_path / "there"):
        pass
    assert (tmp_path / "there").read_text() == "x"


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "note"
    path.write_text("old")
    with replace_file(path) as draft:
        draft.write(b"new")
        draft.flush()
        assert path.read_text() == "old" and Path(draft.name).read_text() == "new"
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("size", [20, 100_000])
def test_on_a_full_disk_the_old_file_stays_and_no_draft(tmp_path: Path, size: int) -> None:
    path = tmp_path / "note"
    path.write_text("old")
    with disk_of(10), pytest.raises(OSError, match="too large"), replace_file(path) as draft:
        draft.write(bytes(size))
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


def test_a_name_that_cannot_be_taken_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "note" / "inside").mkdir(parents=True)
    with pytest.raises(IsADirectoryError), replace_file(tmp_path / "note") as draft:
        draft.write(b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_durable_file_is_on_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    with replace_file(tmp_path / "note", durable) as draft:
        draft.write(b"new")
    assert synced == ([draft.name, str(tmp_path)] if durable else [])
    rename_draft(tmp_path / "note", tmp_path / "other")
    assert synced[2 * durable :] == [str(tmp_path)]
