"""Mistakes raise torch's error classes with torch's words: programs match on both. The table is `mistakes.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mistakes
import pytest
from mistakes import INSIDE, OUTSIDE, Row

SPACE = mistakes.names(ours=True)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with mistakes.world_of_one(SPACE["rpc"]):
        yield


def expression(row: Any) -> str:
    return str(row[0])


@pytest.mark.parametrize("row", OUTSIDE, ids=expression)
def test_a_mistake_without_a_world_raises_the_error_of_torch(row: Row) -> None:
    assert mistakes.answer(row, SPACE) == ""


@pytest.mark.parametrize("row", INSIDE, ids=expression)
def test_a_mistake_in_a_world_raises_the_error_of_torch(world: None, row: Row) -> None:
    assert mistakes.answer(row, SPACE) == ""


@pytest.mark.process
def test_torch_raises_the_errors_of_the_table() -> None:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", mistakes.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr[-2000:]
