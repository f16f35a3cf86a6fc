"""What lesson 29 computes about experts: order, splits, capacity, balance; and a training in which balance is watched.

Here each token goes to one expert. `chosen` (tokens) is its number, `chances` (tokens, experts) what the router says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tiny_transformer import Experts, TinyTransformer, batch, loss_of, make_model
from torch import Tensor, nn


# -- dispatch and combine
def sorted_by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """`tokens[order]` is sorted by expert; `answers[inverse]` is in the order of the tokens again."""
    order = chosen.argsort(stable=True)
    return order, order.argsort()


def splits(counts: Tensor, rank: int) -> tuple[list[int], list[int]]:
    """How many tokens a rank sends to each rank, and gets from each, for `all_to_all_single`.

    Args:
        counts: (ranks, experts), how many tokens each rank has for each expert. Rank 0 has the first experts.
    """
    by_rank = counts.unflatten(1, (len(counts), -1)).sum(2)
    return by_rank[rank].tolist(), by_rank[:, rank].tolist()


# -- capacity and balance
def kept(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """Whether each token has a place with its expert, which takes the first `capacity`."""
    is_for = nn.functional.one_hot(chosen, experts)
    place = (is_for.cumsum(0) * is_for).sum(1)  # 1 for the first token of an expert
    return place <= capacity


def dropped(chosen: Tensor, experts: int, factor: float) -> float:
    """The share of tokens without a place, where experts have `factor` times the places of an even share."""
    capacity = int(factor * len(chosen) / experts)
    return 1 - kept(chosen, experts, capacity).double().mean().item()


def balance_loss(chances: Tensor, chosen: Tensor) -> Tensor:
    """The auxiliary loss of Switch Transformer, 1 where all is even: experts · Σ share of tokens · mean chance."""
    experts = chances.shape[1]
    share = chosen.bincount(minlength=experts) / len(chosen)
    return experts * (share * chances.mean(0)).sum()


# -- a training in which balance is watched
@contextmanager
def chances_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """The chances that the routers of a model have said, in the order of its blocks."""
    seen: list[Tensor] = []
    layers = [each for each in model.modules() if isinstance(each, Experts)]
    hooks = [
        layer.router.register_forward_hook(lambda _, __, logits: seen.append(logits.softmax(-1))) for layer in layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def train(
    steps: int, weight: float, experts: int = 4, lopsided: float = 0.0
) -> tuple[TinyTransformer, list[float], list[list[float]]]:
    """A model with a block of experts, the loss of each step, and the share of the tokens of each expert in each step.

    Args:
        weight: Of the auxiliary loss; 0: none.
        lopsided: How much more each router likes expert 0 in the beginning.
    """
    model = make_model(blocks=1, experts=experts)
    with torch.no_grad():
        for block in model.blocks.values():
            block.norm2.bias += lopsided * block.feed.router.weight[0]  # type: ignore[union-attr, index]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, shares = [], []
    for step in range(steps):
        inputs, targets = batch(step, rows=16)
        optimizer.zero_grad()
        with chances_of(model) as seen:
            loss = loss_of(model(inputs), targets)
        balance = torch.stack([balance_loss(chances, chances.argmax(1)) for chances in seen]).mean()
        (loss + weight * balance).backward()
        optimizer.step()
        losses.append(loss.item())
        shares.append((seen[0].argmax(1).bincount(minlength=experts) / len(seen[0])).tolist())
    return model, losses, shares


def largest(shares: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The share of the most loaded expert, step by step."""
    return [(step, max(each)) for step, each in enumerate(shares)]
