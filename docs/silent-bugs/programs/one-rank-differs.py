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
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 5))


def step(model):
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    return loss.detach()


def make_on_ranks(mesh):
    model = make_model()
    model[1] = nn.GELU("tanh" if mesh.get_local_rank() == 3 else "none")  # wrong: one host has another version
    # right: model[1] = nn.GELU()
    return DistributedDataParallel(model, process_group=mesh.get_group())


def step_on_ranks(model, mesh):
    x, y = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in (X, Y))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()
