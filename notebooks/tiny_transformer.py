"""A transformer small enough for two cores, and a task for it: the model of lesson 31 and of `recipes`.

The task: rows of numbers that rise by the same step, `5 8 11 14 …`, modulo `WORDS`. The model says after each number
which one comes next. It cannot know the second number of a row, and every later one it can.

The parts have the names of the textbooks, so that a plan for parallel training can name them:

    embed, positions              numbers, and where they stand, as vectors
    blocks.0, blocks.1, …         norm1 → attention (query, key, value, out) → norm2 → feed (up, down)
    norm, head                    vectors to a score for each number

In a block with experts, `feed` is a row of networks of which each token goes to one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 32  # numbers that the model knows
WIDTH = 32  # of the vectors in the model
HEADS = 4  # of attention
LONGEST = 64  # row that the model can read

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Takes queries, keys and values (rows, heads, length, width of a head), and returns what each query has read."""


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention in which each place reads itself and the places before."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Several heads, each with its own queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.attend: Attend = attend  # a recipe may put another one here

    def forward(self, x: Tensor) -> Tensor:
        read = self.attend(self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x)))
        return self.out(read.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # -1: as many heads as there are here. Under tensor parallel a rank has some of them.
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """A network for each token alone."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A row of networks; a router sends each token to the one that it finds most fit, and weighs its answer."""

    def __init__(self, width: int, hidden: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, hidden) for _ in range(count))
        self.answers = self.answers_here  # a recipe may put another one here, which asks other ranks

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        chance, chosen = self.router(tokens).softmax(-1).max(-1)
        by_expert = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        answers = self.answers(tokens[by_expert], counts)
        return (chance[:, None] * put_back(answers, by_expert)).view_as(x)

    def answers_here(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The answers to tokens (number, width) that are sorted by expert, `counts` for each expert."""
        parts = tokens.split(counts.tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def put_back(rows: Tensor, order: Tensor) -> Tensor:
    """Undo `rows = before[order]`."""
    return torch.zeros_like(rows).index_copy(0, order, rows)


class Block(nn.Module):
    """Attention to the places before, then a network for each place."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = Experts(width, 4 * width, experts) if experts else FeedForward(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class TinyTransformer(nn.Module):
    """Numbers (rows, length) to scores (rows, length, WORDS) for the number after each.

    Args:
        blocks: How many.
        experts: In each block; 0: one plain network.
        width: Of the vectors in the model.
    """

    def __init__(self, blocks: int = 2, experts: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.width = width
        self.embed: nn.Module | None = nn.Embedding(WORDS, width)
        self.positions: nn.Module | None = nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleDict({str(number): Block(width, HEADS, experts) for number in range(blocks)})
        self.norm: nn.Module | None = nn.LayerNorm(width)
        self.head: nn.Module | None = nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        # `first`: the place of the first number, if this is a slice of a row. A stage of a pipeline has None for the
        # parts that other stages have: it takes and returns vectors.
        if self.embed is not None and self.positions is not None:
            places = torch.arange(first, first + x.shape[1], device=x.device).expand_as(x)
            x = self.embed(x) + self.positions(places)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def make_model(blocks: int = 2, experts: int = 0, width: int = WIDTH) -> TinyTransformer:
    """The same model on every rank, as all begin with the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(17)
        return TinyTransformer(blocks, experts, width)


def batch(step: int, rows: int = 8, length: int = 16) -> tuple[Tensor, Tensor]:
    """Inputs and targets (rows, length) of a step, the same on every rank. Targets are one place further on."""
    choice = torch.Generator().manual_seed(step)
    begins = torch.randint(WORDS, (rows, 1), generator=choice)
    rises = torch.randint(1, 8, (rows, 1), generator=choice)
    numbers = (begins + rises * torch.arange(length + 1)) % WORDS
    return numbers[:, :-1], numbers[:, 1:]


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean over all places."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
