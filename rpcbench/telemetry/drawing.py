"""The drawing code of the panels, which browsers run for live panels and `telemetry.svg` for still pictures.

It is `strings.js`, `menu.js` and `common.js` joined with a panel's own files: one module, no build step, no request to
any host.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rpcbench.pipeline.simulate import MARKS
from rpcbench.simulation.world_pictures import TIMELINE_MARKS
from rpcbench.telemetry import worker_columns
from rpcbench.telemetry.compare_view import PHASES, VERDICT_MARKS
from rpcbench.telemetry.message_views import FAMILY_COLOURS, MESSAGE_FAMILIES, MESSAGE_STATES
from rpcbench.telemetry.progress_view import CELL_STATES, JOB_STATES
from rpcbench.telemetry.resource_views import MEMBER_COLOURS, chart_rows
from rpcbench.telemetry.shard_views import SHARD_PARTS, SHARD_WAYS
from rpcbench.telemetry.views import RREF_STATES, TYPE_COLOURS

_FILES = Path(__file__).parent.parent / "panels"
_PARTS = {
    "autograd": ["lanes"], "compare": ["grids", "values"], "messages": ["meetings"], "metrics": ["charts"],
    "pipeline": ["steps", "timeline", "curves"], "progress": ["cells"],
    "resources": ["charts"], "shards": ["grids"],
}  # fmt: skip
"""The further scripts of a panel, and their styles where they have some."""
_SHADES = {"shade": {f"shade-{n}": colour for n, colour in enumerate(MEMBER_COLOURS)}}
_COLOURS: dict[str, dict[str, dict[str, str]]] = {
    "compare": {"verdict": {f"is-{word.replace(' ', '-')}": mark.colour for word, mark in VERDICT_MARKS.items()}},
    "messages": {"kind": FAMILY_COLOURS},
    "step": {"kind": FAMILY_COLOURS},
    "pipeline": {
        "op": {f"op-{kind}": mark.colour for kind, mark in MARKS.items()},
        "letter": {f"op-{kind}": mark.ink for kind, mark in MARKS.items()},
    },
    "plan": {
        "phase": {f"phase-{mark.name.replace(' ', '-')}": mark.colour for mark in TIMELINE_MARKS},
        "letter": {f"phase-{mark.name.replace(' ', '-')}": mark.ink for mark in TIMELINE_MARKS},
    },
    "metrics": _SHADES,
    "resources": _SHADES,
    "rrefs": {"type": {f"type-{colour}": colour for colour in TYPE_COLOURS} | {"type-mixed": "dim"}},
    "shards": {
        "way": {f"way-{key}": mark.colour for key, mark in SHARD_WAYS.items()}
        | {f"part-{key}": mark.colour for key, mark in SHARD_PARTS.items()}
        | {"part-gathered": "amber"}
    },
}
"""By panel and CSS variable: the colours of classes."""


def package_text(name: str, suffix: str) -> str:
    """Return the text of a file beside the panels."""
    return (_FILES / f"{name}{suffix}").read_text(encoding="utf-8")


def lists_script() -> str:
    """Return the lists that Python shares with the drawing code, as a constant of it."""
    families = {family.key: family.name for family in MESSAGE_FAMILIES}
    lists = {
        "workers": [asdict(column) for column in worker_columns.WORKER_COLUMNS],
        "compare": {"words": {word: mark.name for word, mark in VERDICT_MARKS.items()}, "phases": PHASES},
        "messages": {"families": families, "states": MESSAGE_STATES},
        "pipeline": {"kinds": {kind: mark.name.partition(" ")[2] for kind, mark in MARKS.items()}},
        "plan": {"phases": [mark.name for mark in TIMELINE_MARKS]},
        "progress": {"jobs": JOB_STATES, "cells": CELL_STATES},
        "resources": chart_rows(),
        "rrefs": {"states": RREF_STATES},
        "shards": {
            "parts": {key: mark.name for key, mark in SHARD_PARTS.items()},
            "ways": {key: mark.piece for key, mark in SHARD_WAYS.items()},
        },
    }
    return f"const LISTS = {json.dumps(lists, ensure_ascii=False)};"


def panel_script(panel: str) -> str:
    names = ["strings", "menu", "common", *_PARTS.get(panel, []), panel]
    return "\n".join([lists_script(), *(package_text(name, ".js") for name in names)])


def panel_styles(panel: str) -> str:
    """Return the style sheet of a panel, with the rules that give classes their colours as variables."""
    rules = [
        f".rb-{panel} .rb-{name} {{ --rb-{variable}: var(--rb-{colour}); }}"
        for variable, colours in _COLOURS.get(panel, {}).items()
        for name, colour in colours.items()
    ]
    names = ["common", *(part for part in _PARTS.get(panel, []) if (_FILES / f"{part}.css").exists()), panel]
    return "\n".join([*(package_text(name, ".css") for name in names), *rules])
