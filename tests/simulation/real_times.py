"""The seconds of a step in a real run on this machine, and simulated with the machine measured as a hardware.

`python tests/simulation/real_times.py` prints the table of docs/simulation.md. Nothing else should run meanwhile: the
ranks share the machine's cores, as they did when it was measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    HERE = Path(__file__).parent
    sys.path += [str(HERE.parents[1] / "notebooks"), str(HERE.parent / "recipes")]

import recipes
import torch
import torch.distributed as dist
from real_runs import choose_evenly
from recipe_trials import RATE, TRIALS
from tiny_transformer import LONGEST, Experts, batch, make_model
from torch.distributed.device_mesh import DeviceMesh

import rpcbench

WIDTH, ROWS = 512, 16  # at which a step takes 50 ms and more
WARM_UP, STEPS = 3, 9


def program_of(number: int, mesh: DeviceMesh) -> Callable[[], Any]:
    """A training step of a recipe of the course, at a size at which computing counts."""
    trial = TRIALS[number]
    given = make_model(trial.blocks, trial.experts, WIDTH)
    for layer in given.modules():
        if isinstance(layer, Experts):
            layer.router.register_forward_hook(choose_evenly)
    model = getattr(recipes, trial.recipe)(given, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE / 100)

    def step() -> None:
        trial.backward(model, mesh, *batch(0, ROWS, LONGEST))
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_step(step: Callable[[], Any]) -> float:
    """On a worker: return the median seconds of a step."""
    times = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UP:])


def real_seconds(cluster: rpcbench.Cluster, number: int, sizes: dict[str, int]) -> float:
    """Return the seconds of a step of the slowest rank."""
    cluster.mesh(**sizes)
    code = "import real_times; found = real_times.measure_step(program(mesh))"
    found = cluster.run("all", code, push={"program": partial(program_of, number)}, want="found")["found"]
    return max(found.values())


def shrink(sizes: dict[str, int], ranks: int) -> dict[str, int] | None:
    """Return the sizes for so many ranks; None if a recipe needs more."""
    if len(sizes) == 1:
        return dict.fromkeys(sizes, ranks)
    return sizes if ranks == 4 else None


def main() -> None:
    print("| recipe | ranks | step, real | step, simulated | error |")
    print("|---|---|---|---|---|")
    for ranks in (2, 4):
        with rpcbench.Cluster(ranks) as cluster:
            machine = rpcbench.measure_hardware(cluster)
        for number, trial in enumerate(TRIALS):
            if (sizes := shrink(trial.sizes, ranks)) is None:
                continue
            with rpcbench.Cluster(ranks) as cluster:
                real = real_seconds(cluster, number, sizes)
            world = rpcbench.simulate(partial(program_of, number), sizes, machine, ranks=range(ranks))
            mesh = " x ".join(f"{name} {count}" for name, count in sizes.items())
            error = world.step_seconds / real - 1
            times = f"{real * 1e3:.0f} ms | {world.step_seconds * 1e3:.0f} ms"
            print(f"| `{trial.recipe}` | {mesh} | {times} | {error:+.0%} |", flush=True)


if __name__ == "__main__":
    main()
