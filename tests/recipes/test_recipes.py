"""Each recipe of `notebooks/recipes.py` trains on four workers as one process does, and each rank keeps its part."""

from __future__ import annotations

import pytest
import recipe_trials
import torch
from recipe_trials import TRIALS, train_alone

import rpcbench

pytestmark = pytest.mark.process

CLOSE = 1e-6
LEAST_GRADIENT = 30 * CLOSE  # a comparison with nothing but zeros would prove nothing
PARTS = {  # of the model's numbers that each rank may have: those of blocks are cut, and the ends are whole or cut
    "ddp": 1.0, "fsdp": 0.27, "tensor_parallel": 0.45, "sequence_parallel": 0.27, "fsdp_and_tensor": 0.36,
    "pipeline_and_tensor": 0.36, "expert_parallel": 0.4, "context_parallel": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("number", range(len(TRIALS)), ids=[trial.recipe for trial in TRIALS])
def test_a_recipe_trains_as_one_process_does(four: rpcbench.Cluster, number: int) -> None:
    trial = TRIALS[number]
    losses, gradients, size = train_alone(trial)
    assert max(losses) > 3.0 and all(each.abs().max() > LEAST_GRADIENT for each in gradients.values())
    assert four.mesh(**trial.sizes).shape == tuple(trial.sizes.values())
    code = "import recipe_trials\nfound = recipe_trials.train(number, mesh)"
    found = four.run("all", code, push={"number": number}, want="found")["found"]
    together: set[str] = set()
    for theirs, parts, kept in found.values():
        assert theirs == pytest.approx(losses, abs=CLOSE)
        for name, gradient in parts.items():
            torch.testing.assert_close(gradient, gradients[name], atol=CLOSE, rtol=0.0, msg=name)
        together |= parts.keys()
        assert kept <= PARTS[trial.recipe] * size
    assert together == gradients.keys()


def test_all_recipes_are_tried() -> None:
    said = recipe_trials.recipes.__doc__ or ""
    named = [line.split()[0] for line in said.splitlines() if line.startswith("    ") and line.strip()]
    assert named[1:] == [trial.recipe for trial in TRIALS]
