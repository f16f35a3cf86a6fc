"""Two trainers and one parameter server, in real processes, learn digits as one process does.

worker1 keeps the weights; worker2 and worker3 pull them, and push gradients of their own half of the images.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn import Parameter, functional

from rpcbench import Cluster, autograd
from rpcbench.optim import DistributedOptimizer
from rpcbench.rpc import Future, RRef, functions, rpc_sync

pytestmark = pytest.mark.process

SERVER, TRAINERS = "worker1", ["worker2", "worker3"]
STEPS, SIZE, RATE = 150, 32, 0.3
Data = tuple[Tensor, Tensor]
Weights = list[Tensor]


@pytest.fixture
def cluster(no_leaks: None) -> Iterator[Cluster]:
    with Cluster(3) as running:
        yield running


def digits() -> tuple[Data, Data]:
    """Return images for training, and others for testing."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return (x[train], y[train]), (x[test], y[test])


def begin() -> Weights:
    made = torch.Generator().manual_seed(5)
    w1, w2 = (torch.randn(shape, generator=made).double() / 8 for shape in ((64, 32), (32, 10)))
    return [w1, torch.zeros(32).double(), w2, torch.zeros(10).double()]


def predict(x: Tensor, weights: Weights) -> Tensor:
    w1, b1, w2, b2 = weights
    return torch.relu(x @ w1 + b1) @ w2 + b2


def accuracy(weights: Weights, test: Data) -> float:
    return float((predict(test[0], weights).argmax(1) == test[1]).double().mean())


def batches(data: Data, seed: int) -> Iterator[Data]:
    made = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        chosen = torch.randint(len(data[0]), (SIZE,), generator=made)
        yield data[0][chosen], data[1][chosen]


def halves(data: Data) -> list[Data]:
    return [(data[0][half::2], data[1][half::2]) for half in range(len(TRAINERS))]


def train_locally(data: Data) -> Weights:
    """Train in one process, which gets in each step the batches of all trainers."""
    weights = [values.requires_grad_() for values in begin()]
    optimizer = torch.optim.SGD(weights, lr=RATE)
    for parts in zip(*(batches(half, seed) for seed, half in enumerate(halves(data))), strict=True):
        optimizer.zero_grad()
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        functional.cross_entropy(predict(x, weights), y).backward()
        optimizer.step()
    return [values.detach() for values in weights]


def run_trainers(cluster: Cluster, train: Any, data: Data, *args: Any) -> list[Any]:
    halved = zip(TRAINERS, halves(data), strict=True)
    futures = [cluster.rpc_async(t, train, (half, seed, *args)) for seed, (t, half) in enumerate(halved)]
    return [future.wait() for future in futures]


# -- asynchronous: no trainer waits, and each step has its own context
def pull(weights: list[RRef[Any]]) -> Weights:
    return [weight.local_value() for weight in weights]


def train_async(data: Data, seed: int, weights: list[RRef[Any]], optimizer: DistributedOptimizer) -> None:
    for x, y in batches(data, seed):
        with autograd.context() as context:
            loss = functional.cross_entropy(predict(x, rpc_sync(SERVER, pull, (weights,))), y)
            autograd.backward(context, [loss])
            optimizer.step(context)


@pytest.mark.long
def test_asynchronous_trainers_are_nearly_as_accurate_as_one_process(cluster: Cluster) -> None:
    train, test = digits()
    weights = [cluster.remote(SERVER, Parameter, (values,)) for values in begin()]
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=RATE)
    run_trainers(cluster, train_async, train, weights, optimizer)
    local, learned = accuracy(train_locally(train), test), accuracy([w.to_here() for w in weights], test)
    assert local > 0.9
    assert learned > local - 0.03


# -- synchronous: all trainers wait for one step with all gradients
class Server:
    def __init__(self, values: Weights, rate: float, trainers: int) -> None:
        self.values, self.rate, self.trainers = values, rate, trainers
        self.lock = threading.Lock()
        self.pushed: list[Weights] = []
        self.answer: Future[Weights] = Future()

    @functions.async_execution
    def push(self, gradients: Weights) -> Future[Weights]:
        with self.lock:
            answer, pushed = self.answer, [*self.pushed, gradients]
            complete = len(pushed) == self.trainers
            self.pushed, self.answer = ([], Future()) if complete else (pushed, answer)
        if complete:
            steps = [torch.stack(parts).mean(0) * self.rate for parts in zip(*pushed, strict=True)]
            self.values = [values - step for values, step in zip(self.values, steps, strict=True)]
            answer.set_result(self.values)
        return answer


def train_sync(data: Data, seed: int, server: RRef[Server]) -> Weights:
    weights = begin()
    for x, y in batches(data, seed):
        weights = [values.requires_grad_() for values in weights]
        loss = functional.cross_entropy(predict(x, weights), y)
        weights = server.rpc_sync().push(list(torch.autograd.grad(loss, weights)))
    return weights


def test_synchronous_trainers_learn_the_same_weights_as_one_process(cluster: Cluster) -> None:
    train, test = digits()
    server = cluster.remote(SERVER, Server, (begin(), RATE, len(TRAINERS)))
    answers = run_trainers(cluster, train_sync, train, server)
    local = train_locally(train)
    for weights in answers:
        torch.testing.assert_close(weights, local, rtol=0, atol=1e-11)
    assert accuracy(answers[0], test) > 0.9
