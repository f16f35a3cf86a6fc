"""What is measured: an operation over an API that is given by name, so it is written once for both sides."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

CALLEE = "worker1"


@dataclass(frozen=True, slots=True)
class Api:
    """`torch.distributed.rpc` or a drop-in for it, with the autograd and optim modules beside it."""

    rpc: Any
    autograd: Any
    optim: Any

    @staticmethod
    def named(name: str) -> Api:
        """`name` is the rpc module's; the others are its siblings."""
        package = name.rpartition(".")[0]
        return Api(*(importlib.import_module(module) for module in (name, f"{package}.autograd", f"{package}.optim")))


@dataclass(frozen=True, slots=True)
class Operation:
    """One unit of work, and whether what it returned is right. `around` is entered around all of them, untimed.

    `calls`: how many calls a unit has.
    """

    run: Callable[[], Any]
    right: Callable[[Any], bool]
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    calls: int = 1


Prepare = Callable[[Api, random.Random], Operation]
