"""How much memory a value keeps alive, where that is known without running any code of the value's class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rpcbench.agent.described import is_described

MOST = 1000
"""Of lists and the like at most so many entries are looked at: else it would not be cheap."""


def size_of(value: Any) -> int | None:
    """Bytes of the storages of a tensor, a module, or of those in a list, tuple or dict; None for anything else."""
    if isinstance(value, torch.nn.Module):
        return _sum(_tensors(value))
    if type(value) in (list, tuple, dict) and 0 < len(value) <= MOST:
        found = [each for each in (value.values() if type(value) is dict else value) if _plain(each)]
        return _sum(found) if found else None
    return _sum([value]) if _plain(value) else None


def _plain(value: Any) -> bool:
    """Tensors of torch's own classes and ours: another subclass may do anything when it is asked."""
    kind = type(value)
    known = kind is torch.Tensor or kind is torch.nn.Parameter or is_described(kind)
    return known and value.layout is torch.strided and value.device.type != "meta"


def _tensors(module: torch.nn.Module) -> Iterator[Any]:
    """Those of a module and of the modules in it, from its dicts: its methods may be anybody's."""
    ahead, seen = [module], {id(module)}
    while ahead:
        inner = ahead.pop().__dict__
        yield from inner["_parameters"].values()
        yield from inner["_buffers"].values()
        for child in inner["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                ahead.append(child)


def _sum(tensors: Iterable[Any]) -> int:
    """Each storage once, however many tensors are views of it."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if _plain(each)}
    return sum(storages.values())
