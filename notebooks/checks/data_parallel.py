"""Checks of lesson 30."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from checks import differ, dots_left, exercise, name_slip, read, require, returned, right, shown, trying
from checks import hint as hint
from checks import solution as solution
from checks.on_ranks import Run, run_on_ranks
from rpcbench.pipeline.schedules import one_f_one_b
from rpcbench.pipeline.simulate import simulate


@exercise(
    "Print the numbers of the replicas' operations again: the difference between two neighbours is always the same.",
    "`range` has a third argument, the step; the result must be a list.",
)
def share(answer: Callable[[int, int, int], list[int]]) -> None:
    """`answer(microbatches, replicas, replica)` is what the replica gets: dealt like cards."""
    for microbatches, replicas in ((8, 2), (6, 3), (5, 2), (2, 4), (3, 1), (8, 3)):
        for replica in range(replicas):
            with trying():
                found = returned(answer(microbatches, replicas, replica))
            names = f"Of {microbatches} micro-batches and {replicas} replicas, replica {replica}"
            found = read(found, [int], f"{names} should get a list of whole numbers")
            there = range(microbatches)
            require(all(number in there for number in found), f"{names} gets {shown(found)}: some are not there.")
            wanted = [number for number in there if number % replicas == replica]
            require(found == wanted, f"{names} should get {wanted}, not {shown(found)}.")
    right("Each micro-batch goes to one replica, and none gets two more than another.")


@exercise(
    "How much should a replica with 7 of 13 samples count? The mean of the means counts each replica alike.",
    "A gradient times its number of samples is the gradient of a sum over samples; sums can be added up.",
)
def combined(answer: Callable[[Sequence[torch.Tensor], Sequence[int]], torch.Tensor]) -> None:
    """`answer(gradients, samples)` is the gradient of the mean over all samples."""
    made = torch.Generator().manual_seed(11)
    cases: list[tuple[list[int], tuple[int, ...], torch.dtype]] = [
        ([4, 4], (3,), torch.double),
        ([7, 6], (3,), torch.double),
        ([5, 1, 1], (3,), torch.double),
        ([9], (3,), torch.double),
        ([2, 3, 4, 5], (3,), torch.double),
        ([7, 6], (2, 3), torch.double),  # the gradient of a matrix
        ([1, 4, 2], (), torch.double),  # that of one number
        ([3, 5], (2, 2), torch.float),
    ]
    for samples, shape, kind in cases:
        of_each = torch.rand(sum(samples), *shape, generator=made, dtype=torch.double).to(kind)
        gradients = [part.mean(0) for part in of_each.split(samples)]
        given = [gradient.clone() for gradient in gradients]
        asked = f"With {samples} samples on the replicas"
        with trying(f"{asked}, and gradients of {str(kind).removeprefix('torch.')} in the shape {shape}, it"):
            found: Any = returned(answer(given, list(samples)))
        require(isinstance(found, torch.Tensor), f"A tensor is wanted, not {shown(found)}.")
        require(found.shape == shape, f"It should have the shape of a gradient, {shape}, not {tuple(found.shape)}.")
        far = float((found - of_each.mean(0)).abs().max())
        near = 1e-9 if kind == torch.double else 1e-5
        told = "" if shape == (3,) else f" Here a gradient has the shape {shape}."
        slip = _combined_slip(found, gradients, samples, near)
        require(far < near, f"{asked} it is {far:.2g} away from the gradient of all.{told}{slip}")
        same = len(given) == len(gradients) and all(map(torch.equal, given, gradients))
        require(same, "The right gradient; but the gradients that were given have changed. Make a new tensor.")
    right("A replica counts as much as it has samples.")


def _combined_slip(found: Tensor, gradients: Sequence[Tensor], samples: Sequence[int], near: float) -> str:
    """Return the sentence on the mistake that may have led to an answer of `combined`; empty if none is known."""
    total: Any = sum(gradient * count for gradient, count in zip(gradients, samples, strict=True))
    plain: Any = sum(gradients)
    slips = {
        "It is the mean of the replicas' means, in which each replica counts alike.": plain / len(samples),
        "It is the sum of the replicas' means.": plain,
        "It is divided by the number of replicas, but the weights are numbers of samples.": total / len(samples),
        "It is a sum over the samples, not a mean.": total,
    }
    return next((f" {said}" for said, slip in slips.items() if torch.allclose(found, slip, atol=near)), "")


@exercise(
    "Two terms: the formula with p = workers / replicas and m = microbatches / replicas, and the all-reduce.",
    "The all-reduce sends 2 (r - 1) / r of what a worker has, and a worker has 1 / p of the gradients.",
)
def step_time(answer: Callable[[int, int, int, float], float]) -> None:
    """`answer(workers, microbatches, replicas, reduce)` is what the schedule takes, and the all-reduce after it."""
    cases = ((4, 8, 1, 5.0), (4, 8, 2, 0.0), (8, 16, 4, 3.0), (4, 8, 4, 1.0), (12, 24, 3, 7.0), (6, 6, 2, 0.5))
    for workers, microbatches, replicas, reduce in cases:
        with trying():
            found = returned(answer(workers, microbatches, replicas, reduce))
        stages = workers // replicas
        played = simulate(one_f_one_b(stages, microbatches // replicas)).makespan / stages
        wanted = played + 2 * (replicas - 1) / replicas * reduce / stages
        names = (
            f"{workers} workers as {replicas} times {stages}, {microbatches} micro-batches, an all-reduce of {reduce:g}"
        )
        found = read(found, float, f"{names}: a number is wanted")
        slip = _slip(found, workers, microbatches, replicas, reduce)
        told = differ(wanted, found, "; you say ")
        require(abs(found - wanted) < 1e-6 * wanted, f"{names}: a step takes {told}.{slip}")
    right("The same as the schedule played through, operation by operation.")


def _slip(found: float, workers: int, microbatches: int, replicas: int, reduce: float) -> str:
    """Return the sentence on the mistake that may have led to an answer of `step_time`; empty if none is known."""
    stages, share = workers // replicas, microbatches / replicas
    turns, sending = 3 / stages * (share + stages - 1), 2 * (replicas - 1) / replicas * reduce / stages
    slips = {
        f"That counts all {microbatches} micro-batches for each replica; {replicas} replicas share them.":
            3 / stages * (microbatches + stages - 1) + sending,
        "That has no bubble: p - 1 turns pass before the pipeline is full.": 3 / stages * share + sending,
        "That lets each stage take as long as the whole model.": 3 * (share + stages - 1) + sending,
        "That leaves out the all-reduce.": turns,
        "That has half of the rounds of an all-reduce: there are 2 (r - 1).": turns + sending / 2,
        "A worker has the gradients of its own stage alone, not of the whole model.": turns + sending * stages,
        "In each round a worker sends 1 / r of its gradients.": turns + sending * replicas,
        "Stages and replicas have changed places: with r replicas there are workers / r stages.":
            3 / replicas * (microbatches / stages + replicas - 1) + 2 * (stages - 1) / stages * reduce / replicas,
    }  # fmt: skip
    return name_slip(found, slips, 1e-6)


CASES: list[tuple[int, int, dict[int, float], dict[int, float], float]] = [
    # workers, micro-batches, time and bytes by replicas, budget
    (4, 8, {1: 245, 2: 200, 4: 130}, {1: 5, 2: 8.5, 4: 16}, 10),
    (8, 16, {1: 372, 2: 265, 4: 230, 8: 260}, {1: 3, 2: 5, 4: 9, 8: 17}, 100),
    (8, 16, {1: 372, 2: 265, 4: 230, 8: 260}, {1: 3, 2: 5, 4: 9, 8: 17}, 9),
    (6, 12, {1: 90, 2: 80, 3: 70, 6: 75}, {1: 1, 2: 2, 3: 3, 6: 6}, 6),
    (12, 8, {1: 50, 2: 40, 4: 30}, {1: 1, 2: 2, 4: 3}, 3),
    (4, 4, {1: 10, 2: 12, 4: 14}, {1: 1, 2: 2, 4: 3}, 3),
    (4, 4, {1: 14, 2: 12, 4: 10}, {1: 1, 2: 2, 4: 3}, 3),
    (4, 8, {1: 14, 2: 12, 4: 10}, {1: 5, 2: 6, 4: 7}, 4),
    # the smallest number of replicas does not fit, and larger ones do; their times rise, and then fall
    (8, 8, {1: 10, 2: 30, 4: 40, 8: 20}, {1: 9, 2: 3, 4: 8, 8: 7}, 8),
    (2, 2, {1: 7e12, 2: 6e12}, {1: 3e12, 2: 6e12}, 4e12),
]


# -- two dimensions of workers
LAYOUTS = [(2, [7, 3]), (1, [7, 3, 5, 1]), (4, [6])]  # stages of a pipeline, and samples of each replica
OWN = [torch.tensor([float(rank + 1), 10.0 * rank, -(2.0**rank)], dtype=torch.double) for rank in range(4)]  # gradients


@exercise(
    "Rank r has stage r % stages. Which ranks have the same one? And a replica with more samples counts for more.",
    "Begin with `mesh = init_device_mesh('cpu', (dist.get_world_size() // stages, stages), mesh_dim_names=('dp', "
    "'pp'))`: the ranks of a column are `mesh['dp'].get_group()`.",
)
def on_ranks(answer: Callable[[Tensor, int, int], Tensor]) -> None:
    """`answer(gradient, samples, stages)` runs on each worker: the gradient of its stage over all samples."""
    for stages, samples in LAYOUTS:
        given = [(own.clone(), samples[rank // stages], stages) for rank, own in enumerate(OWN)]
        ran = run_on_ranks(gradient_here, answer, given)
        for rank, (found, after) in enumerate(ran.values):
            _of_its_stage(rank, returned(found), stages, samples)
            require(torch.equal(after, OWN[rank]), f"Rank {rank}: `gradient` was changed; return a new tensor.")
        _little_sent(ran)
    right("Each stage has talked to its copies in the other replicas, and to no other stage.")


def gradient_here(answer: Callable[[Tensor, int, int], Any], gradient: Tensor, *rest: int) -> tuple[Any, Tensor]:
    """On a worker: what the answer returns, and the gradient after it."""
    return answer(gradient, *rest), gradient


def _of_its_stage(rank: int, found: Any, stages: int, samples: Sequence[int]) -> None:
    require(isinstance(found, Tensor), f"Rank {rank} returns {shown(found)}, not a tensor.")
    copies = [other for other in range(len(OWN)) if other % stages == rank % stages]
    replica = [other for other in range(len(OWN)) if other // stages == rank // stages]
    everybody, pair = [*range(len(OWN))], [rank % 2, rank % 2 + 2]  # which have the same stage of two
    of_two = {
        f"It is that of ranks {pair[0]} and {pair[1]}, which have the same stage of two, not of {stages}.":
            _mean(pair, [samples[other // stages] for other in pair]),
    }  # fmt: skip
    slips = {
        "It is its own gradient: nothing was added.": OWN[rank],
        f"It is the plain mean over the replicas, and they have {' and '.join(map(str, samples))} samples.":
            _mean(copies, [1] * len(copies)),
        "It is a sum over the replicas, not a mean.": _mean(copies, [1] * len(copies)) * len(copies),
        "It is a sum over the samples, not a mean.": _mean(copies, samples) * sum(samples),
        "The samples of all ranks were counted, and not those of the replicas alone: each sample passes all stages.":
            _mean(copies, samples) / stages,
        **(of_two if stages != 2 else {}),
        "It is that of both stages of one replica.": _mean(replica, [1] * len(replica)),
        "It is the sum of both stages of one replica.": _mean(replica, [1] * len(replica)) * len(replica),
        "It is that of all ranks: two stages, which have different parameters, were added up.":
            _mean(everybody, [samples[other // stages] for other in everybody]),
        "Two stages, which have different parameters, were added up.": _mean(everybody, [1] * 4) * 4,
    }  # fmt: skip
    wanted = _mean(copies, samples)
    slip = next((f" {told}" for told, other in slips.items() if torch.allclose(found, other)), "")
    close = found.shape == wanted.shape and torch.allclose(found, wanted)
    require(close, f"Rank {rank}, stage {rank % stages} of replica {rank // stages}, returns {_short(found)}, not "
            f"{_short(wanted)}.{slip}")  # fmt: skip


def _short(numbers: Tensor) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in numbers.flatten().tolist())}]"


def _mean(ranks: Sequence[int], weights: Sequence[int]) -> Tensor:
    return sum(OWN[rank] * weight for rank, weight in zip(ranks, weights, strict=True)) / sum(weights)  # type: ignore[return-value]


def _little_sent(ran: Run) -> None:
    for rank, calls in enumerate(ran.calls):
        told = f"Right; but in the trace rank {rank}"
        others = sorted({call.op for call in calls} - {"all_reduce"})
        require(not others, f"{told} calls {', '.join(others)}. All-reduces among the copies of a stage are enough.")
        sent = sum(call.size for call in calls)
        require(sent <= OWN[0].nbytes + 8, f"{told} adds up {sent} bytes; its gradient and a number have "
                f"{OWN[0].nbytes + 8}.")  # fmt: skip


@exercise(
    "First list the layouts that are possible, then those of them that fit, then take the fastest.",
    "`min(candidates, key=time, default=None)` returns the candidate with the least time, or None if there is none.",
)
def best(answer: Callable[..., int | None]) -> None:
    """`answer(workers, microbatches, time, held, budget)` is the number of replicas of the fastest layout that fits."""
    for workers, microbatches, times, sizes, budget in CASES:
        fits = [replicas for replicas in times if sizes[replicas] <= budget]
        wanted = min(fits, key=lambda replicas: times[replicas], default=None)
        case = f"{workers} workers, {microbatches} micro-batches, room for {budget:g}"
        given = "; ".join(f"{r} replicas: {times[r]:g} ms, {sizes[r]:g} bytes" for r in times)
        with trying():
            found = answer(workers, microbatches, _of(times, case, "time"), _of(sizes, case, "held"), budget)
        if workers == 4 and budget == 10 and dots_left():  # the first case, which has a best layout
            returned(found)
        quickest = min(times, key=lambda replicas: times[replicas])
        told = ""
        if found is None and wanted is not None and sizes[quickest] > budget:
            told = f" The fastest layout of all, {quickest} replicas, does not fit; of those that fit take the fastest."
        if found is not None:
            found = read(found, int, f"{case}: a whole number or None is wanted")
        require(found == wanted, f"{case} ({given}): the best has {wanted} replicas, not {found}.{told}")
    right("Possible, then small enough, then fastest: in this order a planner works.")


def _of(values: dict[int, float], case: str, name: str) -> Callable[[int], float]:
    def of(replicas: int) -> float:
        require(replicas in values, f"{case}: {name}({shown(replicas)}) was asked, and that layout is not possible.")
        return values[replicas]

    return of
