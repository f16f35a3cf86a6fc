"""Programs whose ranks have roles of their own, and are right: each encodes another text with one encoder, only one has
the head, or each reads texts of other lengths, packed, in micro-batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parts import LABELS, WIDTH, GatherSame, loss_of, rows_of, seeded, share, words_of
from program import REDUCE, Program
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence

WORDS, TEXTS = 32, 4


# -- one encoder, another text on each rank
class Towers(nn.Module):
    """Questions of five words and answers of eight, by one encoder; each question's answer is the one of its row."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.mesh: DeviceMesh | None = None

    def encode(self, texts: list[Tensor]) -> list[Tensor]:
        if self.mesh is None:
            return [self.encoder(text).mean(1) for text in texts]
        own = self.encoder(texts[self.mesh.get_local_rank()]).mean(1)
        return list(GatherSame.apply(own, self.mesh.get_group(), 0).chunk(2))  # type: ignore[no-untyped-call]

    def forward(self, texts: list[Tensor]) -> Tensor:
        questions, answers = self.encode(texts)
        return questions @ answers.T


def make_towers() -> nn.Module:
    return seeded(Towers)


def towers_on_ranks(mesh: DeviceMesh) -> Any:
    model = make_towers()
    model.mesh = mesh
    return model


def step_towers(model: nn.Module) -> Tensor:
    texts = [words_of(TEXTS, length)[0] for length in (5, 8)]
    loss = functional.cross_entropy(model(texts), torch.arange(TEXTS))
    loss.backward()
    return loss.detach()


def step_towers_alone(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_towers(model)


def step_towers_and_add(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = step_towers(model)
    add_gradients(model, mesh)
    return loss


def add_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Add up the gradients of all ranks; a rank without one takes part with zeros."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=mesh.get_group())


# -- a head on the first rank
class Headed(nn.Module):
    """The model of a rank without the head's work returns what the body has made."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, LABELS)
        self.has_head = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).tanh()
        return self.head(x) if self.has_head else x


def make_headed() -> nn.Module:
    return seeded(Headed)


def headed_on_ranks(mesh: DeviceMesh) -> Any:
    model = make_headed()
    model.has_head = mesh.get_local_rank() == 0
    return model


def step_headed(model: nn.Module) -> Tensor:
    x, y = rows_of()
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_headed_alone(model: Any, mesh: DeviceMesh) -> Tensor:
    """The first rank has the loss; the others get it."""
    x, y = rows_of()
    made = model(x)
    loss = loss_of(made, y) if model.has_head else 0.0 * made.sum()
    loss.backward()
    told = loss.detach().clone()
    dist.broadcast(told, group=mesh.get_group(), group_src=0)
    return told


def step_headed_and_add(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = step_headed_alone(model, mesh)
    add_gradients(model, mesh)
    return loss


# -- packed texts
class PackedReader(nn.Module):
    """Reads texts of different lengths, and scores their last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.memory = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.memory(packed)
        scores: Tensor = self.head(state[0])
        return scores


LENGTHS = torch.tensor([6, 3, 1, 5, 2, 6, 4, 2])


def make_packed() -> nn.Module:
    return seeded(PackedReader)


def packed_on_each(mesh: DeviceMesh) -> nn.Module:
    return make_packed()


def step_packed(model: nn.Module) -> Tensor:
    words, labels = words_of(len(LENGTHS), 6)[0], rows_of(len(LENGTHS))[1]
    loss = loss_of(model(words, LENGTHS), labels)
    loss.backward()
    return loss.detach()


def step_packed_parts(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The rank's rows in two micro-batches; gradients are added up."""
    words, labels = words_of(len(LENGTHS), 6)[0], rows_of(len(LENGTHS))[1]
    own = [share(each, mesh).chunk(2) for each in (words, LENGTHS, labels)]
    losses = []
    for some_words, lengths, some_labels in zip(*own, strict=True):
        loss = loss_of(model(some_words, lengths), some_labels) / 2
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def step_packed_and_average(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    loss = step_packed_parts(model, mesh)
    add_gradients(model, mesh)
    for parameter in model.parameters():
        parameter.grad /= mesh.size()
    return loss


TOWERS, HEADED, PACKED = (make_towers, step_towers), (make_headed, step_headed), (make_packed, step_packed)
PROGRAMS = [
    Program(
        "towers_not_added", TOWERS, (towers_on_ranks, step_towers_and_add),
        (towers_on_ranks, step_towers_alone), {"tower": 2}, "gradient",
        ("encoder.0.weight", "encoder.1.weight", "encoder.1.bias"), REDUCE,
    ),
    Program(
        "head_of_first_rank_not_added", HEADED, (headed_on_ranks, step_headed_and_add),
        (headed_on_ranks, step_headed_alone), {"role": 2}, "gradient",
        ("body.weight", "body.bias", "head.weight", "head.bias"), "no gradient on rank 1|zero|reduc",
    ),
    Program(
        "packed_not_averaged", PACKED, (packed_on_each, step_packed_and_average), (packed_on_each, step_packed_parts),
        {"dp": 2}, "gradient", ("embed.weight",), REDUCE,
    ),
]  # fmt: skip
