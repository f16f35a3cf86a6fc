"""The names of torch.distributed.rpc.internal for programs that use the pickler, or name kinds of calls."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import torch

from rpcbench.base.errors import RpcError
from rpcbench.rpc.agent import _get_current_rpc_agent
from rpcbench.rpc.functions import run_marked
from rpcbench.runtime.handles import RRefHandle
from rpcbench.serialization.pickler import Codec
from rpcbench.wire.messages import Body

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "_get_current_rpc_agent", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """The kind of a call, for names in profiles."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


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

    def give(self, value: object) -> None:
        if isinstance(value, RRefHandle):
            value._check_alive("fork an UserRRef")  # a failed or released RRef has an error of its own
            raise RpcError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def take(self, *name: Any) -> object:
        raise AssertionError("nothing was given")  # unreachable: `give` stores nothing


class _InternalRPCPickler:
    """The codec of calls, with torch's interface: bytes, and a list of the tensors beside them."""

    def __init__(self) -> None:
        self._codec = Codec()

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Return a value as bytes and a list of tensors. Raises SerializationError; RpcError if it holds an RRef."""
        body, tensors = self._codec.encode(obj, _NoRRefs())
        # msgpack joins the three parts of a body, as torch's interface has room for one bytes object only.
        return msgpack.packb((body.payload, body.tensors, [bytes(buffer) for buffer in body.buffers])), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """Return the value that `serialize` packed. Like pickle it can run any code: pass only bytes that you trust."""
        payload, table, buffers = msgpack.unpackb(binary_data)
        body = Body(payload, table, [bytearray(buffer) for buffer in buffers])  # writable, as arrays may use them
        return self._codec.decode(body, adopt=lambda _: list(tensor_table))


_internal_rpc_pickler = _InternalRPCPickler()


serialize, deserialize = _internal_rpc_pickler.serialize, _internal_rpc_pickler.deserialize


def _run_function(python_udf: PythonUDF) -> Any:
    return python_udf.func(*python_udf.args, **(python_udf.kwargs or {}))


def _run_pickled(binary_data: bytes, tensors: list[torch.Tensor]) -> Any:
    """Run a call that `_use_rpc_pickler` has packed; runs on the callee."""
    udf: PythonUDF = deserialize(binary_data, tensors)
    return run_marked(udf.func, tuple(udf.args), udf.kwargs or {})


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call in profiles: `rpc_sync#aten::add(worker0 -> worker1)`."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
