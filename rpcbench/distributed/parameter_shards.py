"""The piece of each parameter that this rank holds, read from a model: DTensors, `fully_shard`, DDP, or plain modules.

Guarantees
- A parameter that `fully_shard` has gathered at this moment is read as the piece that the rank owns.
- A parameter with several names (tied weights) is one piece: it has its first name, and the others in `also`.
- Names do not contain the wrappers of DDP, `torch.compile` and activation checkpoints.
- No gradient is read here, no collective is called and nothing is copied. So it may run on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

from rpcbench.runtime.handles import tensor_bytes

SHARDED, REPLICATED, PARTIAL, PLAIN, FLAT = "sharded", "replicated", "partial", "plain", "flat"
"""Kinds of pieces. `plain`: a tensor of this process alone. `flat`: a part of a flat parameter of FSDP1."""

# Wrappers that are a child of the model's own name: what they wrap has the name of the wrapper.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """A mesh of ranks: names and sizes of its dimensions, and the ranks, the last dimension running fastest."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @staticmethod
    def from_mesh(mesh: DeviceMesh) -> MeshLayout:
        shape = tuple(mesh.mesh.shape)
        names = mesh.mesh_dim_names or tuple(f"dim {n}" for n in range(len(shape)))
        return MeshLayout(tuple(names), shape, tuple(mesh.mesh.flatten().tolist()))


class HeldRegion(NamedTuple):
    """A block of a parameter: the index of its first element and its size, both by dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """The piece of one parameter on this rank. Shapes count elements; bytes are those of the parameter alone."""

    name: str
    also: tuple[str, ...]  # other names of the same parameter
    kind: str
    shape: tuple[int, ...]  # of the whole parameter
    region: HeldRegion  # that this rank holds
    gathered: HeldRegion | None  # that it holds while `fully_shard` has gathered the parameter; None: it never does
    dtype: str
    item: int  # bytes of an element
    placements: tuple[str, ...]  # one for each dimension of `mesh`, as "Shard(0)"; empty: not distributed
    mesh: MeshLayout | None
    device: str
    trainable: bool

    @property
    def held_bytes(self) -> int:
        return 0 if self.device == "meta" else self.item * prod(self.region.size)

    @property
    def whole_bytes(self) -> int:
        return self.item * prod(self.shape)


class FoundParameter(NamedTuple):
    """A piece, and the object from which its tensor is got: the parameter, or the `FSDPParam` that manages it."""

    piece: ParameterPiece
    source: Any


@dataclass(slots=True)
class ModelReading:
    """The parameters of a model on this rank, the groups that `fully_shard` gathers together, and remarks."""

    kind: str  # the name of the model's class
    parameters: list[FoundParameter] = field(default_factory=list)
    groups: list[Any] = field(default_factory=list)  # FSDPParamGroup
    group_of: dict[int, int] = field(default_factory=dict)  # index of a parameter → index of its group
    meshes: list[MeshLayout] = field(default_factory=list)  # root meshes, each once
    remarks: list[str] = field(default_factory=list)  # sentences


def source_tensor(source: Any) -> Tensor:
    """Return the tensor of a `FoundParameter.source` on which gradients and optimizers work."""
    found: Tensor = source if isinstance(source, Tensor) else source.sharded_param
    return found


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process's memory."""
    # Not `to_local()`, which costs ten times as much, and records an operation for autograd.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in this process's memory, of any layout; 0 on the meta device."""
    return tensor_bytes(local_tensor(tensor))


def read_model(model: nn.Module) -> ModelReading:
    """Read all parameters of a model, in the order of its modules."""
    reading = ModelReading(_class_of(model))
    managed = _find_managed(model, reading)
    named: dict[int, tuple[Any, list[str], _Place]] = {}  # by id of the source
    for place, attribute, parameter in _iterate_parameters(model):
        source = managed.get((id(place.module), attribute), parameter)
        name = f"{place.path}.{attribute}" if place.path else attribute
        named.setdefault(id(source), (source, [], place))[1].append(name)
    for source, names, place in named.values():
        reading.parameters.append(FoundParameter(_make_piece(source, names, place), source))
    indices = {id(found.source): n for n, found in enumerate(reading.parameters)}
    for number, group in enumerate(reading.groups):
        reading.group_of.update((indices[id(one)], number) for one in group.fsdp_params if id(one) in indices)
    meshes = (_mesh_of_parameter(found) for found in reading.parameters)
    reading.meshes = list(dict.fromkeys(mesh for mesh in meshes if mesh is not None))
    reading.remarks = list(_make_remarks(reading))
    return reading


def _class_of(model: nn.Module) -> str:
    """Return the name of the class that the user wrote: `fully_shard` makes a subclass of it, and wrappers hold it."""
    while (inner := _unwrap_module(model)) is not None:
        model = inner
    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def _unwrap_module(module: nn.Module) -> nn.Module | None:
    names = ("module", *_WRAPPERS) if isinstance(module, DistributedDataParallel) else _WRAPPERS
    return next((module._modules[name] for name in names if name in module._modules), None)


class _Place(NamedTuple):
    """A module in the model: its name, and the wrapper around it that decides how its parameters are kept."""

    path: str
    module: nn.Module
    replicas: tuple[int, ...]  # ranks of the DDP around it
    flat: bool  # inside of FSDP1


