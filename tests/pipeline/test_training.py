"""Pipelines on real agents: exact gradients, the tables during a step, and no leftovers."""

from __future__ import annotations

import _thread
import itertools
import threading
from typing import Any

import pytest
import torch
from covering import pairs
from small import STAGES, grads, same
from torch import nn
from torch.nn import functional
from worlds import until

from rpcbench.base.errors import SerializationError, StageLostError, UnknownWorkerError, WorkerLostError
from rpcbench.pipeline import Pipeline, PipelineError, driver, split
from rpcbench.pipeline.microbatch import split_batch
from rpcbench.pipeline.step_log import KEPT_STEPS
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry.autograd_view import autograd_view
from rpcbench.telemetry.collector import Collector
from rpcbench.telemetry.views import pipeline_view, rref_view

WORKERS = ["worker1", "worker2"]


def model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(5)
    x = torch.rand(samples, 6, dtype=torch.double, generator=made)
    return x, torch.randint(0, 4, (samples,), generator=made)


def pipeline(**changes: Any) -> Pipeline:
    fields: dict[str, Any] = {"microbatches": 4, "loss_fn": functional.cross_entropy}
    return Pipeline(split(model(), WORKERS), **{**fields, **changes})


@pytest.mark.parametrize(
    ("schedule", "microbatches", "samples", "reduction"), pairs(STAGES, [1, 3, 8], [24, 29], ["mean", "sum"])
)
def test_gradients_equal_those_of_one_process(
    agents: list[Agent], schedule: str, microbatches: int, samples: int, reduction: str
) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, reduction=reduction)

    whole, (x, y) = model(), data(samples)
    loss = loss_fn(whole(x), y)
    loss.backward()
    pipe = pipeline(schedule=schedule, microbatches=microbatches, loss_fn=loss_fn, loss_reduction=reduction)
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), grads(whole))
    assert batch.result.loss == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize("schedule", STAGES)
def test_gradients_equal_a_loop_over_the_micro_batches_to_the_last_bit(agents: list[Agent], schedule: str) -> None:
    whole, (x, y) = model(), data(29)
    for inputs, targets in zip(split_batch(x, 5), split_batch(y, 5), strict=True):
        (functional.cross_entropy(whole(inputs), targets) * (len(inputs) / len(x))).backward()
    with pipeline(schedule=schedule, microbatches=5).batch(x, y) as batch:
        found = batch.gradients()
    for name, parameter in whole.named_parameters():
        assert torch.equal(found[name], parameter.grad), name


def test_recomputed_forwards_are_separate_operations(agents: list[Agent]) -> None:
    pipe = pipeline(schedule="gpipe", recompute="all")
    with pipe.batch(*data(24)) as batch:
        ops = [row["op"] for row in batch.result.rows if row["worker"] == 1]
    assert ops == ["F"] * 4 + ["R", "B"] * 4


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_training_and_prediction_equal_one_process(agents: list[Agent], schedule: str) -> None:
    whole, (x, y) = model(), data(30)
    optimizer = torch.optim.Adam(whole.parameters(), lr=0.01)
    pipe = pipeline(schedule=schedule, microbatches=7, optimizer=(torch.optim.Adam, {"lr": 0.01}))
    for _ in range(5):
        optimizer.zero_grad()
        loss = functional.cross_entropy(whole(x), y)
        loss.backward()
        optimizer.step()
        assert pipe.step(x, y).loss == pytest.approx(loss.item(), rel=1e-9)
    state = pipe.state_dict()
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(pipe.predict(x), whole(x))
    torch.testing.assert_close(pipe.predict(x[:3]), whole(x[:3]))


_gate = threading.Event()
_reached = threading.Event()


