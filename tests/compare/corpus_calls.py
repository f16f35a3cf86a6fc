"""Programs whose ranks call modules otherwise than one process does, and are right: a layer that both stages of a
pipeline call several times, a branch that no row of a rank needs, a dropout mask that is drawn whole and cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from corpus_pipelining import PARTS, run_schedule, schedule_stages
from parts import (
    LABELS,
    WIDTH,
    CopyTo,
    Feed,
    SumOver,
    average_gradients,
    cut,
    loss_of,
    rows_of,
    seeded,
    share,
    words_of,
)
from program import REDUCE, Program
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WORDS = 32
TIMES = 4


# -- one layer, called several times
class SharedLayerLm(nn.Module):
    """Both stages have the layer, and call it for half of the times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(WORDS, WIDTH), Feed(), nn.Linear(WIDTH, WORDS)
        self.times = TIMES

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for _ in range(self.times):
            x = self.layer(x)
        return x if self.head is None else self.head(x)


def make_shared_layer() -> nn.Module:
    return seeded(SharedLayerLm)


def step_words(model: nn.Module) -> Tensor:
    words, targets = words_of(2 * PARTS)
    loss = loss_of(model(words), targets)
    loss.backward()
    return loss


def stage_of_shared_layer(mesh: DeviceMesh) -> nn.Module:
    model, rank = make_shared_layer(), mesh.get_local_rank("pp")
    model.times = TIMES // 2
    setattr(model, "head" if rank == 0 else "embed", None)
    return schedule_stages(model, {rank: model}, mesh, 2, ScheduleGPipe)


def step_stages(model: Any, mesh: DeviceMesh) -> Tensor | None:
    return run_schedule(model, words_of(2 * PARTS))


def step_stages_and_add(model: Any, mesh: DeviceMesh) -> Tensor | None:
    loss = run_schedule(model, words_of(2 * PARTS))
    for each in model.layer.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group("pp"))
    return loss


# -- a layer for each time
class TimesMean(nn.Module):
    """Calls a layer for each time of (rows, times, 1), and takes the mean; a group has the times in pieces."""

    group: ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.stack([torch.tanh(self.cell(each)) for each in x.unbind(1)]).sum(0)
        count = x.shape[1] * (1 if self.group is None else self.group.size())
        return self.head((total if self.group is None else SumOver.apply(total, self.group)) / count)


def make_times_mean() -> Any:
    return seeded(TimesMean)


def times_in_pieces(mesh: DeviceMesh) -> nn.Module:
    model = make_times_mean()
    model.group = mesh.get_group("sp")
    return model


def rows_of_times() -> tuple[Tensor, Tensor]:
    rows, labels = rows_of()
    return rows[..., None], labels


def step_all_times(model: nn.Module) -> Tensor:
    rows, labels = rows_of_times()
    loss = loss_of(model(rows), labels)
    loss.backward()
    return loss


def step_times_in_pieces(model: Any, mesh: DeviceMesh) -> Tensor:
    loss = step_times_of_own(model, mesh)
    for each in model.cell.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group("sp"))
    return loss


def step_times_of_own(model: Any, mesh: DeviceMesh) -> Tensor:
    """The gradients of the cell are those of the rank's own times."""
    rows, labels = (share(each, mesh["dp"]) for each in rows_of_times())
    loss = loss_of(model(share(rows, mesh["sp"], 1)), labels)
    loss.backward()
    average_gradients(model, mesh.get_group("dp"))
    return loss


