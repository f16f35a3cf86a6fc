"""Workloads of small calls: alone, many in flight, through an RRef, and beside something that is in the way.

The functions of the callee stand here too, so that they travel by reference.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rpcbench.bench.operation import CALLEE, Api, Operation, Prepare


def count_words(text: str) -> int:
    return len(text.split())


def larger(first: int, second: int) -> int:
    return max(first, second)


def digit_sum(number: int) -> int:
    return sum(map(int, str(number)))


def total(first: Tensor, second: Tensor) -> Tensor:
    return first + second


def difference(first: Tensor, second: Tensor) -> Tensor:
    return first - second


def product(first: Tensor, second: Tensor) -> Tensor:
    return first * second


class Shelf:
    """Some numbers that live on the callee."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers

    def at(self, index: int) -> int:
        return self._numbers[index]

    def count_below(self, limit: int) -> int:
        return sum(number < limit for number in self._numbers)


class Spinner:
    """A thread that is busy with Python from birth until `stop`."""

    def __init__(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        while not self._stopped:
            pass

    def stop(self) -> None:
        self._stopped = True
        self._thread.join()


Call = tuple[Callable[..., int], tuple[Any, ...]]


def _draw_call(draw: random.Random) -> Call:
    calls: list[Call] = [
        (count_words, (" ".join(["word"] * draw.randint(1, 8)),)),
        (larger, (draw.randrange(1000), draw.randrange(1000))),
        (digit_sum, (draw.randrange(1 << 30),)),
    ]
    return draw.choice(calls)


def int_call(api: Api, draw: random.Random) -> Operation:
    function, args = _draw_call(draw)
    expected = function(*args)
    return Operation(lambda: api.rpc.rpc_sync(CALLEE, function, args=args), lambda result: bool(result == expected))


def in_flight(many: int) -> Prepare:
    """`many` calls are sent before the first answer is waited for."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        function, args = _draw_call(draw)
        expected = [function(*args)] * many

        def run() -> list[int]:
            futures = [api.rpc.rpc_async(CALLEE, function, args=args) for _ in range(many)]
            return [future.wait() for future in futures]

        return Operation(run, lambda results: bool(results == expected), calls=many)

    return prepare


def _tensor_call(functions: list[Callable[[Tensor, Tensor], Tensor]]) -> Prepare:
    def prepare(api: Api, draw: random.Random) -> Operation:
        function, shape = draw.choice(functions), (draw.randint(1, 8), draw.randint(1, 8))
        first, second = torch.rand(shape), torch.rand(shape)
        expected = function(first, second)
        return Operation(
            lambda: api.rpc.rpc_sync(CALLEE, function, args=(first, second)),
            lambda result: torch.equal(result, expected),
        )

    return prepare


python_on_tensors = _tensor_call([total, difference, product])
torch_add = _tensor_call([torch.add])


def remote_value(api: Api, draw: random.Random) -> Operation:
    function, args = _draw_call(draw)
    expected = function(*args)
    return Operation(
        lambda: api.rpc.remote(CALLEE, function, args=args).to_here(), lambda result: bool(result == expected)
    )


def method(api: Api, draw: random.Random) -> Operation:
    """A method of an object that an RRef stands for."""
    numbers = [draw.randrange(100) for _ in range(draw.randint(1, 16))]
    shelf, far = Shelf(numbers), api.rpc.remote(CALLEE, Shelf, args=(numbers,))
    name, argument = draw.choice([("at", draw.randrange(len(numbers))), ("count_below", draw.randrange(100))])
    expected = getattr(shelf, name)(argument)
    return Operation(lambda: getattr(far.rpc_sync(), name)(argument), lambda result: bool(result == expected))


def beside_busy_thread(api: Api, draw: random.Random) -> Operation:
    """The callee has a thread that never lets go of the interpreter by itself."""

    @contextlib.contextmanager
    def busy() -> Iterator[None]:
        spinner = api.rpc.remote(CALLEE, Spinner)
        try:
            yield
        finally:
            spinner.rpc_sync().stop()

    return replace(int_call(api, draw), around=busy)


def panel_open(api: Api, draw: random.Random) -> Operation:
    """A panel follows what the caller and the callee do."""
    from rpcbench.panels import panel

    return replace(int_call(api, draw), around=lambda: contextlib.closing(panel("rrefs")))
