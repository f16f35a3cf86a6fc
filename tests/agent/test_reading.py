"""The thread that reads a connection runs short calls itself: it must never keep anything else waiting."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import PATIENCE, until, world

from rpcbench.agent import current
from rpcbench.agent.core import Agent
from rpcbench.agent.pool import Pool
from rpcbench.agent.reading import Reading
from rpcbench.rpc import remote, rpc_async, rpc_sync
from rpcbench.transport.stream import Ending, StreamConnection
from rpcbench.wire.body import Body
from rpcbench.wire.frames import Frame

_gate = threading.Event()
_held: list[str] = []


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    _gate.clear(), _held.clear()
    with world(tmp_path, 3, threads=4) as made:
        yield made
        _gate.set()


def runs_on_reader() -> bool:
    return getattr(threading.current_thread(), "lends", None) is not None


def hold() -> bool:
    """Blocks in a way that the runtime knows nothing of."""
    _held.append(threading.current_thread().name)
    return _gate.wait(PATIENCE)


def spin() -> bool:
    """The same for a function that computes."""
    _held.append(threading.current_thread().name)
    while not _gate.is_set():
        pass
    return True


def echo(value: Any) -> Any:
    return value


def open_gate() -> None:
    _gate.set()


def descend(depth: int) -> int:
    """A call that calls back, and so on."""
    here = current.current().id
    return 1 + rpc_sync(1 - here, descend, (depth - 1,)) if depth else 0


def pass_on(large: Any, left: int) -> int:
    """Round a ring of three."""
    here = current.current().id
    return rpc_sync((here + 1) % 3, pass_on, (large, left - 1)) if left else len(large)


def test_a_short_call_runs_on_the_thread_that_has_read_it(agents: list[Agent]) -> None:
    assert rpc_sync("worker1", runs_on_reader)
    assert remote("worker1", runs_on_reader).to_here()


@pytest.mark.parametrize("function", [hold, spin])
def test_a_call_that_takes_long_keeps_nothing_else_waiting(agents: list[Agent], function: Any) -> None:
    """Neither calls over the same connection, nor acknowledgements; the call that ends it comes that way, too."""
    long = [rpc_async("worker1", function) for _ in range(2)]
    until(lambda: len(_held) == 2)
    assert len(set(_held)) == 2, "the second did not wait for the first"
    assert rpc_sync("worker1", echo, (7,)) == 7
    until(lambda: not agents[0].machine._node.delivery.pairs[1].missing(), "the acknowledgement")
    assert not any(future.done() for future in long)
    rpc_sync("worker1", open_gate)
    assert [future.wait() for future in long] == [True, True]


def test_a_call_may_wait_for_one_that_lies_behind_it_in_the_same_read(agents: list[Agent]) -> None:
    """Both messages are there before the first one runs."""
    taken = _stall(agents[1], agents[0])
    first, second = rpc_async("worker1", hold), rpc_async("worker1", open_gate)
    taken.set()
    assert first.wait() and second.wait() is None


def test_calls_nest_far_deeper_than_there_are_threads(agents: list[Agent]) -> None:
    assert rpc_sync("worker1", descend, (60,)) == 60


def test_sixty_four_calls_may_call_back_at_once(agents: list[Agent]) -> None:
    futures = [rpc_async("worker1", descend, (2,)) for _ in range(64)]
    assert [future.wait() for future in futures] == [2] * 64


@pytest.mark.parametrize("large", [torch.ones(1 << 20), bytes(4 << 20)], ids=["tensor", "bytes"])
def test_answers_larger_than_a_socket_do_not_stop_the_reading(agents: list[Agent], large: Any) -> None:
    """Echoes of 4 MB in both directions and round a ring, none awaited before all are under way. Bytes go through the
    socket, where tensors may find another way."""
    there = [rpc_async("worker1", echo, (large,)) for _ in range(8)]
    with current.using(agents[1]):
        back = [rpc_async(0, echo, (large,)) for _ in range(8)]
        ring = [rpc_async(2, pass_on, (large, 5)) for _ in range(3)]
    assert all(_same(future.wait(), large) for future in there + back)
    assert [future.wait() for future in ring] == [len(large)] * 3


def test_who_does_not_read_its_answers_holds_up_nobody_else(agents: list[Agent]) -> None:
    large = bytes(4 << 20)
    taken = _stall(agents[0], agents[1])
    unread = [rpc_async("worker1", echo, (large,)) for _ in range(8)]
    until(lambda: _connection(agents[1], 0)._writing, "an answer that cannot be written out")
    with current.using(agents[2]):
        assert [rpc_sync("worker1", echo, (number,)) for number in range(20)] == list(range(20))
    assert not any(future.done() for future in unread)
    taken.set()
    assert all(future.wait() == large for future in unread)


def test_two_never_read_and_every_message_is_taken_in_order() -> None:
    """Hand-overs at all moments: before a call has begun, while it runs, as it ends, and long after."""
    source = _Source(3000)
    pool = Pool("test", 64, lambda: None)
    pool.read(source, source.receive(pool), source.over)
    draw = random.Random(7)
    (each,) = pool.readings
    while not source.ended.wait(draw.random() * 0.0005):
        each.hand_over()
    pool.close(PATIENCE)
    assert source.failed == [] and source.taken == list(range(3000))
    until(lambda: sorted(source.ran) == source.taken, "all calls")


class _Source:
    """A connection whose messages are numbers; it notes every two threads that are in it at once."""

    watch = beside = None

    def cut(self) -> None:
        raise AssertionError("nobody reads but workers")

    def __init__(self, count: int) -> None:
        self._left = iter(range(count))
        self._inside = threading.Lock()
        self._draw = random.Random(5)
        self.taken: list[int] = []
        self.ran: list[int] = []
        self.failed: list[str] = []
        self.ended = threading.Event()

    def _alone(self) -> bool:
        if self._inside.acquire(blocking=False):
            return True
        self.failed.append(f"{threading.current_thread().name} is not alone")
        return False

    def read(self) -> list[Frame] | Ending:
        if self._alone():
            time.sleep(self._draw.random() * 0.0002)  # a moment in which others may do wrong
            self._inside.release()
        frames = [Frame(str(number).encode(), Body(b"", b"", [])) for number in itertools.islice(self._left, 3)]
        return frames or Ending("all read", False)

    def receive(self, pool: Pool) -> Any:
        def take(frame: Frame) -> None:
            if self._alone():
                number = int(frame.control)
                self.taken.append(number)
                pool.submit(lambda: self._call(number))
                self._inside.release()

        return take

    def _call(self, number: int) -> None:
        time.sleep((0.0, 0.0001, 0.001)[number % 3])
        self.ran.append(number)

    def over(self, ending: Ending) -> None:
        if self.ended.is_set():
            self.failed.append("the end was told twice")
        self.ended.set()


class _Belled:
    """A connection with a bell, and what who listens there hears: a bell (None), a message (True), neither (False)."""

    beside = None

    def __init__(self, *hears: bool | None) -> None:
        self.watch: Any = self
        self._hears = iter(hears)
        self.reads = 0

    def listen(self, seconds: float, ear: Any) -> bool | None:
        return next(self._hears)

    def read(self) -> list[Frame]:
        self.reads += 1
        return []

    def cut(self) -> None:
        raise AssertionError("it has not ended")


def test_who_listens_looks_again_after_a_bell_and_reads_after_a_message() -> None:
    source, looks = _Belled(None, None, True, None, False), itertools.count()
    reading = Reading(Pool("test", 1, lambda: None), source, pytest.fail, pytest.fail)
    assert reading._follow(lambda: next(looks) >= 0, 1.0, object()) is None  # type: ignore[arg-type]
    assert source.reads == 1 and next(looks) == 9, "before each wait, and after what ended it"


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


def _connection(of: Agent, to: int) -> StreamConnection:
    return next(tie.connection for tie in of._peers._ties.all() if tie.peer.id == to)


def _stall(agent: Agent, peer: Agent) -> threading.Event:
    """`agent` reads nothing more from `peer` until the event is set."""
    stalled, go = threading.Event(), threading.Event()
    stream = _connection(agent, peer.id)._stream
    read_into = stream.read_into

    def patient(target: memoryview) -> int:
        stalled.set()
        assert go.wait(PATIENCE)
        return read_into(target)

    stream.read_into = patient  # type: ignore[method-assign]
    peer.call(agent.id, echo, (0,))  # in case that the reader is still in the read of before
    assert stalled.wait(PATIENCE)
    return go
