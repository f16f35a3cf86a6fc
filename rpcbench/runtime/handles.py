"""References held by this process: handles on RRefs, with the place and the size of each.

Guarantees
- A `Handle` is one hold on an RRef: the last reference to it releases the fork. That may happen in any thread, inside
  any lock and at exit, so nothing but `SimpleQueue.put` runs then: no Python, where Ctrl-C could be lost, or the fork.
- A `CreationSite` is remembered in a microsecond, and put into words when asked for. It keeps no frame alive:
  what a function held in its variables may go.
- The size of a value is what it keeps alive, where that is known without running any code of the value's class.
- A class of ours registers its description from its own floor; no module here imports it. Its values must answer at
  once, as torch's own tensors do: they are asked while they become values of RRefs.
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
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, Protocol

import torch

from rpcbench.base.errors import ProtocolError, RpcError, WorkerLostError
from rpcbench.base.futures import Future
from rpcbench.base.ids import Id
from rpcbench.wire.messages import Fork, Origin


def notebook_cell() -> Origin | None:
    """On the main thread of a process that IPython runs cells in. None where none runs."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    if parent.get("header", {}).get("msg_type", "execute_request") != "execute_request":
        return None  # a callback of a widget, say
    number = len(shell.history_manager.input_hist_parsed) - 1  # `execution_count` may be the next one's already
    return Origin(str(parent.get("metadata", {}).get("cellId", "")), number)


# The runtime, what it works through, and where the chain of a pool thread begins.
_NOT_THE_USER = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), threading.__file__)


class CreationSite(NamedTuple):
    """A place in a code object; `at` counts bytes of code, and is turned into a line only where it is shown."""

    code: CodeType
    at: int

    @property
    def line(self) -> int:
        spans = self.code.co_lines()
        return next((line for begin, end, line in spans if begin <= self.at < end and line), self.code.co_firstlineno)

    def __str__(self) -> str:
        """`train.py:12 in main: rref = remote(...)`; for a cell `Cell In[3], line 2: …`."""
        file, line = self.code.co_filename, self.line
        inside = "" if self.code.co_name == "<module>" else f" in {self.code.co_name}"
        text = linecache.getline(file, line).strip()
        return f"{_cell_of(file, line) or f'{file}:{line}'}{inside}{f': {text}' if text else ''}"


def creation_site() -> CreationSite | None:
    """The innermost place of this thread that is in the user's program; None where the runtime works on its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_the_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else CreationSite(frame.f_code, frame.f_lasti)


def creation_sites(frame: FrameType | None) -> Iterator[CreationSite]:
    """The user's places on a stack, the innermost first."""
    while frame is not None:
        if _is_the_users(frame.f_code.co_filename):
            yield CreationSite(frame.f_code, frame.f_lasti)
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _is_the_users(file: str) -> bool:
    return not file.startswith(_NOT_THE_USER)


def _cell_of(file: str, line: int) -> str | None:
    """How IPython, where it runs, calls the cell that this file stands for."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(file) if shell is not None else None
    return f"{named[0]} {named[1]}, line {line}" if named else None


MOST = 1000
"""Of lists and the like at most so many entries are looked at: else it would not be cheap."""


def size_of(value: Any) -> int | None:
    """Bytes of the storages of a tensor, a module, or of those in a list, tuple or dict; None for anything else."""
    if isinstance(value, torch.nn.Module):
        return _sum(_tensor_bytes(value))
    if type(value) in (list, tuple, dict) and 0 < len(value) <= MOST:
        found = [each for each in (value.values() if type(value) is dict else value) if _plain(each)]
        return _sum(found) if found else None
    return _sum([value]) if _plain(value) else None


def _plain(value: Any) -> bool:
    """Tensors of torch's own classes and ours: another subclass may do anything when it is asked."""
    kind = type(value)
    known = kind is torch.Tensor or kind is torch.nn.Parameter or is_described(kind)
    return known and value.layout is torch.strided and value.device.type != "meta"


