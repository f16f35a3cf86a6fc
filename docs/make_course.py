"""Write what follows from `notebooks/lessons.json`: the map in `notebooks/README.md`, heads and feet of the lessons.

`python docs/make_course.py` renews them; the tests compare. A head says to which track a lesson belongs, how long it
takes, and on which lessons it builds; a foot leads on. Both are cells of their own, tagged `course:head` and
`course:foot`. In lessons.json itself it renews the module of a lesson's checks and the number of its exercises, which
the start page shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
MAP = NOTEBOOKS / "README.md"
BEGIN, END = "<!-- map: made by docs/make_course.py -->", "<!-- end of the map -->"
TRACKS = {
    "start": "Start",
    "rpc": "RPC and autograd",
    "scale": "Training at scale",
    "exam": "Exam",
    "appendix": "Appendix",
}
Lesson = dict[str, Any]


def lessons() -> list[Lesson]:
    """The rows of lessons.json, in the order of the course."""
    found: list[Lesson] = json.loads((NOTEBOOKS / "lessons.json").read_text())
    return found


def number(lesson: Lesson) -> str:
    return str(lesson["lesson"][:2])


def link(lesson: Lesson) -> str:
    return f"[{number(lesson)} · {lesson['title']}]({lesson['lesson']}.ipynb)"


def hours(minutes: int) -> str:
    """`95` is 1½ hours."""
    halves = round(minutes / 30)
    return f"{halves // 2 or ''}{'½' if halves % 2 else ''} {'hour' if halves <= 2 else 'hours'}"


def course_map(course: list[Lesson]) -> str:
    """The tracks as tables."""
    parts = []
    for track, title in TRACKS.items():
        rows = [lesson for lesson in course if lesson["track"] == track]
        about = f"{len(rows)} lessons, about {hours(sum(row['minutes'] for row in rows))}"
        parts += [f"### {title}" + (f" ({about})" if len(rows) > 1 else ""), ""]
        parts += ["| lesson | | minutes | builds on |", "|---|---|---|---|"]
        for row in rows:
            parts.append(f"| {link(row)} | {row['about']} | {row['minutes']} | {', '.join(_before(course, row))} |")
        parts.append("")
    return "\n".join(parts)


def _before(course: list[Lesson], lesson: Lesson) -> list[str]:
    return [f"[{number(row)}]({row['lesson']}.ipynb)" for row in course if row["lesson"] in lesson["before"]]


def head(course: list[Lesson], lesson: Lesson) -> str:
    track = [row for row in course if row["track"] == lesson["track"]]
    place = f", lesson {track.index(lesson) + 1} of {len(track)}" if len(track) > 1 else ""
    before = _before(course, lesson)
    builds = f" It builds on {', '.join(before)}." if before else ""
    return (
        f"[Course](README.md) → {TRACKS[lesson['track']]}{place}. Allow about {lesson['minutes']} minutes.{builds}\n"
        "Words are explained in the [glossary](glossary.md)."
    )


def foot(course: list[Lesson], lesson: Lesson) -> str:
    before, after = neighbours(course, lesson)
    steps = ["← " + link(before)] if before else []
    steps += ["[course](README.md)"]
    steps += [link(row) + " →" for row in after]
    return " | ".join(steps)


def neighbours(course: list[Lesson], lesson: Lesson) -> tuple[Lesson | None, list[Lesson]]:
    """The lesson before and those after: both tracks begin after the last lesson of the start."""
    first = {track: next(row for row in course if row["track"] == track) for track in TRACKS}
    start = [row for row in course if row["track"] == "start"]
    track = [row for row in course if row["track"] == lesson["track"]]
    place = track.index(lesson)
    begins = start[-1] if lesson["track"] in ("rpc", "scale") else None  # an exam follows no lesson
    before = track[place - 1] if place else begins
    after = track[place + 1 : place + 2] or ([first["rpc"], first["scale"]] if lesson in start else [])
    return before, after


def made(notebook: nbformat.NotebookNode, course: list[Lesson], lesson: Lesson) -> None:
    """Renew the head and the foot of a lesson."""
    cells = [cell for cell in notebook.cells if not _is_made(cell)]
    cells.insert(1, _cell("head", head(course, lesson)))
    cells.append(_cell("foot", foot(course, lesson)))
    notebook.cells = cells


def _cell(kind: str, source: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_markdown_cell(source, id=f"course-{kind}", metadata={"tags": [f"course:{kind}"]})


def _is_made(cell: nbformat.NotebookNode) -> bool:
    return any(tag.startswith("course:") for tag in cell.metadata.get("tags", ()))


def page(course: list[Lesson]) -> str:
    """README.md of the lessons, with the map in its place."""
    text = MAP.read_text()
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n{course_map(course)}{END}{after}"


def counted(lesson: Lesson) -> Lesson:
    """The row of a lesson with the module of its checks and the number of its exercises, as its notebook has them."""
    text = (NOTEBOOKS / f"{lesson['lesson']}.ipynb").read_text()
    module = re.search(r"from checks import (\w+) as check", text)
    return lesson | {"checks": module[1] if module else "", "exercises": len(re.findall(r'"exercise:\w+"', text))}


def table(course: list[Lesson]) -> str:
    """lessons.json, a line for each lesson."""
    return "[\n" + ",\n".join(f"  {json.dumps(lesson, ensure_ascii=False)}" for lesson in course) + "\n]\n"


def main() -> None:
    course = [counted(lesson) for lesson in lessons()]
    (NOTEBOOKS / "lessons.json").write_text(table(course))
    MAP.write_text(page(course))
    for lesson in course:
        path = NOTEBOOKS / f"{lesson['lesson']}.ipynb"
        if path.exists():
            notebook = nbformat.read(path, 4)
            made(notebook, course, lesson)
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
