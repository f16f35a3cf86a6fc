import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
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
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return loss.detach()


def make_on_ranks(mesh):
    return fully_shard(make_model(), mesh=mesh)


def step_on_ranks(model, mesh):
    x, y = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in (X, Y))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    parameters = list(model.parameters())
    gradients = [each.grad.to_local() for each in parameters]  # wrong: the shards of this rank alone
    # right: gradients = [each.grad.full_tensor() for each in parameters]
    norm = nn.utils.get_total_norm(gradients)
    nn.utils.clip_grads_with_norm_(parameters, 0.1, norm)
    return loss.detach()
