"""A long list within a JSON object, read in pieces: nothing is lost, whatever its items hold, and cuts are told."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.base import json_stream
from rpcbench.base.json_stream import LongList

TEXTS = st.text() | st.sampled_from(['}, {"a', '"', "\\", '\\"}, {"b": 1', "[", "]"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=6,
)


def read(data: bytes) -> tuple[list[Any], dict[str, Any]]:
    found = LongList(io.BytesIO(data), "items", json.loads)
    items = [item for piece in found for item in piece]
    return items, found.fields


@given(
    st.lists(st.dictionaries(TEXTS, VALUES)), st.dictionaries(TEXTS.filter("items".__ne__), VALUES), st.booleans(),
    st.integers(0, 40), st.sampled_from([None, 2]),
)  # fmt: skip
def test_all_items_and_fields_come_in_order(
    items: list[Any], others: dict[str, Any], last: bool, piece: int, indent: int | None
) -> None:
    fields = {**others, "items": items} if last else {"first": 1, "items": items, **others}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "PIECE_BYTES", 1 + piece)
        found, about = read(json.dumps(fields, indent=indent).encode())
    assert found == items
    assert about == {name: value for name, value in fields.items() if name != "items"}


def test_a_long_list_comes_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 200)
    items = [{"n": n, "inside": [{"a": 1}, {"b": 2}]} for n in range(100)]
    data = json.dumps({"items": items, "after": [{"c": 1}, {"d": 2}]}).encode()
    pieces = [*LongList(io.BytesIO(data), "items", json.loads)]
    assert len(pieces) > 10 and [item for piece in pieces for item in piece] == items


@pytest.mark.parametrize("place", range(1, 60))
def test_a_cut_file_is_told(place: int) -> None:
    data = json.dumps({"before": "x", "items": [{"a": 1}, {"a": 2}], "after": {"b": 3}}).encode()
    with pytest.raises(ValueError, match=r"cut off|no JSON"):
        read(data[: len(data) - place])


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "it is empty"), (b" \n", "it is empty"), (b"[1, 2]", "JSON without a list items"),
     (b'{"a": 1}', "without a list"), (b"PK\x03\x04", "no list items"), (b'nonsense "items": [', "no JSON")],
)  # fmt: skip
def test_other_files_are_told(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(data)


def test_a_list_without_whole_items_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "PIECE_BYTES", 100)
    monkeypatch.setattr(json_stream, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="damaged"):
        read(b'{"items": [' + b'{"a": nonsense}, ' * 1000)
