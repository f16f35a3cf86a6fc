"""Checks of lesson 30."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from checks import require, returned, right, shown, trying
from rpcbench.pipeline.schedules import one_f_one_b
from rpcbench.pipeline.simulate import simulate


def share(answer: Callable[[int, int, int], Sequence[int]]) -> None:
    """`answer(microbatches, replicas, replica)` is what the replica gets: dealt like cards."""
    for microbatches, replicas in ((8, 2), (6, 3), (5, 2), (2, 4), (3, 1)):
        dealt: list[int] = []
        for replica in range(replicas):
            with trying():
                numbers = list(returned(answer(microbatches, replicas, replica)))
            names = f"Of {microbatches} micro-batches and {replicas} replicas, replica {replica}"
            there = range(microbatches)
            require(all(number in there for number in numbers), f"{names} gets {numbers}: some are not there.")
            wanted = [number for number in range(microbatches) if number % replicas == replica]
            require(numbers == wanted, f"{names} should get {wanted}, not {shown(numbers)}.")
            dealt += numbers
        require(sorted(dealt) == list(range(microbatches)), f"{sorted(dealt)} are dealt, of {microbatches}.")
    right("Each micro-batch goes to one replica, and none gets two more than another.")


def combined(answer: Callable[[Sequence[torch.Tensor], Sequence[int]], torch.Tensor]) -> None:
    """`answer(gradients, samples)` is the gradient of the mean over all samples."""
    made = torch.Generator().manual_seed(11)
    for samples in ([4, 4], [7, 6], [5, 1, 1], [9]):
        of_each = torch.rand(sum(samples), 3, generator=made, dtype=torch.double)
        gradients = [part.mean(0) for part in of_each.split(samples)]
        with trying():
            found: Any = returned(answer([gradient.clone() for gradient in gradients], list(samples)))
        require(isinstance(found, torch.Tensor), f"A tensor is wanted, not {shown(found)}.")
        require(found.shape == (3,), f"It should have the shape of a gradient, (3,), not {tuple(found.shape)}.")
        far = float((found - of_each.mean(0)).abs().max())
        require(far < 1e-9, f"With {samples} samples on the replicas it is {far:.2g} away from the gradient of all.")
    right("A replica with more samples has more to say.")


def step_time(answer: Callable[[int, int, int, float], float]) -> None:
    """`answer(workers, microbatches, replicas, reduce)` is what the schedule takes, and the all-reduce after it."""
    for workers, microbatches, replicas, reduce in ((4, 8, 1, 5.0), (4, 8, 2, 0.0), (8, 16, 4, 3.0), (4, 8, 4, 1.0)):
        with trying():
            found = returned(answer(workers, microbatches, replicas, reduce))
        stages = workers // replicas
        played = simulate(one_f_one_b(stages, microbatches // replicas)).makespan / stages
        wanted = played + 2 * (replicas - 1) / replicas * reduce / stages
        names = (
            f"{workers} workers as {replicas} times {stages}, {microbatches} micro-batches, an all-reduce of {reduce:g}"
        )
        require(
            isinstance(found, float | int) and abs(found - wanted) < 1e-9,
            f"{names}: a step takes {wanted:.4g}; you say {shown(found)}.",
        )
    right("Now you can choose before you start a single worker.")
