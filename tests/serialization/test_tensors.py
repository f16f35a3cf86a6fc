"""Tensor tables: tensors arrive equal, share memory as before, and invalid tables are refused."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from rpcbench.base.errors import ProtocolError, SerializationError
from rpcbench.serialization import tensor_types, tensors
from rpcbench.serialization.tensors import INLINE, WORTH_PACKING

DTYPES = sorted(tensors.DTYPES)
COMPRESSED = {torch.sparse_csr: (), torch.sparse_csc: (), torch.sparse_bsr: (2, 1), torch.sparse_bsc: (2, 1)}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:(ComplexHalf|BComplex32) support is experimental"),  # the second from torch 2.14
]


def travel(*sent: torch.Tensor) -> list[torch.Tensor]:
    table, buffers = tensors.encode_tensors(sent)
    received, used = tensors.decode_tensors(table, [bytearray(buffer) for buffer in buffers])
    assert used == len(buffers)
    return received


def weight(*sent: torch.Tensor) -> int:
    """Bytes that these tensors take on the wire."""
    table, buffers = tensors.encode_tensors(sent)
    return len(table) + sum(buffer.nbytes for buffer in buffers)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements in order, for every dtype, conjugate and negative bits left out."""
    size = tensor.element_size()
    base = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    strides = [*(stride * size for stride in tensor.stride()), 1]
    return base.as_strided([*tensor.shape, size], strides, tensor.storage_offset() * size).numpy().tobytes()


def describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]
    flags = tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), type(tensor)
    return tensor.dtype, tensor.shape, steps, flags, raw(tensor)


