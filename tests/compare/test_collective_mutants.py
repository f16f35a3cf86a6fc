"""A right program of which one collective is left out, or done twice, is never right: for each of its collectives."""

from __future__ import annotations

from functools import partial

import pytest
import recipes
import torch
import torch.distributed as dist
from collective_mutants import REDUCE, Mutator
from recipe_trials import RATE, TRIALS
from test_recipes_compared import make_alone, make_on_rank, step_alone
from tiny_transformer import batch
from torch.distributed.device_mesh import init_device_mesh

import rpcbench

pytestmark = [pytest.mark.process, pytest.mark.long]

MUTATED = ("ddp", "fsdp", "tensor_parallel", "sequence_parallel")  # on a mesh of one dimension
LEAST = {"ddp": 2, "fsdp": 8, "tensor_parallel": 24, "sequence_parallel": 20}  # mutants


def step_mutated(trial, number, twice, model, mesh):
    alone = [dist.new_group([rank]) for rank in range(mesh.size())][mesh.get_local_rank()]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with Mutator(number, twice, alone):
        loss = trial.backward(model, mesh, *batch(0))
    optimizer.step()
    return loss


def list_collectives(trial):
    mesh = init_device_mesh("cpu", tuple(trial.sizes.values()), mesh_dim_names=tuple(trial.sizes))
    model = getattr(recipes, trial.recipe)(trial.model(), mesh)
    with Mutator(-1, False, None) as mutator:
        trial.backward(model, mesh, *batch(0))
    return mutator.seen


@pytest.mark.parametrize("recipe", MUTATED)
def test_each_collective_that_is_left_out_or_doubled_is_found(four: rpcbench.Cluster, recipe: str) -> None:
    number = next(n for n, trial in enumerate(TRIALS) if trial.recipe == recipe)
    kinds = four.spmd(list_collectives, TRIALS[number])[0]
    mutants = [(n, twice) for n, kind in enumerate(kinds) for twice in (False, True) if kind == REDUCE or not twice]
    assert len(mutants) >= LEAST[recipe]
    missed = []
    for n, twice in mutants:
        report = four.compare(
            reference=(partial(make_alone, number), partial(step_alone, torch.float32)),
            parallel=(partial(make_on_rank, number), partial(step_mutated, TRIALS[number], n, twice)),
            mesh=TRIALS[number].sizes,
        )
        if report.ok:
            missed.append((n, kinds[n], twice))
    assert missed == []
