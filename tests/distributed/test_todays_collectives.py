"""Each operation that torch has added since 0.4, on each group and for each dtype, equals the computation by one
process; so do the forms with async_op, positions in a group, and today's orders of arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_equal_to_plain import OPS, plain, sweep, tensor

import rpcbench.distributed as dist

pytestmark = pytest.mark.process


def each(ranks: Any, shape: Any, dtype: Any) -> list[torch.Tensor]:
    return [tensor(rank, shape, dtype) for rank in ranks]


def all_gather_into_tensor(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    mine, wanted = tensor(me, shape, dtype), torch.stack(each(ranks, shape, dtype))
    stacked = torch.zeros_like(wanted)
    dist.all_gather_into_tensor(stacked, mine, group)
    if not shape:
        return [stacked], [wanted]
    joined = torch.zeros_like(wanted.flatten(0, 1))
    dist.all_gather_single(joined, mine, group, True).wait()
    return [stacked, joined], [wanted, wanted.flatten(0, 1)]


def rows(rank: int, ranks: Any, shape: Any, dtype: Any) -> torch.Tensor:
    """On a rank: a part for each rank of the group."""
    return torch.stack([tensor(rank + 2 * to, shape, dtype) for to in ranks])


def reduce_scatter(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    of, mine = getattr(dist.ReduceOp, op), rows(me, ranks, shape, dtype)
    by_list, by_tensor = torch.zeros_like(mine[0]), torch.zeros_like(mine[0])
    dist.reduce_scatter(by_list, [*mine], of, group)
    dist.reduce_scatter_tensor(by_tensor, mine, of, group, async_op=True).wait()
    wanted = plain(op, [rows(rank, ranks, shape, dtype)[ranks.index(me)] for rank in ranks])
    return [by_list, by_tensor], [wanted, wanted]


def all_to_all(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    """Rank a sends rank b as many rows as the sum of their places in the group, also none; then each one row."""
    at, size = ranks.index(me), len(ranks)

    def part(a: int, b: int) -> torch.Tensor:
        return torch.full((a + b, *shape), 1 + (a + 2 * b) % 3).to(dtype)

    sent, wanted = [part(at, b) for b in range(size)], [part(a, at) for a in range(size)]
    given = [torch.zeros_like(one) for one in wanted]
    dist.all_to_all(given, sent, group)
    whole, expected = torch.zeros_like(torch.cat(wanted)), torch.cat(wanted)
    takes, gives = [len(one) for one in wanted], [len(one) for one in sent]
    dist.all_to_all_single(whole, torch.cat(sent), takes, gives, group)
    even = torch.zeros((size, *shape), dtype=dtype)
    dist.all_to_all_single(even, torch.stack([tensor(at + 2 * b, shape, dtype) for b in range(size)]), group=group)
    evenly = torch.stack([tensor(a + 2 * at, shape, dtype) for a in range(size)])
    return [*given, whole, even], [*wanted, expected, evenly]


def in_background(op: str, me: int, ranks: Any, group: Any, shape: Any, dtype: Any) -> Any:
    """All forms at once, by positions in the group, with today's order of arguments."""
    mine, last = tensor(me, shape, dtype), len(ranks) - 1
    at_end = me == ranks[-1]
    spread, summed, one, got = mine.clone(), mine.clone(), mine.clone(), torch.zeros_like(mine)
    lists = [torch.zeros_like(mine) for _ in ranks]
    into = [torch.zeros_like(mine) for _ in ranks] if at_end else None
    parts = each([rank + 1 for rank in ranks], shape, dtype) if at_end else None
    work = [
        dist.broadcast(spread, None, group, True, last),
        dist.all_reduce(summed, dist.ReduceOp.MAX, group, True),
        dist.reduce(one, None, dist.ReduceOp.MAX, group, True, last),
        dist.all_gather(lists, mine, group, True),
        dist.gather(mine, into, None, group, True, last),
        dist.scatter(got, parts, None, group, True, last),
        dist.barrier(group, True),
    ]
    assert all(one.wait() is True and one.is_completed() and one.is_success() for one in reversed(work))
    everything = each(ranks, shape, dtype)
    top = plain("MAX", everything)
    wanted = [everything[-1], top, *everything, tensor(me + 1, shape, dtype)]
    given = [spread, summed, *lists, got]
    return (given, wanted) if not at_end else ([*given, one, *into], [*wanted, top, *everything])  # type: ignore[misc]


