"""Reads a JSON object that has one long list, of any size, in little memory: `LongList`.

Guarantees
- The list comes in pieces of some megabytes, each a JSON list of whole items, in their order. Nothing is skipped.
- A file that ends early, is no such object, or whose items are longer than `MOST_BYTES` is a ValueError that says so.
- It needs no order of the keys in an item, and no line ends.
"""
# A piece ends between two items, where `}, {"x` stands. A quotation mark before a letter opens a text, so the braces
# and the comma before it stand in no text. They may stand in a list within an item; then the piece cannot be parsed,
# and an earlier place is tried.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from rpcbench.base.errors import format_bytes

PIECE_BYTES = 4 << 20
MOST_BYTES = 256 << 20
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"\w)')
_TRIES = 8  # places in one piece
Items = TypeVar("Items")


class LongList:
    """The object in a file. Iterate it once: it yields what `parse` makes of each piece of the list.

    `fields`: the other fields of the object, those behind the list once it has been read.
    """

    def __init__(self, file: BinaryIO, name: str, parse: Callable[[bytes], Items]) -> None:
        """Read up to the list. `name`: of the field that has it; `parse`: raises ValueError for bytes that are no list.

        Raises:
            ValueError: It is no JSON object, or has no such list.
        """
        self._file, self._parse = file, parse
        self._rest = b""
        self.fields: dict[str, Any] = self._read_head(name)

    def _read_head(self, name: str) -> dict[str, Any]:
        opening = re.compile(rb'"%b"\s*:\s*\[' % name.encode())
        while (found := opening.search(self._rest)) is None:
            if not self._read_more():
                raise ValueError(_describe_end(self._rest, name))
        head, self._rest = self._rest[: found.start()], self._rest[found.end() :]
        return _parse_fields(head.rstrip().rstrip(b",") + b"}")

    def _read_more(self) -> bool:
        """Read another piece; False at the end of the file."""
        if len(self._rest) > MOST_BYTES:
            raise ValueError(f"it is damaged: {format_bytes(MOST_BYTES)} have no whole item of its list")
        more = self._file.read(max(PIECE_BYTES, len(self._rest)))  # twice as much: each byte is searched few times
        self._rest += more
        return bool(more)

    def __iter__(self) -> Iterator[Any]:
        while self._read_more():
            yield from self._take_items()
        items, behind = _split_end(b"[" + self._rest)
        yield self._parse(items)
        self.fields |= behind

    def _take_items(self) -> Iterator[Any]:
        """Take the whole items off the bytes that have been read, if there are any."""
        places = [found.span() for found in _BETWEEN.finditer(self._rest)][-_TRIES:]
        for end, begin in reversed(places):
            try:
                items = self._parse(b"[" + self._rest[: end + 1] + b"]")
            except ValueError:
                continue
            self._rest = self._rest[begin:]
            yield items
            return


def _describe_end(text: bytes, name: str) -> str:
    if not text.strip():
        return "it is empty"
    return f"it is JSON without a list {name}" if _is_json(text) else f"it has no list {name}, or is cut off before it"


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parse_fields(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text.decode(errors="replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _split_end(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """Return the list at the beginning, and the fields of the object behind it."""
    text = data.decode(errors="replace")
    try:
        _, at = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        raise ValueError("it is cut off") from None
    behind = text[at:].strip()
    if not behind.endswith("}"):
        raise ValueError("it is cut off")
    return text[:at].encode(), _parse_fields(b"{" + behind.lstrip(",").encode())
