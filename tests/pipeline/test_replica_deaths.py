"""Workers of replicas that are killed, or hang, in a step: the error, the parameters of the others, no endless wait."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from dying import data, die, killed
from torch import nn
from torch.nn import functional
from worlds import until

from rpcbench import Cluster
from rpcbench.base.errors import ConnectionLostError, StageLostError
from rpcbench.pipeline import Pipeline, split, stage
from rpcbench.pipeline.data_parallel import ReplicaGroup
from rpcbench.pipeline.exchange import DECISION, Slot
from rpcbench.pipeline.mailboxes import Mailbox
from rpcbench.pipeline.stage import _Directory
from rpcbench.runtime import current

pytestmark = pytest.mark.process
CLUSTER = 4
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


class Mortal(nn.Module):
    """Ends its process in its forward, if that process is armed."""

    armed = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Mortal.armed == current.current_agent().name:
            die(Mortal.sign)
        return x

    sign = ""


def arm(sign: str) -> None:
    Mortal.armed, Mortal.sign = current.current_agent().name, sign


def dies_in_the_all_reduce(sign: str, signal_: int = signal.SIGKILL) -> None:
    """Make this process end, or stop, at its next all-reduce, when the other replicas send their gradients."""
    add_up = ReplicaGroup.all_reduce

    def dies(self: ReplicaGroup, *args: Any) -> None:
        ReplicaGroup.all_reduce = add_up  # type: ignore[method-assign]
        Path(sign).write_text(str(time.monotonic()))
        signal.pthread_kill(threading.get_ident(), signal_)  # with os.kill, this thread could run on
        add_up(self, *args)

    ReplicaGroup.all_reduce = dies  # type: ignore[method-assign]


def dies_in_its_optimizer(sign: str) -> None:
    torch.optim.SGD.step = lambda self, closure=None: die(sign)  # type: ignore[assignment, method-assign]


def runs_a_step() -> bool:
    """Whether a step runs on this worker."""
    return any(worker.step_lock.locked() for worker in current.current_agent().part(_Directory).workers.values())


def hears_the_decision_late() -> None:
    """Have this process take its next decision of a commit when it knows that another worker was lost."""
    take = Mailbox.receive_values

    def late(self: Mailbox, slot: Slot) -> tuple[Any, ...]:
        if slot.kind == DECISION:
            Mailbox.receive_values = take  # type: ignore[method-assign]
            until(lambda: self.slots._closed != "", "a loss")
        return take(self, slot)

    Mailbox.receive_values = late  # type: ignore[method-assign]


def pipeline(cluster: Cluster, **options: Any) -> Pipeline:
    """A pipeline with stage 0 on worker1 and worker3, and stage 1 on worker2 and worker4."""
    torch.manual_seed(7)
    layers = [nn.Linear(6, 6), Mortal(), Mortal(), nn.Linear(6, 6)]
    stages = split(layers, ["worker1", "worker2", "worker3", "worker4"], balance=[2, 2], replicas=2)
    fields: dict[str, Any] = {"microbatches": 2, "loss_fn": functional.mse_loss, "optimizer": SGD}
    return Pipeline(stages, **{**fields, **options})


def state(module: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.detach() for key, tensor in module.local_value().state_dict().items()}


def held(cluster: Cluster, pipe: Pipeline) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of the stages on each live worker, under the names of the model."""
    return {
        stage.worker: {
            stage.unsplit_name(own): tensor
            for own, tensor in cluster.rpc_sync(stage.worker, state, (pipe.worker_group.modules[stage.index],)).items()
        }
        for stage in pipe.stages
        if stage.worker in cluster.workers
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("kill", "name", "at", "lost"),
    [
        pytest.param(arm, "worker3", "in F1 of stage 0", "stage 0 of replica 1", marks=pytest.mark.long),
        (arm, "worker2", "in F0 of stage 1", "stage 1 of replica 0"),
        pytest.param(
            dies_in_the_all_reduce,
            "worker1",
            "in the all-reduce of stage 0",
            "stage 0 of replica 0",
            marks=pytest.mark.long,
        ),
        (dies_in_the_all_reduce, "worker4", "in the all-reduce of stage 1", "stage 1 of replica 1"),
    ],
)
def test_a_worker_killed_in_a_step_leaves_all_parameters_unchanged(
    cluster: Cluster, tmp_path: Path, kill: Any, name: str, at: str, lost: str
) -> None:
    pipe = pipeline(cluster)
    pipe.step(*data())
    before = pipe.state_dict()
    cluster.rpc_sync(name, kill, (str(tmp_path / "sign"),))
    error = killed(pipe, tmp_path / "sign")
    assert error.at == {name: at}
    assert [pipe.stages[number].worker for number in error.stages] == [name]
    assert set(error.held.values()) == {(1, 1)}
    assert f"{name} was lost in step" in str(error) and f"{lost}, at optimizer step 1, went with it" in str(error)
    assert "no parameter has changed: " in str(error) and "of replicas 0 and 1" not in str(error).split("changed")[0]
    until(lambda: not any(cluster.rpc_sync(each, runs_a_step) for each in cluster.workers), "the end of the step")
    survivors = held(cluster, pipe)
    assert len(survivors) == 3 and all(same(found, before) for found in survivors.values())
    with pytest.raises(StageLostError, match=rf"cluster.restart\('{name}'\)"):
        pipe.step(*data())


