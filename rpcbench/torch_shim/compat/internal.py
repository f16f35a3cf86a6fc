"""The names of torch.distributed.rpc.internal for programs that use the pickler, or name kinds of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from rpcbench.base.errors import RpcError
from rpcbench.rpc import api
from rpcbench.rpc.agent import _get_current_rpc_agent
from rpcbench.rpc.functions import run_marked
from rpcbench.rpc.profiling import RPCExecMode, _build_rpc_profiling_key
from rpcbench.runtime.handles import RRefHandle
from rpcbench.serialization.pickler import Codec
from rpcbench.wire.encoding import RECEIVED_BODY, encode_plain
from rpcbench.wire.messages import Body

__all__ = [
    "PythonUDF", "RPCExecMode", "RemoteException", "_build_rpc_profiling_key", "_get_current_rpc_agent", "deserialize",
    "serialize",
]  # fmt: skip


class PythonUDF(NamedTuple):
    """A call of a Python function."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """torch's form of a remote error. Here errors are sent as themselves, so no code creates one."""

    msg: str
    exception_type: type[BaseException]


class _NoRRefs:
    """The handler of by-reference slots outside a call: it refuses RRefs, since there is no peer to fork them for."""

    def name_of_external(self, value: object) -> None:
        if isinstance(value, RRefHandle):
            value._check_alive("fork an UserRRef")  # a failed or released RRef has an error of its own
            raise RpcError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def find_external(self, *name: Any) -> object:
        raise AssertionError("nothing was given")  # unreachable: `name_of_external` stores nothing


class _InternalRPCPickler:
    """The codec of calls, with torch's interface: bytes, and a list of the tensors beside them."""

    def __init__(self) -> None:
        self._codec = Codec()

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return a value as bytes and a list of tensors. Raises SerializationError; RpcError if it holds an RRef."""
        body, tensors = self._codec.encode_value(obj, _NoRRefs())
        # msgpack joins the three parts of a body, as torch's interface has room for one bytes object only.
        return encode_plain(body), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """Return the value that `serialize` packed. Like pickle it can run any code: pass only bytes that you trust."""
        parts = msgspec.msgpack.decode(binary_data, type=RECEIVED_BODY)
        return self._codec.decode_value(Body(*parts), adopt=lambda _: list(tensor_table))


_internal_rpc_pickler = _InternalRPCPickler()


serialize, deserialize = _internal_rpc_pickler.serialize, _internal_rpc_pickler.deserialize


def _run_function(python_udf: PythonUDF) -> Any:
    return python_udf.func(*python_udf.args, **(python_udf.kwargs or {}))


def _run_pickled(binary_data: bytes, tensors: list[torch.Tensor]) -> Any:
    """Run a call that `_use_rpc_pickler` has packed; runs on the callee."""
    udf: PythonUDF = deserialize(binary_data, tensors)
    return run_marked(udf.func, tuple(udf.args), udf.kwargs or {})


_default_pickler: Any = _internal_rpc_pickler  # of the whole process, as in torch


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pack calls made in this block, in all threads, with `rpc_pickler.serialize(obj) -> (bytes, tensors)`."""
    global _default_pickler
    _default_pickler = rpc_pickler
    api.pack_call = lambda function, args, kwargs: (
        _run_pickled, rpc_pickler.serialize(PythonUDF(function, args, kwargs)), {}
    )  # fmt: skip
    try:
        yield
    finally:
        _default_pickler, api.pack_call = _internal_rpc_pickler, None
