"""Checks of lesson 14."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from crossings import own
from torch import Tensor, nn

import rpcbench.autograd as dist_autograd
from checks import exercise, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from rpcbench.nn import RemoteModule
from rpcbench.optim import DistributedOptimizer

Modules = tuple[Any, Any, Any]
Forward = Callable[[Modules, Tensor], Tensor]
NAMES = ("embedding", "reader", "decoder")


@exercise(
    "An optimizer holds RRefs of the parameters that it was made with. Which ones does the model use after the move?",
    'Move first: `modules[2].to("worker2")`. Then make the optimizer as in the training above.',
)
def move_decoder(answer: Callable[[Modules], DistributedOptimizer]) -> None:
    """`answer(modules)` moves the decoder to worker2 and returns an optimizer of all parameters."""
    modules = _linear_modules()
    before = _values(modules)
    with trying():
        optimizer = returned(answer(modules))
    require(isinstance(optimizer, DistributedOptimizer), f"Return a DistributedOptimizer, not {shown(optimizer)}.")
    owners = [module.get_module_rref().owner_name() for module in modules]
    wanted = ["worker1", "worker2", "worker2"]
    require(owners == wanted, f"The modules should be on {wanted} then; they are on {owners}.")
    require(_values(modules) == before, "The weights should move along as they are. These are other ones.")
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [_forward(modules, torch.ones(2, 3)).sum()])
        optimizer.step(context_id)
    for name, old, new in zip(NAMES, before, _values(modules), strict=True):
        require(old != new, f"After a step of this optimizer the {name} is what it was: it does not learn.")
        for a, b in zip(old, new, strict=True):
            require(a != b, f"After a step of this optimizer a parameter of the {name} is what it was: one of its "
                    f"{len(old)} does not learn.")  # fmt: skip
            moved = (torch.tensor(a) - torch.tensor(b)).abs().max().item()
            require(abs(moved - 0.02) < 1e-4, f"The first step of Adam with a learning rate of 0.02 moves each weight "
                    f"by 0.02; the {name} has moved by {moved:.3g}.")  # fmt: skip
    right("Two crossings less in each step.")


@exercise(
    "One call to `worker1` can do everything that is needed: two of the modules are there, and it can call the third.",
    'Write a function of `(modules, numbers)` that returns the scores, and run it by `rpc.rpc_sync("worker1", ...)`.',
)
def short_way(answer: Forward) -> None:
    """`answer(modules, numbers)` keeps activations out of the notebook."""
    modules = _linear_modules()
    numbers = torch.rand(4, 3)
    with dist_autograd.context() as context_id:
        with trying():
            scores = returned(answer(modules, numbers))
        row = own(context_id) or {"recvs": []}
        require(isinstance(scores, Tensor), f"The answer should be the scores, not {shown(scores)}.")
        require(scores.shape == (4, 3) and torch.allclose(scores, _forward(modules, numbers)),
                "These are not the scores that `forward` gives.")  # fmt: skip
        require(row["recvs"] and scores.requires_grad, "No graph leads back from the scores to the workers: the "
                "gradients could not go there.")  # fmt: skip
        back = len(row["recvs"])
        require(back == 1, f"{back} messages with activations came to this notebook. Only the scores should.")
        before = _values(modules)
        every = [rref for module in modules for rref in module.remote_parameters()]
        optimizer = DistributedOptimizer(torch.optim.SGD, every, lr=1.0)
        dist_autograd.backward(context_id, [scores.sum()])
        optimizer.step(context_id)
        for name, old, new in zip(NAMES, before, _values(modules), strict=True):
            require(old != new, f"No gradient comes back to the {name}: the graph is cut on the way.")
    right("The notebook gives the order, and the workers pass activations directly.")


def _linear_modules() -> Modules:
    places = ("worker1", "worker2", "worker1")
    embedding, reader, decoder = (RemoteModule(place, nn.Linear, (3, 3)) for place in places)
    return embedding, reader, decoder


def _forward(modules: Modules, numbers: Tensor) -> Tensor:
    embedding, reader, decoder = modules
    scores: Tensor = decoder(reader(embedding(numbers)))
    return scores


def _values(modules: Modules) -> list[list[Any]]:
    return [[rref.to_here().tolist() for rref in module.remote_parameters()] for module in modules]


# -- a clock of its own: a call begins when it is made and its worker is free, and lasts as long as its input is large
class Clock:
    """The time at the notebook, and when each worker is free."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free: dict[str, float] = {}

    def call(self, worker: str, lasts: float) -> float:
        """When a call that is made now ends."""
        self.free[worker] = max(self.now, self.free.get(worker, 0.0)) + lasts
        return self.free[worker]


