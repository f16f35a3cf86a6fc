"""Two-phase commit: all workers apply a step or none does, also with failures, deaths and interrupts."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from dying import data as small_data
from dying import die, killed
from small import SGD, data, pipeline, same
from test_deaths import check_survivor, undisturbed
from test_deaths import pipeline as mortal
from worlds import far_world, stop, until

from rpcbench import Cluster
from rpcbench.base.errors import ConnectionLostError, WorkerLostError
from rpcbench.base.futures import Future
from rpcbench.pipeline import Pipeline, PipelineError, StageLostError, driver, split
from rpcbench.pipeline import stage as stage_
from rpcbench.pipeline.driver import StepDriver
from rpcbench.pipeline.exchange import APPLYING, COMMITTED, DECIDED, DECISION, VOTE, VOTES, Slot, Slots
from rpcbench.pipeline.execution import abort_step as stop_step
from rpcbench.pipeline.mailboxes import CommitProtocol, Mailbox
from rpcbench.rpc import rpc_sync
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.telemetry.trace import trace

IDS = [4, 7, 9]


# -- by hand
class Post:
    """The mailbox of one worker, as far as a commit needs it: `send_values` puts values into the slots of the "
    "others."""

    def __init__(self, posts: dict[int, Post]) -> None:
        self.slots, self._posts = Slots(), posts
        self.receive_values = self.slots.take_values

    def send_values(self, slot: Slot, values: tuple[Any, ...]) -> None:
        self._posts[slot.microbatch].slots.put(slot, lambda: values)


@pytest.fixture
def accords() -> dict[int, tuple[CommitProtocol, Slots]]:
    posts: dict[int, Post] = {}
    for id_ in IDS:
        posts[id_] = Post(posts)
    return {id_: (CommitProtocol(id_, IDS, post), post.slots) for id_, post in posts.items()}  # type: ignore[arg-type]


def test_no_worker_passes_a_commit_before_all_have_reached_it(accords: dict[int, tuple[CommitProtocol, Slots]]) -> None:
    with ThreadPoolExecutor(3) as pool:
        for last in IDS:
            step = 10 + last
            early = [pool.submit(accords[id_][0].wait_for_commit, step) for id_ in IDS if id_ != last]
            time.sleep(0.05)  # there is no event for the beginning of their wait
            assert not any(future.done() for future in early)
            accords[last][0].wait_for_commit(step)
            assert [future.result(10) for future in early] == [None, None]
            assert [slots.abort_step(step, "too late") for _, slots in accords.values()] == [False] * 3
            for _, slots in accords.values():
                slots.finish_step(step)
                assert len(slots) == 0


def test_a_step_that_the_coordinator_has_aborted_is_committed_nowhere(
    accords: dict[int, tuple[CommitProtocol, Slots]],
) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(accords[id_][0].wait_for_commit, 1) for id_ in IDS[1:]]
        assert accords[4][1].abort_step(1, "enough")
        with pytest.raises(PipelineError, match="enough"):
            accords[4][0].wait_for_commit(1)
        assert not any(future.done() for future in waiting)
        for id_ in IDS[1:]:
            assert accords[id_][1].abort_step(1, "so it was")
        for future in waiting:
            with pytest.raises(PipelineError, match="so it was"):
                future.result(10)


def test_an_aborted_step_is_not_committed_although_its_decision_has_arrived() -> None:
    slots = Slots()
    slots.put(Slot(1, DECISION, 0, 7, 4), lambda: (None,))
    assert slots.abort_step(1, "enough")
    with pytest.raises(PipelineError, match="enough"):
        slots.advance_step(1, DECIDED)
    slots.advance_step(2, DECIDED)
    assert not slots.abort_step(2, "too late") and slots.abort_step(3, "in time")
    slots.close("worker4 has gone")
    assert slots.abort_step(4, "nobody goes on")
    with pytest.raises(WorkerLostError, match="worker4 has gone"):
        slots.advance_step(4, DECIDED)


