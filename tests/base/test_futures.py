from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rpcbench.base.errors import CallCancelled
from rpcbench.base.futures import Future, collect_all, make_future, wait_all


def here(job: Callable[[], None]) -> None:
    job()


def fail(error: Exception) -> Callable[[], Any]:
    def answer() -> None:
        raise error

    return answer


def test_a_waiting_thread_opens_the_answer_itself() -> None:
    future: Future[threading.Thread] = Future()
    later: list[Any] = []
    waiter = threading.Thread(target=future.wait)
    waiter.start()
    while not future._waiters:
        pass
    assert future.deliver_answer(threading.current_thread, later.append)
    waiter.join(10)
    assert future.value() is waiter and later == []


def test_a_waiting_thread_calls_help_along_once_and_then_sleeps() -> None:
    helped: list[bool] = []
    timer = threading.Timer(0.05, lambda: future.deliver_answer(lambda: 3, here))

    def help_along(waits: Callable[[], bool]) -> None:
        helped.append(waits())
        timer.start()

    future: Future[int] = make_future(help_along=help_along)
    assert future.wait() == 3 and helped == [True]
    timer.join()


def test_an_answer_that_help_along_delivers_ends_the_wait() -> None:
    future: Future[int] = make_future(help_along=lambda waits: future.deliver_answer(lambda: 3, here))
    assert future.wait() == 3


def test_an_answer_without_a_waiting_thread_is_opened_by_another_one() -> None:
    future: Future[int] = Future()
    later: list[Callable[[], None]] = []
    future.deliver_answer(lambda: 3, later.append)
    assert not future.done()
    later[0]()
    assert future.done() and future.wait() == 3


def test_a_future_keeps_its_first_answer() -> None:
    future: Future[int] = Future()
    assert future.deliver_answer(lambda: 1, here) and not future.deliver_answer(lambda: 2, here)
    assert future.wait() == 1
    with pytest.raises(RuntimeError, match="completed Future"):
        future.set_result(4)


