"""The GPUs of this host, the one of this process, and how much of it is used: from NVIDIA's driver, through `pynvml`.

Guarantees
- Nothing here raises or initialises CUDA. Without pynvml (the extra `gpu`), a driver or an answer there are no figures;
  then torch counts the GPUs, which initialises nothing either.
- pynvml is first used where a question is asked, and again in a fork of that process, never in the fork server.
- Names are read once in a process. A figure takes less than a millisecond.
- An error of torch about a GPU's memory gets one note about it: from the first worker that `explain` is called on.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from rpcbench.base.config import VISIBLE_GPUS
from rpcbench.base.errors import count_noun
from rpcbench.base.ids import Row
from rpcbench.base.rebuild import add_note

T = TypeVar("T")


class Gpu(NamedTuple):
    """A GPU. `number`, `uuid` and `name` are unknown without NVML, and for a part of a GPU (MIG)."""

    entry: str  # selects it in CUDA_VISIBLE_DEVICES
    number: int | None = None  # as nvidia-smi counts them
    uuid: str = ""
    name: str = ""
    memory: int | None = None  # bytes in use, by all processes
    total: int | None = None  # bytes
    use: float | None = None  # share of the last moment in which it computed, as the driver samples it

    @property
    def gpu_label(self) -> str:
        """The number and the model, as `0 H100 80GB HBM3`."""
        return self.entry[:_SHORT] if self.number is None else f"{self.number} {self.name.removeprefix('NVIDIA ')}"

    @property
    def unique_name(self) -> str:
        """The text that no other GPU of this host has."""
        return self.uuid or self.entry


_SHORT = 12  # characters of an entry without an index


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows to this process, in CUDA's order, without figures."""
    there, chosen = _on_host(), os.environ.get(VISIBLE_GPUS)
    if chosen is None:
        return list(there) or [Gpu(str(index)) for index in range(_counted_by_torch())]
    entries = [entry.strip() for entry in chosen.split(",")]
    if not there:
        return [Gpu(entry) for entry in entries[: _counted_by_torch()]]
    found = []
    for entry in entries:
        gpu = _find_selected(entry, there)
        if gpu is None:  # CUDA ignores it, and all that follow it
            break
        found.append(gpu)
    return found


def own_gpu() -> Gpu | None:
    """Return the GPU of this process: the only one that CUDA shows to it. None where there are none, or several."""
    found = visible_gpus()
    return found[0] if len(found) == 1 else None


def measure_gpu(gpu: Gpu) -> Gpu:
    """Return a GPU of this host with its figures; those that the driver does not know are None."""
    nvml, index = _load_nvml(), gpu.number
    if nvml is None or index is None:
        return gpu
    memory = _query_driver(lambda: nvml.nvmlDeviceGetMemoryInfo(_device_handle(nvml, index)))
    rates = _query_driver(lambda: nvml.nvmlDeviceGetUtilizationRates(_device_handle(nvml, index)))
    return gpu._replace(
        memory=None if memory is None else int(memory.used),
        total=None if memory is None else int(memory.total),
        use=None if rates is None else rates.gpu / 100,
    )


def gpu_report() -> Row | None:
    """Return the name and the figures of this process's own GPU as plain data; None if it has none."""
    gpu = own_gpu()
    if gpu is None:
        return None
    now = measure_gpu(gpu)
    return {"name": now.gpu_label, "memory": now.memory, "total": now.total, "use": now.use}


# -- out of memory
_LACKS = " ran out of GPU memory"
_ASKED = re.compile(r"Tried to allocate (\d+(?:\.\d+)? \w+)")
_DEVICE = re.compile(r"GPU (\d+) has")


def explain(error: BaseException, worker: str) -> None:
    """Add a sentence to torch's error about a GPU's memory: the worker, the GPU, what is used, and by how many.

    Other errors, and those that have such a sentence from another worker, stay as they are.
    """
    if isinstance(error, torch.OutOfMemoryError):
        notes = getattr(error, "__notes__", None) or ()
        if not any(_LACKS in str(note) for note in notes):
            add_note(error, _out_of_memory_text(str(error), worker))


