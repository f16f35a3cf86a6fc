"""What the end of a connection means: a pair that finds together again, or a peer that is gone.

- A connection that its peer ends on purpose, or that brings nonsense, was the last to that process.
- One that breaks says nothing of its peer: both sides dial again. Where nobody listens any more the process has
  ended; else the pair has `grace` seconds to find together, and senders wait so long.
- The machine hears of every break, after the last message has gone into that connection and before another one takes
  its place; then, that this one stands. Only where the process turns out to have ended, it hears just that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rpcbench.agent.ties import Tie, Ties
from rpcbench.base.errors import NotConnectedError, ProtocolError, RefusedError
from rpcbench.transport.handshake import Identity
from rpcbench.transport.stream import Ending

_PAUSE = 0.05
_ATTEMPT_SECONDS = 2.0
_TOGETHER = 0.25
"""Seconds in which all connections to a process end that has ended itself."""
Dial = Callable[[int, Sequence[str], float], None]
"""(member, addresses, seconds): have a connection stand. NotConnectedError, caused by an OSError; ProtocolError."""


class Told(Protocol):
    """Who hears what becomes of peers, on threads that may not wait for a write."""

    def ended(self, peer: Identity, reason: str) -> None:
        """A peer is gone for good."""

    def broken(self, peer: Identity, reason: str) -> None:
        """What was on its way to a peer may be lost; another connection is about to stand."""

    def resumed(self, peer: Identity) -> None:
        """It does."""

    def ways(self, peer: Identity) -> Sequence[str]:
        """Addresses by which to dial a peer again; none where it is no business of ours."""


class Reunion:
    def __init__(self, ties: Ties, told: Told, dial: Dial, grace: float) -> None:
        self._ties = ties
        self._told = told
        self._dial = dial
        self._grace = grace

    # -- a connection that comes
    def make_way(self, peer: Identity) -> None:
        """A connection to a peer is about to stand: what was before is over."""
        over, former = self._ties.make_way(peer)
        for bond in former:
            self._told.ended(bond.peer, f"{bond.unsaid or 'its connection broke'}, and it was started again")
        for tie in over:
            tie.connection.cut()
            self._ties.broke(tie, "it has lost its connection")
        self._say(peer)

    def stands(self, peer: Identity) -> None:
        """It does."""
        if self._ties.together(peer):
            self._told.resumed(peer)

    def _say(self, peer: Identity) -> None:
        reason = self._ties.unsaid(peer)
        if reason is not None:
            self._told.broken(peer, reason)
            self._ties.said(peer)  # not before: it must not hear first that they are together again

    def _together(self, peer: Identity) -> None:
        """If a connection stands, the machine is to hear of all breaks, and of that."""
        if self._ties.stand(peer):
            self._say(peer)
            self.stands(peer)

    # -- one that goes
    def over(self, tie: Tie, ending: Ending) -> None:
        """A connection has ended. Returns when it is clear what that means."""
        others = self._ties.fell(tie, ending.reason if ending.broken else None)
        if others is None:
            return
        if not others:
            self._last(tie, ending)
        elif ending.broken and not self._ties.others_end(tie.peer, _TOGETHER):
            self._together(tie.peer)

    def _last(self, tie: Tie, ending: Ending) -> None:
        ways = self._told.ways(tie.peer) if ending.broken else ()
        verdict = self._search(tie, ending.reason, ways) if ways else ending.reason
        if verdict is None or not self._ties.lose(tie, verdict):
            self._together(tie.peer)
            return
        self._told.ended(tie.peer, verdict)
        self._ties.drop(tie.peer.id, tie.peer.incarnation, verdict)

    def _search(self, fallen: Tie, reason: str, ways: Sequence[str]) -> str | None:
        """Dial until there is a connection, dialled here or there; or why there will be none."""
        deadline, pause = time.monotonic() + self._grace, 0.0
        while self._ties.searching(fallen, pause):
            left, pause = deadline - time.monotonic(), _PAUSE
            if left <= 0:
                return f"{reason}, and it could not be reached again in {self._grace:g} s"
            try:
                self._dial(fallen.peer.id, ways, min(left, _ATTEMPT_SECONDS))
            except RefusedError as error:
                return str(error)
            except NotConnectedError as error:
                if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
                    return reason  # its process has ended
                if not isinstance(error.__cause__, ConnectionError):
                    self._say(fallen.peer)  # out of reach, and perhaps for a while
            except ProtocolError:
                pass  # it hung up, as a process does that is just ending: nobody will listen the next time
        return None
