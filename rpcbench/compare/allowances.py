"""How far round-off may move each value of a computation: measured, not assumed.

The reference runs again several times. Parameters, inputs, outputs of modules and their gradients are moved by at most
the unit round-off of the type that each module computes in; how far that moves a value is what round-off does to it. A
parallel program computes the same in another order, and may differ by a small multiple of that.

Guarantees
- The movement is drawn by a generator of its own: the program's random numbers stay the same.
- A value that round-off moves as far as it is large cannot be judged: its allowance is at least its norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rpcbench.compare.capture import FORWARD, Capture, Catalog, Key
from rpcbench.compare.layouts import BLOCK, measure_sums
from rpcbench.compare.spool import Stored

RUNS = 3  # of the moved reference
MULTIPLE = 4.0  # of the largest movement that is allowed
_FEW = 3.0  # n numbers may move little by chance, if n is small: the multiple is larger by 1 + _FEW / sqrt(n)


class RoundOff:
    """Moves values by the unit round-off of their type, or of the coarser one that the ranks have for that module."""

    def __init__(self, seed: int, coarser: Mapping[str, torch.dtype]) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._coarser = coarser

    def move_value(self, name: str, value: Tensor) -> Tensor:
        """Return a value of the module `name`, moved; numbers that are not floating-point are returned as they are."""
        if not value.is_floating_point():
            return value
        generator = self._generators.get(value.device)
        if generator is None:
            generator = self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        unit = max(torch.finfo(each).eps for each in (value.dtype, self._coarser.get(name, value.dtype))) / 2
        # One buffer of the value's size, the result: logits and their gradients are the largest values of a program.
        dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        noise = torch.rand(value.shape, generator=generator, device=value.device, dtype=dtype)
        return noise.mul_(2 * unit).sub_(unit).mul_(value.detach()).add_(value).to(value.dtype)


def coarser_type(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the type with fewer digits; one that is not floating-point has all."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)


def coarsest_types(catalogs: Iterable[Catalog]) -> dict[str, torch.dtype]:
    """Return the type with the fewest digits in which any rank has the output of each module."""
    found: dict[str, torch.dtype] = {}
    for catalog in catalogs:
        for key, calls in catalog.values.items():
            for kept in calls.values() if key.phase == FORWARD else ():
                found[key.name] = coarser_type(found.get(key.name, torch.int64), kept.stored.dtype)
    return {name: dtype for name, dtype in found.items() if dtype.is_floating_point}


class MovementMeter:
    """Takes the values of a moved run in place of a spool, and keeps how far each is from the reference's."""

    def __init__(self, reference: Capture) -> None:
        self._reference = reference
        self._distances: dict[Key, dict[int, float]] = {}

    def add_value(self, key: Key, call: int, value: Tensor) -> Stored:
        """Measure a value; it is not kept."""
        values = value.detach().cpu()
        own = self._reference.catalog.values.get(key, {}).get(call)
        if own is not None and own.stored.shape == values.shape:
            wanted = self._reference.spool.read_blocks(own.stored, BLOCK)
            blocks = zip(torch.split(values.reshape(-1), BLOCK), wanted, strict=False)  # of an empty value none is kept
            square = sum(measure_sums(*block).error for block in blocks)
            self._distances.setdefault(key, {})[call] = square**0.5
        return Stored(0, tuple(values.shape), values.dtype)

    def distances(self) -> dict[Key, dict[int, float]]:
        """Return the norm of the difference of each value of the reference; infinite if the moved run has none."""
        return {
            key: {call: self._distances.get(key, {}).get(call, math.inf) for call in calls}
            for key, calls in self._reference.catalog.values.items()
        }


def allowed_error(movements: list[float], norm: float, count: int, dtype: torch.dtype) -> float:
    """Return the largest difference that round-off explains, for a value of `count` numbers with this norm."""
    if not dtype.is_floating_point:
        return 0.0
    multiple: float = MULTIPLE * (1 + _FEW / max(count, 1) ** 0.5)
    return multiple * max(max(movements, default=0.0), norm * torch.finfo(dtype).eps / 2)
