"""How the suite runs: side by side with pytest-xdist, some tests alone, and an account of the time at the end.

- Tests of one file run in one process, in order, so that they share its fixtures. So do those of a folder in
  `TOGETHER`, which share something that is slow to start, and those of one `xdist_group`.
- `@pytest.mark.alone`: the test measures the machine. It runs last, and only while no other test of this checkout runs.
- `@pytest.mark.long`: not in `make test`; `make test-all` runs it.

An `alone` test holds a lock that all other tests share: a lock on this file, which no test writes.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import addresses
import nbval.kernel
import pytest

WORKERS_PER_CORE = 2  # tests wait about as long as they compute
SLOWEST = 10
GROUPS = "rpcbench_groups"
TOGETHER = ("tests/browser/", "tests/notebook/")
"""Folders whose tests share a browser, or kernels."""
FIRST = (
    "tests/torch_suite",
    "notebooks/",
    "tests/browser",
    "tests/pipeline",
    "tests/launch",
    "tests/notebook",
    "tests/rpc/test_hosts",
)
"""Folders with files that take long: begun first, so that the others fill the gaps at the end."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The number of processes for `-n auto`."""
    return round(WORKERS_PER_CORE * len(os.sched_getaffinity(0)))


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist keeps the order that `_rank` gives
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # by execnet, or by a shell with a background job
        signal.signal(signal.SIGINT, signal.default_int_handler)  # tests send it
    nbval.kernel.KernelManager = addresses.kernel_manager
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(Groups())
        config.pluginmanager.register(Times())


class Groups:
    """Groups of tests that run in one process. The scheduler sees only names, so collecting processes write them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._told = Path(self._folder.name, "groups.json")

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[GROUPS] = str(self._told)

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        told = self._told

        class Scheduler(LoadScopeScheduling):
            @functools.cached_property
            def groups(self) -> dict[str, str]:
                return dict(json.loads(told.read_text()))

            def _split_scope(self, nodeid: str) -> str:
                return self.groups.get(nodeid) or nodeid.partition("::")[0]

            def remove_node(self, node: Any) -> str | None:
                """Where a process has crashed, return the test that crashed, and hand out the tests after it.

                pytest-xdist would also hand out that test, and complete groups. A process that gets a complete group
                waits for ever.
                """
                groups, self.assigned_work[node] = self.assigned_work[node], {}
                super().remove_node(node)
                crashed: str | None = None
                for group, tests in groups.items():
                    if crashed is None and (crashed := next((test for test in tests if not tests[test]), None)):
                        tests[crashed] = True
                    if not all(tests.values()):
                        self.workqueue[group] = tests
                for other in self.nodes if crashed else ():
                    self._reschedule(other)
                return crashed

        return Scheduler(config, log)

    def pytest_unconfigure(self) -> None:
        self._folder.cleanup()


def _group(item: pytest.Item) -> str | None:
    """The group of a test; None: the tests of its file."""
    if item.get_closest_marker("alone"):
        return "alone"
    if marker := item.get_closest_marker("xdist_group"):
        return str(marker.args[0])
    return next((folder for folder in TOGETHER if item.nodeid.startswith(folder)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)  # stable: within a rank the order stays


def _rank(item: pytest.Item) -> int:
    if item.get_closest_marker("alone"):
        return len(FIRST) + 1
    return next((rank for rank, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reports the end of the collection
def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the groups, and exempt all loaded objects from garbage collection.

    Tests of leaks collect garbage repeatedly. With half a million objects of torch and of this suite, a collection
    takes half a second; without them, milliseconds.
    """
    if told := getattr(session.config, "workerinput", {}).get(GROUPS):
        groups = {item.nodeid: group for item in session.items if (group := _group(item))}
        Path(told).write_text(json.dumps(groups))
    if "torch" in sys.modules:
        importlib.import_module("sympy")  # torch loads it late, and it is as large as torch
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the time limit
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """An `alone` test waits until no other test runs, and no other test begins while it runs."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # even if a fork of the test still has the file open


class Times:
    """Seconds by test and by folder, reported at the end."""

    def __init__(self) -> None:
        self.tests: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        folders: Counter[str] = Counter()
        for test, seconds in self.tests.items():
            folders[str(Path(test.partition("::")[0]).parent)] += seconds
        terminalreporter.section("minutes by folder")
        for folder, seconds in folders.most_common():
            terminalreporter.write_line(f"{seconds / 60:6.1f}  {folder}")
        terminalreporter.section(f"the {SLOWEST} slowest tests, in seconds")
        for test, seconds in self.tests.most_common(SLOWEST):
            terminalreporter.write_line(f"{seconds:6.1f}  {test}")
