"""The functions that workers run in these tests: block, die, run out of resources, keep references."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
from typing import Any

import psutil

from rpcbench.rpc import RRef, rpc_sync
from rpcbench.runtime import current

held: list[Any] = []
began: list[None] = []


def stand_still() -> None:
    began.append(None)
    threading.Event().wait()


def begun() -> int:
    return len(began)


def count() -> int:
    """Return how many calls have begun, this one included."""
    began.append(None)
    return len(began)


def call_there(name: str) -> None:
    rpc_sync(name, stand_still)


def pid_there(name: str) -> int:
    return rpc_sync(name, os.getpid)


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def hold(value: Any) -> None:
    held.append(value)


def use_held() -> Any:
    return held[-1].to_here()


def drop_held() -> None:
    held.clear()


def segfault() -> None:
    ctypes.string_at(0)


def left() -> dict[str, Any]:
    """Return the rows of the tables of this worker, and the number of calls if it serves more than this one."""
    gc.collect()
    agent = current.current_agent()
    history = ("ops", "steps", "jobs", "cells")
    rows = {name: table for name, table in agent.tables().items() if table and name not in history}
    serving = agent.machine.read_node(lambda node: len(node.calls.serving))
    return {**rows, **({"serving": serving} if serving > 1 else {})}


def nest(levels: int, here: str, there: str) -> int:
    return 0 if levels == 0 else 1 + rpc_sync(there, nest, (levels - 1, there, here))


def call_back(name: str, number: int) -> int:
    return rpc_sync(name, max, (number, -1))


def wait_for_held() -> Any:
    while not held:
        threading.Event().wait(0.01)
    return held[-1].to_here()


# -- running out of resources
def with_less_memory(size: int) -> int:
    """Allocate `size` bytes while the process may take only 256 MB more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    have = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (have + (256 << 20), before[1]))
    try:
        return len(bytearray(size))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def take(size: int) -> int:
    """Allocate memory and write to each page of it."""
    taken = bytearray(size)
    for at in range(0, size, 4096):
        taken[at] = 1
    return len(taken)


def without_descriptors(name: str) -> str:
    """Call a worker for the first time while this process can open no file; return the error."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        rpc_sync(name, os.getpid, timeout=5)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return "nothing"


# -- values that cannot be pickled
class Untidy(Exception):
    """An error that its `__init__` cannot rebuild from its `args`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Explosive:
    """Fails when it is unpickled."""

    def __reduce__(self) -> Any:
        return int, ("explosive",)


class ExplosiveError(Exception):
    def __reduce__(self) -> Any:
        return int, ("explosive",)


def fail(error: type[Exception], *args: Any) -> None:
    raise error(*args)


def make_lock() -> Any:
    return {"lock": threading.Lock()}


def fail_with_lock() -> None:
    raise ValueError("held by", threading.Lock())
