"""Widgets that are made on a worker: their comms there, and proxies of these in the notebook's kernel.

Guarantees
- Each comm of a worker has one proxy comm in the kernel, with the same id, so a front end shows widgets of workers like
  local ones. Messages pass both ways, in order, each once, with buffers; those that a cell sends are in order with the
  rest of its output.
- A proxy is closed with the worker's comm, when the worker leaves, and when the cluster ends. So no front end shows a
  widget without a process behind it.
- Widgets also work while no cell runs: callbacks run on a pool thread, one at a time, never on the main thread. Their
  output goes to the running cell, or to the worker's log.
- Messages of a front end are forwarded even while a cell runs here, if it uses subshells (JupyterLab does).
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
from rpcbench.cells.output import Notice, OutputStream, ReorderBuffer, json_with_bytes
from rpcbench.runtime.locked_node import uninterrupted
from rpcbench.runtime.members import GONE

if TYPE_CHECKING:
    from rpcbench.runtime.agent import Agent
    from rpcbench.runtime.members import WorkerInfo

COMM = "comm"
"""The kind of a comm's messages in a worker's output, and the channel of the messages to a worker."""

Message = dict[str, Any]


def encode_message(message: Message) -> str:
    """Return a message as JSON text. Raises TypeError for data that JSON cannot hold."""
    buffers = [base64.b64encode(memoryview(buffer).cast("B")).decode("ascii") for buffer in message["buffers"] or ()]
    return json_with_bytes({**message, "buffers": buffers}, "a widget's message holds a {}, which is not JSON's")


def decode_message(text: str) -> Message:
    message: Message = json.loads(text)
    message["buffers"] = [memoryview(base64.b64decode(buffer)) for buffer in message["buffers"]]
    return message


class WorkerComms:
    """All comms that are made in this worker process."""

    def __init__(self, output_stream: OutputStream) -> None:
        self._output_stream = output_stream

    def install_comms(self, shell: Any) -> None:
        """Make `comm.create_comm`, which widgets use, return a WorkerComm from now on."""
        # In a kernel only while a cell of the notebook runs: its other clients keep their own comms.
        others = comm.create_comm if hasattr(shell, "kernel") else None
        comm.create_comm = functools.partial(self._create_comm, others)

    def _create_comm(self, others: Callable[..., BaseComm] | None, *args: Any, **kwargs: Any) -> BaseComm:
        if others is not None and not self._output_stream.has_running_cell:
            return others(*args, **kwargs)
        return WorkerComm(functools.partial(self._output_stream.send_to_last_client, COMM), *args, **kwargs)

    def message_received(self, _asker: int, notice: Notice) -> None:
        """Deliver a front end's message to its comm. On a pool thread, one at a time."""
        manager = comm.get_comm_manager()
        found = manager.comms.get(notice["comm"])
        if not isinstance(found, WorkerComm):
            return  # the worker has closed it meanwhile
        for message in found.turns.add_item(notice["n"], decode_message(notice["content"])):
            handle = manager.comm_close if message["kind"] == "comm_close" else manager.comm_msg
            content = {"comm_id": notice["comm"], "data": message["data"]}
            handle(cast(Any, None), "", {**message, "content": content})


class WorkerComm(BaseComm):
    """A comm whose `say` sends text to the notebook."""

    def __init__(self, say: Callable[[str], object], *args: Any, **kwargs: Any) -> None:
        self._say = say
        self._numbers = Counter()  # sequence numbers of messages to the notebook
        self.turns: ReorderBuffer[Message] = ReorderBuffer()  # messages from it
        super().__init__(*args, **kwargs)

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        message = {"kind": msg_type, "data": data or {}, "metadata": metadata or {}, "buffers": buffers, **keys}
        content = encode_message(message)  # before a number is taken, as this may fail
        with uninterrupted:  # a number that is never sent would hold up all later messages
            self._say(json.dumps({"comm": self.comm_id, "n": self._numbers.next(), "content": content}))

    def handle_msg(self, msg: Any) -> None:
        """Like comm's, without IPython's events, which mark the beginning and the end of a cell."""
        if self._msg_callback is not None:
            self._msg_callback(msg)


