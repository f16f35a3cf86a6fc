"""A small model in double precision, data for it, and a pipeline of two stages: for tests against one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rpcbench.pipeline import Pipeline, split

WORKERS = ["worker1", "worker2"]
STAGES = {
    "sequential": 1, "gpipe": 1, "1f1b": 1, "interleaved": 2, "bfs": 2, "zb1p": 2, "zbv": 2, "dualpipev": 2
}  # fmt: skip
"""Every schedule that trains in steps, and how many stages each worker has in tests of it."""
SGD = (torch.optim.SGD, {"lr": 0.3, "momentum": 0.9})


def model(*between: nn.Module) -> nn.Sequential:
    """Make a model, with the same weights each time; the modules `between` stand before its last layer."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), *between, nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def data(samples: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.rand(samples, 6, dtype=torch.double, generator=made)
    return x, torch.randint(0, 4, (samples,), generator=made)


def pipeline(net: nn.Sequential | None = None, **changes: Any) -> Pipeline:
    fields: dict[str, Any] = {"microbatches": 4, "loss_fn": functional.cross_entropy}
    return Pipeline(split(model() if net is None else net, WORKERS), **{**fields, **changes})


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor | None]) -> None:
    """Check that the names are equal, and the values to 1e-12."""
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-12, atol=1e-12)


def step_alike(pipe: Pipeline, net: nn.Module, loss: torch.Tensor, x: Any, y: Any) -> None:
    """Run a step, and check its loss and gradients against those of one process: `net` has computed `loss`."""
    loss.backward()
    with pipe.batch(x, y) as batch:
        same(batch.gradients(), grads(net))
        batch.apply()
    assert batch.result.loss == pytest.approx(loss.item(), rel=1e-12)


def grads(net: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in net.named_parameters()}
