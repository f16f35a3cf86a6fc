"""Checks of lesson 13."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rpcbench
import rpcbench.rpc as rpc
from checks import NotYet, differ, exercise, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.interleaving import TOGETHER, Call, interleaved
from rpcbench.optim import DistributedOptimizer
from rpcbench.runtime.server import ASYNC_MARK

Log = list[tuple[str, str]]
Batch = tuple[Tensor, Tensor]
LOGS = {
    "pull a, push a, pull a, push a": [0, 0],
    "pull a, pull b, push a, push b": [0, 1],
    "pull a, push a, push a, push a": [0, 1, 2],
    "pull a, pull b, push b, pull b, push b, push a": [0, 0, 2],
    "pull c, pull a, pull b, push a, pull a, push a, push c, push b": [0, 0, 2, 3],
    "pull a": [],
    "pull a, pull b, push b, pull a, push a": [0, 0],
    "pull a, pull b, push a, push b, push a, push b": [0, 1, 2, 3],
}
PATIENCE = 3.0


@exercise(
    "The server makes one step for each push. Which number did its counter of steps have when the trainer pulled?",
    "Go through the log once, with `steps = 0` and a dict `pulled = {}` of the steps at each trainer's last pull.",
)
def staleness(answer: Callable[[Log], list[int]]) -> None:
    """`answer(log)` counts the steps between each push and the pull that belongs to it."""
    for text, wanted in LOGS.items():
        log = [(what, who) for what, who in (entry.split() for entry in text.split(", "))]
        before = list(log)
        with trying():
            found = returned(answer(log))
        require(log == before, "It changes the log that it was given.")
        found = read(found, [int], "The answer should be a list of whole numbers")
        require(len(found) == len(wanted), f"For “{text}” there are {len(wanted)} pushes, not {len(found)}.")
        require(found == wanted, f"For “{text}” it is {wanted}, and yours gave {found}.")
    right("So a server can know how late each of its gradients was.")


@exercise(
    "All losses hang on the same pulled weights, so one loss made of all of them needs one `backward`.",
    "Begin as `train_async` does, with a context and one pull; then `losses = [... for images, labels in batches]`.",
)
def big_step(answer: Callable[[Any, DistributedOptimizer, list[Batch]], float], kind: Any, begin: list[Tensor]) -> None:
    """`answer(weights, optimizer, batches)` is one step with the gradient of the mean loss: one pull, one push."""
    for count in (3, 2, 5, 1):
        _one_step(answer, kind, begin, count)
    right("Five batches, one pull, one push.")


def _one_step(answer: Callable[..., float], kind: Any, begin: list[Tensor], count: int) -> None:
    class Counted(kind):  # type: ignore[misc]
        pulls = 0

        def pull(self) -> Any:
            self.pulls += 1
            return super().pull()

        def state(self) -> tuple[int, list[int], list[Tensor]]:
            return self.pulls, self.log(), [values.detach() for values in self.values]

    generator = torch.Generator().manual_seed(count)
    batches = [(torch.rand(8, 64, generator=generator).double(), (torch.arange(8) + k) % 10) for k in range(count)]
    weights = rpc.remote("worker1", Counted, (begin,))
    optimizer = DistributedOptimizer(torch.optim.SGD, weights.rpc_sync().references(), lr=1.0)
    with rpcbench.trace() as seen, trying():
        loss = returned(answer(weights, optimizer, list(batches)))
    pulls, log, values = weights.rpc_sync().state()
    wanted, gradients = _mean(begin, batches)
    moved = torch.cat([(before - after).flatten() for before, after in zip(begin, values, strict=True)])
    require(moved.any(), "The weights on the server have not moved. The pull, the `backward` and the "
            "step belong to one context, in this order.")  # fmt: skip
    times = (moved @ gradients / (gradients @ gradients)).item()
    straight = torch.allclose(moved, times * gradients, atol=1e-9)
    require(straight, "The step does not go along the gradient of the mean loss, taken at one point.")
    require(abs(times - 1) < 1e-6, f"The step is {times:.3g} times as long as that of the mean loss.")
    require(pulls == 1, f"The weights were pulled {pulls} times.")
    here = rpc.get_worker_info().id
    messages = seen.view["messages"].values()
    pushes = sum(row["kind"] == "Gradients" and row["from"] == here for row in messages)
    require(pushes <= 1, f"The step is right, but there were {pushes} pushes: each `backward` is one.")
    require(log in ([], [0]), f"The server was told of {len(log)} steps, with the staleness {log}. You may leave "
            "`pushed` out; if you call it, then once, with the number of steps at your pull.")  # fmt: skip
    loss = read(loss, float, "The mean loss should be a number")
    require(abs(loss - wanted) < 1e-6, f"The mean loss is {differ(wanted, loss, ', and yours is ')}.")


def _mean(begin: list[Tensor], batches: list[Batch]) -> tuple[float, Tensor]:
    """The mean loss and its gradient as one vector."""
    local = [values.clone().requires_grad_() for values in begin]
    w1, b1, w2, b2 = local
    losses = [F.cross_entropy(torch.relu(images @ w1 + b1) @ w2 + b2, labels) for images, labels in batches]
    loss = torch.stack(losses).mean()
    return loss.item(), torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, local)])


@exercise(
    "A call that may not be answered yet keeps its future. Which calls of `finished` can free which trainers?",
    "Keep two dicts: the number of steps that each trainer has finished, and the futures of those that wait. Each call "
    "looks through those that wait, and sets the results of all that may go on.",
)
def bounded(answer: Any) -> None:
    """`answer(trainers, bound)` answers a trainer once it is at most `bound` steps ahead of the slowest."""
    marked = getattr(getattr(answer, "finished", None), ASYNC_MARK, None) is not None
    require(marked, "`finished` should be marked with `async_execution`, so that no thread waits.")
    for names, bound, calls in (
        ("ab", 0, 6),
        ("ab", 1, 12),
        ("abc", 0, 9),
        ("abc", 2, 40),
        ("abcd", 1, 40),
        ("a", 3, 5),
    ):
        made = random.Random(len(names) + bound)
        trainers = [f"trainer {name}" for name in names]
        with trying():
            server = answer(list(trainers), bound)
        _play(server, trainers, bound, made, calls)
    _two_servers(answer)
    _in_turns(answer)
    right("With the bound 0 that is synchronous SGD, and with a very large one asynchronous SGD.")


def _play(server: Any, trainers: list[str], bound: int, made: random.Random, calls: int) -> None:
    clocks = dict.fromkeys(trainers, 0)
    waiting: dict[str, Any] = {}
    story: list[str] = []
    case = f"With {len(trainers)} trainers and the bound {bound}"
    for _ in range(calls):
        who = made.choice([name for name in trainers if name not in waiting])
        clocks[who] += 1
        story.append(f"{who[-1]} has finished {clocks[who]}")
        future = returned(_called(server, who), server.finished)
        require(isinstance(future, torch.futures.Future), f"`finished` should return a future, not {shown(future)}.")
        waiting[who] = future
        told = f"{case}, after “{', '.join(story[-4:])}”"
        for name in list(waiting):
            free = clocks[name] - min(clocks.values()) <= bound
            done = waiting[name].done()
            require(done or not free, f"{told}, {name} may go on, and still has no answer.")
            ahead = clocks[name] - min(clocks.values())
            require(free or not done, f"{told}, {name} is ahead by {ahead}, and has its answer already.")
            if free:
                with trying("The future"):
                    value = waiting.pop(name).wait()
                require(value == clocks[name], f"{told}, the answer to {name} is {shown(value)}, not {clocks[name]}.")


def _two_servers(answer: Any) -> None:
    """Two servers share no state."""
    trainers = ["trainer a", "trainer b"]
    with trying():
        servers = [answer(list(trainers), 0) for _ in range(2)]
    futures = [_called(server, name) for server, name in zip(servers, trainers, strict=True)]
    require(not any(future.done() for future in futures), "Of two servers with the bound 0, a has finished a step on "
            "one and b on the other. Both wait, and one of them has its answer: the servers share what they "
            "know.")  # fmt: skip


def _in_turns(answer: Any) -> None:
    """The calls of two trainers run between each other's lines; each of them frees a third trainer."""
    futures: dict[str, Any] = {}

    def calls() -> tuple[Call, Call]:
        futures.clear()
        server = answer(["trainer a", "trainer b", "trainer c"], 1)
        for name in ("trainer a", "trainer a", "trainer b"):
            futures[name] = server.finished(name)
        return (
            lambda: futures.update({"trainer c": server.finished("trainer c")}),
            lambda: futures.update({"trainer b": server.finished("trainer b")}),
        )

    for _ in interleaved(answer, calls):
        late = [name for name, future in futures.items() if not future.done()]
        require(not late, f"{TOGETHER}, and {' and '.join(late)} may go on, but has no answer. A lock is missing.")
        with trying("The future"):
            found = [futures[f"trainer {name}"].wait() for name in "abc"]
        require(found == [2, 2, 1], f"{TOGETHER}, and the answers were {found}, not [2, 2, 1]. A lock is missing.")


def _called(server: Any, who: str) -> Any:
    """What `finished` returns, on a thread of its own as on a real server: a thread that waits is told of."""
    found: list[Any] = []

    def call() -> None:
        try:
            with trying("`finished`"):
                found.append(server.finished(who))
        except NotYet as told:
            found.append(told)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    require(found, "A call of `finished` does not return: its thread waits. Return a future instead.")
    if isinstance(found[0], NotYet):
        raise found[0]
    return found[0]
