"""The parts of a model that one process drives: where they are, and the names that they have in the model.

    Pipeline                 ──► the modules of each stage, under their names in the un-split model
    RRef, RemoteModule       ──► the value on its owner, where the search goes on
    module                   ──► itself with its children, and its attributes that are no children, as a list of RRefs

Names are paths of attributes and indices: `layers.0` is the first item of the attribute `layers`, a module or a list of
RRefs. An RRef in the attribute `table_rref` is the part `table`.

Guarantees
- A search only reads. It looks into modules, lists and dicts, and into the attributes of the model itself and of the
  values of RRefs, not into those of any other object.
- Each owner looks at the values of its own RRefs; no module is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from rpcbench.compare.capture import NamedPart, join_name
from rpcbench.nn import RemoteModule
from rpcbench.pipeline import Pipeline
from rpcbench.rpc import RRef

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


class RemotePart(NamedTuple):
    """A part of the model on another worker."""

    name: str  # in the model
    rref: RRef[Any]
    names: tuple[str, ...] | None  # of a stage of a pipeline: that of each of its modules


class FoundParts(NamedTuple):
    """The parts of a model, as one process sees them."""

    here: list[NamedPart]
    elsewhere: list[RemotePart]


def find_parts(model: Any) -> FoundParts:
    """Return the parts of a model that this process has made."""
    return _Search().look_at("", model)


def open_part(part: RemotePart) -> FoundParts:
    """Return the value of an RRef of this process, as parts. Waits for its creation, and raises the error of that."""
    value = part.rref.local_value()
    if part.names is None:
        return _Search().look_at(part.name, value)
    here = [(join_name(part.name, name), each) for name, each in zip(part.names, value, strict=True)]
    return FoundParts(here, [])


class _Search:
    """One search of this process."""

    def __init__(self) -> None:
        self._found = FoundParts([], [])
        self._seen: set[int] = set()

    def look_at(self, name: str, value: Any) -> FoundParts:
        """Look at a model, or at the value of an RRef."""
        self._take_value(name, value)
        if not isinstance(value, nn.Module | Pipeline | RRef) and hasattr(value, "__dict__"):
            self._take_items(name, vars(value))
        return self._found

    def _take_value(self, name: str, value: Any) -> None:
        if id(value) in self._seen:
            return
        if isinstance(value, Pipeline | RemoteModule | RRef | nn.Module | Mapping | list | tuple):
            self._seen.add(id(value))
        if isinstance(value, Pipeline):
            self._found.elsewhere.extend(_parts_of_pipeline(name, value))
        elif isinstance(value, RemoteModule):
            self._take_value(name, value.get_module_rref())
        elif isinstance(value, RRef):
            self._take_rref(name, value)
        elif isinstance(value, nn.Module):
            self._found.here.append((name, value))
            self._take_attributes(name, value)
        elif isinstance(value, Mapping):
            self._take_items(name, value)
        elif isinstance(value, list | tuple):
            self._take_items(name, dict(enumerate(value)))

    def _take_items(self, name: str, items: Mapping[Any, Any]) -> None:
        for key, each in items.items():
            own = str(key).removesuffix("_rref") if isinstance(each, RRef | RemoteModule) else str(key)
            self._take_value(join_name(name, own), each)

    def _take_rref(self, name: str, rref: RRef[Any]) -> None:
        if rref.is_owner():
            self.look_at(name, rref.local_value())
        else:
            self._found.elsewhere.append(RemotePart(name, rref, None))

    def _take_attributes(self, name: str, module: nn.Module) -> None:
        """Take the other attributes of the module and its children: lists of RRefs, and modules elsewhere."""
        own = {key: each for key, each in vars(module).items() if key not in _TORCH_ATTRIBUTES}
        remote = {key: each for key, each in module._modules.items() if isinstance(each, RemoteModule)}
        self._take_items(name, own | remote)
        for key, child in module._modules.items():
            if child is not None and not isinstance(child, RemoteModule):
                self._take_attributes(join_name(name, key), child)


def _parts_of_pipeline(name: str, pipe: Pipeline) -> Iterator[RemotePart]:
    for stage in pipe.stages:
        names = tuple(prefix.removesuffix(".") for prefix in stage.prefixes)
        yield RemotePart(name, pipe.worker_group.modules[stage.index], names)
