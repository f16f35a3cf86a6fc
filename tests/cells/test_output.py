"""A worker sends its output in order, whole, in bounded amounts, and only while its cell runs."""

from __future__ import annotations

import io
import json
import os
import queue
import threading

import pytest
from worlds import PATIENCE

from rpcbench.base.errors import WorkerLostError
from rpcbench.cells import output
from rpcbench.cells.output import NO_CELL, WINDOW, CellKey, CellStream, OutputStream
from rpcbench.runtime.pool import Pool

KEY = CellKey(0, 7)
LOST = CellKey(1, 7)


class Asker:
    """The client: it keeps notices, and acknowledges them when `read` takes them."""

    def __init__(self):
        self.notices = queue.SimpleQueue()
        self.logs = {"stdout": io.StringIO(), "stderr": io.StringIO()}
        self.output_stream = OutputStream(self.notify, self.logs)

    def notify(self, member, notice):
        if member == LOST.client_id:
            raise WorkerLostError("worker1 is gone")
        self.notices.put(notice)

    def read(self):
        """All notices up to `end`, in order of arrival."""
        found = []
        while not found or found[-1]["kind"] != "end":
            found.append(self.notices.get(timeout=10))
            self.output_stream.items_shown(KEY.client_id, {"cell": found[-1]["cell"], "shown": len(found)})
        return found


@pytest.fixture
def client_id(monkeypatch):
    # Also on a busy machine texts are joined; what is no text ends the wait for more of them.
    monkeypatch.setattr("rpcbench.cells.output.GATHER_SECONDS", PATIENCE)
    return Asker()


def run(client_id, write):
    client_id.output_stream.begin_cell(KEY)
    write(client_id.output_stream)
    client_id.output_stream.end_cell(KEY, "over")
    return client_id.read()


def test_items_are_numbered_without_gaps_and_neighbouring_texts_are_joined(client_id):
    def write(output_stream):
        for piece in "abc":
            output_stream.write("stdout", piece)
        output_stream.write("stderr", "d")
        output_stream.send_item("display", "{}")
        output_stream.write("stdout", "e")

    notices = run(client_id, write)
    assert [n["n"] for n in notices] == list(range(len(notices)))
    assert {n["cell"] for n in notices} == {KEY.number}
    kinds = [(n["kind"], n["content"]) for n in notices]
    assert kinds == [("stdout", "abc"), ("stderr", "d"), ("display", "{}"), ("stdout", "e"), ("end", "over")]


