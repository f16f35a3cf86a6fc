"""`python -m benchmarks --peers`: the same few tasks in notebooks of several libraries, measured from outside.

- Each group of tasks has a kernel of its own. A task that does not end in time is reported as such; the rest of its
  group is not tried, and the kernel ends with all processes that it started.
- A row shows one observation; only an empty call and a printed line are the median of several.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.table import Table

from benchmarks.kernel_driver import Message, NotInTime, Ran
from benchmarks.pairs import BenchError
from benchmarks.peer_notebook import BY_ITSELF, OURS, PEERS, Notebook, Peer, Plan, notebook, said
from rpcbench.base.errors import RpcError

CALLS = (
    "start of two workers, until both have made a tensor",
    "call that does nothing, median",
    "line printed on a worker until it is shown, median; lines in the cell that asked",
    "`1 / 0` on a worker is a ZeroDivisionError here; the cell",
)
STOPPED = ("stop button in a call, until the prompt is back", "… and then a call on that worker")
KILLED = (
    "SIGKILL of a worker in a call, until anything is said",
    "… until the cell ends; the worker is called by its name",
    "… and then a call on the other worker",
    "… and that worker again, under its name",
)
DEBUGGER = "debugger"  # the last one: a debugger that asks nobody ends its group
TASKS = {
    "map": "200 numbers squared on both workers, each as a task of its own, in order",
    "parts": "a tensor in parts on both workers, doubled there, put together here",
    "spmd": "a function or cell on both workers that sums a tensor over their process group",
    "profile": "operators that a worker has run in a block, with their times",
    "stack": "the line at which a worker waits in a call",
    "saved": "a cluster that a file describes, started by its name",
    DEBUGGER: "`breakpoint()` on a worker asks for commands in the cell",
}
"""Rows by the key of `Peer.tasks`. Its cell prints True once the answer is right."""
_COMMANDS = ("print(x + 1 == 42)", "c")
_STOPS = "x = 41\nbreakpoint()\nx = 0"
_GIVEN = """import time
import torch
PARTS, SQUARES = torch.arange(10.0), [n * n for n in range(200)]
def waits_here():
    time.sleep(1.5)"""
"""The names that cells of tasks use."""
NO_WAY, NOT_TRIED = "—", "not tried"

_LINE = re.compile(r"<line (\d+) ([\d.]+)>")
_PRINTS = """import time
for number in range({}):
    print(f'<line {{number}} {{time.monotonic()}}>')
    time.sleep(0.05)"""
_KEPT = "import sys\nprint(isinstance(getattr(sys, 'last_value', None), ZeroDivisionError))"

Deeds = Callable[[Notebook], Iterator[str]]


def measure(peer: Peer, plan: Plan) -> dict[str, str]:
    """What was seen in each row. BenchError where two workers cannot even be started."""
    groups = ((CALLS, _calls), (tuple(TASKS.values()), _tasks), (STOPPED, _stopped), (KILLED, _killed))
    return dict(row for titles, deeds in groups for row in _group(peer, plan, titles, deeds))


def about(seconds: float) -> str:
    """Two digits: on a machine that does other things too a third one says nothing."""
    if seconds < 0.995:
        return f"{float(f'{seconds * 1e3:.2g}'):g} ms"
    return f"{float(f'{seconds:.2g}'):g} s"


def _group(peer: Peer, plan: Plan, titles: Sequence[str], deeds: Deeds) -> list[tuple[str, str]]:
    """Each title with what its deed has shown."""
    seen = []
    with notebook(peer, plan) as user:
        try:
            for text in deeds(user):
                seen.append(text)
        except NotInTime:
            seen.append(_late(plan))
    return list(zip(titles, seen + [NOT_TRIED] * len(titles), strict=False))


def _calls(user: Notebook) -> Iterator[str]:
    yield about(user.started) + (f" (cells lost: {user.lost})" if user.lost else "")
    calls = [user.on(2, "pass") for _ in range(user.plan.calls)]
    if failed := next((call for call in calls if call.error), None):
        raise BenchError(f"a call that does nothing failed:\n{failed.traceback}")
    yield about(statistics.median(call.seconds for call in calls))
    yield _printed(user)
    divided = user.on(2, "1 / 0")
    kept = "True" in user.run(_KEPT).text
    yield f"{'yes' if kept else f'no, {divided.error}'}; fails" if divided.error else "no; goes on"


def _printed(user: Notebook) -> str:
    count = user.plan.lines
    cell = user.on(2, _PRINTS.format(count)).cell
    lags: dict[str, float] = {}
    right: set[str] = set()

    def all_came(message: Message) -> bool:
        for line in _LINE.finditer(said(message)):
            lags.setdefault(line[1], message.at - float(line[2]))
            right.update([line[1]] if message.cell == cell else [])
        return len(lags) == count

    with contextlib.suppress(NotInTime):  # some lose lines: those that came are counted
        user.kernel.wait(all_came, "what a worker prints", user.plan.late)
    return f"{about(statistics.median(lags.values())) if lags else 'never'}; {len(right)} of {count}"


def _tasks(user: Notebook) -> Iterator[str]:
    user.run(_GIVEN)
    for task in TASKS:
        ran = _task(user, task)
        if ran is None:
            yield NO_WAY
        elif ran.error:
            yield ran.error
        else:
            yield about(ran.seconds) if "True" in "".join(map(said, ran.messages)) else "not so"


def _task(user: Notebook, task: str) -> Ran | None:
    """Its cell, run; None where the library has no way to do it."""
    if task == DEBUGGER:
        user.kernel.answers[:] = _COMMANDS
        return user.on(2, _STOPS)
    return user.run(user.peer.tasks[task]) if task in user.peer.tasks else None


def _stopped(user: Notebook) -> Iterator[str]:
    cell, _ = user.busy()
    began = time.monotonic()
    user.kernel.interrupt()
    yield _end(user.end(cell, began))
    yield _works_again(user, time.monotonic())


def _killed(user: Notebook) -> Iterator[str]:
    cell, pid = user.busy()
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    over = user.kernel.wait(
        lambda message: message.at >= began and (bool(said(message)) or (message.cell == cell and message.is_idle)),
        "a word on a killed worker", user.plan.patience,
    )  # fmt: skip
    yield "nothing is said" if over.is_idle else about(over.at - began)
    ended = None
    with contextlib.suppress(NotInTime):
        ended = user.end(cell, began)
    words = "".join(said(message) for message in user.kernel.messages if message.at >= began)
    called = "yes" if re.search(user.peer.called, words) else "no"
    yield f"{_end(ended) if ended else _late(user.plan)}; {called}"
    if not ended:
        return
    yield _after(user.on(1, "pass"))
    yield _again(user) if user.peer.restart else NO_WAY


def _works_again(user: Notebook, began: float) -> str:
    """Seconds until a call on the second worker succeeds, and the error of the first try."""
    error = ""
    while (ran := user.on(2, "pass")).error:
        error = error or f" (first: {ran.error})"
        if ran.ended - began > user.plan.patience:
            raise NotInTime(f"calls go on to fail: {ran.traceback}")
    return about(ran.ended - began) + error


def _again(user: Notebook) -> str:
    began = time.monotonic()
    restart = user.run(user.peer.restart)
    again = restart.error or _works_again(user, began)
    return "by itself" if user.peer.restart == BY_ITSELF else again


def _late(plan: Plan) -> str:
    return f"not within {plan.patience:g} s"


def _end(ran: Ran) -> str:
    return f"{about(ran.seconds)}, {ran.error or 'no error'}"


def _after(ran: Ran) -> str:
    return _end(ran) if ran.error else about(ran.seconds)


Found = Mapping[str, Mapping[str, str]]  # by library, by row
_NOTE = "seen once each, through a real kernel: rough figures, twice as much or half means nothing"


def chosen(names: Sequence[str]) -> list[Peer]:
    """Ours and those of these names, in any case, or all that are installed. RpcError where one is not there."""
    known = {name.lower(): peer for name, peer in PEERS.items()}
    for name in names:
        if name.lower() not in known:
            raise RpcError(f"no library {name!r} is known here; there are {', '.join(PEERS)}")
        if not known[name.lower()].is_installed:
            raise RpcError(missing(known[name.lower()]))
    wanted = [known[name.lower()] for name in names] or [peer for peer in PEERS.values() if peer.is_installed]
    return [peer for peer in PEERS.values() if peer is OURS or peer in wanted]


def missing(peer: Peer) -> str:
    """What is told instead of measuring it."""
    return f"{peer.name} is not installed here: pip install {peer.packages}"


def _rows(found: Found) -> list[tuple[str, ...]]:
    titles = next(iter(found.values()))
    return [(title, *(seen[title] for seen in found.values())) for title in titles]


def as_table(found: Found) -> Table:
    """One column for each library."""
    table = Table("", *found, title=_NOTE)
    for row in _rows(found):
        table.add_row(*row)
    return table


def as_markdown(found: Found) -> str:
    """The same with versions, and what it was measured on."""
    headings = ("", *(f"{name} {PEERS[name].version}" for name in found))
    body = [headings, ("---",) * len(headings), *_rows(found)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in body)
    load = os.getloadavg()[2]  # of fifteen minutes: the whole takes about ten
    machine = f"{os.cpu_count()} cores under a load of {load:.1f}, Python {platform.python_version()}"
    return f"{machine}; {_NOTE}.\n\n{table}\n"
