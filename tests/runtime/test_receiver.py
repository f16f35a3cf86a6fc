"""The receive loop runs short calls itself, and a thread that waits for a reply receives it itself: neither delays
other messages, and no message is lost between them."""

from __future__ import annotations

import itertools
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import PATIENCE, far_world, until, world

from rpcbench import autograd
from rpcbench.base.errors import ConnectionLostError, RpcError, WorkerLostError
from rpcbench.rpc import remote, rpc_async, rpc_sync
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.pool import Pool
from rpcbench.runtime.receiver import Receiver
from rpcbench.transport.base import Link
from rpcbench.transport.sockets import SocketWaiter
from rpcbench.transport.stream import ConnectionEnd, StreamConnection
from rpcbench.wire.framing import Frame
from rpcbench.wire.messages import EMPTY, Body

_gate = threading.Event()
_held: list[str] = []


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    _gate.clear(), _held.clear()
    with world(tmp_path, 3, threads=4) as made:
        yield made
        _gate.set()


def runs_on_the_loop() -> bool:
    return getattr(threading.current_thread(), "lends", None) is not None


def hold() -> bool:
    """Block without the knowledge of the runtime."""
    _held.append(threading.current_thread().name)
    return _gate.wait(PATIENCE)


def spin() -> bool:
    """Compute until the gate opens."""
    _held.append(threading.current_thread().name)
    while not _gate.is_set():
        pass
    return True


def echo(value: Any) -> Any:
    return value


def open_gate() -> None:
    _gate.set()


def descend(depth: int) -> int:
    """Call back the caller, recursively."""
    here = current.current_agent().id
    return 1 + rpc_sync(1 - here, descend, (depth - 1,)) if depth else 0


def pass_on(large: Any, left: int) -> int:
    """Pass a value round three members."""
    here = current.current_agent().id
    return rpc_sync((here + 1) % 3, pass_on, (large, left - 1)) if left else len(large)


def test_a_short_call_runs_on_the_thread_that_has_received_it(agents: list[Agent]) -> None:
    assert rpc_sync("worker1", runs_on_the_loop)
    assert remote("worker1", runs_on_the_loop).to_here()


@pytest.mark.parametrize("function", [hold, spin])
def test_a_long_call_delays_no_other_messages(agents: list[Agent], function: Any) -> None:
    """Calls over the same connection and acknowledgements go on; the call that ends it takes that connection, too."""
    long = [rpc_async("worker1", function) for _ in range(2)]
    until(lambda: len(_held) == 2)
    assert len(set(_held)) == 2, "the second call runs on another thread"
    assert rpc_sync("worker1", echo, (7,)) == 7
    until(lambda: not agents[0].machine._node.delivery.pairs[1].has_unacknowledged(), "the acknowledgement")
    assert not any(future.done() for future in long)
    rpc_sync("worker1", open_gate)
    assert [future.wait() for future in long] == [True, True]


def test_a_call_can_wait_for_a_later_call_of_the_same_read(agents: list[Agent]) -> None:
    """Both messages have arrived before the first call runs."""
    taken = _stall(agents[1], agents[0])
    first, second = rpc_async("worker1", hold), rpc_async("worker1", open_gate)
    taken.set()
    assert first.wait() and second.wait() is None


def test_calls_can_nest_far_deeper_than_the_number_of_threads(agents: list[Agent]) -> None:
    assert rpc_sync("worker1", descend, (60,)) == 60


def test_sixty_four_calls_can_call_back_at_once(agents: list[Agent]) -> None:
    futures = [rpc_async("worker1", descend, (2,)) for _ in range(64)]
    assert [future.wait() for future in futures] == [2] * 64


