"""One of the two processes of a pair: `python -m benchmarks.member API RANK URL [DESCRIPTOR]`.

Rank 1 serves calls. Rank 0 drives: it reads orders as JSON lines from a socket. For each it times a batch, and answers
with the seconds of every call and the CPU time of a call; or it counts what some deeds take (`deed_counts`). A wrong
result is an error, never a figure. With `COUNT_CALLS` in its environment a process counts calls of Python functions.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch

from benchmarks.deed_counts import (
    Counters,
    count_deed,
    count_messages,
    count_python_calls,
    count_threads,
    read_counters,
    read_threads,
)
from benchmarks.rows import CALLEE, Api, Operation
from benchmarks.workloads import WORKLOADS

_WARM_UP_SHARE = 0.2
_FEWEST = 3
_PR_SET_PDEATHSIG = 1
COUNT_CALLS = "RPCBENCH_COUNT_PYTHON_CALLS"


class Timed(NamedTuple):
    """Of one batch: the seconds of each call, and the CPU seconds that a call took in both processes together."""

    seconds: list[float]
    cpu: float


def batch(operation: Operation, seconds: float, clock: Callable[[], float] = time.process_time) -> Timed:
    """Warm up, then repeat for about `seconds`. `clock`: CPU seconds so far, of all that work for it."""
    with operation.around():
        _repeat(operation, seconds * _WARM_UP_SHARE)
        if not operation.right(operation.run()):
            raise AssertionError("the call returned a wrong result")
        begin = clock()
        times = _repeat(operation, seconds)
        spent = clock() - begin
    return Timed([each / operation.calls for each in times], spent / len(times) / operation.calls)


def _repeat(operation: Operation, seconds: float) -> list[float]:
    times: list[float] = []
    run = operation.run
    end = perf_counter() + seconds
    while (begin := perf_counter()) < end or len(times) < _FEWEST:
        run()
        times.append(perf_counter() - begin)
    return times


def _obey(api: Api, order: dict[str, Any]) -> dict[str, Any]:
    draw = random.Random(order["seed"])
    torch.manual_seed(draw.getrandbits(63))
    try:
        operation = WORKLOADS[order["workload"]].prepare(api, draw)
        if "deeds" in order:
            return _count(api, operation, order["count"], order["deeds"])
        return batch(operation, order["budget"], lambda: _cpu_of_both(api))._asdict()
    except Exception:  # noqa: BLE001 - whatever failed here is told to the one who asked
        return {"error": traceback.format_exc()}


def _cpu_of_both(api: Api) -> float:
    there: float = api.rpc.rpc_sync(CALLEE, time.process_time)
    return there + time.process_time()


def _count(api: Api, operation: Operation, counted: str, deeds: int) -> dict[str, Any]:
    """Return the cost of a deed. `counted`: "processes", "threads" or "messages"."""
    if counted == "messages":
        return count_messages(operation, deeds)._asdict()
    if counted == "threads":
        both = count_threads(operation, lambda: [read_threads(), api.rpc.rpc_sync(CALLEE, read_threads)], deeds)
        return {"threads": both}
    return count_deed(operation, lambda: _counters_of_both(api), deeds)._asdict()


def _counters_of_both(api: Api) -> list[Counters]:
    there: Counters = api.rpc.rpc_sync(CALLEE, read_counters)
    return [read_counters(), there]


def _drive(api: Api, orders: socket.socket) -> None:
    with orders, orders.makefile("rw", encoding="utf-8") as lines:
        print(json.dumps({"ready": True}), file=lines, flush=True)
        for line in lines:
            print(json.dumps(_obey(api, json.loads(line))), file=lines, flush=True)


def _join(name: str, rank: int, url: str) -> Api:
    if name.startswith(f"{__package__}."):
        return Api(importlib.import_module(name).join(rank, url), None, None)
    api = Api.named(name)
    options = api.rpc.TensorPipeRpcBackendOptions(init_method=url)
    api.rpc.init_rpc(["driver", CALLEE][rank], rank=rank, world_size=2, rpc_backend_options=options)
    return api


def main(name: str, rank: str, url: str, descriptor: str = "") -> None:
    if sys.platform == "linux":  # a stopped process cannot notice that nobody will ever continue it
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    warnings.filterwarnings("ignore", module=r"torch\.distributed")  # torch warns of its own use of itself
    torch.set_num_threads(1)
    if os.environ.get(COUNT_CALLS):
        count_python_calls()
    api = _join(name, int(rank), url)
    if descriptor:
        _drive(api, socket.socket(fileno=int(descriptor)))
    api.rpc.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
