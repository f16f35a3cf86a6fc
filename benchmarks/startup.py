"""Whole worlds, measured from their first moment: `python -m benchmarks.startup API SCENE COUNT` prints JSON.

The clock runs from the request; imports of the starting process are left out on both sides. A cluster is started twice
in one process: the second start finds warm what the first had to make. Torch keeps nothing warm (and cannot start a
second world of new processes from one process), so its one start counts twice.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, NamedTuple

import psutil
import torch

import rpcbench
from benchmarks.pairs import BenchError, launch
from benchmarks.rows import BYTES, CORES, Goal, Row

OURS = "rpcbench.rpc"
_SECONDS = 180.0
_SETTLE_SECONDS = 1.0
_IDLE_SECONDS = 5.0


class Scene(NamedTuple):
    """One fresh process that measures some rows in a world of `size` workers."""

    name: str
    size: int
    rows: dict[str, Row]


def scenes(workers: int) -> list[Scene]:
    """All of them, with starts of as many workers."""
    few = min(workers, 4)
    return [
        Scene("start_twice", workers, {
            f"start, call and stop {workers} workers": Row(Goal(3)),
            f"start, call and stop {workers} workers, warm": Row(Goal(15)),
        }),
        Scene("call_soon", 2, {"first call after a warm start of 2": Row(Goal(most=0.3))}),
        Scene("rest", few, {
            "memory that a worker adds": Row(Goal(most=40e6), BYTES),
            f"{few} workers that rest": Row(Goal(most=0.01), CORES),
        }),
    ]  # fmt: skip


def measure(api: str, scene: Scene) -> list[float]:
    """The values of the scene's rows, from a fresh process. BenchError where it fails."""
    process = launch("benchmarks.startup", api, scene.name, str(scene.size), stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{api}: {scene.name} of {scene.size} workers took over {_SECONDS:.0f} s") from None
    finally:
        _end(process)
    if process.returncode:
        raise BenchError(f"{api}: {scene.name} of {scene.size} workers: status {process.returncode}, see above")
    values: list[float] = json.loads(output.splitlines()[-1])
    return values


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the process and of those it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


World = Callable[[int], AbstractContextManager[Any]]
"""Number of workers → a world of so many, whose rpc module it gives, while it stands."""


def start_twice(world: World, count: int, keeps_warm: bool) -> list[float]:
    """Seconds from the request until all workers have answered a call and are gone."""
    seconds = []
    for _ in range(2 if keeps_warm else 1):
        begin = perf_counter()
        with world(count) as rpc:
            _ask_each(rpc, count, os.getpid)
        seconds.append(perf_counter() - begin)
    return [seconds[0], seconds[-1]]


def call_soon(world: World, count: int, keeps_warm: bool) -> list[float]:
    """Seconds from the request until the last worker has answered."""
    if keeps_warm:
        with world(1):
            pass
    begin = perf_counter()
    with world(count) as rpc:
        rpc.rpc_sync(f"worker{count}", os.getpid)
        return [perf_counter() - begin]


def rest(world: World, count: int, keeps_warm: bool) -> list[float]:
    """Bytes that each worker has for itself alone after a call (their mean), and the CPU all use while nothing runs."""
    with world(count) as rpc:
        _ask_each(rpc, count, torch.add, (torch.ones(4), torch.ones(4)))
        time.sleep(_SETTLE_SECONDS)
        begin = perf_counter()
        before = sum(_ask_each(rpc, count, time.process_time))
        time.sleep(_IDLE_SECONDS)
        spent = sum(_ask_each(rpc, count, time.process_time)) - before
        share = spent / (perf_counter() - begin)
        alone = [psutil.Process(pid).memory_full_info().uss for pid in _ask_each(rpc, count, os.getpid)]
    return [sum(alone) / count, share]


SCENES = {scene.__name__: scene for scene in (start_twice, call_soon, rest)}


def _ask_each(rpc: Any, count: int, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> list[Any]:
    answers = [rpc.rpc_async(f"worker{number}", function, args=args) for number in range(1, count + 1)]
    return [answer.wait() for answer in answers]


@contextlib.contextmanager
def _cluster(rpc: Any, count: int) -> Iterator[Any]:
    with rpcbench.Cluster(count):
        yield rpc


@contextlib.contextmanager
def _spawned(rpc: Any, count: int) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as directory:
        spawn = multiprocessing.get_context("spawn")
        ranks = range(1, count + 1)
        processes = [
            spawn.Process(target=_serve, args=(rpc.__name__, f"{directory}/meeting", rank, count), daemon=True)
            for rank in ranks
        ]
        for process in processes:
            process.start()
        _join(rpc, f"{directory}/meeting", 0, count)
        yield rpc
        rpc.shutdown()
        for process in processes:
            process.join()


def _serve(name: str, meeting: str, rank: int, count: int) -> None:
    rpc: Any = importlib.import_module(name)
    _join(rpc, meeting, rank, count)
    rpc.shutdown()


def _join(rpc: Any, meeting: str, rank: int, count: int) -> None:
    warnings.filterwarnings("ignore", module=r"torch\.distributed")  # torch warns of its own use of itself
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=count + 1, rpc_backend_options=options)


def main(name: str, scene: str, count: str) -> None:
    rpc: Any = importlib.import_module(name)
    ours = name == OURS
    kind = _cluster if ours else _spawned
    print(json.dumps(SCENES[scene](lambda many: kind(rpc, many), int(count), ours)))


if __name__ == "__main__":
    main(*sys.argv[1:])