@pytest.mark.parametrize("large", [torch.ones(1 << 20), bytes(4 << 20)], ids=["tensor", "bytes"])
def test_results_larger_than_a_socket_buffer_do_not_stop_the_receive_loop(agents: list[Agent], large: Any) -> None:
    """Echoes of 4 MB in both directions and round three members, none awaited before all are in flight. Bytes go
    through the socket, and tensors may go through shared memory."""
    there = [rpc_async("worker1", echo, (large,)) for _ in range(8)]
    with current.use_agent(agents[1]):
        back = [rpc_async(0, echo, (large,)) for _ in range(8)]
        ring = [rpc_async(2, pass_on, (large, 5)) for _ in range(3)]
    assert all(_same(future.wait(), large) for future in there + back)
    assert [future.wait() for future in ring] == [len(large)] * 3


def test_a_member_that_does_not_read_its_results_delays_no_other_member(agents: list[Agent]) -> None:
    large = bytes(4 << 20)
    taken = _stall(agents[0], agents[1])
    unread = [rpc_async("worker1", echo, (large,)) for _ in range(8)]
    until(lambda: _connection(agents[1], 0)._writing, "an answer that cannot be written out")
    with current.use_agent(agents[2]):
        assert [rpc_sync("worker1", echo, (number,)) for number in range(20)] == list(range(20))
    assert not any(future.done() for future in unread)
    taken.set()
    assert all(future.wait() == large for future in unread)


def test_one_thread_at_a_time_receives_and_messages_are_taken_in_order() -> None:
    """The read lock is released at all moments: before a call begins, while it runs, as it ends, and long after."""
    source = _Source(3000)
    pool = Pool("test", 64, lambda: None)
    receiver = Receiver(pool, source, source.receive(pool), source.over, lambda: True)  # type: ignore[arg-type]
    receiver.start()
    draw = random.Random(7)
    while not source.ended.wait(draw.random() * 0.0005):
        receiver.release_to_pool()
    pool.close(PATIENCE)
    assert source.failed == [] and source.taken == list(range(3000))
    until(lambda: sorted(source.ran) == source.taken, "all calls")


class _Source:
    """A connection whose messages are numbers; it notes when two threads are in it at once."""

    watch = None

    def break_connection(self) -> None:
        raise AssertionError("no thread waits for a reply")

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

    def read_frames(self) -> list[Frame] | ConnectionEnd:
        if self._alone():
            time.sleep(self._draw.random() * 0.0002)  # time for another thread to enter
            self._inside.release()
        frames = [Frame(str(number).encode(), Body(b"", b"", [])) for number in itertools.islice(self._left, 3)]
        return frames or ConnectionEnd("all read", False)

    def receive(self, pool: Pool) -> Any:
        def take(frame: Frame) -> None:
            if self._alone():
                number = int(frame.control)
                self.taken.append(number)
                pool.submit_call(lambda: self._call(number))
                self._inside.release()

        return take

    def _call(self, number: int) -> None:
        time.sleep((0.0, 0.0001, 0.001)[number % 3])
        self.ran.append(number)

    def over(self, ending: ConnectionEnd) -> None:
        if self.ended.is_set():
            self.failed.append("the end was told twice")
        self.ended.set()


# -- threads that wait for a reply
@pytest.fixture(params=["0", "1"], ids=["asleep", "spinning"])
def spinning(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCBENCH_EAGER", request.param)


@pytest.fixture(params=[world, far_world])
def two(spinning: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Agent]]:
    with request.param(tmp_path, 2) as made:
        yield made


class _Noted(Link):
    """Notes the threads that receive messages."""

    def __init__(self) -> None:
        super().__init__()
        self.receivers: list[threading.Thread] = []

    def handle_incoming(self, source: int, seq: int, message: Any) -> None:
        self.receivers.append(threading.current_thread())
        super().handle_incoming(source, seq, message)


def _receiver(agent: Agent) -> Receiver:
    """Return the receiver of the connection to the other agent; a new connection has none for a moment."""

    def found() -> Any:
        return getattr(_connection(agent, 1 - agent.id).receive_until, "__self__", None)

    until(lambda: isinstance(found(), Receiver), "the receiver of the connection")
    receiver: Receiver = found()
    return receiver


