"""Draw the diagrams of the documents for the site: `python docs/make_diagrams.py build/mermaid.min.js`.

The documents have diagrams as text, in blocks named `mermaid`, which GitHub and JupyterLab draw by themselves. The site
shows pictures of them, so that it needs no script from another host. A picture in `docs/diagrams` is named after a
digest of its text: a changed diagram has none until this script has run, and the tests say so.

`npm pack mermaid@11` fetches the drawing code: `package/dist/mermaid.min.js` in its archive. A Chromium runs it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "diagrams"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = {
    "startOnLoad": False,
    "theme": "neutral",
    "htmlLabels": False,  # a picture's text may not be HTML
    "fontFamily": "Arial, Helvetica, sans-serif",
    "sequence": {"mirrorActors": False, "useMaxWidth": False},
    "state": {"useMaxWidth": False},
    "flowchart": {"useMaxWidth": False},
}
DRAW = """async ([settings, text]) => {
  mermaid.initialize(settings);
  return (await mermaid.render('diagram', text)).svg;
}"""


def diagrams(document: Path) -> list[str]:
    """The diagrams of a document."""
    return BLOCK.findall(document.read_text())


def name(diagram: str) -> str:
    """The file name of the picture of a diagram."""
    return f"{hashlib.sha256(diagram.encode()).hexdigest()[:12]}.svg"


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.md")]


def main(code: Path) -> None:
    """Draw all diagrams anew, and remove pictures of diagrams that are gone."""
    from playwright.sync_api import sync_playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.add_script_tag(path=code)
        for document in documents():
            for diagram in diagrams(document):
                (FOLDER / name(diagram)).write_text(page.evaluate(DRAW, [SETTINGS, diagram]) + "\n")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
