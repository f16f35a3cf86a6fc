"""Checkpoints of a model that ranks share (FSDP2, tensor parallel, DDP), by torch.distributed.checkpoint.

    folder/__0_0.distcp        the pieces of rank 0; its name and content are torch's
    folder/.metadata           names, shapes and places of all tensors; torch writes it last
    .folder.draft              beside it: a save that is not complete
    .folder.old                beside it: the checkpoint before, while the draft gets its name

Guarantees
- A checkpoint fits any number of ranks, any mesh, and one process: names and shapes are those of the whole model.
- Before anything is written or changed, all ranks have the same path and model, and the checkpoint is one of this
  model. If not, all ranks raise the same error, and the group stays usable.
- A save that fails leaves the checkpoint before it. Only a checkpoint, or an empty folder, is replaced.
- A load that fails changes neither the model nor the optimizer: tensors are read into new memory first.

Rule: all ranks reach the folder under the same path. torch.distributed.checkpoint reads pickles, which can run code:
load only checkpoints from a source that you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as c10d

from rpcbench.base import files
from rpcbench.base.errors import CollectiveError, count_noun
from rpcbench.distributed import groups
from rpcbench.distributed.comparison import run_collective
from rpcbench.distributed.groups import GroupMember

if TYPE_CHECKING:  # loads in a second, so the functions that need it import it
    from torch.distributed.checkpoint.metadata import Metadata

State = dict[str, Any]
METADATA = ".metadata"  # torch's name
_PIECES = re.compile(r"__\d+_\d+\.distcp", re.ASCII)  # torch's names
_SHOWN = 5  # names in an error


def save_sharded(model: torch.nn.Module, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write a checkpoint of a model that all ranks share: each rank writes its pieces. Call it on all ranks.

        dist.save_sharded(model, "checkpoints/latest", optimizer)  # in a cell with %%remote all

    Without a process group it writes the model of this process. One rank writes a tensor that is not sharded, as a
    buffer.

    Args:
        model: Sharded by `fully_shard` or `parallelize_module`, in DistributedDataParallel, or plain.
        path: A folder that all ranks reach. A checkpoint in it is replaced once the new one is complete.
        optimizer: Its state is written too.

    Raises:
        CollectiveError: The ranks differ, the path holds other files, or a rank cannot write; the checkpoint before
            stays. Or, as the following errors, the world is broken.
        RpcTimeoutError: A rank has not come in time. The timeout of the group is that of the writing, too.
        WorkerLostError: A rank has ended.
    """
    folder, ranks = Path(path).resolve(), Ranks()
    state, _ = _state_of(model, optimizer)
    ranks.check_agreement(
        f"save_sharded('{folder}', {_model_digest(state)})", _place_fault(folder) or _meta_fault(state)
    )
    draft = _sibling_path(folder, "draft")
    try:
        ranks.check_agreement("save_sharded: folder", ranks.run_on_first_rank(lambda: _make_folder(draft)))
        unseen = "" if draft.is_dir() else f"does not see {draft}, which rank 0 has made: all ranks must reach the path"
        ranks.check_agreement("save_sharded: folder seen", unseen)
        ranks.run_on_all_ranks("save_sharded: write", lambda: _write_state(state, draft, ranks.is_alone))
        ranks.check_agreement(
            "save_sharded: replace", ranks.run_on_first_rank(lambda: _replace_checkpoint(folder, draft))
        )
    except BaseException:  # Ctrl-C, too, leaves no draft
        ranks.run_on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True))
        raise


