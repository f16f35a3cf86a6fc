"""Tensor parallel by hand: the two functions of Megatron-LM, and a block that is cut by them, for lesson 23."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tiny_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F


class Copy(torch.autograd.Function):
    """`f`: forward does nothing, as all ranks have the same x. Backward adds up the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()  # others may have this gradient, too
        dist.all_reduce(total)
        return total


class Add(torch.autograd.Function):
    """`g`: forward adds up the parts of all ranks. Backward does nothing, as each part counts once in the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def copy(x: Tensor) -> Tensor:
    return Copy.apply(x)


def add(part: Tensor) -> Tensor:
    return Add.apply(part)


def piece(weight: Tensor, dim: int) -> nn.Parameter:
    """This rank's piece of a weight, cut along a dimension. A linear layer of torch keeps its weight transposed: the
    columns of the matrix are dimension 0."""
    return nn.Parameter(weight.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class CutBlock(nn.Module):
    """A block of `tiny_transformer` of which this rank has some heads and some hidden units."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        attention, feed = block.attention, block.feed
        self.norm1, self.norm2 = block.norm1, block.norm2  # whole on each rank
        self.query, self.key, self.value = (
            piece(each.weight, 0) for each in (attention.query, attention.key, attention.value)
        )
        self.out = piece(attention.out.weight, 1)
        self.up, self.up_bias = piece(feed.up.weight, 0), piece(feed.up.bias, 0)
        self.down, self.down_bias = piece(feed.down.weight, 1), feed.down.bias
        self.head_width = attention.head_width

    def forward(self, x: Tensor) -> Tensor:
        x = x + add(self.attend(copy(self.norm1(x))))
        return x + add(self.feed(copy(self.norm2(x)))) + self.down_bias  # the bias once, not on each rank

    def attend(self, x: Tensor) -> Tensor:
        heads = [
            F.linear(x, weight).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for weight in (self.query, self.key, self.value)
        ]
        read = F.scaled_dot_product_attention(*heads, is_causal=True)
        return F.linear(read.transpose(1, 2).flatten(2), self.out)

    def feed(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up, self.up_bias)), self.down)
