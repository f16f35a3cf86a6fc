"""A model whose backward pass takes a known time, and a link whose messages do: for lesson 21.

The workers of one computer share its cores, also for what they send each other. So neither a backward pass nor a
message has a processor or a network of its own, and little can hide behind anything. Here each layer rests in its
backward, as if a GPU computed it, and each message rests on its way, as if it went over a network. The gradients are
computed, and the messages added up over the ranks, all the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 250  # a layer has 250 by 250 numbers of 4 bytes: 250 kB
Span = tuple[float, float]  # begin and end, on the clock of time.perf_counter


class SlowLink:
    """Adds up tensors over all ranks, one after another. Each takes `alpha + bytes / beta` seconds."""

    def __init__(self, alpha: float, beta: float) -> None:
        self.alpha, self.beta = alpha, beta
        self.spans: list[Span] = []
        self._line = ThreadPoolExecutor(1)

    def all_reduce(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Begin to add up; `wait()` of what is returned ends when the tensor has the sum."""
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self._line.submit(self._carry, tensor, done)
        return done

    def _carry(self, tensor: Tensor, done: torch.futures.Future[Tensor]) -> None:
        begin = time.perf_counter()
        try:
            dist.all_reduce(tensor)
        except Exception as error:  # noqa: BLE001  (it is raised where the program waits)
            done.set_exception(error)
            return
        arrival = begin + self.alpha + tensor.nbytes / self.beta
        time.sleep(max(0.0, arrival - time.perf_counter()))
        self.spans.append((begin, time.perf_counter()))
        done.set_result(tensor)


class Rest(torch.autograd.Function):
    """Passes everything on; backward takes the time of a layer, and writes down when."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, spans: list[Span]) -> Tensor:
        ctx.rest = seconds, spans
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        seconds, spans = ctx.rest
        begin = time.perf_counter()
        time.sleep(seconds)
        spans.append((begin, time.perf_counter()))
        return gradient, None, None


class SlowLayer(nn.Module):
    def __init__(self, seconds: float, spans: list[Span]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.seconds, self.spans = seconds, spans

    def forward(self, x: Tensor) -> Tensor:
        return Rest.apply(torch.tanh(self.linear(x)), self.seconds, self.spans)


class SlowModel(nn.Sequential):
    """Layers alike, the same on every rank, each of which takes its time in backward."""

    def __init__(self, layers: int = 8, seconds: float = 0.010) -> None:
        self.spans: list[Span] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(21)
            super().__init__(*(SlowLayer(seconds, self.spans) for _ in range(layers)))


def timeline(computed: Sequence[Span], sent: Sequence[Span]) -> dict[str, list[tuple[float, float, str, str]]]:
    """Two lanes for `draw.lanes`, in milliseconds from the begin of the backward pass."""
    zero = min(begin for begin, _ in computed)

    def lane(spans: Sequence[Span], colour: str) -> list[tuple[float, float, str, str]]:
        return [(1e3 * (a - zero), 1e3 * (b - zero), str(place), colour) for place, (a, b) in enumerate(spans)]

    return {"backward": lane(computed, "orange"), "link": lane(sent, "blue")}
