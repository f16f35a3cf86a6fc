"""The content of panels as JSON: what `panel.json()` returns, and its schema.

Guarantees
- The document has the view that the panel draws, unchanged: `{section: {key: row}}`, in the form of records.
- `PANEL_SHAPES` has all fields of all rows. docs/api/panel-json.md is made from it, and tests check each panel by it.
- `VERSION` changes where a field goes or gets another meaning; a new field does not change it, so readers ignore fields
  that they do not know.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rpcbench.telemetry.collector import LIVE, Phase
from rpcbench.telemetry.record_schema import NUMBER, ROW_SHAPES, check_type, make_type
from rpcbench.telemetry.svg import panel_of_view
from rpcbench.telemetry.views import View, World
from rpcbench.telemetry.worker_columns import view_shapes

FORMAT, VERSION = "rpcbench panel", 1

_MEMBER = {"id": int, "name": str, "state": str, "incarnation": int, "left_out": int}
_REMARK = {"words": str}
_TIME = (None, float)

COLLECTIVE = {
    "group": str, "number": int, "op": str, "shape": str, "bytes": int, "site": str, "elsewhere": [str],
    "end_known": bool, "members": [str], "missing": [str], "state": str, "begin": float, "end": _TIME,
    "last": (None, int), "waited": (None, float),
}  # fmt: skip
CELL = {
    **ROW_SHAPES["cells"], "began": _TIME, "worker": int, "line": str, "state": str, "where": str, "how": str,
    "since": (None, float), "lasted": (None, float), "ran": (None, float),
    "parts": [[int, str, str, str, (None, float), (None, int)]],
}  # fmt: skip
WORKER = {
    **_MEMBER, "pid": (None, int), "host": (None, str), "busy": (None, int), "cells": (None, int), **view_shapes(),
    "doing": str, "now": str, "waiting": (None, int), "awaits": str, "calls": int, "silent": int, "under_way": int,
    "ended": str, "sent": int, "received": int,
}  # fmt: skip

PANEL_SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "workers": {
        "workers": WORKER,
        "links": {"worker": int, "peer": int, "sent": int, "received": int},
        "logs": {"worker": int, "text": str},
        "actions": {"action": str, "target": str, "state": str, "error": str, "text?": str, "ended?": float},
    },
    "progress": {
        "workers": _MEMBER,
        "jobs": {
            **{name.rstrip("?"): shape for name, shape in ROW_SHAPES["jobs"].items()},
            "began": _TIME, "end": _TIME, "counted": _TIME, "worker": int, "ended": int,
            "lasted": (None, float),
        },
        "cells": CELL,
    },
    "rrefs": {
        "workers": _MEMBER,
        "rrefs": {
            "rref": str, "owner": int, "type": str, "colour": str, "state": str, "forks": int, "size": (None, int),
            "made": _TIME, "cell": str, "number": (None, int), "by": int,
        },
        "forks": {"fork": str, "rref": str, "owner": int, "holder": int, "parent": (None, int), "state": str},
    },
    "autograd": {
        "workers": _MEMBER,
        "contexts": {
            "context": str, "workers": int, "sends": int, "recvs": int, "open": int, "gradients": int, "passes": int,
            "made": _TIME, "ended": _TIME, "step": (None, int),
        },
        "members": {"context": str, "worker": int, "sends": int, "recvs": int, "gradients": int},
        "links": {
            "context": str, "from": int, "to": int, "state": str, "sent": int, "received": int, "open": int,
        },
        "messages": {
            "context": str, "message": str, "from": int, "to": int, "label": str, "shape": str, "stage": (None, int),
            "bytes": int, "sent": int, "received": int, "fired": int, "back": int,
        },
        "parts": {
            "context": str, "worker": int, "place": int, "stage": (None, int), "state": str, "sends": [str],
            "recvs": [str], "ops": [str], "count": (None, int), "ran": [float], "done": int, "times": int,
            "seconds": (None, float),
        },
        "passes": {
            "context": str, "pass": str, "worker": int, "state": str, "needed": int, "arrived": int, "waiting": int,
            "left": int, "regions": (None, int), "ran": (None, int),
        },
        "leaves": {"context": str, "worker": int, "place": int, "name": str, "shape": str, "bytes": int},
    },
    "pipeline": {
        "workers": _MEMBER,
        "steps": {
            "step": int, "run": str, "state": str, "trains": bool, "begin": float, "end": float, "ops": int,
            "bubble": (None, float), "minimum": (None, float), "loss": (None, float), "samples": (None, int),
        },
        "lanes": {
            "step": int, "worker": int, "stages": [int], "replica": (None, int), "done": int, "planned": int,
            "next": str, "busy": (None, float), "held": int, "peak": int,
        },
        "ops": ROW_SHAPES["ops"],
        "remarks": _REMARK,
    },
    "messages": {
        "workers": _MEMBER,
        "messages": {**ROW_SHAPES["messages"], "words": str, "family": str, "state": str},
        "collectives": COLLECTIVE,
        "entries": {
            "collective": str, "worker": int, "begin": float, "end": _TIME, "waited": (None, float), "failed": bool,
        },
        "counts": {"all": int},
        "clocks": {"error": float},
        "zero": {"at": float, "since_1970": float},
        "stragglers": _REMARK,
        "remarks": _REMARK,
    },
    "shards": {
        "workers": _MEMBER,
        "models": {"model": str, "kind": str, "params": int, "parameter": int, "gradient": int, "state": int},
        "ranks": {
            "worker": int, "model": str, "rank": (None, int), "stages": [int], "places": str, "parameter": int,
            "gradient": int, "state": int, "gathered": int, "most": int, "steps": int, "left_out": int,
        },
        "meshes": {"model": str, "names": [str], "shape": [int], "ranks": [int], "workers": [(None, int)]},
        "params": {
            "model": str, "name": str, "also": [str], "order": int, "way": str, "shape": [int], "dtype": str,
            "placed": str, "differs": bool, "trainable": bool, "whole": int,
        },
        "pieces": {
            "worker": int, "model": str, "param": str, "name": str, "stage": (None, int), "order": int, "also": [str],
            "kind": str, "shape": [int], "dtype": str, "device": str, "trainable": bool, "placed": str, "size": [int],
            "block": [float], "lit": (None, [float]), "now": bool, "times": int, "whole": int, "parameter": int,
            "gradient": int, "state": int, "words": str,
        },
        "remarks": {"model": str, "words": str},
    },
    "compare": {
        "workers": _MEMBER,
        "comparisons": {**ROW_SHAPES["comparisons"], "steps": int, "step": int},
        "modules": {
            "name": str, "label": str, "depth": int, "parent": (None, str), "order": int, "folded": bool,
            "layouts": {NUMBER: str}, "nearest": {NUMBER: str},
        },
        "values": ROW_SHAPES["verdicts"],
        "layouts": ROW_SHAPES["layouts"],
    },
    "metrics": {
        "workers": _MEMBER,
        "metrics": {"name": str, "order": int, "step": int, "diverge": int},
        "curves": {
            "worker": int, "incarnation": int, "name": str, "order": int, "step": int, "count": int,
            "value": (float, str), "state": str, "words": str, "ended": str,
        },
        "ends": {"worker": int, "ended": str, "name": str, "step": int},
        "points": {
            "curve": str, "order": int, "steps": [int], "values": [float], "odd": (None, [int, str, int]),
            "odds": [[int, int, str]],
        },
    },
    "resources": {"workers": _MEMBER, "samples": ROW_SHAPES["samples"]},
    "traffic": {"workers": _MEMBER, "flows": ROW_SHAPES["traffic"]},
    "logs": {
        "workers": _MEMBER,
        "files": {"name": str, "path": str, "missing": str, "lost": str, "skipped": int, "lines": int},
        "lines": {
            "worker": int, "kind": str, "first": int, "order": int, "at": _TIME, "lines": [str], "levels": str,
        },
    },
    "plan": {
        "workers": _MEMBER,
        "plans": {"hardware": str, "memory": float, "ranks": int},
        "planned": {
            "order": int, "name": str, "error": str, "state": str, "seconds?": float, "peak?": float, "bytes?": int,
            "parts?": [[str, int]], "reserved?": int, "tokens?": (None, float), "causes?": [[str, float]],
        },
        "timelines": {"role": str, "lanes": [str], "bars": [[int, float, float, str, str]]},
    },
    "step": {
        "stepper": {"on": bool, "delivered": int, "dropped": int, "passed": float, "order": [int]},
        "held": {
            "n": int, "sender": str, "to": str, "kind": str, "words": str, "family": str, "about": str,
        },
    },
}  # fmt: skip
"""By panel and section: the shape of a row, in the words of `record_schema`."""
_HEAD = make_type({
    "format": str, "version": int, "panel": str, "phase": str, "at": _TIME, "epoch": _TIME, "sections": dict,
})  # fmt: skip
_ROWS = {name: {key: make_type(shape) for key, shape in each.items()} for name, each in PANEL_SHAPES.items()}


def panel_document(view: View, phase: Phase, world: World) -> dict[str, Any]:
    """Return a view as a document of plain values.

    `phase`: `live`, `stopped`, `record` or `simulated`. `at`: the moment that it shows, in seconds since 1970, if it is
    live or stopped. `epoch`: the moment in seconds since 1970 at which the clock stood at 0 by which the rows have
    times, where it is known.
    """
    at = time.time() if phase.name == LIVE.name else phase.at or None
    about = {"format": FORMAT, "version": VERSION, "panel": panel_of_view(view), "phase": phase.name, "at": at}
    return {**about, "epoch": _find_epoch(world), "sections": view}


def _find_epoch(world: World) -> float | None:
    """Return the epoch of our clock: of the first member that shares it."""
    shared = (member.get("epoch") for member in world.values() if not any(member.get("clock", ())))
    return next((epoch for epoch in shared if epoch is not None), None)


def check_document(document: dict[str, Any]) -> None:
    """Raise ValueError, with the first place that differs, if this is no document of a panel of this version."""
    check_type(document, _HEAD, "the document")
    if (document["format"], document["version"]) != (FORMAT, VERSION):
        raise ValueError(f"the document is {document['format']!r} of version {document['version']}, not {VERSION}")
    if document["panel"] not in PANEL_SHAPES:
        raise ValueError(f"the document is of an unknown panel, {document['panel']!r}")
    check_sections(document["sections"], _ROWS[document["panel"]])


def check_sections(sections: View, types: dict[str, Any]) -> None:
    """Raise ValueError, with the place, if there are not these sections, or a row does not have its section's type."""
    if sections.keys() != types.keys():
        raise ValueError(f"the document has the sections {', '.join(sections)}, not {', '.join(types)}")
    for name, rows in sections.items():
        for key, row in rows.items():
            check_type(row, types[name], f"section {name}, row {key[:80]!r}")


def describe_shape(shape: Any) -> str:
    """Return a shape in words: `integer or null`, `list of text`."""
    if isinstance(shape, tuple):
        return " or ".join(describe_shape(each) for each in sorted(shape, key=lambda each: each is None))
    if isinstance(shape, list):
        each = [describe_shape(one) for one in shape]
        return f"list of {each[0]}" if len(each) == 1 else f"[{', '.join(each)}]"
    if isinstance(shape, dict):
        if NUMBER in shape:
            return f"object by number of {describe_shape(shape[NUMBER])}"
        return f"object ({'; '.join(f'{name}: {words}' for name, words in describe_fields(shape))})"
    return _WORDS.get(shape, "text")  # a pattern is one of text


_WORDS: dict[Any, str] = {
    None: "null", int: "integer", float: "number", str: "text", bool: "boolean", dict: "object", list: "list",
}  # fmt: skip


def describe_fields(shape: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each field of a row, with its type in words; of fields with `?` also that they may be absent."""
    for name, inner in shape.items():
        words = describe_shape(inner)
        yield name.rstrip("?"), f"{words}, may be absent" if name.endswith("?") else words
