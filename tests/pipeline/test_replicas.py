"""Replicas of the stages of a pipeline: they give the results of one pipeline, and they stay equal."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from covering import pairs
from small import SGD, STAGES, data, grads, model, same
from torch import nn
from torch.nn import functional
from worlds import PATIENCE, far_world, nothing_left, until, world

from rpcbench import Cluster
from rpcbench.pipeline import Pipeline, PipelineError, data_parallel, schedule, split
from rpcbench.pipeline.data_parallel import ReplicaGroup
from rpcbench.pipeline.ops import Kind, Op
from rpcbench.pipeline.stage import StageWorker
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

FOUR = ["worker1", "worker2", "worker3", "worker4"]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    """The agents of a notebook and four workers, in this process; the test must leave nothing in them."""
    with world(tmp_path, 5) as made:
        yield made
        nothing_left(made)
        until(lambda: not waiting_for_gloo())


def waiting_for_gloo() -> bool:
    return any(thread.name == "rpcbench gloo" for thread in threading.enumerate())


def replicated(
    net: nn.Sequential | None = None, workers: Sequence[str] = FOUR, replicas: int = 2, **changes: Any
) -> Pipeline:
    fields: dict[str, Any] = {"microbatches": 2, "loss_fn": functional.cross_entropy}
    stages = split(model() if net is None else net, workers, replicas=replicas)
    return Pipeline(stages, **{**fields, **changes})


def states(pipe: Pipeline) -> list[dict[str, torch.Tensor]]:
    """Return the state of each replica, under the names of the model."""
    wide, worker_group = pipe.worker_group.layout.stages, pipe.worker_group
    found = worker_group.call_on_stages(_state, {stage.index: () for stage in pipe.stages})
    return [
        {
            stage.unsplit_name(own): t
            for stage in pipe.stages[begin : begin + wide]
            for own, t in found[stage.index].items()
        }
        for begin in range(0, len(pipe.stages), wide)
    ]


def _state(worker: StageWorker, stage: int) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in worker.modules[stage].state_dict().items()}


def equal(pipe: Pipeline) -> bool:
    """Return whether all replicas have the same state, to the last bit."""
    first, *others = states(pipe)
    return all(torch.equal(each[name], first[name]) for each in others for name in first)


@pytest.mark.parametrize(
    ("schedule", "samples", "reduction"),
    [*pairs(STAGES, [1, 13], ["mean", "sum"]), ("gpipe", 3, "mean"), ("zbv", 16, "sum")],
)
def test_gradients_of_replicas_equal_those_of_one_process(
    agents: list[Agent], schedule: str, samples: int, reduction: str
) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, reduction=reduction)

    net, (x, y) = model(nn.Tanh()), data(samples)
    loss = loss_fn(net(x), y)
    loss.backward()
    pipe = replicated(model(nn.Tanh()), schedule=schedule, loss_fn=loss_fn, loss_reduction=reduction)
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), grads(net))
    assert batch.result.loss == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize(("workers", "replicas"), [(FOUR[:2], 2), (FOUR[:3], 3), (FOUR, 4)])
def test_gradients_of_replicas_of_the_whole_model_equal_those_of_one_process(
    agents: list[Agent], workers: list[str], replicas: int
) -> None:
    """With 4 replicas and 3 samples, one replica only takes part in the all-reduce."""
    net, (x, y) = model(), data(3)
    functional.cross_entropy(net(x), y).backward()
    pipe = replicated(workers=workers, replicas=replicas, keep_gradients=True, optimizer=SGD)
    pipe.step(x, y)
    same(pipe.gradients(), grads(net))
    assert equal(pipe)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_training_of_replicas_equals_one_process_and_replicas_stay_equal(agents: list[Agent], schedule: str) -> None:
    net = model(nn.Tanh())
    pipe = replicated(model(nn.Tanh()), schedule=schedule, optimizer=(torch.optim.Adam, {"lr": 0.01}))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for number, samples in enumerate([13, 8, 1, 29]):
        x, y = data(samples, number)
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        assert pipe.step(x, y).loss == pytest.approx(loss.item(), rel=1e-9)
    assert equal(pipe)
    state = pipe.state_dict()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pipe.predict(data(7)[0]), net(data(7)[0]))
    assert pipe.evaluate(*data(7))["loss"] == pytest.approx(
        functional.cross_entropy(net(data(7)[0]), data(7)[1]).item()
    )


def test_replicas_support_accumulation_and_clipping(agents: list[Agent]) -> None:
    net, (x, y) = model(), data(21)
    functional.cross_entropy(net(x), y).backward()
    norm = float(nn.utils.clip_grad_norm_(net.parameters(), 0.01))
    pipe = replicated(optimizer=SGD, keep_gradients=True)
    with pipe.accumulate() as batch:
        for begin, end in [(0, 4), (4, 5), (5, 21)]:
            batch.add(x[begin:end], y[begin:end])
        assert batch.grad_norm() == pytest.approx(norm, rel=1e-12)
        assert batch.clip(0.01) == pytest.approx(norm, rel=1e-12)
        batch.apply()
    same(pipe.gradients(), grads(net))
    assert equal(pipe)


@pytest.mark.process
def test_dropout_of_replicas_equals_one_pipeline_with_as_many_micro_batches() -> None:
    """The workers are processes, because each process has its own random state."""
    losses = []
    with Cluster(4):
        for workers, replicas, microbatches in [(FOUR[:2], 1, 6), (FOUR, 2, 3)]:
            torch.manual_seed(1)
            pipe = replicated(model(nn.Dropout(0.5)), workers, replicas, microbatches=microbatches, optimizer=SGD)
            losses.append([pipe.step(*data(samples)).loss for samples in (13, 6, 4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


class Sometimes(nn.Module):
    """Has one parameter that only inputs with a mean above one half use, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.rare, self.never = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rare if bool(x.mean() > 0.5) else x


