"""Values as bodies of messages, and back: the only module that unpickles, called after the peer is authenticated.

Tensors travel in a table beside the pickle (`tensors`), code of `__main__`, lambdas and closures by value (`code`),
and whatever another floor claims as an external (an RRef) by its number. Arrays and other large buffers are not copied
on the sending side.

Guarantees
- One object that appears twice in a value is one object on arrival; nothing that arrives shares memory with the sender.
- A value that cannot travel is a SerializationError that names the part to blame; nothing has been sent then.
- A payload that mentions tensors or externals its message does not carry is a ProtocolError.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol

import cloudpickle
import torch

from rpcbench.base import rebuild
from rpcbench.base.errors import ProtocolError, RpcError, SerializationError
from rpcbench.serialization import closures, fast_path, tensor_types, tensors
from rpcbench.serialization.closures import (
    CodeCache,
    MissingCodeError,
    is_dispatcher,
    leave_locks,
    reduce_cached,
    reduce_cached_property,
    reduce_dispatcher,
    reduce_new_type,
)
from rpcbench.serialization.diagnostics import CapturedData, blame
from rpcbench.serialization.fast_path import Encoded
from rpcbench.serialization.importable import has_name, importable, load_packages_of, loaded
from rpcbench.serialization.tensor_types import CPU_ONLY, Route
from rpcbench.serialization.tensors import SMALL, Buffer
from rpcbench.wire.messages import EMPTY, Body

_PROTOCOL = 5
_SPAWNED = "__mp_main__"
"""What processes started by multiprocessing call their `__main__`, and all have."""
_SHORT = 1 << 12
"""Bytes of a pickle after which its pickler is used again; what has written a long one has grown with it."""
_MOST_ERROR = 16 << 20
"""Bytes of the pickle of an error, or of a part of one that is longer."""
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **cloudpickle.Pickler.dispatch_table.maps[0],
    functools._lru_cache_wrapper: reduce_cached,
    functools.cached_property: reduce_cached_property,
    typing.NewType: reduce_new_type,
    torch.jit.ScriptFunction: closures.reduce_function,
}
del _REDUCERS[MethodType]  # the default takes a class method by name, cloudpickle would take its code


def register_reducer(kind: type, reducer: Callable[[Any], Any]) -> None:
    """From now on, send instances of exactly this class as `reducer(instance)` says.

    It returns what `__reduce__` would: a function and its arguments, found on the other side by name, or by value if
    they belong to a notebook. It holds for calls from this process only, and comes before whatever else would send
    the instance; the latest reducer of a class counts.
    """
    if not isinstance(kind, type) or not callable(reducer):
        raise TypeError(f"register_reducer takes a class and a function, not {kind!r} and {reducer!r}")
    _REDUCERS[kind] = reducer


def _register_reducer(kind: type, reducer: Callable[[Any], Any]) -> None:
    """torch's: as `register_reducer`, but the first reducer of a class counts."""
    if kind not in _REDUCERS:
        register_reducer(kind, reducer)


class Externals(Protocol):
    """What another floor keeps on its own account, and how it gets into messages and out of them."""

    def give(self, value: object) -> tuple[int | str, ...] | None:
        """The name of a value that is an external, else None: its number in the message, which brings it, or more.
        Called for objects other than plain data, so quick. When `encode` raises, what was given is not sent."""

    def take(self, *name: Any) -> object:
        """The external of that name; ProtocolError if there is none."""


