"""The launcher "command": a command starts each worker on its host, as "ssh {host} {cmd}", srun, docker or kubectl.

Guarantees
- The command runs here, in a session of its own and without a shell. `{cmd}` is the command for the other host, which
  reads on standard input which world to join: no command line or environment shows the secret.
- The command is guarded: neither it nor the worker outlives `close` or this process (see `supervisor`).
- Its output is the worker's log. If it ends before the worker has joined, the error has that output and its status.
- A command that is given up is asked to end (SIGTERM), so that it can withdraw its request to a queue, and killed if
  it does not.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rpcbench.base.conditions import Condition
from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import RpcError
from rpcbench.base.ids import check_name
from rpcbench.cells.worker_log import log_path, open_private
from rpcbench.launch import supervisor
from rpcbench.launch.base import ExitCallback, ProcessHandle, decode_shell_status, wait_or_terminate
from rpcbench.launch.fork_client import ForkServerClient
from rpcbench.launch.fork_server import kill_group
from rpcbench.launch.process import OWN_SECONDS, ForkServerLauncher, launcher_closed_error
from rpcbench.transport.run_dir import RunDirectory

_FIELDS = ("cmd", "host", "name", "python")  # of a template
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")
_END_SECONDS = 1.0  # for a command to end after its worker was to be killed; then it gets SIGTERM,
_WITHDRAW_SECONDS = 2.0  # and this long after that SIGKILL
_CONNECTION_LOST = 255  # the exit status of ssh itself


class CommandLauncher(ForkServerLauncher):
    """A launcher of workers by a command. For the methods see `Launcher`.

    Args:
        run_directory: Of the cluster's files; `close` removes it.
        template: The command, with the fields `{cmd}`, the command to run on the other host; `{host}`, one of `hosts`;
            `{name}`, the worker's name; and `{python}`.
        hosts: A sequence, or names separated by commas. Workers use them in turn, beginning with worker1.
        python: The interpreter on those hosts; by default the path of this one.

    Raises:
        ValueError: The template is malformed, or does not fit `hosts`.
    """

    far = True
    gpu_advice = "let its command choose: template='ssh {host} env CUDA_VISIBLE_DEVICES=0 {cmd}'"

    def __init__(
        self, run_directory: RunDirectory, template: str, hosts: str | Sequence[str] = (), python: str = sys.executable
    ) -> None:
        super().__init__(run_directory)
        self._hosts = tuple(hosts.replace(",", " ").split() if isinstance(hosts, str) else hosts)
        self._words = _split_template(template, self._hosts)
        self._python = python
        self._running: dict[int, _Command] = {}
        self._changes = Condition()

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> ProcessHandle:
        """Start the command for a worker. RuntimeError for a name that no member may have, RpcError, ShutdownError."""
        check_name(config.name)
        server = self._working_server()
        command = _Command(config, self._make_argv(config), self._host_of_worker(config), self._directory, on_exit)
        handle = command.handle
        self._running[handle.pid] = command
        threading.Thread(target=self._run_to_end, args=(command,), name=f"rpcbench-{config.name}", daemon=True).start()
        try:
            server.guard(handle.pid, config.stop_seconds)
            # only now: an unguarded command has no worker
            command.send_stdin_line(supervisor.supervisor_request(config))
            if self._closed:  # `close` ran meanwhile, and may have missed this command
                raise launcher_closed_error()
        except BaseException:  # Ctrl-C, too
            handle.abandon_process()
            raise
        return handle

    def _host_of_worker(self, config: WorldConfig) -> str:
        return self._hosts[(config.id - 1) % len(self._hosts)] if self._hosts else ""

    def _make_argv(self, config: WorldConfig) -> list[str]:
        command = [self._python, "-P", "-m", "rpcbench.worker", config.name]
        line, host = shlex.join(command), self._host_of_worker(config)
        fields = {"cmd": line, _QUOTED: line, "host": host, "name": config.name, "python": self._python}
        return [part for word in self._words for part in (command if word == "{cmd}" else [_fill_word(word, fields)])]

    def _run_to_end(self, command: _Command) -> None:
        command.wait_for_exit()
        del self._running[command.handle.pid]
        self._changes.notify_all()

    def _guard_again(self, server: ForkServerClient) -> None:
        for pid, command in self._running.copy().items():
            server.guard(pid, command.grace)

    def _end_workers(self) -> None:
        wait_or_terminate(
            lambda: [command.handle for command in list(self._running.values())], self._changes, OWN_SECONDS
        )


class _Command:
    """A running command. RpcError if it cannot be started."""

    def __init__(
        self, config: WorldConfig, argv: list[str], host: str, directory: RunDirectory, on_exit: ExitCallback | None
    ) -> None:
        self.grace = config.stop_seconds
        self.handle = ProcessHandle(
            config.name, log_path(directory.path, config.name, config.incarnation), self._signal_worker, on_exit
        )
        self.handle.host, self.handle.command = host, shlex.join(argv)
        self._write_lock = threading.Lock()  # a write after the close of stdin could send the secret elsewhere
        with open_private(self.handle.log) as log:
            try:
                self._process = subprocess.Popen(
                    argv, bufsize=0, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                raise RpcError(f"{config.name} could not be launched by {shlex.join(argv)}: {error}") from error
        self.handle.process_created(self._process.pid)

    def send_stdin_line(self, line: bytes) -> None:
        """Write a line to the command's standard input. Harmless if the command has ended."""
        assert self._process.stdin is not None
        with self._write_lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line)

    def wait_for_exit(self) -> None:
        """Wait for the end of the command, and end the handle."""
        status = self._process.wait()
        kill_group(self.handle.pid)  # processes that the command left
        self._hang_up()
        if status < 0 or status == _CONNECTION_LOST:  # else it is the worker's, passed on
            self.handle.subject = "the command that ran it"
        self.handle.process_ended(decode_shell_status(status))

    def _hang_up(self) -> None:
        assert self._process.stdin is not None
        with self._write_lock:
            self._process.stdin.close()

    def _signal_worker(self, which: int) -> None:
        """Send SIGTERM or SIGKILL to the worker through its supervisor, which may be on another host."""
        if which not in supervisor.COMMANDS or self.handle.poll() is not None:
            return
        self.send_stdin_line(supervisor.COMMANDS[signal.Signals(which)])
        if which != signal.SIGKILL:
            return
        self._hang_up()
        threading.Thread(target=self._end_command, name="rpcbench-end", daemon=True).start()

    def _end_command(self) -> None:
        """End the command if it does not end with its worker: it may wait for a lost host, or in a queue."""
        for seconds, end in ((_END_SECONDS, signal.SIGTERM), (_WITHDRAW_SECONDS, signal.SIGKILL)):
            with contextlib.suppress(TimeoutError):
                self.handle.wait(seconds)
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended just now
                os.killpg(self.handle.pid, end)


