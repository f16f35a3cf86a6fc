"""A stand-in for NVIDIA's pynvml, with the functions that `rpcbench.runtime.gpus` calls.

The file that FAKE_NVML names has the GPUs as JSON, and is read at each question, so that figures can change:

    [{"uuid": "GPU-aa…", "name": "NVIDIA Fake 80GB", "used": 0, "total": 85899345920, "use": 0,
      "processes": [[pid, bytes]]}]

Without the variable there is no driver. A missing field is one that the driver does not support; `"lost": true` fails
every question about that GPU. `"self"` as a pid stands for the process that asks.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


def _gpus() -> list[dict[str, Any]]:
    try:
        return list(json.loads(Path(os.environ["FAKE_NVML"]).read_text()))
    except (KeyError, FileNotFoundError):
        raise NVMLError("Driver Not Loaded") from None


def _field(handle: int, name: str) -> Any:
    gpu = _gpus()[handle]
    if gpu.get("lost"):
        raise NVMLError("GPU is lost")
    if name not in gpu:
        raise NVMLError("Not Supported")
    return gpu[name]


def nvmlInit() -> None:  # noqa: N802
    _gpus()


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    if not 0 <= index < len(_gpus()):
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    return str(_field(handle, "uuid"))


def nvmlDeviceGetName(handle: int) -> str | bytes:  # noqa: N802
    name = str(_field(handle, "name"))
    return name.encode() if "(bytes)" in name else name


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:  # noqa: N802
    return SimpleNamespace(used=_field(handle, "used"), total=_field(handle, "total"))


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:  # noqa: N802
    return SimpleNamespace(gpu=_field(handle, "use"), memory=0)


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:  # noqa: N802
    return [
        SimpleNamespace(pid=os.getpid() if pid == "self" else pid, usedGpuMemory=size)
        for pid, size in _field(handle, "processes")
    ]
