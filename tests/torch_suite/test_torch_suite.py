"""torch's own tests of its RPC, from the installed wheel, on our runtime: all pass but those that are listed.

A test that is listed and passes is an error, too, so the list stays true. `suite_server.py` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cannot_pass import MAY_PASS, REASONS

pytestmark = [pytest.mark.process, pytest.mark.timeout(1500)]
SECONDS = 40
PARTS = 4
"""That run beside each other. `make test` has one of them: each holds some of every kind."""
LISTED = {test: reason for reason, tests in REASONS.items() for test in tests.split()}


class SuiteServer:
    """A process that runs tests one after the other; `names` are all there are."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("suite_server.py")), str(SECONDS)]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self.process = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=nowhere)
        self.names: list[str] = json.loads(self._line())

    def run(self, name: str) -> tuple[str, str]:
        """ "pass", "fail" or "skip", and the end of what was written."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name}\n")
        self.process.stdin.flush()
        ran, outcome, words = json.loads(self._line())
        assert ran == name
        return outcome, words

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the suite_server has ended with status {self.process.wait()}"
        return line

    def close(self) -> None:
        with self.process:  # its pipes are closed, and it ends
            pass


@pytest.fixture
def suite_server() -> Iterator[SuiteServer]:
    made = SuiteServer()
    yield made
    made.close()


def _part(n: int) -> Any:
    return pytest.param(n, marks=[pytest.mark.xdist_group(f"torch {n}"), pytest.mark.long])


@pytest.mark.parametrize("part", [_part(n) for n in range(PARTS)])
def test_all_pass_but_those_that_are_listed(suite_server: SuiteServer, part: int) -> None:
    assert LISTED.keys() <= set(suite_server.names), "a test that is listed is there no more"
    outcomes = {name: suite_server.run(name) for name in suite_server.names[part::PARTS]}
    failed = {name: words for name, (outcome, words) in outcomes.items() if outcome == "fail" and name not in LISTED}
    told = "\n\n".join(f"=== {name}\n{words}" for name, words in failed.items())
    assert not failed, f"{len(failed)} of {len(outcomes)} failed: {', '.join(failed)}\n{told}"
    passed = {name for name, (outcome, _) in outcomes.items() if outcome == "pass"}
    assert sorted(passed & LISTED.keys() - MAY_PASS) == [], "listed, and passes"
    assert len(passed) > 250 // PARTS