@pytest.mark.parametrize("op", OPS)
def test_reductions_with_scattered_results_equal_those_of_one_process(everyone: Any, op: str) -> None:
    assert everyone(sweep, reduce_scatter, op) == [[]] * 4


@pytest.mark.parametrize("one", [all_gather_into_tensor, all_to_all, in_background])
def test_operations_of_today_deliver_the_right_tensors(everyone: Any, one: Any) -> None:
    assert everyone(sweep, one, "SUM") == [[]] * 4


def without_autograd() -> list[list[float]]:
    """All-to-all into tensors that only the modes of the calling thread let a program write."""
    me, found = float(dist.get_rank()), []
    for mode, into in (
        (torch.inference_mode(), lambda: [torch.zeros(1) for _ in range(4)]),
        (torch.no_grad(), lambda: [torch.zeros(1, requires_grad=True) for _ in range(4)]),
    ):
        with mode:
            dist.all_to_all(out := into(), [torch.tensor([me])] * 4)
            found.append([each.item() for each in out])
    dist.barrier()
    return found


def test_all_to_all_writes_in_the_autograd_mode_of_its_caller(everyone: Any) -> None:
    assert everyone(without_autograd) == [[[0.0, 1.0, 2.0, 3.0]] * 2] * 4


def old_and_new_orders() -> list[bool]:
    """Gather and scatter: by today's order, by that of 0.4, and by name."""
    me = dist.get_rank()
    x, all_of, found = torch.tensor([10.0 * me]), [torch.zeros(1) for _ in range(4)], []
    for call in (
        lambda into: dist.gather(x, into, 1), lambda into: dist.gather(x, 1, into),
        lambda into: dist.gather(x, dst=1, gather_list=into), lambda into: dist.gather(x, 1, gather_list=into),
    ):  # fmt: skip
        call(all_of if me == 1 else None)
        found.append(me != 1 or [one.item() for one in all_of] == [0.0, 10.0, 20.0, 30.0])
        all_of = [torch.zeros(1) for _ in range(4)]
    parts = [torch.tensor([float(rank)]) for rank in range(4)] if me == 2 else None
    for call in (lambda y: dist.scatter(y, parts, 2), lambda y: dist.scatter(y, 2, parts)):
        call(y := torch.zeros(1))
        found.append(y.item() == me)
    return found


def test_both_orders_of_arguments_mean_the_same(everyone: Any) -> None:
    assert everyone(old_and_new_orders) == [[True] * 6] * 4


# -- point to point
def out_of_order() -> Any:
    """Rank 0 sends three tags; rank 1 receives them in another order, the last from anyone."""
    x, found = [torch.zeros(2) for _ in range(3)], []
    if dist.get_rank() == 0:
        sent = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (0, 5, 2**20)]
        found = [one.wait() for one in sent]
    elif dist.get_rank() == 1:
        found = [dist.recv(x[2], 0, tag=2**20), dist.recv(x[0], group_src=0)]
        late = dist.irecv(x[1], tag=5)
        found += [late.wait(), late.source_rank(), len(late.result())]
    return [one[0].item() for one in x], found


def test_messages_of_different_tags_do_not_wait_for_each_other(everyone: Any) -> None:
    sender, receiver, *_ = everyone(out_of_order)
    assert sender[1] == [1, 1, 1] and receiver == ([0.0, 5.0, 2.0**20], [0, 0, 0, 0, 1])


def batched() -> list[tuple[float, float, str]]:
    """A ring: each rank sends to the next and receives from the one before, twice, by our ops and by torch's."""
    me, found = dist.get_rank(), []
    after, before = (me + 1) % 4, (me - 1) % 4
    for send, recv in ((dist.isend, dist.irecv), (torch.distributed.isend, torch.distributed.irecv)):
        given, tagged, mine = torch.zeros(1), torch.zeros(1), torch.tensor([float(me)])
        ops = [
            dist.P2POp(send, mine, after), dist.P2POp(recv, given, before),
            dist.P2POp(recv, tagged, group_peer=before, tag=3), dist.P2POp(send, mine + 10, after, tag=3),
        ]  # fmt: skip
        for one in dist.batch_isend_irecv(ops):
            one.wait()
        found.append((given.item(), tagged.item(), repr(ops[3])))
    return found


