"""Collectives that programs call through torch itself are seen, by themselves and under DDP, FSDP and DTensor."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import addresses
import pytest
import torch
import torch.distributed as c10d
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_world import begin
from worlds import PATIENCE, until

import rpcbench
import rpcbench.distributed as dist
from rpcbench.base.futures import wait_all
from rpcbench.base.ids import Row
from rpcbench.distributed.call_sites import ModulePaths
from rpcbench.distributed.flight_records import flight_record
from rpcbench.distributed.torch_collectives import PROBE, TorchCollectives
from rpcbench.runtime import current
from rpcbench.telemetry.collector import Collector

pytestmark = pytest.mark.process
Everyone = Callable[..., list[Any]]
NAMES = ["worker1", "worker2", "worker3"]
_gate = threading.Event()


@pytest.fixture
def free() -> Iterator[int]:
    with addresses.port() as number:
        yield number


def settled(look: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows once all have ended, which transfers and reduce_scatters report a little later."""
    until(lambda: all(row["state"] != "open" for row in look()), "all collectives to end")
    return look()


def many_kinds() -> None:
    me, size = c10d.get_rank(), c10d.get_world_size()
    x, wide = torch.ones(4), torch.ones(4 * size)
    parts = [torch.ones(4) for _ in range(size)]
    first = me == 0
    c10d.all_reduce(x, c10d.ReduceOp.MAX)
    c10d.all_reduce(x, async_op=True).wait()
    c10d.broadcast(x, 1)
    c10d.reduce(x, 2)
    c10d.all_gather(parts, x)
    c10d.all_gather_single(wide, x)
    c10d.reduce_scatter_single(x, wide)
    c10d.gather(x, parts if first else None, 0)
    c10d.scatter(x, parts if first else None, 0)
    c10d.all_to_all_single(torch.empty(4 * size), wide)
    c10d.barrier()
    c10d.monitored_barrier()


KINDS = [
    ("all_reduce(MAX)", 16), ("all_reduce(SUM)", 16), ("broadcast(src=1)", 16), ("reduce(SUM, dst=2)", 16),
    ("all_gather", 16), ("all_gather", 16), ("reduce_scatter(SUM)", 48), ("gather(dst=0)", 16),
    ("scatter(src=0)", 16), ("all_to_all", 48), ("barrier", 0), ("monitored_barrier", 0),
]  # fmt: skip


def test_each_collective_of_torch_has_one_row_with_all_ranks(all_three: Everyone, watched: Any) -> None:
    all_three(many_kinds)
    found = settled(watched)
    assert [(row["op"], row["bytes"]) for row in found] == KINDS
    numbers = [row["number"] for row in found[:-1]]  # of the group; a monitored barrier consists of transfers
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    for row in found:
        assert (row["group"], row["members"], row["state"], row["missing"]) == ("world", NAMES, "done", [])
        assert row["end_known"] and row["last"] is not None and row["end"] >= row["begin"]
        assert row["site"].startswith("test_torch_collectives.py:")
    assert [row["shape"] for row in found[:1]] == ["float32[4]"]


def two() -> None:
    x = torch.ones(3)
    c10d.all_reduce(x)
    c10d.reduce_scatter_single(torch.empty(1), x)


def noted() -> bool:
    return not any(entry.runs for entry in flight_record()[-2:])


def test_what_ran_unwatched_is_read_from_torchs_own_record(all_three: Everyone) -> None:
    before = rpcbench.collectives(10_000).rows
    until(lambda: not any(all_three(kernel_stands)), "the end of this look")
    all_three(two)
    until(lambda: all(all_three(noted)), "gloo to note the ends, which it does after the waits have returned")
    seen = rpcbench.collectives(10_000)
    new = [row for key, row in seen.rows.items() if key not in before]
    # gloo makes a reduce_scatter of an all_reduce, and records that
    assert [(row["op"], row["shape"], row["members"]) for row in new] == [
        ("all_reduce", "float32[3]", NAMES), ("all_reduce", "float32[3]", NAMES),
    ]  # fmt: skip
    assert {(row["state"], row["end_known"], row["last"] is not None) for row in new} == {("done", False, True)}
    assert "have no known end" in seen.summary
    # a second look neither doubles nor changes them
    again = rpcbench.collectives(10_000).rows
    assert list(again) == list(seen.rows)