def load_sharded(model: torch.nn.Module, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load a checkpoint of `save_sharded` into a model, under any number of ranks. Call it on all ranks.

    The pieces are read into new tensors first, so a load needs the memory of each rank's pieces once more. It reads
    pickles, which can run code: load only checkpoints from a source that you trust.

    Args:
        model: The same model, sharded in any way, or plain in a single process.
        path: The folder.
        optimizer: Gets the state that was saved, with its learning rate. None: only the model is loaded.

    Raises:
        CollectiveError: The ranks differ, or there is no complete checkpoint of this model and optimizer at the path;
            nothing has changed. Or, as the following errors, the world is broken.
        RpcTimeoutError: A rank has not come in time.
        WorkerLostError: A rank has ended.
    """
    from torch.distributed.checkpoint import state_dict

    folder, ranks = Path(path).resolve(), Ranks()
    own, defaults = _state_of(model, optimizer)
    read, fault = _state_to_read(own, folder, defaults)
    ranks.check_agreement(f"load_sharded('{folder}', {_model_digest(own)})", fault or _meta_fault(own))
    ranks.run_on_all_ranks("load_sharded: read", lambda: _read_state(read, folder, ranks.is_alone))
    ranks.check_agreement("load_sharded: compare", _groups_fault(read, own, folder))
    if optimizer is not None:
        # not strict: a parameter that never had a gradient has no state
        loose = state_dict.StateDictOptions(strict=False)
        state_dict.set_optimizer_state_dict(model, optimizer, read["optim"], options=loose)
    state_dict.set_model_state_dict(model, read["model"])


class Ranks:
    """All ranks of the default group, or this process alone where there is none."""

    def __init__(self) -> None:
        there = groups.has_world() or c10d.is_initialized()
        self._end: GroupMember | None = groups.member_of(None) if there else None  # raises where the world is broken

    @property
    def is_alone(self) -> bool:
        return self._end is None

    def check_agreement(self, call: str, fault: str) -> None:
        """Raise CollectiveError on all ranks if their calls differ, or any has a fault."""
        faults = [fault]
        if (member := self._end) is not None:
            faults = [""] * len(member.ranks)
            run_collective(member, call, [], lambda: c10d.all_gather_object(faults, fault, member.group))
        if not any(faults):
            return
        if len(set(faults)) == 1:  # told once, as it is the same for all
            raise CollectiveError(faults[0])
        rank_faults = (f"{self._name_of_rank(rank)}: {each}" for rank, each in enumerate(faults) if each)
        raise CollectiveError("; ".join(rank_faults))

    def run_on_first_rank(self, job: Callable[[], object]) -> str:
        """Run a job on rank 0. Returns its fault there, for `check_agreement`; empty on all others."""
        if self._end is not None and self._end.world.rank != 0:
            return ""
        try:
            job()
        except OSError as error:
            return str(error)
        return ""

    def run_on_all_ranks(self, what: str, job: Callable[[], None]) -> None:
        """Run a job of torch.distributed.checkpoint on all ranks. CollectiveError where it fails on any."""

        def run_shared_job() -> None:
            from torch.distributed.checkpoint.api import CheckpointException

            try:
                job()
            except CheckpointException as error:  # torch raises it on all ranks if one has failed
                rank, (cause, _) = next(iter(error.failures.items()))
                who = self._name_of_rank(rank)
                raise CollectiveError(f"{what} failed on {who}: {type(cause).__name__}: {cause}") from None

        if self._end is None:
            run_shared_job()
        else:
            self._end.run_job(run_shared_job, what)

    def _name_of_rank(self, rank: int) -> str:
        return "this process" if self._end is None else self._end.world.rank_label(self._end.ranks[rank])


# -- the state of this rank
def _state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[State, set[str]]:
    """Return the state by the whole model's names, and the names of the optimizer's options."""
    from torch.distributed.checkpoint import state_dict

    for name, given, kind in (("model", model, torch.nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
        if not isinstance(given, kind) and (name == "model" or given is not None):
            raise CollectiveError(f"{name} must be a {kind.__module__}.{kind.__name__}, not a {type(given).__name__}")
    state: State = {"model": state_dict.get_model_state_dict(model)}
    if optimizer is None:
        return state, set()
    return {**state, "optim": _optimizer_state(model, optimizer)}, set(optimizer.defaults)


def _optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the optimizer's state. Of one that has made no step it is the state after one, with `fresh` set."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    fresh = not optimizer.state
    # torch makes a missing state by a step with gradients of zero; gradients that are there would keep it from that
    parameters = [each for group in optimizer.param_groups for each in group["params"]] if fresh else []
    gradients = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    try:
        found: State = {**get_optimizer_state_dict(model, optimizer), _FRESH: fresh}
    finally:
        for each, gradient in zip(parameters, gradients, strict=True):
            each.grad = gradient
        if fresh:
            optimizer.state.clear()  # as it was: a save changes nothing
    return found


_FRESH = "fresh"  # in the state of an optimizer, and not in a file: whether it has made no step


def _model_digest(state: State) -> str:
    """Return a model in short, equal on all ranks that have the same one."""
    model = state["model"]
    layout = sorted((name, str(getattr(each, "dtype", "")), _shape_of_value(each)) for name, each in model.items())
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=4).hexdigest()
    return f"{count_noun(len(model), 'tensor')} #{digest}{', optimizer' if 'optim' in state else ''}"


def _shape_of_value(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _meta_fault(state: State) -> str:
    found = [name for name, each in state["model"].items() if isinstance(each, torch.Tensor) and each.is_meta]
    return (
        f"the model has tensors without memory, on the device meta: {_format_few(found)}. Call to_empty first"
        * bool(found)
    )


# -- files
def _write_state(state: State, draft: Path, alone: bool) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    kept = dict(state)
    if "optim" in kept:
        optim = {name: each for name, each in kept["optim"].items() if name != _FRESH}
        kept["optim"] = {**optim, "state": {}} if state["optim"][_FRESH] else optim
    with _without_advice(alone):
        save(kept, storage_writer=FileSystemWriter(draft), no_dist=alone)


def _read_state(state: State, folder: Path, alone: bool) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _without_advice(alone):
        load(state, storage_reader=FileSystemReader(folder), no_dist=alone)


@contextlib.contextmanager
def _without_advice(alone: bool) -> Iterator[None]:
    """Drop torch's warning that there is no process group, where there is to be none."""
    if not alone:  # the filters are those of all threads, so they stay where they can
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _sibling_path(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _place_fault(folder: Path) -> str:
    """Return the reason that no checkpoint may be written here; empty if one may."""
    if not folder.exists():
        return ""
    if not folder.is_dir():
        return f"{folder} is a file: give the path of a folder"
    names = sorted(path.name for path in folder.iterdir())
    if others := [name for name in names if name != METADATA and not _PIECES.fullmatch(name)]:
        return (
            f"{folder} has files of no checkpoint, which a save would remove: {_format_few(others)}. Give another path"
        )
    return ""


def _make_folder(draft: Path) -> None:
    shutil.rmtree(draft, ignore_errors=True)  # of a save that was killed
    draft.mkdir(parents=True)


def _replace_checkpoint(folder: Path, draft: Path) -> None:
    """Give a complete draft its name, and remove the checkpoint that had it."""
    old = _sibling_path(folder, "old")
    if folder.exists():
        if old.exists():  # of a save that was killed after its draft got its name
            shutil.rmtree(old)
        files.rename_draft(folder, old)
    try:
        files.rename_draft(draft, folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    if old.exists():
        shutil.rmtree(old)


# -- whether a checkpoint fits
def _state_to_read(own: State, folder: Path, defaults: set[str]) -> tuple[State, str]:
    """Return a state to read the checkpoint into, in new memory, and the reason that it does not fit; empty if it
    does."""
    metadata, fault = _read_metadata(folder)
    if metadata is None:
        return {}, fault
    fault = _files_fault(metadata, folder) or _model_fault(metadata, own["model"], folder)
    if fault:
        return {}, fault
    read: State = {"model": {name: _memory_like(each) for name, each in own["model"].items()}}
    if "optim" in own:
        read["optim"], fault = _optimizer_to_read(metadata, own["optim"], defaults, folder)
    return read, fault


def _read_metadata(folder: Path) -> tuple[Metadata | None, str]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (folder / METADATA).is_file():
        there = "has no complete checkpoint" if folder.is_dir() else "is not there, or is no folder"
        old = _sibling_path(folder, "old")
        hint = f": a save was killed while it replaced the checkpoint, which is {old} now" if old.exists() else ""
        return None, f"{folder} {there}{hint}"
    try:
        found = FileSystemReader(folder).read_metadata()
        paths = found.planner_data  # of each flat name
        if isinstance(found.storage_data, Mapping) and isinstance(paths, Mapping) and [*found.state_dict_metadata]:
            return found, ""
    except Exception as error:  # noqa: BLE001  (a damaged pickle raises any kind)
        return None, f"{folder / METADATA} is damaged: {type(error).__name__}: {error}"
    return None, f"{folder / METADATA} is not the metadata of a checkpoint of torch.distributed.checkpoint"


def _files_fault(metadata: Metadata, folder: Path) -> str:
    """Return that a file of pieces is missing, or shorter than the metadata say."""
    sizes: dict[str, int] = {}
    for piece in metadata.storage_data.values():
        sizes[piece.relative_path] = max(sizes.get(piece.relative_path, 0), piece.offset + piece.length)
    for name, size in sorted(sizes.items()):
        path = folder / name
        if not path.is_file():
            return f"{path} of the checkpoint is missing, or this rank does not reach it"
        if (there := path.stat().st_size) < size:
            return f"{path} was cut short: it has {there} bytes, not {size}"
    return ""


def _model_fault(metadata: Metadata, own: Mapping[str, Any], folder: Path) -> str:
    kept = metadata.state_dict_metadata
    there = {
        str(path[1]): tuple(getattr(kept[name], "size", ())) for name, path in metadata.planner_data.items()
        if path[0] == "model"
    }  # fmt: skip
    lacks = [name for name in own if name not in there]
    besides = [name for name in there if name not in own]
    shapes = [(name, there[name], _shape_of_value(each)) for name, each in own.items() if name in there]
    other = [f"{name} {found}, not {wanted}" for name, found, wanted in shapes if found != wanted]
    differences = [f"{words} {_format_few(names)}" for words, names in
            (("it lacks", lacks), ("it has besides", besides), ("of another shape are", other)) if names]  # fmt: skip
    return (
        f"{folder} is a checkpoint of another model: {'; '.join(differences)}. Nothing was loaded"
        if differences
        else ""
    )


def _optimizer_to_read(metadata: Metadata, own: State, defaults: set[str], folder: Path) -> tuple[State, str]:
    """Return an optimizer's state to read the checkpoint into, and the reason that it does not fit."""
    states: dict[str, State] = {}
    options: dict[int, State] = {}
    for name, path in metadata.planner_data.items():
        match path:
            case ("optim", "state", str(parameter), str(key), *_):
                states.setdefault(parameter, {})[key] = _memory_like(own["state"].get(parameter, {}).get(key))
            case ("optim", "param_groups", int(number), str(key), *_):
                options.setdefault(number, {})[key] = _place_for_option(metadata.state_dict_metadata[name])
    if not options:
        return {}, f"{folder} has no state of an optimizer: it was saved without one"
    if sorted(options) != [*range(len(own["param_groups"]))]:
        mine, its = len(own["param_groups"]), count_noun(len(options), "group")
        return {}, f"{folder} has {its} of parameters, but the optimizer here has {mine}. Nothing was loaded"
    lacks = [f"the option {key}" for each in options.values() for key in sorted(defaults - each.keys())]
    kept = {name: each.keys() ^ own["state"].get(name, {}).keys() for name, each in states.items()}
    differ = [f"{key} of {name}" for name, keys in kept.items() for key in sorted(keys)]
    if lacks or differ:
        difference = f"only one of the two has {_format_few([*lacks, *differ])}"
        return {}, f"{folder} has the state of another optimizer: {difference}. Nothing was loaded"
    return {"state": states, "param_groups": [options[number] for number in sorted(options)]}, ""


def _place_for_option(kept: Any) -> Any:
    """Return a place for an option of a group of parameters: memory for a tensor, as a learning rate can be."""
    size = getattr(kept, "size", None)
    return None if size is None else torch.empty(size, dtype=kept.properties.dtype)


def _groups_fault(read: State, own: State, folder: Path) -> str:
    """Return that the groups of an optimizer were of other parameters; known only once they are read."""
    if "optim" not in own:
        return ""
    there, here = ([sorted(group["params"]) for group in each["optim"]["param_groups"]] for each in (read, own))
    return "" if there == here else f"{folder} has other parameters in the groups of its optimizer. Nothing was loaded"


def _memory_like(value: Any) -> Any:
    """Return new memory of a tensor's layout; other values as they are."""
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def _format_few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
