"""Waiting for changes: none is missed, and Ctrl-C at any point of a wait leaves the condition usable."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from worlds import PATIENCE

from rpcbench.base import conditions
from rpcbench.base.conditions import Condition, Event
from rpcbench.base.futures import Future

TRACED = {conditions.__file__, threading.__file__, contextlib.__file__}


def spawn(job: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


def test_threads_wait_until_an_event_is_set() -> None:
    flag = Event()
    assert not flag.wait(0.01) and not flag.is_set()
    seen: queue.SimpleQueue[bool] = queue.SimpleQueue()
    waiting = [spawn(lambda: seen.put(flag.wait())) for _ in range(3)]
    flag.set()
    assert [seen.get(timeout=PATIENCE) for _ in waiting] == [True] * 3
    assert flag.wait() and flag.is_set()
    flag.clear()
    assert not flag.wait(0.0)
    assert flag._changes._wakeups == []


def test_a_change_during_a_look_is_not_missed() -> None:
    told = Condition()
    looks: list[bool] = []

    def reached() -> bool:
        looks.append(len(looks) == 2)
        told.notify_all()  # as another thread might, right after this look
        return looks[-1]

    assert told.wait_for(reached, PATIENCE) and looks == [False, False, True]


@pytest.mark.parametrize(
    "wait", [Event().wait, lambda: Event().wait(1e6), Future().wait], ids=["flag", "timed", "future"]
)
def test_a_signal_that_does_not_wake_the_main_thread_ends_its_wait(wait: Callable[[], object]) -> None:
    """Such a signal arrives just before the wait begins; `interrupt_main` never wakes the thread."""
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while sys._current_frames()[main].f_code is not conditions.acquire_lock.__code__:
            pass
        _thread.interrupt_main()

    thread = spawn(interrupt)
    with pytest.raises(KeyboardInterrupt):
        wait()
    thread.join(PATIENCE)


def test_a_wait_looks_once_more_at_its_timeout() -> None:
    looks = iter([False, True])
    assert Condition().wait_for(lambda: next(looks), 0.0)


def test_an_error_in_a_look_ends_the_wait() -> None:
    told = Condition()
    with pytest.raises(ZeroDivisionError):
        told.wait_for(lambda: 1 // 0 > 0)
    assert told._wakeups == []


def interrupted(at: int, job: Callable[[], object]) -> bool:
    """Run `job` with Ctrl-C at its `at`-th bytecode in the traced modules; False if it has fewer."""
    passed = itertools.count(1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(passed) == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 gives these events only where they were asked for earlier
    sys.settrace(trace)
    try:
        job()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_ctrl_c_at_any_point_of_a_wait_leaves_the_event_usable() -> None:
    for at in itertools.count(1):
        flag = Event()
        ended = not interrupted(at, lambda flag=flag: flag.wait(0.0))  # type: ignore[misc]
        seen: queue.SimpleQueue[bool] = queue.SimpleQueue()
        waiting = spawn(lambda flag=flag, seen=seen: seen.put(flag.wait(PATIENCE)))  # type: ignore[misc]
        setting = spawn(flag.set)
        setting.join(PATIENCE)
        assert not setting.is_alive(), f"an interrupt at bytecode {at} leaves the event locked"
        assert seen.get(timeout=2 * PATIENCE)
        waiting.join()
        if ended:
            break
    assert at > 50
