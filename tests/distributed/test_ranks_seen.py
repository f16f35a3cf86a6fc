"""Collectives in telemetry: one row for each, with the ranks that have arrived, the missing ranks, and the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from worlds import until

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.errors import CollectiveError
from rpcbench.base.futures import wait_all
from rpcbench.base.ids import Row
from rpcbench.distributed import events
from rpcbench.distributed.events import CollectiveEvents, CollectivePart
from rpcbench.distributed.groups import GroupMember
from rpcbench.distributed.world import RankProcess, RendezvousResult, World
from rpcbench.runtime import current
from rpcbench.runtime.events import EventLog
from rpcbench.telemetry.collector import Collector, TracedCollector
from rpcbench.telemetry.message_views import collectives_view, drop_earlier_collectives
from rpcbench.telemetry.recording import Player, load_record
from rpcbench.telemetry.trace import CollectiveTimeline

pytestmark = pytest.mark.process
View = dict[str, dict[str, Row]]
Look = Callable[[], View]
NAMES = ["worker1", "worker2", "worker3", "worker4"]


def looking_at(cluster: rpcbench.Cluster) -> Iterator[Look]:
    """Yield a function that returns the view of collectives begun since, once all members have reported."""
    collector, began = cluster.agent.part(Collector), time.monotonic()
    stop = collector.subscribe(lambda: None)

    def look() -> View:
        assert collector.settle(20)
        return collectives_view(
            {id_: drop_earlier_collectives(member, began) for id_, member in collector.world().items()}
        )

    yield look
    stop()


@pytest.fixture
def look(ranks: rpcbench.Cluster) -> Iterator[Look]:
    yield from looking_at(ranks)


def rows(view: View) -> list[Row]:
    return list(view["collectives"].values())


def times(view: View) -> list[Row]:
    """The entries of the only collective, by id of their worker."""
    (key,) = view["collectives"]
    return [view["entries"][f"{key}/{id_}"] for id_ in range(1, 5) if f"{key}/{id_}" in view["entries"]]


def everything() -> None:
    x = torch.ones(4)
    many = [torch.empty(4) for _ in range(4)]
    first = dist.get_rank() == 0
    dist.broadcast(x, 1)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.reduce(x, 2)
    dist.all_gather(many, x)
    dist.gather(x, 0, many if first else None)
    dist.scatter(x, 0, many if first else None)
    dist.barrier()
    dist.all_reduce_multigpu([x, x.clone()])


OPS = [
    "broadcast(src=1)", "all_reduce(MAX)", "reduce(SUM, dst=2)", "all_gather", "gather(dst=0)", "scatter(src=0)",
    "barrier", "all_reduce_multigpu(SUM)",
]  # fmt: skip


def test_each_collective_has_one_row_with_all_ranks(everyone: Any, look: Look) -> None:
    everyone(everything)
    found = rows(look())
    assert [row["op"] for row in found] == OPS
    assert [row["number"] for row in found] == list(range(found[0]["number"], found[0]["number"] + len(OPS)))
    assert [row["bytes"] for row in found] == [16, 16, 16, 16, 16, 16, 0, 32]
    assert [row["shape"] for row in found] == ["float32[4]"] * 6 + ["", "float32[4], float32[4]"]
    for row in found:
        assert (row["group"], row["members"], row["state"], row["missing"]) == ("world", NAMES, "done", [])
    view = look()
    for key, row in view["collectives"].items():
        entries = [view["entries"][f"{key}/{id_}"] for id_ in range(1, 5)]
        last = max(entries, key=lambda one: one["begin"])
        assert row["last"] == last["worker"] and row["begin"] == min(one["begin"] for one in entries)
        assert [one["waited"] for one in entries] == [last["begin"] - one["begin"] for one in entries]
        assert row["waited"] == max(one["waited"] for one in entries)
        assert all(one["begin"] <= last["begin"] <= one["end"] <= row["end"] for one in entries)


def test_an_open_collective_shows_its_missing_ranks_and_a_done_one_its_last_rank(
    ranks: rpcbench.Cluster, look: Look
) -> None:
    early = [ranks.rpc_async(name, dist.barrier) for name in ("worker1", "worker2", "worker4")]
    until(lambda: len(times(look())) == 3 if rows(look()) else False, "three ranks to enter")
    (row,) = rows(look())
    assert (row["state"], row["missing"], row["last"], row["end"]) == ("open", ["worker3"], None, None)
    assert {(one["end"], one["waited"]) for one in times(look())} == {(None, None)}
    before = time.monotonic()
    ranks.rpc_sync("worker3", dist.barrier)
    wait_all(early)
    (row,) = rows(look())
    assert (row["state"], row["missing"], row["last"]) == ("done", [], 3)
    waits = {one["worker"]: one["waited"] for one in times(look())}
    assert waits.pop(3) == 0.0
    for one in times(look()):
        if one["worker"] != 3:
            assert one["begin"] < before and one["begin"] + waits[one["worker"]] >= before
    assert row["waited"] == max(waits.values())


def test_a_new_watcher_sees_past_and_open_collectives(ranks: rpcbench.Cluster, everyone: Any) -> None:
    everyone(dist.barrier)
    waits = ranks.rpc_async("worker2", dist.all_reduce, (torch.ones(2),))

    def shown() -> CollectiveTimeline:
        with current.use_agent(ranks.agent):
            return rpcbench.collectives(last=2)

    until(lambda: [row["op"] for row in shown().rows.values()] == ["barrier", "all_reduce(SUM)"])
    _, under_way, elsewhere, *_ = shown().summary.splitlines()
    assert under_way.endswith(" of world is under way; worker1, worker3, worker4 not there yet")
    assert elsewhere.strip() == "worker1, worker3, worker4 are in no collective"
    wait_all([ranks.rpc_async(name, dist.all_reduce, (torch.ones(2),)) for name in NAMES if name != "worker2"])
    waits.wait()
    assert [row["state"] for row in shown().rows.values()] == ["done", "done"]


def test_traces_records_and_panels_begin_with_new_and_open_collectives(
    ranks: rpcbench.Cluster, everyone: Any, tmp_path: Path
) -> None:
    everyone(dist.all_reduce, torch.ones(1))
    waits = ranks.rpc_async("worker1", dist.broadcast, (torch.ones(1), 0))
    with current.use_agent(ranks.agent):
        until(lambda: [row["op"] for row in rpcbench.collectives(1).rows.values()] == ["broadcast(src=0)"])
        source = TracedCollector(ranks.agent.part(Collector))
        stop = source.subscribe(lambda: None)
        with rpcbench.trace() as seen, rpcbench.record(tmp_path / "lesson.json"):
            wait_all([ranks.rpc_async(name, dist.broadcast, (torch.ones(1), 0)) for name in NAMES[1:]])
            waits.wait()
            everyone(dist.barrier)
        assert source.settle(20)
        player = Player(load_record(tmp_path / "lesson.json"))
        player.go_to_frame(10**6)
        shown = [seen.world, source.world(), player.world()]
    stop()
    for each in shown:
        found = rows(collectives_view(each))
        assert [(row["op"], row["state"], row["missing"]) for row in found] == [
            ("broadcast(src=0)", "done", []), ("barrier", "done", []),
        ]  # fmt: skip
        assert found[0]["last"] != 1
    assert seen.collectives.summary.startswith("2 collectives in ")


def unlike() -> str:
    try:
        dist.all_reduce(torch.ones(2 + dist.get_rank()))
    except CollectiveError:
        return "refused"
    return ""


def test_a_mismatched_collective_is_shown_as_failed_and_the_next_one_as_done(everyone: Any, look: Look) -> None:
    assert everyone(unlike) == ["refused"] * 4
    everyone(dist.barrier)
    assert [(row["op"], row["state"]) for row in rows(look())] == [("all_reduce(SUM)", "failed"), ("barrier", "done")]


def exchange() -> int:
    me = dist.get_rank()
    x = torch.full((3,), float(me))
    if me == 0:
        requests = [dist.isend(x, 1) for _ in range(2)]
        for request in requests:
            request.wait()
    elif me == 1:
        dist.recv(x, 0)
        dist.recv(x)
    elif me == 2:
        dist.send(x, 3)
    else:
        return dist.recv(x)
    return -1


def test_a_send_and_its_recv_have_one_row_even_with_any_source(everyone: Any, look: Look) -> None:
    assert everyone(exchange)[3] == 2
    found = sorted((row["op"], row["members"], row["state"], row["bytes"]) for row in rows(look()))
    one, other = ("send", NAMES[:2], "done", 12), ("send", NAMES[2:], "done", 12)
    assert found == [one, one, other]
    assert all(row["last"] is not None and row["missing"] == [] for row in rows(look()))


def test_a_recv_from_any_rank_is_shown_while_it_waits(ranks: rpcbench.Cluster, look: Look) -> None:
    waits = ranks.rpc_async("worker2", dist.recv, (torch.ones(1),))
    until(lambda: [row["op"] for row in rows(look())] == ["recv from any rank"])
    ranks.rpc_sync("worker4", dist.send, (torch.ones(1), 1))
    assert waits.wait() == 3
    (row,) = rows(look())
    assert (row["op"], row["members"], row["last"], row["state"]) == ("send", ["worker4", "worker2"], 4, "done")


def in_pair(pair: Any) -> None:
    if dist.get_rank() in pair.ranks:
        dist.all_reduce(torch.ones(1), group=pair)


def test_collectives_of_different_groups_are_numbered_separately(
    ranks: rpcbench.Cluster, everyone: Any, look: Look
) -> None:
    pairs = [ranks.group("worker1", "worker3"), ranks.group("worker2", "worker3")]
    for pair in pairs:
        everyone(in_pair, pair)
    found = [row for row in rows(look()) if row["op"] == "all_reduce(SUM)"]
    assert [row["members"] for row in found] == [["worker1", "worker3"], ["worker2", "worker3"]]
    assert len({row["group"] for row in found}) == 2 and [row["number"] for row in found] == [1, 1]


def gradients(told: bool) -> list[list[float]]:
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    data = torch.randn(4, 2, 8)
    whole = DistributedDataParallel(model, bucket_cap_mb=1e-4)  # a bucket for each layer, from the second pass on
    if told:
        whole.register_comm_hook(None, dist.ddp_all_reduce)
    for _ in range(2):
        model.zero_grad()
        whole(data[dist.get_rank()]).sum().backward()
    return [parameter.grad.flatten().tolist() for parameter in model.parameters()]


def test_the_hook_reports_all_reduces_of_distributed_data_parallel_unchanged(everyone: Any, look: Look) -> None:
    plain = everyone(gradients, False)
    assert {row["op"] for row in rows(look()) if row["op"].startswith("all_reduce")} == {"all_reduce(SUM)"}
    before = set(look()["collectives"])
    assert everyone(gradients, True) == plain
    new = [row for key, row in look()["collectives"].items() if key not in before]
    found = [row for row in new if row["op"].startswith("all_reduce")]  # each once: not as torch's own as well
    assert {(row["op"], row["state"], len(row["members"])) for row in found} == {("all_reduce(AVG)", "done", 4)}
    assert len(found) >= 2 and sum(row["bytes"] for row in found) == 2 * 4 * (8 * 8 + 8 + 8 + 1)


def test_a_collective_with_a_killed_rank_is_shown_as_failed_and_the_rank_as_missing() -> None:
    with rpcbench.Cluster(2) as cluster:
        wait_all([cluster.rpc_async(name, dist.init_process_group) for name in cluster.workers])
        looks = looking_at(cluster)
        look = next(looks)
        waits = cluster.rpc_async("worker1", dist.barrier)
        until(lambda: [row["missing"] for row in rows(look())] == [["worker2"]])
        cluster.kill("worker2")
        with pytest.raises(RuntimeError, match="worker2"):
            waits.wait()
        until(lambda: [(row["state"], row["missing"]) for row in rows(look())] == [("failed", ["worker2"])])
        assert next(looks, None) is None


# ---- the table, alone


@pytest.fixture
def bus() -> EventLog:
    made = EventLog()
    made.listening = True
    return made


def part(number: int, scope: str = "w.0") -> CollectivePart:
    return CollectivePart(scope, number, "world", "barrier", ("worker1",))


def of(bus: EventLog) -> CollectiveEvents:
    return CollectiveEvents(SimpleNamespace(links=SimpleNamespace(bus=bus)))  # type: ignore[arg-type]


def test_the_table_keeps_the_latest_ended_collectives_and_all_open_ones(
    bus: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "KEPT", 3)
    made = of(bus)
    hangs = made.record_entry(part(0))
    tables: dict[str, Any] = {}
    for number in range(1, 10):
        with made.record_entry(part(number)):
            pass
        for key, row in bus.drain_changes(100).rows.get("collectives", {}).items():
            tables[key] = row
    assert list(made.collectives_table()) == ["w.0.7", "w.0.8", "w.0.9", "w.0.0"]
    assert {key: row for key, row in tables.items() if row is not None} == made.collectives_table(), (
        "a listener has the same rows"
    )
    hangs.record_end()
    assert list(made.collectives_table()) == ["w.0.8", "w.0.9", "w.0.0"]


def test_a_part_ends_once_by_itself_or_with_its_world(bus: EventLog) -> None:
    made = of(bus)
    with pytest.raises(ZeroDivisionError), made.record_entry(part(1)):
        raise ZeroDivisionError
    lane, other = made.record_entry(part(2)), made.record_entry(part(2, "v.0"))
    made.fail_running_parts("w")
    ended = made.collectives_table()["w.0.2"]["end"]
    lane.record_end()
    other.record_end()
    state = {key: row["failed"] for key, row in made.collectives_table().items()}
    assert state == {"w.0.1": True, "w.0.2": True, "v.0.2": False}
    assert made.collectives_table()["w.0.2"]["end"] == ended
    lane.adopt_identity(part(3))
    assert "w.0.3" not in made.collectives_table(), "an ended part becomes no other one"


def test_a_collective_in_an_ended_world_is_recorded_as_failed() -> None:
    store = c10d.HashStore()
    here = World(RendezvousResult(store, 0, (RankProcess.of_this_process(),)), "gloo", 20)
    end = GroupMember(here, (0,), None, "0")  # type: ignore[arg-type]
    before = end.enter_collective("barrier", "", 0)
    here.close(CollectiveError("over"))
    end.enter_collective("all_gather", "", 0)
    before.record_end()
    found = [(row["op"], row["failed"]) for row in here.collective_events.collectives_table().values()]
    assert found == [("barrier", True), ("all_gather", True)]


def test_nothing_is_reported_without_a_listener(bus: EventLog) -> None:
    bus.listening = False
    with of(bus).record_entry(part(1)):
        pass
    assert bus.drain_changes(10).rows == {} and CollectiveEvents().collectives_table() == {}
