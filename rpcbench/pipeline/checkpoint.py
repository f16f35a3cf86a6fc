"""Checkpoints of a pipeline: each worker writes the stages it has, and a manifest says what belongs together.

    folder/checkpoint.json                 the manifest: optimizer step, seeds, and each file's size, SHA-256 and names
    folder/step7.stage0.1f0c2a9b.pt        a stage's file, written by its worker

Guarantees
- A folder has the latest checkpoint that is whole, and nothing else once it is written: new files have new names, the
  manifest takes its name when all of them are on disk, and what it no longer names is removed after that. A try that
  fails leaves the checkpoint before it, and nothing of its own.
- A manifest names files in its own folder, and a file holds tensors and numbers: no code of a file runs.
- Names are the un-split model's, so a checkpoint fits every split and schedule of the model.
- What is loaded is looked at first: if a name, a shape or a byte is wrong, no stage has changed.

Rules: one pipeline writes to a folder, and all workers reach it under the same path.

A stage's file is torch.save's, read with weights_only: parameters and buffers, the optimizer's state by names of
parameters, its schedule of learning rates, and the worker's random numbers. It is on disk, whole, before its name is
told.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rpcbench.base.errors import PipelineError, counted
from rpcbench.base.rebuild import add_note
from rpcbench.optim import LocalOptimizer, optimizer_files
from rpcbench.pipeline.driver import WorkerGroup
from rpcbench.pipeline.recompute import StepSeeds
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
    with worker.local_value().between_steps(), optimizer_files.new_file(path) as file:
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
            _load(local, _shard_names(module.local_value()), states, held)
        torch.set_rng_state(kept[0]["random"])


def take(worker: RRef[Any], module: RRef[Any], optimizer: RRef[Any] | None, tensors: dict[str, torch.Tensor]) -> None:
    """Let a stage hold these parameters and buffers."""
    with worker.local_value().between_steps():
        module.local_value().load_state_dict(tensors)


# -- inside
def _opened(source: Source, mmap: bool = False) -> dict[str, Any]:
    """What a file holds. PipelineError where that is not what its manifest says."""
    try:
        held = optimizer_files.load(Path(source.path), mmap)
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
        state, names = optimizer.state(), _shard_names(module)
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


def _shard_names(module: torch.nn.Module) -> list[str]:
    """Of the parameters that may be trained, by the numbers that the stage's optimizer has for them."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _count(optimizer: LocalOptimizer | None) -> int:
    """Of groups of parameters."""
    return 0 if optimizer is None else len(optimizer.optimizer.param_groups)


def _local(optimizer: RRef[Any] | None) -> LocalOptimizer | None:
    found: LocalOptimizer | None = None if optimizer is None else optimizer.local_value()
    return found


MANIFEST = "checkpoint.json"
_FORMAT = 2
_FILE = re.compile(r"step\d+\.stage\d+\.[0-9a-f]{8}\.pt", re.ASCII)
_DRAFT = re.compile(r"checkpoint\.[0-9a-f]{8}\.draft")
_SHOWN = 5


