"""The course's recipes, and what is common to the tests beside a real run, are importable, also on workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rpcbench

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "notebooks"), str(HERE.parent / "recipes")]  # workers take the path over


@pytest.fixture(scope="module")
def four() -> Iterator[rpcbench.Cluster]:
    with rpcbench.Cluster(4) as cluster:
        yield cluster
