"""Vocabulary parallel by hand: embeddings and losses of which each rank of `tp` has some words."""

from __future__ import annotations

import torch.distributed as dist
from parts import (
    LM,
    WORDS,
    ColumnLinear,
    Lm,
    SumOver,
    VocabularyEmbedding,
    cut_lm,
    loss_of,
    make_lm,
    seeded,
    step_lm_on_ranks,
    words_of,
)
from program import REDUCE, Program
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional


# -- embeddings
class VocabularyEmbeddingAlone(VocabularyEmbedding):
    """Without the all-reduce: words of other ranks are zero."""

    def forward(self, x: Tensor) -> Tensor:
        return self.vectors_here(x)


def lm_of_words(kind: type[VocabularyEmbedding], mesh: DeviceMesh) -> nn.Module:
    model = cut_lm(mesh)
    model.embed = kind(model.embed, mesh.get_group("tp"))
    return model


def lm_with_embedding(mesh: DeviceMesh) -> nn.Module:
    return lm_of_words(VocabularyEmbedding, mesh)


def lm_with_embedding_alone(mesh: DeviceMesh) -> nn.Module:
    return lm_of_words(VocabularyEmbeddingAlone, mesh)


# -- losses over words that are cut
SMOOTHING = 0.1


def smoothed(total: Tensor, chosen: Tensor, mean_score: Tensor, words: int) -> Tensor:
    """Cross entropy in which all words but the target share SMOOTHING."""
    smoothing = SMOOTHING * words / (words - 1)
    return (total - (1 - smoothing) * chosen - smoothing * mean_score).mean()


def step_smooth(model: nn.Module) -> Tensor:
    x, y = words_of()
    scores = model(x)
    loss = smoothed(scores.logsumexp(-1), scores.gather(-1, y[..., None])[..., 0], scores.mean(-1), WORDS)
    loss.backward()
    return loss.detach()


def lm_with_cut_head(mesh: DeviceMesh) -> Lm:
    """The scores of this rank's words."""
    model = cut_lm(mesh)
    model.head = ColumnLinear(model.head, mesh.get_group("tp"))
    return model


def losses_of_words(scores: Tensor, targets: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The logarithm of the sum over all words, and the score of the target, of which one rank has the word."""
    greatest = scores.detach().amax(-1)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
    exponents = (scores - greatest[..., None]).exp().sum(-1)
    here = targets - dist.get_rank(group) * scores.shape[-1]
    foreign = (here < 0) | (here >= scores.shape[-1])
    chosen = scores.gather(-1, here.masked_fill(foreign, 0)[..., None])[..., 0].masked_fill(foreign, 0.0)
    return SumOver.apply(exponents, group).log() + greatest, SumOver.apply(chosen, group)


def step_cut_words(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = words_of()
    total, chosen = losses_of_words(model(x), y, mesh.get_group("tp"))
    loss = (total - chosen).mean()
    loss.backward()
    return loss.detach()


def step_smooth_cut(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    x, y = words_of()
    scores = model(x)
    total, chosen = losses_of_words(scores, y, mesh.get_group("tp"))
    mean_score = SumOver.apply(scores.sum(-1), mesh.get_group("tp")) / WORDS
    loss = smoothed(total, chosen, mean_score, WORDS)
    loss.backward()
    return loss.detach()


def step_smooth_cut_here(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The words of this rank are taken for all."""
    x, y = words_of()
    scores = model(x)
    total, chosen = losses_of_words(scores, y, mesh.get_group("tp"))
    loss = smoothed(total, chosen, scores.mean(-1), scores.shape[-1])
    loss.backward()
    return loss.detach()


def step_whole_words(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """The scores are those of all words on each rank; the loss takes them for a part."""
    x, y = words_of()
    scores, group = model(x), mesh.get_group("tp")
    total, _ = losses_of_words(scores, y, group)
    loss = (total - scores.gather(-1, y[..., None])[..., 0]).mean()
    loss.backward()
    return loss.detach()


# -- words that no number of ranks divides
UNEVEN = 30


def make_uneven() -> nn.Module:
    return seeded(lambda: Lm(UNEVEN))


def step_uneven(model: nn.Module) -> Tensor:
    x, y = words_of(words=UNEVEN)
    loss = loss_of(model(x), y)
    loss.backward()
    return loss.detach()


def step_uneven_on_ranks(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    return step_uneven(model)


def cut_uneven(mesh: DeviceMesh) -> nn.Module:
    """Rows of zeros make the words a multiple of the ranks."""
    model, group = make_uneven(), mesh.get_group("tp")
    padding = -UNEVEN % mesh["tp"].size()
    model.embed.weight = nn.Parameter(functional.pad(model.embed.weight.detach(), (0, 0, 0, padding)))
    model.embed = VocabularyEmbedding(model.embed, group)
    return model


def cut_uneven_short(mesh: DeviceMesh) -> nn.Module:
    """The last words are on no rank."""
    model, group = make_uneven(), mesh.get_group("tp")
    kept = UNEVEN // mesh["tp"].size() * mesh["tp"].size()
    model.embed.weight = nn.Parameter(model.embed.weight.detach()[:kept])
    model.embed = VocabularyEmbedding(model.embed, group)
    return model


TP4 = {"tp": 4}

PROGRAMS = [
    Program(
        "vocabulary_embedding_without_reduce", LM, (lm_with_embedding, step_lm_on_ranks),
        (lm_with_embedding_alone, step_lm_on_ranks), TP4, "forward", ("embed", "blocks.0.norm", "blocks.0"), REDUCE,
    ),
    Program(
        "vocabulary_not_divisible", (make_uneven, step_uneven), (cut_uneven, step_uneven_on_ranks),
        (cut_uneven_short, step_uneven_on_ranks), TP4, "initial", ("embed.weight", "embed"),
        r"rows|missing|shape|size|left out|drop|divi",
    ),
    Program(
        "vocabulary_loss_smoothing", (make_lm, step_smooth), (lm_with_cut_head, step_smooth_cut),
        (lm_with_cut_head, step_smooth_cut_here), TP4, "loss", ("loss", "head", ""),
        r"rank|reduc|differ|local|none of the ways|fit",
    ),
    Program(
        "vocabulary_loss_of_whole_scores", LM, (lm_with_cut_head, step_cut_words), (cut_lm, step_whole_words), TP4,
        "loss", ("loss", "head", ""), r"log|equal|same|constant|more|offset|plus|greater|fit",
    ),
]  # fmt: skip
