"""Llama 3 in the modules of torch, for lesson 35: a training step of one rank, as `rpcbench.simulate` plays it.

The model has the sizes of Llama 3 8B or 70B, or others. It is made on "meta", where tensors have no data. `make_step`
cuts its layers by tensor parallel along "tp", if the mesh has it, and shards parameters, gradients and states along
"dp". Parameters are kept in float32, computed with in bfloat16, and trained by AdamW.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import rpcbench


class Sizes(NamedTuple):
    """Sizes of a model."""

    layers: int
    width: int
    hidden: int  # of the feed-forward network
    heads: int
    kv_heads: int  # heads of keys and values, each for several heads of queries
    words: int = 128256  # of the vocabulary


LLAMA_8B = Sizes(layers=32, width=4096, hidden=14336, heads=32, kv_heads=8)
LLAMA_70B = Sizes(layers=80, width=8192, hidden=28672, heads=64, kv_heads=8)
LLAMA_2_7B = Sizes(layers=32, width=4096, hidden=11008, heads=32, kv_heads=32, words=32000)


# -- the model
class Norm(nn.Module):
    """Divides each vector by the root of the mean of its squares, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.float()
        numbers = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + 1e-5)
        return numbers.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, sizes.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(sizes.width, sizes.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        parts = (self.query, self.key, self.value)
        query, key, value = (part(x).unflatten(-1, (-1, self.head_width)) for part in parts)
        query, key = turn(query, angles), turn(key, angles)
        times = query.shape[2] // key.shape[2]
        key, value = (each.repeat_interleave(times, 2) for each in (key, value))
        read = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (query, key, value)), is_causal=True)
        return self.out(read.transpose(1, 2).flatten(2))


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: pairs of numbers are turned by the angle of their place."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles[:, None]).flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1, self.attention = Norm(sizes.width), Attention(sizes)
        self.norm2, self.feed = Norm(sizes.width), FeedForward(sizes)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    """Words (rows, length) to scores (rows, length, words of the vocabulary)."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm, self.head = Norm(sizes.width), nn.Linear(sizes.width, sizes.words, bias=False)
        angles = torch.ones(length, sizes.width // sizes.heads // 2, dtype=torch.complex64)
        self.register_buffer("angles", angles)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.head(self.norm(x))


def count_parameters(sizes: Sizes) -> int:
    with torch.device("meta"):
        return sum(each.numel() for each in Llama(sizes, 1).parameters())


# -- a training step
def make_step(
    sizes: Sizes, mesh: DeviceMesh, rows: int = 1, length: int = 8192, recompute: bool = False
) -> Callable[[], None]:
    """Return the training step of one rank.

    Args:
        sizes: Of the model.
        mesh: With a dimension "dp", and perhaps "tp".
        rows: Of each rank along "dp", each of `length` words.
        recompute: Whether a layer keeps its input alone, and runs its forward again in backward.
    """
    with torch.device("meta"):
        model = Llama(sizes, length)
    is_cut = "tp" in (mesh.mesh_dim_names or ()) and mesh["tp"].size() > 1
    if is_cut:
        cut_layers(model, mesh["tp"])
    if recompute:
        for place, layer in enumerate(model.layers):
            model.layers[place] = checkpoint_wrapper(layer, preserve_rng_state=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        words = torch.zeros(rows, length, dtype=torch.long)  # memory and time do not depend on the words
        with loss_parallel() if is_cut else contextlib.nullcontext():
            F.cross_entropy(model(words).flatten(0, 1).float(), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cut_layers(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallel: each rank has some heads, some hidden units, some words; between layers a slice of each row."""
    plan = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm2": SequenceParallel(),
        "feed": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "feed.gate": ColwiseParallel(),
        "feed.up": ColwiseParallel(),
        "feed.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)


# -- many layers, from few
FEW, MANY = 3, 6  # layers that are played: enough that the fullest moment is where it is with all layers


def estimate(
    sizes: Sizes, mesh: Mapping[str, int], rows: int = 1, length: int = 8192, recompute: bool = False
) -> tuple[float, float]:
    """Return the bytes at the peak, and the seconds of a step, of all layers: on the line through two small models.

    A process plays each layout once, and keeps the result.
    """
    few, many = (
        play(sizes._replace(layers=layers), tuple(mesh.items()), rows, length, recompute) for layers in (FEW, MANY)
    )
    more = (sizes.layers - FEW) / (MANY - FEW)
    size, seconds = (one + more * (other - one) for one, other in zip(few, many, strict=True))
    return size, seconds


@functools.cache
def play(sizes: Sizes, mesh: tuple[tuple[str, int], ...], rows: int, length: int, recompute: bool) -> tuple[int, float]:
    """The bytes at the peak, and the seconds of a step, of rank 0."""
    program = partial(make_step, sizes, rows=rows, length=length, recompute=recompute)
    world = rpcbench.simulate(program, dict(mesh), ranks=[0])
    return world.peak_bytes, world.step_seconds
