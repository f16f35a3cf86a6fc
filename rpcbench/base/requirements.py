"""The requirements of rpcbench on the system and on torch, checked once, at `import rpcbench`.

Guarantees
- On Windows, without torch, and with a torch older than `LOWEST_TORCH`, the import fails with one sentence. Otherwise
  rpcbench would fail later: at the import of a module that the system lacks, or by a crash in a backward pass.
- With a torch from `FIRST_UNTRIED_TORCH` on, for which the tests have not run, one warning says so, and nothing else
  changes.
- Nothing is installed or replaced, torch is not imported, and no package is looked for except torch.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

LOWEST_TORCH = (2, 13)
FIRST_UNTRIED_TORCH = (2, 15)
"""The bounds of torch in pyproject.toml. pip applies them to a new installation, not to a torch that is there."""

_VERSION = re.compile(r"^__version__ = ['\"](\d+)\.(\d+)(.*)['\"]", re.MULTILINE)


class _Torch(NamedTuple):
    """The torch that `import torch` would load."""

    series: tuple[int, int]
    version: str
    folder: Path


def check_requirements() -> None:
    """Raise ImportError where rpcbench cannot work; warn of a torch for which its tests have not run."""
    if sys.platform == "win32":
        raise ImportError("rpcbench does not run on Windows: use it in WSL 2, the Windows Subsystem for Linux")
    needed = f"rpcbench needs torch {_format_version(LOWEST_TORCH)} or later, and"
    remedy = f"pip install 'torch>={_format_version(LOWEST_TORCH)},<{_format_version(FIRST_UNTRIED_TORCH)}'"
    torch = _find_torch()
    if torch is None:
        raise ImportError(f"{needed} {sys.executable} has none: install it with {remedy}", name="torch")
    if torch.series < LOWEST_TORCH:
        raise ImportError(
            f"{needed} {torch.folder} is torch {torch.version}, which rpcbench does not replace: to do so yourself, "
            f"run {remedy} and restart Python",
            name="torch",
        )
    if torch.series >= FIRST_UNTRIED_TORCH:
        warnings.warn(
            f"rpcbench was tested with torch before {_format_version(FIRST_UNTRIED_TORCH)}, and {torch.folder} "
            "is torch "
            f"{torch.version}: parts of rpcbench may fail with it",
            RuntimeWarning,
            stacklevel=3,  # the line that imports rpcbench
        )


def _find_torch() -> _Torch | None:
    # From torch's own file: `importlib.metadata` takes 20 ms to load, three times as long as `import rpcbench`.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:  # none, or a folder of this name without a module
        return None
    folder = Path(spec.origin).parent
    found = _VERSION.search((folder / "version.py").read_text())
    if found is None:
        raise ImportError(f"torch in {folder} is damaged: its version.py names no version", name="torch")
    return _Torch((int(found[1]), int(found[2])), f"{found[1]}.{found[2]}{found[3]}", folder)


def _format_version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
