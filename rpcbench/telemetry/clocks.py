"""How a member's clock differs from ours, from questions that it answered.

Members on one host share a clock. For others the way there and the way back are not known, only both together: half of
what they took is how wrong the estimate may be. Of several the quickest is the best.
"""

from __future__ import annotations

from typing import NamedTuple


class Clock(NamedTuple):
    """Seconds that a member's clock is ahead of ours, and by how much that may be wrong."""

    ahead: float
    error: float


SHARED = Clock(0.0, 0.0)


def estimate(asked: float, heard: float, said: float, told: float) -> Clock:
    """We asked and were told by our clock; it heard that and said its answer by its own."""
    way = max(0.0, (told - asked) - (said - heard))
    return Clock(((heard - asked) + (said - told)) / 2, way / 2)


def better(old: Clock | None, new: Clock) -> Clock:
    """The one that is less wrong."""
    return new if old is None or new.error <= old.error else old
