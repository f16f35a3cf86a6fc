"""Comms of widgets that are made on a worker: what they say goes to the notebook, what a front end says comes back.

Guarantees
- Words of one comm arrive in the order they were said in, each once, buffers included; those that a cell says come in
  order with the rest of its output.
- It works while no cell runs, too: callbacks run on a thread of the pool, one at a time, never on the main thread. What
  they print goes to the cell that runs, or to the worker's log.
- Any thread may speak, also in a finalizer.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from typing import Any, cast

import comm
from comm.base_comm import BaseComm

from rpcbench.base.ids import Counter
from rpcbench.launch.outbox import Notice, Outbox
from rpcbench.launch.turns import InTurn
from rpcbench.runtime.interrupts import uninterrupted

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


class Comms:
    """All comms that are made in this process."""

    def __init__(self, outbox: Outbox) -> None:
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
        self.turns: InTurn[Message] = InTurn()
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
