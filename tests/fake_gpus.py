"""GPUs that NVIDIA's driver lists, on a host without any: tests put `fake_nvml/pynvml.py` on the import path.

Workers that start meanwhile inherit the path and the file with the GPUs, so a cluster pins them as on a real host.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rpcbench.launch import fork_client
from rpcbench.runtime import gpus

GB = 1 << 30
_FOLDER = Path(__file__).parent / "fake_nvml"


class FakeGpus:
    """The GPUs of this host, as its driver lists them. `path` has them as JSON."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        figures = {"used": 0, "total": 80 * GB, "use": 0, "processes": []}
        self.all = [{"uuid": f"GPU-{i:08x}-fake", "name": "NVIDIA Fake 80GB", **figures} for i in range(count)]
        self.save()

    def uuid(self, index: int) -> str:
        return str(self.all[index]["uuid"])

    def change(self, index: int, **fields: Any) -> None:
        """Change fields of a GPU; one that is None is removed, as if the driver did not support it."""
        self.all[index] = {name: value for name, value in {**self.all[index], **fields}.items() if value is not None}
        self.save()

    def save(self) -> None:
        self.path.write_text(json.dumps(self.all))


@contextlib.contextmanager
def fake_gpus(folder: Path, count: int, shown: str | None = None) -> Iterator[FakeGpus]:
    """Give this host `count` GPUs; `shown` is CUDA_VISIBLE_DEVICES, None: not set. pynvml is reset in the end."""
    if find_spec("pynvml") is not None:  # a warm fork server has loaded it with torch, and its workers inherit that
        fork_client.stop_idle()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "pynvml", raising=False)
        patch.syspath_prepend(_FOLDER)
        made = FakeGpus(folder / "gpus.json", count)
        patch.setenv("FAKE_NVML", str(made.path))
        if shown is None:
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            patch.setenv("CUDA_VISIBLE_DEVICES", shown)
        gpus.reset_driver()
        try:
            yield made
        finally:
            sys.modules.pop("pynvml", None)
            gpus.reset_driver()
    if find_spec("pynvml") is not None:
        fork_client.stop_idle()
