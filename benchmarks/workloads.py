"""The work that both pairs are measured on, by title: small calls, large tensors, names of dimensions, training.

- The functions of the callee are in this module, so that they travel by reference.
- The time of an operation on named tensors includes torch's own time, so the cost of the names is below it: a stricter
  goal than one for the difference.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import plain
from benchmarks.rows import (
    BARE,
    CALLEE,
    HOSTS,
    OURS,
    PLAIN,
    RREFS,
    TRAINING,
    Api,
    Goal,
    Operation,
    Prepare,
    Row,
    Workload,
)
from rpcbench import named


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


KB = 1 << 10
MB = 1 << 20
_PATTERN = 1 << 16


def same(tensor: Tensor) -> Tensor:
    return tensor


def last_of(tensor: Tensor) -> int:
    return int(tensor[-1, -1])


def middle_of(tensor: Tensor) -> int:
    return int(tensor[tensor.shape[0] // 2, 0])


def draw_tensor(size: int, draw: random.Random) -> Tensor:
    """A matrix of `size` bytes, of drawn type and width."""
    dtype = draw.choice([torch.float32, torch.float64, torch.int64, torch.uint8])
    count = size // dtype.itemsize
    values = torch.randint(100, (min(count, _PATTERN),)).to(dtype)
    columns = min(1 << draw.randint(0, 12), count)
    return values.repeat(count // len(values)).view(-1, columns)


def echo(size: int) -> Prepare:
    """A tensor of `size` bytes goes there and comes back."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        tensor = draw_tensor(size, draw)
        return Operation(
            lambda: api.rpc.rpc_sync(CALLEE, same, args=(tensor,)), lambda result: torch.equal(result, tensor)
        )

    return prepare


def send(size: int) -> Prepare:
    """A tensor of `size` bytes goes there, one of its numbers comes back."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        tensor, function = draw_tensor(size, draw), draw.choice([last_of, middle_of])
        expected = function(tensor)
        return Operation(
            lambda: api.rpc.rpc_sync(CALLEE, function, args=(tensor,)), lambda result: bool(result == expected)
        )

    return prepare


_MANY = 100


def operations(api: Api, draw: random.Random) -> Operation:
    """A hundred of one kind: element by element, a sum by name, a view, or a product."""
    rows, columns = draw.randint(2, 8), draw.randint(2, 8)
    x, bias = named.rand(rows, columns, names=("N", "C")), named.rand(columns, names=("C",))
    kinds: list[tuple[Callable[[], Tensor], tuple[str, ...]]] = [
        (lambda: x + bias, ("N", "C")),
        (lambda: x * x, ("N", "C")),
        (lambda: x.abs(), ("N", "C")),
        (lambda: x.sum("N"), ("C",)),
        (lambda: x.transpose("N", "C"), ("C", "N")),
        (lambda: x @ bias, ("N",)),
    ]
    function, names = draw.choice(kinds)

    def run() -> Tensor:
        for _ in range(_MANY):
            made = function()
        return made

    return Operation(run, lambda result: named.names_of(result) == names, calls=_MANY)


_RATE = 1e-2


def make_stage(width: int, seed: int) -> nn.Module:
    """Three linear layers; the same on every process that is given the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)
        )


def forward(stage: Any, activations: Tensor) -> Tensor:
    """`stage` is an RRef to a module that lives where this runs."""
    return stage.local_value()(activations)  # type: ignore[no-any-return]


def shared(stage: Any) -> list[Any]:
    """RRefs of the stage's parameters, of the kind that `stage` is."""
    return [type(stage)(parameter) for parameter in stage.local_value().parameters()]


def values(stage: Any) -> list[Tensor]:
    """The stage's parameters, as plain tensors."""
    return [parameter.detach() for parameter in stage.local_value().parameters()]


class _TwoStages:
    """One stage here, one on the other worker, and what a local backward makes of both."""

    def __init__(self, api: Api, draw: random.Random, width: int, batch: int) -> None:
        seed, far_seed = draw.getrandbits(32), draw.getrandbits(32)
        self.api = api
        self.near = make_stage(width, seed)
        self.inputs = torch.rand(batch, width)
        self.far = api.rpc.remote(CALLEE, make_stage, args=(width, far_seed))
        twin = make_stage(width, far_seed)
        self.parameters = [*self.near.parameters(), *twin.parameters()]
        self.gradients = torch.autograd.grad(twin(self.near(self.inputs)).square().mean(), self.parameters)

    def backward(self, context: int) -> None:
        loss = self.api.rpc.rpc_sync(CALLEE, forward, args=(self.far, self.near(self.inputs))).square().mean()
        self.api.autograd.backward(context, [loss])


