"""Reading a log while it is written: new lines only, lines as a terminal leaves them, floods, and no secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpcbench.cells import log_reader
from rpcbench.cells.log_reader import LONGEST, MOST_BYTES, LogReader, clean_line
from rpcbench.cells.worker_log import LEFT_OUT


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "worker1.0.log"


def write(log: Path, text: str) -> None:
    with log.open("ab") as file:
        file.write(text.encode())


def test_each_look_returns_the_lines_that_have_ended_since(log: Path) -> None:
    reader = LogReader(log)
    assert reader.read_lines() == [] and reader.begun_line == ""
    write(log, "one\ntwo\nthr")
    assert reader.read_lines() == ["one", "two"] and reader.begun_line == "thr"
    assert reader.read_lines() == []
    write(log, "ee\n")
    assert reader.read_lines() == ["three"] and reader.begun_line == ""


def test_only_new_bytes_are_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(file: int, count: int, place: int) -> bytes:
        read.append(count)
        return os.pread(file, count, place)

    monkeypatch.setattr(log_reader, "os", type("os", (), {"pread": staticmethod(counted), "fstat": os.fstat}))
    reader = LogReader(log)
    for text in ("x" * 1000 + "\n", "", "four\n"):
        write(log, text)
        reader.read_lines()
    assert read == [1001, 0, 5]


def test_of_a_flood_the_last_lines_are_returned_and_the_other_bytes_counted(log: Path) -> None:
    write(log, "first\n")
    reader = LogReader(log)
    reader.read_lines()
    lines = [f"line {n}" for n in range(100_000)]
    write(log, "\n".join(lines) + "\n")
    found = reader.read_lines()
    assert found == lines[-len(found) :] and sum(len(line) + 1 for line in found) <= MOST_BYTES
    assert reader.skipped + sum(len(line) + 1 for line in found) == sum(len(line) + 1 for line in lines)


def test_a_line_without_its_beginning_is_not_shown(log: Path) -> None:
    write(log, "x" * 2 * MOST_BYTES)
    reader = LogReader(log)
    assert reader.read_lines() == [] and reader.begun_line == ""
    write(log, " end\nnext\n")
    assert reader.read_lines() == ["next"] and reader.skipped == 2 * MOST_BYTES + 5


def test_a_file_that_was_emptied_is_read_from_its_beginning(log: Path) -> None:
    write(log, "a long first line\nbegun")
    reader = LogReader(log)
    reader.read_lines()
    log.write_text("new\n")
    assert reader.read_lines() == ["new"] and reader.begun_line == ""


def test_the_last_line_of_a_process_that_has_ended_is_a_line(log: Path) -> None:
    write(log, "last words")
    reader = LogReader(log)
    reader.read_lines()
    assert reader.end_line() == "last words" and reader.begun_line == reader.end_line() == ""


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("10%\r20%\r30%\r", "30%"), ("\x1b[31mred\x1b[0m and \x1b]0;title\x07plain", "red and plain"),
        ("bell\x07 tab\tkept", "bell tab\tkept"), ("é 世界", "é 世界"), ("x" * (LONGEST + 1), "x" * LONGEST + "…"),
    ],
)  # fmt: skip
def test_a_line_is_as_a_terminal_leaves_it(line: str, shown: str) -> None:
    assert clean_line(line) == shown


def test_no_line_has_a_secret(log: Path) -> None:
    """Also where it comes in pieces, or where the line is so long that its beginning is dropped."""
    reader = LogReader(log)
    write(log, '{"secret": "abc')
    assert reader.read_lines() == [] and reader.begun_line == LEFT_OUT
    write(log, 'def"}\rsecret words\nnext\n')
    assert reader.read_lines() == [LEFT_OUT, "next"]
    for part in ('{"secret": "hidden', *["y" * 100_000] * 4):
        write(log, part)
        reader.read_lines()
        assert reader.begun_line == LEFT_OUT
    write(log, "hidden\nafter\n")
    assert reader.read_lines() == [LEFT_OUT, "after"]


def test_a_bar_that_grows_without_an_end_is_bounded(log: Path) -> None:
    reader = LogReader(log)
    for n in range(40):
        write(log, f"step {n}\r" * 2000)
        reader.read_lines()
        assert reader.begun_line == f"step {n}"
    assert len(reader._begun) < 300_000
