"""Checks of lesson 17."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from checks import NotYet, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.interleaving import TOGETHER, Call, interleaved
from rpcbench.base.errors import ConnectionLostError, RpcError, RpcTimeoutError, UnknownWorkerError, WorkerLostError

MOST = 50
PATIENCE = 3.0
Event = tuple[str, str, str | None]


class Enough(BaseException):
    """The answer makes its call again and again; no `except Exception` holds this up."""


class Line:
    """A call that ends as the list says, one after the other: an error is raised, all else is its value."""

    def __init__(self, *ends: Any) -> None:
        self._ends = ends
        self.made = 0

    def __call__(self) -> Any:
        self.made += 1
        if self.made > MOST:
            raise Enough
        end = self._ends[min(self.made, len(self._ends)) - 1]
        if isinstance(end, Exception):
            raise end
        return end


@exercise(
    "The error of a lost call has `maybe_executed`. For which of its values does a second call do no harm?",
    "A loop without an end: `try` to return the call; `except rpcbench.ConnectionLostError as error`, decide.",
)
def insist(answer: Callable[[Callable[[], Any]], Any]) -> None:
    """`answer(call)` makes a call again that was lost and has certainly not run."""
    for result in (7, 0, None):
        value = _tried(answer, Line(result))
        if result == 7:
            value = returned(value)
        require(value == result, f"A call that went well returned {result}, and the function {shown(value)}.")
    lost, perhaps = ConnectionLostError("lost", False), ConnectionLostError("lost", True)
    for times in (1, 3, 18, 40):
        line = Line(*[lost] * times, 7)
        value = _tried(answer, line)
        again = {1: "once", 3: "three times"}.get(times, f"{times} times")
        require(value == 7, f"A call was lost {again} before it ran, and would have gone well then. It was given up.")
        require(line.made == times + 1, f"A call was lost {again}, then it went well; it was made {line.made} times.")
    line = Line(perhaps, 7)
    _tried(answer, line)
    require(line.made == 1, "The answer was lost, so the call may have run; it was made again, and may run twice.")
    require(
        _tried(answer, Line(perhaps)) is perhaps, "A call may have run, and the caller is not told that it was lost."
    )
    out = _tried(answer, Line(lost, perhaps, 7))
    require(out is perhaps, "A call was lost before it ran; the next one may have run. It was not let out.")
    for late in (RpcTimeoutError("no answer in 5 s"), WorkerLostError("worker1 was lost")):
        line = Line(late, 7)
        out, name = _tried(answer, line), type(late).__name__
        require(line.made == 1, f"After {name} the call was made again. It may have run, and may run twice.")
        require(out is late, f"A call ended with {name}, and the caller is not told.")
    wrong = ValueError("of the function")
    out = _tried(answer, Line(wrong, 7))
    require(out is wrong, "The function itself raised ValueError. That is no lost message: let it out.")
    unknown = UnknownWorkerError("could not find destination name worker9")
    line = Line(unknown, 7)
    out = _tried(answer, line)
    require(out is unknown and line.made == 1, f"A call ended with UnknownWorkerError, and it was made {line.made} "
            f"times; then {shown(out)} came. No message was lost: let the error out.")  # fmt: skip
    right("What has not run is made again; what may have run is reported.")


def _tried(answer: Callable[[Callable[[], Any]], Any], line: Line) -> Any:
    """What it returns, or the error of the call that it lets out."""
    try:
        with trying("The function"):
            try:
                return answer(line)
            except (RpcError, ValueError) as error:
                return error
    except Enough:
        raise NotYet(f"The same call was made {MOST} times, and it would go on.") from None


@exercise(
    "Two dicts hold all that is needed: the counter of each member, and the number that each message carries.",
    "For each event: if it receives, set the counter to the larger of itself and the message's number; then add 1; "
    "if it sends, keep the number for the message.",
)
def lamport(answer: Callable[[list[Event]], list[int]]) -> None:
    """`answer(events)` numbers events by Lamport's clocks."""
    stories = [
        [("work", "a", None), ("work", "a", None), ("work", "b", None)],
        [("send", "a", "m"), ("work", "a", None), ("work", "a", None), ("receive", "b", "m")],
        [("work", "a", None), ("work", "a", None), ("send", "a", "m"), ("receive", "b", "m"), ("work", "b", None)],
        [("send", "a", "m"), ("work", "b", None), ("work", "b", None), ("work", "b", None), ("receive", "b", "m")],
        [("send", "a", "m"), ("send", "a", "n"), ("receive", "b", "n"), ("receive", "b", "m"), ("send", "b", "k"),
         ("receive", "a", "k")],
        [],
        *(_random_story(seed) for seed in range(8)),
    ]  # fmt: skip
    for events in stories:
        given = list(events)
        with trying():
            found = returned(answer(given))
        require(given == events, "It changes the list of events that it was given.")
        found = read(found, [int], "The answer should be a list of whole numbers")
        require(len(found) == len(events), f"{len(events)} events need as many numbers, not {len(found)}.")
        wanted = _clocks(events)
        told = ", ".join(f"{who} {_told(what, message)}" for what, who, message in events)
        require(found == wanted, f"For “{told}” the numbers are {wanted}; yours gave {shown(found)}.")
    right("Whatever happened before has a smaller number; the converse does not hold.")


def _told(what: str, message: str | None) -> str:
    return f"{what}s {message}" if message else what + "s"


def _clocks(events: list[Event]) -> list[int]:
    counters: dict[str, int] = {}
    carried: dict[str | None, int] = {}
    found = []
    for what, member, message in events:
        seen = carried[message] if what == "receive" else 0
        counters[member] = max(counters.get(member, 0), seen) + 1
        if what == "send":
            carried[message] = counters[member]
        found.append(counters[member])
    return found


