"""References held by this process: handles on RRefs, with their creation sites and the sizes of values.

Guarantees
- An `RRefHandle` holds one fork of an RRef, released when the handle's last reference is dropped. That may happen in
  any thread, under any lock and at exit, so only `SimpleQueue.put` runs: no Python, where Ctrl-C could lose the fork.
- A `CreationSite` is recorded in a microsecond, and formatted when shown. It keeps no frame or local variable alive.
- The size of a value is the memory that it keeps alive, if that is known without running code of the value's class.
- A class of rpcbench registers its description from its own layer; this module imports none of them. Its values must
  answer at once, as torch's own tensors do: they are asked when they become values of RRefs.
"""

from __future__ import annotations

import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import typing_extensions

from rpcbench.base.errors import ProtocolError, RpcError, WorkerLostError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.base.sources import cell_name, ipython_shell
from rpcbench.wire.messages import Fork, Origin


def notebook_cell() -> Origin | None:
    """Return the cell that IPython runs on the main thread of this process; None if there is none."""
    if (shell := ipython_shell()) is None:
        return None
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    if parent.get("header", {}).get("msg_type", "execute_request") != "execute_request":
        return None  # say, a callback of a widget
    number = len(shell.history_manager.input_hist_parsed) - 1  # `execution_count` may be that of the next cell already
    return Origin(str(parent.get("metadata", {}).get("cellId", "")), number)


# Files that are not the user's program: rpcbench, torch and its decorators, and the base of a pool thread's stack.
_NOT_THE_USER = (
    str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), typing_extensions.__file__, threading.__file__
)  # fmt: skip


class CreationSite(NamedTuple):
    """A place in a code object. `at`: offset in bytes of code, turned into a line only when it is shown."""

    code: CodeType
    at: int

    @property
    def line_number(self) -> int:
        spans = self.code.co_lines()
        return next((line for begin, end, line in spans if begin <= self.at < end and line), self.code.co_firstlineno)

    @property
    def short_place(self) -> str:
        """The place in short: `train.py:12`; for a cell `Cell In[3], line 2`."""
        file, line = self.code.co_filename, self.line_number
        return _cell_of(file, line) or f"{Path(file).name}:{line}"

    def __str__(self) -> str:
        """Return `train.py:12 in main: rref = remote(...)`; for a cell `Cell In[3], line 2: …`."""
        file, line = self.code.co_filename, self.line_number
        inside = "" if self.code.co_name == "<module>" else f" in {self.code.co_name}"
        text = linecache.getline(file, line).strip()
        return f"{_cell_of(file, line) or f'{file}:{line}'}{inside}{f': {text}' if text else ''}"


def creation_site() -> CreationSite | None:
    """Return the innermost place of this thread in the user's program; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else CreationSite(frame.f_code, frame.f_lasti)


def resolve_site(site: CreationSite | int) -> CreationSite | None:
    """Return the place itself, or the place at which this thread is, which waits for its call."""
    # A pool thread opens the reply if it comes before the caller has the read lock, as on a loaded machine.
    return next(creation_sites(sys._current_frames().get(site)), None) if isinstance(site, int) else site


def creation_sites(frame: FrameType | None) -> Iterator[CreationSite]:
    """Yield the places of a stack that are in the user's program, innermost first."""
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield CreationSite(frame.f_code, frame.f_lasti)
        frame = frame.f_back


@lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return whether a file is of the user's program."""
    return not file.startswith(_NOT_THE_USER)


def _cell_of(file: str, line: int) -> str | None:
    """Return IPython's name for the cell that this file stands for, if it is one."""
    named = cell_name(file)
    return f"{named}, line {line}" if named else None


MOST = 1000
"""Longer lists, tuples and dicts are not measured, as that would take too long."""


def size_of(value: Any) -> int | None:
    """Return the bytes of the storages of a tensor or module, or of those in a list, tuple or dict; else None."""
    if isinstance(value, torch.nn.Module):
        return _sum_bytes(_tensor_bytes(value))
    if type(value) in (list, tuple, dict) and 0 < len(value) <= MOST:
        found = [each for each in (value.values() if type(value) is dict else value) if _is_plain_tensor(each)]
        return _sum_bytes(found) if found else None
    return _sum_bytes([value]) if _is_plain_tensor(value) else None


def _is_plain_tensor(value: Any) -> bool:
    """Return whether a tensor is of torch's own classes or of rpcbench's: others may run any code when asked."""
    kind = type(value)
    known = kind is torch.Tensor or kind is torch.nn.Parameter or is_described(kind)
    return known and value.layout is torch.strided and value.device.type != "meta"