def _lends(receiver: Receiver) -> bool:
    """Return whether the loop sleeps, and has released the read lock."""
    return receiver._idle and not receiver._lock.locked()


def _idle(agent: Agent) -> Receiver:
    """Return the receiver when its loop is idle."""
    receiver = _receiver(agent)
    until(lambda: _lends(receiver), "an idle loop")
    return receiver


def back_and_forth(turns: int) -> int:
    """Call the caller, which waits for this call."""
    for number in range(turns):
        assert rpc_sync(0, echo, (number,)) == number
    return turns


def test_a_caller_receives_its_own_replies(two: list[Agent]) -> None:
    receiver, noted = _idle(two[0]), _Noted()
    two[0].links.interceptors.replace_links(noted)

    def receives_all() -> bool:
        """Return whether this thread received all; an acknowledgement or a late thread may have woken the loop."""
        noted.receivers.clear()
        assert [rpc_sync("worker1", echo, (number,)) for number in range(10)] == list(range(10))
        return noted.receivers == [threading.main_thread()] * 10

    until(receives_all, "ten replies that their caller has received")
    until(lambda: receiver._idle and not two[0].calls.pool.monitor._since, "the monitor to have nothing to watch")


def ask_on(turns: int) -> int:
    """Call worker 2 from worker 1; return the id of the calling thread."""
    assert [rpc_sync("worker2", echo, (number,)) for number in range(turns)] == list(range(turns))
    return threading.get_ident()


def test_a_call_that_calls_another_worker_receives_its_own_replies(
    spinning: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in place, without the help of another thread."""
    with world(tmp_path, 3) as made:
        noted, pool, asides = _Noted(), made[1].calls.pool, list[int]()
        made[1].links.interceptors.replace_links(noted)
        blocked = pool.thread_blocked
        monkeypatch.setattr(pool, "thread_blocked", lambda: (asides.append(1), blocked()))

        def receives_all() -> bool:
            noted.receivers.clear()
            asides.clear()
            asks = rpc_sync("worker1", ask_on, (10,))
            return len([thread for thread in noted.receivers if thread.ident == asks]) >= 10 and not asides

        until(receives_all, "ten replies that a call on a worker has received")


def nest(depth: int, names: list[str]) -> int:
    """Call the next member, round and round: over another connection than the one of this call."""
    return 1 + rpc_sync(names[depth % len(names)], nest, (depth - 1, names)) if depth else 0


def test_calls_that_wait_in_place_can_nest_deeper_than_the_pool_has_room(spinning: None, tmp_path: Path) -> None:
    names = ["worker1", "worker2", "notebook"]
    with world(tmp_path, 3, threads=2):
        for _ in range(5):
            assert rpc_sync("worker1", nest, (24, names)) == 24


def test_the_receive_loop_receives_calls_of_the_peer(two: list[Agent]) -> None:
    _idle(two[0])
    noted = _Noted()
    two[0].links.interceptors.replace_links(noted)
    with current.use_agent(two[1]):
        assert [rpc_sync(0, echo, (number,)) for number in range(20)] == list(range(20))
    assert len(noted.receivers) >= 20 and threading.main_thread() not in noted.receivers
    assert rpc_sync("worker1", echo, (1,)) == 1


def test_a_caller_answers_calls_back_while_it_receives(two: list[Agent]) -> None:
    assert [rpc_sync("worker1", back_and_forth, (number,)) for number in range(8)] == list(range(8))


def test_the_receive_loop_receives_all_messages_if_it_cannot_be_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case on systems without epoll."""
    monkeypatch.delattr(select, "epoll")
    noted = _Noted()
    with world(tmp_path, 2) as made:
        made[0].links.interceptors.replace_links(noted)
        assert [rpc_sync("worker1", back_and_forth, (number,)) for number in range(5)] == list(range(5))
        assert threading.main_thread() not in noted.receivers


def test_many_threads_can_call_in_both_directions_at_once(two: list[Agent]) -> None:
    failed: list[BaseException] = []

    def calls(agent: Agent, other: int, turns: int) -> None:
        try:
            with current.use_agent(agent):
                for number in range(turns):
                    assert rpc_sync(other, echo, (number,)) == number
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=calls, args=(two[n % 2], 1 - n % 2, 150)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 3)
    assert not failed and not any(thread.is_alive() for thread in threads)


