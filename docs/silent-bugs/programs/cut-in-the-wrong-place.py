import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
WORDS = torch.randint(32, (64, 17))


class Net(nn.Module):
    """Attention of several heads, with one weight for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(32, 32), nn.Linear(32, 96)
        self.out, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, words):
        x = self.embed(words)
        heads = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        read = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.head(x + self.out(read.transpose(1, 2).flatten(2)))


def make_model():
    torch.manual_seed(1)
    return Net()


def step(model):
    loss = F.cross_entropy(model(WORDS[:, :-1]).flatten(0, 1), WORDS[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def add_up(x, group):
    """The sum over the ranks. Its gradient goes back as it is."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x + (total - x).detach()


class Column(nn.Linear):
    """Each rank has some of the outputs. The gradient of the input is the sum of the ranks' gradients."""

    def forward(self, x):
        x = x.view_as(x)
        x.register_hook(lambda gradient: add_up(gradient, self.group))
        return super().forward(x)


class Row(nn.Linear):
    """Each rank has some of the inputs."""

    def forward(self, x):
        return add_up(F.linear(x, self.weight), self.group) + self.bias


def make_on_ranks(mesh):
    model, rank, ranks = make_model(), mesh.get_local_rank(), mesh.size()
    for each in (model.qkv.weight, model.qkv.bias):
        each.data = each.data.chunk(ranks)[rank]  # wrong: one block, of queries and half of the keys on rank 0
        # right: each.data = torch.cat([third.chunk(ranks)[rank] for third in each.data.chunk(3)])
    model.out.weight.data = model.out.weight.data.chunk(ranks, 1)[rank]
    model.qkv.__class__, model.out.__class__ = Column, Row
    model.qkv.group = model.out.group = mesh.get_group()
    return model
