"""Who waits for an answer reads it itself; a thread of the pool stands by for all that comes besides."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import PATIENCE, far_world, until, world

from rpcbench import autograd
from rpcbench.agent import asking, current
from rpcbench.agent.asking import _OFTEN, _SOON, _Habit
from rpcbench.agent.asking import _PAUSE as PAUSE
from rpcbench.agent.core import Agent
from rpcbench.agent.pool import Pool
from rpcbench.agent.reading import Reading
from rpcbench.rpc import remote, rpc_async, rpc_sync
from rpcbench.transport.base import Link
from rpcbench.transport.stream import Ending
from rpcbench.transport.watch import Watch
from rpcbench.wire.frames import Frame
from rpcbench.wire.messages import EMPTY
from rpcbench.words.errors import ConnectionLostError, RpcError, WorkerLostError


@pytest.fixture(params=["0", "1"], ids=["asleep", "eager"])
def eager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RPCBENCH_EAGER", request.param)


@pytest.fixture(params=[world, far_world])
def agents(eager: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Agent]]:
    with request.param(tmp_path, 2) as made:
        yield made


def echo(value: Any) -> Any:
    return value


def back_and_forth(turns: int) -> int:
    """Calls its caller, which waits for this very call."""
    for number in range(turns):
        assert rpc_sync(0, echo, (number,)) == number
    return turns


class _Noted(Link):
    """Which threads have read messages."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[threading.Thread] = []

    def incoming(self, source: int, seq: int, message: Any) -> None:
        self.readers.append(threading.current_thread())
        super().incoming(source, seq, message)


def _reading(agent: Agent) -> Reading:
    (reading,) = agent._pool.readings
    return reading


def _settled(agent: Agent) -> Reading:
    """As a caller finds it that calls again and again."""
    reading = _reading(agent)

    def stands_by() -> bool:
        rpc_sync("worker1", echo, (0,))
        return reading._guarded

    until(stands_by, "a thread that stands by")
    return reading


def test_a_caller_reads_its_own_answers(agents: list[Agent]) -> None:
    reading, noted = _settled(agents[0]), _Noted()
    agents[0].links.use(noted)

    def reads_all() -> bool:
        """Unless an acknowledgement came between, which whoever stands by has read."""
        noted.readers.clear()
        assert [rpc_sync("worker1", echo, (number,)) for number in range(10)] == list(range(10))
        return noted.readers == [threading.main_thread()] * 10

    until(reads_all, "ten answers that their caller has read")
    assert reading._guarded
    assert not agents[0]._pool.monitor._since, "nothing for the monitor to watch"


def ask_on(turns: int) -> int:
    """On worker 1, of worker 2; the thread that asks."""
    assert [rpc_sync("worker2", echo, (number,)) for number in range(turns)] == list(range(turns))
    return threading.get_ident()


