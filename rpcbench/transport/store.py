"""Where the two ends of a connection put large buffers.

What is received goes into memory of this process, which is used again. Two processes that can share memory do better:
each lends the other one an arena. Who sends writes a buffer once into a piece of his own and says where; the piece is
the receiver's, to read and to write, until nothing there refers to it and that has been told.

Guarantees
- Nobody waits for room: what finds none goes through the socket, or into memory that is not used again.
- What a peer says about places is checked: nonsense is a ProtocolError.
- A tensor keeps its memory, also when the connection or the peer is gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from rpcbench.base.errors import ProtocolError
from rpcbench.transport import lane
from rpcbench.transport.arena import Arena, Loans
from rpcbench.transport.bells import Bell, Ear
from rpcbench.transport.lane import Giver, Taker
from rpcbench.transport.reused import Reused
from rpcbench.wire.framing import Memory

SHARED = 16 << 10
"""Messages with less than this many bytes in buffers go through the socket."""


class Store(Memory):
    """For one connection, from any thread. `ours` is lent to the peer and `theirs` by it, where they share memory; they
    may then have lanes, too: with the `ear` that the peer wakes us at, and its `bell`."""

    def __init__(
        self, ours: Arena | None = None, theirs: Loans | None = None, ear: Ear | None = None, bell: Bell | None = None
    ) -> None:
        self._ours = ours
        self._theirs = theirs
        self.ear, self._bell = ear, bell
        self._lanes: dict[int, Giver] = {}
        self.owes_nothing: Callable[[], bool] = theirs.none_over if theirs is not None else lambda: True
        self._reused = Reused()

    # -- sending
    def put(self, buffers: Sequence[memoryview]) -> list[int] | None:
        """Copy buffers, of bytes, to where the peer finds them: the places. None where they have to go another way."""
        ours = self._ours
        if ours is None or sum(buffer.nbytes for buffer in buffers) < SHARED:
            return None
        places: list[int] = []
        for buffer in buffers:
            place = ours.take(buffer.nbytes)
            if place is None:
                for taken in places:
                    ours.give_back(taken)
                return None
            places.append(place)
        for place, buffer in zip(places, buffers, strict=True):
            here = np.ndarray(buffer.nbytes, np.uint8, ours.memory, place)
            np.copyto(here, np.ndarray(buffer.nbytes, np.uint8, buffer))  # lets other threads run
            self.lent += buffer.nbytes
        return places

    def returned(self, place: int) -> None:
        """The peer needs a buffer no more, or a lane."""
        if self._ours is None:
            return super().returned(place)
        if (given := self._lanes.pop(place, None)) is not None:
            given.end()
        try:
            self._ours.give_back(place)
        except KeyError:
            raise ProtocolError(f"the peer gives back memory at {place}, which it does not have") from None

    # -- receiving
    def room(self, size: int) -> memoryview | bytearray:
        """A buffer for what comes through the socket."""
        return self._reused.room(size)

    def borrow(self, place: int, size: int) -> memoryview:
        """A buffer that the peer has put there."""
        if self._theirs is None:
            return super().borrow(place, size)
        try:
            found = self._theirs.lend(place, size)
            self.borrowed += size
            return found
        except ValueError as error:
            raise ProtocolError(f"the peer lends memory that is not its own: {error}") from error

    def owed(self) -> list[int]:
        """Places of buffers of the peer's that are needed no more: to be told to it."""
        return self._theirs.over() if self._theirs is not None else []

    # -- lanes
    def open_lane(self, name: int) -> tuple[int, Giver] | None:
        """A new lane to the peer, and its place, by which the peer finds it there. None where they cannot have one.

        It is over as soon as the peer needs it no more, or the connection ends.
        """
        ours, bell = self._ours, self._bell
        if ours is None or bell is None or (place := ours.take(lane.SIZE)) is None:
            return None
        made = Giver(memoryview(ours.memory)[place : place + lane.SIZE], name, bell, self)
        self._lanes[place] = made
        if self._ours is None:  # by now
            made.end()
        return place, made

    def lane_from(self, place: int, name: int) -> Taker | None:
        """The lane that the peer has opened; None where that was on another connection."""
        theirs = self._theirs
        if theirs is None or self.ear is None or not lane.is_there(theirs.memory, place, name):
            return None
        with contextlib.suppress(ValueError):  # it was told of twice
            return Taker(theirs.lend(place, lane.SIZE), self.ear, self)
        return None

    # -- both
    def tidy(self) -> None:
        """Give back to the system what has not been needed for some time."""
        self._reused.tidy()
        if self._ours is not None:
            self._ours.tidy()

    def end(self) -> None:
        """The connection has ended: only buffers that are in use here keep their memory."""
        theirs, self._ours, self._theirs = self._theirs, None, None
        for given in list(self._lanes.values()):
            given.end()
        if theirs is not None:
            theirs.forget_rest()

    def forked(self) -> None:
        """In a forked child: nobody else is here to have taken a lock."""
        for one in (self._bell, self.ear):
            if one is not None:
                one.forked()

    def close(self) -> None:
        """Give descriptors back, once nobody reads here."""
        if self.ear is not None:
            self.ear.close()
        if self._bell is not None:
            self._bell.close()
