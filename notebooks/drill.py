"""A drill with held messages, written down while it runs and drawn as a sequence chart, for lesson 17.

`Story(stepper)` does what a stepper does, message by message; as the last value of a cell it is the chart. Time goes
down. An arrow begins where its message was sent and ends where it arrived; a lost one ends in a cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draw import TOP, Drawing

from rpcbench import RpcError
from rpcbench.base.charts import LETTER, Picture
from rpcbench.testing import Stepper

QUIET = 0.3  # seconds without a message after which `play` lets time pass
STEP, LEFT, ROW = 240.0, 110.0, 26.0  # between members; left of the first; the height of a row


@dataclass(eq=False)
class Arrow:
    """A message: the rows of the chart where it was sent and where it ended."""

    sender: str
    to: str
    words: str
    sent: int
    end: int | None = None
    lost: bool = False

    def __str__(self) -> str:
        fate = ", still on its way" if self.end is None else ", lost" if self.lost else ""
        return f"{self.sender} → {self.to}: {self.words}{fate}"


@dataclass(frozen=True)
class Note:
    """What a member does at one row of the chart."""

    member: str
    words: str
    sent: int

    def __str__(self) -> str:
        return f"{self.member}: {self.words}"


class Story:
    """Delivers, delays and loses the messages that a stepper holds, and writes them down.

    Args:
        stepper: What `%%step` returns.
        members: The lines of the chart, from left to right.
        title: Above the chart.
    """

    def __init__(self, stepper: Stepper, members: Sequence[str], title: str = "") -> None:
        self.stepper, self.members, self.title = stepper, members, title
        self._row = 0
        self._items: list[Arrow | Note] = []
        self._arrows: dict[int, Arrow] = {}

    def wait(self, kind: str) -> Any:
        """Deliver what comes first, until a message of this kind is the next one. Returns that message."""
        while (message := self._next()).kind != kind:
            self.deliver(message.n)
        return message

    def deliver(self, n: int | None = None) -> Any:
        """Deliver the next message, or number `n`. Returns it; None if no message is held."""
        return self._do(self.stepper.deliver, n, lost=False)

    def lose(self, n: int | None = None) -> Any:
        """Lose the next message, or number `n`."""
        return self._do(self.stepper.drop, n, lost=True)

    def all_but(self, message: Any, count: int) -> None:
        """Deliver other messages than this one, until `count` messages have arrived since the beginning."""
        while self.stepper.delivered < count:
            held = self.stepper.wait(2)
            self.deliver(next(other.n for other in held if other.n != message.n))

    def play(self, future: Any, seconds: float = 0.5) -> None:
        """Deliver messages, and let time pass while there are none, until a future or the stepper's cell is done; then
        hold none any more."""
        while not (future.done() if callable(future.done) else future.done):
            try:
                self.stepper.wait(timeout=QUIET)
            except RpcError:  # no message has come
                self.stepper.pass_time(seconds)
            self.deliver()
        while self.deliver() is not None:
            pass
        self.stepper.go()

    def note(self, member: str, words: str) -> None:
        """Write something down beside the line of a member."""
        self._look()
        self._row += 1
        self._items.append(Note(member, words, self._row))

    def _next(self) -> Any:
        held = self.stepper.wait()
        self._look()
        return held[0]

    def _do(self, deed: Any, n: int | None, lost: bool) -> Any:
        self._look()
        message = deed(n)
        if message is not None:
            arrow = self._see(message)  # what it causes is written down later
            if arrow.sent != self._row:  # else nothing has happened since: the arrow is level
                self._row += 1
            arrow.end, arrow.lost = self._row, lost
        return message

    def _look(self) -> None:
        """Write down what was sent since the last time."""
        for message in self.stepper.held:
            self._see(message)

    def _see(self, message: Any) -> Arrow:
        """Write down that a message was sent, unless it is written down already."""
        if message.n not in self._arrows:
            self._row += 1
            words = f"{message.kind} {message.label}".rstrip()
            self._arrows[message.n] = arrow = Arrow(message.sender, message.to, words, self._row)
            self._items.append(arrow)
        return self._arrows[message.n]

    def drawing(self) -> Drawing:
        """The chart."""
        words = "\n".join(map(str, self._items))
        x = {name: LEFT + STEP * place for place, name in enumerate(self.members)}
        picture = Picture(2 * LEFT + STEP * (len(self.members) - 1), self.title, words)
        picture.draw_text(12, 20, self.title, "strong")
        top = TOP + 14
        for name in self.members:
            picture.draw_text(x[name], top, name, "strong middle")
            picture.draw_line(x[name], top + 8, x[name], top + 20 + ROW * self._row, "rule dashed")
        for item in self._items:
            y = top + 6 + ROW * item.sent
            if isinstance(item, Note):
                wide = LETTER * len(item.words) + 14
                picture.draw_rect(x[item.member] - wide / 2, y - 11, wide, 20, "plate")
                picture.draw_text(x[item.member], y + 3, item.words, "middle note")
            else:
                end = None if item.end is None else top + 6 + ROW * item.end
                _arrow(picture, item, x[item.sender], y, x[item.to], end)
        return Drawing(picture.svg(), words)

    def _repr_html_(self) -> str:
        return self.drawing()._repr_html_()

    def __repr__(self) -> str:
        return self.drawing().words


def _arrow(picture: Picture, arrow: Arrow, x1: float, y1: float, x2: float, y2: float | None) -> None:
    way = 1 if x2 > x1 else -1
    if y2 is not None and not arrow.lost:
        picture.draw_arrow(x1, y1, x2 - way, y2, "blue")
    else:  # half of the way
        x2, colour = (x1 + x2) / 2, "red" if arrow.lost else "amber"
        picture.draw_line(x1, y1, x2, y1, f"line dashed s-{colour}")
        if arrow.lost:
            picture.draw_line(x2 - 5, y1 - 5, x2 + 5, y1 + 5, f"line s-{colour}")
            picture.draw_line(x2 - 5, y1 + 5, x2 + 5, y1 - 5, f"line s-{colour}")
    picture.draw_text(x1 + 8 * way, y1 - 4, arrow.words, "note" if way > 0 else "note end")
