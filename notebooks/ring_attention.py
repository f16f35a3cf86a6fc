"""Ring attention: causal attention over rows of which each rank has a slice, for the recipe `context_parallel`.

Queries stay. Keys and values go round a ring: at each step a rank sends what it has to the next rank, and gets the
slice of the rank before. After as many steps as there are ranks each query has met all keys. No rank ever holds a whole
row, nor the scores of one: the softmax over pieces keeps the largest score and the sum so far, and corrects both when a
new piece comes.

Backward goes round once more: each slice of keys and values collects its gradient on the way, and is at home with the
last step.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What each query reads.

    Args:
        query, key, value: (rows, heads, length of the slice, width of a head). Rank r of the group has slice r.
        group: The ranks of the ring. All must call this at the same time.
    """
    return RingAttention.apply(query, key, value, group)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        there = torch.stack([key, value])  # one message for both
        read, total, largest = torch.zeros_like(query), 0.0, None
        for step in range(size):
            if (owner := (rank - step) % size) <= rank:  # a later slice lies ahead of all queries here
                scores = scores_of(query, there[0], owner == rank)
                highest = scores.amax(-1, keepdim=True)
                new = highest if largest is None else torch.maximum(largest, highest)
                shrink = 0.0 if largest is None else (largest - new).exp()
                weights = (scores - new).exp()
                read = read * shrink + weights @ there[1]
                total = total * shrink + weights.sum(-1, keepdim=True)
                largest = new
            if step < size - 1:
                there = passed_on(there, group)
        read /= total
        ctx.group = group
        ctx.save_for_backward(query, key, value, read, largest + total.log())
        return read

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, read, log_total = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        there = torch.stack([key, value, torch.zeros_like(key), torch.zeros_like(value)])  # with their gradients
        of_query = torch.zeros_like(query)
        common = (gradient * read).sum(-1, keepdim=True)
        for step in range(size):
            if (owner := (rank - step) % size) <= rank:
                weights = (scores_of(query, there[0], owner == rank) - log_total).exp()
                of_scores = weights * (gradient @ there[1].mT - common) / math.sqrt(query.shape[-1])
                of_query += of_scores @ there[0]
                there[2] += of_scores.mT @ query
                there[3] += weights.mT @ gradient
            there = passed_on(there, ctx.group)  # the last time, too: then each slice is at home
        return of_query, there[2], there[3], None


def scores_of(query: Tensor, key: Tensor, own: bool) -> Tensor:
    """How much each query wants each key; of its own slice a query sees nothing that lies ahead."""
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if own:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -math.inf)
    return scores


def passed_on(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send to the next rank of the ring, and return what came from the one before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    came = torch.empty_like(tensor)
    there = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % size)
    back = dist.P2POp(dist.irecv, came, group=group, group_peer=(rank - 1) % size)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()
    return came
