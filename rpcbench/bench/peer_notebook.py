"""A notebook in which two workers of some library wait, what is asked of them, and the end of all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from rpcbench.bench.driver import OPENED, Kernel, Message, NotInTime, Ran, kernel
from rpcbench.bench.notebook import MARK, is_marked
from rpcbench.bench.pair import BenchError
from rpcbench.bench.peer_cells import Peer

_BUSY = """import os, pathlib, time
time.sleep(0.5)
new = pathlib.Path({file!r} + '.new')
new.write_text(str(os.getpid()))
new.rename({file!r})
for _ in range({count}):
    time.sleep(0.01)"""
_GLANCE_SECONDS = 0.02


class Plan(NamedTuple):
    """How often, how many, and how many seconds."""

    calls: int = 20
    lines: int = 20
    busy: float = 10.0  # seconds that a call lasts which nobody stops
    patience: float = 20.0
    late: float = 3.0  # how long a printed line may come after its cell
    start: float = 60.0
    losses: int = 3  # so many cells may get lost at the start


QUICK = Plan(calls=3, lines=3)


class Notebook(NamedTuple):
    """A kernel in which two workers wait."""

    peer: Peer
    plan: Plan
    kernel: Kernel
    place: Path
    started: float = 0.0  # seconds until both have made a tensor
    lost: int = 0  # cells that were to make one, and neither did nor failed

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
        body = _BUSY.format(file=str(file), count=int(self.plan.busy * 100))
        cell = self.kernel.send(self.peer.on(self.peer.workers[1], body))
        deadline = time.monotonic() + self.plan.patience
        while not file.exists():
            if time.monotonic() > deadline:
                raise NotInTime(f"nothing ran on {self.peer.workers[1]} in {self.plan.patience:g} s")
            time.sleep(_GLANCE_SECONDS)  # not all of these libraries show at once what a worker prints
        return cell, int(file.read_text())


@contextmanager
def notebook(peer: Peer, plan: Plan) -> Iterator[Notebook]:
    """No process of it is left afterwards: whatever has our mark in its environment is killed."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True) as place:
        began = time.monotonic()
        with _kernel(peer, Path(place), mark) as made:
            try:
                if peer.extension:
                    made.open(peer.extension.comm)  # its kernel has started the workers by now
                else:
                    made.run("import torch")
                    began = time.monotonic()
                yield _started(Notebook(peer, plan, made, Path(place)), began)
            finally:
                _kill(mark)


def _kernel(peer: Peer, place: Path, mark: str) -> AbstractContextManager[Kernel]:
    homes = dict.fromkeys(("XDG_RUNTIME_DIR", "TMPDIR", "RAY_TMPDIR", "IPYTHONDIR"), str(place))
    # As in an activated environment: some start their workers by the name `python`.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environ = {**homes, "PATH": path, "RAY_USAGE_STATS_ENABLED": "0", MARK: mark}
    if not peer.extension:
        return kernel(environ)
    return kernel({**environ, **peer.extension.environ}, peer.extension.module)


def _started(user: Notebook, began: float) -> Notebook:
    """Both workers have made a tensor. BenchError where one cannot."""
    peer, lost = user.peer, 0
    if peer.start:
        user.kernel.run(peer.start, patience=user.plan.start)
    for worker in peer.workers:
        while not _shows_tensor(user.kernel.run(peer.on(worker, peer.first), patience=user.plan.start)):
            lost += 1
            if lost > user.plan.losses:
                raise BenchError(f"no tensor was made on {worker}, and no error told why; such cells: {lost}")
    return user._replace(started=time.monotonic() - began, lost=lost)


def _shows_tensor(ran: Ran) -> bool:
    return any("tensor(" in said(message) for message in ran.messages)


def _kill(mark: str) -> None:
    """All but the trackers of multiprocessing: they end after the others and remove what those have left."""
    while left := [process for process in psutil.process_iter() if is_marked(process, mark)]:
        for process in left:
            with contextlib.suppress(psutil.Error):  # it has gone by itself
                if not any("resource_tracker" in word for word in process.cmdline()):
                    process.kill()
        psutil.wait_procs(left, timeout=_GLANCE_SECONDS)


def said(message: Message) -> str:
    """What a message shows, without the lines of the user's own code that a traceback repeats."""
    match message.kind:
        case "stream":
            return message.text
        case "error":
            return f"{message.content['ename']}: {message.content['evalue']}"
        case "display_data" | "update_display_data" | "execute_result":
            return str(message.content["data"].get("text/plain", ""))
        case "comm_msg" if message.content["comm_id"] == OPENED:
            return json.dumps(message.content["data"], ensure_ascii=False)
    return ""
