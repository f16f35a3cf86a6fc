import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
X = torch.randn(256, 16)
Y = (X @ torch.randn(16, 5) + 2 * torch.randn(256, 5)).argmax(1)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 5))


def step(model):
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    return loss.detach()


def add_up(x, group):
    """The sum over the ranks. Its gradient goes back as it is."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x + (total - x).detach()


def copy_to(x, group):
    """The same values. The gradient that comes back is the sum of the ranks' gradients."""
    x = x.view_as(x)
    x.register_hook(lambda gradient: add_up(gradient, group))
    return x


def mean_over_ranks(x, group):
    """Forward and backward add up, as each rank uses the mean for rows of its own."""
    return add_up(copy_to(x, group), group) / dist.get_world_size(group)


class SharedNorm(nn.BatchNorm1d):
    """With the mean and the variance of the rows of all ranks, as `nn.SyncBatchNorm`, which needs a GPU."""

    def forward(self, x):
        mean = mean_over_ranks(x.mean(0), self.group)
        variance = mean_over_ranks((x - mean).square().mean(0), self.group)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * len(X) / (len(X) - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def make_on_ranks(mesh):
    model = make_model()  # wrong: its BatchNorm takes the mean over this rank's rows
    # right: model = make_model()
    # right: model[1].__class__, model[1].group = SharedNorm, mesh.get_group()
    return DistributedDataParallel(model, process_group=mesh.get_group())


def step_on_ranks(model, mesh):
    x, y = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in (X, Y))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()
