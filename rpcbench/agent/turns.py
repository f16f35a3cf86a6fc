"""A call whose caller does nothing but wait for the answer: a future is made of it only where that takes its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rpcbench.agent.sites import Site
from rpcbench.words.futures import Answer, Future, Kept, Later


class Turn:
    """`make(number)` makes that future."""

    __slots__ = ("_delivered", "_future", "_make", "_number", "keeps")

    def __init__(self, number: int, make: Callable[[int], Future[Any]], keeps: Sequence[Kept]) -> None:
        self.keeps = keeps
        self._number = number
        self._make = make
        self._future: Future[Any] | None = None
        self._delivered: tuple[Answer, Later, bool] | None = None

    # Each of these two leaves its own before it looks for the other's: whichever comes last brings them together.
    def deliver(self, answer: Answer, later: Later, lazy: bool = False) -> None:
        """See `Future.deliver`."""
        self._delivered = answer, later, lazy
        if self._future is not None:
            self._future.deliver(answer, later, lazy)

    def future(self) -> Future[Any]:
        """By the thread whose call it is."""
        if self._future is None:
            self._future = self._make(self._number)
            if self._delivered is not None:
                self._future.deliver(*self._delivered)
        return self._future

    def follows(self, future: Future[Any]) -> bool:
        """Whether this is its future."""
        return self._future is future

    @property
    def site(self) -> Site | None:
        """See `Future.site`. None where the thread whose call it is opens the answer itself."""
        return None if self._future is None else self._future.site

    def waits(self) -> bool:
        """Whether there is no answer yet."""
        return self._delivered is None

    def wait(self) -> Any:
        """What the answer says, or its error raised."""
        if self._delivered is None:
            return self.future().wait()
        try:
            return self._delivered[0]()
        except Exception as error:  # noqa: BLE001  (whatever the call raised)
            raise error.with_traceback(None)  # noqa: B904  (its cause is what the callee has said)

    def cancel(self) -> bool:
        """See `Future.cancel`."""
        return self.future().cancel()
