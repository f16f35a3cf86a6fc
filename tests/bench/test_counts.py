"""The cost of a deed, in exact counts: messages, bytes, threads. The same on every machine, unlike times."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import cluster_deeds, counts
from benchmarks.command import OUR_MODULE, OURS
from benchmarks.counts import Found, Plan, as_markdown
from benchmarks.deed_counts import Counters, count_deed, count_python_calls, read_counters, read_threads
from benchmarks.member import COUNT_CALLS
from benchmarks.pairs import BenchError, Pair, Side, pairs
from benchmarks.rows import Operation
from benchmarks.workloads import SMALL

DEEDS = 20
FLOAT = 4
SEED = "1"


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with pairs([Side(OURS, OUR_MODULE)], {COUNT_CALLS: "1"}) as (made,):
        made.thaw()
        yield made


def counted(pair: Pair, title: str, what: str) -> dict[str, object]:
    return pair.send_order({"workload": title, "seed": SEED, "deeds": DEEDS, "count": what})


@pytest.mark.process
@pytest.mark.parametrize(
    ("title", "messages", "payload"),
    [
        (SMALL, 2, 0),
        ("method through an RRef", 2, 0),
        ("remote + to_here", 6, 0),  # create, its acknowledgement; fetch, result; the fork is given up, and that heard
        ("forward, d=16", 2, 2 * 4 * 16 * FLOAT),
        ("context + forward, d=16", 3, 2 * 4 * 16 * FLOAT),  # and the context's end
        ("context + backward, d=16", 5, 4 * 4 * 16 * FLOAT),  # and the gradients, there and back
        ("context + backward, d=512", 5, 4 * 64 * 512 * FLOAT),
        ("optimizer step, 6 + 6 parameters", 2, 0),
    ],
)
def test_the_messages_of_a_deed_and_their_tensors_are_as_few_as_ever(
    pair: Pair, title: str, messages: int, payload: int
) -> None:
    """Beside tensors a message has less than 256 bytes."""
    total = counted(pair, title, "messages")
    assert total["messages"] == messages
    size = total["bytes"]
    assert isinstance(size, float) and payload <= size <= payload + 256 * messages


@pytest.mark.process
def test_a_small_call_takes_few_threads_and_python_calls(pair: Pair) -> None:
    threads = counted(pair, SMALL, "threads")["threads"]
    assert isinstance(threads, list) and all(1 <= each <= 4 for each in threads)  # the read lock may change hands
    calls = [Counters(*one).python_calls for one in counted(pair, SMALL, "processes")["processes"]]  # type: ignore[attr-defined]
    assert all(0 < each < 200 for each in calls)


@pytest.mark.process
def test_the_messages_of_a_clusters_deeds_are_as_few_as_ever() -> None:
    found = {title: (deed, total) for title, deed, total in cluster_deeds.count(cluster_deeds.DEEDS, DEEDS)}
    cell, step = found["a cell on a worker"][1], found["a pipeline's step, per micro-batch"][1]
    assert cell.messages == 4
    assert 3 <= step.messages <= 4
    reduced, watched = found["an all-reduce of two ranks"][1], found["the same, watched"][1]
    assert reduced.messages == watched.messages < 1  # its tensors go over gloo
    assert all(len(deed.processes) == 3 and deed.wall > 0 for deed, _ in found.values())


@pytest.mark.process
def test_a_wrong_result_is_never_counted(pair: Pair) -> None:
    with pytest.raises(AssertionError, match="wrong result"):
        count_deed(Operation(lambda: 1, lambda result: result == 2), lambda: [read_counters()], 3)
    with pytest.raises(BenchError, match="KeyError: 'no such deed'"):
        counted(pair, "no such deed", "messages")


def test_the_cost_of_reading_is_subtracted_and_the_rest_shared() -> None:
    readings = itertools.count()

    def read() -> list[Counters]:
        at = next(readings)
        spent = 10.0 * at + (120.0 if at == 3 else 0.0)  # each reading takes 10; the deeds between the last two 120
        return [Counters(spent, spent, spent, spent)]

    deed = count_deed(Operation(lambda: None, lambda _: True, calls=2), read, 30)
    assert deed.processes == [Counters(2.0, 2.0, 2.0, 2.0)]


@pytest.mark.usefixtures("profiled")
def test_python_calls_are_counted_by_thread() -> None:
    def deed() -> None:
        pass

    before = sum(read_threads().values())
    for _ in range(7):
        deed()
    assert sum(read_threads().values()) - before >= 7


@pytest.fixture
def profiled() -> Iterator[None]:
    import sys
    import threading

    here, new = sys.getprofile(), threading.getprofile()
    count_python_calls()
    yield
    sys.setprofile(here)
    threading.setprofile(new)


def test_a_cell_of_the_table_has_our_range_and_theirs() -> None:
    ours, theirs = Found(messages=[2.0, 2.0], wall=[1e-4, 1.2e-4]), Found(wall=[2e-3])
    table = as_markdown({"a call": {"ours": ours, "theirs": theirs}}, "ours", "theirs", Plan(2, 10))
    (line,) = [line for line in table.splitlines() if line.startswith("| a call")]
    assert "| 2 / - |" in line and line.endswith("| 100 µs to 120 µs / 2 ms |")


def test_a_summary_of_strace_gives_the_number_of_calls(tmp_path: Path) -> None:
    file = tmp_path / "summary"
    file.write_text(
        "% time     seconds  usecs/call     calls    errors syscall\n"
        "------ ----------- ----------- --------- --------- ----------------\n"
        " 60.00    0.000600           6       100        12 futex\n"
        "------ ----------- ----------- --------- --------- ----------------\n"
        "100.00    0.001000           6       160        12 total\n"
    )
    assert counts._read_total(file) == 160
    file.write_text("nothing\n")
    with pytest.raises(BenchError, match="no total"):
        counts._read_total(file)
