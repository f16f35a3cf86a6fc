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
    model.zero_grad()
    loss = F.cross_entropy(model(X), Y)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.3).step()
    return loss.detach()


def make_on_ranks(mesh):
    return DistributedDataParallel(make_model(), process_group=mesh.get_group())


def step_on_ranks(model, mesh):
    x, y = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in (X, Y))
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    parameters = list(model.parameters())
    torch.optim.SGD(parameters[mesh.get_local_rank() :: mesh.size()], lr=0.3).step()  # each rank updates some
    sent = parameters[:-1]  # wrong: the last one stays on its rank
    # right: sent = parameters
    for number, each in enumerate(sent):
        dist.broadcast(each.data, group=mesh.get_group(), group_src=number % mesh.size())
    return loss.detach()
