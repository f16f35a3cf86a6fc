"""Dropout in a compared run: its masks are drawn and noted, and left out of the computation.

Two runs whose ranks draw their own random numbers have no values in common. So the values are compared without dropout,
and the masks apart: ranks with the same values must have the same mask, ranks with different ones different masks.

Guarantees
- The random generators advance as without a capture.
- Calls by way of `torch.nn.functional` are seen, on every thread; `nn.Dropout` is one of these.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from rpcbench.distributed.parameter_shards import local_tensor

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"
ATTENTION_DRAWS = 16
"""Numbers that are drawn in place of the mask inside of `scaled_dot_product_attention`, which nothing outside sees."""


class DropMask(NamedTuple):
    """A mask that a call has drawn."""

    chance: float  # of a number to be dropped
    digest: str
    shape: tuple[int, ...] = ()


class MaskRecorder:
    """Notes the mask of each dropout inside of it, under the name of the module whose forward runs."""

    def __init__(self, masks: dict[str, list[DropMask]]) -> None:
        self._masks = masks
        self._thread = threading.local()
        self._before: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        for name in (*_DROPOUTS, _ATTENTION):
            function = self._before[name] = getattr(functional, name)
            make = self._replace_attention if name == _ATTENTION else self._replace_dropout
            setattr(functional, name, wraps(function)(make(function)))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self._before.items():
            setattr(functional, name, function)

    def enter_module(self, name: str | None) -> None:
        """Note masks of this thread under `name` until `leave_module`; under none if it is None."""
        self._stack().append(name)

    def leave_module(self) -> None:
        """Undo the last `enter_module`."""
        self._stack().pop()

    def _stack(self) -> list[str | None]:
        found: list[str | None] | None = getattr(self._thread, "stack", None)
        if found is None:
            found = self._thread.stack = []
        return found

    def _note_mask(self, chance: float, mask: Tensor) -> None:
        if (name := self._stack()[-1] if self._stack() else "") is None:
            return
        data = local_tensor(mask.detach()).cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        self._masks.setdefault(name, []).append(DropMask(chance, hashlib.sha256(data).hexdigest(), tuple(mask.shape)))

    def _replace_dropout(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def leave_out(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if training and p > 0:
                self._note_mask(p, function(torch.ones_like(input), p, True, False) != 0)
            return input

        return leave_out

    def _replace_attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def leave_out(*args: Any, **kwargs: Any) -> Tensor:
            values = [*args]
            chance = values[4] if len(values) > 4 else kwargs.get("dropout_p", 0.0)
            if chance > 0:
                self._note_mask(chance, torch.rand(ATTENTION_DRAWS, device=values[0].device if values else None))
                if len(values) > 4:
                    values[4] = 0.0
                else:
                    kwargs["dropout_p"] = 0.0
            return function(*values, **kwargs)

        return leave_out
