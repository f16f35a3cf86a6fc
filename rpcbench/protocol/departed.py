"""Who has gone from the world, and how: for each id the latest process that is no member any more."""

from __future__ import annotations

from rpcbench.protocol.effects import Gone


class Departed(dict[int, Gone]):
    def find(self, key: int | str) -> Gone | None:
        """The latest under an id or a name."""
        if isinstance(key, int):
            return self.get(key)
        return next((gone for gone in self.values() if gone.member.name == key), None)
