"""How a script joins a world: `init_rpc`, and torch's older names for it and for the end."""

from __future__ import annotations

import contextlib
import enum
import logging
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed
from torch._C._distributed_c10d import Store

from rpcbench.base.config import JOIN_SECONDS
from rpcbench.base.errors import IncompleteWorldError
from rpcbench.base.rebuild import story, words
from rpcbench.rpc import api, backend_registry
from rpcbench.rpc.backend_registry import BackendType
from rpcbench.rpc.constants import DEFAULT_NUM_WORKER_THREADS
from rpcbench.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpcbench.rpc.rendezvous import may_found, meet
from rpcbench.rpc.start import join
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo
from rpcbench.transport.base import Link

_Part = Callable[[Agent], object]
_LONG_SECONDS = 10.0
_CAUSE_SECONDS = 2.0
_FIRST = 100
_log = logging.getLogger("rpcbench")
_ONE_HOST = (
    "All workers of this world are looked for on one host, here {!r}; those on several hosts meet at "
    "init_method='tcp://ADDRESS:PORT', with an address of worker 0's host that the others reach"
)


def is_available() -> bool:
    """Whether RPC can be used: always."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join a world of workers; returns when it is complete and this process serves calls.

    name: unique in the world. rank: this worker's id; worker 0 leads. world_size: how many workers to wait for, and
    that no others may join; None for a world where workers come and go. backend: by default the one of the options.
    TypeError for what is neither backend nor options, or options of no backend; RuntimeError where this process is in
    a world already, or the world refuses it; ValueError where rank, host or port are missing, or the device maps of a
    worker do not fit. Classes and words are torch's.

    >>> import rpcbench.rpc as rpc
    >>> options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:29500")
    >>> rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
    >>> rpc.rpc_sync("trainer", max, (3, 5))
    5
    >>> rpc.shutdown()
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if rpc_backend_options is not None and not isinstance(rpc_backend_options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        backend = _TENSORPIPE if rpc_backend_options is None else _backend_of(rpc_backend_options)
    options = rpc_backend_options or backend_registry.construct_rpc_backend_options(backend)
    _init_rpc_backend(backend, None, name, rank, world_size, options)


def _backend_of(options: RpcBackendOptions) -> BackendType:
    for candidate in BackendType:
        if isinstance(options, type(backend_registry.construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def _init_rpc_backend(
    backend: BackendType | None = None,
    store: Store | None = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """As `init_rpc`; where there is a store, the workers meet by it, not by the options' init_method."""
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized in this process; call rpc.shutdown() first")
    backend = backend or _TENSORPIPE
    _check(name=(name, str), rank=(rank, int), world_size=(world_size, int | None))
    options = rpc_backend_options or backend_registry.construct_rpc_backend_options(backend)
    made = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=options
    )
    api._init_rpc_states(made)


def _check(**arguments: tuple[Any, Any]) -> None:
    for name, (value, kind) in arguments.items():
        if not isinstance(value, kind):
            raise RuntimeError(f"Argument {name} must be of type {kind} but got type {type(value)}: {value!r}")


def join_world(
    store: Store | None,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    link: Link | None = None,
) -> Agent:
    """For backends: a started agent in the world of these options."""
    threads = getattr(rpc_backend_options, "num_worker_threads", DEFAULT_NUM_WORKER_THREADS)
    url, timeout = rpc_backend_options.init_method, rpc_backend_options.rpc_timeout
    place = url if store is None else _place_in(store, rank, world_size)
    met = replace(meet(name, place, rank, world_size, timeout, threads), held=True)  # until `_init_rpc_states`
    config = rpc_backend_options._completed(met)
    try:
        with _telling_of_waiting(name) as waits:
            parts = (_tell_errors, _tell_losses, waits)
            deadline = time.monotonic() + max(JOIN_SECONDS, timeout)
            return join(config, may_found(config, place), deadline, link, parts)
    except IncompleteWorldError as error:
        if config.leader:
            raise
        raise IncompleteWorldError(f"{error}. {_ONE_HOST.format(socket.gethostname())}") from error


