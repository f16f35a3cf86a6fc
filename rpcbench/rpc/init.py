"""How a process joins a world: `init_rpc`, where the workers of a script meet, and how an agent is put together.

Where the workers of a script meet: env://, file:// and tcp:// URLs.

Workers of one user on one host meet in a directory that only this user can enter, named after the URL; the first
comer makes the secret there. So no port is opened, and no other user can take part.

Workers on several hosts share a secret that their user gives them (RPCBENCH_SECRET_FILE). Rank 0 listens at the host
and port of the URL, with TLS; each other rank dials it, and listens on the interface that leads there, or on
RPCBENCH_BIND. Those on one host still use its directory among themselves.

Each worker removes its socket file when it leaves. The directory and the secret stay, for the worlds to come: the
quickest worker of the next one may have read the secret before the slowest of this one has gone.

A process that comes under the rank of one before it must not be taken for that one. So before its first message as a
member it asks which incarnation of its rank it is. The leader gives it out in the handshake, and never twice.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import torch.distributed
from torch._C._distributed_c10d import Store

from rpcbench.autograd.recorder import AutogradRecorder
from rpcbench.base.config import JOIN_SECONDS, WorldConfig
from rpcbench.base.errors import (
    AuthenticationError,
    IncompleteWorldError,
    NotConnectedError,
    RefusedError,
    RpcError,
    TurnedAwayError,
)
from rpcbench.base.ids import check_name
from rpcbench.base.rebuild import story, words
from rpcbench.rpc import api, backend_registry
from rpcbench.rpc.agent import RpcAgent
from rpcbench.rpc.backend_registry import BackendType
from rpcbench.rpc.constants import DEFAULT_NUM_WORKER_THREADS
from rpcbench.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.members import WorkerInfo
from rpcbench.runtime.publisher import Health, Publisher
from rpcbench.runtime.timers import keep_what_is_freed
from rpcbench.transport import hosts, listeners, run_dir
from rpcbench.transport.addresses import Opener
from rpcbench.transport.base import Link
from rpcbench.transport.handshake import UNBORN, Identity
from rpcbench.transport.hosts import host_id
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.transport.run_dir import shared_directory, shared_secret

_PAUSE = 0.05
_NEWS = 1.0
"""Seconds until an end has been heard of: who hangs up may be leaving, who has this rank may have been killed."""


def request_incarnation(config: WorldConfig, may_found: bool, deadline: float) -> WorldConfig:
    """The configuration with the id of who leads, which is this process's own where it founds, and its incarnation.

    IncompleteWorldError where nobody answers until `deadline` (of time.monotonic); RefusedError, AuthenticationError.
    """
    me = Identity(config.cluster, config.id, config.name, UNBORN, host_id())
    patience, since = time.monotonic() + _NEWS, time.time()
    while True:
        try:
            leader = _first_answer(config, me)
            return replace(config, led_by=leader.id, incarnation=leader.offer)
        except NotConnectedError as error:
            if may_found:
                return replace(config, led_by=config.id, incarnation=0)
            why: RpcError = error
            if config.world_size is not None and (failure := Rendezvous(Path(config.directory)).failure(since)):
                raise IncompleteWorldError(f"{config.name}: worker 0 could not found the world: {failure}") from error
        except RefusedError as error:
            if not error.again and time.monotonic() > patience:
                raise
            why = error
        except AuthenticationError as error:
            if time.monotonic() > patience:
                raise
            why = error
        if time.monotonic() > deadline:
            raise IncompleteWorldError(f"{config.name} cannot reach {_whom(config)}: {why}") from why
        time.sleep(_PAUSE)  # nothing can tell us when somebody begins to lead


def _whom(config: WorldConfig) -> str:
    if config.world_size is not None or not config.leader:
        return "worker 0 of its world"
    return "worker 0 of its world, nor one on the same host who leads it now"


def _first_answer(config: WorldConfig, me: Identity) -> Identity:
    """NotConnectedError where nobody listens."""
    meeting, opener = Rendezvous(Path(config.directory)), Opener(config.secret)
    ways: Iterable[Callable[[], str]] = (meeting.find, *([lambda: config.leader] if config.leader else []))
    failed = ""
    for way in ways:
        try:
            stream, leader = opener.dial(way(), me)
        except OSError as error:
            failed = f"nobody answers at {config.leader or meeting.path}: {error.strerror or error}"
        else:
            stream.release()
            return leader
    raise NotConnectedError(failed)


class Place(NamedTuple):
    """What a URL says: a key that all its workers share, and rank and size where it (or the environment) has them.

    `leader`: host:port of rank 0, where others than those on this host may come; "" where they may not.
    """

    key: str
    rank: int
    world_size: int | None
    leader: str = ""


def meet_at(name: str, url: str, rank: int, world_size: int | None, rpc_timeout: float, threads: int) -> WorldConfig:
    """The configuration of this worker. ValueError or RuntimeError that says what is missing."""
    check_name(name)
    place = _resolve(url, rank, world_size)
    if place.rank < 0:
        scheme = urlsplit(url).scheme
        raise ValueError(f"{scheme}:// rendezvous: rank parameter missing: pass rank= to init_rpc for {name}")
    shared = run_dir.load_secret()
    if place.leader and shared is None:
        if urlsplit(f"//{place.leader}").hostname != socket.gethostname().lower():
            raise run_dir.demand_secret(place.leader)
        place = place._replace(leader="")  # a program of one host, which names it
    directory = shared_directory(place.key if place.key.startswith("file:") else f"{place.key} on {host_id()}")
    return WorldConfig(
        name=name,
        id=place.rank,
        cluster=hashlib.sha256(place.key.encode()).hexdigest()[:16],
        directory=str(directory),
        secret=shared or shared_secret(directory),
        world_size=place.world_size,
        rpc_timeout=rpc_timeout,
        threads=threads,
        leader=f"tls://{place.leader}" if place.leader else "",
        remote=_remote(place) if place.leader else "",
        launched=False,
        bind=hosts.bind_address(),
    )


def may_found(config: WorldConfig, url: str) -> bool:
    """Whether this process founds the world if it finds none: rank 0, and in an open world at a file any rank.

    As with torch, whose file is there for all, and whose port belongs to rank 0.
    """
    return config.id == 0 or (config.world_size is None and urlsplit(url).scheme == "file")


def _remote(place: Place) -> str:
    """Where workers on other hosts find this one, unless it founds an open world."""
    if place.rank == 0 and place.world_size is not None:
        return f"tls://{place.leader}"
    return hosts.address_towards(place.leader)


def _resolve(url: str, rank: int, world_size: int | None) -> Place:
    parts = urlsplit(url)
    if parts.scheme == "env":
        return _from_environment(rank, world_size)
    query = {key: int(values[-1]) for key, values in parse_qs(parts.query).items() if key in ("rank", "world_size")}
    rank = rank if rank >= 0 else query.get("rank", -1)
    world_size = world_size if world_size is not None else query.get("world_size")
    if parts.scheme == "file":
        if not parts.path:
            raise ValueError(f"file:// rendezvous: path missing: {url!r} names no file; write file:///path")
        return Place(f"file://{os.path.abspath(parts.path)}", rank, world_size)  # noqa: PTH100  (no such file needed)
    if parts.scheme == "tcp":
        return _on_network(parts.hostname or "", parts.port, rank, world_size)
    raise RuntimeError(
        f"No rendezvous handler for {parts.scheme}://: init_method {url!r} is not known; use env://, file:///path or "
        "tcp://host:port"
    )


def _from_environment(rank: int, world_size: int | None) -> Place:
    needed = ["MASTER_ADDR", "MASTER_PORT"] if rank >= 0 else ["RANK", "MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ValueError(
            f"env:// rendezvous: environment variable {missing[0]} expected, but not set: it needs "
            f"{', '.join(needed)}; or pass rank= to init_rpc, and another init_method in its options"
        )
    if rank < 0:
        rank = int(os.environ.get("RANK", "-1"))
    if world_size is None and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
    port = os.environ.get("RPCBENCH_MASTER_PORT") or os.environ["MASTER_PORT"]
    return _on_network(os.environ["MASTER_ADDR"], int(port), rank, world_size)


def _on_network(host: str, port: int | None, rank: int, world_size: int | None) -> Place:
    if port is None:
        raise ValueError("tcp:// rendezvous: port number missing: write one, as in tcp://localhost:29500")
    if listeners.is_loopback(host):
        return Place(f"tcp://localhost:{port}", rank, world_size)
    leader = listeners.join_address(host.lower(), port)
    return Place(f"tcp://{leader}", rank, world_size, leader)


def start_agent(
    config: WorldConfig,
    link: Link | None = None,
    timeout: float = JOIN_SECONDS,
    parts: Sequence[Callable[[Agent], object]] = (),
) -> RpcAgent:
    """A started agent, with these parts, ready to serve.

    RpcError where the world does not let it in, or stays incomplete; ValueError on all members where the device maps
    of one of them are wrong.
    """
    keep_what_is_freed()
    agent = RpcAgent(config, RRef.held, link)
    agent.values.recorder = AutogradRecorder(agent)
    for part in (Publisher, Watchdog, Health, *parts):
        agent.part(part)
    current.start(agent, timeout)
    if problem := agent.values.routes.problem(config.world_size is not None):
        agent.shutdown()  # when the others, who find the same, have seen a complete world, too
        raise ValueError(problem)
    return agent


def join(
    config: WorldConfig,
    founder: bool,
    deadline: float,
    link: Link | None = None,
    parts: Sequence[Callable[[Agent], object]] = (),
) -> RpcAgent:
    """As `start_agent`, for a process that comes by itself: it asks who leads an open world, and may be its `founder`.

    IncompleteWorldError where nobody leads it until `deadline` (of time.monotonic); RefusedError, AuthenticationError.
    """
    while True:
        if config.world_size is None or not founder:
            config = request_incarnation(config, founder, deadline)
        try:
            return start_agent(config, link, deadline - time.monotonic(), parts)
        except TurnedAwayError:  # an open world may have passed to another leader, or ended, since this process asked
            if config.world_size is not None or time.monotonic() > deadline:
                raise


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
    met = replace(meet_at(name, place, rank, world_size, timeout, threads), held=True)  # until `_init_rpc_states`
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