def test_a_worker_that_has_voted_hears_the_decision_although_a_third_one_is_lost() -> None:
    slots = Slots()
    slots.advance_step(1, VOTES)
    slots.close("worker4 has gone", in_doubt=False)
    slots.put(decision := Slot(1, DECISION, 0, 7, 4), lambda: ("O",))
    assert slots.take_values(decision) == ("O",)
    slots.advance_step(1, DECIDED)
    slots.finish_step(1)
    votes, decides = partial(slots.advance_step, event=VOTES), partial(slots.advance_step, event=DECIDED)
    for begins in votes, decides, slots.check_step:
        with pytest.raises(WorkerLostError, match="step 2 was aborted: worker4 has gone"):
            begins(2)


def test_the_loss_of_a_process_that_decides_ends_a_step_in_doubt() -> None:
    slots = Slots()
    slots.advance_step(1, VOTES)
    slots.close("worker4 has gone", in_doubt=False)
    slots.close("worker1 has gone")
    with pytest.raises(WorkerLostError, match="worker1 has gone"):
        slots.take_values(Slot(1, DECISION, 0, 7, 4))


def test_an_abort_ends_a_step_in_doubt_and_no_worker_votes_after_a_loss() -> None:
    slots, other = Slots(), Slots()
    slots.advance_step(1, VOTES)
    slots.close("worker4 has gone", in_doubt=False)
    assert slots.abort_step(1, "enough")
    with pytest.raises(PipelineError, match="enough"):
        slots.take_values(Slot(1, DECISION, 0, 7, 4))
    other.close("worker4 has gone", in_doubt=False)
    with pytest.raises(WorkerLostError, match="worker4 has gone"):
        other.advance_step(1, VOTES)


# -- in a pipeline
def test_the_driver_sends_each_worker_one_message_per_step(agents: list[Agent]) -> None:
    pipe = pipeline(optimizer=SGD)
    pipe.step(*data(24))
    with trace() as seen:
        pipe.step(*data(24))
    me = agents[0].id
    rows = [row for row in seen.view["messages"].values() if row["kind"] != "Notice"]
    assert Counter(row["to"] for row in rows if row["from"] == me) == {agents[1].id: 1, agents[2].id: 1}


_gate, _reached = threading.Event(), threading.Event()


class Sees(torch.optim.SGD):
    """Counts its steps."""

    stepped: ClassVar[list[object]] = []  # of both stages, which step at once

    def step(self, closure: Any = None) -> Any:
        self.stepped.append(self)
        return super().step(closure)


