"""What messages cost, for lessons 03 and 20: measured times, the model t = alpha + n / beta, and known links.

Sizes are bytes, times seconds, alpha seconds, beta bytes per second.

Lesson 03 asks for `fit`, `relay_time` and `schedule_time`: here are its answers, with which the later lessons go on.
Read them after yours.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from draw import COLOURS, Drawing, curves, lanes

Round = Sequence[tuple[int, int, float]]
"""Messages that are on their way at the same time: sender, receiver, bytes."""

LINKS = {
    "NVLink 4": (0.5e-6, 450e9),
    "PCIe 5": (1e-6, 63e9),
    "InfiniBand": (3e-6, 50e9),
    "Ethernet": (250e-6, 1.25e9),
    "continents": (75e-3, 0.125e9),
}
"""Alpha and beta, rounded; lesson 03 says of which kind each is, and has the sources."""


def best_time(call: Callable[[], object], times: int = 20) -> float:
    """The shortest of the times that the call takes: in the others the computer did something else, too."""
    spans = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        spans.append(time.perf_counter() - begin)
    return min(spans)


def fit(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Alpha and beta with the least sum of squares of relative errors."""
    t = torch.tensor(times, dtype=torch.float64)
    n = torch.tensor(sizes, dtype=torch.float64)
    rows, ones = torch.stack([1 / t, n / t], dim=1), torch.ones_like(t)[:, None]
    alpha, per_byte = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
    return alpha, 1 / per_byte


def relay_time(n: float, k: int, hops: int, alpha: float, beta: float) -> float:
    """The time of n bytes in k equal pieces over hops in a row; a piece goes on when all of it has come."""
    return (k + hops - 1) * (alpha + n / k / beta)


def schedule_time(rounds: Sequence[Round], alpha: float, beta: float) -> float:
    """The time of rounds, one after another. In a round each rank sends its messages in a row, and receives those for
    it in a row, both at the same time. The round takes as long as the rank that is busiest."""
    total = 0.0
    for messages in rounds:
        busy: dict[tuple[str, int], float] = {}
        for sender, receiver, size in messages:
            for place in (("sends", sender), ("receives", receiver)):
                busy[place] = busy.get(place, 0.0) + alpha + size / beta
        total += max(busy.values(), default=0.0)
    return total


# -- pictures
def fitted(series: dict[str, tuple[Sequence[float], Sequence[float]]], title: str = "") -> Drawing:
    """Points as measured, and the line of the model through each series."""
    lines, points = {}, []
    for name, (sizes, times) in series.items():
        alpha, beta = fit(sizes, times)
        lines[name] = [(n, t * 1e6) for n, t in zip(sizes, times, strict=True)]
        lines[f"{name}, model"] = [(n, (alpha + n / beta) * 1e6) for n in sizes]
        points.append(name)
    return curves(lines, "bytes", "µs", title, log=True, points=points)


def relay(n: float, k: int, hops: int, alpha: float, beta: float) -> Drawing:
    """When each piece is on its way over each hop."""
    each = (alpha + n / k / beta) * 1e3
    rows = {
        f"hop {hop + 1}": [
            ((hop + piece) * each, (hop + piece + 1) * each, str(piece + 1), COLOURS[piece % 6]) for piece in range(k)
        ]
        for hop in range(hops)
    }
    return lanes(rows, "ms", f"{k} pieces over {hops} hops" if k > 1 else f"One piece over {hops} hops")


def in_flight(spans: Sequence[tuple[float, float]], begin: float = 0.0) -> list[tuple[float, float, str, str]]:
    """Bars of calls for `lanes`, in ms after `begin`, from spans in seconds."""
    colours = itertools.cycle(COLOURS[:6])
    return [
        ((asked - begin) * 1e3, (done - begin) * 1e3, str(number + 1), next(colours))
        for number, (asked, done) in enumerate(spans)
    ]