_QUOTED = "\0"  # the field for the command as one word: in place of `cmd` where `{cmd}` is a word in quotes


def _split_template(template: str, hosts: Sequence[str]) -> list[str]:
    """Return the words of the template. ValueError if it is malformed, or does not fit the hosts."""
    try:
        words = shlex.split(re.sub(r"""(?<!\S)(["'])\{cmd\}\1(?!\S)""", rf"\1{{{_QUOTED}}}\1", template))
        fields = [field for word in words for _, *field in string.Formatter().parse(word) if field[0] is not None]
    except ValueError as error:
        raise ValueError(f"the template {template!r} is not a command: {error}") from None
    names = {"cmd" if name == _QUOTED else name for name, *_ in fields}
    if wrong := [name for name, how, conversion in fields if name not in (*_FIELDS, _QUOTED) or how or conversion]:
        known = ", ".join(f"{{{name}}}" for name in _FIELDS)
        raise ValueError(f"the template {template!r} has an unknown field {{{wrong[0]}}}; there are {known}")
    if "cmd" not in names:
        raise ValueError(f"the template {template!r} has no {{cmd}}, which starts the worker there")
    if ("host" in names) != bool(hosts):
        reason = "names a {host}: pass hosts=" if not hosts else f"has no {{host}}, but hosts={hosts} is given"
        raise ValueError(f"the template {template!r} {reason}")
    if bad := [host for host in hosts if not host or host.startswith("-") or any(map(str.isspace, host))]:
        raise ValueError(f"{bad[0]!r} is not a host name")
    _check_shell(template, words)
    return words


def _fill_word(word: str, fields: Mapping[str, str]) -> str:
    """Return a word of the template with its fields. A shell that gets the word finds a field in quotes as it is."""
    made = before = ""
    for text, field, *_ in string.Formatter().parse(word):
        before += text
        made += text + ("" if field is None else _escape_for_quote(fields[field], _open_quote(before)))
    return made


def _open_quote(text: str) -> str:
    """Return the quote that is open for a shell at the end of a text; empty if none is."""
    rest = re.sub(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", "", text)
    return next((char for char in rest if char in "'\""), "")


def _escape_for_quote(text: str, quote: str) -> str:
    """Return text that a shell reads as it is between such quotes."""
    if quote == "'":
        return text.replace("'", "'\"'\"'")
    return re.sub(r'([\\"$`])', r"\\\1", text) if quote else text


def _check_shell(template: str, words: Sequence[str]) -> None:
    """Raise ValueError if a shell, as in `bash -lc {cmd}`, would get only the first word of the command."""
    at = next((at for at, word in enumerate(words) if word in ("{cmd}", f"{{{_QUOTED}}}")), 0)
    if at < 2 or Path(words[at - 2]).name not in _SHELLS or not re.fullmatch(r"-\w*c", words[at - 1]):
        return
    shell = " ".join(words[at - 2 : at])
    if any(Path(word).name == "ssh" for word in words[:at]):  # it joins its words, and the shell there splits them
        right = f"\"{shell} '{{cmd}}'\""
    elif words[at] == "{cmd}":
        right = f"{shell} '{{cmd}}'"
    else:
        return
    raise ValueError(
        f"in the template {template!r} {shell} would get only the first word of the command: write {right}"
    )
