"""Each kind of tensor through a whole codec: it arrives equal, with its memory layout, class and state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from rpcbench.base.errors import SerializationError
from rpcbench.serialization.pickler import Codec
from rpcbench.serialization.tensors import INLINE
from rpcbench.wire.messages import Body

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch.func uses it
]

SCALES, ZEROS = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([0, 1, 5])
DENSE = torch.tensor([[0.0, 2, 0, 0], [3, 0, 0, 4]])


class Tagged(torch.Tensor):
    pass


class Slotted(torch.Tensor):
    __slots__ = ("unit",)


class Stately(torch.Tensor):
    def __getstate__(self) -> Any:
        return {"spoken": self.word}

    def __setstate__(self, state: Any) -> None:
        self.word = state["spoken"]


def tagged(kind: type[torch.Tensor], **state: Any) -> torch.Tensor:
    tensor = torch.arange(4.0).as_subclass(kind)
    for name, value in state.items():
        setattr(tensor, name, value)
    return tensor


def per_channel(axis: int, zeros: torch.Tensor = ZEROS, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    values = torch.arange(9.0).reshape(3, 3)
    return torch.quantize_per_channel(values, SCALES, zeros, axis, dtype)


def per_tensor(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(12.0).reshape(3, 4), 0.5, 3, dtype)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: torch.tensor(2.5),
    "empty": lambda: torch.zeros(3, 0, 2),
    "bool": lambda: torch.tensor([True, False]),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "expanded": lambda: torch.arange(3.0).expand(5, 3),
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conj": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "neg": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "wants gradients": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 2)),
    "frozen": lambda: torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "meta": lambda: torch.empty(10**6, 10**6, device="meta").t(),
    "meta parameter": lambda: torch.nn.Parameter(torch.empty(3, device="meta")),
    "qint8": lambda: per_tensor(torch.qint8),
    "quint8": lambda: per_tensor(torch.quint8),
    "qint32": lambda: per_tensor(torch.qint32),
    "quantized view": lambda: per_tensor(torch.qint8)[:, 1:3].t(),
    "quantized empty": lambda: per_tensor(torch.qint8)[:0],
    "per channel": lambda: per_channel(0),
    "per channel, axis 1": lambda: per_channel(1, dtype=torch.qint32),
    "per channel, float zeros": lambda: per_channel(0, ZEROS.float(), torch.quint8),
    "quint4x2": lambda: per_channel(0, ZEROS.float(), torch.quint4x2),
    "coo": lambda: DENSE.to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2, 3], (3,), check_invariants=True),
    "coo, hybrid": lambda: torch.sparse_coo_tensor([[2, 0]], torch.rand(2, 3), (4, 3), check_invariants=True),
    "coo, empty": lambda: torch.sparse_coo_tensor(size=(2, 3), check_invariants=True),
    "coo, conj": lambda: (DENSE * 1j).to_sparse().conj(),
    "coo, wants gradients": lambda: DENSE.to_sparse().requires_grad_(),
    "csr": DENSE.to_sparse_csr,
    "csr, batched": lambda: torch.stack([DENSE, DENSE]).to_sparse_csr(),
    "csr, int32": lambda: torch.sparse_csr_tensor(
        *(torch.tensor(part, dtype=torch.int32) for part in ([0, 1, 2], [1, 0])), torch.ones(2), check_invariants=True
    ),
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((1, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "subclass": lambda: tagged(Tagged, note={"more": [1]}),
    "subclass with slots": lambda: tagged(Slotted, unit="m", more=2),
    "subclass that says what it is": lambda: tagged(Stately, word="hello"),
    "with attributes": lambda: tagged(torch.Tensor, note="mine"),
}


def send(value: Any) -> Any:
    encoded = Codec().encode_value(value)
    payload, table, buffers = encoded[0]
    return Codec().decode_value(Body(payload, table, [bytearray(buffer) for buffer in buffers]))


def elements(tensor: torch.Tensor) -> list[Any]:
    """The elements of a tensor of any layout."""
    tensor = tensor.detach()
    if tensor.is_meta:
        return []
    if tensor.is_nested:
        return [elements(part) for part in tensor.unbind()]
    if tensor.is_sparse:
        return [tensor._indices().tolist(), tensor._values().tolist()]
    if tensor.layout is not torch.strided:
        return [tensor.to_dense().tolist(), tensor.values().tolist()]
    return tensor.dequantize().tolist() if tensor.is_quantized else tensor.resolve_conj().resolve_neg().tolist()


def quantizer(tensor: torch.Tensor) -> list[Any]:
    if not tensor.is_quantized:
        return []
    if tensor.qscheme() == torch.per_tensor_affine:
        return [tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()]
    channels = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return [tensor.qscheme(), tensor.q_per_channel_axis(), *(str(part) for part in channels)]


def strides(tensor: torch.Tensor) -> list[int]:
    """The strides of the dimensions with more than one element."""
    if tensor.is_nested or tensor.layout is not torch.strided or not tensor.numel():
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def state(tensor: torch.Tensor) -> dict[str, Any]:
    names = ("note", "more", "unit", "word", "persistent")
    return {name: getattr(tensor, name) for name in names if hasattr(tensor, name)}


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "class": type(tensor),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "layout": tensor.layout,
        "shape": None if tensor.is_nested else tensor.shape,
        "strides": strides(tensor),
        "flags": (tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()),
        "coalesced": tensor.is_sparse and tensor.is_coalesced(),
        "quantizer": quantizer(tensor),
        "state": state(tensor),
        "elements": elements(tensor),
    }


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_a_tensor_of_each_kind_arrives_equal(make: Callable[[], torch.Tensor]) -> None:
    sent = make()
    first, again = send([sent, {"again": sent}])
    assert describe(first) == describe(sent)
    assert again["again"] is first


@pytest.mark.parametrize("make", [DENSE.to_sparse, lambda: per_tensor(torch.qint8), lambda: per_channel(0)])
def test_tensors_with_parts_arrive_between_large_buffers(make: Callable[[], torch.Tensor]) -> None:
    large = torch.rand(INLINE)
    arrived = send([large, make(), large + 1])
    assert describe(arrived[1]) == describe(make())
    assert torch.equal(arrived[2], arrived[0] + 1)


@st.composite
def windows(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A matrix, and slices of it in any order and steps, some transposed, repeated, conjugated."""
    base = torch.arange(64).to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64]))).reshape(8, 8)
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rows, columns = (slice(draw(st.integers(0, 7)), 8, draw(st.integers(1, 3))) for _ in range(2))
        view = base[rows, columns]
        for change in draw(st.lists(st.sampled_from(["t", "conj", "neg", "expand"]), max_size=3)):
            if change == "expand":
                view = view.unsqueeze(0).expand(2, *view.shape)
            else:
                view = {"t": lambda v: v.mT, "conj": torch.conj, "neg": torch._neg_view}[change](view)
        found.append(view)
    return base, found


