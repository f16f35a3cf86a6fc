"""`fit`: the steps of a plain training loop, the progress bar, callbacks, and the end by Ctrl-C."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import tqdm
from small import SGD, data, model, pipeline, same
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from rpcbench.pipeline import EndFit, History, Pipeline, PipelineError, StepResult
from rpcbench.pipeline.batch import Batch
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.jobs import JobLog

X, Y = data(29)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=13)  # 13, 13, 3: fewer than the micro-batches


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_fit_trains_like_a_plain_loop(agents: list[Agent], reduction: str) -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, reduction=reduction)

    net, losses, epochs, validation = model(), [], [], []
    optimizer = torch.optim.SGD(net.parameters(), **SGD[1])
    for _ in range(2):
        for x, y in LOADER:
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        last = losses[-3:]
        epochs.append(sum(last) if reduction == "sum" else (13 * last[0] + 13 * last[1] + 3 * last[2]) / 29)
        validation.append({"loss": loss_fn(net(X), Y).item()})
    seen: list[StepResult] = []
    pipe = pipeline(optimizer=SGD, loss_fn=loss_fn, loss_reduction=reduction)
    history = pipe.fit(LOADER, 2, clip=0.5, validate=LOADER, on_step=seen.append, progress=False)
    assert history.losses == pytest.approx(losses, rel=1e-12) == [result.loss for result in seen]
    assert history.epochs == pytest.approx(epochs, rel=1e-12)
    assert [score["loss"] for score in history.validation] == pytest.approx([v["loss"] for v in validation], rel=1e-12)
    assert not history.interrupted
    same(pipe.state_dict(), net.state_dict())


@pytest.fixture(autouse=True)
def in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use tqdm's bar for terminals, even if tqdm was first imported in a notebook."""
    monkeypatch.setattr("tqdm.auto.tqdm", tqdm.tqdm)


def test_the_progress_bar_shows_epoch_loss_idle_share_and_speed(
    agents: list[Agent], capsys: pytest.CaptureFixture[str]
) -> None:
    history = pipeline(optimizer=SGD).fit(LOADER, 2)
    told = capsys.readouterr().err
    assert "epoch 2/2: 100%|" in told and "6/6" in told and f"loss={history.losses[-1]:.4g}, idle=" in told
    assert "samples/s=" in told
    assert repr(history).startswith("<History of 6 steps, 2 epochs, loss ") and "interrupted" not in repr(history)
    pipeline(optimizer=SGD).fit(pair for pair in LOADER)
    assert "3step" in capsys.readouterr().err, "the length of a generator is not known"
    pipeline(optimizer=SGD).fit(LOADER, progress=False)
    assert capsys.readouterr().err == ""


@pytest.fixture
def interruptible() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_between_steps_ends_fit(agents: list[Agent], capsys: pytest.CaptureFixture[str]) -> None:
    def on_step(result: StepResult) -> None:
        if len(seen := steps) == 3:
            signal.raise_signal(signal.SIGINT)
        seen.append(result)

    steps: list[StepResult] = []
    history = pipeline(optimizer=SGD).fit(LOADER, 5, on_step=on_step)
    assert history.interrupted and len(history.losses) == 4 and len(history.epochs) == 1
    assert "4/15" in capsys.readouterr().err
    assert repr(history).endswith(", interrupted>")


def test_a_step_that_ctrl_c_finds_done_is_counted_by_the_progress_too(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Batch.step

    def interrupted(batch: Batch, *data: Any) -> None:
        step(batch, *data)
        raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "step", interrupted)
    history = pipeline(optimizer=SGD).fit(LOADER, 5, progress=False)
    (row,) = agents[0].part(JobLog).table().values()
    assert len(history.losses) == 1
    assert (row["done"], row["failed"], row["state"]) == (1, 0, "interrupted")
    assert f"loss {history.losses[0]:.4g}" in row["note"]


def test_an_epoch_callback_sees_each_epoch_and_can_end_fit(agents: list[Agent]) -> None:
    told: list[tuple[int, int]] = []

    def on_epoch(history: History) -> None:
        told.append((len(history.epochs), len(history.validation)))
        if len(told) == 2:
            raise EndFit

    history = pipeline(optimizer=SGD).fit(LOADER, 5, validate=LOADER, on_epoch=on_epoch, progress=False)
    assert told == [(1, 1), (2, 2)] and len(history.losses) == 6
    assert history.ended_early and not history.interrupted and repr(history).endswith(", ended early>")


def test_a_step_callback_can_end_fit_within_an_epoch(agents: list[Agent]) -> None:
    def on_step(result: StepResult) -> None:
        raise EndFit

    history = pipeline(optimizer=SGD).fit(LOADER, 5, on_step=on_step, progress=False)
    assert history.ended_early and len(history.losses) == 1 and history.epochs == []


_halfway = threading.Event()
_calls: list[int] = []


