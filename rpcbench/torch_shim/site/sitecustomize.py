"""Start-up code of each Python process under `rpcbench run`: it replaces torch's modules right after torch is loaded.

Python finds this file first on PYTHONPATH. It also runs the user's own sitecustomize, which it hides.
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
    """An import hook that finds torch as Python would, once, and calls `bind` at the end of its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)  # first, or the next line would call this method again
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_bind(module: ModuleType) -> None:
                load(module)
                # Imported here: rpcbench imports torch, and most processes under `rpcbench run` may never load either.
                from rpcbench.torch_shim import bind_modules

                bind_modules()

            spec.loader.exec_module = load_and_bind  # type: ignore[method-assign]
        return spec


def _run_hidden() -> None:
    # Python imports only the first sitecustomize on its path.
    here = Path(__file__).parent
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("RPCBENCH_REBIND"):
    sys.meta_path.insert(0, _AfterTorch())
    _run_hidden()
