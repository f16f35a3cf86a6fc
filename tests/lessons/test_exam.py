"""The exam counts what is right, gives no hints, and holds no solutions."""

from __future__ import annotations

import importlib
import sys

import nbformat
import pytest
from exercises import LESSONS, stored, tagged
from worlds import cluster_fixture

sys.path.insert(0, str(LESSONS))  # the workers, which import the checks, too, have it from here
four_workers = cluster_fixture(4)  # for the question that runs on them


@pytest.fixture
def exam(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(LESSONS))
    import checks

    exam = importlib.import_module("checks.exam")
    monkeypatch.setattr(checks, "PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(checks, "_last", [])
    monkeypatch.setattr(importlib.import_module("checks.exam_parts"), "solved", set())
    return exam


def answered(name: str):
    """The right answer to a question of the exam."""
    import torch

    names = {"torch": torch, "dist": torch.distributed, "__name__": "__main__"}
    exec(next(answer.code for answer in stored("91_exam") if answer.exercise == name and answer.hint is None), names)
    return names[name]


@pytest.mark.process
def test_the_last_answer_to_each_question_counts(exam, capsys, four_workers):
    NotYet = sys.modules["checks"].NotYet  # noqa: N806
    exam.result()
    assert capsys.readouterr().out.splitlines() == [
        "0 of 15 right.", "Not yet right: questions 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15."
    ]  # fmt: skip
    for name in exam.questions:
        getattr(exam, name)(answered(name))
    capsys.readouterr()
    exam.result()
    assert capsys.readouterr().out == "15 of 15 right.\n"
    with pytest.raises(NotYet):
        exam.idle(lambda times: times)
    exam.result()
    assert capsys.readouterr().out.splitlines() == ["14 of 15 right.", "Not yet right: question 8."]


def test_there_are_neither_hints_nor_solutions(exam):
    NotYet = sys.modules["checks"].NotYet  # noqa: N806
    with pytest.raises(NotYet):
        exam.idle(lambda times: times)
    for call, word in ((exam.hint, "hints"), (exam.solution, "solutions")):
        with pytest.raises(NotYet, match=f"no {word} in an exam"):
            call()


def test_the_questions_are_counted_in_the_order_of_the_notebook(exam):
    cells = nbformat.read(LESSONS / "91_exam.ipynb", 4).cells
    assert [name for cell in cells if (name := tagged(cell, "exercise"))] == exam.questions
    titles = [line for cell in cells for line in cell.source.splitlines() if line.startswith("## Question")]
    assert [title.partition(":")[0] for title in titles] == [f"## Question {number}" for number in range(1, 16)]
