"""What a program gives a distributed optimizer, and what of it each owner gets.

Guarantees
- Every owner has all the groups, some of them empty, so a group has one number everywhere.
- Parameters are numbered in the order given, and each goes to its owner alone.
- What is no optimizer class, or no RRef, is refused before anything is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rpcbench.optim.local import check_steps_from_gradients
from rpcbench.rpc import RRef

Params = Sequence[RRef[Any]] | Sequence[Mapping[str, Any]]
"""RRefs of parameters, or torch's parameter groups: dicts with "params" (RRefs) and options of their own."""

_WANTED = (
    "DistributedOptimizer takes a list of RRefs of parameters, such as RemoteModule.remote_parameters() gives, "
    'or groups like {{"params": [rref, ...], "lr": 0.1}}, not {}'
)


class Share(NamedTuple):
    """What one owner gets: the groups with its RRefs only, and the numbers of those."""

    groups: list[dict[str, Any]]
    numbers: list[int]


def check_class(optimizer_class: Any) -> None:
    """TypeError for anything but a class, ValueError for one that cannot step from gradients alone."""
    if not isinstance(optimizer_class, type):
        raise TypeError(
            f"DistributedOptimizer takes a class such as torch.optim.SGD, not {_named(optimizer_class)}; each owner "
            "makes an optimizer of that class, with the arguments that follow the parameters"
        )
    check_steps_from_gradients(optimizer_class)


def shares(params_rref: Params) -> dict[int, Share]:
    """What each owner gets, by worker id. ValueError for no parameters, TypeError for what is no RRef."""
    groups = _groups(params_rref)
    found: dict[int, Share] = defaultdict(lambda: Share([{**group, "params": []} for group in groups], []))
    for number, (place, rref) in enumerate(_numbered(groups)):
        share = found[rref.owner().id]
        share.groups[place]["params"].append(rref)
        share.numbers.append(number)
    if not found:
        raise ValueError("optimizer got an empty parameter list")
    return found


def _groups(params_rref: Any) -> list[dict[str, Any]]:
    if isinstance(params_rref, RRef | torch.Tensor | Mapping | str):
        raise TypeError(_WANTED.format(_named(params_rref)))
    given = list(params_rref)
    if not any(isinstance(one, Mapping) for one in given):
        return [{"params": given}]
    for one in given:
        if not isinstance(one, Mapping) or "params" not in one:
            raise TypeError(_WANTED.format(f"{_named(one)} among groups"))
    return [dict(one) for one in given]


def _numbered(groups: list[dict[str, Any]]) -> Iterator[tuple[int, RRef[Any]]]:
    """Each parameter with the place of its group, in the order that counts."""
    for place, group in enumerate(groups):
        params = group["params"]
        for rref in [params] if isinstance(params, RRef) else params:
            if not isinstance(rref, RRef):
                raise TypeError(
                    _WANTED.format(_named(rref)) + ": make one of your own parameters an rpc.RRef(parameter)"
                )
            yield place, rref


def _named(value: Any) -> str:
    """What to call it in an error."""
    if isinstance(value, Mapping):
        return f"a dict with the keys {list(value)}"
    return f"the string {value!r}" if isinstance(value, str) else f"an object of class {type(value).__name__}"
