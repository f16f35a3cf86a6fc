"""Workers that are killed in each phase of a step: the error, the parameters of the survivors, no leftovers."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import data, die, killed
from torch import nn
from torch.nn import functional
from worlds import PATIENCE, far_world, until

from rpcbench import Cluster
from rpcbench.base.errors import StageLostError
from rpcbench.pipeline import Pipeline, PipelineError, failures, split, stage
from rpcbench.pipeline.execution import StepExecution
from rpcbench.pipeline.mailboxes import Mailbox
from rpcbench.pipeline.stage import _Directory
from rpcbench.pipeline.step_log import WorkerPhase
from rpcbench.runtime import current

pytestmark = pytest.mark.process
STEPS, MICROBATCHES = 2, 4
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


class Turns:
    """Ends the process at its `turn`-th call."""

    def __init__(self, turn: int, sign: str) -> None:
        self.left, self.sign = turn, sign

    def take(self, value: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            die(self.sign)
        return value


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: Turns) -> torch.Tensor:
        ctx.turns = turns
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.turns.take(grads[0]), None


class Mortal(nn.Linear):
    """A layer that ends its process in a forward, a backward, or when the gradient of its weight is computed."""

    def __init__(self, what: str, turn: int, sign: str) -> None:
        super().__init__(6, 6)
        self.what, self.turns, self.hooked = what, Turns(turn, sign), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "weight" and not self.hooked:
            self.hooked = True
            self.weight.register_hook(self.turns.take)
        if self.what == "forward":
            self.turns.take()
        output = super().forward(x)
        return Backward.apply(output, self.turns) if self.what == "backward" else output


def pipeline(cluster: Cluster, mortal: dict[int, nn.Module] | None = None, **options: Any) -> Pipeline:
    """A pipeline of four layers; the modules `mortal` replace some of them."""
    torch.manual_seed(7)
    layers: list[nn.Module] = [nn.Linear(6, 6) for _ in range(4)]
    for place, layer in (mortal or {}).items():
        layers[place] = layer
    fields: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "optimizer": SGD}
    return Pipeline(split(layers, cluster.workers), loss_fn=functional.mse_loss, **{**fields, **options})


def parameters(cluster: Cluster, pipe: Pipeline, name: str) -> dict[str, torch.Tensor]:
    """Return the parameters of the stages on a live worker."""
    found = {}
    for each in pipe.stages:
        if each.worker == name:
            own = cluster.rpc_sync(name, state, (pipe.worker_group.modules[each.index],))
            found.update({each.unsplit_name(key): tensor for key, tensor in own.items()})
    return found


def state(module: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.detach() for key, tensor in module.local_value().state_dict().items()}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


def leftovers(workers: list[Any]) -> list[str]:
    """Return the leftovers of a step on this worker: contexts, slots, and steps that still hold activations."""
    gc.collect()
    contexts = [str(key) for key in current.current_agent().tables()["contexts"]]
    slots = [str(len(worker.local_value().slots)) for worker in workers if len(worker.local_value().slots)]
    return contexts + slots + [type(each).__name__ for each in gc.get_objects() if type(each) is StepExecution]


def rrefs() -> int:
    gc.collect()
    return sum(len(current.current_agent().tables()[table]) for table in ("owned", "users"))


def check_survivor(cluster: Cluster, pipe: Pipeline, name: str, expected: dict[str, torch.Tensor]) -> None:
    """Check that a survivor has the expected parameters and no leftovers, and that further use fails with advice."""
    (lost,) = cluster.lost
    worker = pipe.worker_group.workers[cluster.agent.member(name).id]
    until(lambda: cluster.rpc_sync(name, leftovers, ([worker],)) == [], "nothing of the step to be left")
    found = parameters(cluster, pipe, name)
    assert found and same(found, expected)
    for use in (lambda: pipe.step(*data()), lambda: pipe.predict(data()[0]), pipe.state_dict):
        with pytest.raises(StageLostError, match=rf"cluster.restart\('{lost}'\).*make the Pipeline again.*checkpoint"):
            use()


OPERATIONS = [
    ("1f1b", "forward", 2, 2, "in F1 of stage 1"),
    pytest.param("1f1b", "forward", 0, 3, "in F2 of stage 0", marks=pytest.mark.long),
    pytest.param("1f1b", "backward", 1, 1, "in B0 of stage 0", marks=pytest.mark.long),
    ("gpipe", "backward", 3, 3, "in B2 of stage 1"),
    ("zb1p", "weight", 3, 2, "in W1 of stage 3"),
    pytest.param("zb1p", "weight", 2, 1, "in W0 of stage 2", marks=pytest.mark.long),
    pytest.param("interleaved", "backward", 1, 4, "in B3 of stage 1", marks=pytest.mark.long),
]


@pytest.mark.parametrize(("schedule", "what", "place", "turn", "at"), OPERATIONS)
def test_an_error_names_the_operation_in_which_a_worker_was_killed(
    cluster: Cluster, tmp_path: Path, schedule: str, what: str, place: int, turn: int, at: str
) -> None:
    sign = tmp_path / "sign"
    mortal = Mortal(what, STEPS * MICROBATCHES + turn, str(sign))
    pipe = pipeline(cluster, {place: mortal}, schedule=schedule)
    for _ in range(STEPS):
        pipe.step(*data())
    before = pipe.state_dict()
    error = killed(pipe, sign)
    (lost,) = cluster.lost
    (survivor,) = cluster.workers
    assert error.at == {lost: at}
    assert error.stages == tuple(each.index for each in pipe.stages if each.worker == lost)
    assert set(error.held.values()) == {(STEPS, STEPS)}
    assert f"{lost} was lost in step" in str(error) and "SIGKILL" in str(error)
    assert "no parameter has changed" in str(error) and f"optimizer step {STEPS}" in str(error)
    check_survivor(cluster, pipe, survivor, before)
    del pipe, error
    until(lambda: rrefs() == cluster.rpc_sync(survivor, rrefs) == 0, "all RRefs to be released")


def dies_having_sent(turn: int, sign: str) -> None:
    """Make this process end right after its `turn`-th message to a neighbour has gone out."""
    send, turns = Mailbox.send_values, Turns(turn, sign)

    def counted(self: Mailbox, *args: Any) -> None:
        send(self, *args)
        turns.take()

    Mailbox.send_values = counted  # type: ignore[method-assign]


@pytest.mark.parametrize(("name", "turn", "at"), [("worker1", 3, "F2 of stage 0"), ("worker2", 2, "B1 of stage 1")])
def test_an_error_names_the_result_that_a_killed_worker_was_sending(
    cluster: Cluster, tmp_path: Path, name: str, turn: int, at: str
) -> None:
    pipe = pipeline(cluster)
    pipe.step(*data())
    before = pipe.state_dict()
    cluster.rpc_sync(name, dies_having_sent, (turn, str(tmp_path / "sign")))
    error = killed(pipe, tmp_path / "sign")
    assert error.at == {name: f"sending what {at} has made"} and "no parameter has changed" in str(error)
    check_survivor(cluster, pipe, next(iter(cluster.workers)), before)


class Holds(nn.Module):
    """Blocks until a file exists."""

    def __init__(self, sign: str) -> None:
        super().__init__()
        self.sign = sign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        until(Path(self.sign).exists, "the sign")
        return x


def is_waiting() -> bool:
    running = [row["step"] for row in current.current_agent().tables()["steps"].values() if row["state"] == "running"]
    places = [worker.record.last_position for worker in current.current_agent().part(stage._Directory).workers.values()]
    return any(place.step in running and place.doing is WorkerPhase.WAITS for place in places)


def test_an_error_names_the_operation_that_a_killed_worker_was_waiting_to_begin(
    cluster: Cluster, tmp_path: Path
) -> None:
    sign, gate = tmp_path / "sign", tmp_path / "gate"
    pipe = pipeline(cluster, {1: Holds(str(gate))})
    gate.touch()
    pipe.step(*data())
    gate.unlink()
    before = pipe.state_dict()

    def kill_it() -> None:
        until(lambda: bool(cluster.rpc_sync("worker2", is_waiting)), "worker2 to wait")
        sign.write_text(str(time.monotonic()))
        os.kill(cluster.pid("worker2"), signal.SIGKILL)

    cluster.agent.submit(kill_it)
    error = killed(pipe, sign)
    assert error.at == {"worker2": "waiting to begin F0 of stage 1"}
    gate.touch()
    check_survivor(cluster, pipe, "worker1", before)


@pytest.mark.parametrize("name", ["worker1", "worker2"])
def test_a_worker_killed_before_apply_leaves_all_parameters_unchanged(cluster: Cluster, name: str) -> None:
    pipe = pipeline(cluster)
    pipe.step(*data())
    before = pipe.state_dict()
    with pipe.batch(*data()) as batch:
        cluster.kill(name)
        with pytest.raises(StageLostError, match=r"no parameter has changed: stage . holds optimizer step 1") as caught:
            batch.apply()
    assert caught.value.at == {name: "after its last operation"}
    check_survivor(cluster, pipe, next(iter(cluster.workers)), before)


class Fatal(torch.optim.SGD):
    """Ends its process, or raises, before or after the step `turn` of all optimizers of a worker, counted from 0.

    A worker makes its optimizers side by side, but steps them in the order of its stages.
    """

    steps = itertools.count()

    def __init__(self, params: Any, what: str, worker: str, turn: int, sign: str) -> None:
        super().__init__(params, lr=0.1)
        self.what, self.worker, self.turn, self.sign = what, worker, turn, sign

    def step(self, closure: Any = None) -> Any:
        if next(self.steps) == self.turn and current.current_agent().name == self.worker:
            if "after" in self.what:
                super().step(closure)
            if "raise" in self.what:
                raise ArithmeticError("on purpose")
            die(self.sign)
        return super().step(closure)


def undisturbed(cluster: Cluster, steps: int, **options: Any) -> dict[str, torch.Tensor]:
    pipe = pipeline(cluster, optimizer=(torch.optim.SGD, {"lr": 0.1}), **options)
    for _ in range(steps):
        pipe.step(*data())
    return pipe.state_dict()


@pytest.mark.parametrize(
    ("schedule", "what", "worker", "turn", "at"),
    [
        ("1f1b", "before", "worker2", STEPS, 1),
        ("1f1b", "after", "worker1", STEPS, 0),
        ("interleaved", "before", "worker2", 2 * STEPS + 1, 3),
    ],
)
def test_an_error_states_the_possible_steps_of_a_worker_killed_while_it_applies(
    cluster: Cluster, tmp_path: Path, schedule: str, what: str, worker: str, turn: int, at: int
) -> None:
    expected, sign = undisturbed(cluster, STEPS + 1, schedule=schedule), tmp_path / "sign"
    for name in cluster.workers:
        cluster.rpc_sync(name, forget_steps)
    fatal = (Fatal, {"what": what, "worker": worker, "turn": turn, "sign": str(sign)})
    pipe = pipeline(cluster, schedule=schedule, optimizer=fatal)
    for _ in range(STEPS):
        pipe.step(*data())
    error = killed(pipe, sign)
    assert error.at == {worker: f"in the optimizer of stage {at}"}
    for each in pipe.stages:
        lost = each.worker == worker
        assert error.held[each.index] == ((STEPS, STEPS + 1) if lost else (STEPS + 1, STEPS + 1))
    assert f"while optimizer step {STEPS + 1} was applied" in str(error) and "no parameter" not in str(error)
    assert f"at optimizer step {STEPS} or {STEPS + 1}, went with it" in str(error)
    check_survivor(cluster, pipe, next(iter(cluster.workers)), expected)


def forget_steps() -> None:
    Fatal.steps = itertools.count()


@pytest.mark.parametrize("what", ["raise before", "raise after"])
def test_an_optimizer_error_states_the_step_of_each_stage(cluster: Cluster, what: str) -> None:
    for name in cluster.workers:
        cluster.rpc_sync(name, forget_steps)
    fatal = (Fatal, {"what": what, "worker": "worker1", "turn": 1, "sign": ""})
    pipe = pipeline(cluster, optimizer=fatal)
    pipe.step(*data())
    words = "stage 0 holds optimizer step 1 or 2, stage 1 holds optimizer step 2. Before the pipeline can go on, "
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        pipe.step(*data())
    assert words in "".join(caught.value.__notes__)
    with pytest.raises(PipelineError, match=words):
        pipe.step(*data())


def test_a_batch_cannot_be_applied_after_its_block_and_training_goes_on(cluster: Cluster) -> None:
    pipe = pipeline(cluster)
    with pipe.batch(*data()) as batch:
        pass
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        batch.apply()
    pipe.step(*data())
    assert same(pipe.state_dict(), undisturbed(cluster, 1))


def test_a_worker_restarted_between_two_steps_has_lost_its_stage(cluster: Cluster) -> None:
    pipe = pipeline(cluster)
    pipe.step(*data())
    cluster.restart("worker2")
    with pytest.raises(StageLostError, match=r"worker2 was lost between two steps.*restarted since") as caught:
        pipe.step(*data())
    assert "make the Pipeline again" in str(caught.value) and "start it again" not in str(caught.value)
    new = pipeline(cluster)
    cluster.rpc_sync("worker1", hear_of_an_end, ("worker2", "it left"))
    assert new.step(*data()).loss > 0


def test_the_error_does_not_advise_to_restart_a_worker_that_was_scaled_away(cluster: Cluster) -> None:
    workers = cluster.workers
    pipe = pipeline(cluster)
    cluster.scale(len(workers) - 1)
    with pytest.raises(StageLostError, match=rf"cluster\.scale adds {workers[-1]}") as caught:
        pipe.step(*data())
    assert "restart" not in str(caught.value)
    cluster.scale(len(workers))


def hear_of_an_end(name: str, reason: str) -> None:
    """Tell this worker's pipelines of the end of an earlier process of another worker, as a late thread does."""
    agent = current.current_agent()
    agent.part(_Directory)._member_changed("left", agent.member(name), reason)


