"""Checks of lesson 02."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rpcbench
from checks import NotYet, require, returned, right, shown, trying

ONLY_ON = "import rpcbench.rpc as rpc\nif rpc.get_worker_info().name == {name!r}:\n    {deed}"
DIES_ONCE = """
import os, pathlib, signal
tried = pathlib.Path({tried!r})
first = not tried.exists()
tried.touch()
if first:
    os.kill(os.getpid(), signal.SIGKILL)
kept * 2
"""


def everywhere(answer: Callable[[str, str], dict[str, Any]]) -> None:
    """`answer(code, name)` is the value of a variable on each worker after a cell has run there."""
    cluster = rpcbench.cluster()
    names = cluster.workers
    with trying():
        found = returned(answer("x = 6 * 7", "x"))
    require(isinstance(found, dict), f"The answer should be a dict {{worker: value}}, not {shown(found)}.")
    require(list(found) == names, f"The keys should be the workers, {names}; yours are {list(found)}.")
    require(set(found.values()) != {None}, "The values are all None: that is what a cell ends with that only assigns.")
    require(found == dict.fromkeys(names, 42), f"x is 42 on each worker, and yours gave {shown(found)}.")
    with trying():
        pids = answer("import os\nmine = os.getpid()", "mine")
    require(os.getpid() not in pids.values(), "The cell has run in this notebook, not on the workers.")
    require(pids == {name: cluster.pid(name) for name in names}, "It should work with other cells and variables.")
    right("One cell, as many values as there are workers.")


def outcomes(answer: Callable[[str], dict[str, str]]) -> None:
    """`answer(code)` says how the cell ended on each worker."""
    names = rpcbench.cluster().workers
    fine = dict.fromkeys(names, "fine")
    _compare(answer, "y = 1", fine)
    _compare(answer, "1 / 0", dict.fromkeys(names, "ZeroDivisionError"))
    _compare(answer, ONLY_ON.format(name="worker2", deed="{}['lost']"), {**fine, "worker2": "KeyError"})
    _compare(answer, ONLY_ON.format(name="worker1", deed="int('two')"), {**fine, "worker1": "ValueError"})
    right("Each worker has an end of its own, and each error its own type.")


def _compare(answer: Callable[[str], dict[str, str]], code: str, wanted: dict[str, str]) -> None:
    with trying(f"Your function, with the cell {code!r},"):
        found = returned(answer(code))
    require(isinstance(found, dict), f"The answer should be a dict {{worker: text}}, not {shown(found)}.")
    require(list(found) == list(wanted), f"The keys should be the workers, {list(wanted)}; yours are {list(found)}.")
    texts = all(isinstance(value, str) for value in found.values())
    require(texts, f"The values should be texts, such as 'KeyError', not {shown(list(found.values())[-1])}.")
    require(found == wanted, f"For the cell {code!r} it is {wanted}, and yours gave {found}.")


def stubborn(answer: Callable[[str, str], Any]) -> None:
    """`answer(worker, code)` runs a cell, once more if the worker dies of it."""
    cluster = rpcbench.cluster()
    with trying():
        require(returned(answer("worker1", "6 * 7")) == 42, "It should return the value of the last expression.")
    try:
        _dies_once(answer)
        _fails(answer)
    finally:
        for name in {"worker1", "worker2"} - set(cluster.workers):
            cluster.restart(name)
    right("A death costs a moment, and nothing else.")


def _dies_once(answer: Callable[[str, str], Any]) -> None:
    cluster = rpcbench.cluster()
    cluster.run("worker2", "kept = 21")
    with tempfile.TemporaryDirectory() as place:
        code = DIES_ONCE.format(tried=str(Path(place, "tried")))
        try:
            found = answer("worker2", code)
        except rpcbench.WorkerLostError:
            raise NotYet("The worker was lost, and that was the end of it. Catch that error, and only that.") from None
        except rpcbench.UnknownWorkerError:
            raise NotYet("The cell was sent to a worker that nobody has started again.") from None
        except NameError as error:
            raise NotYet(f"{error}: the new worker has nothing of what the old one held.") from None
    require(found is not None, "worker2 is back, but the cell should be run again, and its value returned.")
    require(found == 42, f"The cell ends with 42, and yours gave {shown(found)}.")


def _fails(answer: Callable[[str, str], Any]) -> None:
    cluster = rpcbench.cluster()
    before = cluster.pid("worker1")
    try:
        hidden = answer("worker1", "1 / 0")
    except ZeroDivisionError:
        pass
    else:
        raise NotYet(f"The cell fails with an error of its own, and that was hidden: yours gave {shown(hidden)}.")
    same = cluster.pid("worker1") == before
    require(same, "worker1 was started again, though it had not died: the cell has an error of its own.")
