"""What all checks of lessons share: messages that show the learner's line, hints, solutions, progress."""

from __future__ import annotations

import json
import sys
import threading
from fractions import Fraction

import numpy
import pytest
import torch
from exercises import LESSONS


@pytest.fixture
def checks(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(LESSONS))
    import checks

    monkeypatch.setattr(checks, "PROGRESS", str(tmp_path / "progress.json"))
    for kept in (checks._hints, checks._given):
        monkeypatch.setattr(checks, "_hints" if kept is checks._hints else "_given", dict(kept))
    for kept in ("_last", "_answers"):
        monkeypatch.setattr(checks, kept, [])
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


def test_hints_come_one_by_one_then_the_way_to_the_solution(checks, total, capsys):
    with pytest.raises(checks.NotYet, match="No exercise was checked yet"):
        checks.hint()
    with pytest.raises(checks.NotYet, match="not 4"):
        total(lambda numbers: 4)
    for _ in range(3):
        checks.hint()
    assert capsys.readouterr().out.splitlines() == [
        "Hint 1 of 2: Look at the plus sign.",
        "Hint 2 of 2: Begin with `total = 0`.",
        "Both hints were given; the second one: Begin with `total = 0`. `check.solution()` comes next.",
    ]
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


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def answer(numbers): ...\n", "Replace the three dots"),
        ("def answer(numbers):\n    total = sum(numbers)\n    ...\n", "Replace the three dots"),
        ("def answer(numbers):\n    return ...\n", "Replace the three dots"),
        ("def answer(numbers):\n    total = sum(numbers)\n", "It has no `return`"),
        ("def answer(numbers):\n    def add():\n        return sum(numbers)\n    add()\n", "It has no `return`"),
        ("def answer(numbers):\n    return numbers.sort()\n", "Does each way through it end with `return`"),
        ("answer = lambda numbers: None\n", "Does each way through it end with `return`"),
    ],
)
def test_an_empty_answer_is_told_from_one_without_return(checks, total, source, told):
    with pytest.raises(checks.NotYet) as error:
        total(answer_of(source))
    assert told in str(error.value)
    assert checks.dots_left() == (" Replace the three dots." if "    ...\n" in source or ": ...\n" in source else "")


def test_two_values_that_print_alike_are_told_apart(checks):
    assert checks.differ(2, 3) == "2, not 3"
    assert checks.differ([2.5, 1], [2.5, 3], "; you say ") == "[2.5, 1]; you say [2.5, 3]"
    told = "206.63333 s; you say 206.63328 (the same to 6 digits)"
    assert checks.differ(206.63333, 206.63328, " s; you say ", 6) == told
    wanted = torch.tensor([0.1, -0.8], dtype=torch.double)
    told = "0.1, -0.8, not 0.1, -0.80000001 (the same to 7 digits; yours is float32, and float64 is wanted)"
    assert checks.differ(wanted, wanted.float()) == told
    assert checks.differ(wanted, wanted.clone()).endswith("(equal as numbers)")
    assert checks.differ(1.0, float("nan")) == "1, not nan"


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        (torch.tensor([2.5]), float, 2.5),
        (numpy.float32(2.5), float, 2.5),
        (Fraction(5, 2), float, 2.5),
        (numpy.argmax([1, 3, 2]), int, 1),
        (torch.tensor(True), bool, True),
        ((1, numpy.int64(2)), [int], [1, 2]),
        (range(3), [int], [0, 1, 2]),
        ((word for word in "ab"), [str], ["a", "b"]),
        (torch.arange(3), [int], [0, 1, 2]),
        ({3}, {int}, [3]),
        ([3], {int}, [3]),
        ([["a", 1]], [(str, int)], [("a", 1)]),
        (torch.eye(2), ([float], [float]), ([1, 0], [0, 1])),
    ],
)
def test_an_answer_is_read_for_what_it_is(checks, value, kind, wanted):
    found = checks.read(value, kind, "It is wanted")
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        (2.0, int, "A whole number, not 2.0."),
        (True, float, "A whole number, not True."),
        (1, bool, "A whole number, not 1."),
        (torch.ones(2), float, r"A whole number, not tensor\(\[1., 1.\]\)."),
        ("ab", [str], "A whole number, not 'ab'."),
        ({"a": 1}, [str], "A whole number, not {'a': 1}."),
        ({1}, [int], "A whole number, not {1}."),
        ([1, 2], (int, int, int), r"A whole number, not \[1, 2\]."),
        (torch.ones(2), (torch.Tensor, torch.Tensor), "A whole number, not tensor"),
        (None, int, "It returned None here"),
        (..., int, "Replace the three dots"),
    ],
)
def test_an_answer_of_another_kind_is_refused(checks, value, kind, told):
    with pytest.raises(checks.NotYet, match=f"^{told}" if "three dots" not in told else told):
        checks.read(value, kind, "A whole number")
