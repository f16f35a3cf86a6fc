"""Random local graphs: leaves, received tensors, several roots, and hooks that are not linear."""

from __future__ import annotations

import collections
import itertools
import random

import torch
from torch.utils.checkpoint import checkpoint

from rpcbench.autograd.graph import Reach, attach_recv_node, gradient_edges, is_leaf, leaf_of
from rpcbench.autograd.regions import LocalPass


class TwoOut(torch.autograd.Function):
    """Has two outputs, and an argument that is no tensor between its tensors."""

    @staticmethod
    def forward(ctx, a, _number, b):
        ctx.save_for_backward(a, b)
        return a * b, a + 2 * b

    @staticmethod
    def backward(ctx, g, h):
        a, b = ctx.saved_tensors
        return g * b + h, None, g * a + 2 * h


class Widened(torch.autograd.Function):
    """Gives a gradient of another shape and dtype than its argument; torch has to correct it."""

    @staticmethod
    def forward(ctx, a):
        return a.expand(3).to(torch.double)

    @staticmethod
    def backward(ctx, g):
        return g


def _in_place_on_a_view(a, b):
    c = a.clone()
    c[:2].mul_(torch.sin(b[1:]))
    return c


def _looked_up(a, b):
    return torch.nn.functional.embedding(torch.tensor([1, 0, 1]), a.view(3, 1), sparse=True).view(3) + b


OPS = [
    lambda a, b: [torch.sin(a) * b],
    lambda a, b: [a + b],
    lambda a, b: [torch.tanh(a) * a],
    lambda a, b: torch.stack([a, b]).unbind(0),
    lambda a, b: torch.cat([a, b]).split(3),
    lambda a, b: [torch.cat([a, b]).view(2, 3).sum(0)],
    lambda a, b: [torch.addmm(a.view(1, 3), b.view(1, 3), torch.outer(a, b).sin()).view(3)],
    lambda a, b: [a.clone().mul_(torch.sin(b))],
    lambda a, b: [_in_place_on_a_view(a, b)],
    lambda a, b: TwoOut.apply(torch.sin(a), 3, torch.sin(b)),
    lambda a, b: [Widened.apply(a[:1]) + b],
    lambda a, b: [a[:1] * torch.sin(b)],
    lambda a, b: [torch.view_as_real(torch.complex(a, b) * torch.sin(a)).sum(1)],
    lambda a, b: [checkpoint(lambda x, y: torch.sin(x) * y, a, b, use_reentrant=False)],
]


def _bent(grad):
    """Not linear: the sum of two bent portions is not the bent sum."""
    return grad if grad is None or grad.is_sparse else torch.tanh(grad) + grad / 8


class RandomGraph:
    """`roots` maps a key to the tensors of one root; `runs` counts how often each hook has run."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.runs = collections.Counter()
        self._names = itertools.count()
        pool = [self._leaf() for _ in range(self.random.randint(1, 3))]
        self.table = self._leaf(4)
        self.ends = gradient_edges([*pool, self.table])
        for key in range(self.random.randint(1, 3)):
            pool += self._message(key)
        for _ in range(self.random.randint(3, 16)):
            pool += self._grow(pool)
        self._hook(pool)
        self.roots = {key: self._root(pool) for key in "abcd"[: self.random.randint(1, 4)]}

    def _leaf(self, *shape):
        return torch.randn(*shape, 3, dtype=torch.double).requires_grad_()

    def _message(self, key):
        tensors = attach_recv_node([self._leaf() for _ in range(self.random.randint(1, 2))], key)
        self.ends += gradient_edges(tensors)
        self._hook(tensors)
        return [tensor.mul_(2) if self.random.random() < 0.2 else tensor for tensor in tensors]

    def _grow(self, pool):
        a, b = self.random.choice(pool), self.random.choice(pool)
        if self.random.random() < 0.1:
            row = torch.tensor([self.random.randrange(4)])
            return [torch.nn.functional.embedding(row, self.table, sparse=self.random.random() < 0.7)[0] * a]
        return self.random.choice(OPS)(a, b)

    def _hook(self, tensors):
        for tensor in tensors:
            if self.random.random() < 0.4:
                tensor.register_hook(self._counted(_bent))
            if tensor.grad_fn is not None and self.random.random() < 0.2:
                tensor.grad_fn.register_prehook(self._counted(lambda grads: tuple(map(_bent, grads))))
            if tensor.grad_fn is not None and self.random.random() < 0.2:
                tensor.grad_fn.register_hook(self._counted(lambda below, above: None))

    def _counted(self, function):
        name = next(self._names)

        def hook(*grads):
            self.runs[name] += 1
            return function(*grads)

        return hook

    def _root(self, pool):
        tensors = self.random.choices(pool, k=self.random.choice([1, 1, 1, 2]))
        grads = [torch.randn(3, dtype=torch.double) if self.random.random() < 0.95 else None for _ in tensors]
        return gradient_edges(tensors), grads

    def passes(self):
        """Return the roots that take part in each of one or two passes."""
        keys = list(self.roots)
        return [self.random.sample(keys, self.random.randint(1, len(keys))) for _ in range(self.random.randint(1, 2))]

    def whole(self, keys):
        """Return the gradients at `ends` and the runs of all hooks in one local backward from these roots."""
        starts = [pair for key in keys for pair in zip(*self.roots[key], strict=True) if pair[1] is not None]
        if not starts:
            return [None] * len(self.ends), collections.Counter()
        self.runs.clear()
        roots, grads = zip(*starts, strict=True)
        return torch.autograd.grad(roots, self.ends, grads, retain_graph=True, allow_unused=True), self.runs.copy()

    def in_parts(self, passes, retain_graph):
        """Return the same for concurrent passes with roots that arrive in any order; the runs are of all passes."""
        running = [self.begun(keys, retain_graph) for keys in passes]
        arrivals = [(number, key) for number, keys in enumerate(passes) for key in keys]
        self.random.shuffle(arrivals)
        fired = [[] for _ in passes]
        self.runs.clear()
        for number, key in arrivals:
            fired[number] += running[number].run_gradients(key, self.roots[key][1])
        assert all(one.is_complete for one in running)
        return [self.at_ends(one, of) for one, of in zip(running, fired, strict=True)], self.runs.copy()

    def begun(self, keys, retain_graph):
        """Begin a pass, with or without the nodes that its roots reach."""
        roots = {key: self.roots[key][0] for key in keys}
        found = [Reach(root) for root in roots.values()] if self.random.random() < 0.5 else ()
        return LocalPass(roots, retain_graph, found)

    def at_ends(self, local_pass, fired):
        """Return the results of a pass, in the order of `ends`."""
        leaves = dict(local_pass.final_leaves())
        messages = {one.key: one.grads for one in fired}
        assert len(messages) == len(fired), "a message fired twice"
        nothing = {0: None, 1: None}
        return [
            leaves.get(leaf_of(node)) if is_leaf(node) else messages.get(node.key, nothing)[number]
            for node, number, _ in self.ends
        ]

    def agrees(self, passes, retain_graph=True):
        """Return whether passes in parts equal local backwards, in gradients and in the runs of each hook."""
        want, runs = zip(*map(self.whole, passes), strict=True)
        got, runs_in_parts = self.in_parts(passes, retain_graph)
        return runs_in_parts == sum(runs, collections.Counter()) and all(map(same, got, want))


def same(got, want):
    """Return whether the same gradients exist, and all are equal."""
    return all(
        a is b if a is None or b is None else torch.allclose(a.to_dense(), b.to_dense(), rtol=1e-12, atol=1e-12)
        for a, b in zip(got, want, strict=True)
    )
