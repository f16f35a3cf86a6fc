"""Each mystery of lesson 32 shows its own fault, and no other, to the tools of the lesson, and ends cleanly."""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator

import pytest
from exercises import LESSONS
from worlds import cluster_fixture, until

import rpcbench
from rpcbench import Cluster

sys.path.insert(0, str(LESSONS))  # the workers, which import the module of the jobs, too, have it from here

import critical_path
import slow_jobs

pytestmark = pytest.mark.process
shared = cluster_fixture(4)
JOBS = [(job, kind) for job, kinds in slow_jobs.JOBS.items() for kind in kinds]
STEPS, LOOKS = 8, 40  # steps to profile, stacks of each worker to look at
Found = set[tuple[str, str]]
"""Faults that are seen: kind, worker."""


@pytest.fixture(params=JOBS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def running(request: pytest.FixtureRequest, shared: Cluster) -> Iterator[tuple[slow_jobs.Mystery, slow_jobs.Fault]]:
    fault = slow_jobs.place_fault(*request.param, random.Random(str(request.param)))
    mystery = slow_jobs.start(shared, fault)
    yield mystery, fault
    mystery.stop()
    assert shared.spmd(len, "abc") == [3] * 4, "the workers run the next program"


def test_a_mystery_shows_its_fault_alone(running):
    mystery, fault = running
    look = {"training": look_at_training, "pipeline": look_at_pipeline, "lookup": look_at_lookup}[fault.job]
    assert look(mystery) == {(fault.kind, fault.worker)}


# -- training
def look_at_training(mystery: slow_jobs.Mystery) -> Found:
    """The faults of a training job, by stacks, collectives and operators."""
    if hanging := next((name for name in slow_jobs.WORKERS if "report_loss" in stack(name)), ""):
        until(lambda: newest()["missing"] == [hanging] and newest()["state"] == "open", "the others to wait for it")
        return {("hang", hanging)}
    small = newest()["bytes"] <= 4 * slow_jobs.INPUTS**2
    # no line of another job is the one that waits for a disk
    loading = {name for _ in range(LOOKS) for name in slow_jobs.WORKERS if "load_batch: time.sleep" in stack(name)}
    last = newest()["number"] + STEPS * (2 * slow_jobs.LAYERS if small else 1)
    with rpcbench.profile(*slow_jobs.WORKERS) as profile:
        until(lambda: newest()["number"] >= last, "some steps")
    found = {("small messages", slow_jobs.EVERY)} if small else set()
    found |= {("slow loader", name) for name in loading}
    found |= counting(profile)
    found |= {("uneven data", name) for name in slow_jobs.WORKERS if is_more(calls(profile, "aten::addmm"), name, 3)}
    if found & {(kind, name) for kind in ("straggler", "uneven data", "slow loader") for name in slow_jobs.WORKERS}:
        late = profile.explain()
        assert [late.startswith(f"{name} kept the others waiting") for _, name in found] == [True], late
    return found


def newest() -> dict[str, object]:
    """The newest collective of this job."""
    return [*rpcbench.collectives(1).rows.values()][-1]


def stack(name: str) -> str:
    return str(rpcbench.cluster().stack(name))


def calls(profile: rpcbench.Profile, operator: str) -> dict[str, int]:
    """How often each worker has called an operator."""
    return {
        name: sum(each.calls for each in one.sums if each.name == operator) for name, one in profile.members.items()
    }


def is_more(counts: dict[str, int], name: str, times: float) -> bool:
    """Whether the count of one is so many times as large as the largest of the others."""
    return counts[name] > times * max(count for other, count in counts.items() if other != name)


def counting(profile: rpcbench.Profile) -> Found:
    """Stragglers: workers that call an operator by the thousand which the others hardly call."""
    counts = calls(profile, "aten::select")
    return {("straggler", name) for name in slow_jobs.WORKERS if counts[name] > 1000 and is_more(counts, name, 50)}


# -- pipelines
def look_at_pipeline(mystery: slow_jobs.Mystery) -> Found:
    """The faults of a pipeline, by its operations."""
    until(lambda: len(mystery._steps) == mystery._steps.maxlen, "some steps")
    result = mystery.result
    found = {("bubble", slow_jobs.EVERY)} if result.idle_ideal > 0.4 else set()
    busy = critical_path.busy(result)
    found |= {
        ("imbalance", name)
        for name, ms in zip(slow_jobs.WORKERS, busy, strict=True)
        if ms > 2 * statistics.median(busy)
    }
    return found | slow_links(critical_path.delays(result))


def slow_links(times: dict[str, float]) -> Found:
    """Senders on links whose messages take nearly as long as the fault holds them."""
    return {("slow link", link.partition(" ")[0]) for link, ms in times.items() if ms > 900 * slow_jobs.SLOW}


# -- lookups
def look_at_lookup(mystery: slow_jobs.Mystery) -> Found:
    """The faults of a lookup, by its messages and operators."""
    spans: list[tuple[float, float, str]] = []
    while len(spans) < 3 * STEPS:
        with rpcbench.trace() as seen:
            time.sleep(0.5)
        spans = asked(seen)
    together = max(sum(begin <= at < end for begin, end, _ in spans) for at, _, _ in spans)
    found = {("serial calls", spans[0][2])} if together == 1 else set()
    with rpcbench.profile(*slow_jobs.WORKERS) as profile:
        time.sleep(0.5)
    return found | slow_links(critical_path.flights(seen)) | counting(profile)


def asked(seen: rpcbench.Trace) -> list[tuple[float, float, str]]:
    """Begin and end of each call, and the worker that asks."""
    view = seen.view
    names = {int(number): row["name"] for number, row in view["workers"].items()}
    rows = [row for row in view["messages"].values() if row["sent"] and row["received"]]
    answers = {row["call"]: row["received"] for row in rows if row["kind"] == "Result"}
    asks = [row for row in rows if row["kind"] == "Call" and row["call"] in answers]
    return [(row["sent"], answers[row["call"]], names[row["from"]]) for row in asks]


# -- verdicts
@pytest.mark.parametrize(("job", "kind"), JOBS, ids=lambda word: word)
def test_a_wrong_verdict_learns_nothing_but_what_it_asks(job, kind):
    from checks import NotYet, mysteries

    fault = slow_jobs.place_fault(job, kind, random.Random(1))
    assert mysteries.judge_verdict(fault, (fault.worker, fault.kind))
    for verdict in itertools.product((*slow_jobs.WORKERS, slow_jobs.EVERY), mysteries.KINDS):
        if verdict == (fault.worker, fault.kind):
            continue
        with pytest.raises(NotYet) as error:
            mysteries.judge_verdict(fault, verdict)
        told = str(error.value)
        is_list = (verdict[0] == slow_jobs.EVERY) != (verdict[1] in slow_jobs.OF_EVERY)
        secrets = {fault.worker, fault.kind} - {*verdict, slow_jobs.EVERY}
        assert is_list or not any(secret in told for secret in secrets), (verdict, told)


# -- seeds
def test_the_first_seeds_have_all_faults():
    faults = [slow_jobs.choose_fault(seed) for seed in range(60)]
    assert {(fault.job, fault.kind) for fault in faults} == set(JOBS)
    assert {fault.worker for fault in faults} == {*slow_jobs.WORKERS, slow_jobs.EVERY}
    assert slow_jobs.choose_fault(1) == slow_jobs.choose_fault(1)


def test_a_mystery_takes_the_place_of_the_one_before(shared):
    first = slow_jobs.start(shared, slow_jobs.Fault("training", "hang", "worker1"))
    second = slow_jobs.start(shared, slow_jobs.Fault("training", "hang", "worker2"))
    try:
        first.stop()
        assert "report_loss" in stack("worker2")
    finally:
        second.stop()
    assert shared.run("all", "1 + 1") == dict.fromkeys(slow_jobs.WORKERS, 2)


def test_a_mystery_that_cannot_begin_says_why(shared):
    shared.run("all", "import rpcbench.distributed as dist; dist.init_process_group('gloo')")
    try:
        with pytest.raises(rpcbench.CollectiveError, match="in a process group already"):
            slow_jobs.start(shared, slow_jobs.Fault("training", "straggler", "worker1"))
    finally:
        shared.run("all", "dist.destroy_process_group()")
