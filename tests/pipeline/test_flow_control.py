"""Flow control: a stage is at most a window ahead of another one, and no window blocks a valid schedule."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import small
import torch
from hypothesis import given
from hypothesis import strategies as st
from small import STAGES
from torch import nn
from worlds import until

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline import Pipeline, mailboxes, stage
from rpcbench.pipeline.exchange import BACKWARD, FORWARD, Slots
from rpcbench.pipeline.mailboxes import Channel, FlowControl, Mailbox, compute_send_window
from rpcbench.pipeline.ops import Kind, Op, Ops, find_placement, needed_results, result_of_op
from rpcbench.pipeline.schedules import named
from rpcbench.pipeline.tasks import ENDS
from rpcbench.runtime.agent import Agent
from rpcbench.testing import Faults

Ways = list[tuple[int, int]]


# -- simulated
class Played:
    """Workers that run these operations in any order; an acknowledgement arrives only when no worker can go on."""

    def __init__(self, ops: Ops, ways: Ways, ahead: int, draw: random.Random) -> None:
        self.left = [list(own) for own in ops]
        self.most = 0
        self._home, self._ways, self._draw = find_placement(ops), ways, draw
        self._stages = 1 + max(self._home)
        self._credits = [FlowControl(1, ahead) for _ in ops]
        self._unsent: list[list[Channel]] = [[] for _ in ops]
        self._running: list[Op | None] = [None for _ in ops]
        self._given: set[Op] = set()
        self._there: dict[Channel, int] = {}
        self._told: list[tuple[Channel, int]] = []

    def run(self) -> bool:
        """Run the workers; return whether all operations have ended."""
        while True:
            if able := [worker for worker in range(len(self.left)) if self._may(worker)]:
                self._go(self._draw.choice(able))
            elif self._told:
                of, count = self._told.pop()
                self._credits[self._giver(of)].record_acknowledgement(of, count)
            else:
                return not any(self.left) and not any(self._running)

    def _may(self, worker: int) -> bool:
        if unsent := self._unsent[worker]:
            return self._credits[worker].may_send(unsent[0])
        own = self.left[worker]
        return bool(own) and self._given.issuperset(needed_results(own[0], self._stages))

    def _go(self, worker: int) -> None:
        if not self._unsent[worker]:
            op = self._running[worker] = self.left[worker].pop(0)
            self._take(worker, op)
            self._unsent[worker] = self._channels(op, taken=False)
        else:
            of = self._unsent[worker].pop(0)
            self._credits[worker].record_sent(of)
            self._there[of] = self._there.get(of, 0) + 1
            self.most = max(self.most, self._there[of])
        if not self._unsent[worker]:
            running, self._running[worker] = self._running[worker], None
            assert running is not None
            self._given.add(result_of_op(running))

    def _take(self, worker: int, op: Op) -> None:
        for of in self._channels(op, taken=True):
            self._there[of] -= 1
            if count := self._credits[worker].record_taken(of):
                self._told.insert(0, (of, count))

    def _channels(self, op: Op, taken: bool) -> list[Channel]:
        """Return the channels through which the operation takes values of other workers, or gives them values."""
        if op.kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
            return []
        forward = op.kind is Kind.FORWARD
        before = [s for s, taker in self._ways if taker == op.stage]
        after = [taker for s, taker in self._ways if s == op.stage]
        others = before if forward == taken else after
        kind = FORWARD if forward else BACKWARD
        pairs = [(op.stage, other) if taken else (other, op.stage) for other in others]
        return [Channel(kind, *pair) for pair in pairs if self._home[pair[0]] != self._home[pair[1]]]

    def _giver(self, of: Channel) -> int:
        return self._home[of.source]


def ways(ops: Ops, skips: Ways = ()) -> Ways:  # type: ignore[assignment]
    stages = 1 + max(op.stage for own in ops for op in own)
    chain = [(stage, stage + 1) for stage in range(stages - 1)]
    return chain + [(s, t) for s, t in skips if t < stages and (s, t) not in chain]


def shuffled(ops: Ops, draw: random.Random) -> Ops:
    """Return the same operations in another valid order."""
    home, stages = find_placement(ops), 1 + max(op.stage for own in ops for op in own)
    left, done, made = [op for own in ops for op in own], set(), [[] for _ in ops]  # type: ignore[var-annotated]
    while left:
        op = draw.choice([op for op in left if done.issuperset(needed_results(op, stages))])
        left.remove(op)
        done.add(result_of_op(op))
        made[home[op.stage]].append(op)
    return made


@given(st.sampled_from([*STAGES]), st.integers(2, 4), st.integers(1, 24), st.integers(0, 2**20), st.booleans())
def test_no_window_blocks_a_valid_schedule(name: str, workers: int, microbatches: int, seed: int, anew: bool) -> None:
    draw = random.Random(seed)
    ops = named(name)(workers, microbatches)
    if anew:
        ops = shuffled(ops, draw)
    there = ways(ops, [(0, 2), (1, 3), (0, 4)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mailboxes, "MIN_WINDOW", 2)
        ahead = compute_send_window(ops, there)
    played = Played(ops, there, ahead, draw)
    assert played.run()
    assert played.most <= ahead


@pytest.mark.parametrize("ahead", [2, 3, 4, 6])
def test_windows_that_are_too_small_block_some_schedules(ahead: int) -> None:
    """This shows that the test above can fail."""
    ops = named("bfs")(2, 16)
    assert not Played(ops, ways(ops), ahead, random.Random(0)).run()


def test_gpipe_gets_the_smallest_window() -> None:
    ops = named("gpipe")(2, 64)
    assert compute_send_window(ops, ways(ops)) == mailboxes.MIN_WINDOW


# -- in a pipeline
class Gate(nn.Module):
    """Lets one micro-batch pass for each release of `allowed`, and counts them."""

    allowed = threading.Semaphore(0)
    passed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.allowed.acquire(timeout=60)
        Gate.passed += 1
        return x


class Counted(nn.Module):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return x


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The number of threads that wait for room in a window."""
    found = {"for room": 0}
    given = Mailbox._await_credit

    def told(self: Mailbox, *args: Any) -> None:
        found["for room"] += 1
        try:
            given(self, *args)
        finally:
            found["for room"] -= 1

    monkeypatch.setattr(Mailbox, "_await_credit", told)
    return found


