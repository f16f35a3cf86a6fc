"""What cells on a worker say to the user besides output, and hear: questions, help, debuggers, widgets.

One object for each process, whatever the shell that runs its cells.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rpcbench.launch import debugger, pager
from rpcbench.launch.comms import COMM, Comms
from rpcbench.launch.outbox import Outbox
from rpcbench.launch.stdin import ANSWER, Stdin

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent


class Talk:
    """Listens to the notebook from the beginning on."""

    def __init__(self, agent: Agent, outbox: Outbox) -> None:
        self._outbox = outbox
        self._stdin = Stdin(outbox)
        self._comms = Comms(outbox)
        agent.on_notice(ANSWER, self._stdin.answered)
        agent.on_notice(COMM, self._comms.heard)

    def in_charge(self) -> AbstractContextManager[None]:
        """Inside, `input` and `getpass` ask the notebook."""
        return self._stdin.installed()

    def equip(self, shell: Any) -> None:
        """Before the first cell runs in this shell. For good: a kernel takes `input` back while another client runs."""
        self._stdin.install()
        pager.install(shell, self._outbox)
        debugger.install()
        self._comms.install(shell)

    def end(self) -> None:
        """A cell is over."""
        self._stdin.end()
