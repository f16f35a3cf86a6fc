"""Pieces in another order, or wrong where they meet: shards, tables, halos, rings, recurrence, positions, channels."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from parts import (
    HEADS,
    LM,
    NET,
    WIDTH,
    WORDS,
    Attention,
    ColumnLinear,
    CopyTo,
    Exchange,
    Gather,
    RowLinear,
    SumOver,
    VocabularyEmbedding,
    average_gradients,
    cut,
    cut_net,
    gather_plainly,
    loss_of,
    make_lm,
    seeded,
    share,
    step_lm_on_ranks,
    step_net_on_ranks,
    words_of,
)
from program import Program
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- shards in another order than those of the layer before
def net_with_reversed_shards(mesh: DeviceMesh) -> Any:
    """The shards of a checkpoint are read from the last rank's to the first's."""
    model = cut_net(mesh)
    down = model.blocks[0].down
    pieces = gather_plainly(down.weight, down.group, 1).chunk(2, 1)
    down.weight = nn.Parameter(pieces[1 - mesh.get_local_rank()].clone())
    return model


# -- a table of which each rank has some entries
class OverlappingEmbedding(VocabularyEmbedding):
    def vectors_here(self, x: Tensor) -> Tensor:
        """The entry behind the last one counts, too."""
        here = x - dist.get_rank(self.group) * len(self.weight)
        foreign = (here < 0) | (here > len(self.weight))
        nearest = here.masked_fill(foreign, 0).clamp(max=len(self.weight) - 1)
        return functional.embedding(nearest, self.weight).masked_fill(foreign[..., None], 0.0)


def lm_with_cut_words(mesh: DeviceMesh) -> Any:
    model = make_lm()
    model.embed = VocabularyEmbedding(model.embed, mesh.get_group("tp"))
    return model


def lm_with_overlapping_words(mesh: DeviceMesh) -> Any:
    model = lm_with_cut_words(mesh)
    model.embed.__class__ = OverlappingEmbedding
    return model


# -- gate and value are one projection
class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.both = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(self.norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * value)


def make_gated() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Gated(), nn.Linear(WIDTH, 5)))


def gated_as_one(mesh: DeviceMesh) -> Any:
    model, group = make_gated(), mesh.get_group("tp")
    model[1].both, model[1].down = ColumnLinear(model[1].both, group), RowLinear(model[1].down, group)
    return model


def gated_by_halves(mesh: DeviceMesh) -> Any:
    halves = make_gated()[1].both.weight.chunk(2)
    model = gated_as_one(mesh)
    model[1].both.weight = nn.Parameter(torch.cat([share(each.detach(), mesh) for each in halves]))
    return model


# -- channels in groups
class Channels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(functional.relu(self.norm(self.enter(x)))).mean((2, 3))


class ConvOfChannels(nn.Conv2d):
    """A convolution of which each rank has some channels of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return SumOver.apply(functional.conv2d(x, self.weight), self.group) + self.bias[:, None, None]


def make_channels() -> Channels:
    return seeded(Channels)


def step_channels(model: nn.Module) -> Tensor:
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(3))
    loss = loss_of(model(x), torch.arange(4))
    loss.backward()
    return loss.detach()


def step_channels_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_channels(model)


def channels_in_groups(mesh: DeviceMesh, groups: int) -> Any:
    model, group = make_channels(), mesh.get_group("tp")
    for each in (model.enter, model.norm):
        each.weight, each.bias = cut(each.weight, group, 0), cut(each.bias, group, 0)
    model.norm.num_channels, model.norm.num_groups = 8 // mesh.size(), groups
    model.leave.weight = cut(model.leave.weight, group, 1)
    model.leave.__class__, model.leave.group = ConvOfChannels, group
    return model