def gated() -> Pipeline:
    """A pipeline with a second stage that lets a micro-batch pass when the test allows it."""
    Gate.passed = Counted.calls = 0
    Gate.allowed = threading.Semaphore(0)
    net = nn.Sequential(nn.Linear(6, 16), Counted(), Gate(), nn.Linear(16, 4)).double()
    return small.pipeline(net, microbatches=32, schedule="gpipe")


def begun(function: Any, *args: Any) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function(*args))
        except PipelineError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_a_fast_stage_waits_when_its_window_to_a_slow_one_is_full(agents: list[Agent], waits: dict[str, int]) -> None:
    pipe, (x, _) = gated(), small.data(32)
    thread, outcome = begun(pipe.predict, x)
    # MIN_WINDOW have been sent, and the first of them is held at the gate; one more waits to be sent.
    until(lambda: waits["for room"] == 1 and Counted.calls == mailboxes.MIN_WINDOW + 1)
    slots: Slots = next(iter(agents[2].part(stage._Directory).workers.values())).slots
    assert len(slots) <= mailboxes.MIN_WINDOW
    for _ in range(mailboxes.MIN_WINDOW // 2):
        Gate.allowed.release()  # half of them are taken and acknowledged
    until(lambda: Counted.calls == mailboxes.MIN_WINDOW + 1 + mailboxes.MIN_WINDOW // 2 and waits["for room"] == 1)
    Gate.allowed.release(64)
    thread.join(30)
    assert not thread.is_alive() and Gate.passed == 32
    torch.testing.assert_close(outcome[0], local(pipe)(x))


def test_a_stage_that_waits_for_room_does_not_receive_messages_itself(
    agents: list[Agent], waits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread would handle the acknowledgement, and the stage would go on receiving until the next message."""
    read = []
    receive_until = agents[1].calls.receive_until

    def told(*args: Any, **options: Any) -> None:
        if waits["for room"]:
            read.append(args)
        receive_until(*args, **options)

    monkeypatch.setattr(agents[1].calls, "receive_until", told)
    thread, _ = begun(gated().predict, small.data(32)[0])
    until(lambda: waits["for room"] == 1 and Counted.calls == mailboxes.MIN_WINDOW + 1)
    Gate.allowed.release(64)
    thread.join(30)
    assert not thread.is_alive() and Gate.passed == 32 and not read


class _GatedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        assert Gate.allowed.acquire(timeout=60)
        return gradients[0]


class GateBack(nn.Module):
    """Like `Gate`, in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _GatedBack.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def test_a_thread_that_waits_for_room_gives_up_the_read_lock(
    agents: list[Agent], waits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage holds the read lock while it takes activations; the monitor cannot take it over in this test."""
    monkeypatch.setattr(agents[2].calls.pool.monitor, "lock_released", lambda loop: None)
    Gate.allowed = threading.Semaphore(0)
    net = nn.Sequential(nn.Linear(6, 16), GateBack(), nn.Identity(), nn.Linear(16, 4)).double()
    pipe = small.pipeline(net, microbatches=32, schedule="gpipe", optimizer=small.SGD)
    thread, outcome = begun(pipe.step, *small.data(32))
    (last,) = agents[2].part(stage._Directory).workers.values()

    def waits_for_room() -> bool:
        given = last.mail._credits
        return waits["for room"] == 1 and given is not None and not given.may_send(Channel(BACKWARD, 0, 1))

    until(waits_for_room)
    Gate.allowed.release(32)
    thread.join(30)
    assert not thread.is_alive() and len(outcome) == 1


def local(pipe: Pipeline) -> nn.Module:
    """The same model in one process."""
    net = nn.Sequential(nn.Linear(6, 16), nn.Identity(), nn.Identity(), nn.Linear(16, 4)).double()
    net.load_state_dict(pipe.state_dict())
    return net


def test_a_wait_for_room_ends_when_the_step_ends(agents: list[Agent], waits: dict[str, int]) -> None:
    pipe = gated()
    thread, outcome = begun(pipe.predict, small.data(32)[0])
    until(lambda: waits["for room"] == 1 and Counted.calls == mailboxes.MIN_WINDOW + 1)
    step = next(iter(pipe.worker_group._losses.tasks.values())).step
    agents[0].notify(agents[1].id, ENDS, (pipe.worker_group._key, step, "enough"))
    until(lambda: waits["for room"] == 0)
    Gate.allowed.release(64)
    thread.join(30)
    assert not thread.is_alive() and isinstance(outcome[0], PipelineError) and "enough" in str(outcome[0])


def test_a_training_step_within_the_window_sends_no_acknowledgements(agents: list[Agent]) -> None:
    told = Faults()
    agents[2].links.interceptors.replace_links(told)
    pipe = small.pipeline(microbatches=mailboxes.MIN_WINDOW, schedule="gpipe", optimizer=small.SGD)
    pipe.step(*small.data(mailboxes.MIN_WINDOW))
    assert not any("Notice" in line and "credits" in line for line in told.history)