class Late(torch.nn.Linear):
    """Holds the gradient of its weight back until the gate is open."""

    def __init__(self) -> None:
        super().__init__(6, 16, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.register_hook(self._hold)
        return super().forward(x)

    def _hold(self, gradient: torch.Tensor) -> torch.Tensor:
        _reached.set()
        assert _gate.wait(30)
        return gradient


def late_pipeline(optimizer: Any) -> Pipeline:
    """A pipeline whose first stage is late in its next step: until the gate is open."""
    _gate.clear()
    _reached.clear()
    net = torch.nn.Sequential(Late(), torch.nn.Tanh(), torch.nn.Linear(16, 4, dtype=torch.double))
    return pipeline(net, optimizer=optimizer, microbatches=1)


def interrupt_late_step(agents: list[Agent]) -> None:
    """Interrupt the driver once the second stage has done its part, and the first one has not."""
    assert _reached.wait(20)
    until(lambda: any(row["state"] == "done" for row in agents[2].tables()["steps"].values()))
    _thread.interrupt_main()


def test_no_optimizer_steps_before_all_workers_have_their_gradients(agents: list[Agent]) -> None:
    Sees.stepped.clear()
    pipe = late_pipeline((Sees, {"lr": 0.1}))
    with ThreadPoolExecutor(1) as pool:
        try:
            step = pool.submit(pipe.step, *data(24))
            assert _reached.wait(20)
            until(lambda: any(row["state"] == "done" for row in agents[2].tables()["steps"].values()))
            time.sleep(0.05)  # there is no event for its wait for the commit
            assert not Sees.stepped
        finally:
            _gate.set()
        assert step.result(20).loss > 0
    assert len(Sees.stepped) == 2


_interrupting = threading.Lock()


def interrupts() -> bool:
    """Interrupt the driver, unless the other worker has done so; return whether this one did."""
    with _interrupting:
        if _reached.is_set():
            return False
        _thread.interrupt_main()  # before the other worker can go on and end the step
        _reached.set()
    time.sleep(0.3)  # the driver now asks whether the step can be aborted; there is no event for that here
    return True


class Interrupts(torch.optim.SGD):
    """Interrupts the driver while the optimizers step; they go on only afterwards."""

    def step(self, closure: Any = None) -> Any:
        interrupts()
        return super().step(closure)


def test_ctrl_c_during_optimizer_steps_is_raised_after_all_workers_have_stepped(agents: list[Agent]) -> None:
    _reached.clear()
    pipe, plain = pipeline(optimizer=(Interrupts, SGD[1])), pipeline(optimizer=SGD)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(*data(24))
    assert pipe.optimizer_step == 1
    plain.step(*data(24))
    same(pipe.state_dict(), plain.state_dict())
    assert pipe.step(*data(24)).loss == pytest.approx(plain.step(*data(24)).loss, rel=1e-12)
    assert pipe.optimizer_step == 2


class InterruptsTwice(torch.optim.SGD):
    """Like `Interrupts`, and again while the driver waits for the end of the step."""

    def step(self, closure: Any = None) -> Any:
        if interrupts():
            _thread.interrupt_main()
            time.sleep(0.3)
        return super().step(closure)


def test_a_step_is_counted_even_if_a_second_ctrl_c_comes(agents: list[Agent]) -> None:
    _reached.clear()
    pipe = pipeline(optimizer=(InterruptsTwice, SGD[1]))
    history = pipe.fit([data(24)], progress=False)
    assert history.interrupted and len(history.losses) == pipe.optimizer_step == 1


def test_a_step_is_counted_even_if_ctrl_c_comes_while_its_checkpoint_is_written(agents: list[Agent]) -> None:
    pipe, written = pipeline(optimizer=SGD), []

    def write(number: int) -> None:
        _thread.interrupt_main()
        for _ in range(10):  # Python raises between two steps of a loop, if it may
            written.append(number)

    pipe.worker_group.steps.on_applied = write
    history = pipe.fit([data(24)], progress=False)
    assert history.interrupted and len(history.losses) == 1 and written == [1] * 10


@pytest.mark.parametrize("told", [1, 2])
def test_a_step_is_aborted_or_applied_on_all_workers_if_ctrl_c_comes_while_it_is_sent(
    agents: list[Agent], told: int
) -> None:
    """Ctrl-C comes when a worker has got the step, and before the driver has recorded that."""
    pipe, plain = pipeline(optimizer=SGD), pipeline(optimizer=SGD)
    ask, asked = pipe.worker_group.steps._call_worker, []

    def interrupted(*what: Any) -> Any:
        answer = ask(*what)
        asked.append(answer)
        if len(asked) == told:
            if told == 2:
                until(lambda: all(future.done() for future in asked), "all to have stepped")
            _thread.interrupt_main()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe.worker_group.steps, "_call_worker", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*data(24))
    same(pipe.state_dict(), plain.state_dict() if pipe.optimizer_step == 0 else stepped(plain))
    if told == 1:
        until(lambda: states_of_steps(agents) == {"interrupted"}, "the end of the step on the worker that has got it")
    before = pipe.optimizer_step
    assert before == told - 1 and pipe.step(*data(24)).loss > 0 and pipe.optimizer_step == before + 1


