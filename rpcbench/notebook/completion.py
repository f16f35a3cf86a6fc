"""Completion and inspection (Tab, Shift-Tab, hover) in cells for workers, with the names that the worker has.

Rules
- The first of the cell's workers replies, also while it runs another cell. If it does not reply within `PATIENCE`
  seconds (it is lost, or its code holds Python's GIL), the log reports it and the notebook's own names are used.
- The line of a magic is completed with workers, groups, options and subcommands.
- The kernel's event loop never waits for a worker: another thread sends the request.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError

from rpcbench.base.errors import RpcError
from rpcbench.cells import shell
from rpcbench.cells.partition import COMBINATIONS, SCATTER
from rpcbench.cells.targets import ALL
from rpcbench.launch import gpu_pins
from rpcbench.launch.registry import launcher_names, option_names
from rpcbench.notebook import panel_names, parsers
from rpcbench.notebook.async_cells import HERE
from rpcbench.notebook.fault_magics import FAULTS
from rpcbench.notebook.parsers import MagicParser, cluster_line, profile_line, remote_line, step_line
from rpcbench.runtime.current import find_current

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent

_PARSERS: dict[str, tuple[Callable[[], MagicParser], ...]] = {
    "%cluster": (cluster_line,), "%%remote": (remote_line,), "%%trace": (remote_line,), "%%step": (step_line,),
    "%%profile": (remote_line, profile_line),
}  # fmt: skip
_WORDS = {"%chaos": ("off", *(f"{key}=" for key in FAULTS)), "%%profile": (HERE,), "%autoremote": ("off",)}


class Vocabulary(NamedTuple):
    """The words that may stand on the lines of magics at this moment."""

    workers: tuple[str, ...]
    groups: tuple[str, ...]
    clusters: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()  # names of clusters that files describe

    def words_after(self, magic: str, before: list[str], begun: str = "") -> list[str]:
        """Return the words that may follow `magic` and the words `before`; none before an expression. `begun`: the word
        that is to be completed."""
        if magic in _PARSERS:
            words = [word for make in _PARSERS[magic] for word in self._after_line(make(), before, begun)]
        elif before and magic != "%chaos":
            return []
        else:
            first = {"%debug": self.workers, "%panel": panel_names(of_results=True), "%chaos": ()}
            words = [*first.get(magic, self._targets)]
        return [word for word in (*words, *_WORDS.get(magic, ())) if word not in before]

    @property
    def _targets(self) -> tuple[str, ...]:
        return *self.workers, ALL, *self.groups

    def _after_line(self, line: MagicParser, before: list[str], begun: str) -> list[str]:
        if line.actions:
            action, *rest = before or [""]
            found = line.actions.get(action)
            return self._after_line(found, rest, begun) if found else [] if before else [*line.actions]
        for argument in line.arguments:
            if before and before[-1] in argument.option_strings and argument.nargs != 0:
                return [*self._values(argument, before, begun)]
        places = [one for one in line.arguments if not one.option_strings and (one.nargs in ("*", "+") or not before)]
        options = [one.option_strings[0] for one in line.arguments if one.option_strings]
        return [*(word for place in places for word in self._values(place, before, begun)), *options]

    def _values(self, argument: argparse.Action, before: list[str], begun: str) -> Iterable[str]:
        size = next((int(word) for word in before if word.isdecimal()), 1)
        words: dict[Any, Callable[[], Iterable[str]]] = {
            parsers.WORKER: lambda: self._targets, parsers.CLUSTER: lambda: self.clusters,
            parsers.SAVED: lambda: self.saved, parsers.LAUNCHER: launcher_names,
            parsers.LOADS: lambda: _transfer_words(begun, [SCATTER]), parsers.GPUS: lambda: gpu_pins.gpu_choices(size),
            parsers.VALUES: lambda: _option_words(before),
            parsers.FETCHES: lambda: _transfer_words(begun, COMBINATIONS),
        }  # fmt: skip
        found = words.get(argument.metavar)
        return argument.choices or () if found is None else found()


def _option_words(before: list[str]) -> list[str]:
    """Return the options of the launcher that the words name; none if that cannot be loaded."""
    try:
        name = cluster_line().action("start").parse_some(before)[0].launcher
        return [f"{option}=" for option in option_names(name)] if name else []
    except (UsageError, RpcError, ModuleNotFoundError):
        return []


def _transfer_words(begun: str, methods: Iterable[str]) -> list[str]:
    """Return `x:scatter`, … for a variable with the colon; none for a name, which the notebook itself completes."""
    name, colon, _ = begun.rpartition(":")
    return [f"{name}:{method}" for method in methods] if colon and ":" not in name.rpartition(",")[2] else []


logger = logging.getLogger(__name__)

PATIENCE = 0.5  # seconds
_CELL = re.compile(r"\s*%%(?:remote|trace|profile)\b([^\n]*)\n")
_LINE = re.compile(r"(?m)^[^\n%#]*?%remote[ \t]+(\S+)[ \t]+(?=\S)")  # the part before an expression
_OWN_LINE = re.compile(
    r"\s*(%%remote|%%trace|%%profile|%remote|%autoremote|%debug|%cluster|%%step|%chaos|%panel)[ \t]+([^\n]*)\Z"
)

Reply = dict[str, Any]


class RemoteCode(NamedTuple):
    """The part of a cell that runs on a worker."""

    worker: str
    start: int  # offset in the cell


class Assist:
    """Replaces a kernel's completion and inspection, and calls the original for code that runs in the notebook.

    `where(line)` returns the worker that a `%%remote` line selects, or None; `auto(code)` the targets of `%autoremote`
    for the cell, or None; `words(magic, before, begun)` the words that may follow on a magic's line."""

    def __init__(
        self,
        kernel: Any,
        where: Callable[[str], str | None],
        auto: Callable[[str], str | None],
        words: Callable[[str, list[str], str], list[str]],
    ) -> None:
        self._kernel = kernel
        self._where, self._auto, self._words = where, auto, words
        self._own = kernel.do_complete, kernel.do_inspect
        kernel.do_complete, kernel.do_inspect = self.complete_code, self.inspect_name

    def restore_kernel(self) -> None:
        self._kernel.do_complete, self._kernel.do_inspect = self._own

    async def complete_code(self, code: str, cursor: int | None) -> Reply:
        """Complete code, as the kernel's `do_complete`."""
        end = len(code) if cursor is None else cursor
        line = _OWN_LINE.match(code[:end].rpartition("\n")[2])
        if line and (reply := self._of_line(line, end)):
            return reply
        if spot := self.find_remote_code(code, end):
            reply = await _query_worker(spot.worker, shell.complete_code, code[spot.start :], end - spot.start)
            if reply is not None:
                return _shift_offsets(reply, spot.start)
        return await _await_reply(self._own[0](code, cursor))

    async def inspect_name(self, code: str, cursor: int, detail_level: int = 0, omit_sections: Any = ()) -> Reply:
        """Inspect a name, as the kernel's `do_inspect`."""
        if spot := self.find_remote_code(code, cursor):
            reply = await _query_worker(
                spot.worker, shell.inspect_name, code[spot.start :], cursor - spot.start, detail_level
            )
            if reply is not None:
                return reply
        return await _await_reply(self._own[1](code, cursor, detail_level, omit_sections))

    def find_remote_code(self, code: str, cursor: int) -> RemoteCode | None:
        """Locate the worker's code at the cursor; None for code of the notebook, or the line of a magic."""
        if cell := _CELL.match(code):
            line, start = cell[1], cell.end()
        elif lines := [found for found in _LINE.finditer(code, 0, cursor) if "\n" not in code[found.end() : cursor]]:
            line, start = lines[-1][1], lines[-1].end()
        elif (meant := self._auto(code)) is not None:
            line, start = meant, 0
        else:
            return None
        worker = self._where(line) if cursor >= start else None  # before `start` is the magic's line
        return RemoteCode(worker, start) if worker else None

    def _of_line(self, line: re.Match[str], end: int) -> Reply | None:
        """Complete the line of a magic; None if no word fits, as in the expression of `%remote`."""
        *before, begun = line[2].split(" ")
        words = self._words(line[1], [word for word in before if word], begun)
        found = [word for word in words if word.startswith(begun)]
        if not found:
            return None
        return {
            "status": "ok",
            "matches": found,
            "cursor_start": end - len(begun),
            "cursor_end": end,
            "metadata": {},
        }


