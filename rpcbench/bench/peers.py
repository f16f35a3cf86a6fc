"""`rpcbench bench --peers`: the same few deeds in notebooks of several libraries, seen from outside by one driver.

- Each group of deeds has a kernel of its own. What is not over within the patience of the plan is told as such, the
  rest of its group is not tried, and the kernel goes with all that it started.
- What stands in a row is what was seen, once; only the trivial call is the median of several.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from rpcbench.bench.driver import Kernel, Message, NotInTime, Ran, kernel
from rpcbench.bench.notebook import MARK, is_marked
from rpcbench.bench.peer_cells import Peer

CALLS = (
    "start of two workers, to the first result",
    "call that does nothing, median",
    "line printed on a worker until it is shown, median",
    "printed lines in the cell that asked",
    "`1 / 0` on a worker raises",
    "… and the cell fails",
)
STOPPED = ("stop button in a call, until the prompt is back", "… and then a call on that worker")
KILLED = (
    "SIGKILL of a worker in a call, until anything is said",
    "… and the cell ends",
    "… and the worker is named",
    "… and then a call on the other worker",
    "… and that worker again, under its name",
)
NO_WAY, NOT_TRIED = "—", "not tried"

_LINE = re.compile(r"<line (\d+) ([\d.]+)>")
_PRINTS = "import time\nfor number in range({}):\n    print(f'<line {{number}} {{time.monotonic()}}>')\n    time.sleep(0.05)"
_KEPT = "import sys\nprint(isinstance(getattr(sys, 'last_value', None), ZeroDivisionError))"
_GLANCE_SECONDS = 0.02


class Plan(NamedTuple):
    """How often, how many, and how many seconds."""

    calls: int = 20
    lines: int = 20
    busy: float = 10.0  # seconds that a call lasts which nobody stops
    patience: float = 20.0
    late: float = 3.0  # how long a printed line may come after its cell
    start: float = 60.0


QUICK = Plan(calls=3, lines=3)


def measure(peer: Peer, plan: Plan) -> dict[str, str]:
    """What was seen in each row. BenchError where two workers cannot even be started."""
    groups = ((CALLS, _calls), (STOPPED, _stopped), (KILLED, _killed))
    return dict(row for titles, deeds in groups for row in _group(peer, plan, titles, deeds))


def about(seconds: float) -> str:
    """Two digits: on a machine that does other things too a third one says nothing."""
    if seconds < 0.995:
        return f"{float(f'{seconds * 1e3:.2g}'):g} ms"
    return f"{float(f'{seconds:.2g}'):g} s"


class Notebook(NamedTuple):
    """A kernel in which two workers wait."""

    peer: Peer
    plan: Plan
    kernel: Kernel
    place: Path
    started: float

    def end(self, cell: str, began: float) -> Ran:
        """NotInTime if the cell goes on."""
        return self.kernel.end(cell, began, self.plan.patience)

    def run(self, code: str) -> Ran:
        began = time.monotonic()
        return self.end(self.kernel.send(code), began)

    def on(self, number: int, body: str) -> Ran:
        """Run this on the first or second worker."""
        return self.run(self.peer.on(self.peer.workers[number - 1], body))

    def busy(self) -> tuple[str, int]:
        """A cell that has the second worker sleep again and again, and the process of that worker."""
        file = self.place / "pid"
        body = (
            f"import os, pathlib, time\nfile = pathlib.Path({str(file)!r})\n"
            "file.with_suffix('.new').write_text(str(os.getpid()))\nfile.with_suffix('.new').rename(file)\n"
            f"for _ in range({int(self.plan.busy * 100)}):\n    time.sleep(0.01)"
        )
        cell = self.kernel.send(self.peer.on(self.peer.workers[1], body))
        deadline = time.monotonic() + self.plan.patience
        while not file.exists():
            if time.monotonic() > deadline:
                raise NotInTime(f"nothing ran on {self.peer.workers[1]} in {self.plan.patience:g} s")
            time.sleep(_GLANCE_SECONDS)  # not all of these libraries show at once what a worker prints
        return cell, int(file.read_text())


Deeds = Callable[[Notebook], Iterator[str]]


@contextmanager
def _notebook(peer: Peer, plan: Plan) -> Iterator[Notebook]:
    """Nothing of it is left afterwards: whatever has our mark in its environment is killed."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as place:
        homes = dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR", "RAY_TMPDIR", "IPYTHONDIR"), place)
        try:
            with kernel({**homes, "RAY_USAGE_STATS_ENABLED": "0", MARK: mark}) as made:
                began = time.monotonic()
                for code in (peer.start, *(peer.on(worker, "pass") for worker in peer.workers)):
                    made.run(code, patience=plan.start)
                yield Notebook(peer, plan, made, Path(place), time.monotonic() - began)
        finally:
            _kill(mark)


