"""Backpressure: whether the browsers keep up with the pictures of one panel, or have a queue of them before them.

A page under load draws a queue of messages in order, so each picture that is sent makes it later. Guarantees
- A picture that takes long to draw is followed by a rest of `REST` times as long, at most `MOST_REST_SECONDS`.
- A message that a browser handles late is followed by a rest of as long as it was late, at most
  `MOST_LATE_REST_SECONDS`: so the queue becomes shorter, of beats as well.
- Browsers report the version that they have, once a second at most. While none has reported a version that was sent
  `MOST_SECONDS` ago, the panel is behind: it sends nothing, and then one message with all changes since.
- A front end without subshells is never behind: its reports wait for the end of the running cell and come on the main
  thread, so its silence says nothing.
- A browser that opens the panel ends the wait. One that is gone leaves the panel behind, which then costs nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque

MOST_SECONDS = 3.0
"""Age of the oldest picture without a report, from which on the browsers are behind."""

REST = 20  # so several panels together leave most of the page's thread to the notebook
MOST_REST_SECONDS = 1.0
MOST_LATE_REST_SECONDS = 2.5  # less than the silence after which a browser asks for the whole state


class Backpressure:
    """The pictures of one panel that no browser has reported yet."""

    def __init__(self, most_seconds: float = MOST_SECONDS) -> None:
        self._most_seconds = most_seconds
        self._sent: deque[tuple[int, float]] = deque()  # version, time; oldest first
        self._reports_arrive = False  # also while a cell runs
        self.rest_seconds = 0.0

    def picture_sent(self, version: int) -> None:
        """Note that a picture of this version has been sent."""
        if self._reports_arrive:
            self._sent.append((version, time.monotonic()))

    def picture_reported(self, version: int, draw_seconds: float, late_seconds: float = 0.0) -> None:
        """Note that a browser has this version, on the thread that its message came on.

        Args:
            version: Of the picture.
            draw_seconds: How long the browser took to draw it.
            late_seconds: How long its message was under way.
        """
        self.rest_seconds = max(min(MOST_REST_SECONDS, REST * draw_seconds), min(MOST_LATE_REST_SECONDS, late_seconds))
        self._reports_arrive = threading.current_thread() is not threading.main_thread()
        while self._sent and (self._sent[0][0] <= version or not self._reports_arrive):
            self._sent.popleft()

    def forget_sent(self) -> None:
        """Forget what was sent: a browser that opens the panel has none of it."""
        self._sent.clear()

    @property
    def is_behind(self) -> bool:
        """Whether the browsers have a queue of pictures before them."""
        try:
            _, sent_at = self._sent[0]
        except IndexError:  # none, or reported just now on another thread
            return False
        return time.monotonic() - sent_at > self._most_seconds
