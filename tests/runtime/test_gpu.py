"""Device maps on real devices: streams, sparse tensors and device memory, which the fake device lacks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rpcbench.autograd as dist_autograd
from rpcbench.runtime import gpus
from rpcbench.serialization.pickler import Codec
from rpcbench.serialization.tensor_types import Route
from tests.worlds import mapped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices here")

ZERO, CPU = torch.device("cuda", 0), torch.device("cpu")
DENSE = torch.tensor([[0.0, 2, 0, 0], [3, 0, 0, 4]])


def travelled(sent: Any, here: torch.device = ZERO, there: torch.device = ZERO) -> Any:
    codec = Codec()
    return codec.decode_value(codec.encode_value(sent, route=Route({here: there}, "No way."))[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(2.5),
        lambda: torch.zeros(3, 0),
        lambda: torch.arange(10**5).reshape(100, 1000)[::2, 3:].t(),
        lambda: torch.rand(100).half(),
        lambda: torch.rand(100).to(torch.float8_e4m3fn),
        lambda: torch.tensor([1 + 2j]).conj(),
        DENSE.to_sparse,
        DENSE.to_sparse_csr,
        lambda: DENSE.to_sparse_bsr((2, 2)),
        lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.5, 3, torch.qint8),
    ],
    ids=["0-d", "empty", "strided", "half", "float8", "conj", "coo", "csr", "bsr", "quantized"],
)
@pytest.mark.parametrize("there", [ZERO, CPU], ids=str)
def test_a_tensor_of_each_kind_arrives_on_the_mapped_device(make: Any, there: torch.device) -> None:
    sent = make().to(ZERO)
    arrived = travelled([sent], there=there)[0]
    assert (arrived.device, arrived.layout, arrived.dtype, arrived.shape) == (
        there,
        sent.layout,
        sent.dtype,
        sent.shape,
    )
    plain = [
        t.dequantize() if t.is_quantized else t.to_dense() if t.layout is not torch.strided else t
        for t in (arrived, sent)
    ]
    assert plain[0].cpu().tolist() == plain[1].cpu().tolist()


def test_views_share_memory_on_the_mapped_device() -> None:
    base = torch.arange(10**5, device=ZERO)
    whole, part = travelled([base, base[10:20]])
    whole.zero_()
    assert part.tolist() == [0] * 10 and base[10].item() == 10


def slow(stream: torch.cuda.Stream) -> torch.Tensor:
    """Return a tensor whose computation has not finished."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # a tenth of a second or so
        return torch.ones(10**6, device=ZERO) * 3


def test_a_tensor_that_a_stream_still_computes_is_sent_when_it_is_complete() -> None:
    stream = torch.cuda.Stream(ZERO)
    sent = slow(stream)
    with torch.cuda.stream(stream):
        arrived = travelled(sent)
    with torch.cuda.stream(torch.cuda.Stream(ZERO)):
        assert arrived.eq(3).all().item()


def doubled(tensor: torch.Tensor, where: str) -> torch.Tensor:
    assert str(tensor.device) == where, tensor.device
    return tensor * 2


@pytest.mark.parametrize("there", ["cuda:0", "cpu"])
def test_calls_and_gradients_follow_the_map(tmp_path: Path, there: str) -> None:
    with mapped(tmp_path, {"worker1": {"cuda:0": there}}, {}) as (me, _), dist_autograd.context() as context:
        x = torch.arange(3.0, device=ZERO, requires_grad=True)
        y = me.call("worker1", doubled, (x, there)).wait()
        assert y.device == ZERO
        dist_autograd.backward(context, [(y * y).sum()])
        (gradient,) = dist_autograd.get_gradients(context).values()
        assert gradient.device == ZERO and gradient.tolist() == [0, 8, 16]


def test_a_missing_map_is_an_error_of_the_caller(tmp_path: Path) -> None:
    with mapped(tmp_path, {}, {}) as (me, _):
        with pytest.raises(RuntimeError, match=r"only supports CPU tensors by default.*Request device mapping"):
            me.call("worker1", doubled, (torch.ones(1, device=ZERO), "cuda:0"))
        with pytest.raises(RuntimeError, match="Response device mapping is not available"):
            me.call("worker1", torch.ones, (1,), {"device": "cuda:0"}).wait()


@two_devices
def test_a_map_can_swap_two_devices(tmp_path: Path) -> None:
    with mapped(tmp_path, {"worker1": {"cuda:0": "cuda:1", "cuda:1": "cuda:0"}}, {}) as (me, _):
        answer = me.call("worker1", doubled, (torch.ones(2, device=ZERO), "cuda:1")).wait()
        assert answer.device == ZERO and answer.tolist() == [2, 2]


READ = """
import torch
from rpcbench.runtime import gpus
print(gpus.own_gpu().gpu_label, gpus.gpu_report()["total"])
assert not torch.cuda.is_initialized()
total = torch.cuda.get_device_properties(0).total_memory
assert abs(gpus.gpu_report()["total"] - total) < 0.1 * total and gpus.own_gpu().name == torch.cuda.get_device_name(0)
"""


def test_the_driver_and_torch_agree_on_the_gpu_and_reading_initialises_nothing() -> None:
    pytest.importorskip("pynvml", reason="figures need nvidia-ml-py")
    last = torch.cuda.device_count() - 1
    shown = gpus.visible_gpus()[last].entry
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": shown}
    subprocess.run([sys.executable, "-c", READ], env=environ, check=True, timeout=100)


def test_an_error_about_memory_is_explained_with_sizes() -> None:
    with pytest.raises(torch.OutOfMemoryError) as raised:
        torch.empty(1 << 44, dtype=torch.uint8, device=ZERO)
    gpus.explain(raised.value, "worker7")
    (note,) = raised.value.__notes__
    assert note.startswith("worker7 ran out of GPU memory on GPU ") and "it asked for 16384.00 GiB." in note
