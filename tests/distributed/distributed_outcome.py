"""The outcome of a call as text, which a worker can return to the test; the outcome of scripts without a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the text of the error that a call raises; empty if there is none."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def survivors_name_the_dead(rank: int, script: str, *arguments: str) -> None:
    """Run a script as three ranks, of which `rank` kills itself: the two others fail, and name that rank."""
    command = [sys.executable, "-c", script, *arguments]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        said = [each.communicate(timeout=100)[1] for each in running]  # torch is loaded three times
    finally:
        for each in running:
            each.kill()
    assert sorted(each.returncode for each in running) == [-9, 1, 1]
    assert len([text for text in said if f"WorkerLostError: rank {rank} (" in text]) == 2, said