def test_a_call_that_calls_on_reads_its_own_answers(
    eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits as it is: nobody else is asked to do anything meanwhile."""
    with world(tmp_path, 3) as made:
        noted, pool, asides = _Noted(), made[1]._pool, list[int]()
        made[1].links.use(noted)
        blocked = pool.blocked
        monkeypatch.setattr(pool, "blocked", lambda: (asides.append(1), blocked()))

        def reads_all() -> bool:
            noted.readers.clear()
            asides.clear()
            asks = rpc_sync("worker1", ask_on, (10,))
            return len([thread for thread in noted.readers if thread.ident == asks]) >= 10 and not asides

        until(reads_all, "ten answers that a call on a worker has read")


def test_calls_nest_deeper_than_there_is_room_where_all_wait_as_they_are(eager: None, tmp_path: Path) -> None:
    names = ["worker1", "worker2", "notebook"]
    with world(tmp_path, 3, threads=2):
        for _ in range(5):
            assert rpc_sync("worker1", nest, (24, names)) == 24


def nest(depth: int, names: list[str]) -> int:
    """Each calls the next one, round and round: over another connection than the call has come by."""
    return 1 + rpc_sync(names[depth % len(names)], nest, (depth - 1, names)) if depth else 0


def test_who_stands_by_reads_what_comes_unasked(agents: list[Agent]) -> None:
    reading, noted = _settled(agents[0]), _Noted()
    agents[0].links.use(noted)
    with current.using(agents[1]):
        assert [rpc_sync(0, echo, (number,)) for number in range(20)] == list(range(20))
    assert len(noted.readers) >= 20 and not reading._guarded
    assert rpc_sync("worker1", echo, (1,)) == 1


def test_a_caller_answers_calls_back_while_it_reads(agents: list[Agent]) -> None:
    _settled(agents[0])
    assert [rpc_sync("worker1", back_and_forth, (number,)) for number in range(8)] == list(range(8))


def test_where_nobody_can_stand_by_a_worker_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems without epoll."""
    monkeypatch.delattr(select, "epoll")
    noted = _Noted()
    with world(tmp_path, 2) as made:
        made[0].links.use(noted)
        assert [rpc_sync("worker1", back_and_forth, (number,)) for number in range(5)] == list(range(5))
        assert threading.main_thread() not in noted.readers and not _reading(made[0])._guarded


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind threads")
def test_nothing_that_is_started_is_bound_and_nobody_stays_so(agents: list[Agent]) -> None:
    """Neither what a program starts between a call and its wait, nor threads of ours."""
    everywhere, found = os.sched_getaffinity(0), list[set[int]]()
    for turn in range(10):
        assert [rpc_sync("worker1", back_and_forth, (number,)) for number in range(4)] == list(range(4))
        for _ in range(5):
            rpc_async("worker1", echo, (turn,)).wait()
        left = rpc_async("worker1", echo, (turn,))
        thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert left.wait() == turn
    assert found == [everywhere] * 10

    def free(task: Path) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.sched_getaffinity(int(task.name)) == everywhere
        return True

    until(lambda: all(map(free, Path("/proc/self/task").iterdir())), "all are free")


def test_many_threads_call_both_ways_at_once(agents: list[Agent]) -> None:
    failed: list[BaseException] = []

    def calls(agent: Agent, other: int, turns: int) -> None:
        try:
            with current.using(agent):
                for number in range(turns):
                    assert rpc_sync(other, echo, (number,)) == number
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=calls, args=(agents[n % 2], 1 - n % 2, 150)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE * 3)
    assert not failed and not any(thread.is_alive() for thread in threads)


def test_an_end_that_a_caller_meets_is_seen_to(agents: list[Agent]) -> None:
    reading = _settled(agents[0])
    agents[1].stop()
    with pytest.raises(RpcError):
        rpc_sync("worker1", echo, (1,))
    until(lambda: reading not in agents[0]._pool.readings, "the end of the reading")
    with pytest.raises(WorkerLostError):
        rpc_sync("worker1", echo, (1,))