def test_a_loss_is_reported_as_such_although_the_launcher_takes_long_to_explain_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, doubts = pipeline(cluster), threading.Event()
    pipe.step(*data())
    table, await_gone = cluster.agent.links.members, failures.ProcessWatch.wait_for_lost_workers
    explain, worker2 = table.explain, cluster.agent.member("worker2").id

    def late(name: str, reason: str) -> str:
        assert doubts.wait(PATIENCE)
        time.sleep(1.5 * failures._DOUBT_SECONDS)
        return explain(name, reason)

    def doubting(watch: failures.ProcessWatch, error: BaseException | None) -> list[int]:
        doubts.set()
        return await_gone(watch, error)

    monkeypatch.setattr(failures.ProcessWatch, "wait_for_lost_workers", doubting)
    monkeypatch.setattr(table, "explain", late)
    os.kill(cluster.pid("worker2"), signal.SIGKILL)
    until(lambda: cluster.agent.links.peers.find(worker2) is None)  # so the request of the step fails
    with pytest.raises(StageLostError, match=r"worker2 was lost in step \d+, before its first operation.*SIGKILL"):
        pipe.step(*data())


def test_a_worker_lost_on_another_host_is_reported_without_its_operation(tmp_path: Path) -> None:
    with far_world(tmp_path, 3) as agents:
        layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
        pipe = Pipeline(split(layers, ["worker1", "worker2"]), "1f1b", 2, functional.mse_loss, SGD)
        assert pipe.step(*data()).loss > 0
        agents.pop().stop()
        until(lambda: len(agents[0].members()) == 2)
        with pytest.raises(StageLostError, match=r"worker2 was lost between two steps, on another host") as caught:
            pipe.step(*data())
        assert caught.value.stages == (1,)
