"""`rpcbench lab`: this process becomes JupyterLab, opened on the notebooks."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> None:
    """Replace this process by JupyterLab; opens ./notebooks, if it exists, unless the arguments name something."""
    if importlib.util.find_spec("jupyterlab") is None:
        raise SystemExit("rpcbench lab: JupyterLab is not installed here; `pip install 'rpcbench[lab]'` brings it")
    named = any(Path(argument).exists() for argument in arguments)
    lessons = [] if named or not Path("notebooks").is_dir() else ["notebooks"]
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *lessons, *arguments])
