"""The codec of values: bodies of messages from values, and back. The only module that unpickles data from peers.

Tensors are sent in a table beside the pickle (`tensors`), code of `__main__`, lambdas and closures by value
(`closures`), and externals, which are objects of another layer such as RRefs, by their numbers. Arrays and other large
buffers are sent out of band, without a copy.

Guarantees
- Nothing is unpickled before the peer is authenticated.
- An object that appears twice in a value is one object on arrival; received objects share no memory with the sender.
- A value that cannot be sent raises a SerializationError that names the part at fault; nothing has been sent then.
- A payload that refers to tensors or externals which its message does not contain raises ProtocolError.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import (
    AsyncGeneratorType,
    BuiltinFunctionType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any, Protocol

import cloudpickle
import torch

from rpcbench.base import rebuild
from rpcbench.base.errors import ProtocolError, RpcError, SerializationError
from rpcbench.base.sources import code_source
from rpcbench.serialization import closures, fast_path, tensor_types, tensors
from rpcbench.serialization.closures import (
    CodeCache,
    MissingCodeError,
    is_dispatcher,
    reduce_cached_property,
    reduce_dispatcher,
    reduce_lru_cache,
    reduce_new_type,
    replace_locks,
)
from rpcbench.serialization.diagnostics import CapturedData, find_fault, refuse_suspended
from rpcbench.serialization.fast_path import Encoded, has_name
from rpcbench.serialization.importable import is_importable, is_loaded, load_packages_of
from rpcbench.serialization.main_module import annotated_globals, resolve_annotations
from rpcbench.serialization.tensor_types import CPU_ONLY, Route
from rpcbench.serialization.tensors import SMALL, Buffer
from rpcbench.wire.messages import EMPTY, Body

_PROTOCOL = 5
_SPAWNED = "__mp_main__"
"""The name of `__main__` in processes started by multiprocessing, all of which have it."""
_SHORT = 1 << 12
"""Bytes. A pickler that has written a longer pickle is not reused: its stream and memo have grown with it."""
_MOST_ERROR = 16 << 20
"""Bytes of the pickle of an error, or of one of its parts, beyond which it is shortened."""
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    **cloudpickle.Pickler.dispatch_table.maps[0],
    functools._lru_cache_wrapper: reduce_lru_cache,
    functools.cached_property: reduce_cached_property,
    typing.NewType: reduce_new_type,
    MethodType: closures.reduce_method,
    ModuleType: closures.reduce_python_module,
    torch.jit.ScriptFunction: closures.reduce_function,
    **dict.fromkeys((CoroutineType, AsyncGeneratorType, GeneratorType), refuse_suspended),
}


def register_reducer(kind: type, reducer: Callable[[Any], Any]) -> None:
    """Pickle instances of exactly this class by `reducer(instance)`, in all later calls from this process.

    The reducer takes precedence over all other ways to pickle the instance. The latest reducer of a class counts.

    Args:
        kind: The class. Its subclasses are not affected.
        reducer: Takes an instance and returns a tuple as `__reduce__` does: a function, and the tuple of its arguments.
            The receiver finds the function by name; a function of a notebook is sent by value.

    Raises:
        TypeError: `kind` is not a class, or `reducer` not callable.
    """
    if not isinstance(kind, type) or not callable(reducer):
        raise TypeError(f"register_reducer takes a class and a function, not {kind!r} and {reducer!r}")
    _REDUCERS[kind] = reducer


def _register_reducer(kind: type, reducer: Callable[[Any], Any]) -> None:
    """Do as `register_reducer`, but the first reducer of a class counts, as in torch."""
    if kind not in _REDUCERS:
        register_reducer(kind, reducer)


class Externals(Protocol):
    """Objects of another layer, such as RRefs, that messages carry outside of the pickle."""

    def name_of_external(self, value: object) -> tuple[int | str, ...] | None:
        """Return the name of an external: `(number in the message,)`, or a longer tuple for one that is not in the
        message; None for any other value. Called for most objects, so it is fast. If `encode_value` raises, none is
        sent."""

    def find_external(self, *name: Any) -> object:
        """Return the external of that name; ProtocolError if there is none."""


class Codec:
    """The encoder and decoder of one agent, or of another sender, for any thread. All of a process share `code`: a
    class that arrives by value is one class, whichever of them has received it."""

    def __init__(self, code: CodeCache = closures.HERE) -> None:
        self._code = code
        self._captured = CapturedData()
        self._idle: list[_Pickler] = []  # picklers to reuse; one that works is not in the list, so each has one thread

    def encode_value(
        self,
        value: object,
        externals: Externals | None = None,
        label: str | tuple[str, ...] = "value",
        route: Route = CPU_ONLY,
    ) -> Encoded:
        """Return `value` as a body. SerializationError if a part of it cannot be sent. `label` names the value in
        errors, or, as a tuple, the items of a tuple. `route` maps devices. Tensors below 16 KB are copied; larger ones
        must not change until the body is sent."""
        return (not route.targets and self.encode_plainly(value)) or self.encode_fully(value, externals, label, route)

    # -- the fast path of `encode_value`, for tensors on the CPU; None where the value needs the general path
    def encode_plainly(self, value: object) -> Encoded | None:
        return fast_path.encode_plain(value) or _encode_one_tensor(value)

    def encode_plain_call(self, function: Any, args: tuple[Any, ...], name_of: fast_path.Name | None) -> Encoded | None:
        """Encode a call without keyword arguments. `name_of`: as `Externals.name_of_external`, for externals sent by
        name alone."""
        return fast_path.encode_call(function, args, _REDUCERS, name_of)

    def encode_fully(
        self, value: object, externals: Externals | None, label: str | tuple[str, ...], route: Route
    ) -> Encoded:
        """Encode by the general path."""
        try:
            return self._pickle_body(value, externals, route)
        except Exception as error:  # a user's `__reduce__` may raise anything
            if isinstance(error, RpcError) and not isinstance(error, SerializationError):
                raise  # an external cannot be sent, which is no fault of the value
            tried = replace(route, files=None)  # what is pickled on trial is not sent
            path, cause = find_fault(value, label, error, lambda part: self._encoding_error(part, externals, tried))
            raise SerializationError(f"{path}: {_error_text(cause)}") from cause

    def _pickle_body(self, value: object, externals: Externals | None, route: Route) -> Encoded:
        try:
            pickler = self._idle.pop()
        except IndexError:
            pickler = _Pickler(self._code, self._captured)
        payload, found, beside, files = pickler.pickle_value(value, externals, route)
        if len(payload) < _SHORT and not pickler.globals_ref:
            self._idle.append(pickler)  # not after an error, which may leave tensors in it
        table, buffers = tensors.encode_tensors(found, route) if found else (b"", [])
        if files and route.files is not None:
            route.files.update(files)
        return Body(payload, table, buffers + beside), found

    def encode_error(self, error: BaseException) -> Body:
        """Return an error as a body that keeps its type, if its class can be sent; else an empty body. Parts that
        cannot be pickled are replaced by their `repr`. In an error of more than 16 MB each text is cut to
        `rebuild.MOST_TEXT` characters."""
        body = self._error_body(lambda: error)
        return body or self._error_body(lambda: rebuild.shorten_error(error, self._shorten_part)) or EMPTY

    def _error_body(self, make: Callable[[], object]) -> Body | None:
        """Return the body of `make()`; None if it cannot be pickled, or is too large."""
        try:
            body, _ = self._pickle_body(make(), None, CPU_ONLY)
        except Exception:  # noqa: BLE001  (a user's __reduce__ may raise anything; the error's text is sent anyway)
            return None
        return body if len(body.payload) <= _MOST_ERROR else None

    def _shorten_part(self, part: object) -> object:
        """Return a part of an error, shortened or as text if necessary."""
        if isinstance(part, bytes):  # a UnicodeDecodeError cannot be made without bytes
            return part[: rebuild.MOST_TEXT]
        if type(part) is str:
            return rebuild.cut_text(part)
        return rebuild.format_value(part) if self._error_body(lambda: part) is None else part

    def _encoding_error(self, value: object, externals: Externals | None, route: Route) -> Exception | None:
        try:
            self._pickle_body(value, externals, route)
        except Exception as error:  # noqa: BLE001  (a user's __reduce__ may raise anything)
            return error
        return None

    def decode_value(
        self,
        body: Body,
        externals: Externals | None = None,
        adopt: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None,
    ) -> Any:
        """Return the value of a body. `adopt` may replace the tensors before any object refers to them. ProtocolError
        for a body that no codec has made, MissingCodeError if the value needs code that this process cannot import;
        errors of the value's own classes are passed on."""
        payload, table, buffers = body
        received, used = tensors.decode_tensors(table, buffers) if table else ([], 0)
        if adopt is not None:
            received = adopt(received)
        if received and payload in (_ALONE, _LISTED):  # the fast path of one tensor: nothing to unpickle
            return received[0] if payload == _ALONE else received[:1]
        external = None if externals is None else externals.find_external
        try:
            if fast_path.is_fast_payload(payload):
                return fast_path.open_payload(pickle.loads(payload), received, _find_object, external)
            buffers = buffers[used:]
            unpickler = _Unpickler(io.BytesIO(payload), buffers=_writable_buffers(buffers) if buffers else None)
            unpickler.tables = None
            unpickler.parts = self._code, received, external
            return unpickler.load()
        except (pickle.UnpicklingError, EOFError) as error:
            raise ProtocolError(f"the peer sent a broken payload: {error}") from error


