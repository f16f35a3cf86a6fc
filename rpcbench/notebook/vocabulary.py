"""What Tab offers on the line of a magic: workers, groups, options, subcommands."""

from __future__ import annotations

from typing import NamedTuple

from rpcbench.cells.targets import ALL
from rpcbench.launch.registry import KINDS, launcher_names
from rpcbench.notebook.cluster_magic import OPTIONS

_OF_WORKERS = ("restart", "interrupt", "logs")
"""Actions that take workers."""
_STEPS = ("--hold", "--of")
_FAULTS = ("drop=", "duplicate=", "delay=", "seed=", "kill=")


class Vocabulary(NamedTuple):
    """The words there are at this moment."""

    workers: tuple[str, ...]
    groups: tuple[str, ...]
    options: tuple[str, ...]
    actions: tuple[str, ...]
    clusters: tuple[str, ...] = ()

    def after(self, magic: str, before: list[str]) -> list[str]:
        """What may follow `magic` and the words `before`; nothing where an expression comes."""
        targets = [*self.workers, ALL, *self.groups]
        ran = (*targets, *self.options)
        free = {"%%remote": ran, "%%trace": ran, "%%step": (*targets, *_STEPS), "%chaos": ("off", *_FAULTS)}
        if magic in free:
            return [word for word in free[magic] if word not in before]
        if magic == "%cluster" and before:
            return self._after_action(before, targets)
        if before:
            return []
        others = {"%cluster": list(self.actions), "%autoremote": [*targets, "off"], "%debug": list(self.workers)}
        return others.get(magic, targets)

    def _after_action(self, before: list[str], targets: list[str]) -> list[str]:
        if before[-1] == "--kind":
            return list(KINDS)
        if before[-1] == "--launcher":
            return launcher_names()
        words = {"use": [] if before[1:] else self.clusters, **dict.fromkeys(_OF_WORKERS, targets)}
        return [word for word in (*words.get(before[0], ()), *OPTIONS.get(before[0], ())) if word not in before]
