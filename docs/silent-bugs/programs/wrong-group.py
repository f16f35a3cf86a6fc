import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
X = torch.randn(256, 16)
Y = (X @ torch.randn(16, 5) + 2 * torch.randn(256, 5)).argmax(1)


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5))


def step(model):
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    return loss.detach()


def add_up(x, group):
    """The sum over the ranks. Its gradient goes back as it is."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x + (total - x).detach()


class Row(nn.Linear):
    """Each rank of `tp` has some of the inputs."""

    def forward(self, x):
        return add_up(F.linear(x, self.weight), self.group) + self.bias


def make_on_ranks(mesh):
    model, rank, ranks = make_model(), mesh["tp"].get_local_rank(), mesh["tp"].size()
    up, down = model[0], model[2]
    up.weight.data, up.bias.data = up.weight.data.chunk(ranks)[rank], up.bias.data.chunk(ranks)[rank]
    down.weight.data = down.weight.data.chunk(ranks, 1)[rank]
    down.__class__, down.group = Row, mesh.get_group("tp")
    return model


def step_on_ranks(model, mesh):
    x, y = (each.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for each in (X, Y))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    group = None  # wrong: all ranks, and those of `tp` have other rows of the weights
    # right: group = mesh.get_group("dp")
    for each in model.parameters():
        dist.all_reduce(each.grad, group=group)
        each.grad /= dist.get_world_size(group)
    return loss.detach()
