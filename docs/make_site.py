"""Build the site: `python docs/make_site.py [FOLDER [PAGE ...]]`, by default in build/site, as `make site` does.

With pages, such as `notebooks/20_ring_all_reduce`, it builds these and the first page, and lets links to others lead
nowhere.

The pages are README, the documents, the reference, and the lessons with their stored outputs: pictures, and players of
records, which need no kernel. Nothing is executed. Sphinx builds it, and a warning ends the build. A reader's browser
asks no other host for anything.

Markdown that GitHub shows well needs four changes: links to files that are no pages of the site lose their address,
pictures for light and dark follow the site's own switch, diagrams are pictures, and contents are listed for the
sidebar.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import gallery_pages
import make_diagrams
from lesson_pages import add_to, list_of_records, write_players
from make_course import TRACKS
from sphinx.cmd.build import build_main

from rpcbench import __version__

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md", "AGENTS.md", "ARCHITECTURE.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md",
    "docs/**/*.md", "notebooks/*.md", "benchmarks/RESULTS.md",
]  # fmt: skip
CONTENTS = {
    "Course": ["notebooks/README", "notebooks/glossary", "docs/teachers"],
    "Use": [
        "docs/magics", "docs/tasks", "docs/jupyterlab", "docs/panels", "docs/pipelines", "docs/collectives",
        "docs/profiles",
        "docs/parallelism", "docs/compare", "docs/silent-bugs/README", "docs/types", "docs/simulation", "docs/named",
        "docs/past-one-machine", "docs/safety", "docs/migration", "docs/from-accelerate", "docs/from-others",
        "docs/which-rank-hangs", "docs/for-assistants",
    ],
    "Reference": ["docs/api/README", "docs/README", "benchmarks/RESULTS", "CHANGELOG"],
    "Inside": ["ARCHITECTURE", "CONTRIBUTING", "AGENTS", "SECURITY", "CODE_OF_CONDUCT"],
}  # fmt: skip
BELOW = {  # pages that a page lists below itself
    "docs/api/README.md": "docs/api/*.md",
    "ARCHITECTURE.md": "docs/internals/*.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PICTURE = re.compile(r"<picture>\s*<source[^>]*srcset=\"([^\"]+)\"[^>]*>\s*<img\s+(.*?)>\s*</picture>", re.DOTALL)
PAIR = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)\n!\[The same, dark\]\(([^)]+)\)")
REPOSITORY = os.environ.get("RPCBENCH_REPOSITORY", "").rstrip("/")
"""The web address of this repository, such as https://host/owner/name; links to sources lead there."""
FILES = f"{REPOSITORY}/blob/HEAD/"


def main(target: Path, only: Sequence[str] = ()) -> int:
    """Build the site, or only some pages, into a folder, and return Sphinx's exit status."""
    source = target / "source"
    shutil.rmtree(target, ignore_errors=True)
    arrange(source, only)
    settings = ["-D", f"html_title=rpcbench {__version__}"]
    if REPOSITORY:  # an eye at the head of each page
        settings += ["-D", f"html_theme_options.source_view_link={FILES}{{filename}}"]
    strict = ["-D", "suppress_warnings=toc,myst,mystnb.unknown_mime_type"] if only else ["-W", "--keep-going"]
    options = ["-q", "-j", "auto", "-b", "html", *settings, *strict]
    return build_main([*options, str(source), str(target / "html")])


def arrange(source: Path, only: Sequence[str] = ()) -> None:
    """Write the pages of the site, or only some, as Sphinx takes them."""
    for pattern in PAGES:
        for path in ROOT.glob(pattern):
            name = path.relative_to(ROOT).as_posix()
            if not only or name.removesuffix(".md") in ("README", *only):
                text = markdown(path.read_text(), name) + contents(name)
                is_kind = path.parent == gallery_pages.FOLDER
                write(source / _page(name), gallery_pages.with_player(text, path.stem) if is_kind else text)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        if not only or f"notebooks/{path.stem}" in only:
            write(source / "notebooks" / path.name, lesson(path))
        write(source / "extra" / "notebooks" / path.name, path.read_text())
    write_players(source / "extra" / "notebooks" / "records")
    gallery_pages.write_players(source / "extra" / "docs" / "silent-bugs" / "records")
    shutil.copy(ROOT / "docs" / "site" / "conf.py", source)
    (source / "static").mkdir()
    for name in ("site.css", "favicon.svg"):
        shutil.copy(ROOT / "docs" / "site" / name, source / "static")
    for folder in ("docs/pictures", "docs", "docs/diagrams", "docs/silent-bugs/pictures", "notebooks/pictures"):
        for picture in [*(ROOT / folder).glob("*.png"), *(ROOT / folder).glob("*.svg")]:
            for place in (source / folder, source / "extra" / folder):
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(picture, place)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _page(name: str) -> str:
    return "index.md" if name == "README.md" else name


