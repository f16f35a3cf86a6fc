"""What names of dimensions cost: operations on small tensors, in this process, nothing sent.

The time of each includes torch's own, so what names add is below it: a stricter goal than one for the difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from torch import Tensor

from rpcbench import named
from rpcbench.bench.operation import Api, Operation

_MANY = 100


def operations(api: Api, draw: random.Random) -> Operation:
    """A hundred of one kind: element by element, a sum by name, a view, or a product."""
    rows, columns = draw.randint(2, 8), draw.randint(2, 8)
    x, bias = named.rand(rows, columns, names=("N", "C")), named.rand(columns, names=("C",))
    kinds: list[tuple[Callable[[], Tensor], tuple[str, ...]]] = [
        (lambda: x + bias, ("N", "C")),
        (lambda: x * x, ("N", "C")),
        (lambda: x.abs(), ("N", "C")),
        (lambda: x.sum("N"), ("C",)),
        (lambda: x.transpose("N", "C"), ("C", "N")),
        (lambda: x @ bias, ("N",)),
    ]
    function, names = draw.choice(kinds)

    def run() -> Tensor:
        for _ in range(_MANY):
            made = function()
        return made

    return Operation(run, lambda result: named.names_of(result) == names, calls=_MANY)
