"""How a call ends, in words: a value that travels from a worker to the test; and how scripts do, without a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The words of the error that a call ends with; empty where there is none."""
    try:
        function(*args, **kwargs)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def survivors_name_the_dead(rank: int, script: str, *arguments: str) -> None:
    """Run a script three times at once, of which that rank kills itself: the two others fail, and say who has died."""
    command = [sys.executable, "-c", script, *arguments]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        said = [each.communicate(timeout=100)[1] for each in running]  # torch is loaded three times
    finally:
        for each in running:
            each.kill()
    assert sorted(each.returncode for each in running) == [-9, 1, 1]
    assert len([text for text in said if f"WorkerLostError: rank {rank} (" in text]) == 2, said
