"""Runs the tests of the drawing code that need no browser, in node."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rpcbench.telemetry.drawing import lists_script

NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="no node on PATH")
def test_what_the_drawing_code_works_out() -> None:
    assert NODE is not None
    tests = sorted(map(str, Path(__file__).parent.glob("*.test.mjs")))
    done = subprocess.run(
        [NODE, "--test", *tests], capture_output=True, text=True, timeout=120,
        env={**os.environ, "LISTS_SCRIPT": lists_script()},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
