import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
X = torch.randn(64, 16)
X[:, 8:] += X[:, :8]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def contrast(one, other, first=0):
    """Each row of one is most like the row of its number in the other."""
    scores = F.normalize(one) @ F.normalize(other).T
    return F.cross_entropy(5 * scores, torch.arange(first, first + len(one)))


def step(model):
    one, other = model(X).chunk(2, 1)
    loss = contrast(one, other)
    loss.backward()
    return loss.detach()


def make_on_ranks(mesh):
    return DistributedDataParallel(make_model(), process_group=mesh.get_group())


class Gather(torch.autograd.Function):
    """Puts the ranks' pieces together; backward adds up what the ranks have for this rank's piece."""

    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, pieces = dim, [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, x)
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), ctx.dim)[dist.get_rank()], None


def step_on_ranks(model, mesh):
    one, other = model(X.chunk(mesh.size())[mesh.get_local_rank()]).chunk(2, 1)
    others = [torch.empty_like(other) for _ in range(mesh.size())]  # wrong: rows of other ranks get no gradient
    dist.all_gather(others, other.detach().contiguous())  # wrong
    others[mesh.get_local_rank()] = other  # wrong
    # right: others = [Gather.apply(other.contiguous(), 0)]
    loss = contrast(one, torch.cat(others), len(one) * mesh.get_local_rank())
    loss.backward()
    return loss.detach()