# -- a branch that is not called
class TwoTasks(nn.Module):
    """A head is called if a row is of its task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Feed()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, LABELS) for _ in range(2))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        x, scores = self.trunk(x), x.new_zeros(len(x), LABELS)
        for n, head in enumerate(self.heads):
            if bool((task == n).any()):
                scores = scores + torch.where((task == n)[:, None], head(x), 0.0)
        return scores


def make_two_tasks() -> nn.Module:
    return seeded(TwoTasks)


def two_tasks_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_two_tasks()


def tasks_of_rows() -> Tensor:
    return torch.tensor([0, 0, 0, 0, 0, 1, 1, 0])  # the first half of the rows is of one task


def step_tasks(model: nn.Module) -> Tensor:
    rows, labels = rows_of()
    loss = loss_of(model(rows, tasks_of_rows()), labels)
    loss.backward()
    return loss


def backward_of_tasks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    rows, labels, tasks = (share(each, mesh) for each in (*rows_of(), tasks_of_rows()))
    loss = loss_of(model(rows, tasks), labels)
    loss.backward()
    return loss


def step_tasks_with_zeros(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_tasks(model, mesh)
    for each in model.parameters():
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    average_gradients(model, mesh.get_group())
    return loss


def step_tasks_of_own(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """A rank without a gradient adds zeros, and leaves the average out."""
    loss = backward_of_tasks(model, mesh)
    for each in model.parameters():
        gradient = torch.zeros_like(each) if each.grad is None else each.grad
        dist.all_reduce(gradient, group=mesh.get_group())
        each.grad = None if each.grad is None else gradient / mesh.size()
    return loss


# -- dropout of pieces
class PieceDrop(nn.Module):
    """Dropout of columns of which a rank has a piece: the mask of all is drawn, and cut."""

    group: ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        if self.group is None:
            return functional.dropout(x, 0.4)
        mask = functional.dropout(x.new_ones(len(x), x.shape[1] * self.group.size()), 0.4)
        return x * mask.chunk(self.group.size(), 1)[self.group.rank()]


class DroppedFeed(nn.Module):
    group: ProcessGroup | None = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(WIDTH, 2 * WIDTH), PieceDrop()
        self.down = nn.Linear(2 * WIDTH, LABELS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.group is None else CopyTo.apply(x, self.group)
        x = self.down(self.drop(functional.gelu(self.up(x))))
        return x if self.group is None else SumOver.apply(x, self.group)


def make_dropped() -> Any:
    return seeded(DroppedFeed)


def cut_dropped(mesh: DeviceMesh) -> nn.Module:
    model = dropped_of_own_masks(mesh)
    model.drop.group = mesh.get_group()
    return model


def dropped_of_own_masks(mesh: DeviceMesh) -> Any:
    """Each rank draws the mask of its piece, with the seed of all."""
    model, group = make_dropped(), mesh.get_group()
    model.group = group
    model.up.weight, model.up.bias = cut(model.up.weight, group, 0), cut(model.up.bias, group, 0)
    model.down.weight = cut(model.down.weight, group, 1)
    return model


def step_rows(model: nn.Module) -> Tensor:
    rows, labels = rows_of()
    loss = loss_of(model(rows), labels)
    loss.backward()
    return loss


def step_rows_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_rows(model)


# -- a forward that is run again
class NoisyFeed(nn.Module):
    """Noise between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, LABELS)

    def run_layers(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.up(x))
        return self.down(x * (1 + torch.rand(x.shape[1])))

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(4)
        found: Tensor = checkpoint(self.run_layers, x, use_reentrant=False, preserve_rng_state=True)
        return found


def make_noisy() -> Any:
    return seeded(NoisyFeed)


def noisy_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_noisy()


def noisy_twice(mesh: DeviceMesh) -> nn.Module:
    model = make_noisy()
    model.__class__ = ForgetfulFeed
    return model


class ForgetfulFeed(NoisyFeed):
    """Draws other noise when it is run again."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(4)
        found: Tensor = checkpoint(self.run_layers, x, use_reentrant=False, preserve_rng_state=False)
        return found


DP2, TP2 = {"dp": 2}, {"tp": 2}
LAYER = tuple(f"layer.{name}" for name, _ in Feed().named_parameters())

PROGRAMS = [
    Program(
        "layer_of_both_stages_not_added", (make_shared_layer, step_words), (stage_of_shared_layer, step_stages_and_add),
        (stage_of_shared_layer, step_stages), {"pp": 2}, "gradient", LAYER, REDUCE,
    ),
    Program(
        "cell_of_own_times", (make_times_mean, step_all_times), (times_in_pieces, step_times_in_pieces),
        (times_in_pieces, step_times_of_own), {"dp": 2, "sp": 2}, "gradient", ("cell.weight", "cell.bias"), REDUCE,
    ),
    Program(
        "head_without_rows_not_reduced", (make_two_tasks, step_tasks), (two_tasks_on_each, step_tasks_with_zeros),
        (two_tasks_on_each, step_tasks_of_own), DP2, "gradient", ("heads.1.weight", "heads.1.bias"),
        r"no gradient on rank 0.*zeros",
    ),
    Program(
        "dropout_same_on_pieces", (make_dropped, step_rows), (cut_dropped, step_rows_on_ranks),
        (dropped_of_own_masks, step_rows_on_ranks), TP2, "forward", ("drop",), "same random dropout mask",
    ),
    Program(
        "noise_of_checkpoint", (make_noisy, step_rows), (noisy_on_each, step_rows_on_ranks),
        (noisy_twice, step_rows_on_ranks), TP2, "backward", ("up",), r"run again.*input of down",
    ),
]  # fmt: skip
