import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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


def make_on_ranks(mesh):
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)  # wrong: gradients add up with two or three digits
    # right: policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return fully_shard(make_model(), mesh=mesh, mp_policy=policy)


def step_on_ranks(model, mesh):
    x, y = (each.chunk(mesh.size())[mesh.get_local_rank()] for each in (X, Y))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()
