"""Checks of lesson 01."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import rpcbench
import rpcbench.rpc as rpc
from checks import NotYet, require, returned, right, shown


def process_ids(answer: Callable[[Sequence[str]], dict[str, int]]) -> None:
    """`answer(names)` is the process id of each worker."""
    cluster = rpcbench.cluster()
    names = cluster.workers
    try:
        found = returned(answer(names))
    except TypeError as error:
        raise NotYet(f"TypeError: {error} A call needs the function itself, without parentheses.") from None
    require(isinstance(found, dict), f"The answer should be a dict {{name: number}}, not {shown(found)}.")
    require(list(found) == names, f"The keys should be the names {names}, not {list(found)}.")
    futures = [name for name, number in found.items() if isinstance(number, torch.futures.Future)]
    require(not futures, "There are futures in the dict, not numbers: somebody has to wait for them.")
    require(os.getpid() not in found.values(), "One of the numbers is that of this notebook: it was asked here.")
    wrong = [name for name, number in found.items() if number != cluster.pid(name)]
    require(not wrong, f"This is not the process of {' and '.join(wrong)}. Was each worker asked for its own?")
    require(list(answer(names[1:])) == names[1:], "It should ask only the workers it is given.")
    right("Three processes, one world.")


def at_once(answer: Callable[[Callable[[int], Any], Sequence[int], Sequence[str]], list[Any]]) -> None:
    """`answer(function, parts, workers)` calls all workers at the same time."""
    names = rpcbench.cluster().workers
    _meetings.append(threading.Barrier(len(names)))
    results = returned(answer(partial(meet, len(_meetings) - 1), list(range(len(names))), names))
    require(isinstance(results, list), f"The answer should be a list, not {shown(results)}.")
    futures = [result for result in results if isinstance(result, torch.futures.Future)]
    require(not futures, "The list holds futures. Their results are wanted: wait for them.")
    require(len(results) == len(names), f"{len(names)} parts should give {len(names)} results, not {len(results)}.")
    require([part for part, _, _ in results] == [*range(len(names))], "Each part once, in the order of the parts.")
    require(
        [name for _, name, _ in results] == names,
        f"The parts should go to {names}; they went to {[name for _, name, _ in results]}.",
    )
    require(
        all(met for _, _, met in results),
        "The workers took turns: one had finished before the next was asked. Ask all of them before you wait for any.",
    )
    require(answer(negate, [4, 7], names[::-1]) == [-4, -7], "It should work with other functions, parts and workers.")
    right("All of them worked at the same time.")


def patient(answer: Callable[[str, Callable[[], Any], float, Any], Any]) -> None:
    """`answer(worker, function, seconds, default)` gives up after a while, and on nothing else."""
    quick = returned(answer("worker1", name_here, 30.0, "nobody"))
    require(quick == "worker1", f"A quick function returns 'worker1' on worker1; yours gave {shown(quick)}.")
    require(answer("worker2", nothing, 30.0, "default") == 0, "A function may well return 0: that is a result too.")
    slow = answer("worker1", slow_one, 0.2, "default")
    require(slow != "late", "It should give up after `seconds`, but it waited for the slow function to end.")
    require(slow == "default", f"For a function that takes too long it should return the default, not {shown(slow)}.")
    try:
        hidden = answer("worker2", fail, 30.0, "default")
    except RuntimeError as error:
        require(str(error) == "out of paper", f"The function's own error is 'out of paper', not {error}.")
    else:
        raise NotYet(f"The function fails with an error of its own, and that was hidden: yours gave {shown(hidden)}.")
    right("It waits as long as it should, and hides nothing.")


# -- what the answers are tried with; all of it runs on workers, but for `arrive`
_meetings: list[threading.Barrier] = []  # one for each answer: calls of an earlier one may still be on their way


def arrive(meeting: int) -> bool:
    """Whether all workers came while this one waited. Runs in the notebook, which all workers can call."""
    try:
        _meetings[meeting].wait(5)
    except threading.BrokenBarrierError:
        return False
    return True


def meet(meeting: int, part: int) -> tuple[int, str, bool]:
    return part, rpc.get_worker_info().name, rpc.rpc_sync("notebook", arrive, (meeting,))


def negate(part: int) -> int:
    return -part


def name_here() -> str:
    return rpc.get_worker_info().name


def nothing() -> int:
    return 0


def slow_one() -> str:
    time.sleep(3)
    return "late"


def fail() -> None:
    raise RuntimeError("out of paper")