def test_an_answer_with_many_waiting_threads_is_opened_once() -> None:
    future: Future[int] = Future()
    opened: list[int] = []
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(future.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    future.deliver_answer(lambda: opened.append(1) or 5, here)
    for thread in threads:
        thread.join(10)
    assert found == [5] * 8 and opened == [1]


def test_continuations_get_the_value_or_the_error() -> None:
    future: Future[int] = Future()
    plus = future.then(lambda done: done.wait() + 1)
    future.deliver_answer(lambda: 3, here)
    assert plus.wait() == 4
    failing: Future[int] = Future()
    seen: list[Exception] = []

    def look(done: Any) -> None:
        try:
            done.value()
        except Exception as error:
            seen.append(error)

    failing.add_done_callback(look)
    failing.deliver_answer(fail(KeyError("k")), here)
    assert [type(error) for error in seen] == [KeyError]


def test_a_chained_future_is_cancelled_and_completed_with_its_source() -> None:
    asked: list[int] = []
    future: Future[int] = make_future(on_cancel=lambda: asked.append(1) or True)
    chained = future.then(lambda done: done.value() + 1).then(lambda done: done.value() * 10)
    assert isinstance(chained, Future) and not chained.done()
    assert chained.cancel() and asked == [1], "cancelling it cancels its source"
    future.deliver_answer(lambda: 3, here)
    assert chained.wait() == 40 and not chained.cancel()
    assert future.then(lambda done: done.value() + 4).value() == 7, "a continuation of a done future runs at once"


class Full(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def refuse(_done: Any) -> None:
    raise Full(7, "no room")


def wrong_type(_done: Any) -> None:
    raise TypeError("a number is needed")


@pytest.mark.parametrize(
    ("set_it", "callback"),
    [
        (lambda future: future.set_result(1), refuse),
        (lambda future: future.set_exception(Full(7, "no room")), lambda done: done.wait()),
        (lambda future: future.set_exception(Full(7, "no room")), lambda done: done.value()),
    ],
)
def test_an_error_keeps_its_type_through_continuations(set_it: Any, callback: Any) -> None:
    future: Future[int] = Future()
    chained = future.then(callback)
    later = chained.then(lambda done: done.value())
    set_it(future)
    for each in (chained, later):
        with pytest.raises(Full, match=r"^no room$") as caught:
            each.wait()
        assert caught.value.code == 7


def test_a_continuation_that_takes_no_future_has_the_message_of_torch() -> None:
    future: Future[int] = Future()
    failing = [future.then(callback) for callback in (lambda: 1, lambda done: done + 1, wrong_type)]
    later = failing[2].then(lambda done: done.value())
    future.set_result(1)
    for chained in (*failing, later):
        with pytest.raises(RuntimeError, match="error when running the callback: TypeError") as caught:
            chained.wait()
        assert isinstance(caught.value.__cause__, TypeError)
    passed: Future[int] = Future()
    passing = passed.then(lambda done: done.wait())
    passed.set_exception(TypeError("of the call"))
    with pytest.raises(TypeError, match="of the call"):
        passing.wait()


def test_an_error_of_a_continuation_keeps_no_frames() -> None:
    class Held: ...

    held = Held()
    gone = weakref.ref(held)

    def raises(_done: Any, kept: Any = held) -> None:
        inside = kept  # noqa: F841  (the frame has it)
        try:
            raise KeyError("first")
        except KeyError:
            refuse(None)

    future: Future[int] = Future()
    chained = future.then(raises)
    future.set_result(1)
    with contextlib.suppress(Full):
        chained.wait()
    del held, raises
    assert gone() is None


def test_functions_of_torch_accept_the_futures() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    every = torch.futures.collect_all(futures)
    for number, future in enumerate(futures):
        future.set_result(number)
    assert [future.wait() for future in every.wait()] == [0, 1]
    assert torch.futures.wait_all(futures) == [0, 1] == wait_all(futures)
    assert collect_all([]).wait() == []


def test_wait_all_raises_the_first_error() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    futures[0].set_result(1)
    futures[1].set_exception(ValueError("second"))
    with pytest.raises(ValueError, match="second"):
        wait_all(futures)


def test_a_signal_ends_the_wait_and_not_the_future() -> None:
    future: Future[int] = Future()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without this handler

    def interrupt() -> None:
        while not future._waiters:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt).start()
            future.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    future.deliver_answer(lambda: 7, here)
    assert future.done(), "the interrupted thread is no longer expected to open it"
    assert future.wait() == 7


def test_a_pool_thread_reports_its_wait_to_the_pool() -> None:
    told: list[str] = []

    class PoolThread(threading.Thread):
        @contextlib.contextmanager
        def waiting(self) -> Iterator[None]:
            told.append("begins")
            yield
            told.append("ends")

    future: Future[int] = Future()
    thread = PoolThread(target=future.wait)
    thread.start()
    while not told:
        pass
    future.deliver_answer(lambda: 1, here)
    thread.join(10)
    assert told == ["begins", "ends"]


def _never(job: Callable[[], None]) -> None:
    raise AssertionError("a thread waits for it")


@pytest.mark.parametrize("lazy", [False, True])
def test_a_waiting_thread_that_delivers_the_answer_itself_opens_it(lazy: bool) -> None:
    opened: list[threading.Thread] = []

    def answer() -> int:
        opened.append(threading.current_thread())
        return 7

    future: Future[int] = make_future(help_along=lambda waiting: future.deliver_answer(answer, _never, lazy))
    assert future.wait() == 7 and opened == [threading.current_thread()]


def test_an_answer_is_opened_even_if_an_interrupt_ends_help_along() -> None:
    """The answer may contain RRefs."""

    def interrupted(waiting: Callable[[], bool]) -> None:
        assert waiting()
        future.deliver_answer(lambda: 7, _never)
        assert not waiting()
        raise KeyboardInterrupt

    future: Future[int] = make_future(help_along=interrupted)
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert future.known_outcome() == (7, None)


def test_an_answer_is_opened_even_if_an_interrupt_comes_before_its_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opens, interrupts = Future._open_answer, iter([KeyboardInterrupt])

    def interrupted(self: Future[Any]) -> None:
        for interrupt in interrupts:
            raise interrupt
        opens(self)

    monkeypatch.setattr(Future, "_open_answer", interrupted)
    future: Future[int] = make_future(help_along=lambda waiting: future.deliver_answer(lambda: 7, _never))
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    assert future.known_outcome() == (7, None)


def test_one_of_two_waiting_threads_delivers_the_answer_for_both() -> None:
    helping, go = threading.Event(), threading.Event()

    def helps(waiting: Callable[[], bool]) -> None:
        if not helping.is_set():
            helping.set()
            assert go.wait(10)
            future.deliver_answer(lambda: 7, _never)

    future: Future[int] = make_future(help_along=helps)
    found: list[int] = []
    one, other = (threading.Thread(target=lambda: found.append(future.wait())) for _ in range(2))
    one.start()
    assert helping.wait(10)
    other.start()
    while not future._waiters:
        pass
    go.set()
    one.join(10), other.join(10)
    assert found == [7, 7]


def test_a_pool_thread_calls_help_along_before_and_after_it_reports_its_wait() -> None:
    told: list[str] = []

    class PoolThread(threading.Thread):
        @contextlib.contextmanager
        def waiting(self) -> Iterator[None]:
            told.append("waits")
            yield

    def helps(waiting: Callable[[], bool]) -> None:
        told.append("helps")
        if "waits" in told:
            future.deliver_answer(lambda: 1, here)

    future: Future[int] = make_future(help_along=helps)
    thread = PoolThread(target=future.wait)
    thread.start()
    thread.join(10)
    assert told == ["helps", "waits", "helps"]


def test_a_future_can_be_awaited() -> None:
    async def use() -> int:
        future: Future[int] = Future()
        threading.Timer(0.05, lambda: future.deliver_answer(lambda: 9, here)).start()
        return await future

    assert asyncio.run(use()) == 9


def test_a_future_can_be_cancelled_until_it_has_an_answer() -> None:
    asked: list[int] = []
    future: Future[int] = make_future(on_cancel=lambda: asked.append(1))
    assert future.cancel() and asked == [1]
    future.deliver_answer(fail(CallCancelled("given up")), here)
    with pytest.raises(CallCancelled):
        future.wait()
    assert not future.cancel()


def test_a_raised_error_keeps_no_local_variables_alive() -> None:
    class Held:
        pass

    def use() -> weakref.ref[Held]:
        held, future = Held(), Future[int]()
        future.add_done_callback(lambda done: held)
        future.deliver_answer(fail(ValueError("broken")), here)
        with contextlib.suppress(ValueError):
            future.wait()
        return weakref.ref(held)

    ref = use()
    gc.collect()
    assert ref() is None


def test_each_wait_raises_its_own_copy_of_the_error() -> None:
    future: Future[int] = Future()
    future.deliver_answer(fail(ValueError("broken")), here)
    raised = []
    for _ in range(2):
        with pytest.raises(ValueError, match="broken") as caught:
            future.wait()
        raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_a_lazy_answer_is_opened_by_the_first_thread_that_asks() -> None:
    def answered() -> Future[int]:
        future: Future[int] = Future()
        assert future.deliver_answer(lambda: 3, pytest.fail, lazy=True)
        return future

    assert answered().wait() == 3
    assert answered().done()
    assert answered().value() == 3
    assert answered().then(lambda done: done.value() + 1).wait() == 4
    assert torch.futures.collect_all([answered()]).wait()[0].value() == 3
    with pytest.warns((DeprecationWarning, FutureWarning)):  # the second from torch 2.14
        assert torch.jit.wait(answered()) == 3  # type: ignore[no-untyped-call]


def test_a_lazy_answer_with_a_callback_is_opened_by_another_thread() -> None:
    future: Future[int] = Future()
    seen: list[int] = []
    future.add_done_callback(lambda done: seen.append(done.value()))
    later: list[Callable[[], None]] = []
    future.deliver_answer(lambda: 3, later.append, lazy=True)
    assert seen == []
    later[0]()
    assert seen == [3]
