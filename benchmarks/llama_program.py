"""Llama 2 and 3 as torchtitan trains them, written in torch's own APIs: a program for `rpcbench.simulate`.

It does what torchtitan does (sources: its commits 1ea476e, April 2024, and 9dec370, December 2024). The model is made
on "meta". `fully_shard` shards each block, with parameters in bfloat16 and reductions in float32; the last block, and
the rest of the model, stay gathered until the backward pass. Gradients are clipped to a norm, AdamW is the `foreach`
one. Memory and time do not depend on the tokens, which are zeros.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import rpcbench


class Shape(NamedTuple):
    """Sizes of a model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int  # of the feed-forward part
    vocabulary: int


SHAPES = {
    "Llama 3 8B": Shape(4096, 32, 32, 8, 14336, 128256),
    "Llama 3 70B": Shape(8192, 80, 64, 8, 28672, 128256),
    "Llama 3 405B": Shape(16384, 126, 128, 8, 53248, 128256),
    "Llama 2 13B": Shape(5120, 40, 40, 40, 13824, 32000),
    "Llama 2 70B": Shape(8192, 80, 64, 8, 28672, 32000),
}


class Settings(NamedTuple):
    """How a model is trained.

    `checkpointing` is "none", "full", "layer" (each second block) or "op" (each second matrix product is kept).
    """

    model: str
    batch: int
    length: int
    checkpointing: str
    is_norm_fused: bool = False
    is_logit_float: bool = False  # the model returns float32, and the program keeps it during the backward pass


@torch.library.custom_op("simulated_llama::normalize", mutates_args=())
def normalize(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalized x, and the reciprocals of its root mean squares, as a fused kernel does."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1) + 1e-5)
    return (x * scale[..., None]).type_as(x) * weight, scale


@torch.library.custom_op("simulated_llama::normalize_backward", mutates_args=())
def normalize_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    hat = x.float() * scale[..., None]
    weighted = grad.float() * weight
    of_x = (weighted - hat * (hat * weighted).mean(-1, keepdim=True)) * scale[..., None]
    return of_x.type_as(x), (grad * hat).flatten(0, -2).sum(0).type_as(weight)


@normalize.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@normalize_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _differentiate(context: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    of_x, of_weight = normalize_backward(grad, *context.saved_tensors)
    return of_x, of_weight


normalize.register_autograd(_differentiate, setup_context=_keep_inputs)


class RMSNorm(nn.Module):
    """torchtitan's own, of eight operators, or a fused kernel."""

    def __init__(self, width: int, is_fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.is_fused = is_fused

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            fused: Tensor = normalize(x, self.weight)[0]
            return fused
        numbers = x.float()
        numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + 1e-5)
        return numbers.type_as(x) * self.weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of numbers by the angle of their position, as complex numbers."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Repeat keys or values for the queries that share them."""
    batch, length, heads, size = x.shape
    if times == 1:
        return x
    return x[:, :, :, None].expand(batch, length, heads, times, size).reshape(batch, length, heads * times, size)


class Attention(nn.Module):
    """Attention with fewer keys and values than queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.heads * self.size, bias=False)
        self.wk = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(shape.heads * self.size, shape.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.size) for part in (self.wq, self.wk, self.wv))
        q, k = rotate(q, angles), rotate(k, angles)
        times = q.shape[2] // k.shape[2]
        k, v = repeat_heads(k, times), repeat_heads(v, times)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        out = out.transpose(1, 2).contiguous()
        result: Tensor = self.wo(out.view(batch, length, -1))
        return result


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class Block(nn.Module):
    """One layer."""

    def __init__(self, shape: Shape, is_norm_fused: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm = RMSNorm(shape.width, is_norm_fused)
        self.ffn_norm = RMSNorm(shape.width, is_norm_fused)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        result: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return result


class Llama(nn.Module):
    """A stack of blocks; the first part of a pipeline embeds, the last one gives the logits."""

    def __init__(self, shape: Shape, settings: Settings, length: int, layers: range | None = None) -> None:
        super().__init__()
        layers = range(shape.layers) if layers is None else layers
        self.is_logit_float = settings.is_logit_float
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width) if layers.start == 0 else None
        self.register_buffer("angles", torch.ones(length, shape.width // shape.heads // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(Block(shape, settings.is_norm_fused) for _ in layers)
        is_last = layers.stop == shape.layers
        self.norm = RMSNorm(shape.width, settings.is_norm_fused) if is_last else None
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False) if is_last else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        if self.norm is None or self.output is None:
            return x
        logits: Tensor = self.output(self.norm(x))
        return logits.float() if self.is_logit_float else logits


_SAVED = {
    torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}  # fmt: skip


def _keep_each_second_product() -> Any:
    counts: Counter[str] = Counter()

    def choose(context: Any, function: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        mode = "recompute" if context.is_recompute else "forward"
        counts[mode] += function == torch.ops.aten.mm.default
        is_second = function == torch.ops.aten.mm.default and counts[mode] % 2 == 0
        is_kept = function in _SAVED and not is_second
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]


def apply_checkpointing(model: Llama, mode: str) -> None:
    """Wrap the blocks whose forward is to be run again."""
    for place, layer in enumerate(model.layers):
        if mode == "op":
            wrapped = checkpoint_wrapper(layer, context_fn=_keep_each_second_product, preserve_rng_state=False)
        elif mode == "full" or (mode == "layer" and place % 2):
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False)
        else:
            continue
        model.layers[place] = wrapped


def shard_model(model: Llama, mesh: DeviceMesh, is_resharded: bool = True) -> None:
    """Shard each block, and the rest with the model; the last block stays gathered, as the backward begins with it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    last = len(model.layers) - 1
    for place, layer in enumerate(model.layers):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=is_resharded and place < last)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torchtitan's AdamW."""
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)


