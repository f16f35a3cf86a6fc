"""Batch normalization over micro-batches: a warning about its effect, and running statistics of whole batches.

In training a batch norm sees one micro-batch at a time and normalizes by its mean and variance, in every mode here, so
gradients are not those of the whole batch. By default its running statistics, for evaluation, move once for each
micro-batch; "deferred" ones move once a step, by mean and variance of all samples, as in torchgpipe.

Guarantees of deferred ones: a recomputed forward counts once; a step that fails here moves nothing; names and values of
buffers are those of torch's own layers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline.split import Stage

WARN, MICROBATCH, DEFERRED = "warn", "microbatch", "deferred"
_WARNING = (
    "batch norms in a pipeline that trains see one micro-batch at a time ({names}): they normalize by its mean and "
    "variance, so gradients are not those of the whole batch, and running statistics move once for each of the {count} "
    'micro-batches. Pipeline(batch_norm="deferred") moves these once a step, by the whole batch; "microbatch" is what '
    "you have now, without this warning; GroupNorm and LayerNorm do not depend on the batch"
)


def check_mode(batch_norm: str) -> None:
    """Raise PipelineError if `batch_norm` is none of the three modes."""
    if batch_norm not in (WARN, MICROBATCH, DEFERRED):
        raise PipelineError(f"unknown batch_norm {batch_norm!r}; there are '{WARN}', '{MICROBATCH}' and '{DEFERRED}'")


def warn_of_microbatches(stages: Sequence[Stage], microbatches: int) -> None:
    """Issue a UserWarning, at the line that makes the pipeline, with the names of all batch norms."""
    found = [
        stage.unsplit_name(own).rstrip(".")
        for stage in stages
        for own, layer in _batch_norms(stage.module)
        if layer.training
    ]
    if found and microbatches > 1:
        warnings.warn(_WARNING.format(names=", ".join(found), count=microbatches), UserWarning, stacklevel=3)


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, _BatchNorm))


@dataclass(slots=True)
class _Moments:
    """Mean and sum of squared distances from it, for each channel, over all samples so far."""

    count: int = 0
    mean: torch.Tensor | float = 0.0
    squares: torch.Tensor | float = 0.0

    def add_samples(self, samples: torch.Tensor) -> None:
        """Add samples, with channels along dimension 1."""
        dims = [dim for dim in range(samples.dim()) if dim != 1]
        count = samples.numel() // samples.shape[1]
        variance, mean = torch.var_mean(samples.detach().double(), dims, correction=0)  # double: sums lose no digits
        self.merge_moments(count, mean, variance * count)

    def merge_moments(self, count: int, mean: torch.Tensor, squares: torch.Tensor) -> None:
        total = self.count + count
        apart = mean - self.mean  # joined by distance of the means: no cancellation
        self.mean = self.mean + apart * (count / total)
        self.squares = self.squares + squares + apart**2 * (self.count * count / total)
        self.count = total


class Deferred:
    """The batch norms of these modules that have running statistics, which move only by `step_scope`."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._moments: dict[Any, _Moments] = {}
        self._counting = False  # whether forwards count now
        for layer in (layer for module in modules for _, layer in _batch_norms(module)):
            if layer.track_running_stats and layer.running_mean is not None:
                layer.track_running_stats = False  # in training it leaves its buffers alone; in evaluation it uses them
                layer.register_forward_pre_hook(self._add_input)
                self._moments[layer] = _Moments()

    def __bool__(self) -> bool:
        return bool(self._moments)

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Around a step on this worker: at its end the statistics move, unless it fails."""
        self._moments = {layer: _Moments() for layer in self._moments}  # drops those of a step that failed
        yield
        for layer, moments in self._moments.items():
            if moments.count:
                _update_statistics(layer, moments)

    @contextlib.contextmanager
    def forward_scope(self, first: bool) -> Iterator[None]:
        """Around a stage's forward; `first`: not a recomputed one, so it counts."""
        self._counting = first
        try:
            yield
        finally:
            self._counting = False

    # -- over replicas of a module
    def moment_rows(self, module: nn.Module, replica: int, replicas: int) -> list[torch.Tensor]:
        """Return each layer's moments in this step, a row for each replica, of which only the own one is filled."""
        return [
            _make_moment_row(layer, self._moments[layer], replica, replicas) for layer in self._layers_of_module(module)
        ]

    def replace_moments(self, module: nn.Module, summed_rows: Sequence[torch.Tensor]) -> None:
        """Replace the moments of a module's layers by those of all replicas. `summed_rows`: theirs."""
        for layer, rows in zip(self._layers_of_module(module), summed_rows, strict=True):
            moments = self._moments[layer] = _Moments()
            for row in rows:
                if row[0]:  # no samples: zeros
                    moments.merge_moments(int(row[0]), *row[1:].chunk(2))

    def _layers_of_module(self, module: nn.Module) -> list[Any]:
        return [layer for layer in module.modules() if layer in self._moments]

    def _add_input(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self._counting and layer.training:
            self._moments[layer].add_samples(args[0])


def _update_statistics(layer: Any, moments: _Moments) -> None:
    """Update running statistics as torch's own forward does, by these moments."""
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)  # first, as its share depends on it
        share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
        for running, new in (
            (layer.running_mean, moments.mean),
            (layer.running_var, moments.squares / max(moments.count - 1, 1)),  # unbiased, as in torch
        ):
            running.copy_((1 - share) * running.double() + share * new)


def _make_moment_row(layer: Any, moments: _Moments, replica: int, replicas: int) -> torch.Tensor:
    """Return number of samples, means, sums of squares in the row of this replica: (replicas, 1 + 2 * channels)."""
    device = layer.running_mean.device
    rows = torch.zeros(replicas, 1 + 2 * layer.num_features, dtype=torch.double, device=device)
    if moments.count:
        rows[replica, 0] = moments.count
        rows[replica, 1:] = torch.cat([torch.as_tensor(moments.mean), torch.as_tensor(moments.squares)])
    return rows
