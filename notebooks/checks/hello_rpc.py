"""Checks of lesson 01."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch

import rpcbench
import rpcbench.rpc as rpc
from checks import NotYet, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

PATIENCE = 2.0  # only a wrong answer needs it
LONG = 3600.0


@exercise(
    "One call asks one worker. The function to call there is `os.getpid`, which takes no arguments.",
    "A dict comprehension over `names` does it. Pass the function itself: `os.getpid`, without parentheses.",
)
def process_ids(answer: Callable[[Sequence[str]], dict[str, int]]) -> None:
    """`answer(names)` is the process id of each worker."""
    cluster = rpcbench.cluster()
    names = cluster.workers
    try:
        with trying("The function"):
            found = returned(answer(names))
    except NotYet as hint:
        without = " A call needs the function itself, without parentheses." if "TypeError" in str(hint) else ""
        raise NotYet(f"{hint}{without}") from None
    require(isinstance(found, dict), f"The answer should be a dict {{name: number}}, not {shown(found)}.")
    require(set(found) == set(names), f"The keys should be the names {names}, not {list(found)}.")
    _plain(found.values(), "dict")
    require(os.getpid() not in found.values(), "One of the numbers is that of this notebook: it was asked here.")
    wrong = [name for name, number in found.items() if number != cluster.pid(name)]
    require(not wrong, f"This is not the process of {' and '.join(wrong)}. Was each worker asked for its own?")
    require(set(answer(names[1:])) == set(names[1:]), f"For the names {names[1:]} it should ask only these workers.")
    back = names[::-1]
    with trying("The function"):
        found = returned(answer(back))
    mixed = [name for name in back if found.get(name) != cluster.pid(name)]
    require(not mixed, f"For the names {back} the numbers of {' and '.join(mixed)} are those of other workers.")
    right("Three processes, one world.")


@exercise(
    "Which of the three ways to call returns before the result is there? Begin all calls before you wait for one.",
    "Begin with a list of futures, one for each pair of `zip(workers, parts)`. A second loop waits for them in order.",
)
def at_once(answer: Callable[[Callable[[int], Any], Sequence[int], Sequence[str]], list[Any]]) -> None:
    """`answer(function, parts, workers)` makes all calls at the same time."""
    first, second = rpcbench.cluster().workers[:2]
    workers, parts = [second, first, second], [0, 1, 2]
    _meetings.append(Meeting(len(parts)))
    with trying("The function"):
        results = _listed(answer(partial(meet, len(_meetings) - 1), list(parts), list(workers)))
    _plain(results, "list")
    require(len(results) == len(parts), f"{len(parts)} parts should give {len(parts)} results, not {len(results)}.")
    require([part for part, _, _ in results] == parts, f"The results are those of the parts {[r[0] for r in results]}. "
            f"Each part once, in the order of the parts: {parts}.")  # fmt: skip
    went = [name for _, name, _ in results]
    require(went == workers, f"The parts should go to {workers}; they went to {went}.")
    require(
        all(met for _, _, met in results),
        "One call had ended before another one began, so they did not run at the same time.",
    )
    with trying("The function"):
        found = _listed(answer(negate, [4, 7], [second, first]))
    require(found == [-4, -7], f"With parts [4, 7] and a function that negates it is [-4, -7]; yours gave {found}.")
    try:
        with trying("The function"):
            found = _listed(answer(len, [(4, 5, 6), "ab"], [first, second]))
    except NotYet as hint:
        raise NotYet(f"One part was the tuple (4, 5, 6). It is one argument. {hint}") from None
    require(found == [3, 2], f"With parts [(4, 5, 6), 'ab'] and `len` it is [3, 2]; yours gave {shown(found)}.")
    with trying("With the parts [[5], [5]] it"):
        found = _listed(answer(taken_by, [[5], [5]], [second, first]))
    require(found == [second, first], "With the parts [[5], [5]] and a function that returns the name of its worker it "
            f"is {[second, first]}; yours gave {shown(found)}.")  # fmt: skip
    right("All of them worked at the same time.")


def _listed(results: Any) -> list[Any]:
    return read(results, [object], "The answer should be a list")  # type: ignore[no-any-return]


def _plain(values: Any, where: str) -> None:
    """No futures and no references among the values."""
    for value in values:
        require(
            not isinstance(value, torch.futures.Future), f"There are futures in the {where}: wait for their results."
        )
        require(not isinstance(value, rpc.RRef), f"There are RRefs in the {where}: their values are wanted.")


@exercise(
    "`rpc_sync` has an argument for this, and one kind of error tells that it has passed. Look at the deadlines above.",
    "Begin with `try: return rpc.rpc_sync(worker, function, timeout=seconds)`. Catch rpcbench's timeout error only.",
)
def patient(answer: Callable[[str, Callable[[], Any], float, Any], Any]) -> None:
    """`answer(worker, function, seconds, default)` gives up after a while, and for no other reason."""
    with _noted() as calls:
        quick = returned(_prompt(answer, "worker1", name_here, LONG, "default"))
    _meant(calls, LONG)
    require(quick == "worker1", f"A quick function returns 'worker1' on worker1; yours gave {shown(quick)}.")
    for value in (0, None, []):
        found = _prompt(answer, "worker2", partial(give, value), LONG, "default")
        require(found == value, f"A function that returns {value} has a result too; yours gave {shown(found)}.")
    before = rpc.rpc_sync("worker2", count)
    _prompt(answer, "worker2", count, LONG, "default")
    times = rpc.rpc_sync("worker2", count) - before - 1
    require(times == 1, f"The function was called {times} times. It should run once.")
    _held.append(threading.Event())
    late = partial(hold, len(_held) - 1)
    try:
        with _noted() as calls:
            slow = _prompt(answer, "worker1", late, 0.2, "default")
    finally:
        ended = len(_held) - 1 in _let_go
        _held[-1].set()
    waited = slow == "late" or ended
    require(not waited, "With 0.2 seconds it should give up, but it waited for the slow function to end.")
    _meant(calls, 0.2)
    times = sum(function is late for function, _ in calls)
    require(times <= 1, f"A function that takes too long was called {times} times. It should run once.")
    require(slow == "default", f"For a function that takes too long it should return the default, not {shown(slow)}.")
    _comes_through(answer, fail, RuntimeError("out of paper"))
    _comes_through(answer, fail_late, TimeoutError("the printer does not answer"))
    _comes_through(answer, fail_to_connect, ConnectionResetError("the printer hung up"))
    right("It waits as long as it should, and hides nothing.")


def _comes_through(answer: Callable[..., Any], function: Callable[[], Any], wanted: Exception) -> None:
    told = f"{type(wanted).__name__}('{wanted}')"
    try:
        hidden = _prompt(answer, "worker2", function, LONG, "default")
    except type(wanted) as error:
        require(str(error) == str(wanted), f"The function's own error is {told}, not {error}.")
    else:
        raise NotYet(f"The function itself raises {told}, and that was hidden: yours gave {shown(hidden)}.")


def _prompt(answer: Callable[..., Any], *args: Any) -> Any:
    """What the answer returns or raises. NotYet if it sleeps, or goes on waiting after the function has ended."""
    ends: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            ends.append((answer(*args), None))
        except BaseException as error:  # noqa: BLE001  (raised again below)
            ends.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    with _without_sleep(thread):
        thread.start()
        thread.join(4 * PATIENCE)
    require(ends, "The function on the worker has ended long ago, and your function still waits.")
    value, error = ends[0]
    if error is not None:
        raise error
    return value


@contextlib.contextmanager
def _noted() -> Iterator[list[tuple[Any, float | None]]]:
    """The functions that are called meanwhile, and the timeouts of these calls."""
    given: list[tuple[Any, float | None]] = []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(to: Any, func: Any, args: Any = None, kwargs: Any = None, timeout: float | None = None) -> Any:
            given.append((func, timeout))
            if timeout is None:
                return call(to, func, args, kwargs)
            return call(to, func, args, kwargs, timeout)

        return noted

    with contextlib.ExitStack() as patches:
        for name in ("rpc_sync", "rpc_async", "remote"):
            patches.enter_context(mock.patch.object(rpc, name, noting(getattr(rpc, name))))
        yield given


def _meant(calls: list[tuple[Any, float | None]], seconds: float) -> None:
    limits = [given for _, given in calls if given]  # 0 is none: the answer may count the seconds itself
    other = [given for given in limits if abs(given - seconds) > 0.05 * seconds]
    require(not other, f"With {seconds:g} seconds your call had a deadline of {other[0] if other else 0:.10g} seconds.")


@contextlib.contextmanager
def _without_sleep(thread: threading.Thread) -> Iterator[None]:
    """In this thread a sleep is an error."""
    sleep = time.sleep

    def guarded(seconds: float) -> None:
        waits = "It sleeps for a fixed time. A result that is there early should be returned early."
        require(threading.current_thread() is not thread, waits)
        sleep(seconds)

    with mock.patch.object(time, "sleep", guarded):
        yield


@exercise(
    "There are two cases: the request is in `account.answers`, or it is new. Both belong inside the lock.",
    "Begin with `with account.lock:` around everything, and `if request not in account.answers:` as its first line.",
)
def deposit(answer: Callable[[Any, int, float], Any]) -> None:
    """`answer(account, request, amount)` pays in once for each request."""
    account = Account(100)
    for request, amount, wanted, about in (
        (1, 50, 150, "a first request"),
        (2, 50, 200, "another request with the same amount"),
        (1, 50, 150, "request 1 again, which was answered 150"),
        (3, -200, 0, "a request that leaves nothing"),
        (3, -200, 0, "request 3 again, which was answered 0"),
        (2, 50, 200, "request 2 again, which was answered 200"),
        (2, 70, 200, "request 2 once more, which was answered 200"),
        (0, 30, 30, "the request with the number 0"),
        (0, 30, 30, "request 0 again, which was answered 30"),
    ):
        before = account.now()
        with trying("The function"):
            found = answer(account, request, amount)
        if about == "a first request":  # a later None is told with its case
            returned(found)
        told = f"deposit(account, {request}, {amount}), {about}: expected {wanted}, but yours returned {shown(found)}."
        repeated, after = "answered" in about, account.now()
        paid = " It was paid in once more." if repeated and after != before else ""
        latest = " That is the balance of now." if repeated and found == after else ""
        require(found == wanted, told + (paid or latest))
    require(account.now() == 30, f"After these requests the balance should be 30, and it is {account.now()}.")
    other = Account(0)
    with trying("The function"):
        found = answer(other, 1, 5)
    require(found == 5, f"Another account, with a balance of 0: its request 1, amount 5, gave {shown(found)}, not 5.")

    raced = Account(0)
    raced.lock.between = lambda: answer(raced, 7, 10)  # another thread, as soon as the lock is free
    with trying("The function"):
        answer(raced, 7, 10)
    require(raced.now() == 10, "The lock was free between two parts of your function, and the same request came on "
            f"another thread just then. An amount of 10 was paid in twice: the balance is {raced.now()}.")  # fmt: skip
    right("A caller may now repeat the call as often as it likes.")


# -- what the answers are tried with; functions run on workers, unless they say something else
class Meeting:
    """All calls of one answer meet; then the first one ends last."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.gone: set[int] = set()
        self.changed = threading.Condition()


