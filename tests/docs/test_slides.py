"""Slides of a lesson: one for each heading, with the stored pictures, and without links between lessons."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LESSON = ROOT / "notebooks" / "20_ring_all_reduce.ipynb"


def test_each_heading_begins_a_slide(tmp_path):
    asked = [sys.executable, "docs/make_slides.py", str(LESSON), str(tmp_path)]
    made = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    page = Path(made.stdout.strip()).read_text()
    assert page.count("<section><section>") + page.count("<section>\n<section>") >= 5, "slides with slides below them"
    titles = re.findall(r'"## ([^"\\]+)', LESSON.read_text())
    assert len(titles) > 4
    for title in titles:
        assert re.search(rf"<h2[^>]*>{re.escape(title)}", page), title
    assert "data:image/svg+xml" in page and "glossary.md" not in page
