"""The schema of record files, checked once when a file is read, so that views can rely on every field.

A shape is a type, a pattern for a string, None, a list, a dict, or a tuple of alternative shapes. A list has one shape
for all items, or one for each. A dict has a shape for each field (with `?` at the end: may be absent), or one pattern
for all keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from rpcbench.telemetry.worker_columns import figure_shapes

_MOST = 2**63  # bound of all numbers: larger ones would fail only later, when a view is drawn
_COUNT = r"(?:0|[1-9][0-9]{0,17})"  # one spelling for each number, so that no two keys mean one member
NUMBER = re.compile(_COUNT)
SECTION = re.compile(rf"{_COUNT} \w+|members")  # as "1 owned"
_ID = re.compile(rf"{_COUNT}\..*", re.DOTALL)  # a worker, then a dot: views read the worker from it
_CONTEXT = re.compile("[0-9]{1,20}")
_PASS = {"pass": str, "state": str, "needed": int, "arrived": int, "waiting": int}

ROWS: dict[str, dict[str, Any]] = {
    "members": {
        "name": str, "id": int, "incarnation": int, "state": str, "left_out": int, "clock": ([], [float, float]),
        "epoch?": (None, float),
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
        "bytes": int, "held": (None, int), "failed": bool,  # None: while it runs
    },
    "steps": {
        "step": int, "worker": int, "workers": [int], "plan": [str], "ideal": (None, float),
        "replica?": (None, int), "state": str, "samples?": int, "loss?": (None, float),
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
    "health": {
        "waiting": int, "cells": (None, int), "busy": (None, int), "question?": int,
        "peers?": {NUMBER: [int, int]}, "awaits?": [int], **figure_shapes(),
    },
    "launched": {"name": str, "state": str, "incarnation": int, "log": str},
}  # fmt: skip
"""The fields of each table that views read; rows of other tables may have any."""
KEYS = {"members": NUMBER, "launched": NUMBER, "owned": _ID, "contexts": _CONTEXT, "graphs": _CONTEXT}
"""Patterns of those keys of rows that views parse."""


def frame_fault(delta: Any) -> str | None:
    """Return the first place where a delta differs from the results of `views.diff`; None if it is valid."""
    if not isinstance(delta, dict):
        return "the delta"
    return next(_faults_of_sections(delta), None)


def _faults_of_sections(delta: dict[str, Any]) -> Iterator[str]:
    for section, change in delta.items():
        place = f"section {section[:80]!r}"
        if not SECTION.fullmatch(section):
            yield place
        elif change is not None:
            found = fault(change, {"set": dict, "drop": [str]}, place)
            yield from [found] if found else _faults_of_rows(section.rpartition(" ")[2], change["set"], place)


def _faults_of_rows(table: str, rows: dict[str, Any], place: str) -> Iterator[str]:
    shape = ROWS.get(table, {})
    # Fields that are not in the shape are permitted: a later version may add some.
    for key, row in rows.items():
        at = f"{place}, row {key[:80]!r}"  # shortened: the file is not trusted, and this goes into an error
        found = fault(row, shape, at)
        if found:
            yield found
        elif table in KEYS and not KEYS[table].fullmatch(key):
            yield at
        elif table == "members" and row["id"] != int(key):
            yield f"{at}, 'id'"
        elif table == "messages" and row["sent"] is row["received"] is row["lost"] is None:
            yield f"{at}, 'sent', 'received' or 'lost'"
        elif table == "ops" and row["held"] is None is not row["end"]:
            yield f"{at}, 'held'"


def fault(value: Any, shape: Any, place: str) -> str | None:
    """Return the place of the first part of `value` that does not have this shape; None if all parts have it."""
    if isinstance(shape, tuple):
        return None if any(fault(value, each, place) is None for each in shape) else place
    if isinstance(shape, dict):
        return next(_faults_of_fields(value, shape, place), None) if isinstance(value, dict) else place
    if isinstance(shape, list):
        if not isinstance(value, list) or (len(shape) != 1 and len(value) != len(shape)):
            return place
        shapes = shape * len(value) if len(shape) == 1 else shape
        found = (fault(each, inner, f"{place}[{n}]") for n, (each, inner) in enumerate(zip(value, shapes, strict=True)))
        return next(filter(None, found), None)
    return None if _has_shape(value, shape) else place


def _faults_of_fields(value: dict[str, Any], shape: dict[Any, Any], place: str) -> Iterator[str]:
    for name, inner in shape.items():
        if isinstance(name, re.Pattern):
            faults = (fault(each, inner, f"{place}, {key!r}") for key, each in value.items() if name.fullmatch(key))
            yield from filter(None, faults)
            yield from (f"{place}, {key!r}" for key in value if not name.fullmatch(key))
            continue
        field = name.rstrip("?")
        if field in value:
            found = fault(value[field], inner, f"{place}, {field!r}")
            if found:
                yield found
        elif field == name:
            yield f"{place}, {field!r}"


def _has_shape(value: Any, shape: Any) -> bool:
    if isinstance(shape, re.Pattern):
        return isinstance(value, str) and shape.fullmatch(value) is not None
    if shape is None:
        return value is None
    if shape in (int, float):
        kinds = (int,) if shape is int else (int, float)  # exact types: a bool is no number here
        return type(value) in kinds and math.isfinite(value) and abs(value) < _MOST
    return isinstance(value, shape)
