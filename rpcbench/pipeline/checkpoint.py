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
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rpcbench.base.errors import PipelineError
from rpcbench.base.rebuild import add_note
from rpcbench.optim import checkpoint
from rpcbench.pipeline import shards
from rpcbench.pipeline.chance import StepSeeds
from rpcbench.pipeline.crew import Crew
from rpcbench.pipeline.shards import Shapes, Shard, Source

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

    def applied(self, crew: Crew, number: int) -> None:
        """Write a checkpoint if it is time for one."""
        if self._folder is not None and number % self._every == 0:
            self._write(crew, self._folder, f"optimizer step {number} is done; what failed is the checkpoint after it")
            self._newest = number

    def moved(self, crew: Crew) -> None:
        """Learning rates have moved on: where there is a checkpoint of this optimizer step, it is to have them so."""
        if self._folder is not None and self._newest is not None and self._newest == crew.standing.number:
            self._write(crew, self._folder, "the learning rates have moved; what failed is the checkpoint after it")

    def _write(self, crew: Crew, folder: str | Path, failed: str) -> None:
        try:
            self.save(crew, folder)
        except Exception as error:
            add_note(error, failed)
            raise

    # -- saving
    def save(self, crew: Crew, folder: str | Path) -> None:
        """Write a checkpoint. StageLostError; PipelineError where the stages hold different steps; OSError."""
        target = Path(folder).absolute()
        crew.steps.check()
        number = crew.standing.number
        target.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(4)
        names = {stage: f"step{number}.stage{stage}.{token}.pt" for stage in range(crew.layout.stages)}
        try:
            written: dict[int, Shard] = crew.on_stages(
                shards.write, {stage: (*crew.stage(stage), str(target), name) for stage, name in names.items()}
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

    def _manifest(self, crew: Crew, written: Mapping[int, Shard]) -> dict[str, Any]:
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
    def resume(self, crew: Crew) -> int:
        """As `load`, from the pipeline's own folder."""
        if self._folder is None:
            raise PipelineError(
                "checkpoint_every is 0, so this pipeline has no checkpoint to resume from: make it with "
                "checkpoint=folder and checkpoint_every=n, or give pipe.load(folder) what pipe.save(folder) has written"
            )
        return self.load(crew, self._folder)

    def load(self, crew: Crew, folder: str | Path) -> int:
        """Let all stages hold what the checkpoint has; the optimizer step that it was written after."""
        source = Path(folder).absolute()
        manifest = _read(source, self._optimizer)
        sources = _sources(source, manifest, _names(crew, _shapes_in(manifest), f"the checkpoint in {source}"))
        crew.on_stages(shards.check, {stage: (crew.stage(stage)[2], own) for stage, own in sources.items()})
        self._newest = None
        with crew.standing.replaced(manifest["optimizer_step"]):
            crew.on_stages(shards.read, {stage: (*crew.stage(stage), own) for stage, own in sources.items()})
        self._seeds.base, self._seeds.drawn = manifest["seeds"]["base"], manifest["seeds"]["drawn"]
        number: int = manifest["optimizer_step"]
        return number


def load_state(crew: Crew, state: Mapping[str, torch.Tensor]) -> None:
    """Let the stages hold these parameters and buffers; optimizers, and their count, go on as they are."""
    names = _names(crew, {name: tuple(tensor.shape) for name, tensor in state.items()}, "the state")
    parts = {stage: {own: state[name] for name, own in owns.items()} for stage, owns in names.items()}
    with crew.standing.replaced(crew.standing.least):
        crew.on_stages(shards.take, {stage: (*crew.stage(stage), part) for stage, part in parts.items()})


def _names(crew: Crew, given: Shapes, what: str) -> dict[int, dict[str, str]]:
    """Stage → un-split name → name there. PipelineError where `given` is not just what the stages hold."""
    found: dict[int, Shapes] = crew.on_stages(shards.shapes, {s: (module,) for s, module in crew.modules.items()})
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
        manifest = checkpoint.manifest(path, _checked)
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
    with checkpoint.new_file(draft) as file:
        file.write(text.encode())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