def channels_in_own_groups(mesh: DeviceMesh) -> Any:
    return channels_in_groups(mesh, 4 // mesh.size())


def channels_in_all_groups(mesh: DeviceMesh) -> Any:
    return channels_in_groups(mesh, 4)


# -- rows whose numbers are on several ranks
class NormOverPieces(nn.LayerNorm):
    group: ProcessGroup
    is_of_row = True

    def forward(self, x: Tensor) -> Tensor:
        sums = torch.stack([x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)])
        if self.is_of_row:
            sums = CopyTo.apply(SumOver.apply(sums, self.group), self.group) / dist.get_world_size(self.group)
        return (x - sums[0]) * (sums[1] - sums[0] ** 2 + self.eps).rsqrt() * self.weight + self.bias


def make_wide() -> nn.Module:
    layers = {"enter": nn.Linear, "norm": nn.LayerNorm, "leave": nn.Linear}
    sizes = {"enter": (WIDTH, 2 * WIDTH), "norm": (2 * WIDTH,), "leave": (2 * WIDTH, 5)}
    return seeded(lambda: nn.Sequential(OrderedDict({name: layers[name](*sizes[name]) for name in layers})))


def wide_over_pieces(mesh: DeviceMesh) -> Any:
    model, group = make_wide(), mesh.get_group("tp")
    model.enter, model.leave = ColumnLinear(model.enter, group), RowLinear(model.leave, group)
    model.norm.weight, model.norm.bias = cut(model.norm.weight, group, 0), cut(model.norm.bias, group, 0)
    model.norm.__class__, model.norm.group = NormOverPieces, group
    return model


def wide_by_own_pieces(mesh: DeviceMesh) -> Any:
    model = wide_over_pieces(mesh)
    model.norm.is_of_row = False
    return model


# -- images cut along their height: a convolution reads a row of each neighbour
class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, is_swapped: bool, has_way_back: bool) -> Tensor:
        ctx.group, ctx.has_way_back = group, has_way_back
        above, below = neighbours_of(x, group, 0 if is_swapped else -1, -1 if is_swapped else 0)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        own = gradient[:, :, 1:-1].clone()
        if ctx.has_way_back:
            above, below = neighbours_of(gradient, ctx.group, -1, 0)
            own[:, :, :1] += above
            own[:, :, -1:] += below
        return own, None, None, None


def neighbours_of(x: Tensor, group: ProcessGroup, of_above: int, of_below: int) -> tuple[Tensor, Tensor]:
    """A row of the rank above and one of the rank below; zeros at the edges of the image."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    rows = torch.cat([x[:, :, :1], x[:, :, -1:]], 2).contiguous()
    pairs = gather_plainly(rows, group, 2).split(2, 2)
    nothing = torch.zeros_like(rows[:, :, :1])
    above = pairs[rank - 1][:, :, of_above].unsqueeze(2) if rank else nothing
    return above, pairs[rank + 1][:, :, of_below].unsqueeze(2) if rank < last else nothing


class HaloConv(nn.Conv2d):
    group: ProcessGroup | None = None
    is_swapped, has_way_back = False, True

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return super().forward(x)
        wide = Halo.apply(x, self.group, self.is_swapped, self.has_way_back)
        return functional.conv2d(wide, self.weight, self.bias, padding=(0, 1))


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = (HaloConv(*sizes, 3, padding=1) for sizes in ((1, 3), (3, 3), (3, 5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.middle(torch.tanh(self.enter(x)))))


def make_picture() -> Picture:
    return seeded(Picture)


def pictures() -> tuple[Tensor, Tensor]:
    choice = torch.Generator().manual_seed(12)
    return torch.randn(2, 1, 12, 6, generator=choice), torch.randint(0, 5, (2, 12, 6), generator=choice)


def step_picture(model: nn.Module) -> Tensor:
    x, y = pictures()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def step_bands(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = (share(each, mesh, each.dim() - 2) for each in pictures())
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss.detach()


def picture_in_bands(mesh: DeviceMesh) -> Any:
    model = make_picture()
    for each in model.children():
        each.group = mesh.get_group()
    return model


def picture_with_swapped_halo(mesh: DeviceMesh) -> Any:
    model = picture_in_bands(mesh)
    model.middle.is_swapped = True
    return model


def picture_without_way_back(mesh: DeviceMesh) -> Any:
    model = picture_in_bands(mesh)
    model.middle.has_way_back = False
    return model


# -- words one after another
class Tagger(nn.Module):
    """Words (places, rows)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory, self.head = nn.Embedding(WORDS, 8), nn.LSTM(8, 8), nn.Linear(8, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(self.embed(x))[0])


