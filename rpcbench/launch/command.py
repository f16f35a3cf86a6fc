"""Workers that a command takes to their hosts: "ssh {host} {cmd}", "srun -w {host} -N1 -n1 {cmd}", docker, kubectl.

Guarantees
- The command runs here, in a session of its own and without a shell; `{cmd}` is what it is to run there, which is told
  by standard input which world to join: no command line or environment shows the secret.
- It is guarded: neither it nor the worker outlives `close` or this process, however that ends (see `supervisor`).
- What it writes is the worker's log. Where it ends before the worker has joined, those words and its status are told.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Sequence

from rpcbench.base.conditions import Changes
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.launch import fork_client, supervisor
from rpcbench.launch.base import ExitCallback, ProcessHandle, check_name, log_of, stopped
from rpcbench.launch.fork_client import ForkServerClient
from rpcbench.launch.fork_server import kill_group
from rpcbench.launch.process import ForkServerLease, ended
from rpcbench.transport.run_dir import RunDirectory

_FIELDS = ("cmd", "host", "name", "python")
_END_SECONDS = 1.0
_OWN_SECONDS = 0.5


class CommandLauncher:
    """Starts workers of one cluster, which keeps its files in `run_directory`. See `Launcher` for the methods.

    template: a command; `{cmd}` stands for what it is to run there, `{host}` for one of `hosts` (a sequence, or names
    with commas in between), which workers take in turn: worker1 the first one. `{name}` is the worker's. python: the
    interpreter there, also `{python}`; by default the path of this one. ValueError where these do not fit.
    """

    far = True

    def __init__(
        self, run_directory: RunDirectory, template: str, hosts: str | Sequence[str] = (), python: str = sys.executable
    ) -> None:
        self._hosts = tuple(hosts.replace(",", " ").split() if isinstance(hosts, str) else hosts)
        self._words = _words(template, self._hosts)
        self._python = python
        self._directory = run_directory
        self._maker = os.getpid()
        self._lease = ForkServerLease(run_directory.path, fork_client.take_any, self._have_guarded)
        self._running: dict[int, _Command] = {}
        self._changes = Changes()

    def warm(self) -> None:
        """Have the starter that guards the commands."""
        self._lease.starter()

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """Start the command for a worker.

        Errors: ValueError for a name that no file can have, RpcError where there is no such command, ShutdownError.
        """
        check_name(config.name)
        starter = self._lease.starter()
        command = _Command(config, self._argv(config), self._directory, on_exit)
        handle = command.handle
        self._running[handle.pid] = command
        threading.Thread(target=self._see_to, args=(command,), name=f"rpcbench-{config.name}", daemon=True).start()
        try:
            starter.guard(handle.pid, config.stop_seconds)
            command.tell(supervisor.request(config))
            if self._lease.closed:
                raise ended()
        except BaseException:
            handle.abandon()
            raise
        return handle

    def _argv(self, config: WorldConfig) -> list[str]:
        host = self._hosts[(config.id - 1) % len(self._hosts)] if self._hosts else ""
        command = [self._python, "-P", "-m", "rpcbench.worker", config.name]
        fields = {"cmd": shlex.join(command), "host": host, "name": config.name, "python": self._python}
        return [part for word in self._words for part in (command if word == "{cmd}" else [word.format(**fields)])]

    def _see_to(self, command: _Command) -> None:
        command.wait()
        del self._running[command.handle.pid]
        self._changes.tell()

    def _have_guarded(self, starter: ForkServerClient) -> None:
        for pid, command in self._running.copy().items():
            starter.guard(pid, command.grace)

    def close(self) -> None:
        """End the workers, which have half a second to do so by themselves, and remove the run directory."""
        if os.getpid() != self._maker:
            return
        self._lease.shut()
        try:
            stopped(lambda: [command.handle for command in list(self._running.values())], self._changes, _OWN_SECONDS)
            self._lease.end()
        finally:
            self._directory.remove()


class _Command:
    """A command that runs, from its start to its end. RpcError where it cannot be started."""

    def __init__(
        self, config: WorldConfig, argv: list[str], directory: RunDirectory, on_exit: ExitCallback | None
    ) -> None:
        self.grace = config.stop_seconds
        self.handle = ProcessHandle(
            config.name, log_of(directory.path, config.name, config.incarnation), self._signal, on_exit
        )
        self._telling = threading.Lock()  # what is told has a secret in it: its descriptor is not to become another's
        log = os.open(self.handle.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                argv, bufsize=0, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise RpcError(f"{config.name} could not be launched by {shlex.join(argv)}: {error}") from error
        finally:
            os.close(log)
        self.handle.begin(self._process.pid)

    def tell(self, line: bytes) -> None:
        """Say what to do. One that has ended already tells of that by its end."""
        assert self._process.stdin is not None
        with self._telling, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line)

    def wait(self) -> None:
        """Until it ends."""
        status = self._process.wait()
        kill_group(self.handle.pid)
        self._hang_up()
        # As a command says, in the way of shells, by which signal the worker was ended.
        ended_by = status - 128 if status > 128 and status - 128 in {*signal.Signals} else 0
        self.handle.end(-ended_by if ended_by else status)

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with self._telling:
            self._process.stdin.close()

    def _signal(self, which: int) -> None:
        """The outpost is told, which may be on another host; a command that does not end when it is to is killed."""
        if which not in supervisor.TOLD or self.handle.poll() is not None:
            return
        self.tell(supervisor.TOLD[signal.Signals(which)])
        if which != signal.SIGKILL:
            return
        self._hang_up()
        later = threading.Timer(_END_SECONDS, self._end)
        later.daemon = True
        later.start()

    def _end(self) -> None:
        if self.handle.poll() is None:
            kill_group(self.handle.pid)


def _words(template: str, hosts: Sequence[str]) -> list[str]:
    """The words of the template. ValueError that says what is wrong with it, or with the hosts."""
    try:
        words = shlex.split(template)
        fields = [field for word in words for _, *field in string.Formatter().parse(word) if field[0] is not None]
    except ValueError as error:
        raise ValueError(f"the template {template!r} is no command: {error}") from None
    names = {name for name, *_ in fields}
    if wrong := [name for name, how, conversion in fields if name not in _FIELDS or how or conversion]:
        raise ValueError(f"the template {template!r} has an unknown field {{{wrong[0]}}}; there are {_listed()}")
    if "cmd" not in names:
        raise ValueError(f"the template {template!r} has no {{cmd}}, which is what starts the worker there")
    if ("host" in names) != bool(hosts):
        told = "names a {host}: pass hosts=" if not hosts else f"has no {{host}}, so what are the hosts {hosts} for?"
        raise ValueError(f"the template {template!r} {told}")
    if bad := [host for host in hosts if not host or host.startswith("-") or any(map(str.isspace, host))]:
        raise ValueError(f"{bad[0]!r} is no name of a host")
    return words


def _listed() -> str:
    return ", ".join(f"{{{name}}}" for name in _FIELDS)
