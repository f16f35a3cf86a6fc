"""Who takes turns waits on one core; nobody is bound while there may be something else to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from rpcbench.transport.beside import _PAUSE, MOMENT, Beside, _Thread, beside

KERNEL = 5
ALL, ONE = (0b1111).to_bytes(128, "little"), (0b0010).to_bytes(128, "little")


class Thread:
    """A thread of a system with four cores."""

    def __init__(self) -> None:
        self.at, self.mask, self.refuses = 1, ALL, False

    def core(self) -> int:
        return self.at

    def may(self) -> bytes | None:
        return self.mask

    def bind(self, mask: bytes, /) -> int:
        if self.refuses:
            return -1
        self.mask = mask
        return 0


class Side:
    """One end of a connection, and its clock."""

    def __init__(self, kernel: int = KERNEL) -> None:
        self.now = 0.0
        self.thread = Thread()
        self.beside = Beside(self.thread, kernel, lambda: self.now)

    def asks(self, other: Side) -> None:
        """As a caller that waits for the answer."""
        self.beside.expect()
        self.sends(other)
        self.beside.expected()

    def sends(self, other: Side, held: bool = False) -> None:
        other.beside.hears = self.beside.says(held)

    def pauses(self, other: Side) -> bool:
        """Whether its next calls are waited for as any others are, and only then beside it again."""
        found = []
        for _ in range(_PAUSE + 1):
            self.asks(other)
            found.append(other.waits(0.0))
        return found == [False] * _PAUSE + [True]

    def waits(self, seconds: float) -> bool:
        """As who answers; whether it waited where the caller does."""
        rests = self.beside.rest()
        if rests:
            self.beside.rise()
            self.beside.called(seconds < MOMENT)
        if not rests or seconds >= MOMENT:
            self.now += seconds
            self.beside.came()
        return rests


@pytest.fixture
def caller() -> Side:
    return Side()


@pytest.fixture
def callee() -> Side:
    return Side()


def test_who_answers_waits_where_its_caller_does(caller: Side, callee: Side) -> None:
    assert not callee.beside.rest(), "nobody has called"
    caller.asks(callee)
    assert callee.beside.rest() and callee.thread.mask == ONE
    callee.beside.rise()
    assert callee.thread.mask == ALL


def test_a_caller_sleeps_where_it_is(caller: Side, callee: Side) -> None:
    assert not caller.beside.stay(), "it expects nothing"
    caller.beside.expect()
    assert caller.thread.mask == ALL, "it still runs"
    caller.thread.at = 2
    assert caller.beside.stay() and caller.thread.mask == (0b0100).to_bytes(128, "little"), "where it is by now"
    caller.beside.rise()
    assert caller.thread.mask == ALL
    caller.beside.expected()
    assert not caller.beside.stay()


def test_another_thread_that_reads_meanwhile_stays_nowhere(caller: Side) -> None:
    caller.beside.expect()
    stayed: list[bool] = []
    _on_thread(lambda: stayed.append(caller.beside.stay()))
    assert stayed == [False] and caller.thread.mask == ALL


def test_who_does_not_come_to_wait_is_not_believed_for_a_while(caller: Side, callee: Side) -> None:
    caller.beside.expect()
    caller.sends(callee)
    _on_thread(caller.beside.in_vain)
    assert not caller.beside.stay()
    assert caller.pauses(callee)


def test_what_nobody_waits_for_ends_it_for_a_while(caller: Side, callee: Side) -> None:
    caller.asks(callee)
    caller.sends(callee)
    assert not callee.beside.rest(), "its caller may have other work to do there"
    assert caller.pauses(callee)


def test_so_does_what_another_thread_sends_meanwhile(caller: Side, callee: Side) -> None:
    caller.asks(callee)
    caller.beside.expect()
    _on_thread(lambda: caller.sends(callee))
    assert not callee.beside.rest()
    caller.beside.expected()
    caller.asks(callee)
    assert not callee.beside.rest()


def test_what_goes_with_the_next_message_changes_nothing(caller: Side, callee: Side) -> None:
    caller.asks(callee)
    caller.sends(callee, held=True)
    assert callee.waits(0.0)


def test_calls_that_come_slowly_are_not_waited_for_there(caller: Side, callee: Side) -> None:
    caller.asks(callee)
    assert [callee.waits(seconds) for seconds in (0.0, 1.0, 1.0, 1.0)] == [True, True, False, False]
    assert [callee.waits(seconds) for seconds in (MOMENT / 2, 0.0)] == [False, True], "and then quickly again"


@pytest.mark.parametrize("wrong", ["another kernel", "a core that it may not use", "no core of this system"])
def test_a_hint_that_means_nothing_here_is_none(caller: Side, wrong: str) -> None:
    callee = Side(KERNEL + 1 if wrong == "another kernel" else KERNEL)
    if wrong == "a core that it may not use":
        callee.thread.mask = (0b1101).to_bytes(128, "little")
    if wrong == "no core of this system":
        caller.thread.at = 700
    before = callee.thread.mask
    caller.asks(callee)
    assert not callee.beside.rest() and callee.thread.mask == before


@pytest.mark.parametrize("hint", [KERNEL << 10, (KERNEL << 10) | 1023, (1 << 32) - 1, 1])
def test_no_hint_that_can_come_does_harm(callee: Side, hint: int) -> None:
    callee.beside.hears = hint
    assert not callee.beside.rest() and callee.thread.mask == ALL


def test_where_the_system_refuses_they_sleep_as_before(caller: Side, callee: Side) -> None:
    caller.thread.refuses = callee.thread.refuses = True
    caller.asks(callee)
    assert callee.beside.hears and not callee.beside.rest()
    caller.beside.expect()
    assert not caller.beside.stay()


def _on_thread(job: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert failed == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads")
def test_it_is_the_thread_that_asks_which_is_bound() -> None:
    everywhere = os.sched_getaffinity(0)

    def bind() -> None:
        thread = _Thread()
        mask = thread.may()
        assert mask is not None and {core for core in range(1024) if mask[core >> 3] >> (core & 7) & 1} == everywhere
        assert thread.core() in everywhere
        core = max(everywhere)
        assert thread.bind((1 << core).to_bytes(128, "little")) == 0
        assert os.sched_getaffinity(0) == {core} and thread.core() == core
        assert thread.bind(bytes(128)) != 0, "nowhere"
        assert thread.bind(mask) == 0 and os.sched_getaffinity(0) == everywhere

    _on_thread(bind)
    assert os.sched_getaffinity(0) == everywhere


@pytest.mark.parametrize(("name", "value"), [("RPCBENCH_BESIDE", "0"), ("RPCBENCH_EAGER", "1")])
def test_the_user_may_want_none_of_it(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RPCBENCH_BESIDE", raising=False)
    monkeypatch.delenv("RPCBENCH_EAGER", raising=False)
    assert (beside() is not None) is hasattr(os, "sched_setaffinity")
    monkeypatch.setenv(name, value)
    assert beside() is None