def _tensor_bytes(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the tensors of a module and its submodules, from its dicts: its methods may be overridden."""
    ahead, seen = [module], {id(module)}
    while ahead:
        inner = ahead.pop().__dict__
        # A ScriptModule has none of these, nor has a module whose class does not call `super().__init__()`.
        yield from inner.get("_parameters", {}).values()
        yield from inner.get("_buffers", {}).values()
        for child in inner.get("_modules", {}).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                ahead.append(child)


def _sum_bytes(tensors: Iterable[Any]) -> int:
    """Sum the bytes, each storage once, however many tensors are views of it."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if _is_plain_tensor(each)
    }
    return sum(storages.values())


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of a tensor of any layout; 0 on the meta device."""
    if tensor.device.type == "meta":
        return 0
    if tensor.layout == torch.sparse_coo:
        return tensor_bytes(tensor._values()) + tensor_bytes(tensor._indices())
    return tensor.numel() * tensor.element_size()


_WORDS: dict[type, Callable[[Any], str]] = {}  # tensor class → its description


def register_description(kind: type, words: Callable[[Any], str]) -> None:
    """Register `words(value)` to describe tensors of exactly this class: `Tensor (N=32, C=3)`, class first."""
    _WORDS[kind] = words


def is_described(kind: type) -> bool:
    return kind in _WORDS


def type_of(value: object) -> str:
    """Return the type of a value: `list`, or `Tensor (N=32, C=3)`."""
    words = _WORDS.get(type(value))
    return type(value).__name__ if words is None else words(value)


def layout_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape: `float32[4, 2]`, or `float32[N=4, C=2]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape_of(tensor)}"


def shape_of(tensor: torch.Tensor) -> str:
    """Return the shape: `[4, 2]`, or with names of `rpcbench.named`, `[N=4, C=2]`."""
    names = getattr(tensor, "_dim_names", None) if is_described(type(tensor)) else None  # a user's class is not asked
    names = names or (None,) * tensor.dim()
    sizes = [f"{name}={size}" if name else f"{size}" for name, size in zip(names, tensor.shape, strict=True)]
    return f"[{', '.join(sizes)}]"


def class_of(type_: str) -> str:
    """Return the class alone from the text of `type_of`."""
    return type_.partition(" ")[0]


class HandleRuntime:
    """The base class of an agent: the part that its handles use."""

    id: int
    incarnation: int
    running: bool
    released: SimpleQueue[Any]  # takes the tokens of dead handles
    holds: set[ReleaseToken]  # keeps tokens alive until then
    needing: Callable[[RRefHandle], bool]  # whether a call in flight names the value of this handle


class ReleaseToken(weakref.ref["RRefHandle"]):
    """A weak reference that puts itself into the agent's queue when its handle dies."""

    __slots__ = ("fork",)

    fork: Id


class RRefHandle:
    """A reference to one RRef: a user's, with its `fork`, or the owner's, with the future of the `value`."""

    def __init__(
        self, agent: HandleRuntime, rref: Id, owner: int, fork: Id | None, value: Future[Any] | None, type_: str = ""
    ) -> None:
        self._agent = agent
        self._rref = rref
        self._owner = owner
        self._fork = fork
        self._value = value
        self._type = type_
        self._site: CreationSite | None = None  # where the user's program got it
        self._creation: Future[Any] | None = None  # of the remote() call that made it: done when the value exists
        self._released = False
        if fork is not None:
            hold = ReleaseToken(self, agent.released.put)
            hold.fork = fork
            agent.holds.add(hold)

    def release(self) -> None:
        """Release the value now, before the last reference to this object is dropped; the handle is unusable then.

        Calls of its methods that are in flight still get the value.
        """
        self._released = True
        self._value = None
        self.give_up_fork()

    def give_up_fork(self) -> None:
        """Runtime only: give up the fork after `release`. A call in flight that needs it repeats this when it ends."""
        if not self._released or self._agent.needing(self):
            return
        for hold in weakref.getweakrefs(self):
            if isinstance(hold, ReleaseToken):
                self._agent.released.put(hold)  # the path of a finalizer; a second put does no harm

    def _check_alive(self, use: str) -> None:
        """Raise RpcError if the value was released, by the user or by the agent's shutdown."""
        if self._released:
            raise RpcError(f"{self!r} has been released. Cannot call {use} after deletion.")
        if self._fork is not None and not self._agent.running:
            raise RpcError(f"{self!r} is gone: RPC was shut down here. Cannot call {use} after deletion.")


class OutgoingHandles:
    """Collects handles during pickling, in the order of the message's forks. `name_of`: the name of a forkless one."""

    def __init__(
        self,
        agent: HandleRuntime,
        handles: list[RRefHandle],
        name_of: Callable[[object], tuple[int | str, ...] | None] | None,
    ) -> None:
        self._agent = agent
        self._name_of = name_of
        self.handles = handles

    def name_of_external(self, value: object) -> tuple[int | str, ...] | None:
        if not isinstance(value, RRefHandle):
            return None
        if self._name_of is not None and (name := self._name_of(value)) is not None:
            return name
        value._check_alive("fork an UserRRef")
        if value._agent is not self._agent:
            raise RpcError(f"{value!r} belongs to another world and cannot be sent in this one")
        self.handles.append(value)
        return (len(self.handles) - 1,)

    def find_external(self, *name: Any) -> object:
        raise AssertionError("nothing is taken while a value is pickled")


class IncomingHandles:
    """Makes handles for the forks of a message while it is unpickled, and for names of values owned here."""

    def __init__(
        self,
        agent: HandleRuntime,
        forks: Sequence[Fork],
        make: Callable[[Fork], RRefHandle],
        named: Callable[..., RRefHandle],
    ) -> None:
        self._agent = agent
        self._make = make
        self._named = named
        self._forks = forks
        self._handles: dict[int, RRefHandle] = {}  # one per fork, however often it occurs

    def name_of_external(self, value: object) -> None:
        return None

    def find_external(self, index: int, *name: Any) -> RRefHandle:
        if name:
            return self._named(index, *name)
        if not 0 <= index < len(self._forks):
            raise ProtocolError(f"a message refers to RRef {index}, but carries {len(self._forks)}")
        if index not in self._handles:
            self._handles[index] = self._make(self._forks[index])
        return self._handles[index]

    def unopened_forks(self) -> list[Fork]:
        """Return the users' forks for which no handle was made: they are to be released."""
        me = self._agent.id
        return [fork for i, fork in enumerate(self._forks) if i not in self._handles and fork.owner != me]


def value_lost_error(handle: RRefHandle, owner: str) -> WorkerLostError:
    """Make the error for a value whose owner was lost and works again under the same name."""
    return WorkerLostError(
        f"the value of RRef {handle._rref} was lost with the {owner} that held it; {owner} has been started again "
        "since: create the value again"
    )
