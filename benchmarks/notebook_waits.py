"""`python -m benchmarks --notebook`: what a user of the notebook waits for, measured through a real kernel.

Each figure is the worst of its tries, but for the median of empty cells. Nothing of ours runs in this process: it sees
what a front end sees, and afterwards the processes and files of the machine.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import re
import signal
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.table import Table

from benchmarks.kernel_driver import PATIENCE, Kernel, Message, kernel
from benchmarks.pairs import BenchError

MARK = "RPCBENCH_BENCH_MARK"
KINDS = ("process", "kernel")
_LOOP = "import time\nprint('ready')\nwhile True:\n    time.sleep(0.01)"
_TOKEN = re.compile(r"<(\d+)\.(\d+)>")
_GLANCE_SECONDS = 0.02


class Plan(NamedTuple):
    """How often each thing is tried, and how many cells are mixed."""

    passes: int = 200
    prints: int = 40
    tries: int = 5
    cells: int = 200


QUICK = Plan(passes=5, prints=5, tries=1, cells=12)


class Bound(NamedTuple):
    """What was measured, and the most it may be: seconds, or things that went wrong."""

    title: str
    most: float
    measured: float
    counts: bool = False

    @property
    def ok(self) -> bool:
        return self.measured <= self.most

    def words(self, value: float) -> str:
        if self.counts:
            return f"{value:.0f}"
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def measure(plan: Plan, seed: int, kind: str = KINDS[0]) -> Iterator[Bound]:
    """All bounds, each as soon as it is known, for workers of that kind. BenchError where something does not do what it
    should at all."""
    with tempfile.TemporaryDirectory(prefix="rb-") as runtime:
        mark, before = uuid.uuid4().hex, _shared_memory()
        with kernel({"XDG_RUNTIME_DIR": runtime, MARK: mark}) as notebook:
            yield from _starts(notebook, kind)
            notebook.run("%%remote all\nimport time")
            yield Bound("empty cell on a worker, median", 0.02, _passes(notebook, plan.passes))
            yield Bound("print on a worker until it is shown", 0.05, _lag(notebook, plan.prints))
            yield Bound("interrupt until the prompt is back", 0.5, max(_stop(notebook) for _ in range(plan.tries)))
            yield Bound(
                "interrupt of code that looks at no signal", 0.5, max(_stop_deaf(notebook) for _ in range(plan.tries))
            )
            told, again = zip(*(_death(notebook) for _ in range(plan.tries)), strict=True)
            yield Bound("SIGKILL of a worker until it is told", 1.0, max(told))
            yield Bound("restart of a worker", 4.0 if kind == "kernel" else 2.0, max(again))
            sleeps = max(notebook.run("%%remote all\ntime.sleep(1)").seconds for _ in range(plan.tries))
            yield Bound("two sleeps of 1 s at once", 1.3, sleeps)
            wrong, lost = _mixed(notebook, plan.cells, random.Random(seed))
            yield Bound(f"lines in a wrong cell, of {plan.cells} cells", 0, wrong, counts=True)
            yield Bound(f"lines lost, of {plan.cells} cells", 0, lost, counts=True)
            yield Bound("kernel killed until nothing is left", 3.0, _end(notebook, mark, Path(runtime), before))


def _starts(notebook: Kernel, kind: str) -> Iterator[Bound]:
    """The first result, when torch has been imported here; then again, with a starter that is warm. Kernels are not
    forked from it."""
    cold, warm = (4.0, 4.0) if kind == "kernel" else (2.5, 0.5)
    start = f"%cluster start 2 --kind {kind}"
    notebook.run("import torch")
    yield Bound("first result, cold", cold, _first_result(notebook, f"%load_ext rpcbench\n{start}"))
    notebook.run("%cluster stop")
    yield Bound("first result, with a warm starter", warm, _first_result(notebook, start))


def _first_result(notebook: Kernel, start: str) -> float:
    began = time.monotonic()
    notebook.run(start)
    return notebook.run("%%remote worker1\nimport torch\ntorch.ones(1)").result.at - began


def _passes(notebook: Kernel, count: int) -> float:
    return statistics.median(notebook.run("%%remote worker1\npass").seconds for _ in range(count))


def _lag(notebook: Kernel, count: int) -> float:
    """A worker shares our clock: it prints what that says."""
    code = f"%%remote worker1\nfor _ in range({count}):\n    print(time.monotonic())\n    time.sleep(0.05)"
    ran = notebook.run(code)
    lags = [message.at - float(line) for message in ran.messages for line in message.text.split()]
    if len(lags) != count:
        raise BenchError(f"of {count} printed lines {len(lags)} were shown")
    return max(lags)


def _running(notebook: Kernel, worker: str) -> str:
    """A cell that runs until somebody stops it."""
    cell = notebook.send(f"%%remote {worker}\n{_LOOP}")
    notebook.wait(lambda message: message.cell == cell and "ready" in message.text, f"a cell on {worker}")
    return cell


def _stop(notebook: Kernel) -> float:
    cell = _running(notebook, "worker1")
    began = time.monotonic()
    notebook.interrupt()
    ran = notebook.end(cell, began)
    if ran.error != "KeyboardInterrupt" or notebook.run("%%remote worker1\nprint('fine')").text != "fine\n":
        raise BenchError(f"the stop button did not interrupt the cell alone: {ran.error}\n{ran.traceback}")
    return ran.seconds


def _stop_deaf(notebook: Kernel) -> float:
    """A loop in C that leaves no other thread a turn: its worker has to be started again."""
    with tempfile.TemporaryDirectory() as directory:
        begun = Path(directory) / "begun"
        # The loop itself says that it runs: an interrupt before it would be heard.
        loop = f"itertools.chain(map(os.mkdir, [{str(begun)!r}]), itertools.repeat(None))"
        code = f"import collections, itertools, os\ncollections.deque({loop}, maxlen=0)"
        cell = notebook.send(f"%%remote worker1\n{code}")
        while not begun.exists():
            time.sleep(0.01)
        began = time.monotonic()
        notebook.interrupt()
        ran = notebook.end(cell, began)
    if ran.error != "KeyboardInterrupt" or "restart('worker1')" not in ran.traceback:
        raise BenchError(f"the stop button did not give the prompt back: {ran.error}\n{ran.traceback}")
    notebook.run("%cluster restart worker1")
    notebook.run("%%remote worker1\nimport time")
    return ran.seconds


def _death(notebook: Kernel) -> tuple[float, float]:
    """Seconds until the death of a worker is told, and until it is there again."""
    pid = int(notebook.run("cluster.pid('worker2')").result.content["data"]["text/plain"])
    cell = _running(notebook, "worker2")
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    ran = notebook.end(cell, began)
    if ran.error != "WorkerLostError" or "worker2" not in ran.traceback:
        raise BenchError(f"the death of worker2 was not told: {ran.error}\n{ran.traceback}")
    again = notebook.run("%cluster restart worker2").seconds
    notebook.run("%%remote worker2\nimport time")
    return ran.seconds, again


def _mixed(notebook: Kernel, count: int, draw: random.Random) -> tuple[int, int]:
    """Lines in a wrong cell and lines lost, of so many cells on workers, some of which run beside the others."""
    wanted: collections.Counter[tuple[str, str]] = collections.Counter()  # by cell and line
    notebook.run("handles = []")
    for number in range(count):
        where, beside = draw.choice(["worker1", "worker2", "all"]), draw.random() < 0.3
        lines = [f"<{number}.{each}>" for each in range(draw.randint(1, 4))]
        rests = [f"time.sleep({draw.uniform(0, 0.02):.4f})" for _ in lines]
        body = "\n".join(f"print({line!r})\n{rest}" for line, rest in zip(lines, rests, strict=True))
        ran = notebook.run(f"%%remote {where}{' --async' if beside else ''}\n{body}")
        wanted.update({(ran.cell, line): 2 if where == "all" else 1 for line in lines})
        if beside:
            notebook.run("handles.append(_)")
    notebook.run("for handle in handles:\n    handle.wait()")
    found = collections.Counter(_lines(notebook.messages))
    return (found - wanted).total(), (wanted - found).total()


def _lines(messages: list[Message]) -> Iterator[tuple[str, str]]:
    for message in messages:
        for line in _TOKEN.finditer(message.text):
            yield message.cell, line[0]


def _end(notebook: Kernel, mark: str, runtime: Path, before: set[str]) -> float:
    """Seconds until nothing of a killed kernel is left. BenchError if something stays for good."""
    notebook.run("big = cluster.rpc_sync('worker1', torch.ones, (1 << 22,))")
    if len(_left(mark, runtime, before)) < 3:
        raise BenchError("a kernel with two workers cannot be seen here")
    began = time.monotonic()
    notebook.kill()
    while left := _left(mark, runtime, before):
        if time.monotonic() - began > PATIENCE:
            raise BenchError(f"what a killed kernel left behind: {', '.join(left)}")
        time.sleep(_GLANCE_SECONDS)  # nothing announces the end of a process that is not our child
    return time.monotonic() - began


def _left(mark: str, runtime: Path, before: set[str]) -> list[str]:
    """Processes, sockets and shared memory of the kernel."""
    walk = os.walk(runtime)  # unlike `Path.rglob`, it minds no directory that goes meanwhile
    return [
        *(f"process {process.pid}" for process in psutil.process_iter() if is_marked(process, mark)),
        *(f"socket {path}" for top, _, files in walk for name in files if (path := Path(top, name)).is_socket()),
        *(f"shared memory {name}" for name in _shared_memory() - before),
    ]


def is_marked(process: psutil.Process, mark: str) -> bool:
    """Whether a process runs that was started with this mark, or by one that was."""
    with contextlib.suppress(psutil.Error):
        return bool(process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _shared_memory() -> set[str]:
    place = Path("/dev/shm")
    return {path.name for path in place.iterdir() if "rpcbench" in path.name} if place.is_dir() else set()


def as_table(bounds: list[Bound]) -> Table:
    """What was measured, beside what it may be."""
    table = Table(title="through a real kernel; the worst of several tries, but for the median")
    for heading in ("bound", "at most", "measured", "ok"):
        table.add_column(heading, justify="left" if heading == "bound" else "right")
    for bound in bounds:
        table.add_row(bound.title, bound.words(bound.most), bound.words(bound.measured), "✓" if bound.ok else "✗")
    return table


def as_values(bounds: list[Bound], seed: int) -> dict[str, Any]:
    """For programs: seconds, or counts."""
    rows = {bound.title: {"most": bound.most, "measured": bound.measured, "ok": bound.ok} for bound in bounds}
    return {"seed": seed, "bounds": rows}