def lopsided() -> int:
    """Make transfers, of which each rank has another number, and then a collective."""
    x, me = torch.ones(2), c10d.get_rank()
    if me == 0:
        for _ in range(3):
            c10d.send(x, 1)
    if me == 1:
        for _ in range(3):
            c10d.recv(x, 0)
    c10d.all_reduce(x)
    return max(each.number for each in flight_record() if each.group == "0")


def test_ranks_number_alike_though_their_transfers_differ(all_three: Everyone, three: rpcbench.Cluster) -> None:
    numbers = set(all_three(lopsided))  # unwatched
    collector = three.agent.part(Collector)
    stop = collector.subscribe(lambda: None)
    try:
        assert collector.settle(20)
        numbers |= set(all_three(lopsided))  # watched
        found = settled(lambda: list(rpcbench.collectives(10_000).rows.values()))
    finally:
        stop()
    last = [row for row in found if row["op"] == "all_reduce(SUM)"][-1]
    assert (last["number"], last["state"], last["missing"]) == (max(numbers), "done", [])
    assert len(numbers) == 2, "the ranks agree, before and after"
    sends = [row for row in found if row["op"] == "send"][-3:]
    assert [(row["number"], row["members"], row["state"]) for row in sends] == [
        (number, ["worker1", "worker2"], "done") for number in (1, 2, 3)
    ]


def data_parallel() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()


def test_collectives_of_ddp_are_seen(all_three: Everyone, watched: Any) -> None:
    all_three(data_parallel)
    found = settled(watched)
    assert found[-1]["op"] == "all_reduce(SUM)" and found[-1]["bytes"] == 80, "the gradients, from torch's C++"
    assert {row["state"] for row in found} == {"done"}
    assert found[0]["site"].startswith("DistributedDataParallel, test_torch_collectives.py:")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))  # type: ignore[no-any-return]


def sharded() -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    model = Block()
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    model(torch.ones(2, 6)).sum().backward()


def test_collectives_of_fsdp_name_the_part_of_the_model(all_three: Everyone, watched: Any) -> None:
    all_three(sharded)
    found = [(row["op"], row["site"], row["group"]) for row in settled(watched)]
    gathers = [(site, group) for op, site, group in found if op == "all_gather"]
    scatters = [(site, group) for op, site, group in found if op.startswith("reduce_scatter")]
    assert [site for site, _ in gathers] == ["FSDP up", "FSDP down", "FSDP down", "FSDP up"]
    assert [site for site, _ in scatters] == ["FSDP down", "FSDP up"]


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (3,))
    model = torch.nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model(torch.ones(2, 6)).sum()


def test_collectives_of_tensor_parallel_name_the_layer_and_the_line(all_three: Everyone, watched: Any) -> None:
    all_three(tensor_parallel)
    sites = [row["site"] for row in settled(watched) if row["op"].startswith("all_reduce")]
    line = Block.forward.__code__.co_firstlineno + 1
    assert sites == [f"{number}.down, test_torch_collectives.py:{line}" for number in range(2)]


LIBRARY = """
import torch.distributed
def reduce(x):
    torch.distributed.all_reduce(x)
"""


def by_a_library(folder: str) -> None:
    spec = importlib.util.spec_from_file_location("helping", f"{folder}/helping.py")
    helping = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(helping)  # type: ignore[union-attr]
    helping.reduce(torch.ones(1))


def test_the_line_of_the_program_stands_beside_that_of_a_library(
    all_three: Everyone, watched: Any, tmp_path: Path
) -> None:
    (folder := tmp_path / "site-packages").mkdir()
    (folder / "helping.py").write_text(LIBRARY)
    all_three(by_a_library, str(folder))
    line = by_a_library.__code__.co_firstlineno + 4
    assert [row["site"] for row in settled(watched)] == [f"helping.py:4, test_torch_collectives.py:{line}"]


def test_the_paths_of_modules_follow_a_change_of_the_model_and_keep_none_alive() -> None:
    paths, model = ModulePaths(), torch.nn.Sequential(Block(), Block())
    shared = model[1].up
    assert [paths.module_path(model, each) for each in (model, model[0].down, shared)] == ["", "0.down", "1.up"]
    assert paths.module_path(model[1], shared) == "up", "within another root"
    model[0] = new = Block()
    assert paths.module_path(model, new.up) == "0.up"
    assert paths.module_path(model, torch.nn.Linear(1, 1)) == ""
    freed = weakref.ref(new)
    del new, model
    assert freed() is None


def redistribute() -> None:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    made = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
    made.redistribute(placements=[Replicate()]).to_local().sum()