class Coming:
    """The future of a call: whoever waits for it is there when the call ends."""

    def __init__(self, clock: Clock, end: float, value: Any) -> None:
        self._clock, self._end, self._value = clock, end, value

    def wait(self) -> Any:
        self._clock.now = max(self._clock.now, self._end)
        return self._value


class Watched:
    """Stands in for a RemoteModule: computes here, at once, and counts time on the clock."""

    def __init__(self, clock: Clock, worker: str, module: nn.Module, dim: int, each: float) -> None:
        self._clock, self._worker, self._module, self._dim, self._each = clock, worker, module, dim, each
        self.calls = 0

    def forward_async(self, *args: Any) -> Coming:
        require(not any(isinstance(each, Coming) for each in args),
                "A future was handed to a module. `.wait()` brings the value.")  # fmt: skip
        self.calls += 1
        lasts = self._each * args[0].shape[self._dim]
        return Coming(self._clock, self._clock.call(self._worker, lasts), self._module(*args))

    def forward(self, *args: Any) -> Any:
        return self.forward_async(*args).wait()

    __call__ = forward

    def parameters(self) -> list[nn.Parameter]:
        return list(self._module.parameters())


@exercise(
    "When a part is ready, begin its next call at once; do not wait for the other parts first.",
    "Begin with `begun = [embedding.forward_async(part) for part in numbers.chunk(parts)]`; then begin the reader's "
    "call for each part with `part.wait()`.",
)
def at_once(answer: Callable[[Modules, Tensor, int], Tensor]) -> None:
    """`answer(modules, numbers, parts)` has several parts of a batch under way."""
    for rows, parts in ((16, 4), (8, 2), (12, 3), (5, 2), (6, 1), (5, 4)):
        torch.manual_seed(rows)
        clock = Clock()
        modules = tuple(
            Watched(clock, worker, nn.Linear(3, 3), 0, times * parts / rows)
            for worker, times in (("worker1", 1), ("worker2", 2), ("worker1", 1))
        )
        numbers = torch.rand(rows, 3)
        before = numbers.clone()
        with trying():
            scores = returned(answer(modules, numbers, parts))
        took, calls, there = clock.now, [module.calls for module in modules], len(numbers.chunk(parts))
        case = f"For {rows} rows in {parts} part{'s' if parts > 1 else ''}"
        require(isinstance(scores, Tensor), f"The answer should be the scores, not {shown(scores)}.")
        require(torch.equal(numbers, before), f"{case} the numbers have changed.")
        whole = modules[2](modules[1](modules[0](numbers)))
        require(scores.shape == whole.shape and torch.allclose(scores, whole),
                f"{case} these are not the scores that `forward` gives, in the same order.")  # fmt: skip
        require(scores.requires_grad, f"{case} the scores have no graph behind them.")
        for name, module in zip(NAMES, modules, strict=True):
            gradients = torch.autograd.grad(scores.sum(), module.parameters(), retain_graph=True, allow_unused=True)
            cut = f"{case} no gradient comes back to the {name}: the graph is cut on the way."
            require(all(gradient is not None for gradient in gradients), cut)
        require(calls == [there] * 3, f"{case} the modules were called {calls} times.")
        turns, best = 4.0 * parts, 2.0 * parts + 2
        if rows % parts == 0:
            require(took <= best + 0.1 * (turns - best), f"{case} it took {took:g} units of time. One part after the "
                    f"other takes {turns:g}, and {best:g} will do.")  # fmt: skip
    right("A first pipeline.")