_meetings: list[Meeting] = []  # one for each answer: calls of an earlier one may still run
_held: list[threading.Event] = []
_let_go: set[int] = set()  # of these, the functions that ended before the answer returned
_counted: list[int] = []


def arrive(meeting: int, part: int) -> bool:
    """Whether all calls had begun before this one ended. Runs in the notebook, which all workers can call."""
    here = _meetings[meeting]
    try:
        here.barrier.wait(PATIENCE)
    except threading.BrokenBarrierError:
        return False
    with here.changed:
        here.gone.add(part)
        here.changed.notify_all()
        if part == 0:
            here.changed.wait_for(lambda: len(here.gone) == here.barrier.parties, PATIENCE)
    if part == 0:
        time.sleep(0.1)  # the other results are on their way
    return True


def meet(meeting: int, part: int) -> tuple[int, str, bool]:
    return part, rpc.get_worker_info().name, rpc.rpc_sync("notebook", arrive, (meeting, part))


def negate(part: int) -> int:
    return -part


def name_here() -> str:
    return rpc.get_worker_info().name


def taken_by(_part: Any) -> str:
    return rpc.get_worker_info().name


def give(value: Any) -> Any:
    return value


def count() -> int:
    """How often this has been called before."""
    _counted.append(0)
    return len(_counted) - 1


