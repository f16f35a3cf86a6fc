"""Tab, Shift-Tab and hover in a cell that runs on a worker: answered from the names that the worker has.

Rules
- The first of the cell's workers answers, also while it runs another cell. One that does not within `PATIENCE` seconds
  (it is lost, or hangs in code that holds Python's lock) is told of in the log, and the notebook's own names stand in.
- A magic's own line is completed with workers, groups, options and subcommands.
- The front end never waits for a worker: the question leaves on another thread.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcbench.cells import shell
from rpcbench.cells.targets import ALL
from rpcbench.launch.registry import KINDS, launcher_names
from rpcbench.notebook.cluster_magic import OPTIONS
from rpcbench.runtime.current import find

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent


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


logger = logging.getLogger(__name__)

PATIENCE = 0.5
_CELL = re.compile(r"\s*%%(?:remote|trace)\b([^\n]*)\n")
_LINE = re.compile(r"(?m)^[^\n%#]*?%remote[ \t]+(\S+)[ \t]+(?=\S)")
_OWN_LINE = re.compile(r"\s*(%%remote|%%trace|%remote|%autoremote|%debug|%cluster|%%step|%chaos)[ \t]+([^\n]*)\Z")

Reply = dict[str, Any]


class Spot(NamedTuple):
    """Code for a worker: it begins at `start` of the cell."""

    worker: str
    start: int


class Assist:
    """Stands in front of a kernel's own completion and inspection.

    `where(line)` is the worker that the line of `%%remote` means, or None; `auto(code)` the line of the `%%remote` that
    `%autoremote` would put before the cell, or None; `words(magic, before)` what may follow on the line of a
    magic.
    """

    def __init__(
        self,
        kernel: Any,
        where: Callable[[str], str | None],
        auto: Callable[[str], str | None],
        words: Callable[[str, list[str]], list[str]],
    ) -> None:
        self._kernel = kernel
        self._where, self._auto, self._words = where, auto, words
        self._own = kernel.do_complete, kernel.do_inspect
        kernel.do_complete, kernel.do_inspect = self.complete, self.inspect

    def remove(self) -> None:
        """Leave the kernel as it was."""
        self._kernel.do_complete, self._kernel.do_inspect = self._own

    async def complete(self, code: str, cursor: int | None) -> Reply:
        """The kernel's `do_complete`."""
        end = len(code) if cursor is None else cursor
        line = _OWN_LINE.match(code[:end].rpartition("\n")[2])
        if line and (reply := self._of_line(line, end)):
            return reply
        if spot := self.spot(code, end):
            reply = await _answer(spot.worker, shell.complete, code[spot.start :], end - spot.start)
            if reply is not None:
                return _moved(reply, spot.start)
        return await _whole(self._own[0](code, cursor))

    async def inspect(self, code: str, cursor: int, detail_level: int = 0, omit_sections: Any = ()) -> Reply:
        """The kernel's `do_inspect`."""
        if spot := self.spot(code, cursor):
            reply = await _answer(spot.worker, shell.inspect, code[spot.start :], cursor - spot.start, detail_level)
            if reply is not None:
                return reply
        return await _whole(self._own[1](code, cursor, detail_level, omit_sections))

    def spot(self, code: str, cursor: int) -> Spot | None:
        """Where the code at the cursor runs; None: here, or it is the line of a magic."""
        if cell := _CELL.match(code):
            line, start = cell[1], cell.end()
        elif lines := [found for found in _LINE.finditer(code, 0, cursor) if "\n" not in code[found.end() : cursor]]:
            line, start = lines[-1][1], lines[-1].end()
        elif (meant := self._auto(code)) is not None:
            line, start = meant, 0
        else:
            return None
        worker = self._where(line) if cursor >= start else None
        return Spot(worker, start) if worker else None

    def _of_line(self, line: re.Match[str], end: int) -> Reply | None:
        """What may follow on the line of a magic; None for an expression, which is a worker's."""
        *before, begun = line[2].split(" ")
        found = [word for word in self._words(line[1], [word for word in before if word]) if word.startswith(begun)]
        if not found:
            return None
        return {
            "status": "ok",
            "matches": found,
            "cursor_start": end - len(begun),
            "cursor_end": end,
            "metadata": {},
        }


def _moved(reply: Reply, by: int) -> Reply:
    """The same answer for code that begins so many characters earlier."""
    types = [
        {**found, "start": found["start"] + by, "end": found["end"] + by}
        for entries in reply["metadata"].values()
        for found in entries
    ]
    return {
        **reply,
        "cursor_start": reply["cursor_start"] + by,
        "cursor_end": reply["cursor_end"] + by,
        "metadata": dict.fromkeys(reply["metadata"], types),
    }


async def _whole(reply: Any) -> Reply:
    answer: Reply = await reply if inspect.isawaitable(reply) else reply
    return answer


async def _answer(worker: str, function: Callable[..., Reply | None], *args: Any) -> Reply | None:
    """What the worker says; None if that is nothing, or does not come in time."""
    agent = find()
    if agent is None:
        return None
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Reply | None] = loop.create_future()

    def tell(reply: Reply | None) -> None:
        if not answer.done():
            answer.set_result(reply)

    def ask(agent: Agent) -> None:
        reply = None
        try:
            reply = agent.call(worker, function, args, timeout=PATIENCE, own=True).wait()
        except Exception as error:  # noqa: BLE001  (whatever is wrong there, the notebook's own names are at hand)
            logger.warning("%s has no answer for %s: %s", worker, function.__name__, error)
        loop.call_soon_threadsafe(tell, reply)

    agent.submit(functools.partial(ask, agent))  # it may have to wait for a line that is full
    try:
        return await asyncio.wait_for(answer, PATIENCE)
    except TimeoutError:
        return None
