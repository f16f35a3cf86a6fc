"""Kinds of operators, and the time of a process by kind: computation, communication, both at once, copies, idle.

Guarantees
- The definitions are those of Holistic Trace Analysis. Times are unions: two kernels at once count once. The overlap is
  the part of the communication during which something is computed.
- Where the process has used an accelerator, the time is that of its streams, from the first kernel to the end of the
  last. Otherwise it is that of its threads, and the whole time of the profile.
- On a thread the innermost operator counts: a collective within an autograd operator is communication. Its wait for
  another rank is communication, too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

COMPUTE, COMMUNICATION, COPY, OTHER = range(4)
"""OTHER: annotations of the program and calls of a driver, which are none of the three."""
_COMMUNICATION = re.compile(
    r"c10d::|_?c10d_functional|record_param_comms|symm_mem::|(gloo|nccl|mpi|ucc|xccl|hccl|rccl):"
)
_KERNELS = re.compile(r"nccl|nvshmem|oneccl|multimem_|(one|two)_shot_all_reduce|low_contention_", re.IGNORECASE)
_COPIES = "Memcpy", "Memset", "dma"
_COPY_CATEGORIES = "gpu_memcpy", "gpu_memset"
_OPERATORS = "cpu_op", "kernel", "mtia_ccp_events", *_COPY_CATEGORIES
Times = NDArray[np.float64]
Codes = NDArray[np.int32]
Spans = tuple[Times, Times]
"""Beginnings and ends, ascending, that neither overlap nor touch."""


class KindSeconds(NamedTuple):
    """Seconds of a process by kind."""

    span: float
    compute: float
    communication: float
    overlap: float  # of communication and computation
    copies: float
    idle: float

    @property
    def exposed(self) -> float:
        """Seconds of communication during which nothing was computed."""
        return self.communication - self.overlap


def classify_operator(name: str, category: str, on_device: bool) -> int:
    """Return the kind of an operator. `category`: kineto's, as `cpu_op` or `kernel`."""
    if on_device:
        if category in _COPY_CATEGORIES or name.startswith(_COPIES):
            return COPY
        if category not in _OPERATORS:
            return OTHER
        return COMMUNICATION if _KERNELS.search(name) else COMPUTE
    if _COMMUNICATION.match(name):
        return COMMUNICATION
    return COMPUTE if category in _OPERATORS else OTHER


def measure_kinds(
    kinds: Codes, tracks: Codes, begins: Times, seconds: Times, span: float | None
) -> tuple[KindSeconds, Spans]:
    """Return the times of operators, which are given as columns, and the spans in which something is computed.

    Args:
        kinds: `COMPUTE` and so on.
        tracks: A number for each thread or stream.
        begins: Seconds.
        seconds: Durations.
        span: Seconds of the whole; None: from the first operator to the end of the last.
    """
    ends = begins + seconds
    computed, sent, copied = [], [], []
    for track in np.unique(tracks):
        chosen = tracks == track
        of_kind = [merge_spans(begins[chosen & (kinds == kind)], ends[chosen & (kinds == kind)]) for kind in range(3)]
        computed.append(subtract_spans(of_kind[COMPUTE], of_kind[COMMUNICATION]))
        sent.append(of_kind[COMMUNICATION])
        copied.append(of_kind[COPY])
    unions = [_join_spans(each) for each in (computed, sent, copied)]
    compute, communication, copies = map(sum_spans, unions)
    overlap = compute + communication - sum_spans(_join_spans(unions[:2]))
    counted = kinds != OTHER
    if span is None:
        span = float(ends[counted].max() - begins[counted].min()) if counted.any() else 0.0
    idle = max(0.0, span - sum_spans(_join_spans(unions)))
    return KindSeconds(span, compute, communication, max(0.0, overlap), copies, idle), unions[0]


def merge_spans(begins: Times, ends: Times) -> Spans:
    """Return the times that lie in one or more of these."""
    if not len(begins):
        return begins, ends
    if (begins[1:] < begins[:-1]).any():  # torch writes those of a thread in order, and a copy of millions is large
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], ends[order]
    latest = np.maximum.accumulate(ends)
    first = np.concatenate(([True], begins[1:] > latest[:-1]))
    return begins[first], latest[np.concatenate((first[1:], [True]))]


def _join_spans(many: list[Spans]) -> Spans:
    empty = np.zeros(0)
    return merge_spans(*(np.concatenate([empty, *(spans[n] for spans in many)]) for n in range(2)))


def sum_spans(spans: Spans) -> float:
    """Return the seconds of all spans together."""
    return float((spans[1] - spans[0]).sum())


def subtract_spans(spans: Spans, others: Spans) -> Spans:
    """Return the parts of `spans` that lie in none of the others."""
    if not len(spans[0]) or not len(others[0]):
        return spans
    # Between the cuts, which are all beginnings and ends, each part lies wholly within a span or outside.
    cuts = np.unique(np.concatenate([*spans, *others]))
    parts, middles = (cuts[:-1], cuts[1:]), (cuts[:-1] + cuts[1:]) / 2
    kept = _covers(spans, middles) & ~_covers(others, middles)
    return merge_spans(parts[0][kept], parts[1][kept])


def _covers(spans: Spans, times: Times) -> NDArray[np.bool_]:
    place = np.searchsorted(spans[0], times, side="right") - 1
    found: NDArray[np.bool_] = (place >= 0) & (times < spans[1][np.maximum(place, 0)])
    return found
