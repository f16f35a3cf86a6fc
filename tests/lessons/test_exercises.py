"""Every exercise of every lesson, in the lesson's own kernel: its check refuses the empty answer and plausible wrong
ones, each with its own hint, and takes the right one.

In a notebook the cell tagged `exercise:NAME` waits for an answer, and the one tagged `check:NAME` tries it. Answers
lie in `answers/`, one file for each lesson; the title of a wrong one says what is wrong, and, after the bar, a part of
the hint that a learner should get.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

LESSONS = Path(__file__).parents[2] / "notebooks"
ANSWERS = Path(__file__).parent / "answers"
TITLE = re.compile(r"^# %% (?P<exercise>\w+): (?P<kind>right|wrong)(?P<what>[^|\n]*)(\| (?P<hint>.+))?$", re.MULTILINE)
EMPTY_HINT = "Replace the three dots"


@dataclass(frozen=True)
class Answer:
    exercise: str
    what: str
    code: str
    hint: str | None  # None: it is right


def stored(lesson):
    """The answers to a lesson's exercises."""
    text = (ANSWERS / f"{lesson}.py").read_text()
    titles = [*TITLE.finditer(text)]
    ends = [title.start() for title in titles[1:]] + [len(text)]
    return [
        Answer(title["exercise"], title["kind"] + title["what"], text[title.end() : end].strip(), title["hint"])
        for title, end in zip(titles, ends, strict=True)
    ]


def tagged(cell, kind):
    """NAME of a cell tagged `kind:NAME`."""
    names = [tag.partition(":")[2] for tag in cell.metadata.get("tags", ()) if tag.startswith(f"{kind}:")]
    return names[0] if names else None


def tried(lesson, answers):
    """Run the lesson once, each exercise with every answer, the right one last: {answer: (error, what is shown)}."""
    notebook = nbformat.read(LESSONS / f"{lesson}.ipynb", 4)
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(LESSONS)}})
    seen = {}
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            if tagged(cell, "exercise"):
                blank = index
            client.execute_cell(cell, index)
            if (name := tagged(cell, "check")) is None:
                continue
            seen[Answer(name, "empty", "", EMPTY_HINT)] = outcome(cell)
            for answer in sorted((a for a in answers if a.exercise == name), key=lambda a: a.hint is None):
                notebook.cells[blank].source = answer.code
                client.execute_cell(notebook.cells[blank], blank)
                client.execute_cell(cell, index)
                seen[answer] = outcome(cell)
    return seen


def outcome(cell):
    text = "".join(output.get("text", "") + "\n".join(output.get("traceback", ())) for output in cell.outputs)
    return next((output.ename for output in cell.outputs if output.output_type == "error"), ""), text


LESSON_NAMES = sorted(path.stem for path in ANSWERS.glob("*.py"))


def test_every_exercise_has_its_answers():
    for path in sorted(LESSONS.glob("*.ipynb")):
        cells = nbformat.read(path, 4).cells
        exercises, checks = ([name for cell in cells if (name := tagged(cell, k))] for k in ("exercise", "check"))
        assert checks == exercises
        answers = stored(path.stem) if exercises else []
        assert {answer.exercise for answer in answers} == set(exercises)
        for name in exercises:
            hints = [answer.hint for answer in answers if answer.exercise == name]
            assert hints.count(None) == 1, f"{path.stem}, {name}: one right answer"
            assert len(hints) >= 4, f"{path.stem}, {name}: three wrong answers"


@pytest.mark.parametrize("lesson", LESSON_NAMES)
def test_checks_refuse_wrong_answers_and_take_the_right_one(lesson):
    answers = stored(lesson)
    seen = tried(lesson, answers)
    assert [answer for answer in answers if answer not in seen] == []
    for answer, (error, text) in seen.items():
        where = f"{lesson}, {answer.exercise}, {answer.what}: {text}"
        if answer.hint is None:
            assert (error, text[:6]) == ("", "Right."), where
        else:
            assert error == "NotYet", where
            assert answer.hint in text, where
            assert "Traceback" not in text, where
