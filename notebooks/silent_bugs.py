"""Five parallel programs that are wrong in silence, for lesson 36. Find their faults before you read on here.

`programs[n]` has the arguments of `cluster.compare` for program n, from 1 to 5, on two workers. `clipped_by(clip)` has
those of program 4 with another function in the place of its fault.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensor_by_hand import add, copy, piece
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LABELS, WORDS, PLACES = 8, 5, 11, 6
LIMIT = 0.1  # of the norm of all gradients
RATE = 0.1

AllReduce = Callable[[Tensor], object]
Clip = Callable[[list[Tensor], list[Tensor], float, AllReduce], object]


# -- in one process
class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Feed() for _ in range(2))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reader(nn.Module):
    """Scores for the word after each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(PLACES, WIDTH)
        self.feed = Feed()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1])
        return self.head(self.feed(self.embed(words) + self.positions(places)))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def make_reader() -> Reader:
    torch.manual_seed(0)
    return Reader()


def rows() -> tuple[Tensor, Tensor]:
    """A batch for `Net`: 8 rows and their labels."""
    chance = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=chance), torch.randint(LABELS, (8,), generator=chance)


def sentences() -> tuple[Tensor, Tensor]:
    """A batch for `Reader`: words, and the word after each."""
    words = torch.randint(WORDS, (4, PLACES + 1), generator=torch.Generator().manual_seed(2))
    return words[:, :-1], words[:, 1:]


def backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    return loss.detach()


def step_net(model: nn.Module) -> Tensor:
    return backward(model, *rows())


def step_reader(model: nn.Module) -> Tensor:
    return backward(model, *sentences())


def step_clipped(model: nn.Module, limit: float = LIMIT) -> Tensor:
    loss = step_net(model)
    clip([], [parameter.grad for parameter in model.parameters()], limit, lambda tensor: None)
    return loss


def clip(cut: list[Tensor], whole: list[Tensor], limit: float, all_reduce: AllReduce) -> None:
    norm = sum(gradient.square().sum() for gradient in cut + whole).sqrt()
    for gradient in cut + whole:
        gradient *= (limit / norm).clamp(max=1)


def step_sgd(model: nn.Module) -> Tensor:
    loss = step_net(model)
    torch.optim.SGD(model.parameters(), RATE).step()
    return loss


# -- on ranks
class Columns(nn.Module):
    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = piece(whole.weight, 0), piece(whole.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(copy(x), self.weight, self.bias)


class Rows(nn.Module):
    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = piece(whole.weight, 1), whole.bias

    def forward(self, x: Tensor) -> Tensor:
        return add(F.linear(x, self.weight)) + self.bias


class LastRows(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return add(F.linear(x, self.weight, self.bias))  # how often is the bias added?


def make_cut() -> Net:
    model = make_net()
    for block in model.blocks:
        block.up, block.down = Columns(block.up), Rows(block.down)
    return model


def make_last_cut() -> Net:
    model = make_cut()
    model.blocks[1].down = LastRows(make_net().blocks[1].down)
    return model


def mine(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def add_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def average_gradients(model: nn.Module) -> None:
    add_gradients(model)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def step_rows(model: nn.Module) -> Tensor:
    loss = backward(model, *(mine(each, 0) for each in rows()))
    add_gradients(model)  # and the mean?
    return loss


def step_places(model: nn.Module) -> Tensor:
    loss = backward(model, *(mine(each, 1) for each in sentences()))  # where do the places begin?
    average_gradients(model)
    return loss


def step_cut_clipped(model: Net, clip: Clip = clip, limit: float = LIMIT) -> Tensor:
    loss = step_net(model)
    clip(*cut_and_whole(model), limit, dist.all_reduce)  # the function above knows this rank's gradients alone
    return loss


def cut_and_whole(model: Net) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the parameters of which a rank has a piece, and of those that it has whole."""
    cut = [each for block in model.blocks for each in (block.up.weight, block.up.bias, block.down.weight)]
    whole = [each for each in model.parameters() if not any(each is other for other in cut)]
    return [each.grad for each in cut], [each.grad for each in whole]


def step_warmed_up(model: nn.Module) -> Tensor:
    loss = backward(model, *(mine(each, 0) for each in rows()))
    average_gradients(model)
    batches = 4 - dist.get_rank()  # that this rank has read; the rate rises with them
    torch.optim.SGD(model.parameters(), RATE * batches / 4).step()
    return loss


# -- the five
def clipped_by(clip: Clip, limit: float = LIMIT) -> dict[str, Any]:
    """Program 4, with `clip(cut, whole, limit, all_reduce)` in place of its own."""
    return {
        "reference": (make_net, partial(step_clipped, limit=limit)),
        "parallel": (make_cut, partial(step_cut_clipped, clip=clip, limit=limit)),
        "mesh": {"tp": 2},
    }


programs: dict[int, dict[str, Any]] = {
    1: {"reference": (make_net, step_net), "parallel": (make_last_cut, step_net), "mesh": {"tp": 2}},
    2: {"reference": (make_reader, step_reader), "parallel": (make_reader, step_places), "mesh": {"cp": 2}},
    3: {"reference": (make_net, step_net), "parallel": (make_net, step_rows), "mesh": {"dp": 2}},
    4: clipped_by(clip),
    5: {"reference": (make_net, step_sgd), "parallel": (make_net, step_warmed_up), "mesh": {"dp": 2}},
}
