"""Checks of lesson 18."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checks import require, returned, right, shown, trying

View = dict[str, dict[str, dict[str, Any]]]


def unconfirmed(answer: Callable[[View], Any]) -> None:
    """`answer(view)` is the sorted keys of the RRefs that have a pending fork."""
    require(_of(answer, []) == [], "Nobody holds any RRef in that view, so the answer is an empty list.")
    found = _of(answer, [("1.4", "confirmed"), ("1.7", "deleting")])
    require("1.4" not in found, "1.4 has one fork, and its owner has confirmed it.")
    require("1.7" not in found, "1.7 is being deleted: its owner did know of that fork.")
    found = _of(answer, [("1.4", "pending")])
    require(found == ["1.4"], f"1.4 has one fork, which is pending. The answer was {shown(found)}.")
    found = _of(answer, [("1.4", "confirmed"), ("1.4", "pending")])
    require(found == ["1.4"], f"1.4 has two forks, one of them pending. The answer was {shown(found)}.")
    found = _of(answer, [("2.1", "pending"), ("1.4", "pending"), ("2.1", "pending")])
    require(len(found) == len(set(found)), f"2.1 has two pending forks, and is in the answer twice: {shown(found)}.")
    require(found == ["1.4", "2.1"], f"1.4 and 2.1 have pending forks. The answer was {shown(found)}; is it sorted?")
    right("Those are the RRefs with a dashed arrow in the panel.")


def _of(answer: Callable[[View], Any], forks: list[tuple[str, str]]) -> list[Any]:
    rows = {
        f"0.{number}": {"fork": f"0.{number}", "rref": rref, "owner": 1, "holder": 2, "parent": 0, "state": state}
        for number, (rref, state) in enumerate(forks)
    }
    with trying("The function"):
        return list(returned(answer({"workers": {}, "rrefs": {}, "forks": rows})))