def test_a_backward_pass_receives_its_own_gradients(two: list[Agent]) -> None:
    weight = torch.ones(3, requires_grad=True)
    noted = _Noted()
    two[0].links.interceptors.replace_links(noted)

    def receives_gradients() -> bool:
        with autograd.context() as context:
            out = rpc_sync("worker1", torch.mul, (weight, torch.full((3,), 2.0)))
            noted.receivers.clear()
            autograd.backward(context, [out.sum()])
            assert autograd.get_gradients(context)[weight].tolist() == [2.0] * 3
        return threading.main_thread() in noted.receivers

    until(receives_gradients, "gradients that were received by the thread that waits for them")


def test_the_end_of_a_connection_is_handled_if_a_waiting_caller_receives_it(two: list[Agent]) -> None:
    receiver = _idle(two[0])
    two[1].stop()
    with pytest.raises(RpcError):
        rpc_sync("worker1", echo, (1,))
    until(lambda: receiver._lent_watch._armed.closed, "the end of the loop")
    with pytest.raises(WorkerLostError):
        rpc_sync("worker1", echo, (1,))


def test_an_error_in_the_handling_of_a_message_ends_the_connection_on_any_thread(
    two: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Link):
        broken = False

        def handle_incoming(self, source: int, seq: int, message: Any) -> None:
            if not self.broken:
                self.broken = True
                raise ArithmeticError("on purpose")
            super().handle_incoming(source, seq, message)

    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    receiver = _idle(two[0])
    two[0].links.interceptors.replace_links(Breaks())
    with pytest.raises((WorkerLostError, ConnectionLostError)):  # the peer may dial again before it is lost
        rpc_async("worker1", echo, (1,)).wait()
    until(lambda: bool(told), "a word about what happened")
    assert told[0].exc_type is ArithmeticError
    until(lambda: receiver._lent_watch._armed.closed, "the end of the loop")


def test_a_thread_that_has_run_a_call_leaves_the_loop_to_the_idle_thread(two: list[Agent]) -> None:
    _gate.clear(), _held.clear()
    long = rpc_async("worker1", hold)
    until(lambda: bool(_held), "the call")
    thread = next(thread for thread in list(two[1].calls.pool._threads) if thread.lends is not None)
    receiver: Any = _receiver(two[1])
    until(lambda: _lends(receiver), "another thread, which is idle")
    _gate.set()
    assert long.wait()
    until(lambda: thread.lends is None, "the end of the call")
    until(lambda: thread.receives is None and receiver._idle, "the idle thread to have the loop")


class _Quiet:
    """A connection on which the test sends bytes; each byte is `frames` messages."""

    def __init__(self, frames: int = 1) -> None:
        self.here, self.there = socket.socketpair()
        self.watch: SocketWaiter | None = SocketWaiter(self.here)
        self.ended = threading.Event()
        self._frames = frames
        self.pool = Pool("test", 4, lambda: None)
        self.due = True  # replies are due, so the loop does not spin
        self.came: list[threading.Thread] = []
        self.fails = False
        self.vain = 0  # reads without data

    def read_frames(self) -> list[Frame] | ConnectionEnd:
        try:
            got = self.here.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:  # as at the first read
            self.vain += 1
            return []
        return [Frame(b"", EMPTY)] * self._frames if got else ConnectionEnd("over", False)

    def break_connection(self) -> None:
        self.here.shutdown(socket.SHUT_RDWR)

    def begins(self, deliver: Callable[[Frame], None] | None = None, monitored: bool = True) -> Receiver:
        if not monitored:
            self.pool.monitor.lock_released = lambda lock: None  # type: ignore[method-assign]

        def over(ending: ConnectionEnd) -> None:
            self.ended.set()

        receiver = Receiver(self.pool, self, deliver or self._deliver, over, lambda: self.due)  # type: ignore[arg-type]
        watch = self.watch
        assert watch is not None
        armed, arm = threading.Event(), watch.arm_wakeup
        watch.arm_wakeup = lambda: (arm(), armed.set())  # type: ignore[method-assign,assignment]
        receiver.start()
        until(lambda: _lends(receiver), "an idle loop")
        assert armed.wait(PATIENCE)  # the loop frees the lock first
        watch.arm_wakeup = arm  # type: ignore[method-assign]
        return receiver

    def _deliver(self, frame: Frame) -> None:
        self.came.append(threading.current_thread())
        assert not self.fails, "on purpose"

    def ends(self) -> None:
        self.there.close()
        assert self.ended.wait(PATIENCE), "no thread has read the end"
        self.closes()

    def closes(self) -> None:
        self.pool.close(PATIENCE)
        assert self.watch is not None
        self.watch.close()
        self.here.close()


