"""Each worker of a cluster has the GPU of its number, and mistakes are one sentence before any process starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpus import GB, FakeGpus, fake_gpus

import rpcbench
from rpcbench.base.config import WorldConfig
from rpcbench.launch.gpu_pins import GpuPins, gpu_choices


def entries(chosen: Any, n: int, workers: int | None = None, elsewhere: str = "") -> list[str]:
    pins = GpuPins(chosen, n, "local", elsewhere)
    return [pins.entry_of_worker(number) for number in range(1, (workers or n) + 1)]


def test_without_a_list_each_has_one_where_there_are_enough(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 3) as fake:
        uuids = [fake.uuid(i) for i in range(3)]
        assert entries(None, 3) == uuids and entries(None, 2) == uuids[:2]
        assert entries(None, 2, workers=4) == [*uuids, ""], "one that is added later may find none"
        assert entries(None, 4) == [""] * 4 and entries("none", 2) == [""] * 2
        assert entries(None, 2, elsewhere="no") == [""] * 2
    with fake_gpus(tmp_path, 0):
        assert entries(None, 1) == [""]


def test_numbers_are_said_in_any_way_and_one_said_twice_is_shared(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 3) as fake:
        assert entries("2, 0", 2) == entries([2, 0], 2) == entries((2, 0, 1), 2) == [fake.uuid(2), fake.uuid(0)]
        assert entries(range(2), 2) == [fake.uuid(0), fake.uuid(1)]
        assert entries("1,1", 2) == [fake.uuid(1)] * 2


def test_numbers_are_within_the_variable_of_cuda(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 8, "6,GPU-00000002-fake"):
        assert entries("1,0", 2) == ["GPU-00000002-fake", "6"]
        assert entries(None, 2) == ["6", "GPU-00000002-fake"] and entries(None, 3) == [""] * 3
        with pytest.raises(ValueError, match=r"^there is no GPU 2: CUDA_VISIBLE_DEVICES=6,GPU-00000002-fake has 0, 1"):
            entries("2", 1)


MISTAKES = [
    ("0,9", 2, "there is no GPU 9: this host has 0, 1, 2"),
    ("0,x", 2, "'x' is not the number of a GPU: say numbers with commas, gpus=[0, 1], in a notebook --gpus 0,1; or n"),
    ("0,", 2, "'' is not the number of a GPU"),
    ("-1", 1, "'-1' is not the number of a GPU"),
    ("1.0", 1, "'1.0' is not the number of a GPU"),
    ([True], 1, "'True' is not the number of a GPU"),
    (2, 2, "gpus=2 is no list of GPUs: gpus=[0, 1], in a notebook --gpus 0,1"),
    ({0, 1}, 2, "gpus={0, 1} is no list of GPUs"),
    ([0, 1], 4, "gpus=[0, 1] has 2 GPUs for 4 workers: name one for each (a number said twice is shared), or pin none"),
    ("0", 2, "gpus=[0] has 1 GPU for 2 workers"),
    ([], 1, "gpus=[] has 0 GPUs for 1 worker"),
]


@pytest.mark.parametrize(("chosen", "n", "sentence"), MISTAKES, ids=str)
def test_a_mistake_is_one_sentence(tmp_path: Path, chosen: Any, n: int, sentence: str) -> None:
    with fake_gpus(tmp_path, 3), pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        GpuPins(chosen, n, "local")


def test_a_host_without_gpus_says_so(tmp_path: Path) -> None:
    with (
        fake_gpus(tmp_path, 0),
        pytest.raises(ValueError, match=r"^there is no GPU 0: this host has none that this process can use$"),
    ):
        rpcbench.Cluster(1, gpus=[0])


def test_launchers_that_assign_none_say_who_does(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 2):
        with pytest.raises(ValueError, match=r"^gpus=0,1: the launcher 'command' assigns no GPUs; let its comman"):
            rpcbench.Cluster(2, launcher="command", options={"template": "{cmd}"}, gpus="0,1")
        with pytest.raises(ValueError, match=r"^gpus=\[0\]: the launcher 'mine' assigns no GPUs; leave gpus out"):
            GpuPins([0], 1, "mine", "leave gpus out")
        GpuPins("none", 1, "command", "leave gpus out")


def test_values_of_the_option_are_offered(tmp_path: Path) -> None:
    with fake_gpus(tmp_path, 3):
        assert gpu_choices(2) == ["0,1", "none"] and gpu_choices(4) == ["none"]
    with fake_gpus(tmp_path, 0):
        assert gpu_choices(1) == ["none"]


def test_a_config_changes_the_environment_only_with_a_gpu() -> None:
    config = WorldConfig("w", 1, "c", "/d", b"")
    given = {"CUDA_VISIBLE_DEVICES": "3", "A": "b"}
    assert config.pinned_environment(given) == given
    pinned = WorldConfig.from_json(WorldConfig("w", 1, "c", "/d", b"", gpu="GPU-7").to_json())
    assert pinned.pinned_environment(given) == {"CUDA_VISIBLE_DEVICES": "GPU-7", "A": "b"}
    assert given["CUDA_VISIBLE_DEVICES"] == "3"


# ---- workers


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeGpus]:
    with fake_gpus(tmp_path, 3) as fake:
        yield fake


def seen() -> tuple[str | None, str, bool]:
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"], torch.cuda.is_initialized()


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB")


@pytest.mark.process
def test_workers_are_pinned_restarted_alike_and_seen_in_the_status(host: FakeGpus, no_leaks: None) -> None:
    with rpcbench.Cluster(2, gpus=[2, 0]) as made:
        there = {"worker1": (host.uuid(2), "0", False), "worker2": (host.uuid(0), "0", False)}
        assert {name: made.rpc_sync(name, seen) for name in made.workers} == there
        made.restart("worker1")
        assert made.rpc_sync("worker1", seen) == there["worker1"]
        host.change(2, used=20 * GB, use=50)
        first, _ = made.status()
        assert first.gpu is not None and first.gpu[1:] == (2, host.uuid(2), "NVIDIA Fake 80GB", 20 * GB, 80 * GB, 0.5)
        head, line, _ = repr(made.status()).splitlines()
        assert head.split("  ")[-3:] == ["GPU", "GPU memory", "GPU use"] or "GPU memory" in head
        assert "2 Fake 80GB" in line and "21.5 of 85.9 GB" in line and line.endswith("50 %")
        with pytest.raises(ValueError, match=r"gpus=\[2, 0\] has 2 GPUs for 3 workers"):
            made.scale(3)
        assert made.workers == ["worker1", "worker2"]
        host.change(2, processes=[[1, GB]])
        sentence = "worker1 ran out of GPU memory on GPU 2 Fake 80GB: it asked for 2.00 GiB. 20.00 GiB of 80.00 GiB are"
        with pytest.raises(torch.OutOfMemoryError) as called:
            made.rpc_sync("worker1", out_of_memory)
        assert str(called.value.__notes__[0]).startswith(sentence) and sentence in str(called.value.__cause__)
        with pytest.raises(torch.OutOfMemoryError) as ran:
            made.run("worker1", "import torch\nraise torch.OutOfMemoryError('Tried to allocate 2.00 GiB')")
        assert [note.startswith(sentence) for note in ran.value.__notes__] == [True]
        assert sentence in "\n".join(ran.value._render_traceback_())


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("how", [{"start": "spawn"}, {"kind": "kernel"}, {"launcher": "torchrun"}], ids=str)
def test_every_launcher_of_this_host_pins(host: FakeGpus, no_leaks: None, how: dict[str, Any]) -> None:
    with rpcbench.Cluster(2, **how) as made:
        assert [made.rpc_sync(name, seen) for name in made.workers] == [
            (host.uuid(0), "0", False), (host.uuid(1), "0", False)
        ]  # fmt: skip


@pytest.mark.process
def test_workers_without_a_gpu_of_their_own_are_as_ever(host: FakeGpus, no_leaks: None) -> None:
    with rpcbench.Cluster(2, gpus="none") as made:
        assert [made.rpc_sync(name, seen) for name in made.workers] == [(None, "0", False), (None, "1", False)]
        assert [row.gpu for row in made.status()] == [None, None] and "GPU" not in repr(made.status())