def states_of_steps(agents: list[Agent]) -> set[str]:
    return {row["state"] for agent in agents for row in agent.tables().get("steps", {}).values()}


def stepped(pipe: Pipeline) -> dict[str, torch.Tensor]:
    pipe.step(*data(24))
    return pipe.state_dict()


def test_the_next_step_finds_out_the_result_of_a_step_with_an_interrupted_end(agents: list[Agent]) -> None:
    """This happens if a second Ctrl-C comes while the driver handles the first one."""
    pipe = pipeline(optimizer=SGD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDriver, "_handle_error", lambda *_: None)
        patch.setattr(StepDriver, "_gather_reports", interrupted_at_its_end(StepDriver._gather_reports))
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*data(24))
    assert pipe.optimizer_step is None
    assert pipe.step(*data(24)).loss > 0 and pipe.optimizer_step == 2


def interrupted_at_its_end(reports: Any) -> Any:
    def interrupted(self: StepDriver, running: Any) -> Any:
        reports(self, running)
        raise KeyboardInterrupt

    return interrupted


def test_a_step_fails_at_once_if_the_coordinator_cannot_send_its_decision(agents: list[Agent]) -> None:
    send = Mailbox.send_values

    def fails(self: Mailbox, slot: Slot, values: tuple[Any, ...]) -> None:
        if slot.kind == DECISION:
            raise OSError("on purpose")
        send(self, slot, values)

    pipe = pipeline(optimizer=SGD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mailbox, "send_values", fails)
        with pytest.raises(
            (OSError, PipelineError), match="on purpose"
        ):  # from the coordinator, or passed on to the other worker
            pipe.step(*data(24))
        with pytest.raises(PipelineError, match="hold optimizer step 0 or 1"):
            pipe.step(*data(24))


class FailsFirst(torch.optim.SGD):
    """Fails on the first worker."""

    def step(self, closure: Any = None) -> Any:
        if current.current_agent().name == "worker1":
            _reached.set()
            raise ArithmeticError("on purpose")
        return super().step(closure)


