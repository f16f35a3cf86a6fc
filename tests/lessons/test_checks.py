"""What all checks of lessons share: messages that show the learner's line, hints, solutions, progress."""

from __future__ import annotations

import json
import sys
import threading

import pytest
from exercises import LESSONS


@pytest.fixture
def checks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(LESSONS))
    import checks

    monkeypatch.setattr(checks, "PROGRESS", str(tmp_path / "progress.json"))
    for kept in (checks._hints, checks._given):
        monkeypatch.setattr(checks, "_hints" if kept is checks._hints else "_given", dict(kept))
    monkeypatch.setattr(checks, "_last", [])
    monkeypatch.setitem(sys.modules, "checks.sums", type(sys)("checks.sums"))
    return checks


@pytest.fixture
def total(checks):
    def total(answer):
        with checks.trying("The function"):
            found = checks.returned(answer([1, 2]))
        checks.require(found == 3, f"1 + 2 is 3, not {found}.")
        checks.right("That is the sum.")

    total.__module__ = "checks.sums"
    return checks.exercise("Look at the plus sign.", "Begin with `total = 0`.")(total)


def answer_of(source: str):
    """A function as a cell makes it."""
    import linecache

    name = f"<cell {len(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    return names["answer"]


def test_an_error_shows_the_line_of_the_answer_that_raised_it(checks, total):
    divides = "def half(x):\n    return x / 0\n\n\ndef answer(numbers):\n    return half(numbers[0])\n"
    told = r"^The function raised ZeroDivisionError: .*, in your line `return x / 0`\.$"
    with pytest.raises(checks.NotYet, match=told):
        total(answer_of(divides))
    deep = "import json\ndef answer(numbers):\n    return json.loads(numbers)\n"
    with pytest.raises(checks.NotYet, match=r"in your line `return json.loads\(numbers\)`"):
        total(answer_of(deep))


def test_hints_come_one_by_one_then_the_last_again(checks, total, capsys):
    with pytest.raises(checks.NotYet, match="No exercise was checked yet"):
        checks.hint()
    with pytest.raises(checks.NotYet, match="not 4"):
        total(lambda numbers: 4)
    for _ in range(3):
        checks.hint()
    assert capsys.readouterr().out.splitlines() == [
        "Hint 1 of 2: Look at the plus sign.", *["Hint 2 of 2: Begin with `total = 0`."] * 2
    ]  # fmt: skip
    with pytest.raises(checks.NotYet, match=r"no exercise 'sum' here; there are: .*total"):
        checks.hint("sum")


def test_a_solution_is_that_of_the_exercise_that_was_checked_last(checks, total, tmp_path, monkeypatch, capsys):
    (tmp_path / "solutions").mkdir()
    stored = "# %% other\npass\n\n\n# %% total\ndef answer(x):\n    return sum(x)\n"
    (tmp_path / "solutions" / "sums.py").write_text(stored)
    monkeypatch.setattr(checks, "HERE", tmp_path)
    with pytest.raises(checks.NotYet):
        total(lambda numbers: None)
    checks.solution()
    assert capsys.readouterr().out == "def answer(x):\n    return sum(x)\n"


def test_a_solved_exercise_is_kept_for_the_start_page(checks, total, tmp_path):
    kept = tmp_path / "progress.json"
    with pytest.raises(checks.NotYet):
        total(lambda numbers: 4)
    assert not kept.exists()
    for _ in range(2):
        total(sum)
    assert json.loads(kept.read_text()) == {"sums": ["total"]}


def test_the_error_of_the_lowest_rank_is_raised_though_another_comes_first(checks):
    from checks.ranks import Ranks

    ranks, first = Ranks(3), threading.Event()

    def part(rank):
        if rank == 0:
            assert first.wait(30)
            checks.require(False, "rank 0 fails")
        elif rank == 1:
            first.set()
            checks.require(False, "rank 1 fails")
        ranks.receive(rank, 1)  # which never comes: the run ends all the same

    with pytest.raises(checks.NotYet, match=r"^rank 0 fails$"):
        ranks.run(part)
