"""Checks run answers on workers: results and calls by rank; errors and hangs are told with the rank and the line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from exercises import LESSONS
from worlds import cluster_fixture

from rpcbench import Cluster

sys.path.insert(0, str(LESSONS))  # the workers, which import the module of the checks, too, have it from here

from checks import NotYet, on_ranks

pytestmark = pytest.mark.process
shared = cluster_fixture(3)
GIVEN = [(torch.full((4,), float(rank)),) for rank in range(3)]


def run_plainly(answer, given=GIVEN):
    return on_ranks.run_on_ranks(on_ranks.call_answer, answer, given)


@pytest.fixture
def run(shared: Cluster) -> Iterator[object]:
    """After each answer, also a wrong one, the workers run the next one."""

    yield run_plainly
    assert run_plainly(lambda x: dist.get_rank()).values == [0, 1, 2]


def answer_of(source: str):
    """A function as a cell makes it."""
    import linecache

    name = f"<cell {len(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module = ModuleType("__main__")
    module.__dict__["dist"] = dist
    exec(compile(source, name, "exec"), module.__dict__)
    return module.__dict__["answer"]


def told(run, source: str) -> str:
    with pytest.raises(NotYet) as error:
        run(answer_of(source))
    return str(error.value)


def test_results_and_calls_come_by_rank(run):
    def answer(x):
        dist.all_reduce(total := x.clone())
        if dist.get_rank() == 0:
            dist.send(x[:2].clone(), 1)
        elif dist.get_rank() == 1:
            dist.recv(x[:2].clone(), 0)
        return total

    ran = run(answer)
    assert [value.tolist() for value in ran.values] == [[3.0] * 4] * 3
    reduced = on_ranks.Call("all_reduce", 16)
    assert ran.calls == [[reduced, on_ranks.Call("send", 8, to=1)], [reduced], [reduced]]
    assert ran.ops(0) == {"all_reduce": 1, "send": 1}


def test_the_calls_of_another_run_are_not_counted(run):
    run(lambda x: dist.all_reduce(x))
    assert run(lambda x: None).calls == [[], [], []]


def test_an_error_is_told_with_its_rank_and_line(run):
    source = "def answer(x):\n    if dist.get_rank() == 1:\n        x[7]\n    dist.all_reduce(x)\n"
    error = told(run, source)
    assert error.startswith("On rank 1 of 3 it raised IndexError: index 7 is out of bounds"), error
    assert error.endswith("in your line `x[7]`."), error


def test_of_ranks_that_fail_alike_the_lowest_is_told(run):
    assert told(run, "def answer(x):\n    return x + None\n").startswith("On rank 0 of 3 it raised TypeError")


@pytest.mark.parametrize(
    ("body", "line", "end"),
    [
        ("dist.recv(x, (dist.get_rank() + 1) % 3)", None, " for rank 1 for ever; the others wait, too."),
        ("dist.irecv(x, (dist.get_rank() + 1) % 3).wait()", None, " for rank 1 for ever; the others wait, too."),
        (
            "return x if dist.get_rank() == 2 else dist.all_reduce(x)", None,
            " for rank 2 for ever; rank 2 has returned already.",
        ),
    ],
)  # fmt: skip
def test_a_hang_is_told_with_the_rank_that_is_missing(run, body, line, end):
    error = told(run, f"def answer(x):\n    {body}\n")
    assert error == f"3 ranks: rank 0 waits in your line `{line or body}`{end}"


def test_a_group_that_one_rank_makes_alone_is_told_with_the_reason(run):
    error = told(run, "def answer(x):\n    if dist.get_rank() == 0:\n        dist.new_group([0, 1])\n")
    assert error.startswith("3 ranks: rank 0 waits in your line `dist.new_group([0, 1])` for ever"), error
    assert "All ranks make a group together: each of them must make all groups" in error, error


def test_a_rank_that_cannot_be_interrupted_is_named_with_the_way_out(shared):
    alone = "dist.TCPStore('127.0.0.1', 0, 2, True, wait_for_workers=True)"  # waits in C++ for a second client
    way_out = (
        "Rank 1 still runs the answer that hangs: it waits inside of torch, where no interrupt ends it. Nothing else "
        "can run there before `%cluster restart worker2`."
    )
    error = told(run_plainly, f"def answer(x):\n    if dist.get_rank() == 1:\n        {alone}\n")
    assert error.endswith(way_out), error
    begin = time.monotonic()
    assert told(run_plainly, "def answer(x):\n    return x\n") == way_out
    assert time.monotonic() - begin < 20
    with pytest.warns(RuntimeWarning, match="worker2 had not ended"):
        shared.restart("worker2")
    assert run_plainly(lambda x: dist.get_rank()).values == [0, 1, 2]


def test_an_answer_that_computes_for_ever_is_interrupted(run, monkeypatch):
    monkeypatch.setattr(on_ranks, "MOST", 2.0)
    error = told(run, "def answer(x):\n    while True:\n        x = x + 1\n")
    assert error.startswith("Rank 0 has run for 2 seconds, now in your line `"), error


def test_a_rank_that_computes_does_not_hang(run, monkeypatch):
    monkeypatch.setattr(on_ranks, "STILL", 1.0)

    def answer(x):
        if dist.get_rank() == 0:
            sum(1 for _ in range(40_000_000))  # longer than `STILL`, while the others wait
        dist.all_reduce(x)
        return x[0].item()

    assert run(answer).values == [3.0] * 3


def test_workers_in_a_group_are_told_to_leave_it(run, shared):
    shared.run("all", "import rpcbench.distributed as dist; dist.init_process_group('gloo')")
    try:
        with pytest.raises(
            NotYet, match=r"run `%remote all import torch; torch\.distributed\.destroy_process_group\(\)`"
        ):
            run(lambda x: x)
    finally:
        shared.run("all", "import torch; torch.distributed.destroy_process_group()")


def test_missing_workers_are_named(run):
    with pytest.raises(NotYet, match="4 workers are needed: `%cluster scale 4`"):
        run(lambda x: x, [*GIVEN, *GIVEN[:1]])


def test_a_worker_that_an_answer_has_ended_is_named_by_the_next_check(run, shared):
    source = "def answer(x):\n    import os\n    if dist.get_rank() == 1:\n        os._exit(3)\n    dist.barrier()"
    assert told(run, source).startswith("The process of rank 1 (worker2) has ended while your answer ran there")
    with pytest.raises(NotYet, match=r"worker2 is lost, perhaps by an answer before\. 3 workers are needed"):
        on_ranks.run_on_ranks(on_ranks.call_answer, lambda x: x, GIVEN)
    shared.scale(3)
