"""torch's fault injection under its names: the backend FAULTY_TENSORPIPE, where chosen kinds of messages fail or lag.

Kinds are torch's: a call is a SCRIPT_CALL if the name of its function is an operator of torch, else a PYTHON_CALL.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import Any

import torch

from rpcbench.rpc import backend_registry
from rpcbench.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC
from rpcbench.rpc.init import join_world
from rpcbench.rpc.options import RpcBackendOptions
from rpcbench.runtime.agent import Agent
from rpcbench.testing.faults import Faults
from rpcbench.wire import messages as m


def _make_filter(
    kind: type[Any], operator: bool | None = None
) -> Callable[[m.Message], bool]:  # operator: of torch, or not
    def is_meant(message: m.Message) -> bool:
        return isinstance(message, kind) and (operator is None or _is_operator(message.label) is operator)

    return is_meant


def _is_operator(label: str) -> bool:
    module, _, name = label.rpartition(".")
    if module != "torch" and hasattr(builtins, name):  # `max` of Python has the label "max", torch's has "torch.max"
        return False
    return isinstance(getattr(torch, name, None), BuiltinFunctionType)


KINDS: Mapping[str, Callable[[m.Message], bool]] = {
    "PYTHON_CALL": _make_filter(m.Call, operator=False),
    "SCRIPT_CALL": _make_filter(m.Call, operator=True),
    "PYTHON_REMOTE_CALL": _make_filter(m.Create, operator=False),
    "SCRIPT_REMOTE_CALL": _make_filter(m.Create, operator=True),
    "PYTHON_RREF_FETCH_CALL": _make_filter(m.Fetch),
    "SCRIPT_RREF_FETCH_CALL": _make_filter(m.Fetch),  # the same as above: a fetch names no function
    "PYTHON_RET": _make_filter(m.Result),
    "SCRIPT_RET": _make_filter(m.Result),  # as for fetches
    "RREF_FORK_REQUEST": _make_filter(m.ForkRequest),
    "RREF_CHILD_ACCEPT": _make_filter(m.ChildAccept),
    "RREF_USER_DELETE": _make_filter(m.UserDelete),
    "RREF_ACK": _make_filter(m.ForkAccept),  # torch also sends it for accepted children and deletes
    "BACKWARD_AUTOGRAD_REQ": _make_filter(m.Gradients),
    "BACKWARD_AUTOGRAD_RESP": _make_filter(m.Settled),
    "CLEANUP_AUTOGRAD_CONTEXT_REQ": _make_filter(m.ReleaseContext),
}
"""torch's kinds of messages that have a counterpart here, each with a function that recognizes it."""


class FaultyTensorPipeRpcBackendOptions(RpcBackendOptions):
    """Options of the faulty backend.

    Args:
        num_worker_threads: Number of threads that run calls.
        rpc_timeout: Seconds a call may take that names no timeout.
        init_method: URL of the rendezvous.
        messages_to_fail: Kinds of messages; sending one of these fails for the first `num_fail_sends` attempts.
        messages_to_delay: By kind of message, the seconds that it takes longer.
        num_fail_sends: How often each message fails.
        faults: Further faults; those above are added to it.

    Raises:
        ValueError: A kind is not in `KINDS`.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        messages_to_fail: Sequence[str] = (),
        messages_to_delay: Mapping[str, float] | None = None,
        num_fail_sends: int = 0,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(rpc_timeout, init_method)
        unknown = {*messages_to_fail, *(messages_to_delay or {})} - KINDS.keys()
        if unknown:
            raise ValueError(f"unknown kind of message: {', '.join(sorted(unknown))}; use some of: {', '.join(KINDS)}")
        self.num_worker_threads = num_worker_threads
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay or {})
        self.num_fail_sends = num_fail_sends
        self.faults = faults


def _join_faulty(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: FaultyTensorPipeRpcBackendOptions
) -> Agent:
    options = rpc_backend_options
    link = options.faults or Faults()
    for kind in options.messages_to_fail:
        link.refuse(KINDS[kind], times=options.num_fail_sends)
    for kind, seconds in options.messages_to_delay.items():
        link.delay(KINDS[kind], seconds)
    return join_world(store, name, rank, world_size, options, link)


FAULTY = backend_registry.register_backend("FAULTY_TENSORPIPE", FaultyTensorPipeRpcBackendOptions, _join_faulty)
"""The backend whose options can let kinds of messages fail, or delay them: for `init_rpc`."""


# -- for suites that run against several implementations
def backend() -> backend_registry.BackendType:
    """Return the usual backend."""
    return backend_registry.BackendType["TENSORPIPE"]


def backend_options(init_method: str) -> RpcBackendOptions:
    """Return options of the usual backend, for a world with its rendezvous at URL `init_method`."""
    return backend_registry.construct_rpc_backend_options(backend(), init_method=init_method)


def faulty_backend() -> backend_registry.BackendType:
    """Return the backend that injects faults."""
    return FAULTY


def faulty_options(init_method: str, fail: Sequence[str], delay: Mapping[str, float]) -> RpcBackendOptions:
    """Return options of the faulty backend, with the figures of torch's own test suite.

    Args:
        init_method: URL of the rendezvous.
        fail: Kinds of messages; sending one fails for the first three attempts.
        delay: By kind of message, the seconds that it takes longer.
    """
    return backend_registry.construct_rpc_backend_options(
        FAULTY,
        init_method=init_method,
        num_worker_threads=8,
        num_fail_sends=3,
        messages_to_fail=fail,
        messages_to_delay=delay,
    )
