"""Torch's own ways: `parallelize_module`, DTensor, `fully_shard` with tensor parallel, and clipping."""

from __future__ import annotations

import torch
from parts import (
    HEADS,
    LIMIT,
    LM,
    NET,
    PARAMETERS,
    WIDTH,
    Lm,
    backward_of_rows,
    heads_of,
    make_lm,
    make_net,
    net_in_fsdp,
    seeded,
    step_clipped,
    step_lm,
    step_lm_on_ranks,
    step_net_on_ranks,
)
from program import REDUCE, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

Plan = dict[str, ParallelStyle]


# -- plans
FEEDS: Plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def net_by_plan(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(make_net(), mesh["tp"], FEEDS)


def net_by_plan_left_partial(mesh: DeviceMesh) -> nn.Module:
    """The last layer's result stays a summand, as if its reader added up."""
    last = {"blocks.1.down": RowwiseParallel(output_layouts=Partial())}
    first = {"blocks.*.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    return parallelize_module(make_net(), mesh["tp"], {**first, **last})


def net_by_plan_of_other_dimension(mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel over `dp`, whose ranks have other rows."""
    return fully_shard(parallelize_module(make_net(), mesh["dp"], FEEDS), mesh=mesh["tp"])


def net_in_both(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(net_by_plan(mesh), mesh=mesh["dp"])


# -- words
def lm_plan(embed: ParallelStyle) -> Plan:
    return {
        "embed": embed,
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.feed.up": ColwiseParallel(),
        "blocks.*.feed.down": RowwiseParallel(),
    }


def lm_by_plan(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(make_lm(), mesh, lm_plan(RowwiseParallel(input_layouts=Replicate())))


class LocalEmbedding(nn.Embedding):
    """Takes the words of this rank from a cut weight, without the sum over ranks."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local()
        here = x - self.weight.device_mesh.get_local_rank() * len(weight)
        foreign = (here < 0) | (here >= len(weight))
        return functional.embedding(here.masked_fill(foreign, 0), weight).masked_fill(foreign[..., None], 0.0)


def lm_by_plan_of_local_words(mesh: DeviceMesh) -> nn.Module:
    model = lm_by_plan(mesh)
    whole = make_lm().embed
    model.embed = LocalEmbedding(*whole.weight.shape)
    model.embed.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), mesh, [Shard(0)]))
    return model


# -- sequence parallel
def sequence_plan(norm: Plan) -> Plan:
    return {
        **norm,
        "blocks.*.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.feed.norm": SequenceParallel(),
        "blocks.*.feed.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.feed.down": RowwiseParallel(output_layouts=Shard(1)),
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def lm_by_sequence(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(make_lm(), mesh, sequence_plan({"blocks.*.norm": SequenceParallel()}))


def lm_by_sequence_without_norm(mesh: DeviceMesh) -> nn.Module:
    """The plan forgets a norm: it computes all the same, with this rank's places."""
    return parallelize_module(make_lm(), mesh, sequence_plan({}))


# -- a key that all heads share
class SharedKeyAttention(nn.Module):
    """All heads have one key and one value: multi-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.shared_key = nn.Linear(WIDTH, WIDTH // HEADS, bias=False)
        self.shared_value = nn.Linear(WIDTH, WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query = heads_of(self.query(x))
        key, value = (each[:, None].expand_as(query) for each in (self.shared_key(x), self.shared_value(x)))
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(read.transpose(1, 2).flatten(2))


class WholeOnRanks(ParallelStyle):
    """A whole layer on each rank, read by cut ones. The gradient of its result is a summand, or taken for the whole."""

    def __init__(self, gradient: Partial | Replicate) -> None:
        self.gradient = gradient

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda module, inputs, y: self.local_of(y, mesh))
        return module

    def local_of(self, y: Tensor, mesh: DeviceMesh) -> Tensor:
        whole = DTensor.from_local(y, mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[self.gradient])


def shared_key_lm() -> Lm:
    model = Lm()
    model.blocks[0].attention = SharedKeyAttention()
    return model


def make_shared_key() -> nn.Module:
    return seeded(shared_key_lm)


def shared_key_plan(key: Partial | Replicate) -> Plan:
    return {
        "blocks.0.attention.query": ColwiseParallel(),
        "blocks.0.attention.shared_key": WholeOnRanks(key),
        "blocks.0.attention.shared_value": WholeOnRanks(Partial()),
        "blocks.0.attention.out": RowwiseParallel(),
    }


def shared_key_by_plan(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(make_shared_key(), mesh, shared_key_plan(Partial()))


def shared_key_by_plan_as_whole(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(make_shared_key(), mesh, shared_key_plan(Replicate()))


# -- clipping
def step_clipped_rows(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = backward_of_rows(model, mesh)
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    return loss


def step_clipped_locally(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The norm is that of this rank's pieces."""
    loss = backward_of_rows(model, mesh)
    local = torch.stack([each.grad.to_local().norm() for each in model.parameters()]).norm()
    nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, local)
    return loss


TP4, TP2, DP4, DP_TP = {"tp": 4}, {"tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}

PROGRAMS = [
    Program(
        "rowwise_left_partial", NET, (net_by_plan, step_net_on_ranks), (net_by_plan_left_partial, step_net_on_ranks),
        TP4, "forward", ("blocks.1.down", "blocks.1"), REDUCE,
    ),
    Program(
        "tensor_parallel_over_rows", NET, (net_in_both, backward_of_rows),
        (net_by_plan_of_other_dimension, backward_of_rows), DP_TP, "forward",
        ("blocks.0.down", "blocks.0", "blocks.0.up"), rf"group|dimension|mesh|rows|\bdp\b|{REDUCE}",
    ),
    Program(
        "local_embedding", LM, (lm_by_plan, step_lm_on_ranks), (lm_by_plan_of_local_words, step_lm_on_ranks), TP4,
        "forward", ("embed", "blocks.0.norm", "blocks.0"), REDUCE,
    ),
    Program(
        "sequence_parallel_norm_not_in_plan", LM, (lm_by_sequence, step_lm_on_ranks),
        (lm_by_sequence_without_norm, step_lm_on_ranks), TP2, "gradient",
        ("blocks.0.norm.weight", "blocks.0.norm.bias"), REDUCE,
    ),
    Program(
        "shared_key_taken_for_whole", (make_shared_key, step_lm), (shared_key_by_plan, step_lm_on_ranks),
        (shared_key_by_plan_as_whole, step_lm_on_ranks), TP2, "backward",
        ("blocks.0.attention.shared_key", "blocks.0.attention.shared_key.weight", "blocks.0.attention",
         "blocks.0.norm"), REDUCE,
    ),
    Program(
        "clip_over_local_pieces", (make_net, step_clipped), (net_in_fsdp, step_clipped_rows),
        (net_in_fsdp, step_clipped_locally), DP4, "gradient", PARAMETERS, r"norm|clip|scal|factor",
    ),
]  # fmt: skip
