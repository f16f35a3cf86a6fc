"""Widgets that are made on a worker: their comms there, and proxies of these in the notebook's kernel.

Guarantees
- Each comm of a worker has one comm of the kernel, with the same id: a front end sees widgets of workers as it sees
  those made here. Messages go through both ways, in order, each once, buffers included; those that a cell sends come in
  order with the rest of its output.
- A proxy is closed with the worker's comm, when the worker is gone, and when the cluster ends: no front end shows a
  widget then that nothing answers for.
- It works while no cell runs, too: callbacks run on a thread of the pool, one at a time, never on the main thread. What
  they print goes to the cell that runs, or to the worker's log.
- What a front end says is handed on also while a cell runs here, if the front end uses subshells (JupyterLab does).
- Any thread may send, also in a finalizer.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import comm
from comm.base_comm import BaseComm

from rpcbench.base.ids import Counter
from rpcbench.cells.output import Notice, OutputStream, ReorderBuffer
from rpcbench.runtime.interrupts import uninterrupted
from rpcbench.runtime.members import GONE

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo


COMM = "comm"
"""What a worker's outbox calls words of comms, and the channel of those that come back."""

Message = dict[str, Any]


def encoded(message: Message) -> str:
    """A message as text. TypeError where its data is not JSON's."""
    buffers = [base64.b64encode(memoryview(buffer).cast("B")).decode("ascii") for buffer in message["buffers"] or ()]
    return json.dumps({**message, "buffers": buffers}, default=_base64)


def decoded(text: str) -> Message:
    message: Message = json.loads(text)
    message["buffers"] = [memoryview(base64.b64decode(buffer)) for buffer in message["buffers"]]
    return message


class WorkerComms:
    """All comms that are made in this process."""

    def __init__(self, outbox: OutputStream) -> None:
        self._outbox = outbox

    def install(self, shell: Any) -> None:
        """`comm.create_comm`, which widgets use, makes one of ours from now on; in a kernel only while a cell of the
        notebook runs, as it has other clients, too."""
        others = comm.create_comm if hasattr(shell, "kernel") else None
        comm.create_comm = functools.partial(self._create, others)

    def _create(self, others: Callable[..., BaseComm] | None, *args: Any, **kwargs: Any) -> BaseComm:
        if others is not None and not self._outbox.runs:
            return others(*args, **kwargs)
        return WorkerComm(functools.partial(self._outbox.tell, COMM), *args, **kwargs)

    def heard(self, _asker: int, notice: Notice) -> None:
        """A front end says something. On a pool thread, one at a time."""
        manager = comm.get_comm_manager()
        found = manager.comms.get(notice["comm"])
        if not isinstance(found, WorkerComm):
            return  # it has been closed here meanwhile
        for message in found.turns.add(notice["n"], decoded(notice["content"])):
            handle = manager.comm_close if message["kind"] == "comm_close" else manager.comm_msg
            content = {"comm_id": notice["comm"], "data": message["data"]}
            handle(cast(Any, None), "", {**message, "content": content})


class WorkerComm(BaseComm):
    """One comm; `say` sends text to the notebook."""

    def __init__(self, say: Callable[[str], object], *args: Any, **kwargs: Any) -> None:
        self._say = say
        self._numbers = Counter()
        self.turns: ReorderBuffer[Message] = ReorderBuffer()
        super().__init__(*args, **kwargs)

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        message = {"kind": msg_type, "data": data or {}, "metadata": metadata or {}, "buffers": buffers, **keys}
        content = encoded(message)  # before it is counted, as this may fail
        with uninterrupted:  # a number that is never heard of would hold up all that follow
            self._say(json.dumps({"comm": self.comm_id, "n": self._numbers.next(), "content": content}))

    def handle_msg(self, msg: Any) -> None:
        """As comm's, without telling IPython of it, which takes it for the beginning and the end of a cell."""
        if self._msg_callback is not None:
            self._msg_callback(msg)


def _base64(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    raise TypeError(f"a widget's message holds a {type(value).__name__}, which is not JSON's")


logger = logging.getLogger(__name__)


def heard_where_asked(made: Any) -> None:
    """What a front end says to this comm is heard on the subshell that it names.

    ipykernel would hand it on to the thread that spoke last: that of the cell that runs, which waits.
    """
    if hasattr(made, "_reply_subshell_for"):
        made._reply_subshell_for = lambda _data, asked: asked


class CommProxies:
    """All mirrors of the comms in one agent's world."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._mirrors: dict[tuple[int, str], _CommProxy] = {}
        agent.on_member(self._changed)
        agent.on_end.append(self._end)

    def take(self, worker: int, content: str) -> None:
        """A worker's comm says something. On a pool thread, one at a time."""
        said = json.loads(content)
        key = worker, said["comm"]
        with self._lock:
            mirror = self._mirrors.get(key)
            if mirror is None:
                mirror = self._mirrors[key] = _CommProxy(self._agent, *key)
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


class _CommProxy:
    """One comm of a worker."""

    def __init__(self, agent: Agent, worker: int, comm_id: str) -> None:
        self._agent = agent
        self._worker = worker
        self._id = comm_id
        self._comm: BaseComm | None = None
        self._numbers = Counter()
        self.turns: ReorderBuffer[Message] = ReorderBuffer()

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
