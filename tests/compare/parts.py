"""Parts of the programs: tiny models, collectives that have a backward, and layers that are cut over ranks.

Models are the same on each rank, as their parameters come from one seed. Batches are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16
HEADS = 4
WORDS = 32
LONGEST = 16
LABELS = 5


# -- models
def seeded(make: Callable[[], nn.Module], seed: int = 17) -> Any:
    """What `make` returns, with parameters drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # torch begins with ones and zeros, which would hide a mistake
                nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
    return model


class Feed(nn.Module):
    """A network for each row or token alone, added to it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows (rows, WIDTH) to a score for each label."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    """Several heads; each place reads itself and the places before. It may have some of the heads only."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads_of(project(x)) for project in (self.query, self.key, self.value))
        return self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def heads_of(x: Tensor) -> Tensor:
    """(rows, places, width) to (rows, heads, places, width of a head)."""
    return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed = Feed()

    def forward(self, x: Tensor) -> Tensor:
        return self.feed(x + self.attention(self.norm(x)))


class Lm(nn.Module):
    """Words (rows, places) to scores (rows, places, WORDS) for the word after each."""

    def __init__(self, words: int = WORDS, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        x = self.embed(x) + self.positions(torch.arange(first, first + x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_net() -> Net:
    return seeded(Net)


def make_lm() -> Lm:
    return seeded(Lm)


# -- batches, the same on each rank
def rows_of(count: int = 8, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Rows for `Net`, and their labels."""
    choice = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=choice), torch.randint(LABELS, (count,), generator=choice)


def words_of(count: int = 4, length: int = 8, words: int = WORDS) -> tuple[Tensor, Tensor]:
    """Words for `Lm`, and the word after each."""
    drawn = torch.randint(words, (count, length + 1), generator=torch.Generator().manual_seed(6))
    return drawn[:, :-1], drawn[:, 1:]


def share(x: Tensor, mesh: DeviceMesh, dim: int = 0) -> Tensor:
    """The share of this rank on a mesh of one dimension."""
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()]


# -- steps that need no collective of their own
def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def step_net(model: nn.Module) -> Tensor:
    x, y = rows_of()
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_lm(model: nn.Module) -> Tensor:
    x, y = words_of()
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_net_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank has all rows."""
    return step_net(model)


def step_lm_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_lm(model)


def backward_of_rows(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank of `dp` has its share of the rows; nothing is reduced here."""
    x, y = (share(each, mesh["dp"]) for each in rows_of())
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


LIMIT = 0.1  # of the norm of gradients


def step_clipped(model: nn.Module) -> Tensor:
    loss = step_net(model)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    return loss


def average_gradients(model: nn.Module, group: ProcessGroup) -> None:
    """Make each gradient the mean over a group."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def optimizer_of(model: nn.Module, make: Callable[..., torch.optim.Optimizer], **options: Any) -> torch.optim.Optimizer:
    """The optimizer of a model, made at its first step."""
    if "optimizer" not in model.__dict__:
        model.__dict__["optimizer"] = make(model.parameters(), **options)
    return model.__dict__["optimizer"]


# -- collectives that have a backward
class CopyTo(torch.autograd.Function):
    """Megatron's `f`: forward does nothing; backward adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_plainly(gradient, ctx.group), None


class SumOver(torch.autograd.Function):
    """Megatron's `g`: forward adds up the parts of all ranks; backward does nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return sum_plainly(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class SumBothWays(torch.autograd.Function):
    """Forward adds up, and so does backward: for a sum that each rank uses for something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return sum_plainly(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_plainly(gradient, ctx.group), None


class Gather(torch.autograd.Function):
    """Forward puts the ranks' slices together; backward adds up, and keeps this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gather_plainly(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return piece_of(sum_plainly(gradient, ctx.group), ctx.group, ctx.dim), None, None


class ScatterSum(torch.autograd.Function):
    """Forward adds up, and keeps this rank's slice; backward puts the slices together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return piece_of(sum_plainly(x, group), group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_plainly(gradient, ctx.group, ctx.dim), None, None


class GatherSame(torch.autograd.Function):
    """Forward puts the ranks' slices together; backward keeps this rank's slice, as all ranks have one gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return gather_plainly(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return piece_of(gradient, ctx.group, ctx.dim), None, None


class Split(torch.autograd.Function):
    """Forward keeps this rank's slice; backward puts the slices together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return piece_of(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_plainly(gradient, ctx.group, ctx.dim), None, None


class Exchange(torch.autograd.Function):
    """Rows to other ranks and from them: `sent[r]` to rank r, `received[r]` from it. Gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        came = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(came, x.contiguous(), received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.forward(ctx, gradient, *ctx.back), None, None, None


def sum_plainly(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks; autograd sees nothing of it."""
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def gather_plainly(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.detach().contiguous(), group=group)
    return torch.cat(parts, dim)


def piece_of(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's piece."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


# -- layers that are cut
def cut(whole: Tensor, group: ProcessGroup, dim: int) -> nn.Parameter:
    return nn.Parameter(piece_of(whole.detach(), group, dim).clone())


class ColumnLinear(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = cut(whole.weight, group, 0)
        self.bias = None if whole.bias is None else cut(whole.bias, group, 0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(CopyTo.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer of which each rank has some inputs: the ranks' results add up, and then comes the bias."""

    def __init__(self, whole: nn.Linear, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = cut(whole.weight, group, 1)
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        total = SumOver.apply(functional.linear(x, self.weight), self.group)
        return total + self.bias.to(total.dtype)  # autocast casts only what the product reads


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank has some words; others are zero here."""

    def __init__(self, whole: nn.Embedding, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = cut(whole.weight, group, 0)

    def forward(self, x: Tensor) -> Tensor:
        return SumOver.apply(self.vectors_here(x), self.group)

    def vectors_here(self, x: Tensor) -> Tensor:
        here = x - dist.get_rank(self.group) * len(self.weight)
        foreign = (here < 0) | (here >= len(self.weight))
        return functional.embedding(here.masked_fill(foreign, 0), self.weight).masked_fill(foreign[..., None], 0.0)


def cut_feeds(model: nn.Module, group: ProcessGroup) -> Any:
    """Cut each `Feed` of a model over a group."""
    for feed in [each for each in model.modules() if isinstance(each, Feed)]:
        feed.up = ColumnLinear(feed.up, group)
        feed.down = RowLinear(feed.down, group)
    return model


def cut_heads(model: Lm, group: ProcessGroup) -> Lm:
    """Cut the heads of each attention over a group."""
    for block in model.blocks:
        attention = block.attention
        for name in ("query", "key", "value"):
            setattr(attention, name, ColumnLinear(getattr(attention, name), group))
        attention.out = RowLinear(attention.out, group)
    return model


# -- right programs, from which many others differ
NET, LM = (make_net, step_net), (make_lm, step_lm)
PARAMETERS = tuple(name for name, _ in make_net().named_parameters())


def net_on_each(mesh: DeviceMesh) -> Any:
    return make_net()


def net_in_ddp(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(make_net(), process_group=mesh.get_group("dp"))


def net_in_fsdp(mesh: DeviceMesh) -> Any:
    model = make_net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def cut_net(mesh: DeviceMesh) -> Any:
    return cut_feeds(make_net(), mesh.get_group("tp"))


def cut_lm(mesh: DeviceMesh) -> Any:
    return cut_feeds(cut_heads(make_lm(), mesh.get_group("tp")), mesh.get_group("tp"))


def step_by_hand(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Rows over `dp`, and gradients averaged by hand."""
    loss = backward_of_rows(model, mesh)
    average_gradients(model, mesh.get_group("dp"))
    return loss
