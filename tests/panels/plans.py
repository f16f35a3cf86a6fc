"""Plans without a run: worlds of a few operators, on an A100."""

from __future__ import annotations

from rpcbench.launch.plan_layouts import LayoutPlan, PlannedMesh
from rpcbench.launch.simulate_programs import describe_hardware, find_roles
from rpcbench.simulation.rank_log import BACKWARD, FORWARD, Kernel, ModelPart, RankLog
from rpcbench.simulation.simulated_world import SimulatedWorld

GIB = 2**30
MEMORY = describe_hardware("a100").memory_bytes


def layout(mesh, flops, gib, blocks=1):
    """A mesh on which each rank computes so much, with so many GiB of parameters, in forward and backward."""
    kernels = [
        Kernel(0, "mm", "matmul", "bfloat16", flops // (2 * blocks), 8, ModelPart(f"layers.{n}", phase))
        for phase in (FORWARD, BACKWARD) for n in range(blocks)
    ]  # fmt: skip
    logs = [RankLog(role.rank, [*kernels], {"parameters": gib * GIB}) for role in find_roles(mesh, None)]
    return PlannedMesh(mesh, SimulatedWorld(mesh, describe_hardware("a100"), find_roles(mesh, None), logs, 8192))


def failed(mesh, error="ValueError: <b>8 heads</b> do not go into 16 pieces\nof one size"):
    return PlannedMesh(mesh, None, error)


def plan(*layouts):
    return LayoutPlan(layouts, describe_hardware("a100"))


def usual_plan():
    """Two layouts that fit, the best first, one that does not, and one on which the program fails."""
    return plan(
        layout({"dp": 8, "tp": 2}, 10**14, 20, blocks=4), layout({"dp": 16, "tp": 1}, 2 * 10**14, 60),
        layout({"dp": 4, "tp": 4}, 10**13, 100), failed({"dp": 1, "tp": 16}),
    )  # fmt: skip