def _shift_offsets(reply: Reply, by: int) -> Reply:
    """Shift the offsets of a reply by `by` characters."""
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


async def _await_reply(reply: Any) -> Reply:
    # A kernel's `do_complete` may be a coroutine function or a plain one.
    answer: Reply = await reply if inspect.isawaitable(reply) else reply
    return answer


async def _query_worker(worker: str, function: Callable[..., Reply | None], *args: Any) -> Reply | None:
    """Return the worker's reply; None if it has none, or does not reply in time."""
    agent = find_current()
    if agent is None:
        return None
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Reply | None] = loop.create_future()

    def tell(reply: Reply | None) -> None:
        if not answer.done():  # cancelled by the timeout below
            answer.set_result(reply)

    def ask(agent: Agent) -> None:
        reply = None
        try:
            reply = agent.call(worker, function, args, timeout=PATIENCE, label="completion", own=True).wait()
        except Exception as error:  # noqa: BLE001  (the notebook's own names are used instead)
            logger.warning("%s has no answer for %s: %s", worker, function.__name__, error)
        loop.call_soon_threadsafe(tell, reply)

    agent.submit(functools.partial(ask, agent))  # on a pool thread: a send may block on backpressure
    try:
        return await asyncio.wait_for(answer, PATIENCE)
    except TimeoutError:
        return None
