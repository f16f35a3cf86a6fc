"""Mirrors of workers' comms in the notebook's kernel: a front end sees widgets of workers as it sees those made here.

Guarantees
- Each comm of a worker has one comm of the kernel, with the same id. Words go through both ways, in order, each once.
- It is closed with the worker's, when the worker is gone, and when the cluster ends: no front end shows a widget then
  that nobody answers for.
- What a front end says is handed on also while a cell runs here, if the front end uses subshells (JupyterLab does).
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from typing import TYPE_CHECKING, Any

import comm
from comm.base_comm import BaseComm

from rpcbench.base.ids import Counter
from rpcbench.launch.comms import COMM, Message, decoded, encoded
from rpcbench.launch.turns import InTurn
from rpcbench.runtime.interrupts import uninterrupted
from rpcbench.runtime.members import GONE

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo

logger = logging.getLogger(__name__)


def heard_where_asked(made: Any) -> None:
    """What a front end says to this comm is heard on the subshell that it names.

    ipykernel would hand it on to the thread that spoke last: that of the cell that runs, which waits.
    """
    if hasattr(made, "_reply_subshell_for"):
        made._reply_subshell_for = lambda _data, asked: asked


class Mirrors:
    """All mirrors of the comms in one agent's world."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._mirrors: dict[tuple[int, str], _Mirror] = {}
        agent.on_member(self._changed)
        agent.on_end.append(self._end)

    def take(self, worker: int, content: str) -> None:
        """A worker's comm says something. On a pool thread, one at a time."""
        said = json.loads(content)
        key = worker, said["comm"]
        with self._lock:
            mirror = self._mirrors.get(key)
            if mirror is None:
                mirror = self._mirrors[key] = _Mirror(self._agent, *key)
        for message in mirror.turns.add(said["n"], decoded(said["content"])):
            mirror.show(message)
            if message["kind"] == "comm_close":
                with self._lock:
                    self._mirrors.pop(key, None)

    def _changed(self, kind: str, member: WorkerInfo, _reason: str) -> None:
        if kind in GONE:
            self._close([key for key in list(self._mirrors) if key[0] == member.id])

    def _end(self) -> None:
        self._close(list(self._mirrors))

    def _close(self, keys: list[tuple[int, str]]) -> None:
        with self._lock:
            mirrors = [self._mirrors.pop(key) for key in keys if key in self._mirrors]
        for mirror in mirrors:
            mirror.close()


class _Mirror:
    """One comm of a worker."""

    def __init__(self, agent: Agent, worker: int, comm_id: str) -> None:
        self._agent = agent
        self._worker = worker
        self._id = comm_id
        self._comm: BaseComm | None = None
        self._numbers = Counter()
        self.turns: InTurn[Message] = InTurn()

    def show(self, message: Message) -> None:
        """Say it to the front ends. An error of theirs is no error of the cell."""
        try:
            self._show(message["kind"], message)
        except Exception:
            logger.exception("a widget of a worker could not be shown")

    def _show(self, kind: str, message: Message) -> None:
        rest = {part: message[part] for part in ("data", "metadata", "buffers")}
        if kind == "comm_open":
            self._open(message["target_name"], message["target_module"], rest)
        elif self._comm is not None and not self._comm._closed:
            (self._comm.close if kind == "comm_close" else self._comm.send)(**rest)

    def _open(self, target: str, module: str | None, rest: dict[str, Any]) -> None:
        made = comm.create_comm(comm_id=self._id, target_name=target, target_module=module, primary=False)
        made.on_msg(functools.partial(self._heard, "comm_msg"))
        made.on_close(functools.partial(self._heard, "comm_close"))
        heard_where_asked(made)
        self._comm = made
        made.open(**rest)

    def _heard(self, kind: str, message: Message) -> None:
        """A front end says something."""
        data = message["content"].get("data", {})
        said = {"kind": kind, "data": data, "metadata": message["metadata"], "buffers": message["buffers"]}
        content = encoded(said)
        with uninterrupted:  # a number that is never heard of would hold up all that follow
            notice = {"comm": self._id, "n": self._numbers.next(), "content": content}
            self._agent.submit(functools.partial(self._agent.notify, self._worker, COMM, notice))

    def close(self) -> None:
        """There is nobody any more who could answer."""
        if self._comm is not None:
            self.show({"kind": "comm_close", "data": {}, "metadata": {}, "buffers": []})
