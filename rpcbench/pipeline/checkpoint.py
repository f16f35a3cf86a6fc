"""Checkpoints of a pipeline: each worker writes the stages it has, and a manifest lists the files that belong together.

    folder/checkpoint.json                 the manifest: optimizer step, seeds, and each file's size, SHA-256 and names
    folder/step7.stage0.1f0c2a9b.pt        a stage's file, written by its worker

Guarantees
- After a write a folder has the latest complete checkpoint and nothing else. A write that fails leaves the checkpoint
  before it, and no file of its own.
- A manifest names files in its own folder, and a file holds tensors and numbers: no code of a file runs.
- Names are the un-split model's, so a checkpoint fits every split and schedule of the model.
- All files are checked before any is loaded: if a name, a shape or a byte is wrong, no stage has changed.

Rules: one pipeline writes to a folder, and all workers reach it under the same path.
"""

# The order of a write: files under new names ── all on disk ── manifest renamed into place ── older files removed.
#
# A stage's file is torch.save's, read with weights_only: parameters and buffers, the optimizer's state by names of
# parameters, its learning rate schedule, and the worker's random state.

from __future__ import annotations

import hashlib
import itertools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.base.files import make_file
from rpcbench.base.rebuild import add_note
from rpcbench.optim import LocalOptimizer, optimizer_files
from rpcbench.pipeline.driver import WorkerGroup
from rpcbench.pipeline.recompute import StepSeeds
from rpcbench.pipeline.stage import StageWorker

Shapes = dict[str, tuple[int, ...]]


class Shard(NamedTuple):
    """A file of a checkpoint."""

    file: str
    bytes: int
    sha256: str
    shapes: Shapes  # by the names in the stage
    groups: int  # parameter groups of its optimizer; 0 without one


class CheckpointFile(NamedTuple):
    """A file to read, and which of its tensors."""

    path: str
    bytes: int
    sha256: str
    shapes: Shapes
    names: dict[str, str]  # name here → name in the file
    groups: int


# -- on a stage's worker
def tensor_shapes(worker: StageWorker, stage: int) -> Shapes:
    """Return names and shapes of the tensors in a stage's state dict."""
    return {name: tuple(tensor.shape) for name, tensor in worker.modules[stage].state_dict().items()}


def write_shard(worker: StageWorker, stage: int, folder: str, name: str) -> Shard:
    """Write a stage's state to a new file."""
    path, optimizer = Path(folder) / name, worker.optimizers.get(stage)
    with worker.step_lock, optimizer_files.name_faults(path), make_file(path) as file:
        torch.save(_collect_state(worker.modules[stage], optimizer), file)
    with path.open("rb") as written:  # read back: the digest is of the bytes on disk
        digest = hashlib.file_digest(written, "sha256").hexdigest()
    return Shard(path.name, path.stat().st_size, digest, tensor_shapes(worker, stage), _count_groups(optimizer))


def check_files(worker: StageWorker, stage: int, sources: Sequence[CheckpointFile]) -> None:
    """Raise PipelineError if a file has changed since it was written, or does not fit. Nothing is loaded."""
    own = _count_groups(worker.optimizers.get(stage))
    for source in sources:
        if own and source.groups not in (0, own):  # 0: no optimizer then
            raise PipelineError(
                f"{source.path} has {count_noun(source.groups, 'group')} of parameters, but optimizer= makes {own} here"
            )
        path = Path(source.path)
        if not path.exists():
            raise PipelineError(f"{path} is missing, or this worker cannot reach it: all workers must see the folder")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != source.sha256:
            raise PipelineError(f"{path} was changed: it has {path.stat().st_size} bytes and another "
                                f"SHA-256; {source.bytes} bytes were written")  # fmt: skip
        _open_file(source, mmap=True)  # without reading the tensors into memory


def load_files(worker: StageWorker, stage: int, sources: Sequence[CheckpointFile]) -> None:
    """Load a stage's part of the files into it."""
    if not sources:  # a stage without tensors
        return
    kept = [_open_file(source) for source in sources]
    tensors: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for source, held in zip(sources, kept, strict=True):
        tensors |= {here: held["tensors"][there] for here, there in source.names.items()}
        states |= {here: held["states"][there] for here, there in source.names.items() if there in held["states"]}
    module, optimizer = worker.modules[stage], worker.optimizers.get(stage)
    with worker.step_lock:
        module.load_state_dict(tensors)
        if optimizer is not None:
            held = next((each for each in kept if each["groups"]), kept[0])
            _load_optimizer(optimizer, _shard_names(module), states, held)
        torch.set_rng_state(kept[0]["random"])