def gated(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that holds the last stage until the test has looked."""
    _reached.set()
    assert _gate.wait(30)
    return functional.cross_entropy(output, target)


def test_panels_show_the_tables_during_a_step(agents: list[Agent]) -> None:
    _gate.clear()
    _reached.clear()
    pipe = pipeline(schedule="gpipe", loss_fn=gated)
    collector = agents[0].part(Collector)
    stop = collector.subscribe(lambda: None)
    x, y = data(24)
    stepping = threading.Thread(target=lambda: _step(pipe, x, y))
    stepping.start()
    try:
        assert _reached.wait(20)
        until(lambda: len(sends(agents[1])) == 4, "all activations to be sent")
        until(lambda: {i: m["tables"] for i, m in collector.world().items()} == {a.id: a.tables() for a in agents})
        world_now = collector.world()
    finally:
        _gate.set()
        stepping.join(20)
    (context,) = world_now[1]["tables"]["contexts"].values()
    assert {s["to"] for s in context["sends"]} == {2}
    received = next(iter(world_now[2]["tables"]["contexts"].values()))["recvs"]
    assert {r["message"] for r in received} <= {s["message"] for s in context["sends"]}
    assert sum(len(rows) for rows in rref_view(world_now).values()) > 6
    assert autograd_view(world_now) and pipeline_view(world_now)
    until(lambda: not any(a.tables()["contexts"] for a in agents), "the step's context to be released")
    until(lambda: not any(m["tables"]["contexts"] for m in collector.world().values()), "the panel to see it go")
    stop()


class Gated(torch.optim.SGD):
    """Holds its step until the test lets it go on; sets `_reached` when both stages are in their steps."""

    stepping = itertools.count(1)

    def step(self, closure: Any = None) -> Any:
        if next(self.stepping) == 2:
            _reached.set()
        assert _gate.wait(30)
        return super().step(closure)


def _interrupt() -> None:
    assert _reached.wait(20)
    _thread.interrupt_main()


def test_a_step_that_is_interrupted_while_optimizers_step_is_counted_later(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_GRACE_SECONDS", 0.5)
    _gate.clear()
    _reached.clear()
    Gated.stepping = itertools.count(1)
    pipe = pipeline(optimizer=(Gated, {"lr": 0.1}))
    interrupting = threading.Thread(target=_interrupt)
    interrupting.start()
    try:
        with pipe.batch(*data(24)) as batch, pytest.raises(KeyboardInterrupt):
            pipe.worker_group.steps.apply_gradients(
                batch.context
            )  # interrupted without the handling that a second Ctrl-C would end
        assert pipe.optimizer_step is None
    finally:
        _gate.set()
        interrupting.join(20)
    assert pipe.step(*data(24)).loss > 0
    assert pipe.optimizer_step == 2


def test_a_step_is_applied_on_all_stages_if_ctrl_c_comes_while_apply_is_sent(agents: list[Agent]) -> None:
    """Ctrl-C comes when a worker has got the request, and before the driver has recorded that."""
    pipe = pipeline(optimizer=(torch.optim.SGD, {"lr": 0.1}))
    ask = pipe.worker_group.steps._call_worker

    def asked(*what: Any) -> Any:
        answer = ask(*what)
        _thread.interrupt_main()
        return answer

    with pipe.batch(*data(24)) as batch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.worker_group.steps, "_call_worker", asked)
        with pytest.raises(KeyboardInterrupt):
            pipe.worker_group.steps.apply_gradients(batch.context)
    assert pipe.step(*data(24)).loss > 0
    assert pipe.optimizer_step == 2


def _step(pipe: Pipeline, x: torch.Tensor, y: torch.Tensor) -> None:
    with pipe.batch(x, y):
        pass


def sends(agent: Agent) -> list[Any]:
    return [send for row in agent.tables()["contexts"].values() for send in row["sends"]]


def test_the_timeline_has_every_operation(agents: list[Agent]) -> None:
    pipe = pipeline(optimizer=(torch.optim.SGD, {"lr": 0.1}))
    result = pipe.step(*data(24))
    assert len(result.rows) == 2 * 2 * 4
    assert 0 <= result.idle < 1 and result.idle_ideal == pytest.approx(1 / 5)
    text = result.timeline.text(100)
    assert "worker1" in text and "worker2" in text


def parts(agents: list[Agent]) -> list[Any]:
    """Return the rows of the latest step in the tables of the workers."""
    return [max(agent.tables()["steps"].values(), key=lambda row: int(row["step"])) for agent in agents[1:]]


def test_the_tables_show_the_plan_and_the_held_activations(agents: list[Agent]) -> None:
    pipe = pipeline(schedule="gpipe", microbatches=3)
    with pipe.batch(*data(24)) as batch:
        pass
    first, second = parts(agents)
    assert first["plan"] == [str(op) for op in pipe.ops[0]] and first["state"] == second["state"] == "done"
    assert first["workers"] == second["workers"] == [1, 2]
    assert first["ideal"] == pytest.approx(1 / 4)
    held = [row["held"] for row in batch.result.rows if row["worker"] == 1]
    one = 8 * 8 * (6 + 16)  # samples, bytes of a double, features in and out
    assert held == [one, 2 * one, 3 * one, 2 * one, one, 0]
    pipe.predict(data(24)[0])
    assert [row["ideal"] for row in parts(agents)] == [None, None]
    assert [row["samples"] for row in (first, second, *parts(agents))] == [24] * 4
    assert "loss" not in first and second["loss"] == pytest.approx(batch.loss)
    assert not any("loss" in row for row in parts(agents))
    for _ in range(KEPT_STEPS):
        pipe.predict(data(24)[0])
    kept = agents[1].tables()["steps"].values()
    assert first in kept and len(kept) == 1 + KEPT_STEPS, "evaluation drops no step that trains"
    last = parts(agents)[0]["step"]
    ops = [row for agent in agents[1:] for row in agent.tables()["ops"].values() if row["step"] == last]
    assert len(ops) == 6 and not any(row["held"] for row in ops)


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ArithmeticError("second micro-batch")
        return x


@pytest.mark.parametrize("place", [0, 3])
def test_a_stage_that_raises_changes_nothing_and_the_next_step_works(agents: list[Agent], place: int) -> None:
    layers = list(model())
    layers.insert(place, Breaks())
    pipe = Pipeline(
        split(layers, WORKERS, balance=[3, 3]), "1f1b", 4, functional.cross_entropy, (torch.optim.SGD, {"lr": 0.1})
    )
    before = pipe.state_dict()
    with pytest.raises(ArithmeticError, match="second micro-batch"):
        pipe.step(*data(24))
    assert all(torch.equal(before[name], tensor) for name, tensor in pipe.state_dict().items())
    until(lambda: [row["state"] for row in parts(agents)] == ["failed"] * 2)
    rows = [row for agent in agents[1:] for row in agent.tables()["ops"].values() if row["failed"]]
    assert [(row["stage"], row["microbatch"]) for row in rows] == [(place // 3, 1)]
    assert pipe.step(*data(24)).loss > 0
    assert [row["state"] for row in parts(agents)] == ["done"] * 2


def test_a_step_fails_at_once_if_a_worker_is_lost_during_it(agents: list[Agent]) -> None:
    _gate.clear()
    _reached.clear()
    errors: list[BaseException] = []

    def step(pipe: Pipeline) -> None:
        try:
            _step(pipe, *data(24))
        except WorkerLostError as error:
            errors.append(error)

    stepping = threading.Thread(target=step, args=(pipeline(loss_fn=gated),))
    stepping.start()
    assert _reached.wait(20)
    agents[1].links.peers.close()
    stepping.join(20)
    _gate.set()
    assert [type(error) for error in errors] == [StageLostError]
    assert "worker1 was lost in step" in str(errors[0])
    agents.pop(1)


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: pipeline(schedule="zigzag"), PipelineError, "'gpipe', '1f1b', 'interleaved'"),
        (lambda: pipeline(recompute="some"), PipelineError, "'none', 'all', 'except_last'"),
        (lambda: pipeline(schedule="gpipe", chunks=2), PipelineError, "chunks must be 1, not 2"),
        (lambda: Pipeline(split(model(), ["worker1", "nobody"])), UnknownWorkerError, "nobody"),
        (lambda: split(model(), [f"worker{n}" for n in range(1, 8)]), PipelineError, "7 stages"),
        (lambda: Pipeline(split(model(), WORKERS, balance=[2, 1, 1, 1])), PipelineError, "4 stages"),
        (lambda: pipeline(loss_fn=threading.Lock()), SerializationError, "lock"),
        (lambda: pipeline().step(*data(24)), PipelineError, "no optimizer"),
        (lambda: Pipeline(split(model(), WORKERS)).step(*data(24)), PipelineError, "no loss_fn"),
        (lambda: pipeline().step(data(24)[0], data(23)[1]), PipelineError, "24 samples"),
        (lambda: pipeline().step(*data(0)), PipelineError, "0 samples"),
        (lambda: pipeline(optimizer=(torch.optim.SGD, {"speed": 1})), TypeError, "speed"),
    ],
)
def test_invalid_arguments_are_refused_and_the_cluster_stays_usable(
    agents: list[Agent], make: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        make()
    assert agents[0].call("worker1", torch.add, (torch.ones(1), 1)).wait() == 2
