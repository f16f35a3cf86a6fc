"""Found first on PYTHONPATH by each Python process under `rpcbench run`: binds our names right after torch is loaded.

A sitecustomize of the user's own, which this one hides, runs as well.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _AfterTorch:
    """Finds torch as Python would, once, and has it loaded with `bind` at the end."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_bind(module: ModuleType) -> None:
                load(module)
                from rpcbench.torch_shim import bind

                bind()

            spec.loader.exec_module = load_and_bind  # type: ignore[method-assign]
        return spec


def _run_hidden() -> None:
    here = Path(__file__).parent
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("RPCBENCH_REBIND"):
    sys.meta_path.insert(0, _AfterTorch())
    _run_hidden()
