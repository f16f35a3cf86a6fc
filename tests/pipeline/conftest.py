"""Fixtures of the pipeline tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from worlds import PATIENCE

from rpcbench.launch.cluster import Cluster
from rpcbench.pipeline import driver


@pytest.fixture(scope="module", autouse=True)
def patient_driver() -> Iterator[None]:
    """A driver that waits until workers have answered what they have done, also on a machine that is busy elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_GRACE_SECONDS", PATIENCE)
        yield


@pytest.fixture(scope="module")
def workers(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of two workers, or of the number in `CLUSTER` of the test file."""
    with Cluster(getattr(request.module, "CLUSTER", 2)) as made:
        yield made


@pytest.fixture
def cluster(workers: Cluster) -> Cluster:
    """The cluster, with those workers restarted that an earlier test has killed."""
    for name in workers.lost:
        workers.restart(name)
    return workers
