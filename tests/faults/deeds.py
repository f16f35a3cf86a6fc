"""What workers do in these tests: stand still, die, run out of things, hold on to things."""

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
    """Which time this is."""
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
    """Rows of this worker's tables, and calls that it serves besides this one."""
    gc.collect()
    agent = current.current()
    rows = {name: table for name, table in agent.tables().items() if table and name not in ("ops", "steps")}
    serving = agent.machine.ask(lambda node: len(node.calls.serving))
    return {**rows, **({"serving": serving} if serving > 1 else {})}


def nest(levels: int, here: str, there: str) -> int:
    return 0 if levels == 0 else 1 + rpc_sync(there, nest, (levels - 1, there, here))


def call_back(name: str, number: int) -> int:
    return rpc_sync(name, max, (number, -1))


def wait_for_held() -> Any:
    while not held:
        threading.Event().wait(0.01)
    return held[-1].to_here()


# -- running out of things
def with_less_memory(size: int) -> int:
    """Take `size` bytes where the process may have only 256 MB more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    have = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (have + (256 << 20), before[1]))
    try:
        return len(bytearray(size))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def take(size: int) -> int:
    """Memory that is really used."""
    taken = bytearray(size)
    for at in range(0, size, 4096):
        taken[at] = 1
    return len(taken)


def without_descriptors(name: str) -> str:
    """Call a worker for the first time while this process may open no file; what becomes of it."""
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


# -- things that do not travel
class Untidy(Exception):
    """Its `__init__` cannot make it again from its `args`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


class Explosive:
    """Fails where it is unpickled."""

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
