"""A pair of processes seen from the one that compares: start, ask, freeze, thaw, end.

The pair is a process group: one signal stops both, and Ctrl-C reaches us before them. They end with us, stopped or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rpcbench.base.errors import RpcError
from rpcbench.bench.figures import Batch
from rpcbench.bench.hosts import Host
from rpcbench.transport import run_dir

_REPLY_SECONDS = 120.0
_END_SECONDS = 5.0
_STDERR = 2
_PORT = 29500
_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}


class BenchError(RpcError):
    """One side could not do the work; its own traceback is the text."""


def launch(
    module: str,
    *args: str,
    stdout: int = _STDERR,
    group: int = 0,
    descriptors: tuple[int, ...] = (),
    before: Sequence[str] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[str]:
    """`python -m module args…` in the process group `group`, or (0) in one of its own; `before` goes before it."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", module, *args],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env={**os.environ, **_QUIET, **env},
        process_group=group,
        pass_fds=descriptors,
        text=True,
    )


class Side(NamedTuple):
    """Who is measured: what errors call it, its module (see `sides`), and where its two processes are."""

    name: str
    api: str
    hosts: tuple[Host, Host] | None = None


class Pair:
    """The driver and the worker of one side, which meet at `url`."""

    def __init__(self, side: Side, url: str, env: Mapping[str, str]) -> None:
        self.name, self.api = side.name, side.api
        here, there = (host.command() for host in side.hosts) if side.hosts else ([], [])
        ours, theirs = socket.socketpair()
        ours.settimeout(_REPLY_SECONDS)
        member, given = "rpcbench.bench.member", theirs.fileno()
        with theirs:
            driver = launch(member, side.api, "0", url, str(given), descriptors=(given,), before=here, env=env)
        worker = launch(member, side.api, "1", url, group=driver.pid, before=there, env=env)
        self._processes = (driver, worker)
        self._orders = ours
        self._replies = ours.makefile(encoding="utf-8")

    def ready(self) -> None:
        """Wait until the two have met."""
        self._exchange("")

    def ask(self, workload: str, seed: str, budget: float) -> Batch:
        """One batch of about `budget` seconds."""
        order = {"workload": workload, "seed": seed, "budget": budget}
        reply = self._exchange(json.dumps(order) + "\n")
        return Batch(reply["seconds"], reply["cpu"])

    def _exchange(self, order: str) -> dict[str, Any]:
        try:
            self._orders.sendall(order.encode())
            line = self._replies.readline()
        except TimeoutError:
            raise BenchError(f"{self.name}: no reply within {_REPLY_SECONDS:.0f} s") from None
        except ConnectionError:
            line = ""
        if not line:
            raise BenchError(f"{self.name}: the driver process ended, see its output above")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise BenchError(f"{self.name}:\n{reply['error']}")
        return reply

    def freeze(self) -> None:
        """Stop both; returns when they stand still."""
        self._signal(signal.SIGSTOP)
        for process in self._processes:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # both ended: the next reply says so
            os.killpg(self._processes[0].pid, number)

    def close(self) -> None:
        """End both, politely first."""
        self.thaw()
        self._replies.close()
        self._orders.close()
        try:
            for process in self._processes:
                process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()


@contextlib.contextmanager
def pairs(sides: Sequence[Side]) -> Iterator[list[Pair]]:
    """One pair for each side, met and frozen."""
    with tempfile.TemporaryDirectory(prefix="rpcbench-bench-") as directory, contextlib.ExitStack() as stack:
        run_dir.make_secret(Path(directory, "secret"))
        started = []
        for number, side in enumerate(sides):
            url = f"tcp://{side.hosts[0].address}:{_PORT + number}" if side.hosts else f"file://{directory}/{side.name}"
            env = {run_dir.SECRET_VARIABLE: f"{directory}/secret"} if side.hosts else {}
            started.append(Pair(side, url, env))
            stack.callback(started[-1].close)
        for pair in started:
            pair.ready()
            pair.freeze()
        yield started
