"""Damaged and hostile bodies: refused before memory is allocated, and nothing but the payload is unpickled."""

from __future__ import annotations

import contextlib
import pickle
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from rpcbench.base.errors import ProtocolError, SerializationError
from rpcbench.serialization import tensors
from rpcbench.serialization.pickler import Codec
from rpcbench.serialization.tensors import INLINE
from rpcbench.wire import messages as m
from rpcbench.wire.encoding import decode_message, encode_message
from rpcbench.wire.messages import Body

LARGE = 1 << 33
"""More bytes than `little_memory` leaves."""


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Limit memory to one more gigabyte: an allocation of the size that a peer announces fails at once."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (1 << 30), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def sample() -> Body:
    """A body with every kind of content: tensors in the table and in buffers, parts, a large array, an exception."""
    base = torch.arange(float(INLINE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)]
    value = [base, base[3:9], torch.ones(2, 2).t(), *parts, np.zeros(INLINE), ValueError("x"), {"key": (1, None)}]
    payload, table, buffers = Codec().encode_value(value)[0]
    return Body(payload, table, [bytes(buffer) for buffer in buffers])


SAMPLE = sample()


def opened(body: Body) -> None:
    """Decode a body; only a ProtocolError or a SerializationError is allowed."""
    with contextlib.suppress(ProtocolError, SerializationError):
        Codec().decode_value(body)


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE.tensors) - 1), st.integers(1, 255)), min_size=1, max_size=4))
@settings(max_examples=300)
def test_a_body_with_a_damaged_table_is_decoded_or_refused(flips: list[tuple[int, int]]) -> None:
    table = bytearray(SAMPLE.tensors)
    for place, value in flips:
        table[place] ^= value
    opened(SAMPLE._replace(tensors=bytes(table)))


@pytest.mark.parametrize("cut", [lambda a, b: [], lambda a, b: [a], lambda a, b: [b, a], lambda a, b: [a[:-1], b]])
def test_buffers_of_a_wrong_size_or_number_are_refused(cut: Any) -> None:
    with pytest.raises(ProtocolError):
        Codec().decode_value(SAMPLE._replace(buffers=cut(*SAMPLE.buffers)))


@pytest.mark.parametrize("length", range(0, len(SAMPLE.payload), 7))
def test_a_cut_payload_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="broken payload"):
        Codec().decode_value(SAMPLE._replace(payload=SAMPLE.payload[:length]))


@pytest.mark.parametrize(
    ("storages", "entry"),
    [
        ([LARGE], ["uint8", [LARGE], 0]),
        ([[LARGE, "cpu"]], ["uint8", [LARGE], 0]),
        ([b"1234"], ["uint8", [LARGE], 0]),
        ([b"1234"], ["uint8", [4], 0, {"strides": [LARGE]}]),
        ([b"1234"], ["uint8", [4], 0, {"offset": LARGE}]),
        ([b"1234"], ["uint8", [LARGE], None]),
        ([b"1234"], ["uint8", [4], None, {"device": "cpu"}]),
        ([b"1234"], ["int8", [4], 0, {"quantizer": 0, "parts": [["float64", [LARGE], None], ["int64", [4], 0]]}]),
        ([b"1234"], ["uint8", [4], None, {"layout": "torch.sparse_coo", "parts": [["int64", [1, LARGE], 0]] * 2}]),
        (list(range(1000)), ["uint8", [4], 0]),
    ],
)
def test_a_table_that_announces_missing_data_is_refused_without_allocation(storages: Any, entry: Any) -> None:
    table = msgpack.encode([storages, [entry]])
    with little_memory(), pytest.raises(ProtocolError):
        tensors.decode_tensors(table, [])


@pytest.mark.parametrize(
    "entry",
    [
        ["uint8", [LARGE], 0, {"strides": [0]}],
        ["int8", [LARGE], 0, {"strides": [0], "quantizer": [0.5, 1]}],
        ["float32", [LARGE, 4], None, {"device": "meta", "strides": [1, 1]}],
    ],
    ids=["repeated", "quantized", "meta"],
)
def test_a_large_shape_over_a_small_storage_takes_little_memory(entry: Any) -> None:
    with little_memory():
        (tensor,), _ = tensors.decode_tensors(msgpack.encode([[b"1234"], [entry]]), [])
    assert tensor.numel() >= LARGE


def test_a_codec_unpickles_only_the_payload(tmp_path: Path) -> None:
    path = tmp_path / "canary"
    canary = pickle.dumps(Canary(path))
    ext = msgpack.Ext(1, canary)
    hidden = [
        canary,
        *(msgpack.encode(x) for x in (ext, [ext, ext], [[canary], [["uint8", [len(canary)], 0]]], canary)),
    ]
    inside = [{"layout": ext}, {"quantizer": ext, "parts": [ext]}, {"device": canary}, {"strides": ext}]
    hidden += [msgpack.encode([[b"1234"], [["int8", [4], index, notes]]]) for notes in inside for index in (0, None)]
    for data in hidden:
        opened(Body(pickle.dumps(None), data, [canary]))
        with contextlib.suppress(ProtocolError):
            decode_message(data, Body(canary, canary, [canary]))
        for kind in m.KINDS:
            control = bytes([m.KINDS.index(kind), *bytes(8)]) + msgpack.encode([data] * len(kind._fields))
            with contextlib.suppress(ProtocolError):
                decode_message(control, Body(canary, b"", []))
    seq, call = decode_message(
        encode_message(1, m.Call(1, "f", None, (), None, m.EMPTY))[0], Body(canary, canary, [canary])
    )
    assert seq == 1 and call.body.payload == canary and not path.exists()
    Codec().decode_value(Body(canary, b"", []))
    assert path.exists(), "the canary does not create its file"