def interrupts_the_third_step(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that interrupts the third step; each step has 4 micro-batches."""
    _calls.append(len(output))
    if len(_calls) == 10:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert _halfway.wait(30)
    return functional.cross_entropy(output, target)


@pytest.mark.usefixtures("interruptible")
def test_a_step_that_is_interrupted_before_its_commit_changes_nothing(agents: list[Agent]) -> None:
    _halfway.clear()
    _calls.clear()
    pipe = pipeline(optimizer=SGD, loss_fn=interrupts_the_third_step)
    states: list[Any] = []
    loader = DataLoader(TensorDataset(X, Y), batch_size=8, drop_last=True)
    try:
        history = pipe.fit(loader, 2, on_step=lambda _: states.append(pipe.state_dict()), progress=False)
    finally:
        _halfway.set()
    assert history.interrupted and len(history.losses) == len(states) == 2 and history.epochs == []
    same(pipe.state_dict(), states[-1])
    assert len(pipe.fit(loader, progress=False).losses) == 3, "training can go on"


class InterruptsTheThirdStep(torch.optim.SGD):
    """Interrupts the third step on one of two stages, before the other has stepped."""

    steps = itertools.count(1)  # of both stages, which step at once

    def step(self, closure: Any = None) -> None:
        if next(self.steps) == 5:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        super().step(closure)


@pytest.mark.usefixtures("interruptible")
def test_a_step_that_is_interrupted_while_optimizers_step_is_completed(agents: list[Agent]) -> None:
    InterruptsTheThirdStep.steps = itertools.count(1)
    pipe = pipeline(optimizer=(InterruptsTheThirdStep, SGD[1]))
    history = pipe.fit(LOADER, 2, progress=False)
    assert history.interrupted and len(history.losses) == 3
    plain = pipeline(optimizer=SGD)
    assert plain.fit(LOADER, progress=False).losses == history.losses
    same(pipe.state_dict(), plain.state_dict())


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda pipe: pipe.fit(LOADER, 0), "at least 1, not 0"),
        (lambda pipe: pipe.fit(iter(LOADER), 2), "only once, not 2 times"),
        (lambda pipe: pipe.fit(iter([])), "gives no batch"),
        (lambda pipe: pipe.fit([X]), "batch 0 of the loader is a Tensor"),
        (lambda pipe: pipe.fit(LOADER, clip=-1.0), "positive number, not -1"),
        (lambda pipe: pipeline().fit(LOADER), "no optimizer"),
    ],
)
def test_fit_with_wrong_arguments_is_refused_with_the_reason(
    agents: list[Agent], use: Callable[[Pipeline], Any], reason: str
) -> None:
    with pytest.raises(PipelineError, match=reason):
        use(pipeline(optimizer=SGD))


def last_job(agents: list[Agent]) -> dict[str, Any]:
    """The row of the fit that began last."""
    return [*agents[0].part(JobLog).table().values()][-1]


def test_a_fit_is_a_job_with_its_model_steps_and_loss(agents: list[Agent]) -> None:
    seen: list[dict[str, Any]] = []
    pipe = pipeline(optimizer=SGD)
    pipe.step(X, Y)  # so that the numbers of steps are not those of this run
    history = pipe.fit(LOADER, 2, on_step=lambda _: seen.append(last_job(agents)), progress=False)
    last = pipe.step(X, Y).step - 1
    row = last_job(agents)
    assert [one["done"] for one in seen] == [1, 2, 3, 4, 5, 6] and {one["state"] for one in seen} == {"runs"}
    assert (row["kind"], row["name"], row["total"], row["unit"]) == ("fit", "Sequential", 6, "step")
    assert (row["state"], row["done"], row["running"]) == ("done", 6, 0)
    assert row["note"] == f"epoch 2 of 2, loss {history.losses[-1]:.4g}, step {last:,} of all pipelines"


def test_the_end_of_a_fit_is_that_of_its_job(agents: list[Agent]) -> None:
    pipe = pipeline(optimizer=SGD)

    def ends_with(error: BaseException) -> Callable[[StepResult], None]:
        def on_step(_: StepResult) -> None:
            raise error

        return on_step

    pipe.fit(LOADER, 2, on_step=ends_with(EndFit()), progress=False)
    assert (last_job(agents)["state"], last_job(agents)["done"]) == ("stopped", 1)
    pipe.fit(LOADER, 2, on_step=ends_with(KeyboardInterrupt()), progress=False)
    assert last_job(agents)["state"] == "interrupted"
    with pytest.raises(ValueError, match="too bad"):
        pipe.fit(LOADER, 2, on_step=ends_with(ValueError("too bad")), progress=False)
    assert (last_job(agents)["state"], last_job(agents)["error"]) == ("failed", "ValueError: too bad")
    with pytest.raises(Exception, match="mat1 and mat2"):
        pipe.fit([(X[:, :1], Y)], progress=False)
    row = last_job(agents)
    assert (row["state"], row["done"], row["failed"], row["running"]) == ("failed", 0, 1, 0)
    assert row["rate"] is None, "no step was done"
