"""The links of one agent, which every message between its machines and its connections passes, and its clock.

Links may come and go while messages do. What a link that was taken out still has goes its way without the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rpcbench.transport.base import Deliver, Link, Transmit


class Links:
    """`near` is next to the machines, `far` next to the connections; between them they are in the order of `all`.

    `outgoing` takes what machines send, `incoming` what connections bring.

    `clock` counts the seconds of deadlines and retries; it must never jump. `changed` is called after each change.
    """

    def __init__(self, first: Link, transmit: Transmit, deliver: Deliver) -> None:
        self.changed: Callable[[], object] = lambda: None
        self.clock = first.clock
        self.all: tuple[Link, ...] = (first,)
        self.near = self.far = first
        self._transmit, self._deliver = transmit, deliver
        self._lock = threading.Lock()
        self._wire((first,))

    @property
    def lossy(self) -> bool:
        return any(link.lossy for link in self.all)

    def use(self, link: Link) -> None:
        """This one, and no other."""
        with self._lock:
            self._wire((link,))
        self.changed()

    def add(self, link: Link) -> None:
        """One more, next to the connections."""
        with self._lock:
            self._wire((*self.all, link))
        self.changed()

    def remove(self, link: Link) -> None:
        """Take one out; the last one leaves a plain one. Harmless if it is out already."""
        with self._lock:
            self._wire(tuple(one for one in self.all if one is not link) or (Link(),))
        self.changed()

    def run_by(self, clock: Callable[[], float]) -> None:
        """Another clock from now on, which shows what the one before does."""
        self.clock = clock
        self.changed()

    def closed(self) -> None:
        """The agent has stopped."""
        for link in self.all:
            link.closed()

    def _wire(self, links: tuple[Link, ...]) -> None:
        for at, link in enumerate(links):
            transmit = links[at + 1].outgoing if at + 1 < len(links) else self._transmit
            link.attach(transmit, links[at - 1].incoming if at else self._deliver)
        for link in set(self.all) - set(links):
            link.attach(self._transmit, self._deliver)
        self.all, self.near, self.far = links, links[0], links[-1]
        self.plain = all(type(link) is Link for link in links)  # those pass on what they get: no need to ask them
        self.outgoing = self._transmit if self.plain else self.near.outgoing
        self.incoming = self._deliver if self.plain else self.far.incoming
