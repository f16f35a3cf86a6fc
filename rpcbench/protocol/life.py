"""Which peers on other hosts are alive, judged by what is heard of them.

Any bytes are life. A peer that says nothing is suspect after a while, and lost after a little more; but as long as its
host acknowledges what it is sent, its process is there, if stopped or too busy to answer, and gets more time. Who was
stopped himself must not blame the others: a tick that comes late makes all peers fresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

SILENT = "nothing was heard of it"
_LATE = 1.0
"""Seconds by which a tick may be late before this process counts as stopped meanwhile."""


class Sound(NamedTuple):
    """Of one peer: bytes it has sent so far, and seconds since its host acknowledged anything (None: not known)."""

    heard: int
    acknowledged: float | None


class Verdict(NamedTuple):
    """What has changed about a peer: "suspect", "recovered" or "lost"."""

    peer: int
    kind: str
    reason: str


class _Peer:
    def __init__(self, heard: int, now: float) -> None:
        self.heard = heard
        self.since = now
        self.suspect = False


class Life:
    """Seconds of silence until a peer is suspect, until it is lost, and until it is lost though its host answers."""

    def __init__(self, suspect: float, lost: float, stuck: float) -> None:
        self._suspect, self._lost, self._stuck = suspect, lost, stuck
        self.period = min(suspect, lost) / 6
        self._next: float | None = None
        self._peers: dict[int, _Peer] = {}

    def tick(self, now: float, sounds: Mapping[int, Sound]) -> list[Verdict]:
        """A period has passed; `sounds` are those of all peers there are."""
        if self._next is not None and now > self._next + _LATE:
            for peer in self._peers.values():
                peer.since = now
        self._next = now + self.period
        self._peers = {id_: self._peers.get(id_) or _Peer(-1, now) for id_ in sounds}
        verdicts = [self._judge(id_, self._peers[id_], sound, now) for id_, sound in sounds.items()]
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, id_: int, peer: _Peer, sound: Sound, now: float) -> Verdict | None:
        if sound.heard != peer.heard:
            peer.heard, peer.since = sound.heard, now
            recovered, peer.suspect = peer.suspect, False
            return Verdict(id_, "recovered", "it is heard again") if recovered else None
        silent = now - peer.since
        answers = sound.acknowledged is not None and sound.acknowledged < self._lost
        if silent >= (self._stuck if answers else self._lost):
            return Verdict(id_, "lost", f"{SILENT} for {silent:.1f} s")
        if silent >= self._suspect and not peer.suspect:
            peer.suspect = True
            return Verdict(id_, "suspect", f"{SILENT} for {silent:.1f} s")
        return None
