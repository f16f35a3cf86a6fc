"""What the site adds to the page of a lesson: how to run it, the notebook as a file, and players of its records.

A player is a page of its own, which the lesson's page shows in a frame: the panel's own drawing code and a record of
docs/records. It needs no kernel, and sends no request. Links to services that run notebooks are there only if the
address of the repository is known, and only to those that can reach it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from make_records import FOLDER, SCENES, Scene

from rpcbench.panels import PANELS
from rpcbench.panels.replay import html_page
from rpcbench.telemetry.recording import load_record

Cell = dict[str, Any]
RUN = """:::{{admonition}} Run this lesson
:class: run

With rpcbench [installed](../README.md#install), `rpcbench lab` opens all lessons; `rpcbench lessons` only copies them,
with the files that they import. <a href="{lesson}.ipynb" download>This notebook alone</a>{services}.
:::"""
BINDER = {"https://github.com/": "gh", "https://gitlab.com/": "gl"}
PLAYER = """<figure class="record">
<iframe src="{address}" title="A record" sandbox="allow-scripts" loading="lazy" style="height:{height}px"></iframe>
<figcaption>A record of these cells, which needs no kernel: press <em>Play</em>. {shows}
<a href="{address}">On a page of its own</a></figcaption>
</figure>"""


def add_to(cells: list[Cell], lesson: str, repository: str) -> list[Cell]:
    """The cells of a lesson, with the site's own: below its head, and below the last cell of each record."""
    players = {[*scene.cells][-1]: player(name, scene) for name, scene in SCENES.items() if scene.lesson == lesson}
    shown: list[Cell] = []
    for cell in cells:
        shown.append(cell)
        if "course:head" in cell["metadata"].get("tags", ()):
            shown.append(_markdown("site-run", how_to_run(lesson, repository)))
        if cell["id"] in players:
            shown.append(_markdown(f"site-{cell['id']}", players[cell["id"]]))
    return shown


def _markdown(name: str, text: str) -> Cell:
    return {"cell_type": "markdown", "id": name, "metadata": {}, "source": text}


def how_to_run(lesson: str, repository: str) -> str:
    """Tell how to run a lesson here, and on services that can reach the repository."""
    path = f"notebooks/{lesson}.ipynb"
    links = {}
    for host, kind in BINDER.items():
        if repository.startswith(host):
            place = quote(repository.removeprefix(host), safe="/" if kind == "gh" else "")
            links["on Binder"] = f"https://mybinder.org/v2/{kind}/{place}/HEAD?urlpath=lab/tree/{path}"
            if kind == "gh":
                links["in Colab"] = f"https://colab.research.google.com/github/{place}/blob/HEAD/{path}"
    services = [f"[{words}]({address})" for words, address in links.items()]
    if "in Colab" in links:
        services[-1] += ", with [a cell before it](../docs/teachers.md#without-an-installation)"
    return RUN.format(lesson=lesson, services=f"; {', or '.join(services)}" if services else "")


def player(name: str, scene: Scene) -> str:
    """The frame with a record, as HTML."""
    return PLAYER.format(address=f"records/{name}.html", height=scene.height, shows=escape(scene.shows))


def list_of_records() -> str:
    """The records of all lessons, as a part of the page of the course."""
    lines = [
        f'- [Lesson {scene.lesson[:2]}]({scene.lesson}.ipynb), <a href="records/{name}.html">{name}</a>: {scene.shows}'
        for name, scene in SCENES.items()
    ]
    return "\n## Records\n\nThey play in a browser alone, without a kernel.\n\n" + "\n".join(lines) + "\n"


def write_players(folder: Path) -> None:
    """Write the pages that play the records."""
    folder.mkdir(parents=True)
    for name, scene in SCENES.items():
        head = f"<title>{scene.lesson}: a record</title>"
        html = html_page(load_record(FOLDER / f"{name}.json"), PANELS[scene.panel]).replace(
            "<title>rpcbench</title>", head
        )
        (folder / f"{name}.html").write_text(html)
