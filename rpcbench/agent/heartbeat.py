"""The thread that says "I am here" to members on other hosts, and listens whether they are.

It does nothing else, so it goes on whatever users' functions do. In a world on one host there is none: there the end
of a process is always told, and silence means nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpcbench.agent.peers import Peers
from rpcbench.base.conditions import Flag
from rpcbench.base.config import WorldConfig
from rpcbench.protocol.membership import FailureDetector, Sound, Verdict


class Heartbeat:
    """`judged` is called with every change of mind about a peer, on this thread."""

    def __init__(
        self, config: WorldConfig, peers: Peers, clock: Callable[[], float], judged: Callable[[Verdict], None]
    ) -> None:
        self._life = FailureDetector(config.suspect_seconds, config.lost_seconds, config.stuck_seconds)
        self._peers = peers
        self._clock = clock
        self._judged = judged
        self._stop = Flag()
        self._thread = threading.Thread(target=self._run, name=f"rpcbench-{config.name}-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._life.period):
            sounds: dict[int, Sound] = {}
            for id_, connections in self._peers.far().items():
                for connection in connections:
                    connection.beat()
                silences = [silence for connection in connections if (silence := connection.silence()) is not None]
                sounds[id_] = Sound(sum(c.heard for c in connections), min(silences, default=None))
            for verdict in self._life.tick(self._clock(), sounds):
                self._judged(verdict)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(5)