def test_replicas_differ_after_a_death_while_applying_and_a_checkpoint_restores_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path / "kept", "checkpoint_every": 1}
    undisturbed = pipeline(cluster)
    losses = [undisturbed.step(*data()).loss for _ in range(3)]
    pipe = pipeline(cluster, **options)
    pipe.step(*data())
    cluster.rpc_sync("worker4", dies_in_its_optimizer, (str(tmp_path / "sign"),))
    cluster.rpc_sync("worker2", hears_the_decision_late)
    error = killed(pipe, tmp_path / "sign")
    assert error.at == {"worker4": "in the optimizer of stage 1"}
    assert error.held == {0: (2, 2), 1: (2, 2), 2: (2, 2), 3: (1, 2)}
    assert "stage 1 of replica 1, at optimizer step 1 or 2, went with it" in str(error)
    assert "stages 0 and 1 of replica 0 and stage 0 of replica 1 hold optimizer step 2" in str(error)
    cluster.restart("worker4")
    again = pipeline(cluster, **options)
    assert again.resume() == 1
    assert [again.step(*data()).loss for _ in range(2)] == pytest.approx(losses[1:], rel=1e-6)


def hurry(seconds: float) -> None:
    """On a worker: give so long to the operations of the groups that it has."""
    columns = [worker.replica_group for worker in current.current_agent().part(stage._Directory).workers.values()]
    for group in [column._group for column in columns if column is not None and column._group is not None]:
        group._set_default_timeout(timedelta(seconds=seconds))


def test_a_step_fails_in_time_if_a_worker_hangs_in_the_all_reduce(cluster: Cluster, tmp_path: Path) -> None:
    pipe = pipeline(cluster)
    pipe.step(*data())
    cluster.rpc_sync("worker2", hurry, (1.0,))  # the next step, after the failure, makes a new group
    before = pipe.state_dict()
    cluster.rpc_sync("worker4", dies_in_the_all_reduce, (str(tmp_path / "sign"), signal.SIGSTOP))
    try:
        with pytest.raises(ConnectionLostError, match="could not be added up over the replicas"):
            pipe.step(*data())
        assert time.monotonic() - float((tmp_path / "sign").read_text()) < 50
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(cluster.pid("worker4"), signal.SIGCONT)
    assert all(same(found, before) for found in held(cluster, pipe).values())
    pipe.step(*data())
    first, second, third, fourth = (held(cluster, pipe)[f"worker{number}"] for number in range(1, 5))
    assert same(first, third) and same(second, fourth) and not same(first, before)
