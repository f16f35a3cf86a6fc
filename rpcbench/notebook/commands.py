"""What `%cluster` does: start, look at, change and stop the workers of a notebook. Each answers what to say or show.

A cluster that was started here is stopped by `stop`, by unloading the extension, and at exit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError

from rpcbench.launch.cluster import Cluster, cluster
from rpcbench.launch.history import Rerun
from rpcbench.launch.targets import Targets

Words = list[str]
NONE_RUNS = "No cluster runs. %cluster start 2 starts two workers."


class Commands:
    """`bind(cluster)` makes a cluster known to the notebook under its name."""

    def __init__(self, targets: Targets, bind: Callable[[Cluster], object]) -> None:
        self.started: Cluster | None = None
        self._targets = targets
        self._bind = bind
        self.by_name: dict[str, Callable[[Words], Any]] = {
            "start": self._start,
            "status": self._status,
            "scale": self._scale,
            "restart": self._restart,
            "interrupt": self._interrupt,
            "logs": self._logs,
            "group": self._group,
            "stop": self._stop,
        }

    def _start(self, words: Words) -> str:
        size = _number(words, "say how many workers to start: %cluster start 2")
        found = running()
        if found is None:
            found = self.started = Cluster(size)
        elif len(found.workers) != size:
            return f"{sentence(found)} %cluster scale {size} makes it {size}."
        self._bind(found)
        return f"{sentence(found)} %%remote {found.workers[0]} runs a cell there, %cluster stop ends it."

    def _status(self, words: Words) -> Any:
        _nothing(words, "status")
        found = running()
        return NONE_RUNS if found is None else found.status()

    def _scale(self, words: Words) -> str:
        size = _number(words, "say how many workers there shall be: %cluster scale 3")
        found = cluster()
        found.scale(size)
        return sentence(found)

    def _restart(self, words: Words) -> str:
        replay = "--replay" in words
        words = [word for word in words if word != "--replay"]
        if not words:
            raise UsageError("say which: %cluster restart worker2")
        found = cluster()
        there = [row.name for row in found.status()]  # lost ones as well
        names = self._targets.find(words, there)
        again = [sentence_of_replay(name, found.restart(name, replay=replay)) for name in names]
        first = f"Started again: {', '.join(names)}."
        return "\n".join([first, *again]) if replay else f"{first} What they held is lost."

    def _interrupt(self, words: Words) -> str:
        found = cluster()
        names = self._targets.find(words or ["all"], found.workers)
        for name in names:
            found.interrupt(name)
        return f"Interrupted: {', '.join(names)}."

    def _logs(self, words: Words) -> str:
        found = cluster()
        names = self._targets.find(words or ["all"], [row.name for row in found.status()])
        logs = {name: found.log(name) or "(nothing outside cells and calls)" for name in names}
        return "\n".join(f"[{name}] {line}" for name, text in logs.items() for line in text.splitlines())

    def _group(self, words: Words) -> str:
        if not words:
            groups = self._targets.groups.items()
            return "\n".join(f"{name}: {' '.join(meant)}" for name, meant in groups) or "No group is saved."
        if len(words) == 1:
            raise UsageError("say who belongs to it: %cluster group trainers worker1 worker2, %cluster group rest [1:]")
        names = self._targets.save(words[0], words[1:], cluster().workers)
        return f"{words[0]}: {', '.join(names)}. %%remote {words[0]} runs a cell there."

    def _stop(self, words: Words) -> str:
        _nothing(words, "stop")
        found = running()
        if found is None:
            return "No cluster runs."
        found.shutdown()
        return "The cluster is stopped."

    def stop_started(self) -> None:
        """Stop the cluster that `start` made, if it still runs."""
        if self.started is not None:
            self.started.shutdown()


def running() -> Cluster | None:
    try:
        return cluster()
    except RuntimeError:
        return None


def sentence(found: Cluster) -> str:
    names = found.workers
    return f"{len(names)} worker{'s' if len(names) != 1 else ''}: {', '.join(names)}."


def sentence_of_replay(name: str, cells: list[Rerun]) -> str:
    """How a worker has done with what it ran again: one line, and one for each cell that failed."""
    failed = [cell for cell in cells if cell.error is not None]
    if not cells:
        return f"{name} had run no cell."
    if not failed:
        return f"{name} has run its {len(cells)} cell{'s' if len(cells) != 1 else ''} again."
    lines = [f"  {_first_line(cell.code)}  ->  {type(cell.error).__name__}: {cell.error}" for cell in failed]
    return "\n".join([f"{name} has run its {len(cells)} cells again; {len(failed)} failed:", *lines])


def _first_line(code: str) -> str:
    first, *rest = code.strip().splitlines() or [""]
    return f"{first[:60]} …" if rest or len(first) > 60 else first


def _number(words: Words, complaint: str) -> int:
    if len(words) != 1 or not words[0].isdecimal() or int(words[0]) < 1:
        raise UsageError(complaint)
    return int(words[0])


def _nothing(words: Words, action: str) -> None:
    if words:
        raise UsageError(f"%cluster {action} takes nothing more, not {' '.join(words)}")
