"""What pipelines of both sides train, made from a seed alone, so that each process makes the same for itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

MICROBATCHES = 8
RATE = 0.05
SCHEDULES = ("gpipe", "1f1b")
_LETTERS, _LENGTH, _WIDTH = 64, 32, 64


@dataclass(frozen=True, slots=True)
class Work:
    """A model as two stages, a batch with its targets, and the loss."""

    stages: tuple[nn.Sequential, nn.Sequential]
    x: Tensor
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def mlp(dtype: torch.dtype = torch.float32) -> Work:
    """Eight linear layers of 256, and 256 samples."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())]
    stages = tuple(nn.Sequential(*layers[begin : begin + 8]).to(dtype) for begin in (0, 8))
    return Work(stages, torch.randn(256, 256, dtype=dtype), torch.randn(256, 256, dtype=dtype), functional.mse_loss)  # type: ignore[arg-type]


def transformer(dtype: torch.dtype = torch.float32) -> Work:
    """Four layers of 64 over letters, and 32 texts of 32 letters."""
    layers = [nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, 0.0, batch_first=True) for _ in range(4)]
    first = nn.Sequential(nn.Embedding(_LETTERS, _WIDTH), *layers[:2]).to(dtype)
    second = nn.Sequential(*layers[2:], nn.Linear(_WIDTH, _LETTERS)).to(dtype)
    texts = torch.randint(_LETTERS, (32, _LENGTH + 1))
    return Work((first, second), texts[:, :-1], texts[:, 1:], letters_loss)


def letters_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS: dict[str, Callable[[torch.dtype], Work]] = {"MLP": mlp, "transformer": transformer}


def work(model: str, seed: int, dtype: torch.dtype = torch.float32) -> Work:
    """The same wherever the seed is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[model](dtype)
