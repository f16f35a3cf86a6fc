"""The same program in a real run on four workers, and simulated: its collectives, and its bytes at their peak.

`python tests/simulation/real_runs.py` prints the table of docs/simulation.md.

The `Meter` of lesson 26 counts the bytes of a real run; `rpcbench.simulation` has no part in that. A thread of gloo may
keep a tensor for longer than the program does, never for less; so the peak is the least of several steps, and of the
ranks that do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    HERE = Path(__file__).parent
    sys.path += [str(HERE.parents[1] / "notebooks"), str(HERE.parent / "recipes")]

import recipes
import torch
from memory_meter import Meter
from recipe_trials import RATE, TRIALS
from tiny_transformer import Experts, batch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import rpcbench
from rpcbench.telemetry.views import rows_of

STEPS = 8  # measured
Program = Callable[[DeviceMesh], Callable[[], Any]]


class Row(NamedTuple):
    """A collective of one rank."""

    op: str
    group: str
    ranks: tuple[int, ...]
    bytes: int
    shape: str
    site: str


# -- the programs
def recipe_program(number: int, mesh: DeviceMesh) -> Callable[[], Any]:
    """A training step of a recipe of the course."""
    trial = TRIALS[number]
    given = trial.model()
    for layer in given.modules():
        if isinstance(layer, Experts):
            layer.router.register_forward_hook(choose_evenly)
    model = getattr(recipes, trial.recipe)(given, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step() -> None:
        trial.backward(model, mesh, *batch(0))
        optimizer.step()
        optimizer.zero_grad()

    return step


def choose_evenly(router: nn.Module, args: Any, logits: Tensor) -> Tensor:
    """Send as many tokens to each expert as to any other, as a simulation assumes."""
    experts = logits.shape[1]
    return logits + 100 * nn.functional.one_hot(torch.arange(len(logits)) % experts, experts)


# -- a real run
def measure_peak(program: Program, mesh: DeviceMesh) -> int:
    """On a worker: return the bytes of live tensors at their peak, in the least of several steps."""
    peaks = []
    with Meter() as meter:
        step = program(mesh)
        for _ in range(2 + STEPS):
            meter.peak = meter.alive
            step()
            peaks.append(meter.peak)
    return min(peaks[2:])


def real_peaks(cluster: rpcbench.Cluster, program: Program, sizes: dict[str, int]) -> list[int]:
    """Return the bytes at their peak of each rank of a real run that nobody watches: a watch keeps tensors, too."""
    cluster.mesh(**sizes)
    code = "import real_runs; found = real_runs.measure_peak(program, mesh)"
    return [*cluster.run("all", code, push={"program": program}, want="found")["found"].values()]


def real_rows(cluster: rpcbench.Cluster, program: Program, sizes: dict[str, int]) -> list[list[Row]]:
    """Return the rows of each rank of a watched real run, in one step after DDP has formed its buckets."""
    cluster.mesh(**sizes)
    cluster.run("all", "step = program(mesh); step(); step()", push={"program": program})
    with rpcbench.trace() as seen:
        cluster.run("all", "step()")
    assert seen.complete
    found: dict[int, list[Any]] = {worker: [] for worker in sorted(seen.world)}
    for worker, _, row in rows_of(seen.world, "collectives"):
        found[worker].append(row)
    ranks = {name: rank for rank, name in enumerate(cluster.workers)}
    by_name = {seen.world[worker]["name"]: sorted(rows, key=lambda row: row["begin"]) for worker, rows in found.items()}
    return [
        [
            Row(row["op"], row["group"], tuple(ranks[each] for each in row["members"]), row["bytes"], row["shape"],
                row["site"])
            for row in by_name[name]
        ]
        for name in cluster.workers
    ]  # fmt: skip


# -- a simulation of it
def simulate_all(program: Program, sizes: dict[str, int]) -> rpcbench.SimulatedWorld:
    return rpcbench.simulate(program, mesh=sizes, ranks=range(4))


def simulated_rows(world: rpcbench.SimulatedWorld) -> list[list[Row]]:
    """Return the rows of each rank."""
    return [
        [Row(*(getattr(each, name) for name in Row._fields)) for each in world.collectives if each.role == role.name]
        for role in world.roles
    ]


def pair_peaks(world: rpcbench.SimulatedWorld, real: list[int]) -> list[tuple[int, int]]:
    """Return (real, simulated) peaks: of ranks whose simulated ones are equal, the least real one."""
    least: dict[int, int] = {}
    for size, peak in zip(real, world.memory.values(), strict=True):
        least[peak.bytes] = min(size, least.get(peak.bytes, size))
    return [(size, simulated) for simulated, size in least.items()]


def main() -> None:
    print("| recipe | ranks | collectives | equal rows | peak, real | peak, simulated | error |")
    print("|---|---|---|---|---|---|---|")
    with rpcbench.Cluster(4) as cluster:
        for number, trial in enumerate(TRIALS):
            program = partial(recipe_program, number)
            real, peaks = real_rows(cluster, program, trial.sizes), real_peaks(cluster, program, trial.sizes)
            world = simulate_all(program, trial.sizes)
            rows = simulated_rows(world)
            equal = sum(one == other for a, b in zip(real, rows, strict=True) for one, other in zip(a, b, strict=True))
            size, simulated = max(pair_peaks(world, peaks), key=lambda each: each[0])
            mesh = " x ".join(f"{name} {count}" for name, count in trial.sizes.items())
            print(
                f"| `{trial.recipe}` | {mesh} | {sum(map(len, real))} | {equal} | {size:,} | {simulated:,} | "
                f"{simulated / size - 1:+.2%} |"
            )


if __name__ == "__main__":
    main()