def test_a_batch_of_sends_and_receives_runs_at_once(everyone: Any) -> None:
    for rank, found in enumerate(everyone(batched)):
        words = f"P2POp(isend of float32[1] to rank {(rank + 1) % 4} with tag 3)"
        assert found == [((rank - 1) % 4, 10 + (rank - 1) % 4, words)] * 2


# -- objects
class Marked:
    """A class that tests define: it travels by its name."""

    def __init__(self, rank: int) -> None:
        self.rank, self.data = rank, torch.arange(rank + 1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marked) and self.rank == other.rank and torch.equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


def thing(rank: int) -> dict[str, Any]:
    """An object of another size on each rank, with tensors and code."""
    return {"text": "x" * rank * 1000, "mark": Marked(rank), "large": torch.full((rank * 3000,), rank)}


def same(a: Any, b: Any) -> bool:
    return bool(a["text"] == b["text"] and a["mark"] == b["mark"] and torch.equal(a["large"], b["large"]))


def objects() -> list[bool]:
    me, group = dist.get_rank(), dist.new_group([3, 0, 2])
    found = []
    for ranks, where in (((0, 1, 2, 3), None), ((0, 2, 3), group)):
        if me not in ranks:
            continue
        dist.all_gather_object(everything := [None] * len(ranks), thing(me), where)
        found.append(all(same(a, thing(rank)) for a, rank in zip(everything, ranks, strict=True)))
        dist.gather_object(thing(me), at_last := [None] * len(ranks) if me == 3 else None, 3, where)
        found.append(at_last is None or all(same(a, thing(rank)) for a, rank in zip(at_last, ranks, strict=True)))
        dist.scatter_object_list(one := [None, "kept"], [thing(r + 1) for r in ranks] if me == 2 else None, 2, where)
        found.append(same(one[0], thing(me + 1)) and one[1] == "kept")
        dist.broadcast_object_list(both := [thing(2), lambda: 7] if me == 2 else [None, None], 2, where)
        found.append(same(both[0], thing(2)) and both[1]() == 7)
    return found


def passed_on() -> Any:
    me = dist.get_rank()
    if me in (1, 2):
        dist.send_object_list([thing(me), me], 0)
        return None
    if me == 3:
        return None
    first, second = [None, None], [None, None]
    sender = dist.recv_object_list(first)
    other = dist.recv_object_list(second, 3 - sender)
    right = same(first[0], thing(sender)) and same(second[0], thing(other))
    return sorted([(sender, first[1]), (other, second[1])]), right


def test_objects_arrive_as_they_were_in_the_world_and_in_a_group(everyone: Any) -> None:
    assert everyone(objects) == [[True] * (4 if rank == 1 else 8) for rank in range(4)]


def test_lists_of_objects_travel_between_two_ranks(everyone: Any) -> None:
    assert everyone(passed_on)[0] == ([(1, 1), (2, 2)], True)


# -- groups
def subgroups() -> dict[str, Any]:
    me = dist.get_rank()
    pair, both = dist.new_subgroups(2)
    odd, _ = dist.new_subgroups_by_enumeration([[1, 3]])
    dist.all_reduce(x := torch.tensor([10.0**me]), group=pair)
    turned = dist.new_group([3, 1], sort_ranks=False)
    found = {
        "sum": x.item(), "both": len(both), "pair": dist.get_process_group_ranks(pair),
        "backend": dist.get_backend(pair), "everyone": dist.get_process_group_ranks(),
        "outside": isinstance(odd, dist.Outsider), "global": dist.get_global_rank(pair, 1),
        "position": dist.get_group_rank(pair, dist.get_global_rank(pair, 1)),
    }  # fmt: skip
    if me in (1, 3):
        dist.broadcast(y := torch.tensor([float(me)]), group=turned, group_src=0)
        found["turned"] = dist.get_process_group_ranks(turned), dist.get_rank(turned), y.item()
        local = dist.new_group([1, 3], timeout=7, backend="gloo", use_local_synchronization=True, group_desc="odd")
        dist.all_reduce(z := torch.ones(1), group=local)
        dist.destroy_process_group(local)
        found["local"] = z.item(), local in torch.distributed.distributed_c10d._world.pg_map
    return found


