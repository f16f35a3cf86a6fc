"""One training of each recipe, on a rank of a mesh, and the same training in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import recipes
import torch
import torch.distributed as dist
from recipes import rows_here, slice_here
from tiny_transformer import TinyTransformer, batch, loss_of, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

STEPS = 3
RATE = 0.3
Gradients = dict[str, Tensor]


class Trial(NamedTuple):
    """A recipe, and the model and mesh to try it on."""

    recipe: str
    sizes: dict[str, int]
    backward: Callable[[nn.Module, DeviceMesh, Tensor, Tensor], Tensor]  # returns this rank's part of the loss
    blocks: int = 2
    experts: int = 0

    def model(self) -> TinyTransformer:
        return make_model(self.blocks, self.experts)


def same_rows(model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = loss_of(model(inputs), targets)
    loss.backward()
    return loss.detach() / dist.get_world_size()


def some_rows(model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor) -> Tensor:
    data = mesh["dp"]
    return same_rows(model, mesh, rows_here(inputs, data), rows_here(targets, data))


def some_experts(model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = some_rows(model, mesh, inputs, targets)
    recipes.average_gradients(model, mesh["dp"])
    return loss


def some_places(model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor) -> Tensor:
    first = mesh.get_local_rank() * inputs.shape[1] // mesh.size()
    loss = loss_of(model(slice_here(inputs, mesh), first), slice_here(targets, mesh))
    loss.backward()
    recipes.average_gradients(model, mesh)
    return loss.detach() / mesh.size()


def some_blocks(model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor) -> Tensor:
    assert isinstance(model, TinyTransformer)
    return recipes.pipeline_backward(model, mesh, inputs, targets, parts=4) / mesh["tp"].size()


TRIALS = [
    Trial("ddp", {"dp": 4}, some_rows),
    Trial("fsdp", {"dp": 4}, some_rows),
    Trial("tensor_parallel", {"tp": 4}, same_rows),
    Trial("sequence_parallel", {"tp": 4}, same_rows),
    Trial("fsdp_and_tensor", {"dp": 2, "tp": 2}, some_rows),
    Trial("pipeline_and_tensor", {"pp": 2, "tp": 2}, some_blocks, blocks=4),
    Trial("expert_parallel", {"dp": 4}, some_experts, experts=8),
    Trial("context_parallel", {"cp": 4}, some_places),
]


def train(number: int, mesh: DeviceMesh) -> tuple[list[float], Gradients, int]:
    """On each rank: train as a recipe says. Returns the losses of the whole batch, the last gradients of this rank's
    parameters, whole, and the count of numbers in its parameters."""
    trial = TRIALS[number]
    given = trial.model()
    model = getattr(recipes, trial.recipe)(given, mesh)
    losses = _losses(model, lambda *batch: _over_all(trial.backward(model, mesh, *batch)))
    share = 2 if trial.experts else 0  # experts on each rank
    first = mesh.get_local_rank() * share if share else 0
    gradients = {_name(name, first): recipes.whole(each.grad) for name, each in given.named_parameters()}
    parts = (each.to_local() if isinstance(each, DTensor) else each for each in given.parameters())
    return losses, gradients, sum(each.numel() for each in parts)


def train_alone(trial: Trial) -> tuple[list[float], Gradients, int]:
    """In one process, with the whole batch."""
    model = trial.model()

    def step(inputs: Tensor, targets: Tensor) -> float:
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return loss.item()

    losses = _losses(model, step)
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return losses, gradients, sum(each.numel() for each in model.parameters())


def _losses(model: nn.Module, step: Callable[[Tensor, Tensor], float]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for number in range(STEPS):
        if number:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(step(*batch(number)))
    return losses


def _over_all(part: Tensor) -> float:
    dist.all_reduce(part)
    return part.item()


def _name(name: str, first: int) -> str:
    """The name in the whole model of a parameter here, where `first` is the first expert of this rank."""
    words: list[Any] = name.removeprefix("module.").split(".")
    if "experts" in words:
        words[words.index("experts") + 1] = int(words[words.index("experts") + 1]) + first
    return ".".join(map(str, words))
