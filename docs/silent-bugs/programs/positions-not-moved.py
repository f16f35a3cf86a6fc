import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
WORDS = torch.randint(32, (64, 17))


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


class Net(nn.Module):
    """Each place reads the places up to it, and tells the next word."""

    is_cut = False  # over ranks that have a slice of each row

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(32, 32), nn.Embedding(16, 32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, words, first=0):
        places = torch.arange(words.shape[1])  # wrong: the slice of each rank begins at place 0
        # right: places = torch.arange(first, first + words.shape[1])
        x = self.embed(words) + self.positions(places)
        query, key, value = self.qkv(x).chunk(3, -1)
        if self.is_cut:
            key, value = (Gather.apply(each.contiguous(), 1) for each in (key, value))
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(first)
        return self.head(x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask))


def make_model():
    torch.manual_seed(1)
    return Net()


def make_on_ranks(mesh):
    model = make_model()
    model.is_cut = True
    return model


def step(model):
    loss = F.cross_entropy(model(WORDS[:, :-1]).flatten(0, 1), WORDS[:, 1:].flatten())
    loss.backward()
    return loss.detach()


def step_on_ranks(model, mesh):
    words, following = (each.chunk(mesh.size(), 1)[mesh.get_local_rank()] for each in (WORDS[:, :-1], WORDS[:, 1:]))
    scores = model(words, words.shape[1] * mesh.get_local_rank())
    loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
    loss.backward()
    for each in model.parameters():
        dist.all_reduce(each.grad, group=mesh.get_group())
        each.grad /= mesh.size()
    return loss.detach()
