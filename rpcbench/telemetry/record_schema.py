"""The schema of record files, checked once when a file is read, so that views can rely on every field.

A shape is a type, a pattern for a string, None, a list, a dict, or a tuple of alternative shapes. A list has one shape
for all items, or one for each. A dict has a shape for each field (with `?` at the end: may be absent), or one pattern
for all keys. msgspec compares values with the types that `make_type` makes of shapes.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import or_
from types import GenericAlias
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from rpcbench.telemetry.worker_columns import chart_columns, figure_shapes

_MOST = 2**63  # bound of all numbers: larger ones would fail only later, when a view is drawn
_NUMBERS = {
    int: Annotated[int, msgspec.Meta(ge=1 - _MOST, le=_MOST - 1)],
    float: Annotated[float, msgspec.Meta(gt=-float(_MOST), lt=float(_MOST))],
}
_COUNT = r"(?:0|[1-9][0-9]{0,17})"  # one spelling for each number, so that no two keys mean one member
NUMBER = re.compile(_COUNT)
SECTION = re.compile(rf"{_COUNT} \w+|members")  # as "1 owned"
_ID = re.compile(rf"{_COUNT}\.(?s:.*)")  # a worker, then a dot: views read the worker from it
_CONTEXT = re.compile("[0-9]{1,20}")
_PASS = {"pass": str, "state": str, "needed": int, "arrived": int, "waiting": int}

ROW_SHAPES: dict[str, dict[str, Any]] = {
    "members": {
        "name": str, "id": int, "incarnation": int, "state": str, "left_out": int, "clock": [float],
        "epoch?": (None, float), "since?": float,
    },
    "owned": {
        "rref": _ID, "ready": bool, "failed": bool, "type": str, "made": float, "size": (None, int), "cell": str,
        "number": (None, int), "forks": [{"fork": str, "holder": int}],
    },
    "users": {
        "rref": _ID, "fork": str, "owner": int, "parent": (None, int), "state": str, "type": str,
        "children": [{"fork": str, "to": int}],
    },
    "calls": {"call": int, "to": int, "label": str, "since": float},
    "contexts": {
        "sends": [{"message": int, "to": int}], "recvs": [{"message": int, "from": int}], "passes": [_PASS],
        "gradients": int,
    },
    "graphs": {
        "leaves": [{"name": str, "shape": str, "bytes": int}], "more": int,
        "passes": [{"pass": str, "regions": int, "ran": int}],
        "gradients?": int, "made?": float, "ended?": (None, float), "step?": int, "stages?": {NUMBER: [str]},
        "sends?": [{"message": int, "to": int, "label": str, "shape": str, "bytes": int, "back": (None, float)}],
        "recvs?": [{"message": int, "from": int}],
        "parts?": [{"sends": [int], "recvs": [int], "ops": [str], "count": (None, int), "ran": [float]}],
    },
    "ops": {
        "step": int, "worker": int, "stage": int, "op": str, "microbatch": int, "begin": float, "end": (None, float),
        "bytes": int, "held": (None, int), "failed": bool,  # held is None while it runs, and in torch's stages
    },
    "steps": {
        "step": int, "worker": int, "workers": [int], "plan": [str], "ideal": (None, float),
        "replica?": (None, int), "state": str, "samples?": int, "loss?": (None, float), "run?": str,
    },
    "messages": {
        "kind": str, "from": int, "to": int, "label": str, "call": str, "rrefs": [str], "context": str, "bytes": int,
        "tries": int, "sent": (None, float), "received": (None, float), "lost": (None, float),
    },
    "collectives": {
        "group": str, "number": int, "op": str, "members": [str], "shape": str, "bytes": int, "begin": float,
        "end": (None, float), "failed": bool, "site?": str, "end_known?": bool,
    },
    "models": {
        "model": str, "stage": (None, int), "kind": str, "rank": (None, int), "world": int, "parameters": int,
        "remarks": [str], "meshes": [[[str], [int], [int]]], "steps": int, "gathered": int, "most": int,
        "groups": [[bool, int]],
    },
    "shards": {
        "name": str, "also": [str], "order": int, "group": (None, int), "kind": str, "shape": [int], "offset": [int],
        "size": [int], "gathered": (None, [[int], [int]]), "dtype": str, "placements": [str], "over": [str],
        "device": str, "trainable": bool, "bytes": int, "whole": int, "gradient": int, "state": int,
    },
    "comparisons": {
        "names": [str], "sizes": [int], "ok": bool, "values": int, "words": str, "first": str, "ranks": [int],
    },
    "verdicts": {
        "order": int, "step": int, "phase": str, "name": str, "part": str, "call": (None, int), "word": str,
        "layout": str, "words": str, "error": (None, float), "allowed": (None, float), "norm": (None, float),
        "factor": (None, float), "shape": [int], "dtype": str, "ranks": [int], "missing": [int],
        "errors": [[int, (None, float)]], "maps": [[[int], [int, int], [[int]]]],
        "largest": (None, float),
    },
    "layouts": {
        "words": str, "names": [str], "sizes": [int], "summed": bool,
        "boxes": [(None, [[float, float, float, float]])],
    },
    "jobs": {
        "order": int, "kind": str, "name": str, "unit": str, "total": (None, int), "cell": str, "number": (None, int),
        "running": int, "done": int, "failed": int, "cancelled?": int, "state": str, "error": str, "note": str,
        "began": float, "end": (None, float), "counted": float, "rate": (None, float),
    },
    "cells": {
        "order": int, "code": str, "is_cut": bool, "cell": str, "number": (None, int), "began": float,
        "parts": [[int, str, str, str, (None, float), (None, int), (None, float)]],
    },
    "metrics": {
        "name": str, "order": int, "run": int, "block": int, "steps": [int], "values": [float],
        "odd": [[int, int, str]], "times": [float, float], "incarnation?": int,
    },
    "health": {
        "waiting": int, "cells": (None, int), "busy": (None, int), "question?": int,
        "peers?": {NUMBER: [int, int]}, "lent?": {NUMBER: int}, "clock?": float, "awaits?": [int], **figure_shapes(),
    },
    "samples": {
        "at": int, "step": int, "began": [int], "of": {f"{one.key}?": {NUMBER: float} for one in chart_columns()},
        "limits": {f"{one.key}?": float for one in chart_columns()},
    },
    "traffic": {"from": int, "host": str, "silent": bool, "seconds?": int, "to": {NUMBER: [int, int, int, int]}},
    "launched": {"name": str, "state": str, "incarnation": int, "log": str},
}  # fmt: skip
"""The fields of each table that views read; rows of other tables may have any."""
_KEYS = {"members": NUMBER, "launched": NUMBER, "owned": _ID, "contexts": _CONTEXT, "graphs": _CONTEXT}
"""Patterns of those keys of rows that views parse."""


def make_type(shape: Any) -> Any:
    """Return the type of the values that have this shape."""
    if isinstance(shape, re.Pattern):
        return Annotated[str, msgspec.Meta(pattern=rf"^(?:{shape.pattern})\Z")]
    if isinstance(shape, tuple):
        return reduce(or_, map(make_type, shape))
    if isinstance(shape, list):
        return GenericAlias(list if len(shape) == 1 else tuple, tuple(map(make_type, shape)))
    if not isinstance(shape, dict):
        return _NUMBERS.get(shape, shape)
    if NUMBER in shape:
        return GenericAlias(dict, (make_type(NUMBER), make_type(shape[NUMBER])))
    types = {name: make_type(inner) for name, inner in shape.items()}
    fields = {name.rstrip("?"): NotRequired[each] if name.endswith("?") else each for name, each in types.items()}
    return TypedDict("Fields", fields)  # type: ignore[operator]


_ROWS = {table: make_type(shape) for table, shape in ROW_SHAPES.items()}
_CHANGE = make_type({"set": dict, "drop": [str]})


def check_type(value: Any, expected: Any, place: str) -> None:
    """Raise ValueError, with the place and the reason, if a value does not have this type."""
    try:
        msgspec.convert(value, expected)
    except msgspec.ValidationError as error:
        raise ValueError(f"{place}: {error}") from None


def check_delta(delta: dict[str, Any], place: str) -> None:
    """Raise ValueError, with the first place where a delta differs from the results of `views.diff_views`."""
    for section, change in delta.items():
        at = f"{place}, section {section[:80]!r}"  # shortened: the file is not trusted, and this goes into an error
        if not SECTION.fullmatch(section):
            raise ValueError(f"{at}: its name is invalid")
        if change is not None:
            check_type(change, _CHANGE, at)
            for key, row in change["set"].items():
                _check_row(section.rpartition(" ")[2], key, row, f"{at}, row {key[:80]!r}")


def _check_row(table: str, key: str, row: Any, place: str) -> None:
    # Fields that are not in the shape are permitted: a later version may add some.
    check_type(row, _ROWS.get(table, dict), place)
    if table in _KEYS and not _KEYS[table].fullmatch(key):
        raise ValueError(f"{place}: its key is invalid")
    if table == "members" and (row["id"] != int(key) or len(row["clock"]) not in (0, 2)):
        raise ValueError(f"{place}: its 'id' or 'clock' is invalid")
    if table == "messages" and row["sent"] is row["received"] is row["lost"] is None:
        raise ValueError(f"{place}: 'sent', 'received' or 'lost' is missing")