class _First:
    """An object with the pickle of the first tensor of a table."""

    def __reduce__(self) -> Any:
        return closures.tensor_slot, (0,)


_ALONE, _LISTED = (pickle.dumps(value, _PROTOCOL) for value in (_First(), [_First()]))
"""The payloads of one tensor, and of a list of one: those of most results and most gradients."""


def _encode_one_tensor(value: object) -> Encoded | None:
    """Encode one ordinary tensor, or a list of one, to the same bytes as the general path; None for other values."""
    listed = type(value) is list and len(value) == 1
    tensor: Any = value[0] if listed else value  # type: ignore[index]
    if not fast_path.is_ordinary(tensor, _REDUCERS):
        return None
    table = tensors.encode_dense([tensor])
    return None if table is None else (Body(_LISTED if listed else _ALONE, *table), [tensor])


def _keep_in_band(beside: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Return whether a buffer goes into the pickle; a large one is appended to `beside`, to be sent out of band."""
    # A function, not a method: a pickler in a reference cycle would keep its values until the next garbage collection.
    raw = buffer.raw()
    if raw.nbytes < SMALL:
        return True
    beside.append(raw.toreadonly())
    return False


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that uses cloudpickle only for functions and classes that cannot be sent by name."""

    dispatch_table = copyreg.dispatch_table  # `reducer_override` looks up cloudpickle's reducers in `_REDUCERS`

    def __init__(self, code: CodeCache, captured: CapturedData) -> None:
        self.tensors: list[torch.Tensor] = []
        self._stream = io.BytesIO()
        self._beside: list[memoryview] = []
        super().__init__(
            self._stream, protocol=_PROTOCOL, buffer_callback=functools.partial(_keep_in_band, self._beside)
        )
        self._code = code
        self._captured = captured
        self._externals: Externals | None = None
        self._files: set[str] = set()  # whose sources this message has
        self._route = CPU_ONLY

    def pickle_value(
        self, value: object, externals: Externals | None, route: Route
    ) -> tuple[bytes, list[torch.Tensor], list[memoryview], set[str]]:
        """Return the pickle of a value, its tensors, its out-of-band buffers, and the files whose sources it has; the
        pickler keeps none of them."""
        self._externals, self._route = externals, route
        pickle.Pickler.dump(self, value)  # not cloudpickle's `dump`, which replaces a RecursionError
        payload, found, beside, files = self._stream.getvalue(), self.tensors, self._beside.copy(), self._files
        self.tensors, self._externals, self._files = [], None, set()
        self._beside.clear()
        self._stream.seek(0)
        self._stream.truncate()
        self.clear_memo()
        return payload, found, beside, files

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)  # the common types come first: this runs for every object that is no plain data
        reducer = _REDUCERS.get(kind)
        if reducer is not None:
            return self._with_source(value, reducer(value)) if kind is CodeType else reducer(value)
        if kind is torch.Tensor:
            if value.is_quantized or value.is_nested or vars(value):
                return self._reduce_tensor(value, kind)
            self.tensors.append(value)
            return closures.tensor_slot, (len(self.tensors) - 1,)
        if kind is FunctionType or issubclass(kind, type):
            return NotImplemented if value is closures.tensor_slot or is_importable(value) else self._by_value(value)
        # Some C functions of a module are methods of a class as well, by which pickle would look for them.
        if kind is BuiltinFunctionType and has_name(value):
            return value.__name__
        if issubclass(kind, torch.Tensor):
            return self._reduce_tensor(value, kind)
        if self._externals is not None:
            name = self._externals.name_of_external(value)
            if name is not None:
                return closures.external_slot, name
        if issubclass(kind, torch.jit.ScriptModule):
            return closures.reduce_module(value, self._route)
        if issubclass(kind, BaseException):
            return rebuild.reduce_error(value) or NotImplemented
        return NotImplemented

    def _reduce_tensor(self, value: torch.Tensor, kind: type) -> Any:
        if not tensor_types.is_describable(value):  # pickled as torch does, by its own `__reduce_ex__`
            if reason := tensor_types.unsendable_reason(value):
                raise SerializationError(reason)
            return NotImplemented
        index = len(self.tensors)
        self.tensors.append(value)
        state = tensor_types.subclass_state(value, kind)
        if state or kind not in tensor_types.ORDINARY:
            return closures.subclass_slot, (index, kind, state)
        return closures.tensor_slot, (index,)

    def _with_source(self, code: CodeType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add the source to a reduced code object if the receiver does not have it."""
        file, known = code.co_filename, self._route.files
        if known is None or file in known or file in self._files:
            return reduced
        self._files.add(file)
        source = code_source(file)
        return reduced if source is None else (closures.make_code, (reduced[1], file, *source))

    def _by_value(self, value: Any) -> Any:
        if value.__module__ == _SPAWNED and is_loaded(value):
            return NotImplemented
        if type(value) is FunctionType:
            if is_dispatcher(value):
                return reduce_dispatcher(value)
            self._captured.check_function(value)
        reduced = super().reducer_override(value)
        if reduced is NotImplemented or len(reduced) < 6:  # it has no setter of members, so it is no code by value
            return reduced
        if type(value) is FunctionType:
            reduced[2][1]["__globals__"].update(annotated_globals(value))
            replace_locks(value, reduced)
        elif named := reduced[2][0].get("__annotations__"):
            reduced[2][0]["__annotations__"] = resolve_annotations(value, named)
        return self._code.tag_reduction(value, reduced)


class _Unpickler(pickle.Unpickler):
    """An unpickler that resolves the by-reference slots of one message."""

    parts: tuple[CodeCache, list[torch.Tensor], fast_path.External | None]  # the arguments of `tables`
    tables: _Tables | None  # made for the first slot: many payloads have none

    def find_class(self, module: str, name: str) -> Any:
        if module == closures.__name__ and name in closures.SLOTS:
            self.tables = self.tables or _Tables(*self.parts)
            return getattr(self.tables._code if name in ("make_slot", "fill_slot") else self.tables, name)
        try:
            if module not in sys.modules:
                load_packages_of(module)
            return super().find_class(module, name)
        except (AttributeError, ModuleNotFoundError) as error:
            raise MissingCodeError.from_error(error) from error


def _find_object(module: str, name: str) -> Any:
    """Return the object of a name, imported if necessary. MissingCodeError if this process does not have it."""
    # Without fixed imports: these would take a module of the user for one of Python 2, `commands` for `subprocess`.
    return _Unpickler(io.BytesIO(), fix_imports=False).find_class(module, name)


class _Tables:
    """The tensors, externals and code that a message carries beside its pickle."""

    # Not a part of the unpickler, which keeps the methods that `find_class` returns: in a reference cycle, it would
    # keep RRefs alive until the next garbage collection.
    def __init__(self, code: CodeCache, received: list[torch.Tensor], external: fast_path.External | None) -> None:
        self._code = code
        self._tensors = received
        self._external = external

    def tensor_slot(self, index: int) -> torch.Tensor:
        return fast_path.find_tensor(self._tensors, index)

    def subclass_slot(self, index: int, kind: type[torch.Tensor], state: Any) -> torch.Tensor:
        return tensor_types.restore_subclass(kind, self.tensor_slot(index), state)

    def external_slot(self, *name: Any) -> object:
        return fast_path.find_external(self._external, name)


def _writable_buffers(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """Return writable buffers: a read-only one, which belongs to the sender, is copied."""
    return (bytearray(buffer) if memoryview(buffer).readonly else buffer for buffer in buffers)


def _error_text(error: Exception) -> str:
    if isinstance(error, TypeError | pickle.PicklingError):
        return str(error)
    return f"{type(error).__name__}: {error}"
