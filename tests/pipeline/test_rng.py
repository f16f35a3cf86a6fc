"""Random numbers of stages: several at once in one process, and evaluation between steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import Pipeline, split

CROWD = """
import gc, threading, torch
from rpcbench.pipeline.recompute import seeded_rng

class Circle:
    def __init__(self):
        self.me, self.tensor = self, torch.ones(3)

def work():
    for number in range(1000):
        Circle()
        with seeded_rng(number):
            pass

gc.set_threshold(5)  # so that torch's tensor of a state sets off collections, which free tensors
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done")
"""


@pytest.mark.process
def test_seeded_forwards_in_several_threads_do_not_deadlock() -> None:
    """It takes two seconds; a deadlock would stop all threads of a process, so the program runs in another one."""
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.process
def test_predict_and_evaluate_between_steps_do_not_change_training(cluster: Cluster) -> None:
    x, y, seen = torch.randn(6, 4), torch.randn(6, 2), []
    for looks in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        stages = split(model, cluster.workers, balance=[1, 2])
        pipe = Pipeline(stages, "1f1b", 3, nn.functional.mse_loss, (torch.optim.SGD, {"lr": 0.5}))
        losses = []
        for _ in range(3):
            losses.append(pipe.step(x, y).loss)
            if looks:
                pipe.predict(x)
                pipe.evaluate(x, y)
        seen.append(losses)
    assert seen[0] == seen[1] and len(set(seen[0])) == 3


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x)  # in evaluation mode, too


@pytest.mark.process
def test_random_numbers_in_evaluation_come_from_the_seed_of_the_pipeline(cluster: Cluster, tmp_path: Path) -> None:
    x, seen = torch.ones(6, 4), []
    cluster.run("all", "import torch; before = torch.get_rng_state()")
    for _ in range(2):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), Noisy(), nn.Linear(8, 2))
        pipe = Pipeline(split(model, cluster.workers, balance=[1, 2]), "1f1b", 3)
        seen.append([pipe.predict(x), pipe.predict(x)])
    (first, second), again = seen
    assert torch.equal(first, again[0]) and torch.equal(second, again[1]) and not torch.equal(first, second)
    assert not torch.equal(first[:2], first[2:4])  # each micro-batch has numbers of its own
    assert all(cluster.run("all", "torch.equal(before, torch.get_rng_state())").values())
    pipe.save(tmp_path)
    third = pipe.predict(x)
    other = Pipeline(split(model, cluster.workers, balance=[1, 2]), "1f1b", 3)
    other.load(tmp_path)
    assert torch.equal(other.predict(x), third)
