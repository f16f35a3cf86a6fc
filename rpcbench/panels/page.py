"""A record as a page that plays by itself: the panel's own drawing code, and what it is to draw at each frame.

Guarantees
- The page asks nothing of anybody, which its own policy forbids it, and runs in a frame apart from whatever shows it.
- What workers have said is data, never markup: it stands in JSON without a `<`, and the panel makes text of it.
- Its size is bounded: of a long record, frames are left out evenly, never one that has a name; then those at the end.
  How many is said below the panel.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from rpcbench.panels.base import Panel, piece
from rpcbench.telemetry.record import Player, Record
from rpcbench.telemetry.views import View, diff

MOST_FRAMES = 300
MOST_ROWS = 400_000  # looked at, over all frames: views of many rows take their time
MOST_BYTES = 4_000_000
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
_DEFAULT = "export default "
_OPENS = "(d => { d.open = !d.closest('div.jp-Notebook') })(document.currentScript.parentElement)"  # nbconvert: a body


_DISTRUSTED = (
    "This notebook is not trusted here, so it may play nothing: Trust Notebook, in JupyterLab's palette of commands."
)


def folded(record: Record, kind: type[Panel]) -> str:
    """The page inside another one: open where no notebook runs, else to be opened by a click, below the live panel.

    Jupyter leaves frames out of notebooks that are not trusted, but not the words in them, which browsers do not show.
    """
    frame = f'sandbox="allow-scripts" style="width:100%;height:620px;border:0" srcdoc="{escape(page(record, kind))}"'
    inside, script = f"<iframe {frame}>{_DISTRUSTED}</iframe>", f"<script>{_OPENS}</script>"
    return f"<details><summary>The record, played without a kernel</summary>{inside}{script}</details>"


def page(record: Record, kind: type[Panel]) -> str:
    """The page as one HTML document."""
    drawing, driver = str(kind._esm), piece("player", ".js")
    assert drawing.count(_DEFAULT) == 1 and "</script" not in drawing + driver
    data = json.dumps(played(record, kind)).replace("<", "\\u003c")
    styles = f"{kind._css}\n{piece('player', '.css')}"
    start = "play(JSON.parse(document.getElementById('record').textContent), made_(), document.body);"
    code = f"{drawing.replace(_DEFAULT, 'const made_ = ')}\n{{\n{driver}\n{start}\n}}"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    body = f'<script type="application/json" id="record">{data}</script><script type="module">{code}</script>'
    head += f"<title>rpcbench</title><style>{styles}</style>"
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>'


def played(record: Record, kind: type[Panel]) -> dict[str, Any]:
    """`seconds`, `note` (what is left out, or "") and `frames`, each `time`, `name` and the `delta` of its view."""
    frames: list[dict[str, Any]] = []
    size, before = 0, View()
    for at, view in _views(record, kind, _chosen(record)):
        seconds, _, name = record.frames[at]
        delta, before = diff(before, view), view
        size += len(json.dumps(delta))
        if size > MOST_BYTES and frames:
            break
        frames.append({"time": round(seconds, 3), "name": name, "delta": delta})
    if not frames:
        frames.append({"time": 0.0, "name": "empty", "delta": diff({}, kind.look({}))})
    count = len(record.frames)
    left_out = max(0, count - len(frames))
    note = f"{left_out} of {count} frames are left out here; rpcbench.replay plays all." if left_out else ""
    return {"seconds": round(record.seconds, 3), "note": note, "frames": frames}


def _views(record: Record, kind: type[Panel], wanted: list[int]) -> Iterator[tuple[int, View]]:
    player = Player(record)
    for at in wanted:
        player.go(at)
        yield at, kind.look(player.world())


def _chosen(record: Record) -> list[int]:
    """Which frames there is room for: evenly many, besides those with a name, the first and the last."""
    count = len(record.frames)
    rows = sum(len(change["set"]) for _, delta, _ in record.frames for change in delta.values() if change)
    most = min(MOST_FRAMES, max(2, MOST_ROWS // max(1, rows)))
    stride = max(1, -(-count // most))
    named = {at for at, (_, _, name) in enumerate(record.frames) if name}
    return sorted({*range(0, count, stride), *named, *([count - 1] if count else [])})
