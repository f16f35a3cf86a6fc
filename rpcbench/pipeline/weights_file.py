"""Parameters and buffers of a pipeline as one file in the format of safetensors, which other programs can read.

Guarantees
- The file has each parameter and buffer of the un-split model under its name there, and nothing else: no optimizer, no
  learning rate schedule, no random state. A weight with two names is written under both.
- A save that fails leaves the file before it, and no file of its own.
- Names and shapes are checked before any tensor is sent to a stage. If one is wrong, no stage has changed.
- No code of a file runs. The format has no checksum: a file that was cut short is refused, a changed byte is not seen.

The driver gathers the whole model, so it needs the memory for it. The package safetensors is an extra of rpcbench, and
loaded only here.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rpcbench.base.errors import PipelineError, count_noun
from rpcbench.base.files import replace_file
from rpcbench.optim import optimizer_files
from rpcbench.pipeline.checkpoint import WEIGHTS_SUFFIX, load_state
from rpcbench.pipeline.driver import WorkerGroup


def is_weights_path(path: str | Path) -> bool:
    """Return whether a path given to `Pipeline.save` or `load_weights` is that of such a file, by its suffix."""
    return Path(path).suffix == WEIGHTS_SUFFIX


def save_weights(worker_group: WorkerGroup, path: str | Path) -> None:
    """Write the file. Raises StageLostError, PipelineError if the stages hold different steps, or OSError."""
    target, library = Path(path).absolute(), _import_safetensors()
    if target.is_dir():
        raise PipelineError(f"{target} is a folder: give the path of a file, or a folder with another suffix")
    worker_group.steps.check_ready()
    tensors = _unshare_tensors(worker_group.gather_state())
    target.parent.mkdir(parents=True, exist_ok=True)
    with optimizer_files.name_faults(target), replace_file(target) as draft:
        try:
            library.torch.save_file(tensors, draft.name, metadata={"format": "pt"})  # as other libraries expect it
        except library.SafetensorError as error:  # a full disk, too
            raise PipelineError(f"{target} was not written, and a file that was there before stays: {error}") from error


def load_weights(worker_group: WorkerGroup, path: str | Path) -> int:
    """Load the file into all stages. Returns the optimizer step at which the pipeline stays."""
    source = Path(path).absolute()
    state = _with_ties(worker_group, _read_tensors(source))
    load_state(worker_group, state, str(source))
    step = worker_group.commit_state.least_step
    if worker_group.optimizers and step:
        warnings.warn(
            f"{source.name} has parameters and buffers only: the optimizers keep their state of "
            f"{count_noun(step, 'step')} with other weights. A checkpoint in a folder has the optimizers' state, too",
            stacklevel=3,
        )
    return step


# -- inside
def _import_safetensors() -> Any:
    """Return the package safetensors. Raises PipelineError where it is not installed."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError as error:
        raise PipelineError(
            f"files with the suffix {WEIGHTS_SUFFIX} need the package safetensors: pip install safetensors"
        ) from error


def _unshare_tensors(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors without shared memory, which the format refuses; tied weights of one stage share it."""
    found: dict[str, torch.Tensor] = {}
    places: set[int] = set()
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in places else tensor.contiguous()
        places.add(place)
    return found


def _read_tensors(source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file. Raises PipelineError if there is none, or it is damaged."""
    library = _import_safetensors()
    if not source.is_file():
        raise PipelineError(f"{source} is a folder, not a file" if source.is_dir() else f"there is no file {source}")
    try:
        return dict(library.torch.load_file(source))
    except library.SafetensorError as error:
        raise PipelineError(
            f"{source} is no file of safetensors, or was cut short: {error}. Nothing was loaded"
        ) from error


def _with_ties(worker_group: WorkerGroup, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under all names of tied weights, which other programs write under one of them only."""
    named: dict[int, list[str]] = {}  # id of a parameter → its names
    for stage in worker_group.row:
        for own, parameter in stage.module.named_parameters(remove_duplicate=False):
            named.setdefault(id(parameter), []).append(stage.unsplit_name(own))
    lazy = [[worker_group.row[stage].unsplit_name(own) for stage, own in tie.items()] for tie in worker_group.ties]
    for names in [*named.values(), *lazy]:
        if kept := [name for name in names if name in state]:
            state |= {name: state[kept[0]] for name in names if name not in state}
    return state
