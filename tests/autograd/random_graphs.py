"""Random local graphs with received tensors, leaves, several roots and hooks that are not linear."""

from __future__ import annotations

import collections
import random

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

from rpcbench.autograd.graph import edges, is_leaf, reach, receive
from rpcbench.autograd.regions import LocalPass


class TwoOut(torch.autograd.Function):
    """Two outputs, an argument that is no tensor, and gradients of its own type and shape."""

    @staticmethod
    def forward(ctx, a, _number, b):
        ctx.save_for_backward(a, b)
        return a * b, a + 2 * b

    @staticmethod
    def backward(ctx, g, h):
        a, b = ctx.saved_tensors
        return g * b + h, None, g * a + 2 * h


class Widened(torch.autograd.Function):
    """Gives a gradient that torch has to sum down."""

    @staticmethod
    def forward(ctx, a):
        return a.expand(3).clone()

    @staticmethod
    def backward(ctx, g):
        return g


def _new(*shape):
    return torch.randn(shape or (3,), dtype=torch.double)


def _in_place_on_a_view(a, b):
    c = a.clone()
    c[:2].mul_(torch.sin(b[1:]))
    return c


OPS = {
    "mul": lambda a, b: [torch.sin(a) * b],
    "add": lambda a, b: [a + b],
    "square": lambda a, b: [torch.tanh(a) * torch.tanh(a)],
    "unbind": lambda a, b: torch.stack([a, b]).unbind(0),
    "split": lambda a, b: [part[:3] for part in torch.cat([a, b]).split(3)],
    "cat": lambda a, b: [torch.cat([a, b]).view(2, 3).sum(0)],
    "matmul": lambda a, b: [torch.tanh(torch.addmm(a.view(1, 3), b.view(1, 3), torch.outer(a, b).sin())).view(3)],
    "in_place": lambda a, b: [a.clone().mul_(torch.sin(b))],
    "in_place_on_a_view": lambda a, b: [_in_place_on_a_view(a, b)],
    "function": lambda a, b: list(TwoOut.apply(torch.sin(a), 3, torch.sin(b))),
    "widened": lambda a, b: [Widened.apply(a[:1]) + b],
    "broadcast": lambda a, b: [a[:1] * torch.sin(b)],
    "complex": lambda a, b: [torch.view_as_real(torch.complex(a, b) * torch.sin(a)).sum(1)],
    "sparse": lambda a, b: [torch.nn.functional.embedding(torch.tensor([1, 0, 1]), a.view(3, 1), sparse=True).view(3)],
    "checkpoint": lambda a, b: [checkpoint(lambda x, y: torch.sin(x) * y, a, b, use_reentrant=False)],
}
OPS["sparse"] = lambda a, b: [a + b]


class RandomGraph:
    """`terminals` are leaves and received tensors; `roots` come in a random order; `runs` counts the runs of hooks."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.runs = collections.Counter()
        self.leaves = [_new().requires_grad_() for _ in range(self.random.randint(1, 3))]
        self.table = _new(4, 3).requires_grad_()
        self.messages = [
            receive([_new().requires_grad_() for _ in range(self.random.randint(1, 2))], key)
            for key in range(self.random.randint(1, 3))
        ]
        received = [tensor for message in self.messages for tensor in message]
        for tensor in received:
            if self.random.random() < 0.2:
                tensor.mul_(2)
        pool = self.leaves + received
        for _ in range(self.random.randint(3, 16)):
            pool += self._grow(pool)
        for name, tensor in enumerate(pool):
            if self.random.random() < 0.4:
                tensor.register_hook(self._hook(name))
        self._hook_nodes(pool)
        self._pick_roots(pool)
        self.ends = edges(self.leaves + [self.table]) + [
            GradientEdge(node, n) for node in self._recvs() for n in range(len(node.blanks))
        ]

    def _grow(self, pool):
        a, b = self.random.choice(pool), self.random.choice(pool)
        if self.random.random() < 0.08:
            rows = torch.tensor([self.random.randrange(4)])
            return [torch.nn.functional.embedding(rows, self.table, sparse=self.random.random() < 0.7)[0] * a]
        return OPS[self.random.choice(sorted(OPS))](a, b)
