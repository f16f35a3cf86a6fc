"""The fast path for plain calls and values: equal results, and all other values are left to the general path."""

from __future__ import annotations

import enum
import functools
import operator
import pickle
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from rpcbench.base.errors import ProtocolError
from rpcbench.serialization import fast_path, pickler
from rpcbench.serialization.closures import MissingCodeError
from rpcbench.serialization.pickler import Codec
from rpcbench.serialization.tensor_types import CPU_ONLY
from rpcbench.wire.messages import Body


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    __slots__ = ()


T = torch.arange(6.0).reshape(2, 3)
MARKED = torch.ones(2)
MARKED.mark = 1  # type: ignore[attr-defined]
PLAIN: dict[str, Any] = {
    "a number": 7,
    "a long one": 1 << 80,
    "text": "ä\udc80",
    "bytes": b"\x80\x03",
    "nothing": None,
    "a call": (operator.add, (1, 2.5), {}),
    "a call of a function in Python": (textwrap.wrap, ("a b", 1), {}),
    "a call without arguments": (operator.add, (), {}),
    "a call with a tensor": (torch.add, (T, 2), {}),
    "a call with one that requires grad": (torch.mul, (T.clone().requires_grad_(), True), {}),
    "a call with two": (torch.add, (T, torch.ones(3, dtype=torch.int8), None), {}),
}
GENERAL: dict[str, Any] = {
    "a number of a class of its own": Colour.RED,
    "text of a class of its own": Word("x"),
    "an argument of such a class": (operator.add, (Colour.RED, 1), {}),
    "a tuple": (1, 2, 3),
    "a call with a tuple": (operator.add, ((0,), (1,)), {}),
    "a call with a tensor and a tuple": (operator.add, (T, (0,)), {}),
    "named arguments": (torch.add, (T,), {"other": 1}),
    "a function without a name": (lambda: 0, (), {}),
    "a method": (Path.home, (), {}),
    "a method by name": (Path.is_dir, ("x",), {}),
    "a class": (Path, ("x",), {}),
    "a partial function": (functools.partial(operator.add, 1), (2,), {}),
    "a view": (torch.add, (T[0], 1), {}),
    "a parameter": (torch.add, (torch.nn.Parameter(T.clone()), 1), {}),
    "a tensor with an attribute": (torch.add, (MARKED, 1), {}),
}


def sent(value: Any) -> Body:
    """Encode a value as `ObjectStore` does; a tuple that begins with a callable is a call."""
    codec = Codec()
    if type(value) is tuple and callable(value[0]):
        quick = None if value[2] else codec.encode_plain_call(value[0], value[1], None)
        return (quick or codec.encode_fully(value, None, "value", CPU_ONLY))[0]
    return codec.encode_value(value)[0]


def through(value: Any) -> tuple[bool, Any]:
    """Return whether a value takes the fast path, and the value that arrives."""
    body = sent(value)
    received = Body(body.payload, body.tensors, [bytearray(buffer) for buffer in body.buffers])
    return fast_path.is_fast_payload(body.payload), Codec().decode_value(received)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other) and one.requires_grad == other.requires_grad
    if isinstance(one, tuple):
        return type(other) is tuple and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_and_calls_take_the_fast_path_and_arrive_equal(name: str) -> None:
    quick, arrived = through(PLAIN[name])
    assert quick and same(arrived, PLAIN[name])


@pytest.mark.parametrize("name", GENERAL)
def test_other_values_and_calls_take_the_general_path(name: str) -> None:
    quick, arrived = through(GENERAL[name])
    assert not quick
    if isinstance(arrived, tuple) and callable(arrived[0]):
        assert all(map(same, arrived[1], GENERAL[name][1]))


def test_a_tensor_that_is_passed_twice_arrives_as_one_tensor() -> None:
    quick, (_, (one, number, other), _) = through((torch.add, (T, 1, T), {}))
    assert not quick and one is other and number == 1


def test_tensors_that_share_memory_take_the_general_path_and_share_it_on_arrival() -> None:
    quick, (_, (one, other), _) = through((torch.add, (T, T.view(-1)), {}))
    one[0, 0] = 9.0
    assert not quick and other[0] == 9.0


@pytest.mark.parametrize("call", [(operator.add, (1,), {}), (textwrap.wrap, (1,), {}), (operator.add, (T,), {})])
def test_a_value_with_a_registered_reducer_takes_the_general_path(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert through(call)[0]
    kind = torch.Tensor if call[1][0] is T else type(call[0])
    monkeypatch.setitem(pickler._REDUCERS, kind, lambda value: (str, ("reduced",)))
    quick, (function, args, _) = through(call)
    assert not quick and "reduced" in (function, args[0])


def test_a_module_that_is_not_loaded_yet_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plain_here.py").write_text("def f(x): return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import plain_here  # type: ignore[import-not-found]

    body = sent((plain_here.f, (1,), {}))
    monkeypatch.delitem(sys.modules, "plain_here")
    function, args, kwargs = Codec().decode_value(body)
    assert fast_path.is_fast_payload(body.payload) and function(*args, **kwargs) == 1


@pytest.mark.parametrize(("module", "name"), [("textwrap", "gone"), ("gone_altogether", "f")])
def test_a_function_that_the_receiver_lacks_is_named_in_the_error(module: str, name: str) -> None:
    with pytest.raises(MissingCodeError, match="gone"):
        Codec().decode_value(Body(pickle.dumps((module, name, ()), 3), b"", []))


@pytest.mark.parametrize(
    "said",
    [
        *(("m",), ("m", "f"), ("textwrap", 1, ()), ([], "f", ())),
        *(("textwrap", "wrap", ((number,),)) for number in (1, -1)),
    ],
)
def test_an_invalid_payload_of_the_fast_path_is_refused(said: Any) -> None:
    table = sent((torch.add, (T, 1), {})).tensors
    with pytest.raises(ProtocolError):
        Codec().decode_value(Body(pickle.dumps(said, 3), table, []))


@pytest.mark.parametrize("length", [2, 3, 9, -1])
def test_a_cut_payload_is_refused(length: int) -> None:
    body = sent((operator.add, (1, 2), {}))
    with pytest.raises(ProtocolError):
        Codec().decode_value(Body(body.payload[:length], b"", []))
