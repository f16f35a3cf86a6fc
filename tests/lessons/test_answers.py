"""Each exercise of each lesson has a solution, two hints and six wrong answers; `exercises.py` tries the answers."""

from __future__ import annotations

import importlib
import sys

import exercises
import nbformat
import pytest
from exercises import ANSWERS, LESSONS, MODULE, changed, solutions, stored, tagged

WITH_CHECKS = sorted(path for path in LESSONS.glob("*.ipynb") if MODULE.search(path.read_text()))
WRONG = 6
EXAM = "91_exam"


@pytest.fixture(autouse=True)
def lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LESSONS))


def test_only_lessons_have_answers() -> None:
    assert {path.stem for path in ANSWERS.glob("*.py")} == {path.stem for path in WITH_CHECKS}


@pytest.mark.parametrize("path", WITH_CHECKS, ids=lambda path: path.stem)
def test_every_exercise_has_a_solution_hints_and_wrong_answers(path) -> None:
    cells = nbformat.read(path, 4).cells
    exercises, checks = ([name for cell in cells if (name := tagged(cell, k))] for k in ("exercise", "check"))
    assert checks == exercises
    answers = stored(path.stem)
    right = {answer.exercise for answer in answers if answer.hint is None}
    assert {answer.exercise for answer in answers} == set(exercises) == right
    is_exam = path.stem == EXAM
    assert set(solutions(path.stem)) == (set() if is_exam else set(exercises))
    module = MODULE.search(path.read_text())[1]
    importlib.import_module(f"checks.{module}")
    hints = sys.modules["checks"]._hints
    for name in exercises:
        wrong = [answer for answer in answers if answer.exercise == name and answer.hint is not None]
        assert len(wrong) >= WRONG, f"{path.stem}, {name}: {WRONG} wrong answers"
        assert is_exam or all(len(hint) > 20 for hint in hints[module, name]), f"{path.stem}, {name}: two hints"
        body = [] if is_exam else [line.strip() for line in solutions(path.stem)[name].splitlines()[1:] if line.strip()]
        told = any(body) and all(line.rpartition("return ")[2] in " ".join(hints[module, name]) for line in body)
        assert not told, f"{path.stem}, {name}: the hints are the solution"


def test_changes_make_an_answer_of_the_solution() -> None:
    solution = "def total(x):\n    found = 0\n\n    for one in x:\n        found += one\n    return found"
    changes = "# += one => -= one\n# -     found = 0\n# -\n# +     found = 1\n# return found => return -found"
    changes += "\n# -     for one in x:\n# +     for one in x[1:]:"
    expected = "def total(x):\n    found = 1\n    for one in x[1:]:\n        found -= one\n    return -found"
    assert changed(solution, changes, "here") == expected


def test_an_answer_begins_with_the_solution_or_with_the_whole_program_above(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(exercises, "ANSWERS", tmp_path)
    monkeypatch.setattr(exercises, "solutions", lambda lesson: {"one": "a = 1", "two": "def b():\n    return 2"})
    text = "# %% one: wrong, c | no\nc = 1\n# %% two: wrong, d | no\n# => d = 2\n# => return d\n"
    text += "# %%% one: wrong, 3 | no\n# 1 => 3\n# %% one: wrong, 4 | no\n# 1 => 4\n# %%% two: right, 5\n# 2 => 5\n"
    (tmp_path / "sums.py").write_text(text)
    codes = [answer.code for answer in exercises.stored("sums") if answer.what != "solution"]
    two = "def b():\n    d = {}\n    return d".format
    assert codes == ["c = 1", two(2), "c = 3", "a = 4", two(5)]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ("# found => lost", "'found' is 2 times in the program"),
        ("# - found = 0", "'found = 0' is 0 times"),  # without its indentation
        ("# one => two", "'one' is 0 times"),
        ("# found = 0\n# 0 => 1", "write `# old => new`, .* not '# found = 0'"),
    ],
)
def test_a_change_that_is_not_clear_is_refused(changes: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^sums.py: {error}"):
        changed("def total(x):\n    found = 0\n    return found", changes, "sums.py")
