"""The page that compares `rpcbench.distributed` with torch.distributed, name by name, for `make_reference.py`.

Each public name of torch.distributed is either ours, which compares the ranks' calls, or torch's own, on the same
world, by `rpcbench.distributed.__getattr__`; none is left out. For a function of ours the parameters are compared as
well. The tests fail when torch has a name that does not work here, or a parameter that ours does not have.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as c10d

import rpcbench.distributed as dist

FILE = "torch-distributed.md"
TORCH = "2.13"
"""The version of torch that the page is about."""
OURS, TORCHS = "ours, checked", "torch's own, on the same world"
BUILDS = {f"ProcessGroup{name}": "in builds of torch with it" for name in ("MPI", "NCCL", "UCC", "XCCL")}
"""Names that only some builds of torch have: listed for all, so that the page is the same everywhere."""
NOTES = {
    "autograd": "our module of that name",
    "launch": "`rpcbench launch`",
    "rpc": "our module of that name",
    "destroy_process_group": "also ends a group that torch has made",
    "gather": "also (tensor, dst, gather_list), as in 0.4",
    "scatter": "also (tensor, src, scatter_list), as in 0.4",
    "init_process_group": "also (backend, init_method, world_size, rank, group_name); `timeout` is 300 s by default",
    "get_rank": "an error on a rank outside the group, where torch returns -1",
    "get_world_size": "an error on a rank outside the group, where torch returns -1",
    "new_group": "an `Outsider` on a rank outside the group",
    "new_subgroups": "`group_size` is LOCAL_WORLD_SIZE by default",
    "isend": "`wait` returns the peer's rank",
    "irecv": "`wait` returns the peer's rank",
    "monitored_barrier": "the error names all missing ranks, on all ranks",
    "shrink_group": "needs NCCL",
    "split_group": "needs NCCL",
    "reduce_op": "`ReduceOp`",
    "Work": "of the functions here",
    "P2POp": "takes torch's isend and irecv, too",
} | BUILDS


class NameEntry(NamedTuple):
    """One line of the table."""

    name: str
    kind: str  # a heading of `SECTIONS`
    call: str  # torch's parameters
    here: str  # OURS or TORCHS
    differences: list[str]  # of our parameters
    note: str


HEAD = """# torch.distributed, name by name

`rpcbench.distributed` has all {names} public names of torch.distributed of torch {torch}: {ours} are ours, {torchs} are
torch's own.

**Ours, checked**: the ranks compare their calls before a tensor moves, each wait ends, and an error names the rank at
fault. Names, order and defaults of parameters are torch's unless the table says otherwise. On a rank outside the group
they raise CollectiveError, where torch warns and does nothing.

**Torch's own, on the same world**: passed on. Both use the same groups, so they may be mixed, if all ranks call the
same ones in the same order."""
SECTIONS = ("Functions", "Classes", "Modules and values")


def page(before: Path) -> str:
    """Return the page; with another version of torch, the one that is there."""
    if not torch.__version__.startswith(f"{TORCH}."):
        return before.read_text()
    found = list(entries())
    ours = sum(each.here == OURS for each in found)
    parts = [HEAD.format(names=len(found), torch=TORCH, ours=ours, torchs=len(found) - ours)]
    for section in SECTIONS:
        rows = [_row(each) for each in found if each.kind == section]
        parts += [f"## {section}", "\n".join(["| torch's | here | |", "|---|---|---|", *rows])]
    parts.append(f"torch's module also shows what it imports: {', '.join(f'`{name}`' for name in imported())}.")
    return "\n\n".join(parts) + "\n"


def _row(entry: NameEntry) -> str:
    notes = [*entry.differences, *([entry.note] if entry.note else [])]
    return f"| `{entry.call}` | {entry.here} | {'; '.join(notes)} |"


def public() -> list[str]:
    """Return the public names and modules of torch.distributed, without the names that it only imports."""
    defined = {name for name, value in _shown() if not isinstance(value, ModuleType)} - {*imported()}
    return sorted(defined | {*BUILDS, *modules()}, key=str.lower)


def modules() -> list[str]:
    """Return the public modules of torch.distributed, also those that no program has loaded."""
    found = [each.name for each in pkgutil.iter_modules(c10d.__path__) if not each.name.startswith("_")]
    return [name for name in found if isinstance(vars(c10d).get(name, c10d), ModuleType)]  # else a function hides it


def imported() -> list[str]:
    """Return the names of other libraries that torch.distributed imports."""
    return [name for name, value in _shown() if _is_foreign(value)]


def _shown() -> list[tuple[str, Any]]:
    # One of them warns when it is read, and is not.
    names = [name for name in dir(c10d) if not name.startswith("_")]
    return [(name, None if name == "reduce_op" else getattr(c10d, name)) for name in names]


def _is_foreign(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return not value.__name__.startswith(f"{c10d.__name__}.")
    return inspect.isclass(value) and value.__module__.partition(".")[0] not in ("torch", "types")


def entries() -> Iterator[NameEntry]:
    """Yield the line of each public name."""
    for name in public():
        theirs = None if name == "reduce_op" or name in modules() else getattr(c10d, name, None)
        kind = "Modules and values"
        if name in BUILDS or inspect.isclass(theirs) or name == "reduce_op":
            kind = "Classes"
        elif callable(theirs):
            kind = "Functions"
        signature = _signature(theirs) if kind == "Functions" else None
        call = name if signature is None else f"{name}({', '.join(signature.parameters)})"
        here = _here(name, theirs)
        differences = _differences(signature, name) if here == OURS and signature is not None else []
        yield NameEntry(name, kind, call, here, differences, NOTES.get(name, ""))


def _here(name: str, theirs: Any) -> str:
    if name in BUILDS or name in modules():
        return OURS if name in dist._OURS else TORCHS
    return OURS if getattr(dist, name) is not theirs else TORCHS


def _signature(function: Any) -> inspect.Signature | None:
    """Return the public parameters of a function; None of one in C++."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None
    shown = [each for name, each in signature.parameters.items() if not name.startswith("_")]
    return signature.replace(parameters=shown)


def _differences(theirs: inspect.Signature, name: str) -> list[str]:
    """Return where our function takes other parameters than torch's."""
    ours = inspect.signature(inspect.unwrap(getattr(dist, name))).parameters
    told = []
    for place, (parameter, given) in enumerate(theirs.parameters.items()):
        if parameter not in ours:
            told.append(f"no `{parameter}`")
        elif list(ours).index(parameter) != place:
            told.append(f"`{parameter}` at another place")
        elif ours[parameter].default != given.default:
            default = ours[parameter].default
            told.append(f"`{parameter}` is needed" if default is given.empty else f"`{parameter}={default!r}`")
    return told + [f"also `{more}`" for more in ours if more not in theirs.parameters]
