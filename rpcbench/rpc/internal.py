"""What torch.distributed.rpc.internal offers to programs that pickle for themselves, or name kinds of calls."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
import torch

from rpcbench.base.errors import RpcError
from rpcbench.rpc.agent import _get_current_rpc_agent
from rpcbench.runtime.handles import Handle
from rpcbench.serialization.pickler import Codec
from rpcbench.wire.messages import Body

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "_get_current_rpc_agent", "deserialize", "serialize"]


class RPCExecMode(enum.Enum):
    """How a function is called."""

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
    """torch's form of a remote error; here errors travel as themselves, so it is only a name."""

    msg: str
    exception_type: type[BaseException]


class _NoRRefs:
    """Outside a call there is nobody to share an RRef with."""

    def give(self, value: object) -> None:
        if isinstance(value, Handle):
            value._check_alive("fork an UserRRef")
            raise RpcError("Can not pickle rref in python pickler, rref can only be pickled when using RPC")

    def take(self, *name: Any) -> object:
        raise AssertionError("nothing was given")


class _InternalRPCPickler:
    """The codec of calls, for programs: bytes, and the tensors beside them."""

    def __init__(self) -> None:
        self._codec = Codec()

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """A value as bytes and a list of tensors. SerializationError; RpcError where it holds an RRef."""
        body, tensors = self._codec.encode(obj, _NoRRefs())
        return msgpack.packb((body.payload, body.tensors, [bytes(buffer) for buffer in body.buffers])), tensors

    def deserialize(self, binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
        """The value of what `serialize` made, with the tensors of `tensor_table`."""
        payload, table, buffers = msgpack.unpackb(binary_data)
        body = Body(payload, table, [bytearray(buffer) for buffer in buffers])
        return self._codec.decode(body, adopt=lambda _: list(tensor_table))


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """As the pickler's; what is given must be trusted, as with pickle."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: Sequence[torch.Tensor]) -> Any:
    """As the pickler's; runs what the bytes say, as pickle does."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def _run_function(python_udf: PythonUDF) -> Any:
    return python_udf.func(*python_udf.args, **(python_udf.kwargs or {}))


def _run_pickled(binary_data: bytes, tensors: list[torch.Tensor]) -> Any:
    """Runs on the callee: a call that another pickler has packed."""
    return _run_function(deserialize(binary_data, tensors))


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name of a call in profiles: `rpc_sync#aten::add(worker0 -> worker1)`."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