def test_a_parameter_that_one_replica_uses_has_its_gradient_on_all_replicas(agents: list[Agent]) -> None:
    x, y = data(4)
    x[0], x[1:] = 0.9, x[1:] / 4
    nets = [nn.Sequential(Sometimes(), *model()).double() for _ in range(2)]
    for row, wanted in zip(x, y, strict=True):
        (functional.cross_entropy(nets[0](row[None]), wanted[None]) / 4).backward()
    pipe = replicated(nets[1], optimizer=(torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}))
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), {name: grad for name, grad in grads(nets[0]).items() if name != "0.never"})
        batch.apply()
    assert equal(pipe)


def test_tied_weights_keep_equal_copies_in_all_replicas(agents: list[Agent]) -> None:
    def tied() -> nn.Sequential:
        torch.manual_seed(6)
        made = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 9)).double()
        made[3].weight = made[0].weight
        return made

    net, made = tied(), torch.Generator().manual_seed(5)
    x, y = torch.randint(0, 9, (2, 13), generator=made)
    functional.cross_entropy(net(x), y).backward()
    pipe = replicated(tied(), optimizer=SGD)
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), grads(net))
        batch.apply()
    found = [state[name] for state in states(pipe) for name in ("0.weight", "3.weight")]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_deferred_batch_norm_of_replicas_has_the_statistics_of_whole_batches(
    agents: list[Agent], momentum: float | None
) -> None:
    net = model(nn.BatchNorm1d(16, momentum=momentum))
    pipe = replicated(model(nn.BatchNorm1d(16, momentum=momentum)), batch_norm="deferred", optimizer=SGD)
    for x, y in (data(29), data(9), data(8)):
        with pipe.batch(x, y):
            net(x)
    wanted = {name: tensor for name, tensor in net.state_dict().items() if name.startswith(("3.running", "3.num"))}
    same({name: pipe.state_dict()[name] for name in wanted}, wanted)
    assert len(wanted) == 3 and equal(pipe)


def test_other_buffers_are_copied_from_the_first_replica(agents: list[Agent]) -> None:
    pipe = replicated(model(nn.BatchNorm1d(16)), batch_norm="microbatch", optimizer=SGD)
    x, y = data(16)
    pipe.step(x, y)
    net = model(nn.BatchNorm1d(16))
    for number in (0, 2):
        net(x[4 * number : 4 * number + 4])
    state = pipe.state_dict()
    torch.testing.assert_close(state["3.running_mean"], net.state_dict()["3.running_mean"])
    assert state["3.num_batches_tracked"] == 2 and equal(pipe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128])
