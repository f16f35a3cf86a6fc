"""Make slides of a lesson: `python docs/make_slides.py notebooks/04_collectives.ipynb [FOLDER]`; build/slides if none.

A heading begins a slide; an exercise, and each further cell with code, lies below it. Exercises keep their empty
answers, outputs are those that are stored. The page loads reveal.js from the web and needs no kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbconvert import SlidesExporter

ROOT = Path(__file__).parent.parent


def kind(cell: nbformat.NotebookNode, seen: int) -> str:
    """The place of a cell: `slide` begins one, `subslide` one below it, `-` goes on, `skip` is left out.

    Args:
        seen: The cells with code since the slide began.
    """
    if any(tag.startswith("course:") for tag in cell.metadata.get("tags", ())):
        return "skip"
    if cell.cell_type == "markdown" and cell.source.startswith(("# ", "## ")):
        return "slide"
    if cell.cell_type == "markdown" and cell.source.startswith("### "):
        return "subslide"
    return "subslide" if cell.cell_type == "markdown" and seen else "-"


def slides(path: Path) -> str:
    """A lesson as one page of slides."""
    notebook = nbformat.read(path, 4)
    seen = 0
    for cell in notebook.cells:
        place = kind(cell, seen)
        cell.metadata["slideshow"] = {"slide_type": place}
        seen = 0 if place.endswith("slide") else seen + (cell.cell_type == "code")
    exporter = SlidesExporter(reveal_scroll=True)
    page: str = exporter.from_notebook_node(notebook)[0]
    return page


def main(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{path.stem}.slides.html"
    target.write_text(slides(path))
    sys.stdout.write(f"{target}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else ROOT / "build" / "slides")
