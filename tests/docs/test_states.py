"""The drawings of states in the documents are those of the tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import make_states

from rpcbench.protocol.rrefs import ACCEPTED, CONFIRMED, PENDING, User


@pytest.mark.parametrize("page", sorted({page for page, _ in make_states.DRAWINGS.values()}))
def test_each_page_draws_the_states_of_the_tables(page):
    assert make_states.with_drawings(page) == (make_states.FOLDER / page).read_text(), "run docs/make_states.py"


def test_a_drawing_has_each_transition_of_its_table():
    for machine in make_states.DRAWINGS:
        drawing, ignored = make_states.draw(machine).split("Without effect: ")
        for state, row in machine.transitions.items():
            for event, after in row.items():
                (line,) = [line for line in drawing.splitlines() if f"{state} --> {after}:" in line] or [ignored]
                assert event.replace("_", " ") in line and (line is ignored) == (state is after)


def test_a_changed_table_changes_the_drawing(monkeypatch):
    before = make_states.draw(User)
    monkeypatch.setitem(User.transitions[PENDING], ACCEPTED, PENDING)
    after = make_states.draw(User)
    assert f"{PENDING} --> {CONFIRMED}: accepted" in before and "*accepted* in pending" in after != before