def test_replicas_sum_gradients_of_each_dtype(agents: list[Agent], dtype: torch.dtype) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(1, 7).to(dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(dtype) * self.weight).abs().double()

    net, (x, y) = nn.Sequential(Complex(), *model()), data(2)
    functional.cross_entropy(net(x), y).backward()
    with replicated(nn.Sequential(Complex(), *model()), microbatches=1).batch(x, y) as batch:
        found = batch.gradients()["0.weight"]
    assert found.dtype == dtype
    torch.testing.assert_close(found, net[0].weight.grad)


def test_a_checkpoint_of_replicas_fits_any_number_of_replicas(agents: list[Agent], tmp_path: Path) -> None:
    first = replicated(optimizer=(torch.optim.Adam, {"lr": 0.01}))
    for _ in range(2):
        first.step(*data(13))
    first.save(tmp_path / "kept")
    assert len(list((tmp_path / "kept").glob("*.pt"))) == 2
    first.step(*data(13))
    for workers, replicas, microbatches in [(FOUR, 2, 2), (FOUR[:2], 1, 4), (FOUR, 4, 1)]:
        other = replicated(
            None, workers, replicas, microbatches=microbatches, optimizer=(torch.optim.Adam, {"lr": 0.01})
        )
        assert other.load(tmp_path / "kept") == 2
        other.step(*data(13))
        assert equal(other)
        for name, tensor in first.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)
    first.load_state_dict(model().state_dict())
    assert equal(first)


def test_gradients_of_large_models_are_reduced_in_several_pieces(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_parallel, "BYTES", 200)
    net, (x, y) = model(), data(13)
    functional.cross_entropy(net(x), y).backward()
    with replicated().batch(x, y) as batch:
        same(batch.gradients(), grads(net))


def test_the_timeline_has_the_all_reduce(agents: list[Agent]) -> None:
    pipe = replicated(optimizer=SGD)
    result = pipe.step(*data(16))
    rows = [row for row in result.rows if row["op"] == "A"]
    assert [(row["worker"], row["stage"]) for row in rows] == [(1, 0), (2, 1), (3, 0), (4, 1)]
    sizes = {stage.index: 8 * sum(p.numel() + 1 for p in stage.module.parameters()) for stage in pipe.stages}
    assert [row["bytes"] for row in rows] == [sizes[number] for number in range(4)]
    numbers = {worker: sorted(r["microbatch"] for r in result.rows if r["worker"] == worker and r["op"] == "F")
               for worker in range(1, 5)}  # fmt: skip
    assert numbers == {1: [0, 2], 2: [0, 2], 3: [1, 3], 4: [1, 3]}
    assert result.idle_ideal == pytest.approx(1 / 3) and 0 <= result.idle < 1
    assert "of micro-batch 0; A◇ all-reduce over the replicas; blank" in result.timeline.text()
    assert "A all-reduce over the replicas" in result.timeline.svg()
    assert len({row["worker"] for row in pipe.step(*data(1)).rows if row["op"] == "A"}) == 4
    pipe.predict(data(16)[0])
    predicted = [row["plan"] for row in agents[1].tables()["steps"].values() if row["ideal"] is None]
    assert predicted and not any("A" in op for plan in predicted for op in plan)


def test_replicas_do_not_initialize_torch_distributed(agents: list[Agent]) -> None:
    with replicated().batch(*data(4)):
        pass
    assert not torch.distributed.is_initialized()


