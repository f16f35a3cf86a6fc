"""Checks of lesson 02."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rpcbench
from checks import NotYet, exercise, require, returned, right, shown, trying
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
    with trying("The function"):
        found = returned(answer("x = 6 * 7", "x"))
    require(isinstance(found, dict), f"The answer should be a dict {{worker: value}}, not {shown(found)}.")
    require(list(found) == names, f"The keys should be the workers, {names}; yours are {list(found)}.")
    require(set(found.values()) != {None}, "The values are all None: that is what a cell ends with that only assigns.")
    require(found == dict.fromkeys(names, 42), f"x is 42 on each worker, and yours gave {shown(found)}.")
    with trying("The function"):
        pids = answer("import os\nmine = os.getpid()", "mine")
    require(os.getpid() not in pids.values(), "The cell has run in this notebook, not on the workers.")
    wanted = {name: cluster.pid(name) for name in names}
    require(pids == wanted, f"A cell that finds the process number gives {wanted}, and yours gave {shown(pids)}.")
    _runs_once(lambda: answer(TALLY, "tally"))
    right("One cell, as many values as there are workers.")


def _runs_once(run: Callable[[], object]) -> None:
    cluster = rpcbench.cluster()
    cluster.run("all", "tally = []")
    with trying("The function"):
        run()
    tallies = cluster.run("all", "len(tally)")
    for name, times in tallies.items():
        require(times == 1, f"The cell ran {times} times on {name}. It should run once.")


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
    right("Each worker has an outcome of its own, and each error its own type.")


def _compare(answer: Callable[[str], dict[str, str]], code: str, wanted: dict[str, str]) -> None:
    with trying(f"Your function, with the cell {code!r},"):
        found = returned(answer(code))
    require(isinstance(found, dict), f"The answer should be a dict {{worker: text}}, not {shown(found)}.")
    require(list(found) == list(wanted), f"The keys should be the workers, {list(wanted)}; yours are {list(found)}.")
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
    try:
        before = cluster.pid("worker1")
        _comes_through(answer, "1 / 0", ZeroDivisionError)
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
            return
        except NameError as error:
            raise NotYet(f"{error}: the new process has nothing of what the old one held.") from None
        ran = len(tries.read_text())
    require(deaths == 1, f"worker2 died twice, and the error was hidden: the cell ran {ran} times, not twice.")
    require(found is not None, "worker2 is back, but the cell should be run again, and its value returned.")
    require(found == 42, f"The cell ends with 42, and yours gave {shown(found)}.")
    require("worker2" in cluster.workers, "worker2 was not started again: the cell ran elsewhere.")


@exercise(
    "No worker has items of its own. All threads take the next item from one place, such as a `queue.SimpleQueue`.",
    "Begin with `results = [None] * len(items)` and a function `serve(worker)` that takes pairs (place, item) until "
    "none is left, and writes `results[place]`. Run it on threads, once for each worker.",
)
def spread(answer: Callable[[Callable[[str, Any], Any], Sequence[Any], Sequence[str]], list[Any]]) -> None:
    """`answer(call, items, workers)` gives each free worker the next item."""
    workers = ["worker1", "worker2", "worker3"]
    for items in ([0, 1, 2, 3, 4, 5, 6, 7], [3, 3, 3, 3], [8], []):
        tasks = Tasks(items)
        with trying("The function"):
            found = returned(answer(tasks.call, list(items), list(workers)))
        where = f"With the items {items} and three workers"
        began = sorted(tasks.began)
        require(began == sorted(items), f"{where} there were calls for {began}: each item needs one.")
        require(not tasks.wrong, f"{where}: {tasks.wrong}")
        require(isinstance(found, list), f"{where}: the answer should be a list, not {shown(found)}.")
        wanted = [item * item for item in items]
        require(found == wanted, f"{where} the results are {wanted}, in the order of the items; yours are {found}.")
    _error_comes_out(answer, workers)
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


class Tasks:
    """Calls that square an item. The first one takes until all others have ended."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.count = len(items)
        self.began: list[Any] = []
        self.ended = 0
        self.busy: set[str] = set()
        self.wrong = ""
        self.changed = threading.Condition()

    def call(self, worker: str, item: Any) -> Any:
        with self.changed:
            if worker in self.busy:
                self.wrong = f"{worker} got the item {item} while it was busy with another one."
            self.busy.add(worker)
            self.began.append(item)
            self.changed.notify_all()
            if len(self.began) == 1:
                self._outlast()
            self.ended += 1
            self.busy.discard(worker)
            self.changed.notify_all()
        return item * item

    def _outlast(self) -> None:
        """Until all other calls have ended, or nothing happens any more."""
        while self.ended < self.count - 1:
            if not self.changed.wait(QUIET):
                left = self.count - len(self.began)
                idle = "the other workers were free, but the first item was still running, and "
                self.wrong = self.wrong or f"{idle}{left} of the items had not begun."
                return