def test_a_waiting_thread_receives_its_message_without_a_wake_up_of_the_loop() -> None:
    source = _Quiet()
    receiver = source.begins()
    sent = iter([None])

    def waiting() -> bool:
        if next(sent, 1) is None:
            source.there.send(b".")
        assert source.watch is not None and source.watch._armed.poll(0) == [], "the message would wake the loop"
        return not source.came

    receiver.receive_until(waiting, PATIENCE)
    assert source.came == [threading.current_thread()] and receiver._idle
    source.ends()


def test_the_loop_receives_a_message_that_arrives_after_the_end_of_a_wait() -> None:
    source = _Quiet()
    source.begins().receive_until(lambda: True, 0.0)
    source.there.send(b".")
    until(lambda: len(source.came) == 1, "a message that the loop has received")
    assert source.came != [threading.current_thread()]
    source.ends()


@pytest.mark.parametrize("turn", range(50))
def test_the_loop_wakes_for_an_end_that_arrives_as_a_waiting_thread_leaves(turn: int) -> None:
    """The connection ends between the last look and the release of the read lock."""
    source = _Quiet()
    receiver = source.begins()

    def leaves() -> bool:
        source.there.close()
        return False

    receiver.receive_until(leaves)
    assert source.ended.wait(PATIENCE), "no thread has read the end"
    source.closes()


def test_the_loop_can_end_a_connection_before_a_waiting_thread_arms_the_watch() -> None:
    """An end wakes the loop even if the watch is not armed."""
    source = _Quiet()
    receiver = source.begins()
    watch = source.watch
    assert watch is not None
    arm = watch.arm_wakeup

    def too_late() -> None:
        source.ends()
        arm()

    watch.arm_wakeup = too_late  # type: ignore[method-assign]
    receiver.receive_until(lambda: False)


def test_the_loop_ends_a_connection_after_an_error_on_a_waiting_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    source = _Quiet()
    receiver = source.begins()
    source.fails = True

    def waiting() -> bool:
        source.there.send(b".")
        return True

    receiver.receive_until(waiting, PATIENCE)
    assert source.came == [threading.current_thread()]
    assert source.ended.wait(PATIENCE), "the loop was not woken"
    source.there.close()
    source.closes()


def test_a_waiting_thread_first_handles_the_messages_that_are_already_read() -> None:
    """Two messages arrive at once; the first is a call that runs until the second is handled."""
    source = _Quiet(frames=2)
    running, handled = threading.Event(), threading.Event()

    def call() -> None:
        running.set()
        assert handled.wait(PATIENCE)

    def deliver(frame: Frame) -> None:
        if running.is_set():
            handled.set()
        else:
            source.pool.submit_call(call)

    def waiting() -> bool:
        raise AssertionError("it must not wait for what comes while something lies ready")

    receiver = source.begins(deliver, monitored=False)
    source.there.send(b".")
    assert running.wait(PATIENCE)
    receiver.receive_until(waiting)
    assert handled.wait(PATIENCE), "no thread has handled the second message"
    source.ends()


