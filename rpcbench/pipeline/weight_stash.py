"""An experiment: weights that change within a step, as the schedule "async" has it (PipeDream).

Guarantees
- A forward computes with the newest weights of its stage, and its backward with the same ones, whatever updates come
  in between: each version that is still needed is kept, once.
- An update is a step of the stage's optimizer with the gradients of one micro-batch, as if it were a batch of its own.

Source: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from rpcbench.optim import LocalOptimizer
from rpcbench.pipeline.exchange import Gradients
from rpcbench.pipeline.ops import Kind, Op, places_in

Leaves = list[tuple[Tensor, Tensor]]
_Version = dict[str, Tensor]


class WeightStash:
    """The weights of one worker's stages in one step. `weights` scale the micro-batches' losses, which updates undo."""

    def __init__(
        self,
        plan: str,
        modules: Mapping[int, nn.Module],
        optimizers: Mapping[int, LocalOptimizer | None],
        weights: Sequence[float],
    ) -> None:
        self._stages = {stage for stage, _ in places_in(plan, Kind.UPDATE)}
        self._modules, self._optimizers, self._weights = modules, optimizers, weights
        self._newest: dict[int, _Version] = {}
        self._used: dict[tuple[int, int], _Version] = {}
        self._gradients: dict[tuple[int, int], Leaves] = {}

    def forward(self, op: Op, values: Sequence[Any]) -> Any:
        """What the stage's module makes of these values; with the weights it had the first time for a micro-batch."""
        module = self._modules[op.stage]
        if op.stage not in self._stages:
            return module(*values)
        if op.stage not in self._newest:
            self._newest[op.stage] = {n: p.detach().clone().requires_grad_() for n, p in _trained(module).items()}
        version = self._used.setdefault((op.stage, op.microbatch), self._newest[op.stage])
        return functional_call(module, version, tuple(values))

    def parameters(self, op: Op, own: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those that the micro-batch's forward used: `own`, or the copies that stand for them, in the same order."""
        version = self._used.get((op.stage, op.microbatch))
        return own if version is None else list(version.values())

    def keep(self, op: Op, gradients: Gradients) -> bool:
        """Keep the gradients of a micro-batch for its update; False for a stage that has no updates."""
        version = self._used.pop((op.stage, op.microbatch), None)
        if version is None:
            return False
        params = _trained(self._modules[op.stage])
        scale = self._weights[op.microbatch]
        self._gradients[op.stage, op.microbatch] = [
            (params[name], gradient / scale)
            for name, gradient in zip(version, gradients, strict=True)
            if gradient is not None
        ]
        return True

    def update(self, op: Op) -> None:
        """One step of the stage's optimizer with the gradients of this micro-batch."""
        gradients = dict(self._gradients.pop((op.stage, op.microbatch), ()))
        optimizer = self._optimizers[op.stage]
        if optimizer is not None:
            optimizer.step_with(gradients)
        self._newest.pop(op.stage, None)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}