class Breaks(nn.Module):
    """Fails in the second step, on the workers with these ids."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        super().__init__()
        self.ids, self.calls = ids, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and current.current_agent().id in self.ids:
            raise ArithmeticError("on purpose")
        return x


@pytest.mark.parametrize("ids", [(1,), (2,), (3,), (4,)])
def test_a_replica_that_raises_changes_nothing_and_the_next_step_works(agents: list[Agent], ids: tuple[int]) -> None:
    layers = [Breaks(ids), *model(), Breaks(ids)]
    pipe = Pipeline(split(layers, FOUR, at=["3"], replicas=2), "1f1b", 2, functional.cross_entropy, SGD)
    pipe.step(*data(4))
    before = states(pipe)
    with pytest.raises(ArithmeticError, match="on purpose"):
        pipe.step(*data(4))
    assert all(torch.equal(new[name], old[name]) for new, old in zip(states(pipe), before, strict=True) for name in old)
    assert pipe.step(*data(4)).loss > 0
    assert equal(pipe)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: replicated(workers=FOUR[:3]), "3 workers cannot hold 2 replicas"),
        (lambda: replicated(replicas=0), "whole number of at least 1, not 0"),
        (lambda: replicated(schedule=lambda *_, **__: [[Op(0, Kind.ALL_REDUCE, 0)]]), r"ops\[0\]\[0\] = 0A0 cannot be"),
        (lambda: schedule("0F0 0B0 0A0"), "'0A0' is not an operation"),
        (lambda: replicated(nn.Sequential(nn.Linear(6, 4))), "2 stages need at least 2 modules"),
        (lambda: replicated().step(*data(0)), "0 samples"),
    ],
)
def test_invalid_arguments_for_replicas_are_refused_with_the_reason(
    agents: list[Agent], make: Any, reason: str
) -> None:
    with pytest.raises(PipelineError, match=reason):
        make()


def test_sparse_gradients_are_refused(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "SECONDS", 2.0)  # one replica may wait in gloo for the other, which has refused
    net = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 9))
    x = torch.arange(4)
    with pytest.raises(PipelineError, match="sparse gradients cannot be added up over replicas"):
        replicated(net, optimizer=SGD).step(x, x)


def test_a_replica_that_fails_while_a_group_is_formed_ends_the_wait_of_the_others(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have its address by then, and wait inside gloo for its connection, which does not come."""
    gloo, fails, go_on = data_parallel.c10d.ProcessGroupGloo, iter([True]), threading.Event()
    waits = threading.Event()

    class Waits:
        """Waits as gloo does, but not for minutes: its thread would disturb later tests."""

        _Options, create_device = gloo._Options, gloo.create_device  # type: ignore[attr-defined]

        def __init__(self, store: data_parallel.RendezvousStore, rank: int, size: int, options: Any) -> None:
            store.set(str(rank), b"its address")
            if next(fails, False):
                assert waits.wait(PATIENCE)
                raise ArithmeticError("on purpose")
            waits.set()
            assert go_on.wait(PATIENCE)
            raise RuntimeError("no connection")

    pipe = replicated(optimizer=SGD)
    with monkeypatch.context() as patch, pytest.raises(ArithmeticError, match="on purpose"):
        patch.setattr(data_parallel.c10d, "ProcessGroupGloo", Waits)
        pipe.step(*data(4))
    assert waiting_for_gloo()
    assert pipe.step(*data(4)).loss > 0
    go_on.set()
    assert equal(pipe)


def test_only_a_separate_thread_waits_for_the_end_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread has the last reference, even if it drops it at once."""
    column, gone = ReplicaGroup.__new__(ReplicaGroup), []
    column._group = nn.Module()
    group = weakref.ref(column._group)

    def at_once(groups: list[Any]) -> None:
        groups.clear()
        gone.append(group() is None)

    monkeypatch.setattr(data_parallel, "free_groups", at_once)
    column.drop_group()
    column.drop_group()
    assert gone == [True]


def test_replicas_on_several_hosts_use_the_addresses_of_workers_and_give_a_warning(tmp_path: Path) -> None:
    net, (x, y) = model(), data(13)
    functional.cross_entropy(net(x), y).backward()
    with far_world(tmp_path, 3) as far:
        with pytest.warns(UserWarning, match=r"worker1 and worker2 are on different hosts.*neither encrypts"):
            pipe = replicated(workers=FOUR[:2])
        with pipe.batch(x, y) as batch:
            same(batch.gradients(), grads(net))
        assert [data_parallel.listen_host_for(far[1], [1, 1]), data_parallel.listen_host_for(far[1], [1, 2])] == [
            data_parallel.LOOPBACK,
            "127.0.0.1",
        ]
        del pipe, batch


def test_a_group_on_one_host_listens_only_on_loopback(agents: list[Agent]) -> None:
    before = listening()
    pipe = replicated()
    with pipe.batch(*data(4)):
        made = listening() - before
    assert made and {address for address, _ in made} == {"127.0.0.1"}


def listening() -> set[tuple[str, int]]:
    """Return the TCP addresses and ports on which this process listens."""
    own = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in own if each.status == psutil.CONN_LISTEN}
