"""The table of connections of one agent. Several may stand to one peer; one of them carries what is sent."""

from __future__ import annotations

import threading
from typing import NamedTuple

from rpcbench.transport.handshake import Identity
from rpcbench.transport.stream import StreamConnection


class Tie(NamedTuple):
    """A connection, the peer at its other end, and the id of the member that dialled."""

    peer: Identity
    dialler: int
    connection: StreamConnection


class Ties:
    def __init__(self) -> None:
        self._lock = threading.Lock()  # a plain one, as Ctrl-C can leave a Condition locked for ever
        self._fewer = threading.Condition(self._lock)
        self._ties: dict[int, list[Tie]] = {}
        self._closed = False

    def find(self, to: int) -> StreamConnection | None:
        """What carries messages to a member: of its last incarnation, the one that the lower id dialled."""
        with self._lock:
            ties = [tie for tie in self._ties.get(to, ()) if not tie.connection.ended]
            if len(ties) > 1:
                ties.sort(key=lambda tie: (-tie.peer.incarnation, tie.dialler))
            return ties[0].connection if ties else None

    def add(self, tie: Tie) -> bool:
        """False where there are to be no more."""
        with self._lock:
            if not self._closed:
                self._ties.setdefault(tie.peer.id, []).append(tie)
            return not self._closed

    def remove(self, tie: Tie) -> bool:
        """Whether it was still in the table."""
        with self._lock:
            ties = self._ties.get(tie.peer.id, [])
            known = tie in ties
            if known:
                ties.remove(tie)
                if not ties:
                    del self._ties[tie.peer.id]
                self._fewer.notify_all()
            return known

    def of(self, peer: Identity) -> list[Tie]:
        """Those to this very process."""
        with self._lock:
            return self._of(peer)

    def _of(self, peer: Identity) -> list[Tie]:
        return [tie for tie in self._ties.get(peer.id, ()) if tie.peer.incarnation == peer.incarnation]

    def others_end(self, peer: Identity, seconds: float) -> bool:
        """Whether there are none to this process, or none any more in so many seconds."""
        with self._lock:
            return self._fewer.wait_for(lambda: not self._of(peer), seconds)

    def await_none(self, seconds: float) -> None:
        """Until all have ended that were in the table, or so many seconds."""
        with self._lock:
            self._fewer.wait_for(lambda: not self._ties, seconds)

    def take(self, member: int) -> list[Tie]:
        """Those to a member, out of the table: their ends are nobody's business any more."""
        with self._lock:
            return self._ties.pop(member, [])

    def all(self) -> list[Tie]:
        with self._lock:
            return [tie for ties in self._ties.values() for tie in ties]

    def close(self) -> list[Tie]:
        """Take no more; those there are."""
        with self._lock:
            self._closed = True
        return self.all()

    def forked(self) -> None:
        """In a forked child: the sockets belong to the parent, which would not see them close."""
        for ties in self._ties.values():
            for tie in ties:
                tie.connection.forked()
