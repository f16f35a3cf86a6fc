"""Batches cut into micro-batches and joined again, with the weights that keep gradients exact.

Rule: a batch is a tensor, or tuples, lists and dicts of batches; dimension 0 of every tensor counts the samples. The
mean loss over N samples is the sum of the micro-batches' mean losses, each weighted by its share n_i / N: an unweighted
mean of means gives other gradients as soon as micro-batches are uneven.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils import _pytree

from rpcbench.base.errors import PipelineError, count_noun


def microbatch_sizes(samples: int, microbatches: int) -> list[int]:
    """Return the sizes of micro-batches, as even as possible, larger ones first. PipelineError if one is empty."""
    if microbatches < 1:
        raise PipelineError(f"microbatches must be at least 1, not {microbatches}")
    if not samples:
        raise PipelineError(f"a batch of 0 samples cannot make {count_noun(microbatches, 'micro-batch')}: it is empty")
    if samples < microbatches:
        raise PipelineError(
            f"a batch of {count_noun(samples, 'sample')} cannot make {count_noun(microbatches, 'micro-batch')}: "
            "give larger batches, or fewer micro-batches"
        )
    small, larger = divmod(samples, microbatches)
    return [small + 1] * larger + [small] * (microbatches - larger)


def split_batch(batch: Any, microbatches: int) -> list[Any]:
    """Return the micro-batches: views of the batch's tensors, in its structure. PipelineError if these do not fit."""
    ends = accumulate(microbatch_sizes(count_samples(batch), microbatches), initial=0)
    return [part(batch, begin, end) for begin, end in pairwise(ends)]


@lru_cache(maxsize=64)
def microbatch_bounds(samples: int, microbatches: int, first: int, every: int) -> dict[int, tuple[int, int]]:
    """Return begin and end of each micro-batch within a `share_of_replica`, by its number in the whole batch."""
    numbers = range(first, microbatches, every)
    own = [microbatch_sizes(samples, microbatches)[number] for number in numbers]
    return dict(zip(numbers, pairwise(accumulate(own, initial=0)), strict=True))


def share_of_replica(batch: Any, microbatches: int, first: int, every: int) -> Any:
    """Return every `every`-th micro-batch from the `first` on, as one batch; None if there are none."""
    if every == 1:
        return batch
    own = split_batch(batch, microbatches)[first::every]
    return join_microbatches(own) if own else None


def part(batch: Any, begin: int, end: int) -> Any:
    """Return some samples of a batch, with an autograd history and version counter of their own."""
    # `.data`, so that an in-place change in one micro-batch does not invalidate tensors that another one has saved.
    return map_tensors(batch, lambda tensor: tensor[begin:end].data.requires_grad_(tensor.requires_grad))


def map_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the batch, in its structure, with `change` applied to each of its tensors."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return _like_dict(batch, {key: map_tensors(value, change) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        return _rebuild_like(batch, [map_tensors(item, change) for item in batch])
    return _pytree.tree_map_only(torch.Tensor, change, batch)  # a class of the user's, registered with _pytree


def count_samples(batch: Any) -> int:
    """Return the number of samples. PipelineError if tensors disagree, none is there, or other values are in it."""
    lengths: dict[int, str] = {}  # length -> path of the first tensor with it
    for path, tensor in _iterate_tensors(batch, "batch"):
        if tensor.dim() == 0:
            raise PipelineError(f"{path} has no dimension to cut: dimension 0 of every tensor must count the samples")
        lengths.setdefault(tensor.shape[0], path)
    if not lengths:
        raise PipelineError("the batch has no tensor in it")
    if len(lengths) > 1:
        lengths_text = ", ".join(f"{path} has {length}" for length, path in lengths.items())
        raise PipelineError(f"the tensors of a batch must have the same number of samples: {lengths_text}")
    return next(iter(lengths))


def loss_weights(sizes: Sequence[int], reduction: str = "mean", whole: int | None = None) -> list[float]:
    """Return factors by which the micro-batches' losses add up to the whole batch's: shares for "mean", ones for "sum".
    The shares are of `whole` samples, by default of all in these micro-batches. They are exact if the loss is a mean or
    sum over samples, but not if it leaves samples out, as `ignore_index` does."""
    if reduction == "mean":
        return [size / (whole or sum(sizes)) for size in sizes]
    if reduction == "sum":
        return [1.0] * len(sizes)
    raise PipelineError(f"unknown loss reduction {reduction!r}; there are 'mean' and 'sum'")


@lru_cache(maxsize=64)
def batch_loss_weights(samples: int, microbatches: int, reduction: str, whole: int | None) -> list[float]:
    return loss_weights(microbatch_sizes(samples, microbatches), reduction, whole)  # cached: the same in each step


def join_microbatches(parts: Sequence[Any]) -> Any:
    """Return the batch that was cut into these parts, in their order."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, dict):
        return _like_dict(first, {key: join_microbatches([part[key] for part in parts]) for key in first})
    return _rebuild_like(first, [join_microbatches(column) for column in zip(*parts, strict=True)])


def _rebuild_like(batch: Any, items: Sequence[Any]) -> Any:
    """Return a list, tuple or named tuple of the same class as `batch`."""
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)


def _like_dict(batch: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the same class, as transformers' outputs are, with other values under the same keys."""
    if type(batch) is dict:
        return items
    _, spec = _pytree.tree_flatten(batch, is_leaf=lambda value: value is not batch)
    if not spec.is_leaf():  # the class is registered with _pytree
        made: dict[Any, Any] = _pytree.tree_unflatten(items.values(), spec)
        return made
    made = copy.copy(batch)  # a class that cannot be made from items alone, as defaultdict
    made.update(items)
    return made


def _iterate_tensors(batch: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a batch with its path, for errors. PipelineError for anything that is not a batch."""
    if isinstance(batch, torch.Tensor):
        yield path, batch
    elif isinstance(batch, dict):
        for key, value in batch.items():
            yield from _iterate_tensors(value, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, item in enumerate(batch):
            yield from _iterate_tensors(item, f"{path}[{index}]")
    else:
        raise PipelineError(f"{path} is {type(batch).__name__}; a batch is tensors, in tuples, lists or dicts")
