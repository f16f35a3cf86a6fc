"""What torch recorded itself of the collectives of this process: its flight recorder, which runs without a watcher.

Guarantees
- Reading changes nothing, and waits for no collective.
- Times are seconds of `time.monotonic`; shapes have this package's names of dtypes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]


class FlightEntry(NamedTuple):
    """A collective in torch's flight recorder."""

    group: str
    number: int  # among the group's collectives, alike on all ranks
    op_id: int  # the backend's count of operations with it
    op: str
    shape: str
    size: int  # bytes
    begin: float  # monotonic seconds
    runs: bool
    backend: str  # torch's number of the group's backend in this process


def flight_record() -> list[FlightEntry]:
    """Return the latest collectives of this process, oldest first: about two thousand, which takes some 50 ms."""
    offset = time.time() - time.monotonic()
    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    return [_flight_entry(entry, offset) for entry in entries if not entry["is_p2p"]]


def _flight_entry(entry: dict[str, Any], offset: float) -> FlightEntry:
    shape, size = describe_tensors(entry["input_sizes"], entry["input_dtypes"])
    op = entry["profiling_name"].rpartition(":")[2]  # gloo makes a reduce_scatter of an all_reduce, recorded as such
    return FlightEntry(
        entry["process_group"][0], entry["collective_seq_id"], entry["op_id"], op,
        shape, size,
        entry["time_created_ns"] / 1e9 - offset, not entry["retired"], str(entry["pg_id"]),
    )  # fmt: skip


def describe_tensors(sizes: Sequence[list[int]], dtypes: Sequence[str]) -> tuple[str, int]:
    """Return text and bytes of the tensors of an entry, as `float32[4, 8]` and 128."""
    parts = [_layout_and_bytes(*each) for each in zip(sizes, dtypes, strict=False)]
    return ", ".join(text for text, _ in parts), sum(size for _, size in parts)


def _layout_and_bytes(size: list[int], dtype: str) -> tuple[str, int]:
    """Return text and bytes of a tensor of the flight recorder, which has C++'s names of dtypes."""
    kind = _CPP_DTYPES.get(dtype)
    if kind is None:
        return f"{dtype}{size}", 0
    return f"{str(kind).removeprefix('torch.')}{size}", kind.itemsize * torch.Size(size).numel()


_CPP_DTYPES = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
}  # fmt: skip


def is_completed(backend: str, count: int) -> bool:
    """Return whether a backend has ended its operation with this count."""
    status = json.loads(_dump_fr_trace_json(False, False))["pg_status"][backend]
    return int(status["last_completed_collective"]) >= count