def test_collectives_of_dtensor_are_seen_with_the_line_of_the_program(all_three: Everyone, watched: Any) -> None:
    all_three(redistribute)
    last = settled(watched)[-1]
    assert last["op"] == "all_gather" and last["site"].startswith("test_torch_collectives.py:"), last


def shut() -> None:
    _gate.clear()


def unlock() -> None:
    _gate.set()


def late(here: str) -> None:
    """Come to a collective only when the gate opens, or to another one on another rank."""
    if here == "late":
        _gate.wait(60)
    elif here == "other":
        c10d.broadcast(torch.ones(2), 0, group=_pair())
        return
    c10d.all_reduce(torch.ones(2))


def _pair() -> Any:
    (pair,) = [group for group in distributed_c10d._world.pg_map if group.group_desc == "pair"]
    return pair


def new_pair() -> None:
    c10d.new_group([0, 2], group_desc="pair")


@pytest.mark.parametrize("when", ["watched", "unwatched"])
def test_a_hang_names_the_missing_ranks_and_where_each_is(
    three: rpcbench.Cluster, all_three: Everyone, request: pytest.FixtureRequest, when: str
) -> None:
    if when == "watched":
        request.getfixturevalue("watched")
    all_three(shut)
    if not all_three(pairs)[0]:
        all_three(new_pair)
    waiting = [three.rpc_async("worker1", late, ("now",)), three.rpc_async("worker2", late, ("late",))]
    waiting.append(three.rpc_async("worker3", late, ("other",)))

    def hang() -> Row | None:
        rows = rpcbench.collectives(10_000).rows.values()
        return next((row for row in rows if row["state"] == "open" and row["group"] == "world"), None)

    until(lambda: (row := hang()) is not None and len(row["missing"]) == 2 and "broadcast" in str(row["elsewhere"]))
    row = hang()
    assert row is not None
    first, second = row["elsewhere"]
    assert first == "worker2 is in no collective"
    assert second.startswith("worker3 is in broadcast") and " of pair" in second
    assert "worker2 is in no collective" in rpcbench.collectives(10_000).summary
    three.rpc_sync("worker2", unlock)
    waiting.append(three.rpc_async("worker1", late, ("other",)))
    waiting.append(three.rpc_async("worker3", late, ("now",)))
    wait_all(waiting)
    until(lambda: hang() is None, "the hang to end in the rows too")


def pairs() -> int:
    return sum(group.group_desc == "pair" for group in distributed_c10d._world.pg_map)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("(")[0].strip()
    return ""


def wrong() -> list[str]:
    return [
        refused(lambda: c10d.all_reduce(torch.ones(2, dtype=torch.uint16))),  # gloo has no such dtype
        refused(lambda: c10d.all_gather_coalesced([], [])),
    ]


def test_a_call_that_torch_refuses_is_shown_as_failed(all_three: Everyone, watched: Any) -> None:
    assert all_three(wrong) == [["Invalid scalar type", "There were no tensor arguments to this function"]] * 3
    assert [(row["op"], row["shape"], row["state"]) for row in settled(watched)] == [
        ("all_reduce(SUM)", "uint16[2]", "failed")
    ]


def send_outside() -> tuple[str, bool]:
    """Send to a rank that is not there; return the error that comes, and whether the watcher had one of its own."""
    reports = current.current_agent().part(TorchCollectives)

    def refuse() -> None:  # in place of gloo, which looks for the rank beyond the end of its table, and may crash
        raise c10d.DistStoreError("wait timeout")

    with pytest.raises(c10d.DistError) as error:
        reports.run_and_record("send", ([torch.ones(3)], distributed_c10d._get_default_group().boxed(), 3, 0), refuse)
    return str(error.value), reports._bystander._has_logged


def test_a_message_to_a_rank_outside_the_group_has_torchs_error(all_three: Everyone, watched: Any) -> None:
    assert all_three(send_outside) == [("wait timeout", False)] * 3
    told = [(row["op"], row["shape"], row["members"], row["state"]) for row in settled(watched)]
    op = "send: rank 3 is not in the group"
    assert sorted(told) == [(op, "float32[3]", [name], "failed") for name in NAMES]


def cpu_and_cuda() -> bool:
    """Return whether gloo's one backend for both types of device is one group here, with one count."""
    here = current.current_agent().part(TorchCollectives)
    c10d.all_reduce(torch.ones(2))
    with here._lock:
        return here._find_group("0", "cpu") is here._find_group("0", "cuda")