logger = logging.getLogger(__name__)


def receive_on_named_subshell(made: Any) -> None:
    """Make a comm receive each message on the subshell that the message names."""
    # ipykernel would pass it to the thread that sent last: that of the running cell, which waits.
    if hasattr(made, "_reply_subshell_for"):
        made._reply_subshell_for = lambda _data, asked: asked


class CommProxies:
    """All proxies of the comms in one agent's world."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._proxies: dict[tuple[int, str], _CommProxy] = {}  # by member id of the worker and comm id
        agent.on_member(self._member_changed)
        agent.hooks.on_end.append(lambda: self._close_proxies(list(self._proxies)))

    def receive_message(self, worker: int, content: str) -> None:
        """Show the message of a worker's comm. On a pool thread, one at a time."""
        said = json.loads(content)
        key = worker, said["comm"]
        with self._lock:
            mirror = self._proxies.get(key)
            if mirror is None:
                mirror = self._proxies[key] = _CommProxy(self._agent, *key)
        for message in mirror.turns.add_item(said["n"], decode_message(said["content"])):
            mirror.send_message(message)  # without the lock: a front end's callbacks may run in it
            if message["kind"] == "comm_close":
                with self._lock:
                    self._proxies.pop(key, None)

    def _member_changed(self, kind: str, member: WorkerInfo, _reason: str) -> None:
        if kind in GONE:
            self._close_proxies([key for key in list(self._proxies) if key[0] == member.id])

    def _close_proxies(self, keys: list[tuple[int, str]]) -> None:
        with self._lock:
            mirrors = [self._proxies.pop(key) for key in keys if key in self._proxies]
        for mirror in mirrors:
            mirror.close()


class _CommProxy:
    """The kernel's comm for one comm of a worker."""

    def __init__(self, agent: Agent, worker: int, comm_id: str) -> None:
        self._agent = agent
        self._worker = worker
        self._id = comm_id
        self._comm: BaseComm | None = None  # None until the worker's "comm_open" arrives
        self._numbers = Counter()  # sequence numbers of messages to the worker
        self.turns: ReorderBuffer[Message] = ReorderBuffer()  # messages from it

    def send_message(self, message: Message) -> None:
        kind, rest = message["kind"], {part: message[part] for part in ("data", "metadata", "buffers")}
        try:
            if kind == "comm_open":
                self._open_comm(message["target_name"], message["target_module"], rest)
            elif self._comm is not None and not self._comm._closed:
                (self._comm.close if kind == "comm_close" else self._comm.send)(**rest)
        except Exception:  # a front end's error is no error of the cell
            logger.exception("a widget of a worker could not be shown")

    def _open_comm(self, target: str, module: str | None, rest: dict[str, Any]) -> None:
        made = comm.create_comm(comm_id=self._id, target_name=target, target_module=module, primary=False)
        # The callbacks before `open`: a front end may answer at once.
        made.on_msg(functools.partial(self._message_received, "comm_msg"))
        made.on_close(functools.partial(self._message_received, "comm_close"))
        receive_on_named_subshell(made)
        self._comm = made
        made.open(**rest)

    def _message_received(self, kind: str, message: Message) -> None:
        """Forward a front end's message to the worker."""
        data = message["content"].get("data", {})
        said = {"kind": kind, "data": data, "metadata": message["metadata"], "buffers": message["buffers"]}
        content = encode_message(said)
        with uninterrupted:  # a number that is never sent would hold up all later messages
            notice = {"comm": self._id, "n": self._numbers.next(), "content": content}
            self._agent.submit(functools.partial(self._agent.notify, self._worker, COMM, notice))

    def close(self) -> None:
        """Close the kernel's comm, as the worker's has no process any more."""
        if self._comm is not None:
            self.send_message({"kind": "comm_close", "data": {}, "metadata": {}, "buffers": []})