def markdown(text: str, name: str) -> str:
    """A page with links that lead somewhere on the site, and pictures that follow its switch of light and dark."""
    text = make_diagrams.BLOCK.sub(lambda block: _diagram(block[1], name), text)
    code = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.MULTILINE | re.DOTALL)
    told = [part if place % 2 else LINK.sub(lambda link: _link(link, name), part) for place, part in enumerate(code)]
    return PAIR.sub(_pair, PICTURE.sub(_both, "".join(told)))


def _diagram(text: str, name: str) -> str:
    picture = make_diagrams.FOLDER / make_diagrams.name(text)
    if not picture.exists():
        raise FileNotFoundError(f"{name} has a diagram without a picture: python docs/make_diagrams.py makes it")
    address = os.path.relpath(picture, (ROOT / name).parent)
    return (
        f'<div class="diagram"><img alt="A diagram; its text follows" src="{address}"></div>\n\n'
        f"<details><summary>The diagram as text</summary>\n\n```text\n{text}```\n\n</details>\n"
    )


def _link(link: re.Match[str], name: str) -> str:
    mark, words, address = link.groups()
    if address.startswith(("http:", "https:", "#", "mailto:")):
        return link[0]
    path, _, anchor = address.partition("#")
    target = Path(os.path.normpath(ROOT / PurePosixPath(name).parent / path))
    inside = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
    if mark:
        return link[0]
    if target.suffix in (".md", ".ipynb") and target.exists():
        if inside == "README.md":
            back = os.path.relpath(ROOT / "index.md", (ROOT / name).parent)
            return f"[{words}]({back}{'#' + anchor if anchor else ''})"
        return link[0]
    words = words.replace("__", r"\_\_")  # of __init__.py, which would be bold
    return f"[{words}]({FILES}{inside})" if REPOSITORY else words


def _pair(pair: re.Match[str]) -> str:
    words, light, dark = pair.groups()
    return _image("light", f'alt="{words}" src="{light}"') + _image("dark", f'alt="{words}" src="{dark}"')


def _both(picture: re.Match[str]) -> str:
    dark, image = picture.groups()
    light = re.sub(r"\s+", " ", image)
    return _image("light", light) + _image("dark", re.sub(r'src="[^"]+"', f'src="{dark}"', light))


def _image(scheme: str, attributes: str) -> str:
    return f'<img class="only-{scheme}" {attributes}>'


def lesson(path: Path) -> str:
    """A lesson with its stored outputs; the texts beside them are pages like others."""
    notebook = json.loads(path.read_text())
    notebook["cells"] = add_to(notebook["cells"], path.stem, REPOSITORY)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = markdown("".join(cell["source"]), f"notebooks/{path.name}")
    return json.dumps(notebook)


def contents(name: str) -> str:
    """The lists of pages below a page, for the sidebar alone, and that of the records."""
    if name == "README.md":
        return "".join(toctree(pages, caption) for caption, pages in CONTENTS.items())
    if name == "notebooks/README.md":
        lessons = json.loads((ROOT / "notebooks" / "lessons.json").read_text())
        tracks = {title: [row["lesson"] for row in lessons if row["track"] == track] for track, title in TRACKS.items()}
        return list_of_records() + "".join(toctree(names, title) for title, names in tracks.items())
    if name == "docs/silent-bugs/README.md":
        return toctree([kind.name for kind in gallery_pages.KINDS])
    if name in BELOW:
        below = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(BELOW[name]))
        return toctree([f"/{page.removesuffix('.md')}" for page in below if page != name])
    return ""


def toctree(pages: list[str], caption: str = "") -> str:
    head = f":caption: {caption}\n" if caption else ""
    return f"\n```{{toctree}}\n:hidden:\n{head}\n" + "\n".join(pages) + "\n```\n"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site", sys.argv[2:]))
