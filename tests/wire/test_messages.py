from __future__ import annotations

import signal
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from rpcbench.base.errors import ProtocolError
from rpcbench.base.ids import Id
from rpcbench.wire import messages as m
from rpcbench.wire.encoding import decode_message, encode_message, encode_plain
from rpcbench.wire.messages import Body

BODY = Body(b"payload", b"tensors", [b"buffer"])
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: NUMBERS,
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    NoneType: st.none(),
    Body: st.just(BODY),
}
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=12,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field with this annotation."""
    if isinstance(hint, UnionType):
        return st.one_of([values(option) for option in get_args(hint)])
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        if inner[-1] is Ellipsis:
            return st.lists(values(inner[0]), max_size=3).map(tuple)
        return st.tuples(*map(values, inner))
    if hint in PLAIN:
        return PLAIN[hint]
    return st.builds(hint, *[values(field) for field in get_type_hints(hint).values()])


def fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        if inner[-1] is Ellipsis:
            return type(value) is tuple and all(fits(item, inner[0]) for item in value)
        return type(value) is tuple and len(value) == len(inner) and all(map(fits, value, inner))
    if hint is float:
        return isinstance(value, float | int)
    if hint in PLAIN:
        return isinstance(value, hint)
    return type(value) is hint and all(map(fits, value, get_type_hints(hint).values()))


messages = st.sampled_from(m.KINDS).flatmap(values)


def raw(code: int, fields: Any, seq: int = 0) -> bytes:
    """Return the control bytes of a message with these fields, right or wrong."""
    return code.to_bytes(1, "little") + seq.to_bytes(8, "little") + msgpack.encode(fields)


def unpacked(control: bytes) -> Any:
    """Return the message, or None if it was refused with a ProtocolError."""
    try:
        return decode_message(control, BODY)[1]
    except ProtocolError:
        return None


@pytest.mark.parametrize("kind", m.KINDS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_each_kind_of_message_survives_pack_and_unpack(kind: type[Any], data: st.DataObject) -> None:
    message, seq = data.draw(values(kind)), data.draw(st.integers(0, (1 << 64) - 1))
    control, body = encode_message(seq, message)
    assert body == getattr(message, "body", m.EMPTY)
    again = decode_message(control, body)
    assert again == (seq, message) and fits(again[1], kind)


@given(messages, st.data())
@settings(max_examples=300, deadline=None)
def test_a_message_with_a_field_of_another_type_is_refused(message: Any, data: st.DataObject) -> None:
    told = message[:-1] if "body" in message._fields else message
    fields = msgpack.decode(msgpack.encode(told))
    if fields:
        _replace_one(fields, data)
    found = unpacked(raw(m.KINDS.index(type(message)), fields))
    assert found is None or fits(found, type(found))


def _replace_one(fields: list[Any], data: st.DataObject) -> None:
    """Replace the value of one place, at any depth."""
    place = data.draw(st.integers(0, len(fields) - 1))
    if isinstance(fields[place], list) and fields[place] and data.draw(st.booleans()):
        _replace_one(fields[place], data)
    else:
        fields[place] = data.draw(ANYTHING)


@given(messages, st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_bytes_are_refused_or_form_a_valid_message(message: Any, data: st.DataObject) -> None:
    control = bytearray(encode_message(0, message)[0])
    for _ in range(data.draw(st.integers(1, 3))):
        control[data.draw(st.integers(0, len(control) - 1))] = data.draw(st.integers(0, 255))
    found = unpacked(bytes(control[: data.draw(st.integers(0, len(control)))]))
    assert found is None or fits(found, type(found))


@given(st.binary(max_size=200) | st.builds(raw, st.integers(0, len(m.KINDS)), ANYTHING))
@settings(max_examples=300)
def test_random_bytes_are_refused_or_form_a_valid_message(control: bytes) -> None:
    found = unpacked(control)
    assert found is None or fits(found, type(found))


ID = (1, 2, 0)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (m.Cancel, ()), (m.Cancel, (7, 8)), (m.Cancel, (7.0,)), (m.Cancel, (True,)), (m.Cancel, ("7",)), (m.Cancel, 7),
        (m.Cancel, {"call": 7}), (m.Call, (1, "f", None, ())), (m.UserDelete, (ID[:2], ID)),
        (m.UserDelete, ((*ID, 0), ID)), (m.Seen, (1, ())), (m.Seen, (1, (None,), False)), (m.Seen, (1, ("2",), False)),
        (m.Call, (1, b"f", None, (), None)), (m.Call, (1, "f", None, (), None, (b"", b"", ()))),
        (m.View, (1, ((1, "a", 0),), (), False, True, (), 0)), (m.View, (1, (), (5,), False, True, (), 0)),
        (m.View, (1, (), (("a", "b"),), False, True, (), 0)), (m.View, (1, (), ())),
    ],
)  # fmt: skip
def test_fields_that_pack_cannot_produce_are_refused(kind: type[Any], fields: Any) -> None:
    with pytest.raises(ProtocolError):
        decode_message(raw(m.KINDS.index(kind), fields), m.EMPTY)


def test_an_unknown_type_and_bytes_after_the_message_are_refused() -> None:
    cancel, code = (7,), m.KINDS.index(m.Cancel)
    assert decode_message(raw(code, cancel, 3), m.EMPTY) == (3, m.Cancel(7))
    for control in (raw(len(m.KINDS), cancel), raw(255, cancel), raw(code, cancel) + b"\0", raw(code, cancel)[:-1]):
        with pytest.raises(ProtocolError):
            decode_message(control, m.EMPTY)


@pytest.mark.parametrize("kind", m.KINDS)
def test_a_deeply_nested_or_false_array_is_refused_without_allocation(kind: type[Any]) -> None:
    head = raw(m.KINDS.index(kind), ())[:-1]
    huge = b"\xdd\xff\xff\xff\xff"
    for fields in (b"\x91" * 5000 + b"\x00", huge, b"\x97\x01" + huge, b"\x93\x01" + huge, b"\xc9\0\0\0\4\1abcd", b""):
        with pytest.raises(ProtocolError):
            decode_message(head + fields, m.EMPTY)


def test_text_with_surrogates_arrives_with_escapes() -> None:
    """Exceptions may hold such text: undecodable file names, invalid strings of users."""
    failure = m.Failure(7, "OSError", "no such file: 'ü\udcff'", BODY)
    assert decode_message(*encode_message(0, failure)) == (0, failure._replace(text=r"no such file: 'ü\udcff'"))
    settled = m.Settled(3, Id(0, 1), 2, (), (m.Awaited(9, 1, "f\udcff"),))
    assert decode_message(*encode_message(0, settled))[1].awaited == (m.Awaited(9, 1, r"f\udcff"),)


def test_subclasses_of_plain_types_are_sent_as_the_plain_types() -> None:
    assert msgpack.decode(encode_plain([np.float64(2.5), np.str_("f"), signal.SIGTERM])) == [2.5, "f", 15]
    with pytest.raises(TypeError, match="int64"):
        encode_plain(np.int64(3))


def test_a_message_of_a_kind_without_a_body_gets_none() -> None:
    assert decode_message(encode_message(3, m.Cancel(7))[0], BODY) == (3, m.Cancel(7))
    notice = m.UserDelete(Id(1, 2), Id(1, 3, 4))
    assert encode_message(3, notice)[1] is m.EMPTY


SETTLED = m.Settled(3, Id(0, 1), 2, (7, 8), (m.Awaited(9, 1, "f"),))
HELD = m.Gradients(3, Id(0, 1), 2, True, False, (4,), SETTLED, BODY)
MEMBER = m.Member(0, "a", 1, "here", devices=m.Devices("cuda", 1, (m.Device("cuda:0"),), (m.Mapped("b", "x", "y"),)))


@pytest.mark.parametrize(
    "message",
    [
        HELD,
        m.Call(1, "f", 2.5, (m.Fork(Id(0, 1), 0, Id(0, 2), 1, "int", 3),) * 2, m.Scope(1, 2, (3, 4)), BODY),
        m.Call(1, "f", None, (), m.Scope(1, 2, ()), BODY),
        m.Call(1, "f", 2.5, (), None, BODY),
        m.Result(1, (), m.Scope(1, 2, None), BODY),
        m.Result(1, (), m.Scope(1, 2, tuple(range(300))), BODY),
        m.Result(-1, (), None, BODY),
        m.View(1, (MEMBER,) * 2, (m.Loss(1, "why"),), False, True, (m.Past(1, 2),), 0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_records_inside_a_message_are_rebuilt_with_their_types(message: Any) -> None:
    assert repr(decode_message(*encode_message(5, message))) == repr((5, message))  # a repr shows the types


@pytest.mark.parametrize(
    "message", [m.Result(1, (), None, BODY), m.Result(1, (), m.Scope(1, 2, (3,)), BODY)], ids=["bare", "scoped"]
)
def test_a_result_that_is_cut_or_too_long_is_refused(message: Any) -> None:
    control, body = encode_message(5, message)
    for wrong in (control + b"\0", *(control[:length] for length in range(len(control)))):
        with pytest.raises(ProtocolError):
            decode_message(wrong, body)


@pytest.mark.parametrize("settled", [(), 0, (3,), SETTLED[:4], (*SETTLED[:4], ((9, 1, 2),)), (*SETTLED[:4], ((9, 1),))])
def test_a_message_with_an_incomplete_record_is_refused(settled: Any) -> None:
    control, body = encode_message(5, HELD._replace(settled=settled))
    with pytest.raises(ProtocolError):
        decode_message(control, body)
