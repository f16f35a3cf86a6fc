"""What Tab offers on the line of a magic: workers, groups, options, subcommands."""

from __future__ import annotations

from typing import NamedTuple

from rpcbench.launch.targets import ALL

_OF_WORKERS = ("restart", "interrupt", "logs")


class Vocabulary(NamedTuple):
    """The words there are at this moment."""

    workers: tuple[str, ...]
    groups: tuple[str, ...]
    options: tuple[str, ...]
    actions: tuple[str, ...]

    def after(self, magic: str, before: list[str]) -> list[str]:
        """What may follow `magic` and the words `before`; nothing where an expression comes."""
        targets = [*self.workers, ALL, *self.groups]
        if magic == "%%remote":
            return [word for word in (*targets, *self.options) if word not in before]
        if magic == "%cluster" and before:
            return targets if before[0] in _OF_WORKERS else []
        if before:
            return []
        others = {"%cluster": list(self.actions), "%autoremote": [*targets, "off"], "%debug": list(self.workers)}
        return others.get(magic, targets)
