"""Still pictures of views, as SVG: for committed notebooks, static books, and everywhere that no browser has run.

Guarantees
- The drawing code of the live panel draws them, in a small JavaScript engine without a browser (quickjs-ng, which the
  extra `lab` installs). Without the engine, and in a picture for a view of no panel, stands the view's text.
- A picture is shown as an image: its styles touch nothing else on the page, and it runs no script. It names no address,
  follows the light or dark scheme of the reader's screen, and has its text beside it for readers who see no image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from rpcbench.base.charts import Picture, as_html, clean_for_xml
from rpcbench.telemetry.drawing import package_text, panel_script, panel_styles
from rpcbench.telemetry.recording import save_text
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.views import View

_LINE, _WIDE = 18, 800  # height of a line of text and width of its picture, in pixels


class _Kind(NamedTuple):
    """A kind of pictures."""

    panel: str  # whose code draws it
    title: str
    each: str = ""  # the section of which the panel shows one row at a time: a picture has all


# By one section that only this view has; see `summary.summarize_view`.
_KINDS = {
    "rrefs": _Kind("rrefs", "RRefs"),
    "contexts": _Kind("autograd", "Autograd contexts", "contexts"),
    "steps": _Kind("pipeline", "Pipeline"),
    "messages": _Kind("messages", "Messages"),
    "pieces": _Kind("shards", "Sharding", "models"),
    "logs": _Kind("workers", "Workers"),
    "files": _Kind("logs", "Logs"),
    "comparisons": _Kind("compare", "Comparison"),
    "plans": _Kind("plan", "Layouts"),
    "jobs": _Kind("progress", "Progress"),
    "curves": _Kind("metrics", "Metrics"),
    "samples": _Kind("resources", "Resources"),
    "flows": _Kind("traffic", "Traffic"),
    "held": _Kind("step", "Held messages"),
}


class Snapshot:
    """A view at one moment: displayed as a picture, printed as text."""

    def __init__(self, view: View) -> None:
        self.panel = panel_of_view(view)
        self.text = summarize_view(view)
        self.svg = _draw_view(view, self.text)
        self.html = as_html(self.svg, self.text)

    def save(self, path: str | Path) -> Path:
        """Write it to a file that ends in .svg or .html, and return its path. Raises ValueError for other endings."""
        target = Path(path)
        if target.suffix not in (".svg", ".html"):
            raise ValueError(f"{target.name}: a snapshot is saved as .svg or .html")
        page = f'<!doctype html><meta charset="utf-8"><title>rpcbench</title>{self.html}'
        return save_text(target, self.svg if target.suffix == ".svg" else page)

    def _repr_mimebundle_(self, **keys: Any) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": self.html}

    def __str__(self) -> str:
        return self.text


def panel_of_view(view: View) -> str:
    """Return the name of the panel that draws such a view, "" if none does."""
    kind = _kind_of(view)
    return kind.panel if kind else ""


def _kind_of(view: View) -> _Kind | None:
    return next((kind for section, kind in _KINDS.items() if section in view), None)


def _draw_view(view: View, words: str) -> str:
    kind = _kind_of(view)
    make_context = find_engine()
    if kind is None or make_context is None:
        return _draw_text(kind.title if kind else "rpcbench", words)
    context = make_context()  # for this picture alone: an engine belongs to one thread
    context.eval(package_text("still", ".js"))
    context.eval(panel_script(kind.panel).replace("export default ", "const makeWidget = "))
    drawn = context.eval(f"still(makeWidget, JSON.parse({json.dumps(json.dumps(view))}), {json.dumps(kind.each)})")
    markup, width, height = json.loads(drawn)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    said = f"<title>{kind.title}</title><desc>{escape(clean_for_xml(words))}</desc>"
    page = f'<body xmlns="http://www.w3.org/1999/xhtml" style="margin:0">{markup}</body>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{said}<style>{_used_styles(kind.panel, markup)}'
        f'</style><foreignObject width="100%" height="100%">{page}</foreignObject></svg>'
    )


@cache
def find_engine() -> Callable[[], Any] | None:
    """Return the class of the engine's contexts, or None if it is not installed."""
    try:
        from quickjs import Context
    except ModuleNotFoundError:
        return None
    found: Callable[[], Any] = Context
    return found


def _used_styles(panel: str, markup: str) -> str:
    """Return the style sheet of a still, without comments and the rules for classes that its markup does not have."""
    used = set(re.findall(r"rb-[\w-]+", markup))
    rules = re.sub(r"/\*.*?\*/", "", f"{panel_styles(panel)}\n{package_text('still', '.css')}", flags=re.DOTALL)
    rules = re.sub(r"\s+", " ", rules)

    def keep(rule: re.Match[str]) -> str:
        # Commas and classes in parentheses are those of `:is` and `:not`.
        each = re.split(r",(?![^()]*\))", rule[1])
        wanted = [one for one in each if used.issuperset(re.findall(r"\.(rb-[\w-]+)", re.sub(r"\(.*\)", "", one)))]
        return f"{','.join(wanted)}{{{rule[2]}}}" if wanted else ""

    return escape(re.sub(r"([^{}]+)\{([^{}]*)\}", keep, rules), quote=False)


def _draw_text(title: str, words: str) -> str:
    picture = Picture(_WIDE, title, words)
    reason = "" if find_engine() else ": a picture needs quickjs-ng, which the extra `lab` installs"
    picture.draw_text(12, 20, f"{title}, as text{reason}", "strong")
    for n, line in enumerate(words.splitlines()):
        picture.draw_text(12, 48 + n * _LINE, line, "code")
    return picture.svg()
