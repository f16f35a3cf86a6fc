"""Eight ways to train one model on several ranks, each as short as it can be: for lesson 31, docs and your programs.

Each recipe takes the whole model of `tiny_transformer`, the same on every rank, and a `DeviceMesh` with one dimension
or two; it changes the model, and returns the one to call. `tests/recipes` trains each on four workers and compares loss
and gradients with one process.

    recipe                who has what                                       who speaks when
    ddp                   all: the whole model, and some rows                backward: gradients
    fsdp                  each: a piece of each parameter, and some rows     both ways: parameters; backward: gradients
    tensor_parallel       each: some heads and hidden units, and all rows    twice in each block
    sequence_parallel     the same, and between them a slice of each row     twice in each block
    fsdp_and_tensor       both at once, on a mesh of two dimensions          as both
    pipeline_and_tensor   a stage: some blocks, cut by tensor parallel       between stages: vectors, gradients
    expert_parallel       each: some experts, and some rows                  in each block: tokens to their experts
    context_parallel      all: the whole model; each: a slice of each row    in each block: keys and values go round
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from ring_attention import ring_attention
from tiny_transformer import Experts, TinyTransformer, loss_of, put_back
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


# -- pieces of a batch
def rows_here(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rows of this rank: data parallel. Their number must be a multiple of the ranks."""
    return x.chunk(mesh.size())[mesh.get_local_rank()]


def slice_here(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The slice of each row that this rank has: context parallel."""
    return x.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


# -- data parallel
def ddp(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """Each rank has the whole model; backward makes each gradient the mean over the ranks."""
    return DistributedDataParallel(model, process_group=mesh.get_group())


def fsdp(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps a piece of each parameter, its gradient and its optimizer's state. A block's parameters are whole
    only while that block computes."""
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# -- tensor parallel
HEADS_AND_UNITS = {
    "attention.query": ColwiseParallel(),  # each rank has some rows of the weight: some heads
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),  # columns: the ranks' results add up
    "feed.up": ColwiseParallel(),  # some hidden units
    "feed.down": RowwiseParallel(),
}


def tensor_parallel(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """Each rank has some heads and some hidden units of each block. All ranks see the same rows."""
    for block in model.blocks.values():
        parallelize_module(block, mesh, HEADS_AND_UNITS)
    return model


SLICES = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),  # gathers
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),  # adds up, and keeps a slice
    "norm2": SequenceParallel(),
    "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed.up": ColwiseParallel(),
    "feed.down": RowwiseParallel(output_layouts=Shard(1)),
}
ENDS_OF_SLICES = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def sequence_parallel(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel, and between its parts (norms, sums) each rank has a slice of each row, not the whole."""
    for block in model.blocks.values():
        parallelize_module(block, mesh, SLICES)
    return parallelize_module(model, mesh, ENDS_OF_SLICES)


def fsdp_and_tensor(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """Blocks are cut over `tp`, and each cut parameter again over `dp`."""
    tensor_parallel(model, mesh["tp"])
    return fsdp(model, mesh["dp"])


# -- pipeline
def pipeline_and_tensor(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """The stage of this rank on `pp`: its share of the blocks, cut over `tp`. Train it by `pipeline_backward`."""
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    names = list(model.blocks)
    share = len(names) // stages
    model.blocks = nn.ModuleDict({name: model.blocks[name] for name in names[share * stage : share * (stage + 1)]})
    if stage > 0:
        model.embed = model.positions = None
    if stage < stages - 1:
        model.norm = model.head = None
    return tensor_parallel(model, mesh["tp"])


def pipeline_backward(stage: TinyTransformer, mesh: DeviceMesh, inputs: Tensor, targets: Tensor, parts: int) -> Tensor:
    """Forward with all parts of the batch, then backward with all: GPipe. The loss on the last stage, elsewhere 0."""
    group, rank, last = mesh.get_group("pp"), mesh["pp"].get_local_rank(), mesh["pp"].size() - 1
    kept, loss = [], torch.zeros((), device=inputs.device)
    for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
        if rank > 0:
            x = torch.empty(*x.shape, stage.width, device=x.device)
            dist.recv(x, group=group, group_src=rank - 1)
            x.requires_grad_()
        y_here = stage(x)
        if rank < last:
            dist.send(y_here.detach(), group=group, group_dst=rank + 1)
        else:
            y_here = loss_of(y_here, y) / parts
            loss = loss + y_here.detach()
        kept.append((x, y_here))
    for x, y_here in kept:
        gradient = None
        if rank < last:
            gradient = torch.empty_like(y_here)
            dist.recv(gradient, group=group, group_src=rank + 1)
        y_here.backward(gradient)
        if rank > 0:
            dist.send(x.grad, group=group, group_dst=rank - 1)
    return loss


# -- experts
class Exchange(torch.autograd.Function):
    """Rows to other ranks and from them: `sent[r]` to rank r, `received[r]` from it. Gradients go the other way."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.back = received, sent, group
        came = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.forward(ctx, gradient, *ctx.back), None, None, None


def expert_parallel(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """Each rank keeps its share of the experts of each block, and tokens travel to theirs and back. All other parts are
    whole on every rank: call `average_gradients` after backward."""
    for block in model.blocks.values():
        layer = block.feed
        share = len(layer.experts) // mesh.size()
        first = share * mesh.get_local_rank()
        layer.experts = nn.ModuleList(layer.experts[first : first + share])
        layer.answers = functools.partial(answers_of_all, layer, mesh.get_group())
    return model


def answers_of_all(layer: Experts, group: dist.ProcessGroup, tokens: Tensor, counts: Tensor) -> Tensor:
    """The answers of experts on all ranks to tokens that are sorted by expert, `counts` for each."""
    ranks, share = dist.get_world_size(group), len(layer.experts)
    coming = torch.empty_like(counts)
    dist.all_to_all_single(coming, counts, group=group)  # how many each rank has for each expert here
    sent, received = (each.view(ranks, share).sum(1).tolist() for each in (counts, coming))
    came = Exchange.apply(tokens, sent, received, group)
    expert = torch.arange(share, device=tokens.device).repeat(ranks).repeat_interleave(coming)  # for each token
    by_expert = expert.argsort(stable=True)
    answers = layer.answers_here(came[by_expert], expert.bincount(minlength=share))
    return Exchange.apply(put_back(answers, by_expert), received, sent, group)


# -- context
def context_parallel(model: TinyTransformer, mesh: DeviceMesh) -> nn.Module:
    """Each rank reads a slice of each row; keys and values go round a ring of the ranks. Pass the model the place where
    the slice begins, and call `average_gradients` after backward."""
    for block in model.blocks.values():
        block.attention.attend = functools.partial(ring_attention, group=mesh.get_group())
    return model


# -- gradients
def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make each gradient the mean over the ranks, for models that `ddp` and `fsdp` do not wrap.

    An expert is on one rank, and its gradient is already the sum of what all ranks have sent back."""
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(parameter.grad, group=mesh.get_group())
        parameter.grad /= mesh.size()


def whole(tensor: Tensor) -> Tensor:
    """A parameter or gradient as one process would have it, on every rank that calls this; all must."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