def hold(number: int) -> str:
    rpc.rpc_sync("notebook", released, (number,))
    return "late"


def released(number: int) -> None:
    """Runs in the notebook, until the answer has returned."""
    if not _held[number].wait(1.5 * PATIENCE):
        _let_go.add(number)


def fail() -> None:
    raise RuntimeError("out of paper")


def fail_late() -> None:
    raise TimeoutError("the printer does not answer")


def fail_to_connect() -> None:
    raise ConnectionResetError("the printer hung up")


class Lock:
    """A lock that knows whether it is held. `between` runs once, when it is first free."""

    def __init__(self) -> None:
        self.held = False
        self.between: Callable[[], object] | None = None

    def __enter__(self) -> Lock:
        require(not self.held, "The lock is taken twice by one thread, which then waits for itself for ever.")
        self.held = True
        return self

    def __exit__(self, *error: object) -> None:
        self.held = False
        run, self.between = self.between, None
        if run is not None:
            run()

    def acquire(self) -> bool:
        self.__enter__()
        return True

    def release(self) -> None:
        self.__exit__()


class Account:
    """An account that is read and changed inside its lock only."""

    def __init__(self, balance: float) -> None:
        self.lock = Lock()
        self._balance = balance
        self._answers: dict[int, float] = {}

    def now(self) -> float:
        return self._balance

    @property
    def balance(self) -> float:
        self._inside("balance")
        return self._balance

    @balance.setter
    def balance(self, value: float) -> None:
        self._inside("balance")
        self._balance = value

    @property
    def answers(self) -> dict[int, float]:
        self._inside("answers")
        return self._answers

    @answers.setter
    def answers(self, value: dict[int, float]) -> None:
        self._inside("answers")
        self._answers = value

    def _inside(self, name: str) -> None:
        require(self.lock.held, f"`account.{name}` is used outside of the lock, where other threads may change it.")
