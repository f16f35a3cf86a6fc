"""Every wait of a stage for another one ends, however the step ends: no thread stays in `Slots.take_values`."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from torch import nn
from worlds import entries, until, world

from rpcbench.base.errors import PipelineError, StageLostError, WorkerLostError
from rpcbench.pipeline import Pipeline, stage
from rpcbench.pipeline.exchange import FORWARD, Slot, Slots
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.requests import AgentCalls
from rpcbench.testing import Faults


class Held(nn.Module):
    """Sets `runs` when it runs, and goes on when `go` is set."""

    runs, go = threading.Event(), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs.set()
        assert self.go.wait(60)
        return x


_consumers: set[int] = set()


def taking() -> int:
    """Return how many threads of this process wait for a slot."""
    return len(_consumers)


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the threads in `Slots.take_values` with a wrapper, because the stacks of running threads must not be
    walked."""
    take = Slots.take_values

    def told(self: Slots, slot: Slot) -> Any:
        _consumers.add(threading.get_ident())
        try:
            return take(self, slot)
        finally:
            _consumers.discard(threading.get_ident())

    monkeypatch.setattr(Slots, "take_values", told)


def nobody_waits(seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while taking() and time.monotonic() < deadline:
        time.sleep(0.02)  # there is no event for it
    return taking() == 0


class Stepping:
    """A step of a pipeline, or its forwards alone, on a thread."""

    def __init__(self, pipe: Pipeline, agents: list[Agent], train: bool) -> None:
        self.error: BaseException | None = None
        self._pipe, self._agents, self._train = pipe, agents, train
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        x, y = small.data(4)
        try:
            with self._pipe.batch(x, y) if self._train else contextlib.nullcontext():
                if not self._train:
                    self._pipe.predict(x)
        except BaseException as error:  # passed to the test
            self.error = error

    def ended(self, seconds: float = 40) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def clear(self) -> None:
        """Let all threads go on that still wait after a failed test."""
        Held.go.set()
        for agent in self._agents:
            for worker in list(agent.part(stage._Directory).workers.values()):
                for step in {task.step for task in self._pipe.worker_group._losses.tasks.values()}:
                    worker.slots.abort_step(step, "its test is over")
        assert self.ended()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


@pytest.fixture
def step(agents: list[Agent]) -> Iterator[Any]:
    """`step(net)` begins a step of one micro-batch with this model in two stages."""
    for event in (Held.runs, Held.go):
        event.clear()
    begun: list[Stepping] = []

    def begin(net: nn.Sequential | None = None, train: bool = True) -> Stepping:
        begun.append(Stepping(small.pipeline(net, microbatches=1), agents, train))
        return begun[-1]

    yield begin
    for each in begun:
        each.clear()
    assert nobody_waits()


def held() -> nn.Sequential:
    """A model with a first stage that is held while the second one waits for it."""
    return nn.Sequential(nn.Linear(6, 16), Held(), nn.Linear(16, 16), nn.Linear(16, 4)).double()


def test_a_wait_ends_when_its_step_is_aborted(step: Any) -> None:
    """The second stage fails while the first one waits for its gradients."""
    stepping = step(nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(7, 4)).double())
    assert stepping.ended()
    assert isinstance(stepping.error, RuntimeError) and "shapes" in str(stepping.error)
    assert nobody_waits()


def test_a_waiting_stage_ends_when_its_driver_has_lost_the_call(step: Any, agents: list[Agent]) -> None:
    stepping = step(held())
    assert Held.runs.wait(20)
    until(lambda: taking() == 1)
    for connection in entries(agents[0], agents[2]):
        connection.break_connection()  # a new one is made soon, but calls in flight have failed
    assert stepping.ended() and stepping.error is not None
    assert nobody_waits(), "the second stage waits for the first one"


def test_a_waiting_stage_ends_when_its_driver_is_gone(step: Any, agents: list[Agent]) -> None:
    stepping = step(held())
    assert Held.runs.wait(20)
    until(lambda: taking() == 1)
    agents[0].stop()
    assert stepping.ended() and stepping.error is not None
    assert nobody_waits(), "the second stage waits for the first one"


def test_a_take_in_a_finished_step_fails_at_once() -> None:
    """The next step, and the abort of the own step, have overtaken the call."""
    slots, errors = Slots(), []

    def take() -> None:
        try:
            slots.take_values(Slot(5, FORWARD, 1, 0, 0))
        except PipelineError as error:
            errors.append(error)

    slots.finish_step(6)
    slots.abort_step(5, "a stage failed")
    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(5)
    try:
        assert not thread.is_alive() and len(errors) == 1
    finally:
        slots.abort_step(5, "its test is over")


def test_a_lost_parcel_ends_the_step_on_both_sides(step: Any, agents: list[Agent]) -> None:
    faults = Faults(retry_seconds=0.02)
    faults.drop("Parcel")
    agents[1].links.interceptors.replace_links(faults)
    stepping = step()
    assert stepping.ended() and isinstance(stepping.error, PipelineError)
    assert "ConnectionLostError" in str(stepping.error)
    assert nobody_waits()


def test_a_stage_that_waits_for_a_lost_worker_ends(step: Any, agents: list[Agent]) -> None:
    """The last parcel of that worker is still in flight, but its call has been answered."""
    faults = Faults()
    faults.hold("Parcel")
    agents[1].links.interceptors.replace_links(faults)
    stepping = step(train=False)
    until(lambda: taking() == 1 and any("Result" in line for line in faults.history))
    agents[1].stop()
    assert stepping.ended() and isinstance(stepping.error, StageLostError)
    assert nobody_waits()


def test_the_notice_of_the_end_of_a_step_is_retransmitted_until_it_arrives(step: Any, agents: list[Agent]) -> None:
    faults = Faults(retry_seconds=0.02)
    faults.drop("Parcel")
    faults.drop("Notice")
    agents[1].links.interceptors.replace_links(faults)
    stepping = step()
    assert stepping.ended() and isinstance(stepping.error, PipelineError)
    assert nobody_waits()


def test_ctrl_c_between_two_calls_ends_the_step_on_the_worker_that_was_called(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = small.pipeline(microbatches=1)
    send = AgentCalls.send_request

    def interrupted(self: AgentCalls, to: int, message: Any, seconds: float | None) -> None:
        send(self, to, message, seconds)
        if message.label.endswith("run_step"):  # the other worker gets no call
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(AgentCalls, "send_request", interrupted)
    with pytest.raises(KeyboardInterrupt), pipe.batch(*small.data(4)):
        pass
    monkeypatch.setattr(AgentCalls, "send_request", send)
    with pipe.batch(*small.data(4)) as batch:
        assert batch.loss > 0
    assert not _consumers


@pytest.mark.parametrize("kind", [WorkerLostError, ValueError])
def test_an_abort_because_of_a_lost_worker_raises_worker_lost_error(kind: type[Exception]) -> None:
    """This error may reach the driver before the driver knows of the death."""
    slots = Slots()
    slots.abort_step(1, f"{kind.__name__}: nobody answers at worker2: refused")
    with pytest.raises(PipelineError if kind is ValueError else kind, match=r"step 1 was aborted: .*refused"):
        slots.take_values(Slot(1, FORWARD, 0, 0, 0))