def _place_in(store: Store, rank: int, world_size: int | None) -> str:
    """A meeting place that only users of this store know: of one closed world, or of all open ones."""
    if world_size is None:
        return f"file:///{store.compare_set('rpcbench/place', '', secrets.token_hex(16)).decode()}"
    key = f"rpcbench/place/{store.add(f'rpcbench/comings/{rank}', 1)}"
    if rank == 0:
        store.set(key, secrets.token_hex(16))
    return f"file:///{store.get(key).decode()}"


@contextlib.contextmanager
def _telling_of_waiting(name: str) -> Iterator[_Part]:
    """Who starts only some of the workers, or one with a wrong address, need not wait for the error to learn of it.

    What it yields is to know the agent, once there is one.
    """
    agents: list[Agent] = []

    def tell() -> None:
        census = agents[-1].roster.census() if agents else "only 0 came: not even member 0 answered"
        _log.warning("%s waits for its world; %s", name, census)

    timer = threading.Timer(_LONG_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield lambda agent: agents.append(agent)
    finally:
        timer.cancel()


def _tell_losses(agent: Agent) -> None:
    """A script may have no call under way that would say so."""

    def tell(kind: str, who: WorkerInfo, reason: str) -> None:
        if kind == "lost":
            _log.warning("%s: %s is lost: %s", agent.name, who.name, reason)
            _end_later()

    agent.on_member(tell)


def _end_later() -> None:
    """Where this process ends by an error now, that is likely for the loss: it lets the other one, whose error is the
    cause, end before it. What has started both (torch.multiprocessing, torchrun) shows the error that it sees first."""
    until = time.monotonic() + _CAUSE_SECONDS
    # Not atexit: that does not run in the forked children of multiprocessing.
    Finalize(None, lambda: time.sleep(max(0.0, until - time.monotonic())), exitpriority=_FIRST)


def _tell_errors(agent: Agent) -> None:
    """A script says on its own stderr, too, what a caller's function has raised in it."""

    def tell(error: BaseException) -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed; the caller hears of it anyway
            who = f"WorkerInfo(id={agent.id}, name={agent.name})"
            sys.stderr.write(f"On {who}:\n{words(error)}\n{story(error)}")

    agent.on_error = tell


def _options(rpc_timeout: float, init_method: str, **kwargs: Any) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def _join_tensorpipe(rpc_backend_options: RpcBackendOptions, store: Store | None, **kwargs: Any) -> Agent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not {rpc_backend_options!r}")
    if store is not None and not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store, not {store!r}")
    return join_world(rpc_backend_options=rpc_backend_options, store=store, **kwargs)


_TENSORPIPE = backend_registry.register_backend("TENSORPIPE", _options, _join_tensorpipe)


# -- names from torch 1.3 and 1.4
class RpcBackend(enum.Enum):
    """The backends of torch 1.3; there is one runtime here, whichever is named."""

    PROCESS_GROUP = 1


def init_model_parallel(
    self_name: str,
    backend: RpcBackend | BackendType = RpcBackend.PROCESS_GROUP,
    self_rank: int = -1,
    init_method: str | None = None,
    num_send_recv_threads: int = 4,
) -> None:
    """`init_rpc` of torch 1.3: rank and size of the world are those of torch's default process group.

    Call `torch.distributed.init_process_group("gloo", ...)` first; RuntimeError without. ValueError where `self_rank`
    is not the rank in the group. Without an init_method the workers meet by the group.
    """
    group = torch.distributed
    if not group.is_initialized():
        raise RuntimeError(
            "init_model_parallel takes rank and world size from the default process group, and there is none: call "
            'torch.distributed.init_process_group("gloo", ...) first, or use init_rpc'
        )
    rank, size = group.get_rank(), group.get_world_size()
    if self_rank not in (-1, rank):
        raise ValueError(f"self_rank is {self_rank}, but this process has rank {rank} in the default process group")
    place: list[Any] = [secrets.token_hex(16)]
    group.broadcast_object_list(place, src=0)
    url = init_method or f"file:///{place[0]}"
    init_rpc(self_name, None, rank, size, _options(60.0, url, num_worker_threads=num_send_recv_threads))


def join_rpc() -> None:
    """`shutdown()`, as torch 1.3 called it."""
    api.shutdown()


def wait_all_workers() -> None:
    """`shutdown()`, as torch 1.4 called it."""
    api.shutdown()