def test_a_wake_up_for_a_message_that_another_thread_received_leaves_the_loop_idle() -> None:
    """The read lock stays free for the next thread that waits."""
    source = _Quiet()
    watch, woken, go = source.watch, threading.Event(), threading.Event()
    assert watch is not None
    sleep = watch.wait_for_event

    def late() -> None:
        sleep()
        woken.set()
        assert go.wait(PATIENCE)

    watch.wait_for_event = late  # type: ignore[method-assign]
    receiver = source.begins()
    source.there.send(b".")
    assert woken.wait(PATIENCE)
    receiver.receive_until(lambda: not source.came, PATIENCE)
    assert source.came == [threading.current_thread()]
    vain = source.vain
    go.set()
    source.there.send(b".")
    until(lambda: len(source.came) == 2, "a message that the loop has received")
    assert source.vain == vain, "the loop would have blocked in the read with the read lock"
    source.ends()


def test_a_call_whose_handling_fails_no_longer_counts_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    source = _Quiet()

    def deliver(frame: Frame) -> None:
        source.pool.submit_internal(lambda: None)
        assert source.pool.busy == 1
        raise ArithmeticError("on purpose")

    source.begins(deliver)
    source.there.send(b".")
    assert source.ended.wait(PATIENCE) and source.pool.busy == 0
    until(lambda: [one.exc_type for one in told] == [ArithmeticError], "a word about what happened")
    source.there.close()
    source.closes()


def test_a_waiting_thread_starts_a_loop_if_the_running_call_has_ended_meanwhile() -> None:
    """The thread that ran the call finds the read lock taken and leaves."""
    source = _Quiet()
    running, go = threading.Event(), threading.Event()
    receiver = source.begins(lambda frame: source.pool.submit_call(lambda: (running.set(), go.wait(PATIENCE))), False)
    source.due = False
    source.there.send(b".")
    assert running.wait(PATIENCE)

    def waiting() -> bool:
        go.set()
        until(lambda: not receiver._serving, "the end of the call")
        return False

    receiver.receive_until(waiting)
    until(lambda: _lends(receiver), "another loop")
    source.ends()


def test_an_error_that_ends_a_wait_does_not_end_the_connection() -> None:
    """Such as a second Ctrl-C, or a MemoryError."""
    source = _Quiet()
    receiver = source.begins()

    def waiting() -> bool:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        receiver.receive_until(waiting)
    source.there.send(b".")
    until(lambda: len(source.came) == 1, "a message that the loop has received")
    source.ends()


def test_the_read_lock_is_not_lost_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    source = _Quiet()
    running, go = threading.Event(), threading.Event()
    receiver = source.begins(lambda frame: source.pool.submit_call(lambda: (running.set(), go.wait(PATIENCE))), False)
    source.there.send(b".")
    assert running.wait(PATIENCE)

    def none(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(source.pool, "spawn_job", none)
        with pytest.raises(RuntimeError, match="new thread"):
            receiver.release_to_pool()
    go.set()
    until(lambda: _lends(receiver), "the loop goes on")
    source.ends()


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


def _connection(of: Agent, to: int) -> StreamConnection:
    return next(entry.connection for entry in of.links.peers._table.all_entries() if entry.peer.id == to)


def _stall(agent: Agent, peer: Agent) -> threading.Event:
    """Make `agent` read nothing from `peer` until the event is set."""
    stalled, go = threading.Event(), threading.Event()
    stream = _connection(agent, peer.id)._stream
    read_into = stream.read_into

    def patient(target: memoryview) -> int:
        stalled.set()
        assert go.wait(PATIENCE)
        return read_into(target)

    stream.read_into = patient  # type: ignore[method-assign]
    peer.call(agent.id, echo, (0,))  # the reader may still be in an earlier read
    assert stalled.wait(PATIENCE)
    return go
