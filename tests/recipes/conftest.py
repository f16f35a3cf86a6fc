"""Four workers for all recipes, which leave them unchanged but for their variables and groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "notebooks"))  # workers take the path over

import rpcbench


@pytest.fixture(scope="module")
def four() -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(4) as cluster:
        yield cluster