class Checkpoints:
    """`every`: optimizer steps from one checkpoint in `folder` to the next; 0 for none."""

    def __init__(self, seeds: StepSeeds, optimizer: str, folder: str | Path | None, every: int) -> None:
        if not isinstance(every, int) or every < 0 or bool(every) != bool(folder):
            raise PipelineError(
                f"checkpoint={folder!r}, checkpoint_every={every!r}: give both, a folder and a number of optimizer "
                "steps of at least 1, or none"
            )
        self._seeds, self._optimizer = seeds, optimizer
        self._folder, self._every = folder, every
        self._newest: int | None = None  # optimizer step of the checkpoint in the folder, if it was written here

    def applied(self, crew: WorkerGroup, number: int) -> None:
        """Write a checkpoint if it is time for one."""
        if self._folder is not None and number % self._every == 0:
            self._write(crew, self._folder, f"optimizer step {number} is done; what failed is the checkpoint after it")
            self._newest = number

    def moved(self, crew: WorkerGroup) -> None:
        """Learning rates have moved on: where there is a checkpoint of this optimizer step, it is to have them so."""
        if self._folder is not None and self._newest is not None and self._newest == crew.standing.number:
            self._write(crew, self._folder, "the learning rates have moved; what failed is the checkpoint after it")

    def _write(self, crew: WorkerGroup, folder: str | Path, failed: str) -> None:
        try:
            self.save(crew, folder)
        except Exception as error:
            add_note(error, failed)
            raise

    # -- saving
    def save(self, crew: WorkerGroup, folder: str | Path) -> None:
        """Write a checkpoint. StageLostError; PipelineError where the stages hold different steps; OSError."""
        target = Path(folder).absolute()
        crew.steps.check()
        number = crew.standing.number
        target.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(4)
        names = {stage: f"step{number}.stage{stage}.{token}.pt" for stage in range(crew.layout.stages)}
        try:
            written: dict[int, Shard] = crew.on_stages(
                write, {stage: (*crew.stage(stage), str(target), name) for stage, name in names.items()}
            )
            if unseen := [name for name in names.values() if not (target / name).exists()]:
                raise PipelineError(
                    f"{target} has no {_few(unseen)} as seen from here: all workers must reach the folder"
                )
            _publish(target / MANIFEST, json.dumps(self._manifest(crew, written), indent=1))
        except BaseException:
            _discard(target, token)
            raise
        for path in target.iterdir():
            if (_FILE.fullmatch(path.name) and path.name not in names.values()) or _DRAFT.fullmatch(path.name):
                path.unlink()

    def _manifest(self, crew: WorkerGroup, written: Mapping[int, Shard]) -> dict[str, Any]:
        stages = [
            {
                "stage": stage.index,
                "worker": stage.worker,
                **written[stage.index]._asdict(),
                "names": {stage.key(own): own for own in written[stage.index].shapes},
            }
            for stage in crew.row
        ]
        return {
            "format": _FORMAT,
            "optimizer_step": crew.standing.number,
            "optimizer": self._optimizer,
            "seeds": {"base": self._seeds.base, "drawn": self._seeds.drawn},
            "stages": stages,
        }

    # -- loading
    def resume(self, crew: WorkerGroup) -> int:
        """As `load`, from the pipeline's own folder."""
        if self._folder is None:
            raise PipelineError(
                "checkpoint_every is 0, so this pipeline has no checkpoint to resume from: make it with "
                "checkpoint=folder and checkpoint_every=n, or give pipe.load(folder) what pipe.save(folder) has written"
            )
        return self.load(crew, self._folder)

    def load(self, crew: WorkerGroup, folder: str | Path) -> int:
        """Let all stages hold what the checkpoint has; the optimizer step that it was written after."""
        source = Path(folder).absolute()
        manifest = _read(source, self._optimizer)
        sources = _sources(source, manifest, _names(crew, _shapes_in(manifest), f"the checkpoint in {source}"))
        crew.on_stages(check, {stage: (crew.stage(stage)[2], own) for stage, own in sources.items()})
        self._newest = None
        with crew.standing.replaced(manifest["optimizer_step"]):
            crew.on_stages(read, {stage: (*crew.stage(stage), own) for stage, own in sources.items()})
        self._seeds.base, self._seeds.drawn = manifest["seeds"]["base"], manifest["seeds"]["drawn"]
        number: int = manifest["optimizer_step"]
        return number


def load_state(crew: WorkerGroup, state: Mapping[str, torch.Tensor]) -> None:
    """Let the stages hold these parameters and buffers; optimizers, and their count, go on as they are."""
    names = _names(crew, {name: tuple(tensor.shape) for name, tensor in state.items()}, "the state")
    parts = {stage: {own: state[name] for name, own in owns.items()} for stage, owns in names.items()}
    with crew.standing.replaced(crew.standing.least):
        crew.on_stages(take, {stage: (*crew.stage(stage), part) for stage, part in parts.items()})


def _names(crew: WorkerGroup, given: Shapes, what: str) -> dict[int, dict[str, str]]:
    """Stage → un-split name → name there. PipelineError where `given` is not just what the stages hold."""
    found: dict[int, Shapes] = crew.on_stages(shapes, {s: (module,) for s, module in crew.modules.items()})
    names = {stage.index: {stage.key(own): own for own in found[stage.index]} for stage in crew.stages}
    _fit(given, {name: found[stage][own] for stage, owns in names.items() for name, own in owns.items()}, what)
    return names


