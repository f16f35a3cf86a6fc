"""Checks of lesson 02."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rpcbench
from checks import NotYet, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution

ONLY_ON = "import rpcbench.rpc as rpc\nif rpc.get_worker_info().name == {name!r}:\n    {deed}"
DIES = """
import os, pathlib, signal
tries = pathlib.Path({tries!r})
tries.write_text(tries.read_text() + "x")
if len(tries.read_text()) <= {deaths}:
    os.kill(os.getpid(), signal.SIGKILL)
kept * 2
"""
TALLY = "tally = [*tally, len(tally)]"
QUIET = 1.0  # seconds without anything new: only a wrong answer needs it


@exercise(
    "`cluster.run` takes the workers, the code, and the names of the variables that are wanted.",
    '`cluster.run("all", "a = 1; b = 2", want=["a", "b"])` returned a dict: first the name, then the worker.',
)
def everywhere(answer: Callable[[str, str], dict[str, Any]]) -> None:
    """`answer(code, name)` is the value of a variable on each worker after a cell has run there."""
    cluster = rpcbench.cluster()
    names = cluster.workers
    for code, name, value in (
        ("x = 6 * 7", "x", 42),
        ("x = []  # nothing so far", "x", []),
        ("total = 0\nfor k in range(4):\n    total += k", "total", 6),
    ):
        with trying(f"Your function, with the cell {code!r},"):
            found = returned(answer(code, name))
        told = f"After the cell {code!r} {name} is {value} on each worker, and yours gave {shown(found)}."
        require(isinstance(found, dict), f"The answer should be a dict {{worker: value}}, not {shown(found)}.")
        require(set(found) == set(names), f"{told} The keys should be the workers, {names}.")
        nothing = all(each is None for each in found.values())
        require(not nothing, f"{told} {_why_none(answer, code)}")
        require(found == dict.fromkeys(names, value), told)
    with trying("The function"):
        pids = answer("import os\nmine = os.getpid()", "mine")
    require(os.getpid() not in pids.values(), "The cell has run in this notebook, not on the workers.")
    wanted = {name: cluster.pid(name) for name in names}
    require(pids == wanted, f"A cell that finds the process number gives {wanted}, and yours gave {shown(pids)}.")
    _runs_once(lambda: answer(TALLY, "tally"))
    right("One cell, as many values as there are workers.")


def _why_none(answer: Callable[[str, str], dict[str, Any]], code: str) -> str:
    """Return why the answer finds None after this cell."""
    if "#" not in code:
        return "None is what a cell ends with that only assigns."
    with trying("The function"):
        again = answer("x = 5  # five", "x")
    commented = isinstance(again, dict) and set(again.values()) == {None}
    return ("This cell ends with a comment, and what is put behind it on the same line is part of the comment."
            if commented else "An empty list is a value, too.")  # fmt: skip


def _runs_once(run: Callable[[], object], what: str = "The cell", names: Sequence[str] = ()) -> None:
    """With the cell TALLY, on these workers; by default on all."""
    cluster = rpcbench.cluster()
    cluster.run("all", "tally = []")
    with trying("The function"):
        run()
    for name in names or cluster.workers:
        times = cluster.run(name, "len(tally)")
        require(times == 1, f"{what} ran {times} times on {name}. It should run once.")


@exercise(
    "One `cluster.run` for all workers raises one error. How can each worker have an outcome of its own?",
    "Begin with `found = {}` and `for worker in cluster.workers:`; inside, `try` to run the cell on this one worker.",
)
def outcomes(answer: Callable[[str], dict[str, str]]) -> None:
    """`answer(code)` says how the cell ended on each worker."""
    names = rpcbench.cluster().workers
    fine = dict.fromkeys(names, "fine")
    _compare(answer, "y = 1", fine)
    _compare(answer, "1 / 0", dict.fromkeys(names, "ZeroDivisionError"))
    _compare(answer, ONLY_ON.format(name="worker2", deed="{}['lost']"), {**fine, "worker2": "KeyError"})
    _compare(answer, ONLY_ON.format(name="worker1", deed="int('two')"), {**fine, "worker1": "ValueError"})
    _runs_once(lambda: answer(TALLY))
    torn = ONLY_ON.format(name="worker1", deed="[][1]") + "\n{}['lost']"
    wanted = {name: "IndexError" if name == "worker1" else "KeyError" for name in names}
    _runs_once(lambda: _compare(answer, f"{TALLY}\n{torn}", wanted), "A cell that fails")
    right("Each worker has an outcome of its own, and each error its own type.")


def _compare(answer: Callable[[str], dict[str, str]], code: str, wanted: dict[str, str]) -> None:
    with trying(f"Your function, with the cell {code!r},"):
        found = returned(answer(code))
    require(isinstance(found, dict), f"The answer should be a dict {{worker: text}}, not {shown(found)}.")
    require(set(found) == set(wanted), f"The keys should be the workers, {list(wanted)}; yours are {list(found)}.")
    texts = all(isinstance(value, str) for value in found.values())
    require(texts, f"The values should be texts, such as 'KeyError', not {shown(list(found.values())[-1])}.")
    alike = len(set(found.values())) < len(set(wanted.values()))
    why = (
        " The name of the error's class is wanted, not its text."
        if any(not value.isidentifier() for value in found.values())
        else " Each worker has an outcome of its own." if alike else ""
    )  # fmt: skip
    require(found == wanted, f"For the cell {code!r} it is {wanted}, and yours gave {found}.{why}")


@exercise(
    "A lost worker raises an error of its own type, and `cluster.restart` can run the old cells again: see above.",
    "Begin with `try: return cluster.run(worker, code)` and `except rpcbench.WorkerLostError:`.",
)
def stubborn(answer: Callable[[str, str], Any]) -> None:
    """`answer(worker, code)` runs a cell, once more if the worker dies meanwhile."""
    cluster = rpcbench.cluster()
    with trying("The function"):
        found = returned(answer("worker1", "6 * 7"))
    require(found == 42, f"The cell ends with the value 42, and yours gave {shown(found)}.")
    _runs_once(lambda: answer("worker1", TALLY), names=["worker1"])
    try:
        before = cluster.pid("worker1")
        fails = f"{TALLY}\n1 / 0"
        _runs_once(lambda: _comes_through(answer, fails, ZeroDivisionError), "A cell that fails", ["worker1"])
        _comes_through(answer, 'rpc.rpc_sync("worker9", min, (1, 2))', rpcbench.UnknownWorkerError)
        same = cluster.pid("worker1") == before
        require(same, "worker1 was started again, though it had not died: the cell has an error of its own.")
        _dies(answer, 1)
        _dies(answer, 2)
    finally:
        for name in {"worker1", "worker2"} - set(cluster.workers):
            cluster.restart(name)
    right("A death costs a moment, and nothing else.")


def _comes_through(answer: Callable[[str, str], Any], code: str, error: type[Exception]) -> None:
    try:
        hidden = answer("worker1", code)
    except error:
        return
    except Exception as other:  # noqa: BLE001
        raise NotYet(f"The cell raises {error.__name__}, and yours raised {type(other).__name__}.") from None
    raise NotYet(f"The cell fails with {error.__name__}, and that was hidden: yours gave {shown(hidden)}.")


def _dies(answer: Callable[[str, str], Any], deaths: int) -> None:
    """The worker dies so many times in a cell."""
    cluster = rpcbench.cluster()
    if "worker2" not in cluster.workers:
        cluster.restart("worker2")
    cluster.run("worker2", "kept = 21")
    with tempfile.TemporaryDirectory() as place:
        tries = Path(place, "tries")
        tries.write_text("")
        code = DIES.format(tries=str(tries), deaths=deaths)
        try:
            found = answer("worker2", code)
        except (rpcbench.WorkerLostError, rpcbench.UnknownWorkerError):
            if deaths == 1:
                raise NotYet("worker2 was lost in the cell, and it was not started again.") from None
            ran = len(tries.read_text())
            require(ran == 2, f"worker2 died each time, and the cell ran {ran} times, not twice.")
            return
        except NameError as error:
            raise NotYet(f"{error}: the new process has nothing of what the old one held.") from None
        ran = len(tries.read_text())
    require(deaths == 1, f"worker2 died twice, and the error was hidden: the cell ran {ran} times, not twice.")
    require(found is not None, "worker2 is back, but the cell should be run again, and its value returned.")
    require(ran == 2, f"worker2 died once, and the cell ran {ran} times, not twice.")
    require(found == 42, f"The cell ends with 42, and yours gave {shown(found)}.")
    require("worker2" in cluster.workers, "worker2 was not started again: the cell ran elsewhere.")


@exercise(
    "No worker has items of its own. All threads take the next item from one place, such as a `queue.SimpleQueue`.",
    "Begin with `results = [None] * len(items)` and a function `serve(worker)` that takes pairs (place, item) until "
    "none is left, and writes `results[place]`. Run it on threads, once for each worker.",
)
def spread(answer: Callable[[Callable[[str, Any], Any], Sequence[Any], Sequence[str]], list[Any]]) -> None:
    """`answer(call, items, workers)` gives each free worker the next item."""
    three = ["worker1", "worker2", "worker3"]
    others = ["east", "west", "north", "south"]
    for items, workers in (
        ([0, 1, 2, 3, 4, 5, 6, 7], three), ([3, 3, 3, 3], three), ([8], three), ([], three),
        ([[1], [1], None, [], [1], 0, 7], others), ([5, 2], ["worker1"]),
    ):  # fmt: skip
        tasks = Tasks(items, workers)
        given = list(items), list(workers)
        with trying(f"With the items {items} and the workers {workers} it"):
            found = returned(answer(tasks.call, *given))
        where = f"With the items {items} and {_counted(workers)}"
        began = [items[place] for place in sorted(tasks.began)]
        require(sorted(tasks.began) == tasks.places, f"{where} there were calls for {began}: each item needs one.")
        require(not tasks.wrong, f"{where}: {tasks.wrong}")
        found = read(found, [object], f"{where}: the answer should be a list")
        wanted = [tasks.result(place) for place in range(len(items))]
        require(found == wanted, f"{where} the results are {wanted}, in the order of the items; yours are {found}.")
        require(given == (items, workers), f"{where}: the lists that the function was given have changed.")
    _error_comes_out(answer, three)
    right("So a slow item keeps one worker busy, and the others do the rest.")


def _error_comes_out(answer: Callable[..., Any], workers: Sequence[str]) -> None:
    """Where a call raises an error, so does the answer."""

    def call(worker: str, item: int) -> int:
        if item == 2:
            raise ValueError("item 2 is torn")
        return item * item

    try:
        found = answer(call, [0, 1, 2, 3], list(workers))
    except ValueError as error:
        require("item 2 is torn" in str(error), f"The call raises ValueError('item 2 is torn'), and yours {error!r}.")
    except Exception as other:  # noqa: BLE001
        raise NotYet(f"The call raises ValueError('item 2 is torn'), and yours raised {other!r}.") from None
    else:
        raise NotYet("The call for item 2 raised ValueError('item 2 is torn'), and that was hidden: yours returned "
                     f"{shown(found)}.")  # fmt: skip


def _counted(workers: Sequence[str]) -> str:
    return f"{('one', 'two', 'three', 'four')[len(workers) - 1]} worker{'s' * (len(workers) > 1)}"


class Tasks:
    """Calls that square numbers; of other items they name the place. The first takes until all others have ended.

    No call ends before all workers have an item, or all items have begun.
    """

    def __init__(self, items: Sequence[Any], workers: Sequence[str]) -> None:
        self.items = items
        self.workers = workers
        self.began: list[int] = []  # the places of the items, in the order of their calls
        self.ended = 0
        self.busy: set[str] = set()
        self.wrong = ""
        self.quiet = False  # nothing happened any more: nobody waits again
        self.changed = threading.Condition()
        self.places = sorted(self._first(item) for item in items)

    def call(self, worker: str, item: Any) -> Any:
        with self.changed:
            place = self._place(item)
            self._look(worker, item, place)
            self.busy.add(worker)
            self.began.append(place)
            first = len(self.began) == 1
            self.changed.notify_all()
            self._meet()
            if first:
                self._outlast()
            self.ended += 1
            self.busy.discard(worker)
            self.changed.notify_all()
        return self.result(place)

    def result(self, place: int) -> Any:
        item = self.items[place]
        return item * item if isinstance(item, int) else f"that of item {place}"

    def _first(self, item: Any) -> int:
        """The place of this very object; the first one, where it stands in several."""
        return next(place for place, each in enumerate(self.items) if each is item)

    def _place(self, item: Any) -> int:
        known = any(each is item for each in self.items)
        require(known, f"There was a call with the item {shown(item)}, which is not in the list.")
        return self._first(item)

    def _look(self, worker: str, item: Any, place: int) -> None:
        """Is it this worker's turn, and this item's?"""
        early = [other for other in self.places if other < place and other not in self.began]
        if worker not in self.workers:
            self.wrong = f"there was a call for {shown(worker)}, and the workers are {list(self.workers)}."
        elif worker in self.busy:
            self.wrong = f"{worker} got the item {item} while it was busy with another one."
        elif len(early) >= len(self.workers):
            self.wrong = self.wrong or (
                f"the item {item} began, and {len(early)} items that stand before it had not. It was not the next one."
            )

    def _meet(self) -> None:
        """Until all workers have an item, or all items have begun."""
        self._wait(lambda: len(self.began) >= min(len(self.workers), len(self.items)))

    def _outlast(self) -> None:
        """Until all other calls have ended. A single worker has no time for that."""
        self._wait(lambda: self.ended >= len(self.items) - 1 or len(self.workers) == 1)

    def _wait(self, there: Callable[[], bool]) -> None:
        """Until it is there, or nothing happens any more."""
        while not there() and not self.quiet:
            if not self.changed.wait(QUIET):
                self.quiet = True
                idle = " and ".join(sorted({*self.workers} - self.busy))
                left = f"{len(self.items) - len(self.began)} of the items had not begun"
                self.wrong = self.wrong or f"{idle} had nothing to do while an item was running, and {left}."
