"""One stage's share of a checkpoint, as a file that its own worker writes and reads.

A file is torch.save's, read with weights_only: parameters and buffers, the optimizer's state by names of parameters,
its schedule of learning rates, and the worker's random numbers. It is on disk, whole, before its name is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rpcbench.base.errors import PipelineError, counted
from rpcbench.optim import LocalOptimizer, checkpoint
from rpcbench.rpc import RRef

Shapes = dict[str, tuple[int, ...]]


class Shard(NamedTuple):
    """A file of a checkpoint: its name, bytes, their SHA-256, what the stage called the tensors in it, and how many
    groups of parameters its optimizer had."""

    file: str
    bytes: int
    sha256: str
    shapes: Shapes
    groups: int


class Source(NamedTuple):
    """A file to read, the shapes of its tensors, and which of them are wanted: name there, name here."""

    path: str
    bytes: int
    sha256: str
    shapes: Shapes
    names: dict[str, str]
    groups: int


def shapes(module: RRef[Any]) -> Shapes:
    """Names and shapes of all that a stage would save."""
    return {name: tuple(tensor.shape) for name, tensor in module.local_value().state_dict().items()}


def write(worker: RRef[Any], module: RRef[Any], optimizer: RRef[Any] | None, folder: str, name: str) -> Shard:
    """Write what a stage holds to a new file."""
    path, local = Path(folder) / name, _local(optimizer)
    with worker.local_value().between_steps(), checkpoint.new_file(path) as file:
        torch.save(_held(module.local_value(), local), file)
    with path.open("rb") as written:
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return Shard(path.name, path.stat().st_size, digest, shapes(module), _count(local))


def check(optimizer: RRef[Any] | None, sources: Sequence[Source]) -> None:
    """PipelineError where a file is not as it was written, or does not fit; nothing is read into the stage."""
    own = _count(_local(optimizer))
    for source in sources:
        if own and source.groups not in (0, own):
            raise PipelineError(
                f"{source.path} has {counted(source.groups, 'group')} of parameters, but optimizer= makes {own} here"
            )
        path = Path(source.path)
        if not path.exists():
            raise PipelineError(f"{path} is gone, or not to be reached from here: all workers must see the folder")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            raise PipelineError(f"{path} is not what was written there: it has {path.stat().st_size} bytes and another "
                                f"SHA-256; {source.bytes} bytes were written")  # fmt: skip
        _opened(source, mmap=True)


def read(worker: RRef[Any], module: RRef[Any], optimizer: RRef[Any] | None, sources: Sequence[Source]) -> None:
    """Let a stage hold what the files have for it. One without tensors has none."""
    if not sources:
        return
    kept = [_opened(source) for source in sources]
    tensors: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for source, held in zip(sources, kept, strict=True):
        tensors |= {here: held["tensors"][there] for there, here in source.names.items()}
        states |= {here: held["states"][there] for there, here in source.names.items() if there in held["states"]}
    with worker.local_value().between_steps():
        module.local_value().load_state_dict(tensors)
        local = _local(optimizer)
        if local is not None:
            held = next((each for each in kept if each["groups"]), kept[0])
            _load(local, _names(module.local_value()), states, held)
        torch.set_rng_state(kept[0]["random"])


def take(worker: RRef[Any], module: RRef[Any], optimizer: RRef[Any] | None, tensors: dict[str, torch.Tensor]) -> None:
    """Let a stage hold these parameters and buffers."""
    with worker.local_value().between_steps():
        module.local_value().load_state_dict(tensors)


# -- inside
def _opened(source: Source, mmap: bool = False) -> dict[str, Any]:
    """What a file holds. PipelineError where that is not what its manifest says."""
    try:
        held = checkpoint.load(Path(source.path), mmap)
    except ValueError as error:
        raise PipelineError(str(error)) from None
    match held:
        case {
            "tensors": dict(tensors),
            "states": dict(),
            "groups": list(groups),
            "schedule": _,
            "random": torch.Tensor(),
        }:
            found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
            if found == source.shapes and len(groups) == source.groups:
                return dict(held)
    raise PipelineError(f"{source.path} does not hold what its manifest says. Nothing was loaded")


def _held(module: torch.nn.Module, optimizer: LocalOptimizer | None) -> dict[str, Any]:
    held: dict[str, Any] = {"tensors": module.state_dict(), "states": {}, "groups": [], "schedule": None}
    if optimizer is not None:
        state, names = optimizer.state(), _names(module)
        held["states"] = {names[number]: kept for number, kept in state["state"].items()}
        held["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
        held["schedule"] = optimizer.scheduler and optimizer.scheduler.state_dict()
    return {**held, "random": torch.get_rng_state()}


def _load(optimizer: LocalOptimizer, names: list[str], states: dict[str, Any], held: dict[str, Any]) -> None:
    state = {number: states[name] for number, name in enumerate(names) if name in states}
    own = optimizer.state()["param_groups"]
    groups = [{**saved, "params": group["params"]} for saved, group in zip(held["groups"] or own, own, strict=True)]
    optimizer.load({"state": state, "param_groups": groups})
    if optimizer.scheduler is not None and held["schedule"] is not None:
        optimizer.scheduler.load_state_dict(held["schedule"])


def _names(module: torch.nn.Module) -> list[str]:
    """Of the parameters that may be trained, by the numbers that the stage's optimizer has for them."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _count(optimizer: LocalOptimizer | None) -> int:
    """Of groups of parameters."""
    return 0 if optimizer is None else len(optimizer.optimizer.param_groups)


def _local(optimizer: RRef[Any] | None) -> LocalOptimizer | None:
    found: LocalOptimizer | None = None if optimizer is None else optimizer.local_value()
    return found