def test_a_backend_for_two_types_of_device_has_one_count(all_three: Everyone, watched: Any) -> None:
    assert all_three(cpu_and_cuda) == [True] * 3


def kernel_stands() -> bool:
    """Return whether a collective of torch would pass our kernel in this process now."""
    return PROBE.is_active


def test_torch_is_left_alone_without_a_watcher(three: rpcbench.Cluster, all_three: Everyone) -> None:
    until(lambda: all_three(kernel_stands) == [False] * 3, "the end of earlier watches")
    collector = three.agent.part(Collector)
    stop = collector.subscribe(lambda: None)
    assert collector.settle(20)
    until(lambda: all_three(kernel_stands) == [True] * 3)
    stop()
    until(lambda: all_three(kernel_stands) == [False] * 3)


CALLS, LOOKS = 400, 10


def busy(count: int) -> int:
    x = torch.ones(4)
    for _ in range(count):
        c10d.all_reduce(x)
    return count


def test_watches_may_begin_and_end_while_a_program_runs(three: rpcbench.Cluster) -> None:
    running = [three.rpc_async(name, busy, (CALLS,), timeout=0) for name in three.workers]
    for _ in range(LOOKS):  # not without end: a rank that begins a watch waits, and with it the other two
        assert rpcbench.collectives(50).rows
    deadline = time.monotonic() + PATIENCE
    while not all(future.done() for future in running):
        assert time.monotonic() < deadline, str(three.stack())
        time.sleep(0.01)
    assert wait_all(running) == [CALLS] * 3
    rows = list(rpcbench.collectives(50).rows.values())
    numbers = [row["number"] for row in rows if row["op"].startswith("all_reduce") and row["group"] == "world"]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "none is missing, none is there twice"


def anew(method: str) -> None:
    c10d.destroy_process_group()
    begin(method)
    c10d.all_reduce(torch.ones(1))


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_the_rows_of_a_new_world_are_its_own(
    all_three: Everyone, watched: Any, free: int, store: str, tmp_path: Path
) -> None:
    all_three(anew, f"file://{tmp_path}/store" if store == "file" else f"tcp://127.0.0.1:{free}")
    (row,) = settled(watched)
    assert (row["op"], row["number"], row["members"], row["state"]) == ("all_reduce(SUM)", 1, NAMES, "done")


def unwatched_in_two_worlds(first: str, second: str) -> None:
    for method, count in ((first, 3), (second, 1)):
        c10d.destroy_process_group()
        begin(method)
        for _ in range(count):
            c10d.all_reduce(torch.ones(4 + count))


def test_the_record_of_an_earlier_world_is_not_of_this_one(
    three: rpcbench.Cluster, all_three: Everyone, tmp_path: Path
) -> None:
    before = rpcbench.collectives(10_000).rows
    until(lambda: not any(all_three(kernel_stands)), "the end of this look")
    all_three(unwatched_in_two_worlds, f"file://{tmp_path}/first", f"file://{tmp_path}/second")
    rows = [row for key, row in rpcbench.collectives(10_000).rows.items() if key not in before]
    assert [(row["op"], row["shape"], row["number"], row["members"]) for row in rows] == [
        ("all_reduce", "float32[5]", 1, NAMES)
    ]


def with_a_fake_backend(method: str) -> float:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    c10d.destroy_process_group()
    c10d.init_process_group("fake", store=c10d.HashStore(), rank=0, world_size=4)
    c10d.all_reduce(x := torch.ones(1))
    c10d.destroy_process_group()
    begin(method)
    return x.item()


def test_a_backend_that_counts_nothing_is_left_alone(all_three: Everyone, watched: Any, tmp_path: Path) -> None:
    assert all_three(with_a_fake_backend, f"file://{tmp_path}/after") == [1.0] * 3
    assert watched() == []


def ours(method: str) -> None:
    c10d.destroy_process_group()
    dist.init_process_group("gloo", timeout=30)
    dist.all_reduce(torch.ones(2))
    c10d.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    begin(method)


def test_calls_of_this_package_have_one_row_beside_those_of_torch(all_three: Everyone, watched: Any, free: int) -> None:
    all_three(ours, f"tcp://127.0.0.1:{free}")
    found = [(row["op"], row["shape"], row["members"]) for row in settled(watched)]
    assert ("all_reduce(SUM)", "float32[2]", NAMES) in found
    assert ("all_reduce(SUM)", "float32[3]", NAMES) in found
    assert len(found) == 2, found
