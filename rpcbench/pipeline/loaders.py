"""Batches of a loader through a pipeline: scores and outputs of all its samples.

A loader is what is iterated and is no batch: a `DataLoader`, a generator, a list of pairs. A tensor, tuple, dict or
other list is a batch.
A score is a mean over samples, whatever the sizes of batches and micro-batches; a loss that is a sum stays a sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rpcbench.base.errors import PipelineError
from rpcbench.pipeline import microbatch
from rpcbench.pipeline.runs import Runs
from rpcbench.pipeline.tasks import Metric

_EMPTY = "the loader gives no batch; one that is used up, as a generator, must be made anew"


def is_batch(data: Any) -> bool:
    """Whether it is one batch, and no loader."""
    return isinstance(data, torch.Tensor | tuple | list | dict) and not is_list_of_pairs(data)


def is_list_of_pairs(data: Any) -> bool:
    """Whether it is what `list(loader)` gives; so is an empty list."""
    return isinstance(data, list) and all(isinstance(item, tuple | list) and len(item) == 2 for item in data)


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of each batch of a loader. PipelineError where it gives anything else, or nothing."""
    number = -1
    for number, item in enumerate(loader):
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise PipelineError(f"batch {number} of the loader is {_kind(item)}, not a pair of inputs and targets")
        yield item[0], item[1]
    if number < 0:
        raise PipelineError(_EMPTY)


def predicted(runs: Runs, data: Any) -> Any:
    """Outputs for a batch or a loader. Where the loader gives pairs, inputs come first, and targets are left out."""
    if is_batch(data):
        return runs.outputs(data)
    outputs = [runs.outputs(item[0] if isinstance(item, tuple | list) else item) for item in data]
    if not outputs:
        raise PipelineError(_EMPTY)
    return microbatch.join(outputs)


def evaluated(runs: Runs, data: Any, targets: Any, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Loss and metrics of a batch with its targets, or of all pairs of a loader."""
    if targets is None and is_batch(data):
        raise PipelineError("give evaluate a batch and its targets, as evaluate(x, y), or a loader of such pairs")
    if targets is not None and not isinstance(data, torch.Tensor | tuple | list | dict):
        raise PipelineError("give evaluate a batch and its targets, as evaluate(x, y), or a loader, which has both")
    if "loss" in metrics or not (metrics or runs.has_loss):
        raise PipelineError("evaluate needs a loss_fn of the pipeline or metrics, and no metric can be called 'loss'")
    totals: dict[str, float] = {}
    samples = 0
    for x, y in pairs(data) if targets is None else [(data, targets)]:
        for size, scores in runs.scores(x, y, metrics):
            samples += size
            for name, score in scores.items():
                totals[name] = totals.get(name, 0.0) + score * (1 if _is_sum(name, runs) else size)
    return {name: total if _is_sum(name, runs) else total / samples for name, total in totals.items()}


def _is_sum(name: str, runs: Runs) -> bool:
    return name == "loss" and runs.reduction == "sum"


def _kind(item: Any) -> str:
    return f"a {type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