def memory(dtype: str, data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=tensors.DTYPES[dtype])


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors of any dtypes, strides and offsets over one storage of at most 1 KB; they may overlap or leave gaps."""
    data = draw(st.binary(min_size=16, max_size=1024))
    base = memory("uint8", data)
    found = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = tensors.DTYPES[draw(st.sampled_from(DTYPES))]
        room = len(data) // dtype.itemsize
        offset = draw(st.integers(0, room - 1))
        shape, strides, left = [], [], room - 1 - offset
        for _ in range(draw(st.integers(0, 3))):
            stride = draw(st.integers(0, 9))
            size = draw(st.integers(0, min(8, left // stride + 1) if stride else 8))
            left -= max(size - 1, 0) * stride
            shape.append(size)
            strides.append(stride)
        found.append(torch.empty(0, dtype=dtype).set_(base.untyped_storage(), offset, shape, strides))
    return found


@given(views())
def test_views_arrive_equal_and_share_memory_at_the_same_distances(sent: list[torch.Tensor]) -> None:
    received = travel(*sent)
    assert [describe(t) for t in received] == [describe(t) for t in sent]
    full = [i for i, t in enumerate(sent) if t.numel()]
    distances = [sent[i].data_ptr() - sent[full[0]].data_ptr() for i in full]
    assert [received[i].data_ptr() - received[full[0]].data_ptr() for i in full] == distances
    assert len({received[i].untyped_storage().data_ptr() for i in full}) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 24, INLINE + 8])
def test_each_dtype_arrives_bit_for_bit(dtype: str, count: int) -> None:
    size = tensors.DTYPES[dtype].itemsize
    if count:
        base = memory(dtype, bytes(i % 251 for i in range(count * size)))
    else:
        base = torch.empty(0, dtype=tensors.DTYPES[dtype])
    sent = [base, base.as_strided((2, count // 2), (1, 2)), base[count // 3 :]]
    assert [describe(t) for t in travel(*sent)] == [describe(t) for t in sent]


@pytest.mark.parametrize(
    "sent",
    [
        torch.tensor(2.5),
        torch.zeros(3, 0, 2),
        torch.arange(24.0).reshape(2, 3, 4).to(memory_format=torch.contiguous_format).permute(2, 0, 1),
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
        torch.ones(1).expand(5, 7),
    ],
    ids=["0-d", "empty", "permuted", "channels-last", "conj", "neg", "grad", "parameter", "frozen", "expanded"],
)
def test_a_tensor_keeps_its_class_layout_and_flags(sent: torch.Tensor) -> None:
    (received,) = travel(sent)
    assert describe(received) == describe(sent)
    assert received.is_leaf
    assert torch.equal(received, sent)


def test_a_tensor_inside_a_graph_arrives_as_a_leaf_that_requires_grad() -> None:
    (received,) = travel(torch.ones(3, requires_grad=True) * 2)
    assert received.is_leaf and received.requires_grad and received.tolist() == [2, 2, 2]


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, *COMPRESSED], ids=str)
def test_sparse_tensors_keep_their_layout(layout: torch.layout, wanted: bool) -> None:
    dense = torch.tensor([[0.0, 2, 0, 0], [3, 0, 0, 4]])
    blocks = COMPRESSED.get(layout)
    sent = dense.to_sparse(layout=layout, blocksize=blocks) if blocks else dense.to_sparse(layout=layout)
    (received,) = travel(sent.requires_grad_(wanted))
    assert (received.layout, received.shape, received.requires_grad) == (layout, sent.shape, wanted)
    assert torch.equal(received.detach().to_dense(), dense)


def test_an_uncoalesced_tensor_keeps_its_entries() -> None:
    sent = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, 2.0, 3.0], (3,), check_invariants=True)
    (received,) = travel(sent)
    assert not received.is_coalesced() and received._values().tolist() == [1, 2, 3]
    assert travel(sent.coalesce())[0].is_coalesced()


@pytest.mark.parametrize("count", [4, INLINE])
def test_a_received_tensor_is_writable_and_separate_from_the_sent_one(count: int) -> None:
    sent = torch.zeros(count)
    table, buffers = tensors.encode_tensors([sent])
    (received,), _ = tensors.decode_tensors(table, buffers)  # the sender's own views, as within one process
    received += 1
    assert sent.sum() == 0 and received.sum() == count
    assert all(buffer.readonly for buffer in buffers)


def test_large_storages_are_sent_from_the_tensors_memory() -> None:
    sent = torch.zeros(INLINE, dtype=torch.uint8)
    _, (buffer,) = tensors.encode_tensors([sent])
    sent[7] = 9
    assert buffer[7] == 9
    assert tensors.encode_tensors([sent[:-1]])[1] == []


def test_received_buffers_become_the_memory_of_the_tensors() -> None:
    table, (buffer,) = tensors.encode_tensors([torch.zeros(INLINE, dtype=torch.uint8)])
    mine = bytearray(buffer)
    (received,), _ = tensors.decode_tensors(table, [mine])
    mine[3] = 5
    assert received[3] == 5


def test_only_the_viewed_part_of_a_storage_is_sent() -> None:
    base = torch.zeros(1000, 1000)
    assert weight(base[500, :10]) < 200
    assert weight(base[:, 3]) < 4200
    assert weight(base[0], base[999]) < 8200
    assert weight(base[:600]) < 600 * 4000 + 100
    assert weight(torch.zeros(1).expand(10**6)) < 100
    assert weight(base[:, 3:4].expand(1000, 500)) < 4200


def test_packed_views_keep_their_values_and_repeated_dimensions() -> None:
    base = torch.arange(10**6, dtype=torch.float64).reshape(1000, 1000)
    sent = [base[:, 3], base[::2, 5].conj(), base[:, 7:8].expand(1000, 3), base[0], base[999, ::500]]
    received = travel(*sent)
    assert all(torch.equal(a, b) for a, b in zip(received, sent, strict=True))
    assert received[2].stride() == (1, 0)


def test_a_packed_view_of_a_conjugate_is_not_conjugated_twice() -> None:
    sent = torch.full((200, 200), 1 + 1j).conj()[:, 0]
    (received,) = travel(sent)
    assert received.is_conj() and torch.equal(received, sent)


def test_near_views_are_sent_together_and_a_distant_one_separately() -> None:
    base = torch.arange(10**6)
    near = [base[100:200], base[150:250], base[250 + WORTH_PACKING // 8 - 1 :][:10]]
    received = travel(*near, base[-5:])
    received[0].zero_()
    assert received[1][:50].sum() == 0 and received[1][50:].tolist() == near[1][50:].tolist()
    assert received[2].untyped_storage().data_ptr() == received[0].untyped_storage().data_ptr()
    assert weight(*near, base[-5:]) < 10**4


def test_a_large_view_and_the_small_ones_inside_it_share_memory_on_arrival() -> None:
    base = torch.zeros(10**4)[:-1]
    received = travel(base, base[:2], base[5000:5010])
    received[0].fill_(1)
    assert received[1].tolist() == [1, 1] and received[2].sum() == 10


def test_views_of_different_dtypes_on_one_storage_keep_their_alignment() -> None:
    base = torch.zeros(64, dtype=torch.uint8)
    sent = [base[3:9], base[16:32].view(torch.complex128)]
    assert [describe(t) for t in travel(*sent)] == [describe(t) for t in sent]


def test_tensors_without_readable_memory_are_refused() -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(SerializationError, match="freed"):
        tensors.encode_tensors([freed])
    with pytest.raises(SerializationError, match="to_dense"):
        tensors.encode_tensors([torch.ones(2, 2).to_mkldnn()])


@pytest.mark.parametrize(
    ("tensor", "fits"),
    [
        (torch.ones(2), True),
        (torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), True),
        (torch.nn.UninitializedParameter(), False),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), False),
    ],
    ids=["plain", "subclass", "uninitialized", "nested"],
)
def test_a_table_fits_only_tensors_that_it_can_describe(tensor: torch.Tensor, fits: bool) -> None:
    assert tensor_types.is_describable(tensor) is fits


FOUR = b"\0" * 16  # one storage: four float32
HUGE = 1 << 62
BEYOND = [["int64", [1, 1], 0], ["float32", [1], 1]]  # an index of 5 << 56 or so, and its value


@pytest.mark.parametrize(
    ("storages", "entry"),
    [
        ([FOUR], ["float33", [4], 0]),
        ([FOUR], [["float32"], [4], 0]),
        ([FOUR], ["qint8", [4], 0]),
        ([FOUR], ["float32", [5], 0]),
        ([FOUR], ["float32", [-4], 0]),
        ([FOUR], ["float32", [2.0], 0]),
        ([FOUR], ["float32", [True], 0]),
        ([FOUR], ["float32", "4", 0]),
        ([FOUR], ["float32", 4, 0]),
        ([FOUR], ["float32", [1] * 65, 0]),
        ([FOUR], ["float32", [HUGE, HUGE], 0]),
        ([FOUR], ["float32", [4], 1]),
        ([FOUR], ["float32", [4], -1]),
        ([FOUR], ["float32", [4], None]),
        ([FOUR], ["float32", [0, HUGE, HUGE], None]),
        ([FOUR], ["float32", [0], 0]),
        ([FOUR], ["float32", [4], 0, {"offset": 1}]),
        ([FOUR], ["float32", [2], 0, {"offset": -1}]),
        ([FOUR], ["float32", [2, 2], 0, {"strides": [2, 2]}]),
        ([FOUR], ["float32", [2], 0, {"strides": [1, 1]}]),
        ([FOUR], ["float32", [2], 0, {"strides": [-1], "offset": 1}]),
        ([FOUR], ["float32", [HUGE, 4], 0, {"strides": [0, 0], "offset": HUGE}]),
        ([FOUR], ["float32", [4], 0, {}, {}]),
        ([FOUR], ["float32", [4]]),
        ([FOUR], ["int32", [4], 0, {"requires_grad": True}]),
        ([FOUR], ["int32", [4], 0, {"requires_grad": True, "parameter": True}]),
        ([FOUR], ["float32", [4], 0, {"names": ["N"]}]),
        ([FOUR], ["float32", [4], 0, {b"offset": 1}]),
        ([FOUR], ["float32", [4], None, {"layout": "torch.sparse_abc", "parts": []}]),
        ([FOUR], ["float32", [4], None, {"layout": "torch.sparse_coo", "parts": [["float32", [4], 0]]}]),
        ([FOUR], ["float32", [4], None, {"layout": "torch.sparse_coo", "parts": [["float32", [4], 0]] * 2}]),
        ([FOUR], ["float32", [4], None, {"layout": "torch.sparse_csr", "parts": [["int64", [2], 0]] * 3}]),
        ([b"\5" * 8, b"1234"], ["float32", [4], None, {"layout": "torch.sparse_coo", "parts": BEYOND}]),
        ([FOUR], ["float32", [4], 0, {"quantizer": [0.5, 1]}]),
        ([FOUR], ["int8", [4], 0, {"quantizer": None}]),
        ([FOUR], ["int8", [4], 0, {"quantizer": [0.5]}]),
        ([FOUR], ["int8", [4], 0, {"quantizer": ["x", 1]}]),
        ([FOUR], ["int8", [4], 0, {"quantizer": [0.5, 1 << 63]}]),
        ([FOUR], ["int8", [4], 0, {"quantizer": 1, "parts": [["float64", [1], 0], ["int64", [1], 0]]}]),
        ([FOUR], ["int8", [4], 0, {"quantizer": 0, "parts": [["float64", [1], 0], ["int64", [1], 0]]}]),
        ([FOUR], ["int8", [1], 0, {"quantizer": 0, "parts": [["float64", [1], 0]]}]),
        ([FOUR], ["int8", [1], 0, {"quantizer": 0, "parts": [["float64", [1], 0, {"quantizer": 0}]] * 2}]),
        ([FOUR], ["float32", [4], None, {"device": "meta"}]),
        ([FOUR], ["float32", [4], None, {"device": "meta", "strides": [HUGE]}]),
        ([FOUR], ["float32", [4], None, {"device": "meta", "strides": [1, 1]}]),
        ([FOUR], ["float32", [HUGE, HUGE], None, {"device": "meta", "strides": [1, 1]}]),
        ([FOUR], ["float32", [0], None, {"device": "nowhere"}]),
        ([FOUR], ["float32", [0], None, {"device": 7}]),
        ([[FOUR, "nowhere"]], ["float32", [4], 0]),
        ([[FOUR, 1]], ["float32", [4], 0]),
        ([[FOUR]], ["float32", [4], 0]),
        ([[[FOUR, "cpu"], "cpu"]], ["float32", [4], 0]),
        ([[HUGE, "cpu"]], ["float32", [4], 0]),
        ([HUGE], ["float32", [4], 0]),
        ([-1], ["float32", [4], 0]),
        ([None], ["float32", [4], 0]),
        (None, ["float32", [4], 0]),
        ([FOUR], None),
    ],
)
def test_invalid_storages_and_entries_are_refused(storages: Any, entry: Any) -> None:
    with pytest.raises(ProtocolError):
        tensors.decode_tensors(msgpack.encode([storages, [entry]]), [])


def test_a_device_that_the_receiver_lacks_is_a_serialization_error_that_names_it() -> None:
    table = msgpack.encode([[[FOUR, "cuda:77"]], [["float32", [4], 0]]])
    with pytest.raises(SerializationError, match="a tensor came for cuda:77, which this worker does not have"):
        tensors.decode_tensors(table, [])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["float32", [4], 0, {"names": ["N"]}], r"\['names'\], unknown to this version of rpcbench"),
        (["float32", [2, 2], 0, {"strides": [2, 2]}], "reaches beyond its storage"),
        (["float32", [4.0], 0], "4.0 is not a size"),
        (["float32", [0, HUGE, HUGE], None], "cannot have the shape"),
    ],
)
def test_a_refusal_states_the_check_that_failed(entry: list[Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        tensors.decode_tensors(msgpack.encode([[FOUR], [entry]]), [])


@pytest.mark.parametrize("buffers", [[], [bytearray(8)], [bytearray(INLINE - 1)]])
def test_buffers_that_do_not_match_are_refused(buffers: list[bytearray]) -> None:
    table, _ = tensors.encode_tensors([torch.zeros(INLINE, dtype=torch.uint8)])
    with pytest.raises(ProtocolError):
        tensors.decode_tensors(table, buffers)


def sample() -> bytes:
    base = torch.arange(12.0)
    parameter = torch.nn.Parameter(base.reshape(3, 4).t())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = [
            torch.quantize_per_tensor(base, 0.5, 3, torch.qint8),
            torch.quantize_per_channel(base.reshape(3, 4), torch.ones(3), torch.zeros(3), 0, torch.quint8),
        ]
    plain = [base, parameter, base[::3], torch.tensor([1j]).conj(), torch.zeros(0, 3), torch.zeros(3, device="meta")]
    return tensors.encode_tensors([*plain, *sparse, *quantized])[0]


SAMPLE = sample()


def survives(table: bytes) -> None:
    """Decode a table; the result is a ProtocolError, or tensors within the received bytes."""
    try:
        received, _ = tensors.decode_tensors(table, [])
    except ProtocolError:
        return
    for tensor in received:
        parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
        for part in parts if tensor.layout in (torch.sparse_coo, torch.strided) else []:
            if part.is_meta:
                continue
            assert part.untyped_storage().nbytes() <= len(table)
            if 0 < math.prod(part.shape) < 10**5:
                raw(part)


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=400)
def test_a_table_with_changed_bytes_is_refused_or_decodes_within_its_bytes(flips: list[tuple[int, int]]) -> None:
    table = bytearray(SAMPLE)
    for place, value in flips:
        table[place] ^= value
    survives(bytes(table))


@pytest.mark.parametrize("length", range(len(SAMPLE)))
def test_cut_tables_are_refused(length: int) -> None:
    with pytest.raises(ProtocolError):
        tensors.decode_tensors(SAMPLE[:length], [])


NUMBERS = st.one_of(st.integers(0, 20), st.sampled_from([-1, HUGE, 2**63 - 1, 2**63, None, True, 1.5, "x"]))
SHAPES = st.lists(NUMBERS, max_size=3)
NOTES = st.fixed_dictionaries(
    {},
    optional={
        "strides": st.lists(NUMBERS, max_size=3),
        "offset": NUMBERS,
        "requires_grad": st.booleans(),
        "parameter": st.booleans(),
        "conj": st.booleans(),
        "neg": st.booleans(),
        "device": st.sampled_from(["cpu", "cpu:0", "meta", "", "nowhere", 3]),
        "quantizer": st.one_of(st.none(), NUMBERS, st.lists(st.one_of(st.floats(), NUMBERS), max_size=3)),
        "parts": st.lists(st.tuples(st.sampled_from(["float64", "int64"]), SHAPES, NUMBERS).map(list), max_size=2),
    },
)
ENTRIES = st.tuples(st.sampled_from(DTYPES), SHAPES, NUMBERS, NOTES).map(list)
SPARSE = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(NUMBERS, max_size=3),
    st.none(),
    st.fixed_dictionaries(
        {"layout": st.sampled_from(sorted(tensor_types.SPARSE)), "parts": st.lists(ENTRIES, max_size=3)}
    ),
).map(list)


STORAGES = st.one_of(st.binary(max_size=64), st.tuples(st.binary(max_size=64), st.sampled_from(["cpu", "meta", "x"])))


@given(st.lists(STORAGES, max_size=3), st.lists(st.one_of(ENTRIES, SPARSE), max_size=3))
@settings(max_examples=400)
def test_random_entries_are_refused_or_decode_within_their_bytes(storages: list[Any], entries: list[Any]) -> None:
    survives(msgpack.encode([storages, entries]))
