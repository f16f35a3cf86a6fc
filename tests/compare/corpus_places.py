"""Sequences that are cut: context parallel, and Megatron's sequence parallel by hand."""

from __future__ import annotations

import torch
import torch.distributed as dist
from parts import (
    LM,
    Attention,
    ColumnLinear,
    Exchange,
    Gather,
    GatherSame,
    Lm,
    RowLinear,
    ScatterSum,
    Split,
    average_gradients,
    gather_plainly,
    loss_of,
    make_lm,
    share,
    step_lm,
    words_of,
)
from program import REDUCE, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- context parallel: keys and values of all places come to each rank
class WideAttention(Attention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (Gather.apply(each, self.group, 2) for each in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self.mask(query, key))

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        first = dist.get_rank(self.group) * query.shape[2]
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(first)


class WideAttentionUnmoved(WideAttention):
    """Each rank takes its first place for the first of the row."""

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()


class WideAttentionPlain(WideAttention):
    """`dist.all_gather` has no backward: keys and values of other ranks are constants."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (self.gather(each) for each in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=self.mask(query, key))

    def gather(self, x: Tensor) -> Tensor:
        parts = list(gather_plainly(x, self.group, 2).chunk(dist.get_world_size(self.group), 2))
        parts[dist.get_rank(self.group)] = x
        return torch.cat(parts, 2)


def lm_of_attention(kind: type[Attention], mesh: DeviceMesh) -> Lm:
    model = make_lm()
    for block in model.blocks:
        block.attention.__class__, block.attention.group = kind, mesh.get_group("cp")
    return model


def lm_in_context(mesh: DeviceMesh) -> nn.Module:
    return lm_of_attention(WideAttention, mesh)


def lm_with_unmoved_mask(mesh: DeviceMesh) -> nn.Module:
    return lm_of_attention(WideAttentionUnmoved, mesh)


def lm_with_plain_gather(mesh: DeviceMesh) -> nn.Module:
    return lm_of_attention(WideAttentionPlain, mesh)


class HeadsAttention(Attention):
    """An all-to-all before and after: this rank has all places of some heads."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (self.change(each, 1, 2) for each in (query, key, value))
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.change_back(read)

    def change(self, x: Tensor, cut_dim: int, whole_dim: int) -> Tensor:
        """Cut along one dimension in place of another."""
        ranks = dist.get_world_size(self.group)
        parts = torch.stack(x.chunk(ranks, cut_dim))
        came = Exchange.apply(parts, [1] * ranks, [1] * ranks, self.group)
        return torch.cat(list(came), whole_dim)

    def change_back(self, x: Tensor) -> Tensor:
        return self.change(x, 2, 1)


class HeadsAttentionMixed(HeadsAttention):
    """The heads of the ranks come back interleaved: `flatten` has the two dimensions in the wrong order."""

    def change_back(self, x: Tensor) -> Tensor:
        heads = super().change_back(x)
        return heads.unflatten(1, (dist.get_world_size(self.group), -1)).transpose(1, 2).flatten(1, 2)


def lm_by_heads(mesh: DeviceMesh) -> nn.Module:
    return lm_of_attention(HeadsAttention, mesh)


def lm_by_mixed_heads(mesh: DeviceMesh) -> nn.Module:
    return lm_of_attention(HeadsAttentionMixed, mesh)


def backward_of_places(model: nn.Module, mesh: DeviceMesh, x: Tensor, y: Tensor) -> Tensor:
    """Each rank of `cp` has a slice of each row."""
    x, y = share(x, mesh, 1), share(y, mesh, 1)
    loss = loss_of(model(x, x.shape[1] * mesh.get_local_rank()), y)
    loss.backward()
    return loss.detach()


def step_places(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_places(model, mesh["cp"], *words_of())
    average_gradients(model, mesh.get_group("cp"))
    return loss


def step_places_unmoved(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Each rank counts its places from 0."""
    x, y = (share(each, mesh, 1) for each in words_of())
    loss = loss_of(model(x), y)
    loss.backward()
    average_gradients(model, mesh.get_group("cp"))
    return loss.detach()


def step_shifted_after_cut(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Targets come from the slice: the last place of each slice has none."""
    x, y = words_of()
    here, first = share(x, mesh, 1), x.shape[1] // mesh.size() * mesh.get_local_rank()
    targets = functional.pad(here[:, 1:], (0, 1), value=-100)
    if mesh.get_local_rank() == mesh.size() - 1:
        targets[:, -1] = y[:, -1]
    loss = loss_of(model(here, first), targets)
    loss.backward()
    average_gradients(model, mesh.get_group("cp"))
    return loss.detach()


# -- rows over `dp`, places over `cp`
def step_rows_and_places(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_places(model, mesh["cp"], *(share(each, mesh["dp"]) for each in words_of()))
    average_gradients(model, mesh.get_group("dp"))
    average_gradients(model, mesh.get_group("cp"))
    return loss


def step_rows_alone(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Gradients are averaged over `dp`, as before there was `cp`."""
    loss = backward_of_places(model, mesh["cp"], *(share(each, mesh["dp"]) for each in words_of()))
    average_gradients(model, mesh.get_group("dp"))
    return loss


# -- each rank has one early and one late slice, so that all have as much to read
def order_of_slices(mesh: DeviceMesh, places: int) -> Tensor:
    early = torch.arange(places).chunk(2 * mesh.size())
    number = mesh.get_local_rank()
    return torch.cat([early[number], early[-1 - number]])


class FoldedAttention(WideAttention):
    """Keys and values come in the order of the ranks' slices."""

    def mask(self, query: Tensor, key: Tensor) -> Tensor:
        return self.places[dist.get_rank(self.group)][:, None] >= self.places.flatten()[None]


class FoldedLm(Lm):
    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = self.embed(x) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def lm_in_folds(mesh: DeviceMesh) -> nn.Module:
    model = lm_of_attention(FoldedAttention, mesh)
    model.__class__ = FoldedLm
    places = order_of_slices(mesh, words_of()[0].shape[1])
    every = [torch.empty_like(places) for _ in range(mesh.size())]
    dist.all_gather(every, places, group=mesh.get_group("cp"))
    for block in model.blocks:
        block.attention.places = torch.stack(every)
    return model


def step_folds(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = words_of()
    places = order_of_slices(mesh, x.shape[1])
    loss = loss_of(model(x[:, places], places), y[:, places])
    loss.backward()
    average_gradients(model, mesh.get_group("cp"))
    return loss.detach()


def step_folds_of_other_targets(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The targets are cut in the plain order."""
    x, y = words_of()
    places = order_of_slices(mesh, x.shape[1])
    loss = loss_of(model(x[:, places], places), share(y, mesh, 1))
    loss.backward()
    average_gradients(model, mesh.get_group("cp"))
    return loss.detach()


# -- sequence parallel: between the cut layers each rank has a slice of the places
class SlicedColumnLinear(ColumnLinear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(Gather.apply(x, self.group, 1), self.weight, self.bias)


class SlicedRowLinear(RowLinear):
    def forward(self, x: Tensor) -> Tensor:
        return ScatterSum.apply(functional.linear(x, self.weight), self.group, 1) + self.bias


class SlicedEmbedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        dim = x.dim() - 1  # words are (rows, places), positions are (places)
        return Split.apply(super().forward(x), self.group, dim)


class WholeNorm(nn.LayerNorm):
    """Norms a slice, and gathers the places: all ranks compute the same scores."""

    gather = GatherSame

    def forward(self, x: Tensor) -> Tensor:
        return self.gather.apply(super().forward(x), self.group, 1)


class WholeNormSummed(WholeNorm):
    """The backward of a gather for cut layers adds up: here it counts one gradient for each rank."""

    gather = Gather


def lm_in_slices(mesh: DeviceMesh) -> Lm:
    model, group = make_lm(), mesh.get_group("tp")
    for block in model.blocks:
        for owner, columns, row in ((block.attention, ("query", "key", "value"), "out"), (block.feed, ("up",), "down")):
            for name in columns:
                setattr(owner, name, SlicedColumnLinear(getattr(owner, name), group))
            setattr(owner, row, SlicedRowLinear(getattr(owner, row), group))
    for module, kind in ((model.embed, SlicedEmbedding), (model.positions, SlicedEmbedding), (model.norm, WholeNorm)):
        module.__class__, module.group = kind, group
    return model


def lm_in_slices_summed(mesh: DeviceMesh) -> nn.Module:
    model = lm_in_slices(mesh)
    model.norm.__class__ = WholeNormSummed
    return model


def step_slices(model: nn.Module, mesh: DeviceMesh, without: str = "nothing") -> Tensor:
    """Parameters that have seen a slice have a part of their gradient."""
    loss = step_lm(model)
    for name, each in model.named_parameters():
        if ("norm" in name or name.endswith(("out.bias", "down.bias"))) and without not in name:
            dist.all_reduce(each.grad, group=mesh.get_group("tp"))
    return loss


def step_slices_without_norms(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_slices(model, mesh, "norm")


def step_slices_without_bias(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_slices(model, mesh, "down.bias")


NAMES = tuple(name for name, _ in make_lm().named_parameters())
NORMS = tuple(name for name in NAMES if "norm" in name)
CP4, CP2, TP2 = {"cp": 4}, {"cp": 2}, {"tp": 2}
CONTEXT = (lm_in_context, step_places)

PROGRAMS = [
    Program(
        "positions_not_moved", LM, CONTEXT, (lm_in_context, step_places_unmoved), CP4, "forward", ("positions",),
        r"position|place|offset|sequence|rank|first|same|equal",
    ),
    Program(
        "mask_not_moved", LM, CONTEXT, (lm_with_unmoved_mask, step_places), CP4, "forward",
        ("blocks.0.attention", "blocks.0.attention.out"), r"mask|causal|position|offset|place|rank|sequence",
    ),
    Program(
        "keys_gathered_without_backward", LM, CONTEXT, (lm_with_plain_gather, step_places), CP2, "backward",
        ("blocks.0.attention.key", "blocks.0.attention.value"),
        rf"{REDUCE}|gather|differentia|backward|none of the ways",
    ),
    Program(
        "heads_in_other_order", LM, (lm_by_heads, step_places), (lm_by_mixed_heads, step_places), CP2, "forward",
        ("blocks.0.attention", "blocks.0.attention.out"), r"order|permut|other|none of the ways",
    ),
    Program(
        "targets_shifted_after_cut", LM, CONTEXT, (lm_in_context, step_shifted_after_cut), CP4, "loss",
        ("loss", "head", ""), r"target|label|count|token|mean|weigh|fit|none of the ways",
    ),
    Program(
        "gradients_not_reduced_over_places", LM, (lm_in_context, step_rows_and_places),
        (lm_in_context, step_rows_alone), {"dp": 2, "cp": 2}, "gradient", NAMES, rf"\bcp\b|{REDUCE}",
    ),
    Program(
        "targets_not_folded", LM, (lm_in_folds, step_folds), (lm_in_folds, step_folds_of_other_targets), CP2, "loss",
        ("loss", "head", ""), r"target|label|order|permut|fit|none of the ways",
    ),
    Program(
        "sequence_parallel_norms_not_reduced", LM, (lm_in_slices, step_slices),
        (lm_in_slices, step_slices_without_norms), TP2, "gradient", NORMS, REDUCE,
    ),
    Program(
        "sequence_parallel_bias_not_reduced", LM, (lm_in_slices, step_slices), (lm_in_slices, step_slices_without_bias),
        TP2, "gradient", ("blocks.0.feed.down.bias",), REDUCE,
    ),
    Program(
        "sequence_parallel_gather_counts_twice", LM, (lm_in_slices, step_slices), (lm_in_slices_summed, step_slices),
        TP2, "backward", ("norm", "blocks.0", "blocks.0.feed", "blocks.0.feed.down"),
        r"times|factor|twice|double|scal|\bsum|reduc",
    ),
]  # fmt: skip
