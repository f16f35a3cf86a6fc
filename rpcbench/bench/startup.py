"""Start of workers, measured: `python -m rpcbench.bench.startup API COUNT` prints seconds as JSON.

The clock runs from the request until every worker has answered one call; imports of the starting process are left out
on both sides. A cluster is started twice in one process: the second start finds warm what the first had to make. Torch
keeps nothing warm (and cannot start a second world of new processes from one process), so its one start counts twice.
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
import warnings
from time import perf_counter
from typing import Any

import rpcbench
from rpcbench.bench.pair import BenchError, launch

OURS = "rpcbench.rpc"
_SECONDS = 120.0


def titles(count: int) -> tuple[str, str]:
    """The rows that `measure` fills."""
    return f"start of {count} workers", f"start of {count} workers, warm"


def measure(api: str, count: int) -> list[float]:
    """Seconds of a cold and of a warm start of `count` workers, from a fresh process."""
    process = launch("rpcbench.bench.startup", api, str(count), stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{api}: {count} workers have not started within {_SECONDS:.0f} s") from None
    finally:
        _end(process)
    if process.returncode:
        raise BenchError(f"{api}: starting {count} workers failed with status {process.returncode}, see above")
    seconds: list[float] = json.loads(output.splitlines()[-1])
    return seconds


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the process and of those it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cluster(rpc: Any, count: int) -> float:
    begin = perf_counter()
    with rpcbench.Cluster(count):
        return _call_each(rpc, count) - begin


def _spawned(rpc: Any, count: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        begin = perf_counter()
        spawn = multiprocessing.get_context("spawn")
        processes = [
            spawn.Process(target=_serve, args=(rpc.__name__, f"{directory}/meeting", rank, count))
            for rank in range(1, count + 1)
        ]
        for process in processes:
            process.start()
        _join(rpc, f"{directory}/meeting", 0, count)
        end = _call_each(rpc, count)
        rpc.shutdown()
        for process in processes:
            process.join()
    return end - begin


def _serve(name: str, meeting: str, rank: int, count: int) -> None:
    rpc: Any = importlib.import_module(name)
    _join(rpc, meeting, rank, count)
    rpc.shutdown()


def _join(rpc: Any, meeting: str, rank: int, count: int) -> None:
    warnings.filterwarnings("ignore", module=r"torch\.distributed")  # torch warns of its own use of itself
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=count + 1, rpc_backend_options=options)


def _call_each(rpc: Any, count: int) -> float:
    """Returns the time at which every worker has answered."""
    answers = [rpc.rpc_async(f"worker{number}", os.getpid) for number in range(1, count + 1)]
    if len({answer.wait() for answer in answers}) < count:
        raise AssertionError(f"{count} workers are not {count} processes")
    return perf_counter()


def main(name: str, count: str) -> None:
    rpc: Any = importlib.import_module(name)
    start = _cluster if name == OURS else _spawned
    seconds = [start(rpc, int(count))]
    seconds.append(start(rpc, int(count)) if name == OURS else seconds[0])
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
