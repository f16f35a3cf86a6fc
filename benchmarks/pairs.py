"""A pair of processes, driver and worker, as the comparison sees it: start, request a batch, freeze, thaw, end.

- A pair is a process group, so one signal stops both, and Ctrl-C reaches the comparison before the pair. Both processes
  end with the comparison, even while they are stopped.
- Two hosts are network namespaces joined by one cable; made and removed here. That needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.rows import Batch
from rpcbench.base.errors import RpcError
from rpcbench.transport import run_dir

_SECONDS = 10.0


class Host(NamedTuple):
    """A network namespace and its address on the cable."""

    name: str
    address: str

    def command(self) -> list[str]:
        """What to put before a command to run it there."""
        return ["ip", "netns", "exec", self.name]


def obstacle() -> str:
    """Why two hosts cannot be made; empty if they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    probe = f"rpcbench-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """They are there inside the `with`."""
    one, other = (Host(f"rpcbench-{os.getpid()}-{number}", f"10.231.8.{number}") for number in (1, 2))
    with contextlib.ExitStack() as made:
        for host in (one, other):
            _ip("netns", "add", host.name)
            made.callback(_ip, "netns", "del", host.name)
        _ip("link", "add", "e0", "netns", one.name, "type", "veth", "peer", "name", "e0", "netns", other.name)
        for host in (one, other):
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "e0")
            _ip("-n", host.name, "link", "set", "e0", "up")
        yield one, other


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_SECONDS)


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
        member, given = "benchmarks.member", theirs.fileno()
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
        reply = self.send_order({"workload": workload, "seed": seed, "budget": budget})
        return Batch(reply["seconds"], reply["cpu"])

    def send_order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have the driver do as ordered, and return its reply. BenchError where it cannot."""
        return self._exchange(json.dumps(order) + "\n")

    @property
    def pids(self) -> list[int]:
        """Of the driver and of the worker."""
        return [process.pid for process in self._processes]

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
def pairs(sides: Sequence[Side], more_env: Mapping[str, str] = MappingProxyType({})) -> Iterator[list[Pair]]:
    """One pair for each side, met and frozen; `more_env` is added to the environment of all."""
    with tempfile.TemporaryDirectory(prefix="rpcbench-bench-") as directory, contextlib.ExitStack() as stack:
        run_dir.make_secret(Path(directory, "secret"))
        started = []
        for number, side in enumerate(sides):
            url = f"tcp://{side.hosts[0].address}:{_PORT + number}" if side.hosts else f"file://{directory}/{side.name}"
            secret = {run_dir.SECRET_VARIABLE: f"{directory}/secret"} if side.hosts else {}
            started.append(Pair(side, url, {**secret, **more_env}))
            stack.callback(started[-1].close)
        for pair in started:
            pair.ready()
            pair.freeze()
        yield started
