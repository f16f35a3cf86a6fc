"""A worker that a user started with torchrun, in a world that a notebook joins: `torchrun … -m rpcbench.worker`.

The worker of rank 0 founds the world and leads it, the others join it, and a notebook is its member 0 while it is
attached. Their rendezvous is that of scripts (`rpc.init`), never torch's store.

Guarantees
- A worker stays when a notebook leaves. It ends with torchrun, by its signals or (Linux) when torchrun ends, even with
  a busy main thread, and reports the reason to an attached notebook. It ends, with an error, when its world ends.
- The environment variables that torchrun set are not changed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Mapping
from types import FrameType
from typing import Any

from rpcbench.base.conditions import Event
from rpcbench.base.config import DEFAULT_THREADS, DEFAULT_TIMEOUT, JOIN_SECONDS, RANK_NAMES, STOP_SECONDS
from rpcbench.base.errors import IncompleteWorldError, RpcError, count_noun
from rpcbench.cells.runner import CellRunner
from rpcbench.launch.ranks import choose_interface, names_of
from rpcbench.launch.worker_bootstrap import configure_torch, end_with_parent
from rpcbench.launch.worker_main import register_handlers
from rpcbench.rpc.init import join_open_world, resolve_config
from rpcbench.runtime.agent import Agent
from rpcbench.transport import run_dir
from rpcbench.wire.messages import Notice

ENDS, KILL = "torchrun ends", "kill"
"""Notices: to the notebook, why this worker ends; from the notebook, to end at once, as in a crash."""
_NEEDED = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_INTERRUPT = signal.SIGRTMIN + 3 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""The signal that interrupts a cell: torchrun sends SIGINT to end its ranks, and a handler cannot see the sender."""
_REASON_SECONDS = 1.0  # for the notebook to acknowledge the reason


def is_torchrun_rank() -> bool:
    """Return whether torchrun started this process."""
    return all(name in os.environ for name in _NEEDED)


def main() -> int:
    """Found or join the world of torchrun's ranks, work in it, and return the exit status. RpcError if that fails."""
    if not is_torchrun_rank():
        raise RpcError(
            "python -m rpcbench.worker is started by torchrun: torchrun --nproc-per-node 2 -m rpcbench.worker; "
            "or by a launcher, with the name of a worker"
        )
    end_with_parent(os.getppid(), signal.SIGTERM)
    configure_torch(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")  # for cells: without the names of this program
    rank, url = int(os.environ["RANK"]), rendezvous_url()
    os.environ[RANK_NAMES] = names_of(int(os.environ["WORLD_SIZE"]))
    config = resolve_config(f"worker{rank + 1}", url, rank + 1, None, DEFAULT_TIMEOUT, DEFAULT_THREADS)
    agent = join_open_world(
        config, rank == 0, time.monotonic() + JOIN_SECONDS, parts=[CellRunner, register_handlers, _register_kill]
    )
    choose_interface()
    runner = agent.part(CellRunner)
    ending = TorchrunShutdown(agent, runner)
    if rank == 0:
        _print_invitation(agent, url)
    runner.serve_cells()
    agent.shutdown(graceful=False)
    return ending.status


def rendezvous_url() -> str:
    """Return the URL of the rendezvous: a mere name on one host, else rank 0 listens there. The default port is the one
    after MASTER_PORT, which torchrun's store occupies."""
    alone = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] and run_dir.load_secret() is None
    host = "localhost" if alone else os.environ["MASTER_ADDR"]
    return f"tcp://{host}:{os.environ.get('RPCBENCH_MASTER_PORT') or int(os.environ['MASTER_PORT']) + 1}"


def torchrun_world_size() -> int:
    """Return the number of ranks that torchrun started. Called on a worker; RuntimeError if it is not a rank."""
    if not is_torchrun_rank():
        raise RuntimeError("torchrun did not start this worker; use `torchrun --nproc-per-node 2 -m rpcbench.worker`")
    return int(os.environ["WORLD_SIZE"])


def _print_invitation(agent: Agent, url: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    if not agent.links.members.wait_until_reached(
        lambda: sum(info.id > 0 for info in agent.members()) == size, JOIN_SECONDS
    ):
        raise IncompleteWorldError(
            f"waited {JOIN_SECONDS:g} s for {count_noun(size, 'rank')}, but {agent.links.members.describe_members()}"
        )
    workers = f"{count_noun(size, 'worker')} wait{'s' if size == 1 else ''}"
    sys.stdout.write(f'{workers} for a notebook: %cluster join {url} (in Python: rpcbench.Cluster.join("{url}"))\n')
    sys.stdout.flush()


def _register_kill(agent: Agent) -> None:
    agent.on_notice(KILL, lambda source, _: os.kill(os.getpid(), signal.SIGKILL))


class TorchrunShutdown:
    """The end of this process, at a signal of torchrun or with its world. Made on the main thread."""

    def __init__(self, agent: Agent, runner: CellRunner) -> None:
        self._agent, self._runner = agent, runner
        self._leaves = False  # torchrun ends this process
        self.status = 1  # unless a signal ends it
        self._signals, self._wakeup_socket = socket.socketpair()
        self._wakeup_socket.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_socket.fileno())  # written at once, even while the main thread runs C code
        before = {number: signal.signal(number, self._signal_received) or signal.SIG_DFL for number in _SIGNALS}
        _keep_from_forks(before)
        signal.signal(_INTERRUPT, signal.SIG_IGN)  # while no cell runs its default action would end the process
        runner.interrupted_by = _INTERRUPT
        for wait in (self._end_at_signal, self._end_with_world):
            threading.Thread(target=wait, name="rpcbench-end", daemon=True).start()

    def _signal_received(self, number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):  # full: enough signals are waiting
            # again: an event loop in a cell may have replaced the wake-up descriptor
            self._wakeup_socket.send(bytes([number]))

    def _end_at_signal(self) -> None:
        """Wait for a signal of torchrun, and end the process."""
        while (number := self._signals.recv(1)[0]) not in _SIGNALS:
            pass
        self._leaves = True
        try:
            self._send_reason(f"torchrun has ended it ({signal.Signals(number).name})")
            self.status = 128 + number
            self._agent.stop(patience=0.0)  # not a leave: no other rank is to become leader of a world that ends
            self._runner.stop_serving()
            time.sleep(STOP_SECONDS)  # the main thread ends the process, or is given up
            sys.stdout.flush()
        finally:
            os._exit(128 + number)

    def _send_reason(self, why: str) -> None:
        """Send the reason to an attached notebook, and wait until it is acknowledged."""
        if any(info.id == 0 for info in self._agent.members()):
            said = Event()
            self._agent.notify(0, ENDS, why)
            self._agent.machine.feed_event(
                lambda node: node.request_flush(said.set, lambda message: isinstance(message, Notice))
            )
            said.wait(_REASON_SECONDS)

    def _end_with_world(self) -> None:
        self._agent.links.closing.wait()
        if self._leaves:
            return  # the other thread ends the process
        sys.stderr.write(f"{self._agent.name}: the worker of rank 0 has ended, and the world with it\n")
        self._runner.stop_serving()
        time.sleep(STOP_SECONDS)  # the main thread ends the process, or is given up
        os._exit(1)


def _keep_from_forks(handlers: Mapping[signal.Signals, Any]) -> None:
    """Restore `handlers` in each process that a cell forks: its signals must not end this worker."""

    def become_free() -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        hear_again()

    def hear_again() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)

    # Blocked during the fork, so that the child has its own handlers at the first signal.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, handlers),
        after_in_parent=hear_again,
        after_in_child=become_free,
    )
