"""Output of C code and of children in a worker's log is shown in the cell: in order, whole, in bounded memory."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import PATIENCE

from rpcbench.cells import output
from rpcbench.cells.output import CellKey, CellStream, LogTail, OutputStream
from rpcbench.cells.worker_log import LEFT_OUT, read_last_lines

KEY = CellKey(0, 7)


class Worker:
    """An output stream and its log, to which `c` writes as C code does."""

    def __init__(self, path: Path) -> None:
        self.log = path.open("w+b")
        self.text = (path).open("a")
        logs = {"stdout": self.text, "stderr": self.text}
        self.tail = LogTail(path)
        self.notices: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.output_stream = OutputStream(lambda member, notice: self.notices.put(notice), logs, self.tail)
        self.stream = CellStream("stderr", self.output_stream, self.text)

    def c(self, data: bytes) -> None:
        os.write(self.log.fileno(), data)

    def read(self, until: Callable[[list[tuple[str, str]]], bool]) -> list[tuple[str, str]]:
        """The kinds and contents of the notices, until the condition holds."""
        found: list[tuple[str, str]] = []
        while not until(found):
            notice = self.notices.get(timeout=PATIENCE)
            found.append((notice["kind"], notice["content"]))
            self.output_stream.items_shown(KEY.client_id, {"cell": notice["cell"], "shown": notice["n"] + 1})
        return found

    def run(self, *writes: Callable[[], object]) -> list[tuple[str, str]]:
        """The output of a cell that calls these functions; adjacent texts of one kind are joined."""
        self.output_stream.begin_cell(KEY)
        for write in writes:
            write()
        self.output_stream.end_cell(KEY, "over")
        joined: list[tuple[str, str]] = []
        for kind, content in self.read(lambda found: bool(found) and found[-1][0] == "end")[:-1]:
            if joined and joined[-1][0] == kind:
                content = joined.pop()[1] + content
            joined.append((kind, content))
        return joined


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path / "worker1.log")
    yield made
    made.log.close()
    made.text.close()


def test_output_of_c_code_is_in_order_with_that_of_python(worker: Worker) -> None:
    def python() -> None:
        print("python", file=worker.stream)

    def buffer() -> None:
        worker.stream.buffer.write("bytes ä\n".encode())

    shown = worker.run(python, lambda: worker.c(b"c 1\n"), python, buffer, lambda: worker.c("c ö\n".encode()))
    assert shown == [
        ("stderr", "python\n"), ("stdout", "c 1\n"), ("stderr", "python\nbytes ä\n"), ("stdout", "c ö\n")
    ]  # fmt: skip


def test_output_of_c_code_is_shown_while_the_cell_runs_in_whole_characters(worker: Worker) -> None:
    worker.output_stream.begin_cell(KEY)
    worker.c(b"at once \xc3")
    assert worker.read(bool) == [("stdout", "at once ")]
    worker.c(b"\xa4")
    assert worker.read(bool) == [("stdout", "ä")]
    worker.output_stream.end_cell(KEY, "over")


TORCH = """[rank2]:[W1129 06:19:10.843596921 TCPStore.cpp:138] [c10d] recvValue failed on SocketImpl(fd=8): got 0 bytes
Exception raised from recvBytes at /pytorch/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7fae42579b8d in /lib/libc10.so)
frame #1: <unknown function> + 0x674888d (0x7fae3414888d in /lib/libtorch_cpu.so)

"""


def test_the_frames_of_an_error_of_c_code_are_counted_in_the_cell_and_written_to_the_log(worker: Worker) -> None:
    [(_, text)] = worker.run(lambda: worker.c(f"before\n{TORCH}after\n".encode()))
    told = TORCH.splitlines()[0]
    assert text == f"before\n{told}\n(2 frames of C++: see the log)\nafter\n"
    assert TORCH in Path(worker.log.name).read_text()


def test_the_last_output_of_a_worker_is_what_it_has_written_itself(tmp_path: Path) -> None:
    log = tmp_path / "worker1.0.log"
    log.write_text(f"my words\n{TORCH * 80}[a fork of worker1, process 7] ValueError: of the fork\n{TORCH}")
    assert read_last_lines(log) == "my words"
    log.write_text(f"terminate called after throwing an instance of 'c10::Error'\n  what():  oh\n{TORCH}")
    assert read_last_lines(log) == "terminate called after throwing an instance of 'c10::Error'\n  what():  oh"


def test_output_outside_of_cells_is_only_in_the_log(worker: Worker) -> None:
    worker.c(b"before\n")
    assert worker.run(lambda: worker.c(b"within\n")) == [("stdout", "within\n")]
    worker.c(b"between\n")
    worker.stream.write("python\n")
    assert worker.run() == []
    assert Path(worker.log.name).read_bytes() == b"before\nwithin\nbetween\npython\n"


def test_output_beyond_the_limit_is_replaced_by_the_number_of_its_bytes(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "MOST", 1000)
    [(kind, text)] = worker.run(lambda: worker.c(b"x" * 4000 + b"y" * 1000))
    assert kind == "stdout" and text.endswith("\n" + "y" * 1000)
    assert "4,000 bytes of output" in text and text.count("x") == 0


def test_output_beyond_the_limit_is_cut_between_characters(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST", 1000)
    [(_, text)] = worker.run(lambda: worker.c("ä".encode() * 2000 + b"y"))
    assert text.endswith(")\n" + "ä" * 499 + "y")


def test_only_the_log_of_this_incarnation_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("worker1.2.log", True), ("worker1.1.log", False), ("all.txt", False)):
        file = os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT)
        monkeypatch.setattr(output, "_OUT", file)
        assert (output.find_log_tail("worker1", 2) is not None) == found
        os.close(file)
    read, write = os.pipe()
    monkeypatch.setattr(output, "_OUT", write)
    assert output.find_log_tail("worker1", 2) is None
    os.close(read)
    os.close(write)


def test_no_piece_of_a_line_that_has_a_secret_is_among_the_last_words(tmp_path: Path) -> None:
    """A terminal that wraps the request may separate its pieces by a carriage return alone."""
    log = tmp_path / "worker1.log"
    log.write_bytes(b'10%\r20%\r\n{"config": "{\\"secret\\": \\"\rdeadbeef\r0123\\"}"}\r\nended\n')
    assert read_last_lines(log) == f"10%\n20%\n{LEFT_OUT}\nended"
    log.write_bytes(b'secret": "\rdead' + b"beef" * 20_000 + b"\rbeef\nended\n")
    assert read_last_lines(log) == "ended"