def _random_story(seed: int) -> list[Event]:
    made, on_the_way = random.Random(seed), []
    events: list[Event] = []
    for number in range(10):
        if on_the_way and made.random() < 0.5:
            message = on_the_way.pop(made.randrange(len(on_the_way)))
            others = [member for member in "abc" if member != message[0]]
            events.append(("receive", made.choice(others), message[1]))
        else:
            member = made.choice("abc")
            on_the_way.append((member, f"m{number}"))
            events.append(("send", member, f"m{number}"))
    return events


ERROR = ValueError("only a value")


class Work:
    """A function that counts its runs. It waits in a run with the argument "long" until it is told to go on."""

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.runs.append(args)
        if args == ("long",):
            self.began.set()
            self.go_on.wait(2 * PATIENCE)
        if args == ("bad",):
            raise ValueError("bad order")
        if args == ("error",):
            return ERROR
        return None if args == ("nothing",) else [*args, len(self.runs)]


class Caller:
    """One call on a thread of its own."""

    def __init__(self, once: Any, *args: Any) -> None:
        self.end: Any = NotYet
        self._args = (once, *args)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        once, *args = self._args
        try:
            self.end = once.call(*args)
        except Exception as error:  # noqa: BLE001  (an error is an answer)
            self.end = error

    def over(self, seconds: float = PATIENCE) -> bool:
        self.thread.join(seconds)
        return not self.thread.is_alive()


@exercise(
    "A later call must find that the first one is running, so something has to stand there before the function runs.",
    "Keep a future for each ticket, in a dict, under a lock. The call that puts it there runs the function, without "
    "the lock, and sets its result or its exception; all calls wait for it.",
)
def once(answer: Any) -> None:
    """`answer(function).call(ticket, *args)` runs the function once for each ticket."""
    _one_by_one(answer)
    _at_the_same_time(answer)
    _in_turns(answer)
    right("So a retry can do no harm: payment systems call the ticket an idempotency key.")


def _one_by_one(answer: Any) -> None:
    work = Work()
    with trying():
        once = answer(work)
        first = returned(once.call("t1", 5), once.call)
        again = once.call("t1", 5)
        runs = len(work.runs)
        other = once.call("t2", 5)
    require(first == [5, 1], f"The function returned [5, 1], and the first call {shown(first)}.")
    require(runs == 1, "A second call with the same ticket ran the function again.")
    require(again == first, f"A second call with the same ticket got {shown(again)}, not {shown(first)}.")
    require(other == [5, 2], f"Another ticket is another order, even with the same argument: {shown(other)} came.")
    with trying():
        nothing = [once.call("t3", "nothing"), once.call("t3", "nothing")]
        two = once.call("t4", 1, 2)
    require(nothing == [None, None] and work.runs.count(("nothing",)) == 1,
            "The function returned None. That is an answer, too, and it ran again.")  # fmt: skip
    with trying():
        same = once.call("t1", 6)
    require(same == first, f"A later call with the same ticket, but another argument, got {shown(same)}, not "
            f"{shown(first)}. The ticket alone says which order it is.")  # fmt: skip
    require(two == [1, 2, 4], f"With two arguments the function returned [1, 2, 4], and the call {shown(two)}.")
    told = "The function returned an error as its value, and did not raise it. A call with its ticket"
    with trying(told):
        values = [once.call("t6", "error"), once.call("t6", "error")]
    require(values == [ERROR, ERROR], f"{told} gave {shown(values)}.")
    for _ in range(2):
        caller = Caller(once, "t5", "bad")
        require(caller.over(), "The function raised an error, and a call with its ticket waits for ever.")
        end = caller.end
        require(isinstance(end, ValueError), f"The function raised ValueError, and a call gave {shown(end)}.")
    require(work.runs.count(("bad",)) == 1, "An error is an answer, too. The function ran again for the same ticket.")
    work = Work()
    with trying():
        require(answer(work).call("t1", 6) == [6, 1], "Two functions share their tickets: keep them in the object.")


def _at_the_same_time(answer: Any) -> None:
    work = Work()
    once = answer(work)
    first = Caller(once, "t1", "long")
    require(work.began.wait(PATIENCE), f"The first call did not run the function: it gave {shown(first.end)}.")
    second, other = Caller(once, "t1", "long"), Caller(once, "t2", 8)
    try:
        require(other.over(), "While the function runs for one ticket, a call with another ticket waits.")
        well = isinstance(other.end, list) and other.end[:1] == [8]
        require(well, f"While the function runs for one ticket, a call with another one gave {shown(other.end)}.")
        early = second.over(0.05) and work.runs.count(("long",)) == 1
        require(not early, f"While the function runs, a second call with its ticket gave {shown(second.end)} at once. "
                "It should wait.")  # fmt: skip
    finally:
        work.go_on.set()
    require(first.over() and second.over(), "The function has ended, and a call with its ticket still waits.")
    require(work.runs.count(("long",)) == 1, "A second call came while the first one ran, and the function ran twice.")
    require(first.end == second.end, f"Two calls with one ticket got {shown(first.end)} and {shown(second.end)}.")


def _in_turns(answer: Any) -> None:
    """Both calls run between each other's lines."""
    work, ends = Work(), []

    def calls() -> tuple[Call, Call]:
        nonlocal work
        work = Work()
        ends.clear()
        once = answer(work)
        return (lambda: ends.append(once.call("t1", 5)),) * 2

    for _ in interleaved(answer, calls):
        require(len(work.runs) == 1, f"{TOGETHER}, with one ticket, and the function ran twice. A lock is missing.")
        require(ends == [[5, 1]] * 2, f"{TOGETHER}, with one ticket, and got {shown(ends)}. A lock is missing.")
