"""Each exercise of each lesson has a right answer and three wrong ones; `exercises.py` tries them."""

from __future__ import annotations

import nbformat
from exercises import ANSWERS, LESSONS, stored, tagged


def test_every_exercise_has_one_right_and_three_wrong_answers() -> None:
    assert {path.stem for path in ANSWERS.glob("*.py")} <= {path.stem for path in LESSONS.glob("*.ipynb")}
    for path in sorted(LESSONS.glob("*.ipynb")):
        cells = nbformat.read(path, 4).cells
        exercises, checks = ([name for cell in cells if (name := tagged(cell, k))] for k in ("exercise", "check"))
        assert checks == exercises
        answers = stored(path.stem)
        assert {answer.exercise for answer in answers} == set(exercises)
        for name in exercises:
            hints = [answer.hint for answer in answers if answer.exercise == name]
            assert hints.count(None) == 1, f"{path.stem}, {name}: one right answer"
            assert len(hints) >= 4, f"{path.stem}, {name}: three wrong answers"
