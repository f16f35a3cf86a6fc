"""Traces as torch's profiler writes them, of a job that is known exactly.

`gpu_job` is a training job on GPUs with one compute stream, one of NCCL and one of copies. Each step of 10 ms, from its
beginning:

    stream 7    kernel "gemm"     0 to 4 ms, and 5 to 7 ms     on the slow rank 0 to 6 ms, and 7 to 9 ms
    stream 20   all_reduce        until 9 ms                   from the end of the second gemm less 1 ms
    stream 9    Memcpy HtoD       7.5 to 8 ms                  on the slow rank 9.2 to 9.6 ms

So a rank that is not slow computes 6 ms of a step, communicates 3 ms (1 ms of it beside the computation), and copies
0.5 ms, all of it while it communicates. The last all_reduce of a rank ends at 9 ms, and the first kernel begins at 0:
the span of n steps is 10 n - 1 ms.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

BASE = 1_700_000_000_000_000_000  # nanoseconds since 1970
START = 5_000_000.0  # microseconds after it
STEP = 10_000.0
Event = dict[str, Any]


def slice_event(name: str, cat: str, begin: float, end: float, tid: int, **args: Any) -> Event:
    """Return an event with times in microseconds after the start."""
    at = {"pid": 0, "tid": tid, "ts": START + begin, "dur": end - begin}
    return {"ph": "X", "cat": cat, "name": name, **at, "args": args}


def kernel(name: str, begin: float, end: float, stream: int, **args: Any) -> Event:
    return slice_event(name, "kernel", begin, end, stream, device=0, stream=stream, **args)


def all_reduce(number: int, begin: float, end: float, size: int) -> Event:
    about = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
        "Group size": size, "Process Group Name": "0", "Process Group Description": "default_pg",
        "Process Group Ranks": str([*range(size)]), "Seq": number,
    }  # fmt: skip
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", begin, end, 20, **about)


def gpu_step(number: int, size: int, slow: bool) -> list[Event]:
    at, late = number * STEP, 2000.0 * slow
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
    copy = (9200.0, 9600.0) if slow else (7500.0, 8000.0)
    return [
        slice_event(f"ProfilerStep#{number}", "user_annotation", at, at + STEP, 1),
        slice_event("aten::mm", "cpu_op", at, at + 50, 1, **shapes),
        slice_event("cudaLaunchKernel", "cuda_runtime", at + 10, at + 40, 1),
        kernel("gemm", at, at + 4000 + late, 7),
        kernel("gemm", at + 5000 + late, at + 7000 + late, 7),
        all_reduce(number + 1, at + 6000 + late, at + 9000, size),
        slice_event("Memcpy HtoD", "gpu_memcpy", at + copy[0], at + copy[1], 9, device=0, stream=9),
    ]


def trace_of(rank: int | None, size: int, events: list[Event], ahead: int = 0) -> dict[str, Any]:
    """Return a trace by a clock that is `ahead` nanoseconds."""
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": size}}
    fields = {"schemaVersion": 1, "deviceProperties": [{"id": 0}, {"id": 1}], **info}
    times = {"displayTimeUnit": "ms", "baseTimeNanoseconds": BASE + ahead}
    return {**fields, **times, "traceEvents": events, "traceName": f"trace_rank{rank}.json"}


def gpu_job(size: int = 2, steps: int = 3, slow: int = 1) -> list[dict[str, Any]]:
    """Return the traces of all ranks, in order."""
    found = []
    for rank in range(size):
        events = [event for step in range(steps) for event in gpu_step(step, size, rank == slow)]
        named = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "thread 1 (python)"}}
        found.append(trace_of(rank, size, [named, *events]))
    return found


def cpu_job(size: int = 2, slow: int = 1) -> list[dict[str, Any]]:
    """Return traces with gloo: of 10 ms each rank computes 2 (the slow one 6), and is in an all_reduce until 8."""
    found = []
    for rank in range(size):
        computes = 6000.0 if rank == slow else 2000.0
        about = {"Input Dims": [[1000]], "Input type": ["float"]}
        events = [
            slice_event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 0, computes + 1000, 1),
            slice_event("aten::mm", "cpu_op", 100, computes, 1),
            slice_event("c10d::allreduce_", "cpu_op", computes, computes + 1000, 1),
            slice_event("gloo:all_reduce", "user_annotation", computes + 200, 8000, 2, **about),
            slice_event("PyTorch Profiler (0)", "Trace", -500, 9500, 0),
        ]
        found.append(trace_of(rank, size, events))
    return found


def write_job(folder: Path, traces: list[dict[str, Any]], packed: bool = False) -> str:
    """Write the traces as files, and return the pattern of their names."""
    for n, trace in enumerate(traces):
        data = json.dumps(trace, indent=2).encode()
        path = folder / f"trace_rank{n}.json{'.gz' * packed}"
        path.write_bytes(gzip.compress(data) if packed else data)
    return str(folder / "trace_rank*.json*")
