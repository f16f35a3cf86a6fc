"""Statistics and random numbers of a rank's own part, where those of the whole are meant."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parts import LABELS, WIDTH, SumBothWays, SumOver, average_gradients, loss_of, rows_of, seeded, share
from program import Program
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

LENGTH = 6


# -- a norm over rows and times
class RowsTimesNorm(nn.Module):
    """Normalizes each channel of (rows, channels, times) over rows and times, of all ranks if it has a group."""

    group: ProcessGroup | None = None

    def sum_up(self, x: Tensor) -> Tensor:
        total = x.sum((0, 2), keepdim=True)
        return total if self.group is None else SumBothWays.apply(total, self.group)

    def forward(self, x: Tensor) -> Tensor:
        count = len(x) * x.shape[2] * (1 if self.group is None else self.group.size())
        x = x - self.sum_up(x) / count
        return x * (self.sum_up(x.square()) / count + 1e-5).rsqrt()


class NormOfOwnVariance(RowsTimesNorm):
    """The mean is that of all ranks, the variance the mean of their own variances."""

    def forward(self, x: Tensor) -> Tensor:
        count = len(x) * x.shape[2] * self.group.size()
        own = (x - x.mean((0, 2), keepdim=True)).square()
        return (x - self.sum_up(x) / count) * (self.sum_up(own) / count + 1e-5).rsqrt()


class TimesNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.statistics, self.head = nn.Conv1d(2, WIDTH, 1), RowsTimesNorm(), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.statistics(self.enter(x))).mean(2))


def times_of_rows() -> tuple[Tensor, Tensor]:
    """Rows (8, 2, LENGTH) whose later ones are larger, and labels."""
    rows, labels = rows_of()
    return rows[:, : 2 * LENGTH].reshape(8, 2, LENGTH) + torch.linspace(-2, 2, 8)[:, None, None], labels


def make_times() -> Any:
    return seeded(TimesNet)


def step_times(model: nn.Module) -> Tensor:
    rows, labels = times_of_rows()
    loss = loss_of(model(rows), labels)
    loss.backward()
    return loss


def step_times_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    rows, labels = (share(each, mesh) for each in times_of_rows())
    loss = loss_of(model(rows), labels)
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss


def times_on_each(mesh: DeviceMesh) -> Any:
    model = make_times()
    model.statistics.group = mesh.get_group()
    return model


def times_alone(mesh: DeviceMesh) -> nn.Module:
    """The norm has no group."""
    return make_times()


def times_of_own_variance(mesh: DeviceMesh) -> nn.Module:
    model = times_on_each(mesh)
    model.statistics.__class__ = NormOfOwnVariance
    return model


# -- a mean over a sequence that is cut
class MaskedMean(nn.Module):
    """The mean of (rows, times, WIDTH) over the times that a mask keeps."""

    group: ProcessGroup | None = None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        total, count = (x * mask[..., None]).sum(1), mask.sum(1, keepdim=True).float()
        if self.group is not None:
            total = SumOver.apply(total, self.group)
            dist.all_reduce(count, group=self.group)
        return total / count


class MeanOfMeans(MaskedMean):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return SumOver.apply(mean, self.group) / self.group.size()


class PooledNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.pool, self.head = nn.Linear(2, WIDTH), MaskedMean(), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.pool(torch.tanh(self.enter(x)), mask))


def make_pooled() -> Any:
    return seeded(PooledNet)


def pooled_on_each(mesh: DeviceMesh) -> Any:
    model = make_pooled()
    model.pool.group = mesh.get_group()
    return model


def pooled_by_means(mesh: DeviceMesh) -> nn.Module:
    model = pooled_on_each(mesh)
    model.pool.__class__ = MeanOfMeans
    return model


def sequences() -> tuple[Tensor, Tensor, Tensor]:
    """Rows (8, LENGTH, 2), the mask of their times, and labels."""
    rows, labels = times_of_rows()
    lengths = torch.tensor([6, 4, 5, 6, 5, 4, 4, 5])
    return rows.transpose(1, 2), torch.arange(LENGTH) < lengths[:, None], labels


def step_pooled(model: nn.Module) -> Tensor:
    rows, mask, labels = sequences()
    loss = loss_of(model(rows, mask), labels)
    loss.backward()
    return loss


def step_pooled_on_ranks(model: Any, mesh: DeviceMesh) -> Tensor:
    rows, mask, labels = sequences()
    loss = loss_of(model(share(rows, mesh, 1), share(mask, mesh, 1)), labels)
    loss.backward()
    for each in model.enter.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group())
    return loss


# -- noise
class RowNoise(nn.Module):
    """Adds noise to each row: a rank draws that of all rows, and takes its own."""

    place, count = 0, 1

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(len(x) * self.count, x.shape[1], generator=torch.Generator().manual_seed(6))
        return x + noise.chunk(self.count)[self.place]


class NoisyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.noise, self.head = nn.Linear(WIDTH, WIDTH), RowNoise(), nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.noise(self.enter(x)))


def make_noisy_net() -> Any:
    return seeded(NoisyNet)


class RowNoiseOfOneSeed(RowNoise):
    """Draws the noise of its own rows, with a seed that all ranks have."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(6 + len(x)))


def noisy_net_on_each(mesh: DeviceMesh) -> Any:
    model = make_noisy_net()
    model.noise.place, model.noise.count = mesh.get_local_rank(), mesh.size()
    return model


def noisy_net_of_one_seed(mesh: DeviceMesh) -> nn.Module:
    model = noisy_net_on_each(mesh)
    model.noise.__class__ = RowNoiseOfOneSeed
    return model


def step_noisy(model: nn.Module) -> Tensor:
    rows, labels = rows_of()
    loss = loss_of(model(rows), labels)
    loss.backward()
    return loss


def step_noisy_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    rows, labels = (share(each, mesh) for each in rows_of())
    loss = loss_of(model(rows), labels)
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss


DP4, SP2 = {"dp": 4}, {"sp": 2}
TIMES = (make_times, step_times)

PROGRAMS = [
    Program(
        "norm_of_own_rows", TIMES, (times_on_each, step_times_on_ranks), (times_alone, step_times_on_ranks), DP4,
        "forward", ("statistics",), "mean and the variance of its own part",
    ),
    Program(
        "variance_of_own_rows", TIMES, (times_on_each, step_times_on_ranks),
        (times_of_own_variance, step_times_on_ranks), DP4, "forward", ("statistics",),
        "mean of the ranks' own variances",
    ),
    Program(
        "mean_of_means_of_times", (make_pooled, step_pooled), (pooled_on_each, step_pooled_on_ranks),
        (pooled_by_means, step_pooled_on_ranks), SP2, "forward", ("pool",), "mean of their own means",
    ),
    Program(
        "noise_of_one_seed", (make_noisy_net, step_noisy), (noisy_net_on_each, step_noisy_on_ranks),
        (noisy_net_of_one_seed, step_noisy_on_ranks), DP4, "forward", ("noise",), "same random numbers",
    ),
]  # fmt: skip