def _tensor_bytes(module: torch.nn.Module) -> Iterator[Any]:
    """Those of a module and of the modules in it, from its dicts: its methods may be anybody's."""
    ahead, seen = [module], {id(module)}
    while ahead:
        inner = ahead.pop().__dict__
        yield from inner["_parameters"].values()
        yield from inner["_buffers"].values()
        for child in inner["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                ahead.append(child)


def _sum(tensors: Iterable[Any]) -> int:
    """Each storage once, however many tensors are views of it."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if _plain(each)}
    return sum(storages.values())


_WORDS: dict[type, Callable[[Any], str]] = {}


def describe(kind: type, words: Callable[[Any], str]) -> None:
    """Have `words(value)` say what a tensor of exactly this class is: `Tensor (N=32, C=3)`, a class before a space."""
    _WORDS[kind] = words


def is_described(kind: type) -> bool:
    return kind in _WORDS


def type_of(value: object) -> str:
    """As `list`, or `Tensor (N=32, C=3)`."""
    words = _WORDS.get(type(value))
    return type(value).__name__ if words is None else words(value)


def layout_of(tensor: torch.Tensor) -> str:
    """As `float32[4, 2]`, or `float32[N=4, C=2]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape_of(tensor)}"


def shape_of(tensor: torch.Tensor) -> str:
    """As `[4, 2]`; where dimensions have names, of `rpcbench.named`, as `[N=4, C=2]`."""
    names = getattr(tensor, "_dim_names", None) if is_described(type(tensor)) else None  # a user's class is not asked
    names = names or (None,) * tensor.dim()
    sizes = [f"{name}={size}" if name else f"{size}" for name, size in zip(names, tensor.shape, strict=True)]
    return f"[{', '.join(sizes)}]"


def class_of(type_: str) -> str:
    """Of what `type_of` says, the class alone."""
    return type_.partition(" ")[0]


def label_of(function: Any) -> str:
    """A short name for a function, for errors and pictures."""
    if type(function) is FunctionType:
        return function.__qualname__
    if type(function) is BuiltinFunctionType:  # what torch's __qualname__ says is a class that nobody knows
        return f"torch.{function.__name__}" if function.__module__ == "torch" else function.__qualname__
    if isinstance(function, torch.jit.ScriptFunction):
        return str(function.name)  # what its __qualname__ says is its class
    names = (getattr(function, attribute, None) for attribute in ("__qualname__", "__name__", "original_name"))
    return next((name for name in names if name and isinstance(name, str)), type(function).__name__)


class Home(Protocol):
    """What a handle needs of its agent."""

    @property
    def id(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def running(self) -> bool: ...

    def needing(self, handle: Handle) -> bool:
        """Whether a call in flight goes by the name of what this one holds."""

    @property
    def released(self) -> SimpleQueue[Any]:
        """Takes the holds whose handle is gone."""

    @property
    def holds(self) -> set[ReleaseToken]:
        """Keeps holds until then."""


class ReleaseToken(weakref.ref["Handle"]):
    """Puts itself into the agent's queue when its handle goes."""

    __slots__ = ("fork",)

    fork: Id


class Handle:
    """A hold on one RRef: a user's, with its `fork`, or the owner's, with the future of the `value` itself."""

    def __init__(
        self, agent: Home, rref: Id, owner: int, fork: Id | None, value: Future[Any] | None, type_: str = ""
    ) -> None:
        self._agent = agent
        self._rref = rref
        self._owner = owner
        self._fork = fork
        self._value = value
        self._type = type_
        self._site: CreationSite | None = None  # where the user's program came to have it
        self._creation: Future[Any] | None = None  # on the user that called remote(): done when the value is there
        self._released = False
        if fork is not None:
            hold = ReleaseToken(self, agent.released.put)
            hold.fork = fork
            agent.holds.add(hold)

    def release(self) -> None:
        """Let go of the value now, not when the last reference to this object goes; it cannot be used after that.

        Calls of its methods that are under way have it yet.
        """
        self._released = True
        self._value = None
        self.let_go()

    def let_go(self) -> None:
        """Runtime only: see to what was released, unless a call in flight needs it; the last such call tells."""
        if not self._released or self._agent.needing(self):
            return
        for hold in weakref.getweakrefs(self):
            if isinstance(hold, ReleaseToken):
                self._agent.released.put(hold)

    def _check_alive(self, use: str) -> None:
        """RpcError where the value was let go of, or all were when the agent shut down."""
        if self._released or (self._fork is not None and not self._agent.running):
            raise RpcError(f"{self!r} has been let go of. Cannot call {use} after deletion.")


class Outgoing:
    """Collects the handles inside a value while it is pickled: index for index what the message's forks will be.

    `name_of`: the name of one that needs no fork, else None.
    """

    def __init__(
        self, agent: Home, handles: list[Handle], name_of: Callable[[object], tuple[int | str, ...] | None] | None
    ) -> None:
        self._agent = agent
        self._name_of = name_of
        self.handles = handles

    def give(self, value: object) -> tuple[int | str, ...] | None:
        if not isinstance(value, Handle):
            return None
        if self._name_of is not None and (name := self._name_of(value)) is not None:
            return name
        value._check_alive("fork an UserRRef")
        if value._agent is not self._agent:
            raise RpcError(f"{value!r} belongs to another world and cannot be sent in this one")
        self.handles.append(value)
        return (len(self.handles) - 1,)

    def take(self, *name: Any) -> object:
        raise AssertionError("nothing is taken while a value is pickled")


class Incoming:
    """Makes handles for the forks of a message while it is unpickled, and for names of values that are here."""

    def __init__(
        self, agent: Home, forks: Sequence[Fork], make: Callable[[Fork], Handle], named: Callable[..., Handle]
    ) -> None:
        self._agent = agent
        self._make = make
        self._named = named
        self._forks = forks
        self._handles: dict[int, Handle] = {}

    def give(self, value: object) -> None:
        return None

    def take(self, index: int, *name: Any) -> Handle:
        if name:
            return self._named(index, *name)
        if not 0 <= index < len(self._forks):
            raise ProtocolError(f"a message mentions RRef {index}, but brings {len(self._forks)}")
        if index not in self._handles:
            self._handles[index] = self._make(self._forks[index])
        return self._handles[index]

    def unopened(self) -> list[Fork]:
        """Users' forks that no handle was made for."""
        me = self._agent.id
        return [fork for i, fork in enumerate(self._forks) if i not in self._handles and fork.owner != me]


def value_lost(handle: Handle, owner: str) -> WorkerLostError:
    """Of a value whose owner is gone, and works again under the same name."""
    return WorkerLostError(
        f"the value of RRef {handle._rref} was lost with the {owner} that held it; {owner} has been started again "
        "since: make the value anew"
    )
