"""Programs that take turns, for lesson 37: each runs on a thread of its own, but only one at a time.

A program runs until it waits. Then the one with the lowest number goes on, of those that need not wait. So all runs of
the same programs are alike, and when no program can go on, that is known at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

Ready = Callable[[], bool]


class Stopped(BaseException):
    """Ends a program because another one has failed. It is no Exception, so that no program catches it by mistake."""


class Turns:
    """One run of some programs, which are known by their numbers."""

    def __init__(self, explain: Callable[[int], Exception]) -> None:
        """`explain(number)` makes the error of a program that waits when no program can go on."""
        self._explain = explain
        self._waits: dict[int, Ready] = {}  # those that are not running, and have not ended
        self._turn: int | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Run all to their ends. Raises the first error."""
        self._waits = {number: lambda: True for number in range(len(programs))}
        threads = [
            threading.Thread(target=self._one, args=(number, program), daemon=True)
            for number, program in enumerate(programs)
        ]
        self._turn = 0
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt as error:
            self._fail(error)
            raise
        if self._error is not None:
            raise self._error

    def wait(self, number: int, ready: Ready) -> None:
        """Let others go on until `ready()`. It is called by program `number`, in its turn."""
        with self._changed:
            self._waits[number] = ready
            self._pass_on()
            self._await_turn(number)

    def _one(self, number: int, program: Callable[[], None]) -> None:
        try:
            with self._changed:
                self._await_turn(number)
            program()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (`run` raises it)
            self._fail(error)
        finally:
            with self._changed:
                self._pass_on()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _await_turn(self, number: int) -> None:
        while self._turn != number and self._error is None:
            self._changed.wait()
        if self._error is not None:
            raise Stopped
        del self._waits[number]

    def _pass_on(self) -> None:
        """Give the turn to the first program that need not wait; if there is none, and some wait, that is an error."""
        if self._error is None:
            self._turn = next((number for number in sorted(self._waits) if self._waits[number]()), None)
            if self._turn is None and self._waits:
                self._error = self._explain(min(self._waits))
        self._changed.notify_all()
