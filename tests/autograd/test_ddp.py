"""`DistributedDataParallel` in a distributed backward: trainers in real processes call one server."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sizes import long
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rpcbench import Cluster, autograd
from rpcbench.autograd import gradients
from rpcbench.rpc import RRef, rpc_sync

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TRAINERS, SERVER = ["worker1", "worker2"], "worker3"


def curve(x: Tensor) -> Tensor:
    return x.sin() * x


class Trainer:
    """One replica of a layer, and a copy of it for local backwards."""

    def __init__(self, rank: int, meeting: str, options: dict[str, Any]) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=len(TRAINERS))
        torch.manual_seed(0)
        layer = nn.Linear(3, 3).double()
        self.replica = DistributedDataParallel(layer, **options)
        self.beside = DistributedDataParallel(copy.deepcopy(layer), **options)
        self.hooked: list[Tensor] = []
        self.inputs = [torch.rand(4, 3, dtype=torch.double) + rank + turn for turn in range(3)]

    def _params(self) -> list[Tensor]:
        return list(self.replica.module.parameters())

    def _losses(self, through: Callable[[Tensor], Tensor], module: DistributedDataParallel) -> Iterator[Tensor]:
        """Yield the loss of the first input within no_sync(), then the loss of the second input."""
        for wait, x in ((module.no_sync(), self.inputs[0]), (contextlib.nullcontext(), self.inputs[1])):
            with wait:
                yield through(module(x)).sum()

    def _locally(self) -> list[Tensor]:
        self.beside.zero_grad()
        for loss in self._losses(curve, self.beside):
            loss.backward()  # type: ignore[no-untyped-call]
        return [param.grad.clone() for param in self.beside.parameters() if param.grad is not None]

    def differences(self) -> list[float]:
        """Return the differences between averaged gradients in a context and those of local backwards."""
        with autograd.context() as context:
            for loss in self._losses(lambda y: rpc_sync(SERVER, curve, (y,)), self.replica):
                autograd.backward(context, [loss])
            found = autograd.get_gradients(context)
        want = self._locally()
        return [float((found[param] - grad).abs().max()) for param, grad in zip(self._params(), want, strict=True)]

    def kept(self) -> bool:
        """Return whether later passes do not change a returned gradient, and run the hook once each; check `.grad`."""
        first, *_ = self._params()
        first.grad = torch.full_like(first, 5.0)
        handle = first.register_hook(lambda grad: self.hooked.append(grad) or grad * 2)  # type: ignore[no-untyped-call, func-returns-value]
        with autograd.context() as context:
            for x in self.inputs[:2]:  # after the first pass, torch makes new buckets
                autograd.backward(context, [self.replica(x).sum()])
            once = autograd.get_gradients(context)[first]
            before = once.clone()
            autograd.backward(context, [self.replica(self.inputs[2]).sum()])
            later = autograd.get_gradients(context)[first]
        handle.remove()
        assert not torch.equal(later, once), "the last pass has added nothing"
        assert first.grad is not None and bool((first.grad == 5).all())
        return torch.equal(once, before) and len(self.hooked) == 3

    def refused(self) -> str:
        with autograd.context() as context:
            loss = self.replica(self.inputs[0]).sum()
            try:
                autograd.backward(context, [loss])
            except NotImplementedError as error:
                return str(error)
        return ""


@pytest.fixture
def cluster(no_leaks: None) -> Iterator[Cluster]:
    with Cluster(3) as running:
        yield running


def on_both(cluster: Cluster, tmp_path: Path, what: str, **options: Any) -> list[Any]:
    """Call a method of both trainers at the same time; return both results."""
    meeting = str(tmp_path / "meeting")
    made: list[RRef[Trainer]] = [cluster.remote(n, Trainer, (r, meeting, options)) for r, n in enumerate(TRAINERS)]
    asked = [getattr(trainer.rpc_async(timeout=60), what)() for trainer in made]
    return [future.wait() for future in asked]


VIEWS = {"gradient_as_bucket_view": True}


@pytest.mark.parametrize("options", [VIEWS, *long({})], ids=["bucket views", "plain"])
def test_gradients_are_averaged_as_in_a_local_backward(cluster: Cluster, tmp_path: Path, options: Any) -> None:
    for differences in on_both(cluster, tmp_path, "differences", **options):
        assert len(differences) == 2 and max(differences) < 1e-12


@pytest.mark.parametrize("options", [{}, *long(VIEWS)], ids=["plain", "bucket views"])
def test_a_pass_leaves_returned_gradients_grad_and_hooks_unchanged(
    cluster: Cluster, tmp_path: Path, options: Any
) -> None:
    assert on_both(cluster, tmp_path, "kept", **options) == [True, True]


def test_a_replica_with_a_static_graph_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    for words in on_both(cluster, tmp_path, "refused", static_graph=True):
        assert "static_graph" in words and "make it without" in words


def test_leaves_without_replicas_are_not_reduced() -> None:
    leaves = [(torch.ones(1), torch.ones(1))]
    assert gradients.split_replicas(leaves) == (leaves, [])
