"""What a leaf is called where it lives: "model.0.weight" or "w", found among variables and shared objects.

Only for the eyes. Nothing of the user's runs: namespaces of plain objects are read as they stand, so it may be called
at any moment, and what cannot be read so has no name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

Named = Iterator[tuple[str, Tensor]]


class Names:
    """Each leaf is looked for once. `shared`: gives the objects of this process that others have RRefs of."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, leaves: Iterable[Tensor]) -> list[str]:
        """A name for each, or ""."""
        leaves = list(leaves)
        unknown = [leaf for leaf in leaves if leaf not in self._known]
        if unknown:
            found = names(vars(sys.modules["__main__"]), self._shared())
            for leaf in unknown:
                self._known[leaf] = found.get(id(leaf), "")
        return [self._known[leaf] for leaf in leaves]


def names(variables: Mapping[str, Any], shared: Iterable[Any]) -> dict[int, str]:
    """id of a tensor → its name: that of a variable, or else its place in an object that is shared."""
    found: dict[int, str] = {}
    public = {name: value for name, value in dict(variables).items() if not name.startswith("_")}
    for name, tensor in _inside(public):
        found.setdefault(id(tensor), name)
    for value in shared:
        for name, tensor in _inside(_namespace(value)):
            found.setdefault(id(tensor), name)
    return found


def _inside(namespace: Mapping[str, Any]) -> Named:
    """Tensors of a namespace, and those of its modules."""
    for name, value in namespace.items():
        if Tensor in type(value).__mro__:
            yield name, value
        elif nn.Module in type(value).__mro__:
            yield from _parameters(value, f"{name}.")


def _parameters(module: Any, prefix: str) -> Named:
    own = _attributes(module)
    yield from ((prefix + name, tensor) for name, tensor in own.get("_parameters", {}).items() if tensor is not None)
    for name, inner in own.get("_modules", {}).items():
        if inner is not None:
            yield from _parameters(inner, f"{prefix}{name}.")


def _namespace(value: Any) -> dict[str, Any]:
    """Of an object that is shared; a tensor by itself has no name there."""
    kinds = type(value).__mro__
    return dict(_parameters(value, "")) if nn.Module in kinds else {} if Tensor in kinds else _attributes(value)


def _attributes(value: Any) -> dict[str, Any]:
    """The object's own dictionary, copied in one step, with no property or `__getattr__` of its class asked."""
    with contextlib.suppress(AttributeError):
        return dict(object.__getattribute__(value, "__dict__"))
    return {}