def _out_of_memory_text(error_text: str, worker: str) -> str:
    requested, device = _ASKED.search(error_text), _DEVICE.search(error_text)
    there, number = visible_gpus(), int(device[1]) if device else 0
    gpu = measure_gpu(there[number]) if number < len(there) else None
    at = f" on GPU {gpu.gpu_label}" if gpu else ""
    sentence = f"{worker}{_LACKS}{at}{f': it asked for {requested[1]}' if requested else ''}."
    if gpu is None or gpu.memory is None or gpu.total is None:
        return sentence
    return f"{sentence} {_format_size(gpu.memory)} of {_format_size(gpu.total)} are used there{_describe_users(gpu)}."


def _describe_users(gpu: Gpu) -> str:
    """Return the processes that use a GPU, in words; empty where the driver does not know, as in some containers."""
    nvml, index = _load_nvml(), gpu.number
    running = nvml and _query_driver(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(_device_handle(nvml, index)))
    mine = [process for process in running or () if process.pid == os.getpid()]
    if not running or not mine:  # without this process the numbers are those of another namespace
        return ""
    size = mine[0].usedGpuMemory
    others = len({process.pid for process in running}) - 1
    return (
        f", {'' if size is None else f'{_format_size(size)} of it '}by this worker and the rest by "
        f"{count_noun(others, 'other process')}"
        if others
        else ", by this worker alone"
    )


def _format_size(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"  # torch's unit in the same error


# -- the driver
def _query_driver(query: Callable[[], T]) -> T | None:
    """Return a reply of the driver; None where it has none, as for a GPU that does not support the question."""
    try:
        return query()
    except Exception:  # noqa: BLE001  (figures are for display: no failure of the driver is one of the program)
        return None


@functools.cache
def _load_nvml() -> Any:
    """Return the module pynvml, ready for questions; None where it is not installed, or finds no driver."""

    def start_nvml() -> Any:
        import pynvml  # here: the fork server must not use it

        pynvml.nvmlInit()
        return pynvml

    return _query_driver(start_nvml)


@functools.cache
def _on_host() -> tuple[Gpu, ...]:
    """Return the GPUs that NVML lists, without figures."""
    nvml = _load_nvml()
    count = None if nvml is None else _query_driver(nvml.nvmlDeviceGetCount)
    found = (_query_driver(functools.partial(_describe_gpu, nvml, index)) for index in range(count or 0))
    return tuple(gpu for gpu in found if gpu is not None)


def _describe_gpu(nvml: Any, index: int) -> Gpu:
    handle = _device_handle(nvml, index)
    uuid, name = _decode_text(nvml.nvmlDeviceGetUUID(handle)), _decode_text(nvml.nvmlDeviceGetName(handle))
    return Gpu(uuid, index, uuid, name)


def _device_handle(nvml: Any, index: int | None) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(index)


def _decode_text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # older versions return bytes


def _find_selected(entry: str, there: tuple[Gpu, ...]) -> Gpu | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES selects; None if there is none."""
    if entry.startswith("MIG-"):
        return Gpu(entry)
    if entry.isdecimal():
        found = [gpu for gpu in there if gpu.number == int(entry)]
    else:
        found = [gpu for gpu in there if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return found[0]._replace(entry=entry) if len(found) == 1 else None


def _counted_by_torch() -> int:
    return _query_driver(torch.cuda.device_count) or 0


def reset_driver() -> None:
    """Ask the driver anew from now on, also whether it is there."""
    _load_nvml.cache_clear()
    _on_host.cache_clear()


with contextlib.suppress(AttributeError):  # Windows has no forks
    os.register_at_fork(after_in_child=reset_driver)
