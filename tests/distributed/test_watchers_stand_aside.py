"""Looking at a program changes nothing: all tensors pass, and an error of the watcher is logged and ends there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch_world import watching
from worlds import until

import rpcbench
from rpcbench.base.futures import wait_all
from rpcbench.distributed import shard_events, torch_collectives
from rpcbench.distributed.events import CollectiveEvents
from rpcbench.distributed.shard_events import WatchedModel, watch_model
from rpcbench.distributed.torch_collectives import PROBE, TorchCollectives
from rpcbench.runtime import current
from rpcbench.runtime.events import Bystander

pytestmark = pytest.mark.process
Everyone = Callable[..., list[Any]]
SIZE = 3


def sparse() -> list[list[float]]:
    """Sum a sparse tensor, and train an embedding with sparse gradients."""
    me = c10d.get_rank()
    total = torch.sparse_coo_tensor([[me, 3]], [[1.0, 2.0], [3.0, 4.0]], (4, 2))
    c10d.all_reduce(total)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True))
    model(torch.tensor([me, 4])).sum().backward()
    gradient: Any = model.module.weight.grad
    return [total.to_dense().flatten().tolist(), gradient.to_dense().flatten().tolist()]


def test_sparse_tensors_are_reduced_as_without_a_watcher(three: rpcbench.Cluster, all_three: Everyone) -> None:
    third = pytest.approx(1 / 3)
    plain = all_three(sparse)
    assert plain[0] == [[1, 2, 1, 2, 1, 2, 9, 12], [third] * 6 + [0, 0, 1, 1]]
    with watching(three) as rows:
        assert all_three(sparse) == plain
        until(lambda: len(rows()) > 1 and all(row["state"] == "done" for row in rows()), "the ends")
        summed = rows()[0]
    assert (summed["op"], summed["shape"], summed["bytes"]) == ("all_reduce(SUM)", "float32[4, 2]", 2 * 8 + 4 * 4)


def all_ways() -> list[float]:
    """Make an operation of each way in which the watcher learns of its end, and one that torch refuses."""
    me = c10d.get_rank()
    x, part = torch.full((SIZE,), me + 1.0), torch.empty(1)
    c10d.all_reduce(x)
    work = c10d.all_reduce(y := torch.ones(1), async_op=True)
    work.wait()  # type: ignore[union-attr]
    c10d.reduce_scatter_single(part, torch.ones(SIZE))
    other = torch.empty(1)
    c10d.reduce_scatter_single(other, torch.ones(SIZE), async_op=True).wait()  # type: ignore[union-attr]
    if me < 2:
        (c10d.send if me == 0 else c10d.recv)(x, 1 - me)
    c10d.barrier()
    c10d.monitored_barrier()
    for refused in (torch.ones(2, dtype=torch.uint16), torch.ones(2).to_sparse()):  # at the wait, and at once
        with pytest.raises(RuntimeError, match=r"Invalid scalar type|unsupported reduction operation"):
            c10d.all_reduce(refused, c10d.ReduceOp.PRODUCT)
    return [*x.tolist(), *y.tolist(), *part.tolist(), *other.tolist()]


RESULTS = [6.0, 6.0, 6.0, 3.0, 3.0, 3.0]
STEPS: dict[str, tuple[Any, str]] = {
    **{name: (TorchCollectives, name) for name in (
        "_record_entry", "_group_of_operation", "_count_operations", "_make_part", "_record_failure",
        "_count_transfers", "_follow_operation", "_follow_work", "_poll_for_end", "_start_poller", "_end_unheard",
        "_backend_of", "_record_unknown_end",
    )},
    **{name: (torch_collectives, name) for name in (
        "first_tensor", "flatten_tensors", "tensor_bytes", "Layouts", "OpLabel", "calling_site", "count_operations",
        "is_completed",
    )},
    "_begin_watch": (TorchCollectives, "_begin_watch"),
    "record_entry": (CollectiveEvents, "record_entry"),
    "record_end": (CollectiveEvents, "record_end"),
}  # fmt: skip
"""The steps of the watcher: before an operation, at its return, in callbacks and on its own thread."""


_prepared = threading.Event()


def is_faulty() -> bool:
    """Return whether a step raises now."""
    return _prepared.is_set()


@contextmanager
def faulty(step: str) -> Iterator[list[str]]:
    """Let one step raise, and collect what the watcher logs."""
    said: list[str] = []
    place, name = STEPS.get(step, (WatchedModel, step))

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError(step)

    kept, log = Kept(), logging.getLogger("rpcbench.runtime.events")
    log.addHandler(kept)
    log.propagate = False
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(current.current_agent().part(TorchCollectives), "_bystander", Bystander("the test"))
            patch.setattr(shard_events._BYSTANDER, "_has_logged", False)
            if step == "_record_unknown_end":  # runs only after another fault
                patch.setattr(TorchCollectives, "_follow_work", fail)
            patch.setattr(place, name, fail)
            _prepared.set()
            yield said
    finally:
        _prepared.clear()
        log.removeHandler(kept)
        log.propagate = True


def with_a_fault_in(step: str) -> tuple[list[float], list[str]]:
    with faulty(step) as said:
        results = all_ways()
        until(lambda: bool(said), "the log")
        return results, said


@pytest.mark.parametrize("step", sorted(STEPS.keys() - {"_begin_watch"}))
def test_a_fault_of_the_watcher_is_logged_once_and_the_program_goes_on(
    three: rpcbench.Cluster, all_three: Everyone, step: str
) -> None:
    with watching(three):
        for results, said in all_three(with_a_fault_in, step):
            assert results == RESULTS
            assert len(said) == 1 and said[0].startswith("the watcher of the test has failed. The program goes on")


def begin_with_a_fault() -> tuple[list[float], list[str], bool]:
    """Let the beginning of the next watch fail, and wait for that."""
    with faulty("_begin_watch") as said:
        until(lambda: bool(said), "the watch")
        return all_ways(), said, PROBE.is_active


def test_a_watch_that_cannot_begin_leaves_the_program_alone(three: rpcbench.Cluster) -> None:
    waiting = [three.rpc_async(name, begin_with_a_fault) for name in three.workers]
    until(lambda: all(three.rpc_sync(name, is_faulty) for name in three.workers), "the workers")
    with watching(three):
        for results, said, passes in wait_all(waiting):
            assert results == RESULTS and len(said) == 1 and passes


class ReadTensors(TorchFunctionMode):
    """Counts what is asked of tensors, as a program's own mode may."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def counted_by_the_program() -> int:
    x = torch.ones(2)
    with ReadTensors() as mode:
        c10d.all_reduce(x)
    return mode.count


def test_a_mode_of_the_program_does_not_see_the_watcher(three: rpcbench.Cluster, all_three: Everyone) -> None:
    plain = all_three(counted_by_the_program)
    with watching(three):
        assert all_three(counted_by_the_program) == plain


def trained_with_a_fault_in(step: str) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    if step == "_gathering_changed":
        fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watch_model(model, "faulty", optimizer)
    with faulty(step) as said:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    weight: Any = model.weight
    return (weight.full_tensor() if step == "_gathering_changed" else weight).flatten().tolist(), said


@pytest.mark.parametrize("step", ["_gathering_changed", "read_gradients", "before_optimizer_step", "optimizer_stepped"])
def test_a_fault_of_a_watched_model_leaves_its_training_alone(
    three: rpcbench.Cluster, all_three: Everyone, step: str
) -> None:
    torch.manual_seed(0)
    expected = (torch.nn.Linear(2, 1, bias=False).weight - 2).flatten().tolist()
    with watching(three):
        for weights, said in all_three(trained_with_a_fault_in, step):
            assert weights == pytest.approx(expected)
            assert len(said) == 1 and said[0].startswith("the watcher of models has failed")
