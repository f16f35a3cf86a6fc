"""A worker that torchrun has started of itself, in a world that a notebook joins: `torchrun … -m rpcbench.worker`.

The worker of rank 0 founds the world and leads it, the others come to it, and a notebook is its member 0 while that
stays. They meet as scripts do (`rpc.init`), never in torch's store. Guarantees
- It stays when a notebook leaves. It ends with torchrun, by its signals or (Linux) with its death, however busy its
  main thread is, and a notebook that is there hears why; it ends with its world, too, and then with an error.
- The variables that torchrun has set stay as they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rpcbench.base.conditions import Flag
from rpcbench.base.config import DEFAULT_THREADS, DEFAULT_TIMEOUT, JOIN_SECONDS, STOP_SECONDS
from rpcbench.base.errors import IncompleteWorldError, RpcError, counted
from rpcbench.cells.runner import CellRunner
from rpcbench.cells.worker_main import obey
from rpcbench.launch.worker_bootstrap import end_with, settle_torch
from rpcbench.rpc.init import join, meet_at
from rpcbench.runtime.agent import Agent
from rpcbench.transport import run_dir
from rpcbench.wire.messages import Message, Notice

ENDS, KILL = "torchrun ends", "kill"
"""Notices: this worker tells a notebook why it ends; it is to end at once, as by a crash."""
_NEEDED = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_INTERRUPT = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""What interrupts a cell: SIGINT is torchrun's, and a handler cannot see who has sent it."""
_SAYING_SECONDS = 1.0


def is_a_rank() -> bool:
    """Whether torchrun has started this process."""
    return all(name in os.environ for name in _NEEDED)


def main() -> int:
    """Found or join the world of torchrun's ranks and work in it; the exit status. RpcError where that cannot be."""
    if not is_a_rank():
        raise RpcError(
            "python -m rpcbench.worker is started by torchrun: torchrun --nproc-per-node 2 -m rpcbench.worker; "
            "or by a launcher, with the name of a worker"
        )
    end_with(os.getppid(), signal.SIGTERM)
    settle_torch(os.environ)
    rank, url = int(os.environ["RANK"]), meeting_place()
    config = meet_at(f"worker{rank + 1}", url, rank + 1, None, DEFAULT_TIMEOUT, DEFAULT_THREADS)
    agent = join(config, rank == 0, time.monotonic() + JOIN_SECONDS, parts=[CellRunner, obey, _die_when_told])
    runner = agent.part(CellRunner)
    ending = Ending(agent, runner)
    if rank == 0:
        _invite(agent, url)
    runner.serve()
    agent.shutdown(graceful=False)
    return ending.status


def meeting_place() -> str:
    """Where the ranks meet, and a notebook them. On one host that is a name only, else rank 0 listens there.

    torchrun's own port is taken by its store: without RPCBENCH_MASTER_PORT it is the one after that.
    """
    alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] and run_dir.load_secret() is None
    host = "localhost" if alone else os.environ["MASTER_ADDR"]
    return f"tcp://{host}:{os.environ.get('RPCBENCH_MASTER_PORT') or int(os.environ['MASTER_PORT']) + 1}"


def size_of_world() -> int:
    """Called on a worker: how many torchrun has started. RuntimeError where it is none of its."""
    if not is_a_rank():
        raise RuntimeError("no worker that torchrun has started: `torchrun --nproc-per-node 2 -m rpcbench.worker` does")
    return int(os.environ["WORLD_SIZE"])


def _invite(agent: Agent, url: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    if not agent.roster.wait_until(lambda: sum(info.id > 0 for info in agent.members()) == size, JOIN_SECONDS):
        raise IncompleteWorldError(
            f"waited {JOIN_SECONDS:g} s for {counted(size, 'rank')}, but {agent.roster.census()}"
        )
    workers = f"{counted(size, 'worker')} wait{'s' if size == 1 else ''}"
    sys.stdout.write(f'{workers} for a notebook: %cluster join {url} (in Python: rpcbench.Cluster.join("{url}"))\n')
    sys.stdout.flush()


def _die_when_told(agent: Agent) -> None:
    agent.on_notice(KILL, lambda source, _: os.kill(os.getpid(), signal.SIGKILL))


class Ending:
    """Ends the process when torchrun says so, or the world is over. Made on the main thread."""

    def __init__(self, agent: Agent, runner: CellRunner) -> None:
        self._agent, self._runner = agent, runner
        self._leaves = False
        self.status = 1
        self._signals, self._told = socket.socketpair()
        self._told.setblocking(False)
        signal.set_wakeup_fd(self._told.fileno())  # the thread hears of it also while the main thread is in C
        before = {number: signal.signal(number, self._hear) or signal.SIG_DFL for number in _SIGNALS}
        _keep_from_forks(before)
        signal.signal(_INTERRUPT, signal.SIG_IGN)  # before cells run, and after, it would end the process
        runner.interrupted_by = _INTERRUPT
        for wait in (self._when_told, self._when_over):
            threading.Thread(target=wait, name="rpcbench-end", daemon=True).start()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # so it has heard enough
            self._told.send(bytes([number]))  # again: a loop of a cell may have taken the descriptor

    def _when_told(self) -> None:
        """Without a goodbye: the lead is not to pass on, the world ends here."""
        while (number := self._signals.recv(1)[0]) not in _SIGNALS:
            pass
        self._leaves = True
        try:
            self._say(f"torchrun has ended it ({signal.Signals(number).name})")
            self.status = 128 + number
            self._agent.stop(patience=0.0)
            self._runner.stop()
            time.sleep(STOP_SECONDS)  # until the main thread has ended, or is given up
            sys.stdout.flush()
        finally:
            os._exit(128 + number)

    def _say(self, why: str) -> None:
        if any(info.id == 0 for info in self._agent.members()):
            said = Flag()
            self._agent.notify(0, ENDS, why)
            self._agent.machine.feed(lambda node: node.flush(said.set, _is_notice))
            said.wait(_SAYING_SECONDS)

    def _when_over(self) -> None:
        self._agent.closing.wait()
        if self._leaves:
            return
        sys.stderr.write(f"{self._agent.name}: the worker of rank 0 has gone, and the world with it\n")
        self._runner.stop()
        time.sleep(STOP_SECONDS)  # until the main thread has ended, or is given up
        os._exit(1)


def _keep_from_forks(handlers: Mapping[signal.Signals, Any]) -> None:
    """What a cell forks has these handlers, from its first moment: its signals are its own, and not heard here."""

    def become_free() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        hear_again()

    def hear_again() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, handlers),
        after_in_parent=hear_again,
        after_in_child=become_free,
    )


def _is_notice(message: Message) -> bool:
    return isinstance(message, Notice)