def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, which is computed in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def make_step(settings: Settings, mesh: DeviceMesh) -> Callable[[], None]:
    """Return the training step of one rank, sharded over `mesh`: what `rpcbench.simulate` plays."""
    shape = SHAPES[settings.model]
    with torch.device("meta"):
        model = Llama(shape, settings, settings.length)
    apply_checkpointing(model, settings.checkpointing)
    shard_model(model, mesh)
    model.to_empty(device="cpu")
    optimizer = make_optimizer(model.parameters())

    def step() -> None:
        tokens = torch.zeros(settings.batch, settings.length, dtype=torch.long)
        labels = torch.zeros(settings.batch, settings.length, dtype=torch.long)
        optimizer.zero_grad()
        logits = model(tokens)
        loss = compute_loss(logits, labels)
        if not settings.is_logit_float:
            del logits
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def play(settings: Settings, ranks: int, hardware: Any) -> Any:
    """Return the simulated world of `ranks` that share one model."""
    return rpcbench.simulate(
        partial(make_step, settings), mesh={"dp": ranks}, hardware=hardware,
        tokens=ranks * settings.batch * settings.length, ranks=[0],
    )  # fmt: skip


def shard_tensors(model: Llama, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` a part of every product; between products the sequence is sharded."""
    whole = PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    for layer in model.layers:
        parallelize_module(layer, mesh, {
            "attention_norm": SequenceParallel(), "attention": whole,
            **dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), ColwiseParallel()),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        })  # fmt: skip
    if model.tok_embeddings is not None:
        embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model, mesh, {"tok_embeddings": embed})
    if model.output is not None:
        project = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "output": project})


def split_layers(count: int, stages: int) -> list[range]:
    """Return the layers of each stage; their numbers differ by at most one."""
    bounds = [round(count * stage / stages) for stage in range(stages + 1)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def make_pipeline_step(settings: Settings, mesh: DeviceMesh) -> Callable[[], None]:
    """Return the training step of one rank of a mesh "pp", "dp", "tp": 1F1B with as many micro-batches as stages."""
    shape, stages, stage = SHAPES[settings.model], mesh["pp"].size(), mesh.get_local_rank("pp")
    with torch.device("meta"):
        model = Llama(shape, settings, settings.length, split_layers(shape.layers, stages)[stage])
    shard_tensors(model, mesh["tp"])
    apply_checkpointing(model, settings.checkpointing)
    shard_model(model, mesh["dp"], is_resharded=False)
    model.to_empty(device="cpu")
    optimizer = make_optimizer(model.parameters())
    schedule = Schedule1F1B(_make_stage(model, settings, mesh), stages, loss_fn=compute_loss)

    def step() -> None:
        tokens = torch.zeros(settings.batch, settings.length, dtype=torch.long)
        optimizer.zero_grad()
        with loss_parallel():
            if stage == 0:
                schedule.step(tokens)
            elif stage == stages - 1:
                schedule.step(target=tokens)
            else:
                schedule.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()

    return step


def _make_stage(model: Llama, settings: Settings, mesh: DeviceMesh) -> PipelineStage:
    """Return the stage, with the shapes at its borders."""
    shape, stages, stage = SHAPES[settings.model], mesh["pp"].size(), mesh.get_local_rank("pp")
    rows = settings.batch // stages
    border = torch.empty(
        rows, settings.length // mesh["tp"].size(), shape.width, dtype=torch.bfloat16, requires_grad=True
    )  # fmt: skip
    given = torch.empty(rows, settings.length, dtype=torch.long) if stage == 0 else border
    made = (
        torch.empty(rows, settings.length, shape.vocabulary, dtype=torch.bfloat16, requires_grad=True)
        if stage == stages - 1 else border
    )  # fmt: skip
    return PipelineStage(
        model, stage, stages, torch.device("cpu"), input_args=given, output_args=made, group=mesh.get_group("pp")
    )