def _kill(mark: str) -> None:
    while left := [process for process in psutil.process_iter() if is_marked(process, mark)]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_GLANCE_SECONDS)


def _group(peer: Peer, plan: Plan, titles: Sequence[str], deeds: Deeds) -> list[tuple[str, str]]:
    """Each title with what its deed has shown."""
    seen = []
    with _notebook(peer, plan) as notebook:
        try:
            for text in deeds(notebook):
                seen.append(text)
        except NotInTime:
            seen.append(f"not within {plan.patience:g} s")
    return list(zip(titles, seen + [NOT_TRIED] * len(titles), strict=False))


def _calls(notebook: Notebook) -> Iterator[str]:
    yield about(notebook.started)
    yield about(statistics.median(notebook.on(2, "pass").seconds for _ in range(notebook.plan.calls)))
    yield from _printed(notebook)
    failed = notebook.on(2, "1 / 0")
    kept = "True" in notebook.run(_KEPT).text
    yield f"{failed.error or 'nothing'}{'' if kept else ', another type'}"
    yield "yes" if failed.error else "no"


def _printed(notebook: Notebook) -> Iterator[str]:
    count = notebook.plan.lines
    cell = notebook.on(2, _PRINTS.format(count)).cell
    lags: dict[str, float] = {}
    right: set[str] = set()

    def all_came(message: Message) -> bool:
        for line in _LINE.finditer(said(message)):
            lags.setdefault(line[1], message.at - float(line[2]))
            right.update([line[1]] if message.cell == cell else [])
        return len(lags) == count

    with contextlib.suppress(NotInTime):  # some lose lines: those that came are counted
        notebook.kernel.wait(all_came, "what a worker prints", notebook.plan.late)
    yield about(statistics.median(lags.values())) if lags else "never"
    yield f"{len(right)} of {count}"


def _stopped(notebook: Notebook) -> Iterator[str]:
    cell, _ = notebook.busy()
    began = time.monotonic()
    notebook.kernel.interrupt()
    yield _end(notebook.end(cell, began))
    yield _after(notebook.on(2, "pass"))


def _killed(notebook: Notebook) -> Iterator[str]:
    cell, pid = notebook.busy()
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    over = notebook.kernel.wait(
        lambda message: message.at >= began and (bool(said(message)) or (message.cell == cell and message.is_idle)),
        "a word on a killed worker", notebook.plan.patience,
    )  # fmt: skip
    yield "nothing is said" if over.is_idle else about(over.at - began)
    yield _end(notebook.end(cell, began))
    words = "".join(said(message) for message in notebook.kernel.messages if message.at >= began)
    yield "yes" if re.search(notebook.peer.called, words) else "no"
    yield _after(notebook.on(1, "pass"))
    yield _again(notebook) if notebook.peer.restart else NO_WAY


def _again(notebook: Notebook) -> str:
    began = time.monotonic()
    restart = notebook.run(notebook.peer.restart)
    called = restart if restart.error else notebook.on(2, "pass")
    return _after(called._replace(began=began))


def _end(ran: Ran) -> str:
    return f"{about(ran.seconds)}, {ran.error or 'no error'}"


def _after(ran: Ran) -> str:
    return _end(ran) if ran.error else about(ran.seconds)


def said(message: Message) -> str:
    """What a message shows, without the lines of the user's own code that a traceback repeats."""
    match message.kind:
        case "stream":
            return message.text
        case "error":
            return f"{message.content['ename']}: {message.content['evalue']}"
        case "display_data" | "update_display_data" | "execute_result":
            return str(message.content["data"].get("text/plain", ""))
    return ""