class Codec:
    """Encodes and decodes for one agent, from any thread; remembers the classes that travelled by value."""

    def __init__(self) -> None:
        self._code = CodeCache()
        self._captured = CapturedData()
        self._idle: list[_Pickler] = []

    def encode(
        self,
        value: object,
        externals: Externals | None = None,
        label: str | tuple[str, ...] = "value",
        route: Route = CPU_ONLY,
    ) -> Encoded:
        """`value` as a body. `label` names it in errors; where it is a tuple, a tuple of labels names its items.
        `route` says where tensors on devices go.

        Tensors below 16 KB are copied; larger ones must not change until the body is sent.
        Raises SerializationError if a part of the value cannot travel.
        """
        return (not route.targets and self.plainly(value)) or self.fully(value, externals, label, route)

    # -- the quick way of `encode`, where tensors stay on their devices; None where the value needs the other
    def plainly(self, value: object) -> Encoded | None:
        return fast_path.encode(value) or _alone(value)

    def plain_call(self, function: Any, args: tuple[Any, ...], name_of: fast_path.Name | None) -> Encoded | None:
        """Of what stands for a call with these arguments and no others.

        `name_of`: as `Externals.give`, for those that the message does not have to bring."""
        return fast_path.encode_call(function, args, _REDUCERS, name_of)

    def fully(self, value: object, externals: Externals | None, label: str | tuple[str, ...], route: Route) -> Encoded:
        """The general way of `encode`."""
        try:
            return self._encode(value, externals, route)
        except Exception as error:
            if isinstance(error, RpcError) and not isinstance(error, SerializationError):
                raise
            path, cause = blame(value, label, error, lambda part: self._problem(part, externals, route))
            raise SerializationError(f"{path}: {_words(cause)}") from cause

    def _encode(self, value: object, externals: Externals | None, route: Route) -> Encoded:
        try:
            pickler = self._idle.pop()
        except IndexError:
            pickler = _Pickler(self._code, self._captured)
        payload, found, beside = pickler.pickled(value, externals, route)
        if len(payload) < _SHORT and not pickler.globals_ref:
            self._idle.append(pickler)  # not where it failed: then something may be left in it
        if not found:
            return Body(payload, b"", beside), []
        table, buffers = tensors.encode(found, route)
        return Body(payload, table, buffers + beside), found

    def encode_error(self, error: BaseException) -> Body:
        """An error that is to be raised elsewhere, with its own type wherever its class can travel; else an empty body.

        Parts that cannot travel become their representations. An error of more than 16 MB is shortened: each text to
        `rebuild.MOST_TEXT` characters.
        """
        body = self._error_body(lambda: error)
        return body or self._error_body(lambda: rebuild.shortened(error, self._short)) or EMPTY

    def _error_body(self, make: Callable[[], object]) -> Body | None:
        """None for what cannot travel, or is too large to."""
        try:
            body, _ = self._encode(make(), None, CPU_ONLY)
        except Exception:  # noqa: BLE001  (whatever a user's __reduce__ raises; the story of the error travels)
            return None
        return body if len(body.payload) <= _MOST_ERROR else None

    def _short(self, part: object) -> object:
        """A part of an error, or what stands for it."""
        if isinstance(part, bytes):  # a UnicodeDecodeError needs them as such
            return part[: rebuild.MOST_TEXT]
        if type(part) is str:
            return rebuild.cut(part)
        return rebuild.words(part) if self._error_body(lambda: part) is None else part

    def _problem(self, value: object, externals: Externals | None, route: Route) -> Exception | None:
        try:
            self._encode(value, externals, route)
        except Exception as error:  # noqa: BLE001  (whatever a user's __reduce__ raises)
            return error
        return None

    def decode(
        self,
        body: Body,
        externals: Externals | None = None,
        adopt: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> Any:
        """The value of a body. `adopt` may replace the tensors before anything refers to them.

        Raises ProtocolError for a body that no codec has made, MissingCodeError where the value needs code that this
        process cannot import, and whatever the value's own classes raise.
        """
        payload, table, buffers = body
        received, used = tensors.decode(table, buffers) if table else ([], 0)
        if adopt is not None:
            received = adopt(received)
        if received and payload in (_ALONE, _LISTED):
            return received[0] if payload == _ALONE else received[:1]
        try:
            if fast_path.begins(payload):
                external = None if externals is None else externals.take
                return fast_path.opened(pickle.loads(payload), received, _find, external)
            buffers = buffers[used:]
            unpickler = _Unpickler(io.BytesIO(payload), buffers=_owned(buffers) if buffers else None)
            unpickler.tables = None
            unpickler.parts = self._code, received, externals
            return unpickler.load()
        except (pickle.UnpicklingError, EOFError) as error:
            raise ProtocolError(f"the peer sent a broken payload: {error}") from error


class _First:
    """Pickled as the first tensor of a table is."""

    def __reduce__(self) -> Any:
        return closures.tensor_slot, (0,)


_ALONE, _LISTED = (pickle.dumps(value, _PROTOCOL) for value in (_First(), [_First()]))
"""The payload of one tensor, and of one in a list: most results, and most gradients."""


def _alone(value: object) -> Encoded | None:
    """The quick way for one ordinary tensor, perhaps in a list: the same bytes."""
    listed = type(value) is list and len(value) == 1
    tensor: Any = value[0] if listed else value  # type: ignore[index]
    if not fast_path.is_ordinary(tensor, _REDUCERS):
        return None
    table = tensors.encode_dense([tensor])
    return None if table is None else (Body(_LISTED if listed else _ALONE, *table), [tensor])


def _keep(beside: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Whether this buffer goes into the pickle; large ones go beside it.

    No method of the pickler: a pickler in a circle would keep what it has pickled until the next collection.
    """
    raw = buffer.raw()
    if raw.nbytes < SMALL:
        return True
    beside.append(raw.toreadonly())
    return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, which is asked only about what cannot go by name."""

    dispatch_table = copyreg.dispatch_table

    def __init__(self, code: CodeCache, captured: CapturedData) -> None:
        self.tensors: list[torch.Tensor] = []
        self._stream = io.BytesIO()
        self._beside: list[memoryview] = []
        super().__init__(self._stream, protocol=_PROTOCOL, buffer_callback=functools.partial(_keep, self._beside))
        self._code = code
        self._captured = captured
        self._externals: Externals | None = None
        self._route = CPU_ONLY

    def pickled(
        self, value: object, externals: Externals | None, route: Route
    ) -> tuple[bytes, list[torch.Tensor], list[memoryview]]:
        """The pickle of a value, its tensors, and the large buffers that go beside it. Nothing of them stays here."""
        self._externals, self._route = externals, route
        pickle.Pickler.dump(self, value)  # cloudpickle's own would hide a RecursionError
        payload, found, beside = self._stream.getvalue(), self.tensors, self._beside.copy()
        self.tensors, self._externals = [], None
        self._beside.clear()
        self._stream.seek(0)
        self._stream.truncate()
        self.clear_memo()
        return payload, found, beside

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        reducer = _REDUCERS.get(kind)
        if reducer is not None:
            return reducer(value)
        if kind is torch.Tensor:
            if value.is_quantized or value.is_nested or vars(value):
                return self._tensor(value, kind)
            self.tensors.append(value)
            return closures.tensor_slot, (len(self.tensors) - 1,)
        if kind is FunctionType or issubclass(kind, type):
            return NotImplemented if value is closures.tensor_slot or importable(value) else self._by_value(value)
        if kind is BuiltinFunctionType and has_name(value):
            return value.__name__
        if issubclass(kind, torch.Tensor):
            return self._tensor(value, kind)
        if self._externals is not None:
            name = self._externals.give(value)
            if name is not None:
                return closures.external_slot, name
        if issubclass(kind, torch.jit.ScriptModule):
            return closures.reduce_module(value, self._route)
        if issubclass(kind, BaseException):
            return rebuild.reduced(value) or NotImplemented
        return NotImplemented

    def _tensor(self, value: torch.Tensor, kind: type) -> Any:
        if not tensor_types.fits(value):
            if reason := tensor_types.unsendable(value):
                raise SerializationError(reason)
            return NotImplemented
        index = len(self.tensors)
        self.tensors.append(value)
        state = tensor_types.state_of(value, kind)
        if state or kind not in tensor_types.ORDINARY:
            return closures.subclass_slot, (index, kind, state)
        return closures.tensor_slot, (index,)

    def _by_value(self, value: Any) -> Any:
        if value.__module__ == _SPAWNED and loaded(value):
            return NotImplemented
        if type(value) is FunctionType:
            if is_dispatcher(value):
                return reduce_dispatcher(value)
            self._captured.look(value)
        reduced = super().reducer_override(value)
        if reduced is NotImplemented or len(reduced) < 6:
            return reduced
        if type(value) is FunctionType:
            leave_locks(value, reduced)
        return self._code.tag(value, reduced)


class _Unpickler(pickle.Unpickler):
    """Answers by-reference slots by the tables of one message."""

    parts: tuple[CodeCache, list[torch.Tensor], Externals | None]
    tables: _Tables | None

    def find_class(self, module: str, name: str) -> Any:
        if module == closures.__name__ and name in closures.SLOTS:
            self.tables = self.tables or _Tables(*self.parts)
            return self.tables.slot(name)
        try:
            if module not in sys.modules:
                load_packages_of(module)
            return super().find_class(module, name)
        except (AttributeError, ModuleNotFoundError) as error:
            raise MissingCodeError.about(error) from error


def _find(module: str, name: str) -> Any:
    """What goes by name, where no pickle says so. MissingCodeError."""
    return _Unpickler(io.BytesIO()).find_class(module, name)


class _Tables:
    """What a message carries beside its pickle. Apart from the unpickler, which remembers the methods it was given:
    in a circle, both would keep RRefs until the next collection."""

    def __init__(self, code: CodeCache, received: list[torch.Tensor], externals: Externals | None) -> None:
        self._code = code
        self._tensors = received
        self._externals = externals

    def slot(self, name: str) -> Any:
        """The method for a name in `closures.SLOTS`."""
        match name:
            case "tensor_slot":
                return self.tensor
            case "subclass_slot":
                return self.dressed
            case "external_slot":
                return self.external
            case "make_slot":
                return self._code.make
            case _:
                return self._code.fill

    def tensor(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self._tensors):
            raise ProtocolError(f"a message mentions tensor {index}, but brings {len(self._tensors)}")
        return self._tensors[index]

    def dressed(self, index: int, kind: type[torch.Tensor], state: Any) -> torch.Tensor:
        return tensor_types.dress(kind, self.tensor(index), state)

    def external(self, *name: Any) -> object:
        if self._externals is None:
            raise ProtocolError(f"a message mentions external {name}, where none can be")
        return self._externals.take(*name)


def _owned(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Each buffer as memory of its own: a read-only one is the sender's."""
    return (bytearray(buffer) if memoryview(buffer).readonly else buffer for buffer in buffers)


def _words(error: Exception) -> str:
    if isinstance(error, TypeError | pickle.PicklingError):
        return str(error)
    return f"{type(error).__name__}: {error}"
