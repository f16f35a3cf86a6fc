"""Output leaves a worker in order, whole, in bounded amounts, and only while its cell runs."""

from __future__ import annotations

import io
import json
import os
import queue
import threading

import pytest

from rpcbench.base.errors import WorkerLostError
from rpcbench.cells.output import BESIDE, WINDOW, CellKey, CellStream, OutputStream

KEY = CellKey(0, 7)
LOST = CellKey(1, 7)


class Asker:
    """The other end: keeps notices, and says that they were shown once `read` took them."""

    def __init__(self):
        self.notices = queue.SimpleQueue()
        self.logs = {"stdout": io.StringIO(), "stderr": io.StringIO()}
        self.outbox = OutputStream(self.notify, self.logs)

    def notify(self, member, notice):
        if member == LOST.asker:
            raise WorkerLostError("worker1 is gone")
        self.notices.put(notice)

    def read(self):
        """All notices up to `end`, in order of arrival."""
        found = []
        while not found or found[-1]["kind"] != "end":
            found.append(self.notices.get(timeout=10))
            self.outbox.shown(KEY.asker, {"cell": found[-1]["cell"], "shown": len(found)})
        return found


@pytest.fixture
def asker():
    return Asker()


def run(asker, write):
    asker.outbox.begin(KEY)
    write(asker.outbox)
    asker.outbox.end(KEY, "over")
    return asker.read()


def test_items_are_numbered_without_gaps_and_neighbouring_texts_are_joined(asker):
    def write(outbox):
        for piece in "abc":
            outbox.write("stdout", piece)
        outbox.write("stderr", "d")
        outbox.show("display", "{}")
        outbox.write("stdout", "e")

    notices = run(asker, write)
    assert [n["n"] for n in notices] == list(range(len(notices)))
    assert {n["cell"] for n in notices} == {KEY.number}
    kinds = [(n["kind"], n["content"]) for n in notices]
    assert kinds == [("stdout", "abc"), ("stderr", "d"), ("display", "{}"), ("stdout", "e"), ("end", "over")]


def test_texts_of_many_threads_all_arrive_whole(asker):
    def write(outbox):
        def some(i):
            for j in range(500):
                outbox.write("stdout", f"<{i}.{j}>")

        threads = [threading.Thread(target=some, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    text = "".join(n["content"] for n in run(asker, write)[:-1])
    assert sorted(text.strip("<>").split("><")) == sorted(f"{i}.{j}" for i in range(4) for j in range(500))


def test_what_is_long_comes_in_pieces_of_which_only_the_last_names_the_kind(asker):
    content = json.dumps({"data": "x" * 1_000_000})
    notices = run(asker, lambda outbox: outbox.show("display", content))
    assert [n["kind"] for n in notices] == ["part"] * 3 + ["display", "end"]
    assert "".join(n["content"] for n in notices[:-1]) == content


def test_a_flood_waits_for_the_asker(asker):
    ahead = []

    def write(outbox):
        for i in range(4 * WINDOW):
            outbox.show("display", str(i))

    asker.outbox.begin(KEY)
    threading.Thread(target=lambda: (write(asker.outbox), asker.outbox.end(KEY, "over")), daemon=True).start()
    for shown in range(4 * WINDOW):
        ahead.append(asker.notices.get(timeout=10)["n"] - shown + asker.notices.qsize())
        asker.outbox.shown(KEY.asker, {"cell": KEY.number, "shown": shown + 1})
    assert max(ahead) < WINDOW


def test_an_asker_that_says_nothing_only_delays(asker, monkeypatch):
    monkeypatch.setattr("rpcbench.cells.output._SILENCE_SECONDS", 0.05)
    asker.outbox.begin(KEY)
    for i in range(WINDOW + 2):
        asker.outbox.show("display", str(i))
    assert [asker.notices.get(timeout=10)["n"] for _ in range(WINDOW + 2)] == list(range(WINDOW + 2))


def test_text_goes_to_the_log_when_no_cell_runs_and_when_the_asker_is_gone(asker):
    stream = CellStream("stdout", asker.outbox, asker.logs["stdout"])
    print("before", file=stream)
    assert asker.logs["stdout"].getvalue() == "before\n"

    assert [n["content"] for n in run(asker, lambda _: print("within", file=stream))] == ["within\n", "over"]

    asker.outbox.begin(LOST)
    asker.outbox.show("display", "the one that finds out")
    asker.outbox.write("stdout", "nobody asks\n")
    asker.outbox.end(LOST, "over")
    assert [n["content"] for n in run(asker, lambda _: None)] == ["over"]
    assert asker.logs["stdout"].getvalue() == "before\nnobody asks\n"
    assert "worker1 is gone" in asker.logs["stderr"].getvalue()


def test_text_that_is_no_unicode_is_shown_escaped(asker):
    assert run(asker, lambda outbox: outbox.write("stdout", "\ud800!"))[0]["content"] == "\\ud800!"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_to_the_log(tmp_path):
    with (tmp_path / "log").open("w+") as log:
        outbox = OutputStream(lambda member, notice: None, {"stdout": log, "stderr": log})
        outbox.begin(KEY)
        if (pid := os.fork()) == 0:
            outbox.write("stdout", "child")
            os._exit(0)
        os.waitpid(pid, 0)
        assert (tmp_path / "log").read_text() == "child"


def test_words_of_comms_are_in_order_with_the_cell_and_go_beside_it_when_it_is_over(asker):
    asker.outbox.tell("comm", "nobody has asked for anything yet")

    def write(outbox):
        outbox.write("stdout", "a")
        outbox.tell("comm", "within")
        outbox.write("stdout", "b")

    assert [(n["kind"], n["content"]) for n in run(asker, write)] == [
        ("stdout", "a"), ("comm", "within"), ("stdout", "b"), ("end", "over")
    ]  # fmt: skip
    asker.outbox.tell("comm", "after")
    beside = asker.notices.get(timeout=10)
    assert (beside["cell"], beside["kind"], beside["content"]) == (BESIDE, "comm", "after")


def test_words_of_comms_for_an_asker_that_is_gone_are_dropped(asker):
    asker.outbox.begin(LOST)
    asker.outbox.end(LOST, "over")
    asker.outbox.tell("comm", "for nobody")
    assert [n["kind"] for n in run(asker, lambda outbox: outbox.tell("comm", "heard"))] == ["comm", "end"]


def test_what_is_shown_outside_a_cell_says_so(asker):
    assert not asker.outbox.show("input", "{}")
    assert not asker.outbox.runs
    run(asker, lambda outbox: (outbox.show("input", "{}") and outbox.runs) or pytest.fail("a cell runs"))