def test_a_worker_that_receives_the_decision_late_still_steps(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker has failed by then, and the driver knows it."""
    _reached.clear()
    take = Mailbox.receive_values

    def late(self: Mailbox, slot: Slot) -> Any:
        if slot.kind == DECISION:
            assert _reached.wait(20)
            time.sleep(0.2)  # there is no event here for the driver's reaction
        return take(self, slot)

    monkeypatch.setattr(Mailbox, "receive_values", late)
    pipe = pipeline(optimizer=(FailsFirst, SGD[1]))
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        pipe.step(*data(24))
    words = "stage 0 holds optimizer step 0 or 1, stage 1 holds optimizer step 1."
    assert words in "".join(caught.value.__notes__)


class Breaks(torch.optim.SGD):
    """Like `Interrupts`, and the second optimizer to step fails."""

    def step(self, closure: Any = None) -> Any:
        first = interrupts()
        super().step(closure)
        if not first:
            raise ArithmeticError("on purpose")


def test_an_optimizer_error_after_ctrl_c_is_raised(agents: list[Agent]) -> None:
    _reached.clear()
    pipe = pipeline(optimizer=(Breaks, SGD[1]))
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        pipe.step(*data(24))
    assert "holds optimizer step 0 or 1" in "".join(caught.value.__notes__)
    with pytest.raises(PipelineError, match="holds optimizer step 1"):
        pipe.step(*data(24))


def test_a_batch_cannot_be_used_after_its_step(agents: list[Agent]) -> None:
    pipe = pipeline(optimizer=SGD)
    with pipe.accumulate() as batch:
        batch.step(*data(24))
        for use in (batch.apply, lambda: batch.step(*data(24)), lambda: batch.add(*data(24))):
            with pytest.raises(PipelineError, match="have been applied"):
                use()
    with pytest.raises(RuntimeError, match="Could not find autograd context"), pipe.accumulate() as later:
        later.release()
        later.step(*data(24))
    assert pipe.optimizer_step == 1
    with pipe.batch(*data(24)) as batch, pytest.raises(PipelineError, match="something was added already"):
        batch.step(*data(24))


# -- deaths
def dies_at(kind: int, before: bool, sign: str) -> None:
    """Make this process end when it sends a commit message of this kind, before or after the message has gone out. A
    decision is then committed by the other worker."""
    send = Mailbox.send_values

    def watched(self: Mailbox, slot: Slot, values: tuple[Any, ...]) -> None:
        if slot.kind == kind and before:
            die(sign)
        send(self, slot, values)
        if slot.kind == kind == DECISION:
            until(lambda: slot.step in rpc_sync("worker2", commits), "its commit")
        if slot.kind == kind:
            die(sign)

    Mailbox.send_values = watched  # type: ignore[method-assign]


def commits() -> list[int]:
    """The latest steps that were committed on this worker."""
    workers = current.current_agent().part(stage_._Directory).workers.values()
    return [step for worker in workers for step in list(worker.slots._steps) if is_committed(worker.slots, step)]


def is_committed(slots: Slots, step: int) -> bool:
    return slots._state_of(step) in (COMMITTED, APPLYING)


BEFORE, AFTER, EITHER = (1, 1), (2, 2), (1, 2)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "kind", "before", "lost", "left"),
    [
        pytest.param("worker2", VOTE, True, BEFORE, BEFORE, marks=pytest.mark.long),
        ("worker2", VOTE, False, EITHER, None),  # the coordinator has received the vote, or noticed the death
        pytest.param("worker1", DECISION, True, EITHER, BEFORE, marks=pytest.mark.long),
        ("worker1", DECISION, False, EITHER, AFTER),
    ],
)
def test_an_error_states_the_step_of_each_stage_after_a_death_during_the_commit(
    cluster: Cluster, tmp_path: Path, name: str, kind: int, before: bool, lost: Any, left: Any
) -> None:
    expected = [undisturbed(cluster, steps) for steps in (1, 2)]
    pipe = mortal(cluster, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    pipe.step(*small_data())
    cluster.rpc_sync(name, dies_at, (kind, before, str(tmp_path / "sign")))
    error = killed(pipe, tmp_path / "sign")
    assert error.at == {name: "after its last operation"}
    (stage,) = error.stages
    held = error.held[1 - stage]
    assert held == left or (left is None and held in (BEFORE, AFTER))
    assert error.held[stage] == lost or (left is None and held == BEFORE == error.held[stage])
    assert ("no parameter has changed" in str(error)) == (held == BEFORE)
    check_survivor(cluster, pipe, next(iter(cluster.workers)), expected[held == AFTER])


@pytest.mark.process
def test_a_failed_step_ends_although_a_stopped_coordinator_does_not_answer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_GRACE_SECONDS", 0.5)
    pipe = mortal(cluster, {3: Raises()}, optimizer=(torch.optim.SGD, {"lr": 0.1}))
    pipe.step(*small_data())
    before = pipe.state_dict()
    pid = cluster.pid("worker1")
    cluster.rpc_sync("worker2", Raises.arm, (pid,))
    began = time.monotonic()
    try:
        with pytest.raises(ArithmeticError, match="while the other one stands"):
            pipe.step(*small_data())
        assert time.monotonic() - began < 30
        assert pipe.optimizer_step is None
    finally:
        os.kill(pid, signal.SIGCONT)
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())
    assert pipe.optimizer_step == 1
    assert pipe.step(*small_data()).loss > 0


@pytest.mark.parametrize("agrees", [True, False])
def test_a_coordinator_that_answers_late_decides_an_interrupted_step_later(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    monkeypatch.setattr(driver, "_GRACE_SECONDS", 0.5)
    answers, abort = threading.Event(), Slots.abort_step
    pipe = late_pipeline(SGD)
    (first,) = agents[1].part(stage_._Directory).workers.values()

    def silent(self: Slots, step: int, reason: str) -> bool:
        assert self is not first.slots or answers.wait(20)
        return abort(self, step, reason)

    monkeypatch.setattr(Slots, "abort_step", silent)
    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt_late_step, agents)
        try:
            with pytest.raises(KeyboardInterrupt):
                pipe.step(*data(24))
            assert pipe.optimizer_step is None
            for event in (_gate, answers) if agrees else (answers, _gate):
                event.set()
                if event is answers and not agrees:
                    until(
                        lambda: first.slots.is_aborted(pipe.worker_group.steps._current_step),
                        "the step to be ended there",
                    )
                elif agrees and event is _gate:
                    until(lambda: is_committed(first.slots, pipe.worker_group.steps._current_step), "it to agree")
        finally:
            _gate.set()
            answers.set()
        interrupting.result(20)
    if not agrees:  # the other worker ends its wait too, without another request
        (second,) = agents[2].part(stage_._Directory).workers.values()
        until(lambda: second.slots.is_aborted(pipe.worker_group.steps._current_step), "the other one to wait no more")
    assert pipe.step(*data(24)).loss > 0 and pipe.optimizer_step == 1 + agrees


def test_a_coordinator_whose_answer_is_lost_is_asked_again(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the other worker waits no more, without another request of the user."""
    pipe = late_pipeline(SGD)
    (second,) = agents[2].part(stage_._Directory).workers.values()
    ask, losses = pipe.worker_group.steps._call_worker, [ConnectionLostError("on purpose")]

    def loses_one(id_: int, function: Any, *args: Any) -> Any:
        if function is not stop_step or not losses:
            return ask(id_, function, *args)
        lost: Future[bool] = Future()
        lost.set_exception(losses.pop())
        return lost

    monkeypatch.setattr(pipe.worker_group.steps, "_call_worker", loses_one)
    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt_late_step, agents)
        try:
            with pytest.raises(KeyboardInterrupt):
                pipe.step(*data(24))
            until(
                lambda: second.slots.is_aborted(pipe.worker_group.steps._current_step), "the other one to wait no more"
            )
            assert not losses
        finally:
            _gate.set()
        interrupting.result(20)
    assert pipe.step(*data(24)).loss > 0 and pipe.optimizer_step == 1