def load_tensors(worker: StageWorker, stage: int, tensors: dict[str, torch.Tensor]) -> None:
    with worker.step_lock:
        worker.modules[stage].load_state_dict(tensors)


# -- inside
def _open_file(source: CheckpointFile, mmap: bool = False) -> dict[str, Any]:
    """Return the content of a file. Raises PipelineError if that does not match its manifest."""
    try:
        held = optimizer_files.load_file(Path(source.path), mmap)
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
    raise PipelineError(f"{source.path} does not match its manifest. Nothing was loaded")


def _collect_state(module: torch.nn.Module, optimizer: LocalOptimizer | None) -> dict[str, Any]:
    held: dict[str, Any] = {"tensors": module.state_dict(), "states": {}, "groups": [], "schedule": None}
    if optimizer is not None:
        state = optimizer.state()
        held["states"] = {
            name: state["state"][number] for name, number in _number_parameters(module) if number in state["state"]
        }
        held["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
        held["schedule"] = optimizer.scheduler and optimizer.scheduler.state_dict()
    return {**held, "random": torch.get_rng_state()}


def _load_optimizer(optimizer: LocalOptimizer, names: list[str], states: dict[str, Any], held: dict[str, Any]) -> None:
    state = {number: states[name] for number, name in enumerate(names) if name in states}
    own = optimizer.state()["param_groups"]
    groups = [{**saved, "params": group["params"]} for saved, group in zip(held["groups"] or own, own, strict=True)]
    optimizer.load({"state": state, "param_groups": groups})
    if optimizer.scheduler is not None and held["schedule"] is not None:
        optimizer.load_schedule(held["schedule"])


def _shard_names(module: torch.nn.Module) -> list[str]:
    """Return the names of the trained parameters, in the order in which the stage's optimizer numbers them."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _number_parameters(module: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Yield all names of the trained parameters, of which a shared one has several, with their numbers."""
    numbers = {module.get_parameter(name): number for number, name in enumerate(_shard_names(module))}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in numbers:
            yield name, numbers[parameter]


def _count_groups(optimizer: LocalOptimizer | None) -> int:
    return 0 if optimizer is None else len(optimizer.optimizer.param_groups)


MANIFEST = "checkpoint.json"
WEIGHTS_SUFFIX = ".safetensors"  # of a file with parameters and buffers only: see `weights_file`
_FORMAT = 2  # version of the manifest
_FILE = re.compile(r"step\d+\.stage\d+\.[0-9a-f]{8}\.pt", re.ASCII)  # step, stage, token of the write
_DRAFT = re.compile(r"\.checkpoint\.json\.[0-9a-f]{8}\.draft")
_SHOWN = 5  # names in an error


class Checkpoints:
    """Writes and loads checkpoints of a pipeline. `every`: optimizer steps between two in `folder`; 0: none."""

    def __init__(self, seeds: StepSeeds, optimizer: str, folder: str | Path | None, every: int) -> None:
        if not isinstance(every, int) or every < 0 or bool(every) != bool(folder):
            raise PipelineError(
                f"checkpoint={folder!r}, checkpoint_every={every!r}: give both, a folder and a number of optimizer "
                "steps of at least 1, or none"
            )
        if folder and Path(folder).suffix == WEIGHTS_SUFFIX:
            raise PipelineError(
                f"checkpoint={folder!r}: to resume, a pipeline needs its optimizers' state, which is not in a "
                f"{WEIGHTS_SUFFIX} file. Give a folder with another suffix"
            )
        self._seeds, self._optimizer = seeds, optimizer
        self._folder, self._every = folder, every
        self._newest: int | None = None  # optimizer step of the checkpoint in the folder, if written here

    def step_applied(self, worker_group: WorkerGroup, number: int) -> None:
        """Write a checkpoint if one is due."""
        if self._folder is not None and number % self._every == 0:
            self._save_with_note(
                worker_group, self._folder, f"optimizer step {number} is done; the checkpoint after it failed"
            )
            self._newest = number

    def rates_changed(self, worker_group: WorkerGroup) -> None:
        """Write the checkpoint of this optimizer step again, if there is one: learning rates have changed."""
        if (
            self._folder is not None
            and self._newest is not None
            and self._newest == worker_group.commit_state.common_step
        ):
            self._save_with_note(
                worker_group, self._folder, "the learning rates have moved; the checkpoint after it failed"
            )

    def _save_with_note(self, worker_group: WorkerGroup, folder: str | Path, failed: str) -> None:
        try:
            self.save_checkpoint(worker_group, folder)
        except Exception as error:
            add_note(error, failed)
            raise

    # -- saving
    def save_checkpoint(self, worker_group: WorkerGroup, folder: str | Path) -> None:
        """Write a checkpoint. Raises StageLostError, PipelineError if the stages hold different steps, or OSError."""
        target = Path(folder).absolute()
        worker_group.steps.check_ready()
        number = worker_group.commit_state.common_step
        target.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(4)  # new names: the old checkpoint stays until the end
        names = {stage: f"step{number}.stage{stage}.{token}.pt" for stage in range(worker_group.layout.stages)}
        try:
            files = {stage: (str(target), name) for stage, name in names.items()}
            written: dict[int, Shard] = worker_group.call_on_stages(write_shard, files)
            if unseen := [name for name in names.values() if not (target / name).exists()]:
                raise PipelineError(
                    f"{target} has no {_shorten_list(unseen)} as seen from here: all workers must reach the folder"
                )
            optimizer_files.publish_manifest(target / MANIFEST, self._make_manifest(worker_group, written))
        except BaseException:  # Ctrl-C, too, leaves no files
            _discard_files(target, token)
            raise
        for path in target.iterdir():
            if (_FILE.fullmatch(path.name) and path.name not in names.values()) or _DRAFT.fullmatch(path.name):
                path.unlink()

    def _make_manifest(self, worker_group: WorkerGroup, written: Mapping[int, Shard]) -> dict[str, Any]:
        stages = [
            {
                "stage": stage.index,
                "worker": stage.worker,
                **written[stage.index]._asdict(),
                "names": {stage.unsplit_name(own): own for own in written[stage.index].shapes},
            }
            for stage in worker_group.row
        ]
        return {
            "format": _FORMAT,
            "optimizer_step": worker_group.commit_state.common_step,
            "optimizer": self._optimizer,
            "seeds": {"base": self._seeds.base, "drawn": self._seeds.drawn, "evaluated": self._seeds.evaluated},
            "stages": stages,
        }

    # -- loading
    def resume_latest(self, worker_group: WorkerGroup) -> int:
        """As `load_checkpoint`, from the pipeline's own folder."""
        if self._folder is None:
            raise PipelineError(
                "checkpoint_every is 0, so this pipeline has no checkpoint to resume from: make it with "
                "checkpoint=folder and checkpoint_every=n, or give pipe.load(folder) what pipe.save(folder) has written"
            )
        return self.load_checkpoint(worker_group, self._folder)

    def load_checkpoint(self, worker_group: WorkerGroup, folder: str | Path) -> int:
        """Load a checkpoint into all stages. Returns the optimizer step that it was written after."""
        source = Path(folder).absolute()
        manifest = _read_manifest(source, self._optimizer)
        names = _names_by_stage(worker_group, _shapes_in(manifest), f"the checkpoint in {source}")
        sources = {stage: (own,) for stage, own in _sources_by_stage(source, manifest, names).items()}
        worker_group.call_on_stages(check_files, sources)
        self._newest = None
        with worker_group.commit_state.loading_step(manifest["optimizer_step"]):  # all files fit: now the stages change
            worker_group.call_on_stages(load_files, sources)
        self._seeds.base, self._seeds.drawn = manifest["seeds"]["base"], manifest["seeds"]["drawn"]
        self._seeds.evaluated = manifest["seeds"].get("evaluated", 0)  # early manifests have none
        number: int = manifest["optimizer_step"]
        return number


def load_state(worker_group: WorkerGroup, state: Mapping[str, torch.Tensor], what: str = "the state") -> None:
    """Load these parameters and buffers into the stages; optimizers, and the count of their steps, stay."""
    names = _names_by_stage(worker_group, {name: tuple(tensor.shape) for name, tensor in state.items()}, what)
    parts = {stage: ({own: state[name] for own, name in owns.items()},) for stage, owns in names.items()}
    with worker_group.commit_state.loading_step(worker_group.commit_state.least_step):
        worker_group.call_on_stages(load_tensors, parts)


def _names_by_stage(worker_group: WorkerGroup, given: Shapes, what: str) -> dict[int, dict[str, str]]:
    """Return stage → own name → un-split name, which a tensor that parts of a stage share has several times. Raises
    PipelineError if `given` has other names or shapes."""
    found: dict[int, Shapes] = worker_group.call_on_stages(tensor_shapes, dict.fromkeys(worker_group.modules, ()))
    names = {stage.index: {own: stage.unsplit_name(own) for own in found[stage.index]} for stage in worker_group.stages}
    _check_shapes(given, {name: found[stage][own] for stage, owns in names.items() for own, name in owns.items()}, what)
    return names


def _check_shapes(given: Shapes, wanted: Shapes, what: str) -> None:
    missing = [name for name in wanted if name not in given]
    besides = [name for name in given if name not in wanted]
    other = [f"{name} {given[name]}, not {shape}" for name, shape in wanted.items() if given.get(name, shape) != shape]
    differences = [f"{words} {_shorten_list(names)}" for words, names in
            (("it lacks", missing), ("it has besides", besides), ("of another shape are", other)) if names]  # fmt: skip
    if differences:
        raise PipelineError(f"{what} does not fit this model, and nothing was loaded: {'; '.join(differences)}")


def _sources_by_stage(
    folder: Path, manifest: dict[str, Any], names: Mapping[int, dict[str, str]]
) -> dict[int, list[CheckpointFile]]:
    sources: dict[int, list[CheckpointFile]] = {stage: [] for stage in names}
    for written, (stage, owns) in itertools.product(manifest["stages"], names.items()):
        wanted = {own: written["names"][name] for own, name in owns.items() if name in written["names"]}
        if wanted:
            path = str(folder / written["file"])
            shapes = {name: tuple(shape) for name, shape in written["shapes"].items()}
            sources[stage].append(
                CheckpointFile(path, written["bytes"], written["sha256"], shapes, wanted, written["groups"])
            )
    return sources


def _shapes_in(manifest: dict[str, Any]) -> Shapes:
    return {
        name: tuple(written["shapes"][own]) for written in manifest["stages"] for name, own in written["names"].items()
    }


def _read_manifest(folder: Path, optimizer: str) -> dict[str, Any]:
    """Return the manifest. Raises PipelineError if there is none, or it is of another format or optimizer."""
    path = folder / MANIFEST
    missing = f"{folder} has no whole checkpoint: there is no {MANIFEST}"
    try:
        manifest = optimizer_files.read_manifest(path, _check_manifest, missing)
    except ValueError as error:
        raise PipelineError(str(error)) from None
    if manifest.get("format") != _FORMAT:
        raise PipelineError(f"{path} is of format {manifest.get('format')}; this version reads {_FORMAT}")
    if optimizer and manifest["optimizer"] != optimizer:
        raise PipelineError(f"{folder} is of a pipeline with optimizer {manifest['optimizer']!r}, not {optimizer!r}")
    if strange := [each["file"] for each in manifest["stages"] if not _FILE.fullmatch(each["file"])]:
        raise PipelineError(f"{path} names files that no pipeline writes: {_shorten_list(strange)}")
    return manifest


def _check_manifest(found: Any) -> dict[str, Any] | None:
    """Return the manifest if it has all fields, else None."""
    match found:
        case {"format": int(format_)} if format_ != _FORMAT:  # another format may have other fields
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


def _discard_files(folder: Path, token: str) -> None:
    """Remove the files of a write that failed, unless the manifest has their names already."""
    manifest = folder / MANIFEST
    if manifest.exists() and token in manifest.read_text():
        return
    for path in folder.glob(f"step*.{token}.pt"):
        path.unlink(missing_ok=True)


def _shorten_list(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
