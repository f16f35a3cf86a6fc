"""Gradients of parameters, one after the other in one piece of memory: what is sent as a whole, and added up as such.

Guarantees: a gradient that comes back was there on some replica, has its parameter's shape and type, and each bucket
has one type and device. Gradients of complex numbers go as pairs of real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rpcbench.base.errors import PipelineError

BYTES = 25 * 2**20
"""At most in a bucket, unless one parameter has more."""
Leaves = list[tuple[torch.Tensor, torch.Tensor]]


class Bucket:
    """Of some parameters. `flat`: their gradients, then for each how many have one; sums of these are such, too."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        sizes = [_real(param).numel() for param in params]
        self.flat = torch.zeros(sum(sizes) + len(params), dtype=_real(params[0]).dtype, device=params[0].device)
        *parts, self._counts = torch.split(self.flat, [*sizes, len(params)])
        self.views = {param: _as(param, part) for param, part in zip(params, parts, strict=True)}
        self._places = {param: place for place, param in enumerate(params)}

    def add(self, param: torch.Tensor, gradient: torch.Tensor) -> None:
        """PipelineError for one that has gaps."""
        if gradient.layout is not torch.strided:
            raise PipelineError(
                "sparse gradients cannot be added up over replicas: make the layer without sparse=True, or give "
                "split() no replicas"
            )
        self.views[param].add_(gradient)
        self._counts[self._places[param]] = 1

    def leaves(self) -> Leaves:
        """The gradients that are there, each in memory of its own."""
        there = self._counts.tolist()
        return [(param, self.views[param].clone()) for param, count in zip(self._params, there, strict=True) if count]


def buckets(params: Iterable[torch.Tensor]) -> list[Bucket]:
    """Buckets for all of these, in their order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    for param in params:
        own = kinds.setdefault((param.dtype, param.device), [[]])
        if own[-1] and sum(each.nbytes for each in own[-1]) + param.nbytes > BYTES:
            own.append([])
        own[-1].append(param)
    return [Bucket(each) for own in kinds.values() for each in own]


def _real(param: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(param.detach()) if param.is_complex() else param.detach()


def _as(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    shaped = part.view(_real(param).shape)
    return torch.view_as_complex(shaped) if param.is_complex() else shaped