def forward_pass(width: int, batch: int, is_recorded: bool) -> Prepare:
    """One stage sends its activations to the other one and gets the outputs; recorded in a context, or not."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        far_seed = draw.getrandbits(32)
        far, twin = api.rpc.remote(CALLEE, make_stage, args=(width, far_seed)), make_stage(width, far_seed)
        inputs = torch.rand(batch, width, requires_grad=is_recorded)

        def run() -> Tensor:
            with api.autograd.context() if is_recorded else torch.no_grad():
                return api.rpc.rpc_sync(CALLEE, forward, args=(far, inputs))  # type: ignore[no-any-return]

        return Operation(run, lambda outputs: torch.allclose(outputs, twin(inputs)))

    return prepare


def backward(width: int, batch: int) -> Prepare:
    def prepare(api: Api, draw: random.Random) -> Operation:
        stages = _TwoStages(api, draw, width, batch)
        expected = dict(zip(stages.near.parameters(), stages.gradients, strict=False))

        def run() -> dict[Tensor, Tensor]:
            with api.autograd.context() as context:
                stages.backward(context)
                return dict(api.autograd.get_gradients(context))

        def right(gradients: dict[Tensor, Tensor]) -> bool:
            return gradients.keys() == expected.keys() and all(
                torch.allclose(gradients[parameter], gradient) for parameter, gradient in expected.items()
            )

        return Operation(run, right)

    return prepare


def alone(width: int, batch: int) -> Prepare:
    """The same forward and backward, with both stages here: what the two workers have to compute in turn."""

    def prepare(api: Api, draw: random.Random) -> Operation:
        near, far = (make_stage(width, draw.getrandbits(32)) for _ in range(2))
        inputs, parameters = torch.rand(batch, width), [*near.parameters(), *far.parameters()]

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(far(near(inputs)).square().mean(), parameters)

        expected = run()
        return Operation(run, lambda found: all(map(torch.equal, found, expected)))

    return prepare


def step(width: int, batch: int) -> Prepare:
    def prepare(api: Api, draw: random.Random) -> Operation:
        stages = _TwoStages(api, draw, width, batch)
        begun = [parameter.detach().clone() for parameter in stages.parameters]
        near = [api.rpc.RRef(parameter) for parameter in stages.near.parameters()]
        far = api.rpc.rpc_sync(CALLEE, shared, args=(stages.far,))
        optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, [*near, *far], lr=_RATE)
        contexts: list[int] = []
        steps = 0

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with api.autograd.context() as context:
                stages.backward(context)
                contexts.append(context)
                yield

        def run() -> int:
            nonlocal steps
            optimizer.step(contexts[-1])
            steps += 1
            return steps

        def right(taken: int) -> bool:
            now = [*stages.near.parameters(), *api.rpc.rpc_sync(CALLEE, values, args=(stages.far,))]
            moved = [(before - after) / _RATE for before, after in zip(begun, now, strict=True)]
            return all(
                torch.allclose(way, taken * gradient, rtol=1e-3, atol=taken * 1e-5)
                for way, gradient in zip(moved, stages.gradients, strict=True)
            )

        return Operation(run, right, around)

    return prepare


SMALL = "function returning an int"
LOOP = "send 128 MB in a plain loop, between hosts"

WORKLOADS: dict[str, Workload] = {
    SMALL: Workload(int_call, Row(Goal(2))),
    "function on two tiny tensors": Workload(python_on_tensors, Row(Goal(2))),
    "torch.add on tiny tensors": Workload(torch_add, Row(Goal(1.2))),
    "remote + to_here": Workload(remote_value, Row(Goal(1.3)), needs=RREFS),
    "method through an RRef": Workload(method, Row(Goal(2.5)), needs=RREFS),
    "1 in flight, per call": Workload(in_flight(1), Row(Goal(1.7))),
    "16 in flight, per call": Workload(in_flight(16), Row(Goal(3.5))),
    "256 in flight, per call": Workload(in_flight(256), Row(Goal(3))),
    "echo 1 KB": Workload(echo(KB), Row(Goal(1.7))),
    "echo 64 KB": Workload(echo(64 * KB), Row(Goal(1.7))),
    "echo 1 MB": Workload(echo(MB), Row(Goal(1.7))),
    "echo 16 MB": Workload(echo(16 * MB), Row(Goal(1.5))),
    "echo 128 MB": Workload(echo(128 * MB), Row(Goal(4))),
    "send 16 MB, int back": Workload(send(16 * MB), Row(Goal(1.3))),
    "forward, d=16": Workload(forward_pass(16, 4, is_recorded=False), Row(Goal()), needs=TRAINING),
    "context + forward, d=16": Workload(forward_pass(16, 4, is_recorded=True), Row(Goal()), needs=TRAINING),
    "context + backward, d=16": Workload(backward(16, 4), Row(Goal(1.15)), needs=TRAINING),
    "context + backward, d=128": Workload(backward(128, 32), Row(Goal(1.1)), needs=TRAINING),
    "context + backward, d=512": Workload(backward(512, 64), Row(Goal(1.05)), needs=TRAINING),
    "optimizer step, 6 + 6 parameters": Workload(step(16, 4), Row(Goal(1.15)), needs=TRAINING),
    "beside a busy thread, 99th percentile": Workload(
        beside_busy_thread, Row(Goal(most=1e-3), quantile=0.99), needs=RREFS
    ),
    "with a panel open": Workload(panel_open, Row(Goal(most=1.2, of=SMALL)), on=OURS),
    "operation on a named tensor": Workload(operations, Row(Goal(most=15e-6)), on=OURS),
    f"{SMALL}, between hosts": Workload(int_call, Row(Goal(most=1.5, of=SMALL)), on=HOSTS),
    "send 128 MB, between hosts": Workload(send(128 * MB), Row(Goal(most=1.25, of=LOOP)), on=HOSTS),
    LOOP: Workload(plain.send(128 * MB), Row(Goal()), on=PLAIN),
    "a word there and back between two bare processes": Workload(plain.word, Row(Goal()), on=BARE),
    "both stages' backward in one process, d=16": Workload(alone(16, 4), Row(Goal()), on=OURS),
    "both stages' backward in one process, d=128": Workload(alone(128, 32), Row(Goal()), on=OURS),
    "both stages' backward in one process, d=512": Workload(alone(512, 64), Row(Goal()), on=OURS),
}
