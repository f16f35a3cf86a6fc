"""A token that lies on the table for long finds a taker, whatever else goes on; short calls wake nobody."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from worlds import PATIENCE, until

from rpcbench.agent import alarm, monitor
from rpcbench.agent.alarm import Alarm
from rpcbench.agent.monitor import LONG, Monitor


@pytest.fixture(params=["timer", "sleeper"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sleeper":
        monkeypatch.setattr(alarm, "_Timer", alarm._Sleeper)
    return str(request.param)


class Token:
    """Handed over only where it still lies there, as the reader's is."""

    def __init__(self, table: Monitor) -> None:
        self.table = table
        self.taken_over = 0
        self.free = False
        self.lock = threading.Lock()

    def lay(self) -> None:
        with self.lock:
            self.table.laid(self)
            self.free = True

    def take(self) -> bool:
        with self.lock:  # until the table knows: whoever lays it next does so after that
            free, self.free = self.free, False
            if free:
                self.table.taken(self)
        return free

    def hand_over(self) -> None:
        self.taken_over += self.take()


class Counted:
    """An alarm that counts how often it has rung."""

    def __init__(self, real: Alarm) -> None:
        self.set, self.clear, self.close, self._wait = real.set, real.clear, real.close, real.wait
        self.rang = 0

    def wait(self) -> None:
        self._wait()
        self.rang += 1


@pytest.fixture
def bells(monkeypatch: pytest.MonkeyPatch) -> list[Counted]:
    made: list[Counted] = []

    def make() -> Alarm:
        made.append(Counted(alarm.alarm()))
        return made[-1]

    monkeypatch.setattr(monitor, "alarm", make)
    return made


@pytest.fixture
def table(system: str, bells: list[Counted]) -> Iterator[Monitor]:
    threads: list[threading.Thread] = []

    def spawn(job: Callable[[], object]) -> None:
        threads.append(threading.Thread(target=job))
        threads[-1].start()

    made = Monitor(spawn)
    yield made
    made.close()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_an_alarm_rings_once_at_the_time_last_set(system: str) -> None:
    bell = alarm.alarm()
    begun = time.monotonic()
    bell.set(0.02)
    bell.set(0.1)
    bell.wait()
    assert time.monotonic() - begun >= 0.1
    bell.set(PATIENCE * 10)
    bell.set(0.0)
    bell.wait()
    assert time.monotonic() - begun < PATIENCE
    bell.close()


def test_where_the_system_has_no_more_to_give_it_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        timerfd_settime = None

        def timerfd_create(self, *_: int) -> int:
            return -1

    monkeypatch.setattr(ctypes, "PyDLL", lambda *_, **__: Full())
    bell = alarm.alarm()
    assert isinstance(bell, alarm._Sleeper)


def test_what_lies_for_long_is_handed_over_once(table: Monitor) -> None:
    token = Token(table)
    for turn in range(3):
        token.lay()
        until(lambda turn=turn: token.taken_over == turn + 1)  # type: ignore[misc]


def test_what_is_taken_in_time_is_not(table: Monitor, bells: list[Counted]) -> None:
    quick, slow = Token(table), Token(table)
    quick.lay()
    assert quick.take()
    slow.lay()
    until(lambda: slow.taken_over == 1)
    assert quick.taken_over == 0


def test_short_calls_wake_nobody(table: Monitor, bells: list[Counted], system: str) -> None:
    """Each puts the alarm off; only one that was late, as on a machine with other work, lets it ring."""
    token, late, laid = Token(table), 0, 0.0
    for _ in range(2000):
        now = time.monotonic()
        late += now - laid > LONG / 2
        laid = now
        token.lay()
        token.take()
    assert bells[0].rang <= late


def test_what_lies_beside_others_that_come_and_go_is_handed_over(table: Monitor) -> None:
    """Also where it came second, and never was alone."""
    busy, waits = Token(table), Token(table)
    for lay_first in (busy, waits):
        before, until_then = waits.taken_over, time.monotonic() + PATIENCE
        lay_first.lay()
        (waits if lay_first is busy else busy).lay()
        while waits.taken_over == before and time.monotonic() < until_then:
            busy.take()
            busy.lay()
        assert waits.taken_over == before + 1
        busy.take()


def test_the_alarm_is_put_off_only_by_one_that_lies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now, rings = 0.0, [0.0]

    class Bell:
        def set(self, seconds: float) -> None:
            rings.append(now + seconds)

        def clear(self) -> None:
            rings.append(0.0)

    monkeypatch.setattr(monitor, "alarm", Bell)
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now)
    made = Monitor(lambda job: None)
    first, second = Token(made), Token(made)
    for now in (1.0, 1.0 + LONG / 8, 1.0 + LONG * 0.9):  # noqa: B007  (the clock: set, still right, put off)
        first.lay()
        assert first.take()
    assert rings == [0.0, 1.0 + LONG, 1.0 + LONG * 1.9]
    first.lay()
    now = 1.0 + LONG * 1.8
    second.lay()
    made.rest()
    assert rings[-1] == 1.0 + LONG * 1.9, "that of the first"
    first.take(), second.take()
    made.rest()
    made.rest()
    assert rings[-2:] == [1.0 + LONG * 1.9, 0.0], "nobody is to be woken for nothing"


def test_from_many_threads_none_is_forgotten(table: Monitor) -> None:
    tokens = [Token(table) for _ in range(8)]
    wrong: list[str] = []

    def work(token: Token) -> None:
        for turn in range(300):
            token.lay()
            if turn % 3:
                token.take()
                continue
            deadline = time.monotonic() + PATIENCE
            while token.free:
                if time.monotonic() > deadline:
                    wrong.append("forgotten")
                    return
                time.sleep(LONG / 10)

    threads = [threading.Thread(target=work, args=(token,)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_one_that_cannot_be_handed_over_does_not_end_the_watch(table: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", told.append)

    class Fails(Token):
        def hand_over(self) -> None:
            self.take()
            raise RuntimeError("can't start new thread")

    fails, token = Fails(table), Token(table)
    fails.lay()
    until(lambda: len(told) == 1, "a word about what happened")
    token.lay()
    until(lambda: token.taken_over == 1)


def test_an_alarm_that_nobody_would_hear_is_given_back(bells: list[Counted]) -> None:
    closed: list[bool] = []

    def none(job: object) -> None:
        bell, close = bells[-1], bells[-1].close
        bell.close = lambda: (close(), closed.append(True))  # type: ignore[func-returns-value]
        raise RuntimeError("can't start new thread")

    made = Monitor(none)
    for turn in range(2):
        with pytest.raises(RuntimeError):
            Token(made).lay()
        made._since.clear()
        assert len(closed) == turn + 1, "and the next one tries again"


def test_once_closed_it_keeps_nothing(bells: list[Counted]) -> None:
    spawned: list[Callable[[], object]] = []
    made = Monitor(spawned.append)
    made.close()
    Token(made).lay()
    assert not spawned and not bells