def test_a_first_line_is_sent_at_once_and_a_flood_a_few_times_a_second(client_id, monkeypatch):
    monkeypatch.setattr(output, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(output, "FLOOD_SECONDS", PATIENCE)
    client_id.output_stream.begin_cell(KEY)
    client_id.output_stream.write("stdout", "first\n")
    first = client_id.notices.get(timeout=PATIENCE / 2)
    client_id.output_stream.items_shown(KEY.client_id, {"cell": KEY.number, "shown": 1})
    for i in range(1000):
        client_id.output_stream.write("stdout", f"{i}\n")
    client_id.output_stream.end_cell(KEY, "over")
    rest = [client_id.notices.get(timeout=10) for _ in range(2)]
    assert [(n["kind"], n["content"]) for n in (first, *rest)] == [
        ("stdout", "first\n"),
        ("stdout", "".join(f"{i}\n" for i in range(1000))),
        ("end", "over"),
    ]


def test_texts_of_many_threads_all_arrive_whole(client_id):
    def write(output_stream):
        def some(i):
            for j in range(500):
                output_stream.write("stdout", f"<{i}.{j}>")

        threads = [threading.Thread(target=some, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    text = "".join(n["content"] for n in run(client_id, write)[:-1])
    assert sorted(text.strip("<>").split("><")) == sorted(f"{i}.{j}" for i in range(4) for j in range(500))


def test_long_content_is_sent_in_parts_and_only_the_last_part_has_the_kind(client_id):
    content = json.dumps({"data": "x" * 1_000_000})
    notices = run(client_id, lambda output_stream: output_stream.send_item("display", content))
    assert [n["kind"] for n in notices] == ["part"] * 3 + ["display", "end"]
    assert "".join(n["content"] for n in notices[:-1]) == content


def test_output_beyond_the_window_waits_for_acknowledgements(client_id, monkeypatch):
    monkeypatch.setattr(output, "_ACK_SECONDS", PATIENCE)
    ahead = []

    def write(output_stream):
        for i in range(4 * WINDOW):
            output_stream.send_item("display", str(i))

    client_id.output_stream.begin_cell(KEY)
    threading.Thread(
        target=lambda: (write(client_id.output_stream), client_id.output_stream.end_cell(KEY, "over")), daemon=True
    ).start()
    for shown in range(4 * WINDOW):
        ahead.append(client_id.notices.get(timeout=10)["n"] - shown + client_id.notices.qsize())
        client_id.output_stream.items_shown(KEY.client_id, {"cell": KEY.number, "shown": shown + 1})
    assert max(ahead) < WINDOW


def test_a_client_that_acknowledges_nothing_only_delays_the_output(client_id, monkeypatch):
    monkeypatch.setattr("rpcbench.cells.output._ACK_SECONDS", 0.05)
    client_id.output_stream.begin_cell(KEY)
    for i in range(WINDOW + 2):
        client_id.output_stream.send_item("display", str(i))
    assert [client_id.notices.get(timeout=10)["n"] for _ in range(WINDOW + 2)] == list(range(WINDOW + 2))


def test_text_goes_to_the_log_when_no_cell_runs_and_when_the_client_is_lost(client_id):
    stream = CellStream("stdout", client_id.output_stream, client_id.logs["stdout"])
    print("before", file=stream)
    assert client_id.logs["stdout"].getvalue() == "before\n"

    assert [n["content"] for n in run(client_id, lambda _: print("within", file=stream))] == ["within\n", "over"]

    client_id.output_stream.begin_cell(LOST)
    client_id.output_stream.send_item("display", "the one that finds out")
    client_id.output_stream.write("stdout", "nobody asks\n")
    client_id.output_stream.end_cell(LOST, "over")
    assert [n["content"] for n in run(client_id, lambda _: None)] == ["over"]
    assert client_id.logs["stdout"].getvalue() == "before\nnobody asks\n"
    assert "worker1 is gone" in client_id.logs["stderr"].getvalue()


def test_text_with_a_lone_surrogate_is_sent_escaped(client_id):
    assert run(client_id, lambda output_stream: output_stream.write("stdout", "\ud800!"))[0]["content"] == "\\ud800!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_to_the_log(tmp_path):
    with (tmp_path / "log").open("w+") as log:
        output_stream = OutputStream(lambda member, notice: None, {"stdout": log, "stderr": log})
        output_stream.begin_cell(KEY)
        if (pid := os.fork()) == 0:
            output_stream.write("stdout", "child")
            os._exit(0)
        os.waitpid(pid, 0)
        assert (tmp_path / "log").read_text() == "child"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_until_the_notebook_has_shown_what_its_parent_wrote(client_id):
    client_id.output_stream._call_here()  # as in a write of a call
    if (pid := os.fork()) == 0:
        client_id.output_stream.wait_until_shown()
        os._exit(client_id.output_stream._queue.qsize())
    assert os.waitpid(pid, 0)[1] == 0, "it asked for an acknowledgement"


def test_an_item_that_comes_while_the_log_is_looked_at_precedes_what_the_log_has_by_then():
    stream = OutputStream.__new__(OutputStream)  # without the thread that takes the items
    stream._queue, stream._live, item = queue.SimpleQueue(), KEY, (KEY, "stdout", "from Python")

    class Tail:
        at = 0

        def log_size(self):
            if not self.at:
                stream._queue.put(item)  # and right after it, a child writes
            return 8

    stream._tail = Tail()
    assert stream._next_item() == item
    stream._queue = queue.SimpleQueue()
    stream._tail.log_size = lambda: 8
    assert stream._next_item() == (KEY, "logged", "8")


def test_comm_messages_are_in_order_within_a_cell_and_sent_without_one_after_it(client_id):
    client_id.output_stream.send_to_last_client("comm", "nobody has asked for anything yet")

    def write(output_stream):
        output_stream.write("stdout", "a")
        output_stream.send_to_last_client("comm", "within")
        output_stream.write("stdout", "b")

    assert [(n["kind"], n["content"]) for n in run(client_id, write)] == [
        ("stdout", "a"), ("comm", "within"), ("stdout", "b"), ("end", "over")
    ]  # fmt: skip
    client_id.output_stream.send_to_last_client("comm", "after")
    beside = client_id.notices.get(timeout=10)
    assert (beside["cell"], beside["kind"], beside["content"]) == (NO_CELL, "comm", "after")


def test_comm_messages_for_a_lost_client_are_dropped(client_id):
    client_id.output_stream.begin_cell(LOST)
    client_id.output_stream.end_cell(LOST, "over")
    client_id.output_stream.send_to_last_client("comm", "for nobody")
    assert [
        n["kind"] for n in run(client_id, lambda output_stream: output_stream.send_to_last_client("comm", "heard"))
    ] == [
        "comm",
        "end",
    ]


def test_show_outside_a_cell_returns_false(client_id):
    assert not client_id.output_stream.send_item("input", "{}")
    assert not client_id.output_stream.has_running_cell
    run(
        client_id,
        lambda output_stream: (
            (output_stream.send_item("input", "{}") and output_stream.has_running_cell) or pytest.fail("a cell runs")
        ),
    )


@pytest.fixture
def pool():
    pool = Pool("calls", 4, lambda: None)
    yield pool
    pool.close(PATIENCE)


def call(pool, client_id, write):
    """Write as a call does. Return an event that is set when the call may be answered."""
    answered = threading.Event()

    def run_call():
        write(client_id.output_stream)
        client_id.output_stream.wait_until_shown()
        answered.set()

    pool.spawn_job(run_call)
    return answered


def test_items_of_each_call_are_numbered_like_those_of_a_cell_and_shown_before_its_answer(client_id, pool, monkeypatch):
    monkeypatch.setattr(output, "_ACK_SECONDS", PATIENCE)

    def write(output_stream):
        output_stream.write("stdout", "a")
        output_stream.write("stderr", "b")

    series = []
    for _ in range(2):
        answered, notices = call(pool, client_id, write), []
        while not notices or notices[-1]["kind"] != "end":
            assert not answered.is_set()
            notices.append(client_id.notices.get(timeout=PATIENCE))
        client_id.output_stream.items_shown(0, {"cell": notices[-1]["cell"], "shown": len(notices)})
        assert answered.wait(PATIENCE)
        series.append(notices)
    for notices in series:
        assert [(n["n"], n["kind"], n["content"]) for n in notices[:2]] == [(0, "stdout", "a"), (1, "stderr", "b")]
    first, second = ({n["cell"] for n in notices} for notices in series)
    assert len(first | second) == 2 and max(first | second) < NO_CELL
    assert client_id.logs["stdout"].getvalue() == "aa"


def test_text_of_a_call_behind_the_end_of_a_cell_is_not_lost(client_id, pool):
    output_stream = client_id.output_stream
    output_stream.begin_cell(KEY)

    def end_cell(key):
        output_stream._queue_log_growth = lambda key: None
        output_stream.end_cell(key, "over")

    output_stream._queue_log_growth = end_cell  # the cell ends in the middle of the write
    call(pool, client_id, lambda stream: stream.write("stdout", "late"))
    assert [n["content"] for n in client_id.read()] == ["over"]
    assert [(n["n"], n["content"]) for n in client_id.read()[:1]] == [(0, "late")]
    assert client_id.logs["stdout"].getvalue() == "late"


def test_a_call_writes_much_while_its_thread_holds_the_lock_of_the_pool(client_id, pool):
    def write(output_stream):
        with pool._lock:  # as in a finalizer
            for _ in range(1000):
                output_stream.write("stdout", "x")
        written.set()

    written = threading.Event()
    call(pool, client_id, write)
    assert written.wait(PATIENCE)
    assert "".join(n["content"] for n in client_id.read()[:-1]) == 1000 * "x"
