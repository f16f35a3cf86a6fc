"""One call of an operator, as rules look at it: its arguments, and the names of the tensors among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from rpcbench.named.dims import Names, listed, position, shown


class Along(Protocol):
    """What a row of the table says of its operator's arguments."""

    @property
    def dims(self) -> tuple[tuple[int, str], ...]: ...
    @property
    def keepdim(self) -> int: ...
    @property
    def default(self) -> int | None: ...


def names_of(tensor: torch.Tensor) -> Names:
    """The names of a tensor's dimensions; of any tensor, so all are None where it is no named one."""
    names: Names | None = getattr(tensor, "_dim_names", None)
    return (None,) * tensor.dim() if names is None else names


class Call:
    """The first argument is always there by position; dimensions are indices once `resolve` has been called."""

    __slots__ = ("args", "kwargs", "row")

    def __init__(self, row: Along, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not args:
            first = next((key for key in ("input", "self", "tensors") if key in kwargs), None)
            if first is not None:
                kwargs = dict(kwargs)
                args = (kwargs.pop(first),)
        self.row, self.args, self.kwargs = row, args, kwargs

    def resolve(self) -> None:
        """Put indices in place of names of dimensions."""
        names = names_of(self.args[0] if isinstance(self.args[0], torch.Tensor) else self.args[0][0])
        for place, keyword in self.row.dims:
            given = self.arg(place, keyword)
            if not isinstance(given, str | list | tuple):
                continue
            if len(self.args) > place:
                self.args = (*self.args[:place], position(given, names), *self.args[place + 1 :])
            else:
                self.kwargs = {**self.kwargs, keyword: position(given, names)}

    def arg(self, place: int, keyword: str, default: Any = None) -> Any:
        """An argument, however it is given."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(keyword, default)

    def names(self, place: int = 0, keyword: str = "") -> Names:
        """The names of the tensor at that place."""
        return names_of(self.arg(place, keyword))

    def dim(self, which: int = 0) -> Any:
        """The dimension, or dimensions, that the call is about; None for all."""
        place, keyword = self.row.dims[which]
        return self.arg(place, keyword, self.row.default)

    def keepdim(self) -> bool:
        """Whether dimensions that are summed over stay, of size 1."""
        place = self.row.keepdim
        return bool(place) and bool(self.arg(place, "keepdim", False))

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors it takes, in order, those in a list among them; not the one it writes to."""
        for value in (*self.args, *(value for key, value in self.kwargs.items() if key != "out")):
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from (each for each in value if isinstance(each, torch.Tensor))

    def shown(self) -> str:
        """The tensors as errors show them."""
        return " and ".join(show(tensor) for tensor in self.tensors())


def show(tensor: torch.Tensor) -> str:
    """`(N=32, C=3)`."""
    names = names_of(tensor)
    return shown(names, tensor.shape) if len(names) == tensor.dim() else listed(names)
