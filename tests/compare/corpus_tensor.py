"""Tensor parallel by hand, as Megatron-LM does it: layers cut over `tp`, and collectives in autograd functions."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parts import (
    HEADS,
    LIMIT,
    LM,
    NET,
    PARAMETERS,
    WIDTH,
    ColumnLinear,
    CopyTo,
    Feed,
    Lm,
    RowLinear,
    SumBothWays,
    SumOver,
    cut,
    cut_feeds,
    cut_heads,
    cut_lm,
    cut_net,
    heads_of,
    make_lm,
    make_net,
    seeded,
    step_by_hand,
    step_clipped,
    step_lm,
    step_lm_on_ranks,
    step_net,
    step_net_on_ranks,
    sum_plainly,
)
from program import REDUCE, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- a right program, from which several wrong ones differ
# -- forward: what a row-parallel layer does with its parts
class RowLinearAlone(RowLinear):
    """Without the all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class RowLinearMean(RowLinear):
    """With a mean over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        total = SumOver.apply(functional.linear(x, self.weight), self.group)
        return total / dist.get_world_size(self.group) + self.bias


class RowLinearBiased(RowLinear):
    """The bias goes in on each rank, before the all-reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return SumOver.apply(functional.linear(x, self.weight, self.bias), self.group)


def net_with_last(kind: type[RowLinear], mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[1].down = kind(make_net().blocks[1].down, mesh.get_group("tp"))
    return model


def net_without_reduce(mesh: DeviceMesh) -> nn.Module:
    return net_with_last(RowLinearAlone, mesh)


def net_with_mean(mesh: DeviceMesh) -> nn.Module:
    return net_with_last(RowLinearMean, mesh)


def net_with_bias_on_each(mesh: DeviceMesh) -> nn.Module:
    return net_with_last(RowLinearBiased, mesh)


def net_with_wrong_group(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[1].down.group = mesh.get_group("dp")
    return model


LAST_ROW = ("blocks.1.down", "blocks.1")


# -- backward: the result of a row-parallel layer, the input of a column-parallel layer
class RowLinearBothWays(RowLinear):
    """`torch.distributed.nn.all_reduce` adds up in backward as well, where each rank has the whole gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return SumBothWays.apply(functional.linear(x, self.weight), self.group) + self.bias


def net_with_sum_in_backward(mesh: DeviceMesh) -> nn.Module:
    return net_with_last(RowLinearBothWays, mesh)


class ColumnLinearAlone(ColumnLinear):
    """Without `f`: the gradient of its input is this rank's part."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def net_without_copy(mesh: DeviceMesh) -> nn.Module:
    model = cut_net(mesh)
    model.blocks[1].up = ColumnLinearAlone(make_net().blocks[1].up, mesh.get_group("tp"))
    return model


def lm_without_copy(mesh: DeviceMesh) -> nn.Module:
    model = cut_lm(mesh)
    model.blocks[0].attention.value = ColumnLinearAlone(make_lm().blocks[0].attention.value, mesh.get_group("tp"))
    return model


# -- a key that all heads share, as in multi-head latent attention
class SharedKeyAttention(nn.Module):
    """Each head has its own part of a key, and all heads share another part."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.shared_key = nn.Linear(WIDTH, WIDTH // HEADS, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (-1, 2 * WIDTH // HEADS)).transpose(1, 2)
        key, value = heads_of(self.key(x)), heads_of(self.value(x))
        shared = self.spread(self.shared_key(x))[:, None].expand_as(key)
        read = functional.scaled_dot_product_attention(query, torch.cat([key, shared], -1), value, is_causal=True)
        return self.out(read.transpose(1, 2).flatten(2))

    def spread(self, shared: Tensor) -> Tensor:
        return shared


class SharedKeyOnRanks(SharedKeyAttention):
    """Some heads of it, on one rank."""

    def spread(self, shared: Tensor) -> Tensor:
        return CopyTo.apply(shared, self.query.group)


def latent_lm() -> Lm:
    model = Lm()
    model.blocks[0].attention = SharedKeyAttention()
    return model


def make_latent() -> nn.Module:
    return seeded(latent_lm)


def cut_latent_alone(mesh: DeviceMesh) -> nn.Module:
    return cut_heads(make_latent(), mesh.get_group("tp"))


def cut_latent(mesh: DeviceMesh) -> nn.Module:
    model = cut_latent_alone(mesh)
    model.blocks[0].attention.__class__ = SharedKeyOnRanks
    return model


# -- a norm over a width that is cut, as of queries and keys
class WideNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(self.squares(x) / (2 * WIDTH) + 1e-6) * self.weight

    def squares(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True)


class WideNormOnRanks(WideNorm):
    def squares(self, x: Tensor) -> Tensor:
        return SumBothWays.apply(super().squares(x), self.group)


class WideNormPlain(WideNormOnRanks):
    """`all_reduce` itself has no backward: other ranks' parts get no gradient."""

    def squares(self, x: Tensor) -> Tensor:
        return SumOver.apply(WideNorm.squares(self, x), self.group)


class WideNormAlone(WideNorm):
    """By the mean of this rank's own squares."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class NormedFeed(Feed):
    def __init__(self) -> None:
        super().__init__()
        self.middle_norm = WideNorm()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.middle_norm(functional.gelu(self.up(self.norm(x)))))


def normed_net() -> nn.Module:
    model = make_net()
    model.blocks[1] = NormedFeed()
    return model


def make_normed() -> nn.Module:
    return seeded(normed_net)


def cut_normed(mesh: DeviceMesh) -> nn.Module:
    model = cut_feeds(make_normed(), mesh.get_group("tp"))
    norm = model.blocks[1].middle_norm
    norm.group, norm.__class__ = mesh.get_group("tp"), WideNormOnRanks
    norm.weight = cut(norm.weight, norm.group, 0)
    return model


def cut_normed_plain(mesh: DeviceMesh) -> nn.Module:
    model = cut_normed(mesh)
    model.blocks[1].middle_norm.__class__ = WideNormPlain
    return model


def cut_normed_alone(mesh: DeviceMesh) -> nn.Module:
    model = cut_normed(mesh)
    model.blocks[1].middle_norm.__class__ = WideNormAlone
    return model


# -- one weight for queries, keys and values
class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (heads_of(each) for each in self.qkv(x).chunk(3, -1))
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(read.transpose(1, 2).flatten(2))


def fused_lm() -> Lm:
    model = Lm()
    model.blocks[0].attention = FusedAttention()
    return model


def make_fused() -> nn.Module:
    return seeded(fused_lm)


def cut_fused_as_block(mesh: DeviceMesh) -> nn.Module:
    """Rank 0 takes the first rows of the weight: all of the queries' and half of the keys' where there are two."""
    model, group = make_fused(), mesh.get_group("tp")
    attention = model.blocks[0].attention
    attention.qkv, attention.out = ColumnLinear(attention.qkv, group), RowLinear(attention.out, group)
    return model


def cut_fused(mesh: DeviceMesh) -> nn.Module:
    model, whole = cut_fused_as_block(mesh), make_fused().blocks[0].attention.qkv
    qkv = model.blocks[0].attention.qkv
    for name in ("weight", "bias"):
        parts = [cut(each, qkv.group, 0) for each in getattr(whole, name).chunk(3)]
        setattr(qkv, name, nn.Parameter(torch.cat(parts).detach()))
    return model


# -- the norm of gradients
def clip(model: nn.Module, squares: Tensor) -> None:
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, squares.sqrt())


def sum_squares(parameters: list[nn.Parameter]) -> Tensor:
    return torch.stack([each.grad.square().sum() for each in parameters]).sum()


def step_clipped_here(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank has a norm of its own."""
    return step_clipped(model)


def step_clipped_on_ranks(model: nn.Module, mesh: DeviceMesh, left_out: str = "") -> Tensor:
    """Squares of cut parameters add up over the ranks; those of whole ones count once."""
    loss = step_net(model)
    parts = (".up.weight", ".up.bias", ".down.weight")
    named = dict(model.named_parameters())
    parts_here = [each for name, each in named.items() if name.endswith(parts) and name != left_out]
    whole = [each for name, each in named.items() if not name.endswith(parts)]
    clip(model, sum_plainly(sum_squares(parts_here), mesh.get_group("tp")) + sum_squares(whole))
    return loss


def step_clipped_without_one(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """A parameter lacks its mark."""
    return step_clipped_on_ranks(model, mesh, "blocks.0.up.weight")


NORM = r"norm|clip|scal|factor"
TP4, TP2 = {"tp": 4}, {"tp": 2}
RIGHT_NET, RIGHT_LM = (cut_net, step_net_on_ranks), (cut_lm, step_lm_on_ranks)


PROGRAMS = [
    Program(
        "row_parallel_without_reduce", NET, RIGHT_NET, (net_without_reduce, step_net_on_ranks), TP4,
        "forward", LAST_ROW, REDUCE,
    ),
    Program(
        "row_parallel_with_mean", NET, RIGHT_NET, (net_with_mean, step_net_on_ranks), TP4,
        "forward", LAST_ROW, r"mean|averag|factor|divid|scal|1/|\btimes",
    ),
    Program(
        "row_parallel_bias_on_each_rank", NET, RIGHT_NET, (net_with_bias_on_each, step_net_on_ranks), TP4,
        "forward", LAST_ROW, r"bias|times",
    ),
    Program(
        "row_parallel_wrong_group", NET, (cut_net, step_by_hand), (net_with_wrong_group, step_by_hand),
        {"dp": 2, "tp": 2}, "forward", LAST_ROW, rf"group|dimension|mesh|{REDUCE}",
    ),
    Program(
        "row_parallel_summed_in_backward", NET, RIGHT_NET, (net_with_sum_in_backward, step_net_on_ranks), TP4,
        "backward", ("blocks.1.up", "blocks.1.down", "blocks.1.down.weight", "blocks.1.norm"),
        r"times|factor|twice|scal|\bsum|reduc",
    ),
    Program(
        "column_parallel_without_copy", NET, RIGHT_NET, (net_without_copy, step_net_on_ranks), TP4,
        "backward", ("blocks.1.norm", "blocks.1.up", "blocks.0", "blocks.0.down", "blocks.1"), REDUCE,
    ),
    Program(
        "value_without_copy", LM, RIGHT_LM, (lm_without_copy, step_lm_on_ranks), TP2,
        "backward", ("blocks.0.attention.value", "blocks.0.attention", "blocks.0.norm"), REDUCE,
    ),
    Program(
        "shared_key_without_copy", (make_latent, step_lm), (cut_latent, step_lm_on_ranks),
        (cut_latent_alone, step_lm_on_ranks), TP2, "backward",
        ("blocks.0.attention.shared_key", "blocks.0.attention.shared_key.weight", "blocks.0.attention",
         "blocks.0.norm"), REDUCE,
    ),
    Program(
        "norm_of_cut_width_plain_reduce", (make_normed, step_net), (cut_normed, step_net_on_ranks),
        (cut_normed_plain, step_net_on_ranks), TP4, "backward",
        ("blocks.1.middle_norm", "blocks.1.up"), rf"{REDUCE}|differentia|backward|none of the ways",
    ),
    Program(
        "norm_of_own_width", (make_normed, step_net), (cut_normed, step_net_on_ranks),
        (cut_normed_alone, step_net_on_ranks), TP4, "forward", ("blocks.1.middle_norm",), r"norm .* piece",
    ),
    Program(
        "fused_weight_cut_as_block", (make_fused, step_lm), (cut_fused, step_lm_on_ranks),
        (cut_fused_as_block, step_lm_on_ranks), TP2, "forward",
        ("blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.0.attention"),
        r"order|cut|permut|shard|other|values",
    ),
    Program(
        "clip_over_local_shards", (make_net, step_clipped), (cut_net, step_clipped_on_ranks),
        (cut_net, step_clipped_here), TP4, "gradient", PARAMETERS, NORM,
    ),
    Program(
        "norm_without_a_cut_parameter", (make_net, step_clipped), (cut_net, step_clipped_on_ranks),
        (cut_net, step_clipped_without_one), TP4, "gradient", PARAMETERS, NORM,
    ),
]  # fmt: skip