@exercise(
    "The lower layer's next piece needs the lower layer's state only. What may the upper layer do meanwhile?",
    "In a loop over the pieces: begin the lower layer's call; wait for the upper layer's call of the piece before; "
    "wait for the lower layer's; begin the upper layer's with what it brings.",
)
def along_time(answer: Callable[[Any, Any, Tensor, int], Tensor]) -> None:
    """`answer(lower, upper, vectors, pieces)` reads a sequence by two layers at once, a piece apart."""
    for steps, pieces in ((8, 4), (6, 3), (6, 6), (7, 2), (4, 1), (5, 4)):
        torch.manual_seed(steps)
        clock = Clock()
        layers = [Layer(3, 4), Layer(4, 5)]
        lower, upper = (
            Watched(clock, worker, layer, 1, pieces / steps)
            for worker, layer in zip(("worker1", "worker2"), layers, strict=True)
        )
        vectors = torch.rand(2, steps, 3)
        with trying():
            hidden = returned(answer(lower, upper, vectors, pieces))
        took, calls = clock.now, [lower.calls, upper.calls]
        case = f"For {steps} vectors in {pieces} piece{'s' if pieces > 1 else ''}"
        require(isinstance(hidden, Tensor), f"The answer should be the hidden vectors, not {shown(hidden)}.")
        _same_sequence(case, layers, vectors, hidden, pieces)
        there = len(vectors.chunk(pieces, 1))
        require(calls == [there] * 2, f"{case} the layers were called {calls} times.")
        turns, best = 2.0 * pieces, pieces + 1.0
        if steps % pieces == 0:
            require(took <= best + 0.1 * (turns - best), f"{case} it took {took:g} units of time. Layer after layer "
                    f"takes {turns:g}, and {best:g} will do.")  # fmt: skip
    right("A wavefront: in each unit of time both layers read, one piece apart.")


def _same_sequence(case: str, layers: Sequence[nn.Module], vectors: Tensor, hidden: Tensor, pieces: int) -> None:
    """The hidden vectors are those of the whole sequence."""
    wanted = layers[1](layers[0](vectors)[0])[0]
    require(
        hidden.shape == wanted.shape, f"{case} the shape should be {tuple(wanted.shape)}, not {tuple(hidden.shape)}."
    )
    first = -(-vectors.shape[1] // pieces)
    require(
        torch.allclose(hidden[:, :first], wanted[:, :first], atol=1e-6), f"{case} the first piece is wrong already."
    )
    require(torch.allclose(hidden, wanted, atol=1e-6), f"{case} the first piece is right, and a later one is not. Does "
            "each layer begin it with its own state at the end of the piece before?")  # fmt: skip
    require(hidden.requires_grad, f"{case} the hidden vectors have no graph behind them.")
    for name, layer in zip(("lower", "upper"), layers, strict=True):
        wholes, founds = (
            torch.autograd.grad(each.sum(), list(layer.parameters()), retain_graph=True, allow_unused=True)
            for each in (wanted, hidden)
        )
        same = all(b is not None and torch.allclose(a, b, atol=1e-4) for a, b in zip(wholes, founds, strict=True))
        require(same, f"{case} the gradients of the {name} layer are not those of the whole sequence: the graph is cut "
                "between layers or pieces.")  # fmt: skip


class Layer(nn.Module):
    """As in the lesson."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, hidden, batch_first=True)

    def forward(self, vectors: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Any:
        return self.lstm(vectors, state)
