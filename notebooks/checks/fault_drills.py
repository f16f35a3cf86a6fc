"""Checks of lesson 17."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from checks import NotYet, require, returned, right, shown, trying
from rpcbench.base.errors import ConnectionLostError

MOST = 20


class Enough(BaseException):
    """The answer makes its call again and again; no `except Exception` holds this up."""


class Line:
    """A call that ends as the list says, one after the other: an error is raised, all else is its value."""

    def __init__(self, *ends: Any) -> None:
        self._ends = ends
        self.made = 0

    def __call__(self) -> Any:
        self.made += 1
        if self.made > MOST:
            raise Enough
        end = self._ends[min(self.made, len(self._ends)) - 1]
        if isinstance(end, Exception):
            raise end
        return end


def insist(answer: Callable[[Callable[[], Any]], Any]) -> None:
    """`answer(call)` makes a call again that was lost and has certainly not run."""
    value = returned(_tried(answer, Line(7)))
    require(value == 7, f"A call that went well returned 7, and the function {shown(value)}.")
    lost, perhaps = ConnectionLostError("lost", False), ConnectionLostError("lost", True)
    for times in (1, 3):
        line = Line(*[lost] * times, 7)
        value = _tried(answer, line)
        again = "once" if times == 1 else "three times"
        require(value == 7, f"A call was lost {again} before it ran, and would have gone well then. It was given up.")
    line = Line(perhaps, 7)
    _tried(answer, line)
    require(line.made == 1, "The answer was lost, so the call may have run; it was made again, and may run twice.")
    require(_tried(answer, Line(perhaps)) is perhaps, "A call may have run, and nobody is told that it was lost.")
    wrong = ValueError("of the function")
    line = Line(wrong, 7)
    out = _tried(answer, line)
    require(out is wrong, "The function itself raised ValueError. That is no lost message: let it out.")
    right("What has not run is made again; what may have run is told of.")


def _tried(answer: Callable[[Callable[[], Any]], Any], line: Line) -> Any:
    """What it returns, or the error of the call that it lets out."""
    try:
        with trying("The function"):
            try:
                return answer(line)
            except (ConnectionLostError, ValueError) as error:
                return error
    except Enough:
        raise NotYet(f"The same call was made {MOST} times, and it would go on.") from None
