"""What tests of pipelines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worlds import nothing_left, world

from rpcbench.launch.cluster import Cluster
from rpcbench.runtime.agent import Agent


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    """A notebook and two workers in this process, with nothing left in them afterwards."""
    with world(tmp_path, 3) as made:
        yield made
        nothing_left(made)


@pytest.fixture(scope="module")
def workers(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two, or as many as the test file says in `CLUSTER`."""
    with Cluster(getattr(request.module, "CLUSTER", 2)) as made:
        yield made


@pytest.fixture
def cluster(workers: Cluster) -> Cluster:
    """Workers that live, though a test before may have killed them."""
    for name in workers.lost:
        workers.restart(name)
    return workers
