"""Launchers for tests, which must leave nothing behind."""

from __future__ import annotations

import psutil
import pytest
from launch_bench import Bench

from rpcbench.launch import fork_client


@pytest.fixture
def bench(request, tmp_path):
    """A launcher for one test; afterwards no process and no file of it may be left."""
    made = Bench(getattr(request, "param", "fork"), tmp_path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield made
    made.launcher.close()
    fork_client.stop_idle()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not made.directory.path.exists()


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """One forking launcher for all tests of a module, which leave it unchanged."""
    made = Bench("fork", tmp_path_factory.mktemp("answers"))
    yield made
    made.launcher.close()


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    """As `forked`, but it spawns."""
    made = Bench("spawn", tmp_path_factory.mktemp("answers"))
    yield made
    made.launcher.close()


@pytest.fixture(params=["forked", pytest.param("spawned", marks=pytest.mark.long)])
def shared(request):
    """Each of the two launchers in turn."""
    return request.getfixturevalue(request.param)