def test_groups_have_their_own_ranks_orders_and_ends(everyone: Any) -> None:
    for me, found in enumerate(everyone(subgroups)):
        low = me - me % 2
        told = {
            "sum": 10.0**low * 11, "both": 2, "pair": [low, low + 1], "backend": "gloo", "outside": me % 2 == 0,
            "global": low + 1, "position": 1, "everyone": [0, 1, 2, 3],
        }  # fmt: skip
        assert found == told | ({"turned": ([3, 1], 0 if me == 3 else 1, 3.0), "local": (2.0, False)} if me % 2 else {})


def by_torch() -> dict[str, Any]:
    """Names that torch alone defines work on the same world; ours accept the groups that torch makes."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(x := torch.tensor([10.0 ** dist.get_rank()]), group=mesh.get_group("tp"))
    made = torch.distributed.new_group([0, 1, 2])
    if dist.get_rank() < 3:
        dist.all_reduce(y := torch.ones(1), group=made)
    dist.all_reduce(z := torch.ones(1), group=dist.group.WORLD)
    return {
        "x": x.item(), "y": y.item() if dist.get_rank() < 3 else 3, "z": z.item(), "pgs": dist.get_pg_count() > 0,
        "local": dist.get_node_local_rank(), "same": dist.DeviceMesh is torch.distributed.device_mesh.DeviceMesh,
        "initialized": torch.distributed.is_initialized(),
    }  # fmt: skip


def test_names_of_torch_work_on_the_same_world(everyone: Any) -> None:
    for me, found in enumerate(everyone(by_torch)):
        x = 10.0 ** (me - me % 2) * 11
        assert found == {"x": x, "y": 3, "z": 4, "pgs": True, "local": me, "same": True, "initialized": True}


# -- futures
def followed() -> list[float]:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    tripled = work.get_future().then(lambda done: done.value()[0] * 3)
    found = [float(work.get_future() is work.get_future()), *tripled.wait().tolist()]
    work.synchronize()
    mine = torch.tensor([float(dist.get_rank())])
    gathered = dist.all_gather([torch.zeros(1) for _ in range(4)], mine, async_op=True)
    gathered.wait(timeout=20)
    return found + [one.item() for one in gathered.result()] + [float(gathered.exception() is None)]


def test_the_future_of_an_operation_has_its_tensors(everyone: Callable[..., Any]) -> None:
    assert everyone(followed) == [[1.0, 12.0, 12.0, 0.0, 1.0, 2.0, 3.0, 1.0]] * 4


def many_in_order() -> list[float]:
    """Fifty operations at once: they run in the order of the calls, on all ranks."""
    x = torch.ones(1)
    work = [dist.all_reduce(x, async_op=True) for _ in range(5)]
    others = [dist.broadcast(torch.ones(3), source % 4, async_op=True) for source in range(45)]
    for one in itertools.chain(reversed(work), others):
        one.wait()
    return x.tolist()


def test_operations_in_the_background_run_in_the_order_of_their_calls(everyone: Callable[..., Any]) -> None:
    assert everyone(many_in_order) == [[4.0**5]] * 4


def profiled() -> list[tuple[str, bool]]:
    """Return the operations that torch's profiler of this thread has seen, in order, and whether they took time."""
    x, me = torch.ones(2), dist.get_rank()
    with torch.profiler.profile() as seen:
        dist.all_reduce(x)
        dist.broadcast(x, 1, async_op=True).wait()
        if me < 2:
            (dist.send if me == 0 else dist.recv)(x, 1 - me)
        dist.barrier()
    return [(each.name, each.cpu_time_total > 0) for each in seen.events() if each.name.startswith("gloo:")]


def test_torchs_profiler_sees_each_operation_under_torchs_name(everyone: Callable[..., Any]) -> None:
    for rank, seen in enumerate(everyone(profiled)):
        between = [["gloo:send"], ["gloo:recv"], [], []][rank]
        names = ["gloo:all_reduce", "gloo:broadcast", *between, "gloo:barrier"]
        assert sorted(seen) == sorted((name, True) for name in names)