def test_a_message_that_cannot_be_handled_ends_the_connection_whoever_reads_it(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaks(Link):
        broken = False

        def incoming(self, source: int, seq: int, message: Any) -> None:
            if not self.broken:
                self.broken = True
                raise ArithmeticError("on purpose")
            super().incoming(source, seq, message)

    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    reading = _settled(agents[0])
    agents[0].links.use(Breaks())
    with pytest.raises((WorkerLostError, ConnectionLostError)):  # the peer may dial again before we have parted
        rpc_async("worker1", echo, (1,)).wait()
    until(lambda: bool(told), "a word about what happened")
    assert told[0].exc_type is ArithmeticError
    until(lambda: reading not in agents[0]._pool.readings, "the end of the reading")


def test_a_backward_pass_reads_its_own_gradients(agents: list[Agent]) -> None:
    _settled(agents[0])
    weight = torch.ones(3, requires_grad=True)
    noted = _Noted()
    agents[0].links.use(noted)

    def reads_gradients() -> bool:
        with autograd.context() as context:
            out = rpc_sync("worker1", torch.mul, (weight, torch.full((3,), 2.0)))
            noted.readers.clear()
            autograd.backward(context, [out.sum()])
            assert autograd.get_gradients(context)[weight].tolist() == [2.0] * 3
        return threading.main_thread() in noted.readers

    until(reads_gradients, "gradients that were read by the thread that waits for them")


class _Noticed(Watch):
    """Tells that a reader waits, or is about to."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.asked = threading.Event()

    def await_some(self) -> None:
        self.asked.set()
        super().await_some()


class _Parted:
    """A connection that has nothing to say, and a watch that lets who is woken go first."""

    beside: Any = None

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.watch: Watch | None = (watch := _Noticed(self.here))
        self.ended = threading.Event()
        self.asked = watch.asked
        self.fails = False
        self.frames = 1  # that each byte stands for

    def read(self) -> list[Frame] | Ending:
        self.asked.set()
        return [Frame(b"", EMPTY)] * self.frames if self.here.recv(1) else Ending("over", False)

    def cut(self) -> None:
        self.here.shutdown(socket.SHUT_RDWR)

    def over(self, ending: Ending) -> None:
        self.ended.set()

    def receive(self, frame: Frame) -> None:
        assert not self.fails, "on purpose"

    def close(self, pool: Pool) -> None:
        pool.close(PATIENCE)
        assert self.watch is not None
        self.watch.close()
        self.here.close()


@pytest.mark.parametrize("turn", range(50))
def test_what_comes_as_a_caller_leaves_wakes_who_stands_by(turn: int) -> None:
    """The end of the connection, just between the last look and the return of the token."""
    source, pool = _Parted(), Pool("test", 2, lambda: None)
    pool.due = lambda: False
    reading = pool.read(source, lambda frame: None, source.over)
    assert source.asked.wait(PATIENCE)
    reading.read_while(lambda: False)  # nobody is there to return the token yet
    source.there.send(b".")
    until(lambda: reading._guarded, "a thread that stands by")

    def leaves() -> bool:
        source.there.close()
        return False

    reading.read_while(leaves)
    assert source.ended.wait(PATIENCE), "nobody has read the end"
    source.close(pool)


class _Kept:
    """A connection at which one stands by, and who has received its messages."""

    def __init__(self, monitored: bool = False) -> None:
        self.source, self.pool = _Parted(), Pool("test", 4, lambda: None)
        self.pool.due = lambda: False
        self.came: list[threading.Thread] = []
        if not monitored:  # then nobody else hands over
            self.pool.monitor.laid = lambda token: None  # type: ignore[method-assign]
        self.reading = self.pool.read(self.source, self._receive, self.source.over)
        assert self.source.asked.wait(PATIENCE)

    def _receive(self, frame: Frame) -> None:
        self.came.append(threading.current_thread())

    def stood_by(self) -> _Kept:
        self.reading.read_while(lambda: False)
        self.sends()
        until(lambda: self.reading._guarded and self.reading._armed, "a thread that stands by")
        return self

    def sends(self) -> None:
        """One more message, that only who stands by or takes it can receive."""
        self.source.there.send(b".")

    def takes(self) -> None:
        """This thread waits for one more, and will be back."""
        count = len(self.came)
        until(lambda: self.reading.read_while(lambda: len(self.came) == count, back=True) or len(self.came) > count)
        assert self.came[count] is threading.current_thread()

    def close(self) -> None:
        self.source.there.close()
        self.reading.hand_over()
        assert self.source.ended.wait(PATIENCE), "nobody has read the end"
        self.source.close(self.pool)


def test_what_comes_for_one_that_will_be_back_wakes_nobody() -> None:
    kept = _Kept().stood_by()
    kept.reading.keep()
    for _ in range(3):
        kept.sends()
        assert not kept.reading._armed and kept.reading._guarded
        kept.takes()
    kept.close()


def test_one_that_waits_in_vain_leaves_what_comes_to_who_stands_by() -> None:
    kept = _Kept().stood_by()
    kept.reading.read_while(lambda: True, 0.0, back=True)
    assert kept.reading._armed
    count = len(kept.came)
    kept.sends()
    until(lambda: len(kept.came) > count, "a message that who stands by has read")
    kept.close()


def test_one_that_is_not_back_soon_is_waited_for_no_longer() -> None:
    kept = _Kept(monitored=True).stood_by()
    count = len(kept.came)
    kept.reading.keep()
    kept.sends()
    until(lambda: len(kept.came) > count, "a message that somebody else has read")
    kept.close()


def test_one_that_waits_for_something_else_hands_over_at_once() -> None:
    kept = _Kept().stood_by()
    count = len(kept.came)
    kept.reading.keep()
    kept.reading.hand_over()
    assert kept.reading._armed
    kept.sends()
    until(lambda: len(kept.came) > count, "a message that somebody else has read")
    kept.close()


def test_a_reader_stands_by_as_soon_as_one_takes_what_it_has_read() -> None:
    kept = _Kept()
    kept.reading.keep()
    kept.sends()
    until(lambda: kept.reading._guarded and kept.reading._armed, "a thread that stands by")
    kept.close()


def test_who_will_be_back_tells_nobody_to_wait_beside_it() -> None:
    kept = _Kept().stood_by()
    bound = kept.reading._beside = _Bound()  # type: ignore[assignment]
    kept.reading.keep()
    assert "expect" not in bound.told
    kept.reading._beside = None
    kept.close()


def test_before_a_reader_sleeps_for_long_what_need_not_ring_is_put_off() -> None:
    source, pool, rested = _Parted(), Pool("test", 2, lambda: None), threading.Event()
    pool.monitor.rest = rested.set  # type: ignore[method-assign]
    pool.read(source, source.receive, source.over)
    source.there.send(b".")
    assert rested.wait(PATIENCE)
    source.there.close()
    assert source.ended.wait(PATIENCE)
    source.close(pool)


class _Bound:
    """Notes what becomes of a thread that is bound where it waits."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.freed = threading.Event()

    def expect(self) -> None:
        self.told.append("expect")

    def expected(self) -> None:
        self.told.append("expected")

    def in_vain(self) -> None:
        self.told.append("in vain")
        self.freed.set()

    def stay(self) -> bool:
        self.told.append("stay")
        return True

    def rise(self) -> None:
        self.told.append("rise")

    def rest(self) -> bool:
        return False

    def came(self) -> None: ...


@pytest.fixture
def parted() -> Iterator[tuple[_Parted, Pool, Reading, list[threading.Thread]]]:
    """A thread stands by; the last is who has taken messages."""
    source, pool, takers = _Parted(), Pool("test", 2, lambda: None), list[threading.Thread]()
    source.beside = _Bound()
    pool.due = lambda: False
    reading = pool.read(source, lambda frame: takers.append(threading.current_thread()), source.over)
    assert source.asked.wait(PATIENCE)
    reading.read_while(lambda: False)
    source.there.send(b".")
    until(lambda: reading._guarded, "a thread that stands by")
    yield source, pool, reading, takers
    source.there.close()
    assert source.ended.wait(PATIENCE)
    source.close(pool)


def test_who_expects_an_answer_reads_it_and_nobody_else_is_woken(
    parted: tuple[_Parted, Pool, Reading, list[threading.Thread]],
) -> None:
    source, pool, reading, takers = parted
    pool.monitor.laid = lambda token: None  # type: ignore[method-assign]  # however slow this machine is
    takers.clear()
    watch, disarmed = source.watch, list[None]()
    assert watch is not None
    disarm = watch.disarm
    watch.disarm = lambda: disarmed.append(disarm())  # type: ignore[method-assign]
    reading.expect()
    source.there.send(b".")
    assert watch.readable(PATIENCE) and watch._armed.poll(0) == [], "it wakes who stands by"
    reading.read_while(lambda: not takers)
    assert takers == [threading.current_thread()] and reading._guarded
    assert len(disarmed) == 1, "once is enough"
    assert source.beside.told[-4:] == ["expect", "stay", "rise", "expected"]


def test_an_answer_for_which_nobody_comes_is_read_by_who_stands_by(
    parted: tuple[_Parted, Pool, Reading, list[threading.Thread]],
) -> None:
    source, _, reading, takers = parted
    takers.clear()
    reading.expect()
    source.there.send(b".")
    until(lambda: len(takers) == 1, "the answer")
    assert takers != [threading.current_thread()]
    assert source.beside.freed.wait(PATIENCE), "it is still bound"


def test_who_stands_by_may_take_what_another_thread_expects(
    parted: tuple[_Parted, Pool, Reading, list[threading.Thread]],
) -> None:
    """It was woken before: by an end, say, which wakes it also while it is not to be woken."""
    source, pool, reading, _ = parted
    pool.monitor._closed = True  # so it hands nothing over
    reading.expect()
    assert pool.monitor._since
    source.there.shutdown(socket.SHUT_RDWR)
    assert source.ended.wait(PATIENCE)
    assert not pool.monitor._since, "the monitor would ring for it for ever"
    until(lambda: source.beside.told[-1] == "expected", "nobody expects anything of it")
    pool.monitor._closed = False


@pytest.mark.parametrize("fails", ["the alarm", "a thread"])
def test_where_no_thread_can_be_started_the_token_is_not_lost(
    fails: str, parted: tuple[_Parted, Pool, Reading, list[threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, pool, reading, takers = parted
    takers.clear()

    def none(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if fails == "the alarm":
            patch.setattr(pool.monitor, "_spawn", none)
            patch.setattr(pool.monitor, "_alarm", None)
            with pytest.raises(RuntimeError, match="new thread"):
                reading.expect()
        else:
            patch.setattr(pool, "spawn", none)
            assert reading._token.acquire(timeout=PATIENCE)
            with pytest.raises(RuntimeError, match="new thread"):
                reading._pass_on()
    reading.read_while(lambda: False)  # whoever has the token next puts it where it belongs
    source.there.send(b".")
    until(lambda: len(takers) == 1, "the message")


class _Program:
    """Makes calls, each of which takes the bench ten seconds by a clock of its own."""

    def __init__(self) -> None:
        self.habit, self.now = _Habit(), 0.0

    def call(self, sync: bool = False) -> bool:
        """Whether its answer is expected."""
        expected = self.habit.begins(self.now, sync)
        self.now += 10.0
        self.habit.begun(self.now)
        if sync:
            self.wait()
        return expected

    def turn(self) -> bool:
        """As a call that says so, by the short way."""
        if self.habit.left:
            self.habit.asks(self.now)
        self.now += 10.0
        return True

    def works(self, seconds: float) -> None:
        self.now += seconds

    def wait(self) -> None:
        self.habit.waits(self.now)

    def calls(self, count: int) -> list[bool]:
        """Each waited for at once."""
        found = []
        for _ in range(count):
            found.append(self.call())
            self.wait()
        return found


def test_calls_that_are_waited_for_at_once_are_expected() -> None:
    program = _Program()
    assert program.calls(_OFTEN + 2) == [False] * _OFTEN + [True] * 2
    assert _Program().call(sync=True), "who says so need not show it"


def test_until_one_is_waited_for_late() -> None:
    program = _Program()
    program.calls(_OFTEN)
    assert program.call()
    program.works(_SOON * 2)
    program.wait()
    assert program.calls(_OFTEN + 1) == [False] * _OFTEN + [True]


@pytest.mark.parametrize("next_one", ["unsaid", "said", "turn"])
def test_or_not_at_all_and_then_not_for_longer(next_one: str) -> None:
    program = _Program()
    program.calls(_OFTEN)
    assert program.call(), "nobody could know"
    program.works(_SOON * 2)
    program.turn() if next_one == "turn" else program.call(next_one == "said")
    program.wait()
    late = PAUSE + _OFTEN - (next_one == "unsaid")
    assert program.calls(late + 1) == [False] * late + [True]


def test_several_calls_that_go_out_together_are_as_one() -> None:
    """A value that is made there, and fetched, is; a batch that takes its time is not."""
    program = _Program()
    program.calls(_OFTEN)
    for _ in range(5):
        assert program.call() and program.call(sync=True)
        assert program.call() and program.turn()
    for _ in range(5):
        program.call()
        program.works(_SOON / 4)
    program.wait()
    assert not program.call()


def test_calls_that_say_so_tell_nothing_of_others() -> None:
    program = _Program()
    for _ in range(_OFTEN * 2):
        program.call(sync=True)
    assert not program.call()


def test_a_call_that_makes_a_value_is_not_waited_for(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fetches the value waits for that; meanwhile both have work to do."""
    monkeypatch.setattr(asking, "_SOON", PATIENCE)  # however busy this machine is
    _settled(agents[0])
    habit = agents[0].asking._habits[1]
    until(lambda: rpc_async("worker1", echo, (1,)).wait() == 1 and habit._times >= _OFTEN, "the habit")
    expected: list[int] = []
    monkeypatch.setattr(agents[0].asking, "expect", expected.append)
    value = remote("worker1", echo, (7,))
    assert expected == []
    assert value.to_here() == 7
    expected.clear()  # what fetches expects an answer where the short way was taken
    rpc_async("worker1", echo, (8,)).wait()
    assert expected == [1], "the habit is there"


def test_an_answer_that_was_expected_reaches_who_asked_to_be_called(agents: list[Agent]) -> None:
    _settled(agents[0])
    for turn in range(3):
        for number in range(20):
            assert rpc_async("worker1", echo, (number,)).wait() == number
        told = threading.Event()
        rpc_async("worker1", echo, (turn,)).add_done_callback(lambda _, told=told: told.set())  # type: ignore[misc]
        assert told.wait(PATIENCE), "nobody has read the answer"


def test_who_stands_by_may_be_through_with_a_connection_before_it_is_watched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An end wakes who stands by whether the watch is armed or not."""
    source, pool = _Parted(), Pool("test", 2, lambda: None)
    pool.due = lambda: False
    reading = pool.read(source, lambda frame: None, source.over)
    assert source.asked.wait(PATIENCE)
    reading.read_while(lambda: False)
    source.there.send(b".")
    until(lambda: reading._guarded, "a thread that stands by")
    watch = source.watch
    assert watch is not None
    arm = watch.arm

    def too_late() -> None:
        source.there.close()
        assert source.ended.wait(PATIENCE), "nobody has read the end"
        source.close(pool)
        arm()

    monkeypatch.setattr(watch, "arm", too_late)
    reading.read_while(lambda: False)


def test_who_stands_by_sees_to_an_end_of_which_the_peer_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    source, pool = _Parted(), Pool("test", 2, lambda: None)
    pool.due = lambda: False
    reading = pool.read(source, source.receive, source.over)
    assert source.asked.wait(PATIENCE)
    reading.read_while(lambda: True)
    source.there.send(b".")
    until(lambda: reading._guarded, "a thread that stands by")
    source.fails = True

    def comes() -> bool:
        source.there.send(b".")
        return True

    reading.read_while(comes)
    assert source.ended.wait(PATIENCE), "nobody was woken"
    source.there.close()
    source.close(pool)


def test_what_a_reader_has_left_does_not_wait_for_a_user_who_reads() -> None:
    """Two messages at once; the first is a call that runs until the second has been handled."""
    source, pool = _Parted(), Pool("test", 4, lambda: None)
    pool.monitor.laid = lambda token: None  # type: ignore[method-assign]  # nobody else hands over
    source.frames = 2
    running, handled = threading.Event(), threading.Event()

    def call() -> None:
        running.set()
        assert handled.wait(PATIENCE)

    def receive(frame: Frame) -> None:
        if running.is_set():
            handled.set()
        else:
            pool.submit(call)

    def waits() -> bool:
        raise AssertionError("it must not wait for what comes while something lies ready")

    reading = pool.read(source, receive, source.over)
    source.there.send(b".")
    assert running.wait(PATIENCE)
    reading.read_while(waits)
    assert handled.wait(PATIENCE), "nobody sees to the second message"
    source.there.close()
    assert source.ended.wait(PATIENCE)
    source.close(pool)


def test_who_has_run_a_call_leaves_the_reading_to_the_one_who_stands_by(agents: list[Agent]) -> None:
    held.clear(), gate.clear()
    long = rpc_async("worker1", hold)
    until(lambda: bool(held), "the call")
    reading = _reading(agents[1])

    def stands_by() -> bool:
        with current.using(agents[1]):
            rpc_sync(0, echo, (0,))
        return reading._guarded

    until(stands_by, "another thread that stands by")
    gate.set()
    assert long.wait()
    (thread,) = held
    until(lambda: thread.lends is None, "the end of the call")
    assert thread.reads is None and reading._guarded


held: list[Any] = []
gate = threading.Event()


def hold() -> bool:
    held.append(threading.current_thread())
    return gate.wait(PATIENCE)