def iterate_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once, with its name. A wrapper has the name of what it wraps, and comes before it."""
    return ((place.path, place.module) for place in _iterate_places(model))


def _iterate_places(model: nn.Module) -> Iterator[_Place]:
    ahead, seen = [_Place("", model, (), False)], set[int]()
    while ahead:
        place = ahead.pop(0)
        if id(place.module) in seen:
            continue
        seen.add(id(place.module))
        yield place
        ahead[:0] = list(_child_places(place))


def _iterate_parameters(model: nn.Module) -> Iterator[tuple[_Place, str, nn.Parameter]]:
    """Yield each parameter with its module and attribute, once for each of its names; a module once for all."""
    for place in _iterate_places(model):
        yield from ((place, name, one) for name, one in place.module._parameters.items() if one is not None)


def _child_places(place: _Place) -> Iterator[_Place]:
    module, inner = place.module, _unwrap_module(place.module)
    replicas, flat = place.replicas, place.flat or isinstance(module, FullyShardedDataParallel)
    if isinstance(module, DistributedDataParallel):
        replicas = tuple(c10d.get_process_group_ranks(module.process_group))
    for name, child in module._modules.items():
        if child is not None:
            path = place.path if child is inner else f"{place.path}.{name}" if place.path else name
            yield _Place(path, child, replicas, flat)


def _find_managed(model: nn.Module, reading: ModelReading) -> dict[tuple[int, str], Any]:
    """Return the `FSDPParam` of each (module, attribute) that `fully_shard` manages; add the groups to the reading."""
    found: dict[tuple[int, str], Any] = {}
    for _, module in iterate_modules(model):  # not `modules()`, which a RemoteModule refuses
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if any(group is known for known in reading.groups):  # modules that were sharded together share it
                continue
            reading.groups.append(group)
            for one in group.fsdp_params:
                info = one._module_info
                for owner, name in zip(
                    (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True
                ):
                    found[id(owner), name] = one
    return found


def _make_piece(source: Any, names: list[str], place: _Place) -> ParameterPiece:
    tensor = source_tensor(source)
    shape = tuple(tensor.shape)
    kind, placements, mesh = PLAIN, tuple[str, ...](), None
    region = HeldRegion((0,) * len(shape), shape)
    if isinstance(tensor, DTensor):
        kind, placements = _kind_of_placements(tensor.placements), tuple(map(placement_word, tensor.placements))
        mesh, region = (
            MeshLayout.from_mesh(tensor.device_mesh),
            _held_region(tensor, tensor.device_mesh, tensor.placements),
        )
    elif place.replicas:
        kind, placements = REPLICATED, ("Replicate",)
        mesh = MeshLayout(("DDP",), (len(place.replicas),), place.replicas)
    elif place.flat:
        kind = FLAT
    return ParameterPiece(
        names[0], tuple(names[1:]), kind, shape, region, _gathered_region(source, shape),
        str(tensor.dtype).removeprefix("torch."), tensor.element_size(), placements, mesh, tensor.device.type,
        tensor.requires_grad,
    )  # fmt: skip


def _kind_of_placements(placements: Iterable[object]) -> str:
    kinds = list(placements)
    if any(isinstance(one, Partial) for one in kinds):
        return PARTIAL
    return REPLICATED if all(isinstance(one, Replicate) for one in kinds) else SHARDED


def placement_word(placement: object) -> str:
    """Return `Shard(0)`, `Replicate` or `Partial`; a strided shard is a shard of another dimension's piece."""
    dim = getattr(placement, "dim", None)
    return f"Shard({dim})" if dim is not None else type(placement).__name__


def _held_region(tensor: Any, mesh: DeviceMesh, placements: Sequence[Any]) -> HeldRegion:
    if mesh.get_coordinate() is None:  # this rank is outside of the mesh
        return HeldRegion((0,) * len(tensor.shape), (0,) * len(tensor.shape))
    size, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return HeldRegion(tuple(offset), tuple(size))


def _gathered_region(source: Any, shape: tuple[int, ...]) -> HeldRegion | None:
    """Return the region after `fully_shard` has gathered it: with tensor parallelism, that of this rank's part."""
    if isinstance(source, Tensor):
        return None
    spec = source._unsharded_dtensor_spec
    if spec is None or not source.is_dtensor:
        return HeldRegion((0,) * len(shape), shape)
    return _held_region(spec, spec.mesh, spec.placements)


def _mesh_of_parameter(found: FoundParameter) -> MeshLayout | None:
    """Return the mesh to draw for a parameter: the one that its mesh was cut from; DDP has none."""
    tensor = source_tensor(found.source)
    return MeshLayout.from_mesh(tensor.device_mesh._get_root_mesh()) if isinstance(tensor, DTensor) else None


def _make_remarks(reading: ModelReading) -> Iterator[str]:
    pieces = [found.piece for found in reading.parameters]
    if not pieces:
        yield f"{reading.kind} has no parameters."
    if any(piece.device == "meta" for piece in pieces):
        yield "Parameters on the meta device have a shape and no memory yet."
    if any(piece.kind == FLAT for piece in pieces):
        yield "FSDP1 keeps parts of one flat parameter; fully_shard (FSDP2) keeps a piece of each parameter."
    for piece in pieces:
        if piece.also:
            yield f"{piece.name} is also {', '.join(piece.also)}: one parameter under several names."
