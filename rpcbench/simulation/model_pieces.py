"""The pieces of a model's parameters that the ranks of a played rank's meshes hold, as a log keeps them.

Guarantees
- They hold plain data, read at the end of the step; of a model that is freed before, when it was called first.
- Of a large mesh they have the pieces of the first `MOST_PLACES` ranks: one of a strided shard takes milliseconds.
- No model is kept alive, and reading is no operator of the rank.
- The pieces of other ranks are those that DTensor's own arithmetic gives to their places in the mesh.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.utils._python_dispatch import _disable_current_modes

from rpcbench.distributed.parameter_shards import (
    FoundParameter,
    HeldRegion,
    MeshLayout,
    ParameterPiece,
    local_bytes,
    read_model,
    source_tensor,
)

MOST_PLACES = 32


class PlacedParameter(NamedTuple):
    """A parameter: the played rank's piece of it, and those of ranks of its mesh."""

    piece: ParameterPiece
    regions: tuple[HeldRegion, ...]  # of the first ranks in `piece.mesh.ranks`; empty if it is no DTensor
    gradient: int  # bytes on the played rank, before the optimizer's step
    state: int  # bytes of its optimizer state there


class ModelPieces(NamedTuple):
    """A model, or the part of it that is a stage of a pipeline."""

    kind: str  # the name of its class
    stage: int | None
    parameters: tuple[PlacedParameter, ...]
    meshes: tuple[MeshLayout, ...]
    remarks: tuple[str, ...]


class PieceBook:
    """Keeps what is to be read of the models that a program calls."""

    def __init__(self) -> None:
        self._models: dict[int, tuple[weakref.ref[nn.Module], ModelPieces]] = {}  # by id; as they were found
        self._stages: dict[int, int] = {}  # id of a model → the stage of a pipeline that it is
        self._gradients: dict[int, int] = {}  # id of a parameter → bytes
        self._states: dict[int, int] = {}

    def add_model(self, model: nn.Module) -> None:
        """Read a model that is called for the first time: it may be freed before the step ends."""
        self._models[id(model)] = weakref.ref(model), self._read_model(model)

    def set_stage(self, model: nn.Module, stage: int) -> None:
        """A model is a stage of a pipeline."""
        self._stages[id(model)] = stage

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Measure the gradients that an optimizer is about to use."""
        self._gradients |= {id(each): local_bytes(each.grad) for each in parameters if each.grad is not None}

    def set_state(self, parameter: Tensor, size: int) -> None:
        """The optimizer has so many bytes of state for a parameter."""
        self._states[id(parameter)] = size

    def read_step(self, called: Container[int]) -> list[ModelPieces]:
        """Return the models with parameters of which the ids are in `called`, read now if they are still there."""
        found = []
        for key, (ref, pieces) in self._models.items():
            model = ref()
            if key in called:
                found.append(pieces if model is None else self._read_model(model))
        return [pieces for pieces in found if pieces.parameters]

    def _read_model(self, model: nn.Module) -> ModelPieces:
        with _disable_current_modes():  # reading is no work of the rank
            reading = read_model(model)
            placed = tuple(_place_parameter(found, self._gradients, self._states) for found in reading.parameters)
        return ModelPieces(
            reading.kind, self._stages.get(id(model)), placed, tuple(reading.meshes), tuple(reading.remarks)
        )  # fmt: skip


def _place_parameter(
    found: FoundParameter, gradients: Mapping[int, int], states: Mapping[int, int]
) -> PlacedParameter:
    tensor = source_tensor(found.source)
    now = 0 if tensor.grad is None else local_bytes(tensor.grad)
    return PlacedParameter(
        found.piece, _regions_of(tensor), gradients.get(id(tensor), now), states.get(id(tensor), 0)
    )  # fmt: skip


def _regions_of(tensor: Tensor) -> tuple[HeldRegion, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    return _find_regions(tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(tensor.placements))


@functools.lru_cache(maxsize=256)  # many parameters of a model have one shape
def _find_regions(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Any, ...]
) -> tuple[HeldRegion, ...]:
    regions = []
    for place in itertools.islice(itertools.product(*map(range, mesh)), MOST_PLACES):
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
        regions.append(HeldRegion(tuple(offset), tuple(size)))
    return tuple(regions)