@given(windows())
def test_views_arrive_equal_and_share_memory_with_their_base(drawn: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    base, sent = drawn
    arrived = send([base, *sent])
    assert [describe(tensor) for tensor in arrived[1:]] == [describe(tensor) for tensor in sent]
    base.zero_()
    arrived[0].zero_()
    assert [elements(tensor) for tensor in arrived[1:]] == [elements(tensor) for tensor in sent]


def test_views_of_a_quantized_tensor_share_memory_on_arrival() -> None:
    base = per_tensor(torch.qint8)
    whole, row = send([base, base[1]])
    whole.copy_(torch.zeros(3, 4))
    assert row.dequantize().tolist() == [0, 0, 0, 0]


def test_a_small_view_of_a_large_storage_is_sent_without_the_rest() -> None:
    base = torch.arange(10**6)
    assert send(base[5:15]).untyped_storage().nbytes() < 200


def outside(make: Callable[[], Any]) -> Any:
    """Return the error of sending the result of `make`."""
    with pytest.raises(SerializationError) as caught:
        send(("x", [make()]))
    return str(caught.value)


def test_fake_and_functional_tensors_are_refused_with_their_path() -> None:
    inside = outside(lambda: FakeTensorMode().from_tensor(torch.ones(2)))
    assert inside.startswith("value[1][0]: a tensor that stands for others while torch traces")
    assert outside(lambda: torch._to_functional_tensor(torch.ones(2))) == inside


@pytest.mark.parametrize(
    "transform",
    [torch.vmap, torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))],
    ids=["vmap", "grad", "jvp"],
)
def test_tensors_inside_a_torch_func_transform_are_refused(transform: Any) -> None:
    seen: list[str] = []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(outside(lambda: x))
        return x.sum()

    transform(call)(torch.ones(3))
    assert all(text.startswith("value[1][0]: a tensor inside torch.vmap or a transform") for text in seen) and seen


def test_an_unpicklable_attribute_of_a_tensor_subclass_is_named() -> None:
    with pytest.raises(SerializationError, match=r"^value\[0\]\.note\[1\]: cannot pickle 'generator'"):
        send([tagged(Tagged, note=[1, (i for i in ())])])


def test_a_model_on_the_meta_device_arrives_without_data() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    arrived = send(model)
    assert arrived.weight.is_meta and arrived.to_empty(device="cpu")(torch.ones(3)).shape == (2,)


def test_sparse_and_quantized_tensors_are_sent_without_warnings() -> None:
    sparse = DENSE.to_sparse_csr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        send([sparse, per_tensor(torch.qint8), per_channel(0)])