def _fit(given: Shapes, wanted: Shapes, what: str) -> None:
    missing = [name for name in wanted if name not in given]
    besides = [name for name in given if name not in wanted]
    other = [f"{name} {given[name]}, not {shape}" for name, shape in wanted.items() if given.get(name, shape) != shape]
    told = [f"{words} {_few(names)}" for words, names in
            (("it lacks", missing), ("it has besides", besides), ("of another shape are", other)) if names]  # fmt: skip
    if told:
        raise PipelineError(f"{what} does not fit this model, and nothing was loaded: {'; '.join(told)}")


def _sources(folder: Path, manifest: dict[str, Any], names: Mapping[int, dict[str, str]]) -> dict[int, list[Source]]:
    """The files that each stage reads, and what of them."""
    sources: dict[int, list[Source]] = {stage: [] for stage in names}
    for written, (stage, owns) in itertools.product(manifest["stages"], names.items()):
        wanted = {there: owns[name] for name, there in written["names"].items() if name in owns}
        if wanted:
            path = str(folder / written["file"])
            shapes = {name: tuple(shape) for name, shape in written["shapes"].items()}
            sources[stage].append(Source(path, written["bytes"], written["sha256"], shapes, wanted, written["groups"]))
    return sources


def _shapes_in(manifest: dict[str, Any]) -> Shapes:
    return {
        name: tuple(written["shapes"][own]) for written in manifest["stages"] for name, own in written["names"].items()
    }


def _read(folder: Path, optimizer: str) -> dict[str, Any]:
    """The manifest; PipelineError where there is none, or it is of another format or optimizer."""
    path = folder / MANIFEST
    if not path.exists():
        raise PipelineError(f"{folder} has no whole checkpoint: there is no {MANIFEST}")
    try:
        manifest = optimizer_files.manifest(path, _checked)
    except ValueError as error:
        raise PipelineError(str(error)) from None
    if manifest.get("format") != _FORMAT:
        raise PipelineError(f"{path} is of format {manifest.get('format')}; this version reads {_FORMAT}")
    if optimizer and manifest["optimizer"] != optimizer:
        raise PipelineError(f"{folder} is of a pipeline with optimizer {manifest['optimizer']!r}, not {optimizer!r}")
    if strange := [each["file"] for each in manifest["stages"] if not _FILE.fullmatch(each["file"])]:
        raise PipelineError(f"{path} names files that no pipeline writes: {_few(strange)}")
    return manifest


def _checked(found: Any) -> dict[str, Any] | None:
    """The manifest, where it is one; another format may have other fields."""
    match found:
        case {"format": int(format_)} if format_ != _FORMAT:
            return dict(found)
        case {"format": int(), "optimizer_step": int(), "optimizer": str(), "seeds": {"base": int(), "drawn": int()},
              "stages": list(stages)} if all(map(_is_stage, stages)):  # fmt: skip
            return dict(found)
    return None


def _is_stage(found: Any) -> bool:
    match found:
        case {
            "file": str(),
            "bytes": int(),
            "sha256": str(),
            "shapes": dict(shapes),
            "names": dict(names),
            "groups": int(),
        }:
            sizes = [size for shape in shapes.values() for size in (shape if isinstance(shape, list) else [None])]
            return all(isinstance(size, int) for size in sizes) and set(map(str, names.values())) <= shapes.keys()
    return False


def _discard(folder: Path, token: str) -> None:
    """Remove the files of a try that has failed, unless the manifest names them already."""
    manifest = folder / MANIFEST
    if manifest.exists() and token in manifest.read_text():
        return
    for path in folder.glob(f"step*.{token}.pt"):
        path.unlink(missing_ok=True)


def _publish(path: Path, text: str) -> None:
    """Let a file have this content, all of it or, whatever happens, what it had before."""
    draft = path.with_suffix(f".{secrets.token_hex(4)}.draft")
    with optimizer_files.new_file(draft) as file:
        file.write(text.encode())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
