"""What panels cost the runtime: the same changes at the same pace, with a panel open and without. Runs in a notebook.

The figure is the CPU time of the kernel and of all workers, as a share of a core, open minus closed. Both are measured
in turn, many times, and the median difference counts: a machine that is busy otherwise slows both down.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from torch import nn
from torch.nn import functional

import rpcbench
from rpcbench import autograd, rpc
from rpcbench.base.conditions import Condition
from rpcbench.pipeline import Pipeline, split

UPDATES = 20  # a second
_KEPT, _FEW = 50, 6
_PATIENCE = 20.0

Change = Callable[[], object]


@contextlib.contextmanager
def rrefs() -> Iterator[Change]:
    """An RRef comes, and an older one goes."""
    kept: collections.deque[object] = collections.deque(maxlen=_KEPT)
    yield lambda: kept.append(rpc.remote("worker1", int, (1,)))


@contextlib.contextmanager
def contexts() -> Iterator[Change]:
    """A context comes, with a message each way and a backward pass, and an older one goes."""
    leaf = torch.ones(8, requires_grad=True)
    here = autograd.recorder()
    kept: collections.deque[int] = collections.deque()

    def change() -> None:
        kept.append(here.new_context())
        with here.enter_context(kept[-1]):
            autograd.backward(kept[-1], [rpc.rpc_sync("worker1", torch.mul, (leaf, 2.0)).sum()])
        if len(kept) > _FEW:
            here.release_context(kept.popleft())

    try:
        yield change
    finally:
        for context in kept:
            here.release_context(context)


@contextlib.contextmanager
def steps() -> Iterator[Change]:
    """A step of two stages and four micro-batches."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    pipe = Pipeline(split(model, ["worker1", "worker2"]), microbatches=4, loss_fn=functional.cross_entropy)
    x, y = torch.rand(8, 8), torch.zeros(8, dtype=torch.long)

    def change() -> None:
        with pipe.batch(x, y):
            pass

    yield change


CHANGES = {"rrefs": rrefs, "autograd": contexts, "pipeline": steps}


def cost(name: str, turns: int, seconds: float) -> tuple[float, float]:
    """Shares of a core: what the panel `name` adds, and what the changes take without it; `turns` of each."""
    added, taken = [], []
    with CHANGES[name]() as change:
        _share(change, seconds)
        for _ in range(turns):
            taken.append(_share(change, seconds))
            with _open(name):
                added.append(_share(change, seconds) - taken[-1])
    return median(added), median(taken)


@contextlib.contextmanager
def _open(name: str) -> Iterator[None]:
    """A panel that shows all there is already."""
    panel, changes = rpcbench.panel(name), Condition()
    panel.observe(lambda _: changes.notify_all(), "state")
    try:
        everybody = len(rpcbench.cluster().workers) + 1
        changes.wait_for(lambda: len(panel.state["view"].get("workers", ())) == everybody, _PATIENCE)
        yield
    finally:
        panel.close()


def _share(change: Change, seconds: float) -> float:
    """CPU time of all processes while changes are made at their pace."""
    before, begin = _spent(), time.monotonic()
    for number in range(round(seconds * UPDATES)):
        time.sleep(max(0.0, begin + number / UPDATES - time.monotonic()))
        change()
    return (_spent() - before) / (time.monotonic() - begin)


def _spent() -> float:
    there: list[float] = [rpc.rpc_sync(name, time.process_time) for name in rpcbench.cluster().workers]
    return time.process_time() + sum(there)
