"""Fixtures and hooks of all tests: a check that nothing is left behind, and no silently skipped browser tests in CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes share few cores; read when torch is loaded

sys.path.append(str(Path(__file__).parents[1]))  # for `benchmarks`; last, as a tested wheel goes before the checkout

import pytest
from hypothesis import settings
from leaks import LeakCheck, mark_this_run, nothing_left
from sizes import LONG

from rpcbench.base import config

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent

pytest_plugins = ["running", "exercises"]

# A loaded machine is no reason to fail, so no example has a deadline, and workers that end late are not terminated.
config.STOP_SECONDS *= 5  # before clusters take it as their default
settings.register_profile("usual", deadline=None)
settings.register_profile(LONG, deadline=None, max_examples=10 * settings.default.max_examples)
settings.load_profile("usual")

mark_this_run()


@pytest.fixture(scope="session")
def leak_check() -> LeakCheck:
    """`with leak_check():` around the code to check; see `leaks.nothing_left`."""
    return nothing_left


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """The leak check around one test, and around the function-scoped fixtures requested after it."""
    with nothing_left():
        yield


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    """The agents of a notebook and two workers, in this process; the test must leave nothing in them."""
    import worlds  # here, as it loads torch

    with worlds.world(tmp_path, 3) as made:
        yield made
        worlds.nothing_left(made)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Count a skipped browser test as failed where RPCBENCH_REQUIRE_BROWSER is set; likewise RPCBENCH_REQUIRE_RAY,
    RPCBENCH_REQUIRE_SSH and RPCBENCH_REQUIRE_SLURM."""
    report = yield
    for mark in ("browser", "ray", "ssh", "slurm"):
        required = f"RPCBENCH_REQUIRE_{mark.upper()}"
        if report.skipped and item.get_closest_marker(mark) and os.environ.get(required):
            report.outcome = "failed"
            report.longrepr = f"skipped, though {required} is set: {report.longrepr}"
    return report
