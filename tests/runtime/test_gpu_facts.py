"""Facts about GPUs come from the driver, stand-in or absent, and no answer of it raises an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpus import GB, fake_gpus

from rpcbench.runtime import gpus
from rpcbench.runtime.gpus import Gpu

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.50 GiB is free."
)


def test_the_gpus_of_the_host_have_numbers_and_names(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 2) as fake:
        fake.change(1, name="NVIDIA Old (bytes)")
        gpus.reset_driver()
        assert gpus.visible_gpus() == [
            Gpu(fake.uuid(0), 0, fake.uuid(0), "NVIDIA Fake 80GB"),
            Gpu(fake.uuid(1), 1, fake.uuid(1), "NVIDIA Old (bytes)"),
        ]
        assert [gpu.gpu_label for gpu in gpus.visible_gpus()] == ["0 Fake 80GB", "1 Old (bytes)"]
        assert gpus.own_gpu() is None and gpus.gpu_report() is None, "CUDA shows several"
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("shown", "indices"),
    [
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("GPU-00000003-fake,GPU-00000001", [3, 1]),
        ("0,9,1", [0]),  # as CUDA: what follows a wrong entry is not there
        ("-1", []),
        ("", []),
        ("GPU-0000000", []),  # the beginning of four of them
        ("MIG-7ab,1", [None, 1]),
    ],
)
def test_the_variable_of_cuda_restricts_and_orders_them(tmp_path: Path, shown: str, indices: list[int | None]) -> None:
    with fake_gpus(tmp_path, 4, shown):
        assert [gpu.number for gpu in gpus.visible_gpus()] == indices
        words = [word.strip() for word in shown.split(",")]
        assert [gpu.entry for gpu in gpus.visible_gpus()] == words[: len(indices)]


def test_the_only_one_that_is_shown_is_the_process_s_own_with_figures(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 3, "1") as fake:
        assert gpus.gpu_report() == {"name": "1 Fake 80GB", "memory": 0, "total": 80 * GB, "use": 0.0}
        fake.change(1, used=3 * GB, use=42)
        assert gpus.gpu_report() == {"name": "1 Fake 80GB", "memory": 3 * GB, "total": 80 * GB, "use": 0.42}
        fake.change(1, use=None)
        assert gpus.gpu_report() == {"name": "1 Fake 80GB", "memory": 3 * GB, "total": 80 * GB, "use": None}
        fake.change(1, lost=True)
        assert gpus.gpu_report() == {"name": "1 Fake 80GB", "memory": None, "total": None, "use": None}
        fake.path.unlink()
        assert gpus.gpu_report() == {"name": "1 Fake 80GB", "memory": None, "total": None, "use": None}


def test_a_gpu_that_is_lost_from_the_beginning_is_left_out_and_the_others_keep_their_numbers(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 3) as fake:
        fake.change(1, lost=True)
        gpus.reset_driver()
        assert [gpu.number for gpu in gpus.visible_gpus()] == [0, 2]


def test_a_part_of_a_gpu_has_an_entry_and_no_figures(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 1, "MIG-0123456789abcdef"):
        assert gpus.gpu_report() == {"name": "MIG-01234567", "memory": None, "total": None, "use": None}


@pytest.mark.parametrize("absent", ["driver", "module"])
def test_without_a_driver_or_pynvml_torch_counts_and_there_are_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    with fake_gpus(tmp_path, 4, "5,7") as fake:
        if absent == "driver":
            fake.path.unlink()
        else:
            monkeypatch.setitem(sys.modules, "pynvml", None)  # its import raises ModuleNotFoundError
        gpus.reset_driver()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert gpus.visible_gpus() == [Gpu("5"), Gpu("7")]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert gpus.gpu_report() == {"name": "7", "memory": None, "total": None, "use": None}
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
        assert gpus.visible_gpus() == [] and gpus.gpu_report() is None


def test_a_fork_asks_the_driver_itself(tmp_path: Path) -> None:
    """In a process of its own: one that has run a torch operation must not be forked."""
    program = """
import os
from rpcbench.runtime import gpus
assert len(gpus.visible_gpus()) == 2
child = os.fork()
if child == 0:
    open(os.environ["FAKE_NVML"], "w").write("[]")
    os._exit(len(gpus.visible_gpus()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "it kept the GPUs of its parent"
assert len(gpus.visible_gpus()) == 2
"""
    with fake_gpus(tmp_path, 2) as fake:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=60)
        assert fake.path.read_text() == "[]"


# ---- out of memory


def told(error: BaseException) -> Any:
    gpus.explain(error, "worker2")
    return getattr(error, "__notes__", None)


def test_an_error_about_memory_names_worker_gpu_sizes_and_other_processes(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 2, "1") as fake:
        fake.change(1, used=78 * GB + GB // 2, processes=[["self", 12 * GB], [11, 40 * GB], [12, None], [11, 2 * GB]])
        error = torch.OutOfMemoryError(OOM)
        sentence = (
            "worker2 ran out of GPU memory on GPU 1 Fake 80GB: it asked for 2.00 GiB. 78.50 GiB of 80.00 GiB are used "
            "there, 12.00 GiB of it by this worker and the rest by 2 other processes."
        )
        assert told(error) == [sentence]
        gpus.explain(error, "worker1")  # it went through another worker, which has memory left
        assert told(error) == [sentence]
        fake.change(1, processes=[["self", None], [11, None]])
        assert told(torch.OutOfMemoryError(OOM))[0].endswith(
            "used there, by this worker and the rest by 1 other process."
        )
        fake.change(1, processes=[["self", None]])
        assert told(torch.OutOfMemoryError(OOM))[0].endswith("80.00 GiB are used there, by this worker alone.")


@pytest.mark.parametrize("processes", [None, [], [[11, 5]]], ids=["not supported", "none", "of another namespace"])
def test_processes_that_the_driver_does_not_know_are_not_told(tmp_path: Path, processes: Any) -> None:
    with fake_gpus(tmp_path, 2) as fake:
        fake.change(1, used=GB, processes=processes)
        (sentence,) = told(torch.OutOfMemoryError(OOM.replace("GPU 0", "GPU 1")))
        assert sentence.endswith("on GPU 1 Fake 80GB: it asked for 2.00 GiB. 1.00 GiB of 80.00 GiB are used there.")


def test_without_figures_the_worker_and_its_wish_are_told(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 0):
        assert told(torch.OutOfMemoryError(OOM)) == ["worker2 ran out of GPU memory: it asked for 2.00 GiB."]
        assert told(torch.OutOfMemoryError("no such words")) == ["worker2 ran out of GPU memory."]
        assert told(RuntimeError(OOM)) is None and told(MemoryError(OOM)) is None
