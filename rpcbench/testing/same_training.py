"""Parallel training in the tests of a project: `assert_same_training` compares it with one process, on forked workers.

Guarantees
- The workers are started for the comparison and have ended after it, whatever its result.
- A difference is an AssertionError whose text is the report: the first wrong tensor and its cause.
- The current cluster of the caller, if there is one, stays the current one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rpcbench.compare.report import CompareReport
from rpcbench.launch.cluster import Cluster

__all__ = ["assert_same_training"]


def assert_same_training(
    reference: tuple[Callable[..., nn.Module], Callable[..., Any]],
    parallel: tuple[Callable[..., nn.Module], Callable[..., Any]],
    mesh: Mapping[str, int],
    *,
    steps: int = 1,
    backend: str | None = None,
    driver: bool = False,
    **options: Any,
) -> CompareReport:
    """Check that a parallel training step computes what the same step computes in one process.

    Args:
        reference: Two functions: `make_model()` returns the model, `step(model)` runs forward and backward, and perhaps
            an optimizer, and returns the loss. They run in this process.
        parallel: The same on each rank: `make_model(mesh)` and `step(model, mesh)`, with a `DeviceMesh`.
        mesh: Sizes of the mesh by name; their product is the number of workers.
        steps: How often to call `step`.
        backend: Of the ranks' process group, as of `rpcbench.distributed.init_process_group`.
        driver: The parallel program is not run on each rank but here, as `make_model()` and `step(model)`: a pipeline,
            or a model on other workers. See `cluster.compare`.
        **options: Of `rpcbench.Cluster`.

    Returns:
        The report; its `layouts` say how the ranks share each tensor.

    Raises:
        AssertionError: The two differ; the text is the report.
        CompareError: They cannot be compared: a step returns no loss, the reference is random, or no names match.
        ValueError: `mesh` has a size below 1, or `steps` is below 1.
        WorkerLostError: A worker has ended before the comparison has.
        Exception: What a step raises, here or on a rank, is raised with its type.

    >>> def test_tensor_parallel():
    ...     assert_same_training((make_model, step), (make_parallel, step), {"tp": 2})
    """
    with Cluster(math.prod(mesh.values()), **options) as cluster:
        report = cluster.compare(
            reference=reference, parallel=parallel, mesh=mesh, steps=steps, backend=backend, driver=driver
        )
    report.raise_if_wrong()
    return report