class Raises(torch.nn.Linear):
    """Stops the process `other`, then fails; only once."""

    other = 0

    def __init__(self) -> None:
        super().__init__(6, 6)

    @classmethod
    def arm(cls, pid: int) -> None:
        cls.other = pid

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pid, Raises.other = Raises.other, 0
        if pid:
            stop(pid)
            raise ArithmeticError("while the other one stands")
        return super().forward(x)


def test_a_coordinator_lost_on_another_host_is_reported_to_hold_either_step(tmp_path: Path) -> None:
    with far_world(tmp_path, 3) as agents:
        layers = [torch.nn.Linear(6, 16), Leaves()]
        pipe = Pipeline(split(layers, ["worker2", "worker1"]), "1f1b", 2, torch.nn.functional.mse_loss, SGD)
        x = torch.rand(8, 6)
        assert pipe.step(x, torch.rand(8, 16)).loss > 0
        gone = agents.pop()
        Leaves.armed = gone.stop
        with pytest.raises(StageLostError, match=r"worker2 was lost in step .*no parameter has changed") as caught:
            pipe.step(x, torch.rand(8, 16))
        assert caught.value.held == {0: (1, 2), 1: (1, 1)}


class Leaves(torch.nn.Linear):
    armed: Any = None

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stop, Leaves.armed = Leaves.armed, None
        if stop is not None:
            stop()
        return super().forward(x)
