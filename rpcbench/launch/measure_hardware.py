"""Measures the machine of a cluster's workers as a hardware: `rpcbench.measure_hardware`.

Guarantees
- All workers measure at the same time, in a process group that is made for it and ended after it.
"""

from __future__ import annotations

import psutil

from rpcbench.launch.base_cluster import BaseCluster
from rpcbench.simulation.hardware import Hardware
from rpcbench.simulation.measurements import describe_machine, measure_rank

__all__ = ["measure_hardware"]


def measure_hardware(cluster: BaseCluster, name: str = "this machine") -> Hardware:
    """Measure what the workers of a cluster reach together, for `rpcbench.simulate(hardware=…)`.

    Matrix products by size, attention, memory, and the collectives of their process group. It takes some ten seconds;
    nothing else should run meanwhile. Times hold for as many ranks as the cluster has workers, since they share cores
    and memory.

    Args:
        cluster: All of its workers take part.
        name: Of the description.

    Returns:
        A description; `save` keeps it in a file.

    Raises:
        CollectiveError: A worker is in a process group already.

    >>> machine = rpcbench.measure_hardware(cluster)
    >>> machine.has_streams
    False
    """
    measured = cluster.spmd(measure_rank)
    return describe_machine(name, measured, psutil.virtual_memory().total / len(measured))
