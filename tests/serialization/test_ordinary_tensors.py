"""The fast path for tensor tables gives the result of the general path, or leaves the table to it."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from rpcbench.base.errors import ProtocolError
from rpcbench.serialization import tensors
from rpcbench.serialization.tensor_types import CPU_ONLY
from rpcbench.serialization.tensors import INLINE, SMALL, Storages

DTYPES = ("float32", "float64", "int64", "uint8", "bool", "complex64", "bfloat16")
LARGE = [[INLINE // 4, 3], [SMALL // 4], [SMALL // 4 - 1], [INLINE // 9]]
BASE = torch.arange(8.0)
SPECIAL: dict[str, list[torch.Tensor]] = {
    "part of a storage": [BASE[2:]],
    "not contiguous": [BASE.reshape(2, 4).t()],
    "one storage twice": [BASE, BASE.reshape(2, 4)],
    "parameter": [torch.nn.Parameter(torch.ones(3), requires_grad=False)],
    "empty": [torch.ones(0)],
    "conjugate": [torch.ones(2, dtype=torch.complex64).conj()],
    "negative": [torch.ones(2, dtype=torch.complex64).conj().imag],
    "meta": [torch.ones(3, device="meta")],
    "sparse": [torch.eye(3).to_sparse()],
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    SPECIAL["quantized"] = [torch.quantize_per_tensor(BASE, 0.5, 3, torch.qint8)]


@st.composite
def plain(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.one_of(st.lists(st.integers(1, 5), max_size=3), st.sampled_from(LARGE)))
    made = torch.ones(shape).to(tensors.DTYPES[draw(st.sampled_from(DTYPES[:-1]))])
    return made.requires_grad_((made.is_floating_point() or made.is_complex()) and draw(st.booleans()))


@given(st.lists(plain(), max_size=4))
def test_the_fast_path_and_the_general_path_write_equal_tables(sent: list[torch.Tensor]) -> None:
    quickly = tensors.encode_dense(sent)
    assert quickly == tensors._encode_general(sent, Storages(CPU_ONLY)) and quickly is not None
    table, buffers = quickly
    assert all(buffer.readonly for buffer in buffers), "the buffers are the memory of the sender"
    found = tensors.decode_dense(*msgpack.decode(table), [bytearray(buffer) for buffer in buffers])
    assert found is not None and found[1] == len(buffers)
    received, _ = found
    for before, after in zip(sent, received, strict=True):
        assert before.dtype == after.dtype and torch.equal(before, after) and not after._is_view()
        assert before.requires_grad == after.requires_grad and after.is_leaf
        assert not after.detach().fill_(0).any() and before.all(), "the received tensor has its own writable memory"


def test_small_storages_always_go_into_the_table_and_larger_ones_until_it_is_full() -> None:
    most, small = INLINE // 2 - 1, SMALL - 1
    sent = [torch.ones(size, dtype=torch.uint8) for size in (most, small, most, most, SMALL, small, INLINE)]
    for encode in (tensors.encode_dense, lambda sent: tensors._encode_general(sent, Storages(CPU_ONLY))):
        table, buffers = encode(sent)  # type: ignore[misc]
        storages = [item if isinstance(item, int) else len(item) for item in msgpack.decode(table)[0]]
        beside = [isinstance(item, int) for item in msgpack.decode(table)[0]]
        assert storages == [most, small, most, most, SMALL, small, INLINE]
        assert beside == [False, False, False, True, True, False, True] and len(buffers) == 3


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tensors_are_left_to_the_general_path(name: str) -> None:
    assert tensors.encode_dense([BASE]) is not None
    assert tensors.encode_dense(SPECIAL[name]) is None
    assert tensors.encode_dense([torch.ones(2), *SPECIAL[name]]) is None


LENGTHS = st.one_of(st.integers(1, 3), st.sampled_from([0, -1, True, 1.0, None, 2**63]))


@st.composite
def nearly_right(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    """Storages and entries, with possibly wrong numbers."""
    storages: list[Any] = []
    entries: list[Any] = []
    for number in range(draw(st.integers(1, 3))):
        name, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(LENGTHS, max_size=3))
        count = math.prod(length for length in shape if isinstance(length, int) and 0 < length < 9)
        size = count * tensors.DTYPES[name].itemsize
        storages.append(bytes(size + draw(st.sampled_from([0, 0, 0, 1, -1, 8]))))
        notes = draw(st.sampled_from([[], [], [{"requires_grad": True}], [{"requires_grad": 1}], [{}], [{}, {}], [3]]))
        entries.append([name, shape, number + draw(st.sampled_from([0, 0, 0, 1, -1])), *notes])
    return storages, entries


@given(nearly_right())
@settings(max_examples=500)
def test_the_fast_path_and_the_general_path_read_equal_tensors(table: tuple[list[Any], list[Any]]) -> None:
    packed = msgpack.encode(table)
    quick = _read(packed)
    with patch.object(tensors, "decode_dense", lambda storages, entries, buffers: None):
        assert quick == _read(packed)


@pytest.mark.parametrize("buffers", [[], [bytes(INLINE)], [bytearray(INLINE - 4)], [bytearray(INLINE + 4)]])
def test_a_buffer_that_does_not_match_is_left_to_the_general_path(buffers: list[Any]) -> None:
    table, _ = tensors.encode_tensors([torch.zeros(INLINE // 4)])
    assert tensors.decode_dense(*msgpack.decode(table), [bytearray(INLINE)]) is not None
    assert tensors.decode_dense(*msgpack.decode(table), buffers) is None


def _read(table: bytes) -> Any:
    try:
        received, _ = tensors.decode_tensors(table, [])
    except ProtocolError:
        return "refused"
    return [(t.dtype, t.shape, t.requires_grad, t.reshape(-1).view(torch.uint8).tolist()) for t in received]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (1, 1, 4)])
def test_the_fast_path_reads_tables_of_all_dtypes_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    """This includes bfloat16, which numpy lacks: only the sender needs numpy."""
    sent = torch.ones(shape).to(tensors.DTYPES[dtype])
    storages, entries = msgpack.decode(tensors.encode_tensors([sent])[0])
    found = tensors.decode_dense(storages, entries, [])
    assert found is not None
    (received,) = found[0]
    assert torch.equal(received, sent) and received.shape == shape
