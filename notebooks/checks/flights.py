"""What happens on a rank while its messages are under way, for checks: which tensors are read or written too early.

`Flights` watches an answer that sends and receives. It needs no clock: it records the order in which messages begin and
are waited for, and the operations of torch between the two. So a race is seen also where it has done no harm this time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rpcbench.base.errors import count_noun

COMPUTES = re.compile("mm|mv|dot|exp|softmax|attention")  # the operations of attention that take time
ONLY_MAKES = re.compile("empty|new_|zeros_like|ones_like|full_like")  # a tensor of the same shape
READ = "reads a tensor that is still being received. Was each message waited for?"
SENT_EARLY = "sends a tensor that is still being received. Was each message waited for?"
WRITTEN = "writes into a tensor that is still being sent. The next rank may get the old numbers or the new ones."
RECEIVED = "receives into a tensor that is still being sent. The next rank may get the old numbers or the new ones."
TWICE = "receives into a tensor into which an earlier message is still being received."


@dataclass
class Message:
    """A message of this rank, from its begin to its `wait`."""

    sent: bool
    work: Any
    tensor: Tensor
    begun: int  # how much had been computed when it began
    waited: int | None = None  # and when it was waited for


@dataclass
class Seen:
    """What a rank tells about its messages."""

    faults: list[str] = field(default_factory=list)  # in their order
    not_waited: tuple[int, int] = (0, 0)  # messages that it has sent, and that it has received
    meanwhile: list[bool] = field(default_factory=list)  # for each exchange, whether it has computed meanwhile

    def why_wrong(self) -> str:
        """What the rank does too early, or never; empty if nothing."""
        if self.faults:
            return self.faults[0]
        for count, what in zip(self.not_waited, ("sent", "received"), strict=True):
            if count:
                return f"has not waited for {count_noun(count, 'message')} that it has {what}."
        return ""


class Flights(TorchDispatchMode):
    """Watches the messages of this rank within a `with` block; `seen()` tells of them."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[Message] = []  # all, and so their tensors: no memory is used for another one
        self._faults: list[str] = []
        self._computed = 0
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Flights:
        self._replace(ProcessGroup, "send", lambda send: self._begins(send, sent=True))
        for name in ("recv", "recv_anysource"):
            self._replace(ProcessGroup, name, lambda receive: self._begins(receive, sent=False))
        self._replace(dist.Work, "wait", self._waits)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for place, name, old in self._undo:
            setattr(place, name, old)

    def seen(self) -> Seen:
        sent = [each for each in self._messages if each.sent]
        received = [each for each in self._messages if not each.sent]
        never = tuple(sum(each.waited is None for each in kind) for kind in (sent, received))
        meanwhile = [self._computes_meanwhile(*pair) for pair in zip(sent, received, strict=False)]
        return Seen(self._faults, never, meanwhile)  # type: ignore[arg-type]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation._schema.name.partition("::")
        if name[0] == "aten":
            self._computed += bool(COMPUTES.search(name[2]))
            self._look_at(operation._schema, name[2], args, kwargs)
        return operation(*args, **kwargs)

    def _look_at(self, schema: Any, name: str, args: Any, kwargs: Any) -> None:
        """Find tensors that are written while they are sent, or read while they are received."""
        writes, reads = [], []
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            if alias is not None and alias.is_write:
                writes.append(value)
            elif alias is None and not ONLY_MAKES.match(name):  # a view of a tensor reads no number
                reads.append(value)
        self._judge(_tensors(writes), sent=True, fault=WRITTEN)
        self._judge(_tensors([*reads, *writes]), sent=False, fault=READ)

    def _judge(self, tensors: list[Tensor], sent: bool, fault: str) -> None:
        flying = [each.tensor for each in self._messages if each.waited is None and each.sent is sent]
        if any(_overlap(one, other) for one in tensors for other in flying):
            self._faults.append(fault)

    def _computes_meanwhile(self, sent: Message, received: Message) -> bool:
        ends = [each.waited for each in (sent, received) if each.waited is not None]
        return min(ends, default=self._computed) > max(sent.begun, received.begun)

    def _replace(self, place: Any, name: str, make: Callable[[Any], Any]) -> None:
        old = getattr(place, name)
        self._undo.append((place, name, old))
        setattr(place, name, make(old))

    def _begins(self, begin: Any, sent: bool) -> Callable[..., Any]:
        def begins(group: Any, tensors: list[Tensor], *rest: Any, **named: Any) -> Any:
            if sent:
                self._judge(tensors, sent=False, fault=SENT_EARLY)
            else:
                self._judge(tensors, sent=True, fault=RECEIVED)
                self._judge(tensors, sent=False, fault=TWICE)
            work = begin(group, tensors, *rest, **named)
            self._messages += [Message(sent, work, tensor, self._computed) for tensor in tensors]
            return work

        return begins

    def _waits(self, wait: Any) -> Callable[..., Any]:
        def waits(work: Any, *rest: Any, **named: Any) -> Any:
            result = wait(work, *rest, **named)
            for message in self._messages:
                if message.work is work and message.waited is None:
                    message.waited = self._computed
            return result

        return waits


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _overlap(one: Tensor, other: Tensor) -> bool:
    (begin, end), (other_begin, other_end) = _memory(one), _memory(other)
    return begin < other_end and other_begin < end


def _memory(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first number, and behind its last one."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
