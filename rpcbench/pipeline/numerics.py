"""How stages compute, where it is not as torch does by itself: mixed precision, and batch norms.

Guarantees
- A stage's forward runs under autocast as the whole model would in one process; the loss gets outputs of single
  precision at least, and no autocast.
- What is recomputed is computed the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline import batchnorm, microbatch

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Numerics:
    """What `Pipeline` was told of it. autocast: the low precision, or None; batch_norm: see `batchnorm`."""

    autocast: torch.dtype | None = None
    batch_norm: str = batchnorm.WARN

    def check(self) -> None:
        """PipelineError for what is unknown."""
        batchnorm.check(self.batch_norm)
        if self.autocast not in (None, torch.bfloat16):
            raise PipelineError(
                f"autocast must be torch.bfloat16, not {self.autocast!r}: in torch.float16 small gradients vanish, "
                "unless the loss is scaled up, which a pipeline does not do"
            )


class Computing:
    """A worker's side: around its steps, its forwards, and before its losses."""

    def __init__(self, numerics: Numerics, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._autocast = numerics.autocast
        self.norms = batchnorm.Deferred(modules if numerics.batch_norm == batchnorm.DEFERRED else [])
        self._plain = self._autocast is None and not self.norms
        self._devices = {module: _device(module) for module in modules}

    def step(self) -> contextlib.AbstractContextManager[None]:
        return self.norms.step()

    def forward(self, module: nn.Module, first: bool = True) -> contextlib.AbstractContextManager[object]:
        """Around the forward of a stage; `first`: it is no recomputed one."""
        return _NOTHING if self._plain else self._around(module, first)

    @contextlib.contextmanager
    def _around(self, module: nn.Module, first: bool) -> Iterator[None]:
        with self.norms.counting(first), self._casting(module):
            yield

    def _casting(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return _NOTHING if self._autocast is None else torch.autocast(self._devices[module], self._autocast)

    def judged(self, output: Any) -> Any:
        """What loss and metrics get for an output of the last stage."""
        if self._autocast is None:
            return output
        return microbatch.mapped(output, lambda tensor: tensor.float() if tensor.dtype == self._autocast else tensor)


def _device(module: nn.Module) -> str:
    """The kind of device that the module is on."""
    return next((tensor.device.type for tensor in module.parameters()), "cpu")