def make_tagger() -> Tagger:
    return seeded(Tagger)


def tagger_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_tagger()


def step_tagger(model: nn.Module) -> Tensor:
    x, y = (each.T for each in words_of())
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_share_of_words(model: nn.Module, mesh: DeviceMesh, dim: int) -> Tensor:
    x, y = (share(each.T, mesh, dim) for each in words_of())
    loss = loss_of(model(x), y)
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss.detach()


def step_share_of_rows(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_share_of_words(model, mesh, 1)


def step_share_of_time(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Time comes first, and the rows are thought to."""
    return step_share_of_words(model, mesh, 0)


# -- context parallel: positions come from outside, keys and values in blocks
class Turn(nn.Module):
    """Turns pairs of numbers by an angle that grows with the position."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None] / 10.0 ** torch.arange(x.shape[-1] // 2)
        first, second = x.chunk(2, -1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


class Blocks(nn.Module):
    """Attention to the places before; in context parallel to one rank's block after another."""

    group: ProcessGroup | None = None
    rescales = True

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.group is None:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        count, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        blocks = [Gather.apply(each, self.group, 2).chunk(count, 2) for each in (key, value)]
        places = torch.arange(query.shape[2])
        total, weight = torch.zeros_like(query), torch.zeros(*query.shape[:-1], 1)
        highest = torch.full_like(weight, -1e30)
        for source in [(rank - step) % count for step in range(count)]:
            seen = (places + rank * len(places))[:, None] >= places + source * len(places)
            scores = query @ blocks[0][source].mT / query.shape[-1] ** 0.5
            scores = scores.masked_fill(~seen, -1e30)
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            odds, shrink = (scores - higher).exp() * seen, (highest - higher).exp()
            weight = weight * shrink + odds.sum(-1, keepdim=True)
            total = (total * shrink if self.rescales else total) + odds @ blocks[1][source]
            highest = higher
        return total / weight


class TurnedAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.turn, self.blocks = Turn(), Blocks()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        query, key, value = (
            project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        query, key = self.turn(4 * query, positions), self.turn(key, positions)
        return self.out(self.blocks(query, key, value).transpose(1, 2).flatten(2))


class TurnedLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(WORDS, WIDTH), TurnedAttention(), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.attention(x, positions))


def make_turned() -> TurnedLm:
    return seeded(TurnedLm)


def step_turned(model: nn.Module) -> Tensor:
    x, y = words_of()
    loss = loss_of(model(x, torch.arange(x.shape[1])), y)
    loss.backward()
    return loss.detach()


def step_context(model: nn.Module, mesh: DeviceMesh, moves: bool) -> Tensor:
    x, y = (share(each, mesh, 1) for each in words_of())
    first = mesh.get_local_rank() * x.shape[1] if moves else 0
    loss = loss_of(model(x, torch.arange(x.shape[1]) + first), y)
    loss.backward()
    average_gradients(model, mesh.get_group())
    return loss.detach()


def step_context_moved(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_context(model, mesh, moves=True)


def step_context_unmoved(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_context(model, mesh, moves=False)


def turned_in_blocks(mesh: DeviceMesh) -> Any:
    model = make_turned()
    model.attention.blocks.group = mesh.get_group()
    return model


def turned_without_rescaling(mesh: DeviceMesh) -> Any:
    """What was added up before a higher score came is not made smaller."""
    model = turned_in_blocks(mesh)
    model.attention.blocks.rescales = False
    return model


# -- Ulysses: heads and places change sides
class HeadsForPlaces(Blocks):
    deals_places = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = self.group
        assert group is not None
        query, key, value = (change_sides(each, 1, 2, group) for each in (query, key, value))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.deals_places:
            count = dist.get_world_size(group)
            found = torch.cat([found[:, :, n::count] for n in range(count)], 2)
        return change_sides(found, 2, 1, group)


def change_sides(x: Tensor, cut_dim: int, joined_dim: int, group: ProcessGroup) -> Tensor:
    count = dist.get_world_size(group)
    sent = torch.cat([each.unsqueeze(0) for each in x.chunk(count, cut_dim)])
    came = Exchange.apply(sent, [1] * count, [1] * count, group)
    return torch.cat([*came], joined_dim)


def turned_by_heads(mesh: DeviceMesh) -> Any:
    model = turned_in_blocks(mesh)
    model.attention.blocks.__class__ = HeadsForPlaces
    return model


def turned_by_dealt_places(mesh: DeviceMesh) -> Any:
    """The places go back to the ranks in turn, as those of another program do."""
    model = turned_by_heads(mesh)
    model.attention.blocks.deals_places = True
    return model


TP2, CP2 = {"tp": 2}, {"cp": 2}
GATED = (make_gated, NET[1])
TURNED = (make_turned, step_turned)
PICTURE = (make_picture, step_picture)

PROGRAMS = [
    Program(
        "shards_in_reversed_order", NET, (cut_net, step_net_on_ranks), (net_with_reversed_shards, step_net_on_ranks),
        TP2, "initial", ("blocks.0.down.weight",), r"another order",
    ),
    Program(
        "vocabulary_pieces_overlap", LM, (lm_with_cut_words, step_lm_on_ranks),
        (lm_with_overlapping_words, step_lm_on_ranks), {"tp": 4}, "forward", ("embed",), r"entry \d+ .*overlap",
    ),
    Program(
        "gate_and_value_cut_as_one", GATED, (gated_by_halves, step_net_on_ranks), (gated_as_one, step_net_on_ranks),
        TP2, "forward", ("1.both", "1.down", "1"), r"both\.weight holds two matrices",
    ),
    Program(
        "groups_not_divided", (make_channels, step_channels), (channels_in_own_groups, step_channels_on_ranks),
        (channels_in_all_groups, step_channels_on_ranks), TP2, "forward", ("norm",), r"num_groups",
    ),
    Program(
        "layer_norm_of_pieces", (make_wide, NET[1]), (wide_over_pieces, step_net_on_ranks),
        (wide_by_own_pieces, step_net_on_ranks), TP2, "forward", ("norm",), r"mean and its variance",
    ),
    Program(
        "halo_of_the_wrong_side", PICTURE, (picture_in_bands, step_bands), (picture_with_swapped_halo, step_bands),
        CP2, "forward", ("middle",), r"borders .*halo",
    ),
    Program(
        "halo_without_way_back", PICTURE, (picture_in_bands, step_bands), (picture_without_way_back, step_bands),
        {"cp": 3}, "backward", ("enter",), r"borders .*halo",
    ),
    Program(
        "time_cut_for_rows", (make_tagger, step_tagger), (tagger_on_each, step_share_of_rows),
        (tagger_on_each, step_share_of_time), {"dp": 2}, "forward", ("memory",), r"empty state",
    ),
    Program(
        "given_positions_not_moved", TURNED, (turned_in_blocks, step_context_moved),
        (turned_in_blocks, step_context_unmoved), CP2, "forward", ("attention.turn",), r"positions",
    ),
    Program(
        "blocks_not_rescaled", TURNED, (turned_in_blocks, step_context_moved),
        (turned_without_rescaling, step_context_moved), CP2, "forward", ("attention.blocks",), r"softmax",
    ),
    Program(
        "places_come_back_in_turn", TURNED, (turned_by_heads, step_context_moved),
        (turned_by_dealt_places, step_context_moved), CP2, "forward",
        ("attention.blocks", "attention.out", "attention"), r"another",
    ),
]  # fmt: skip
