"""`init_rpc`: the rendezvous of a script's workers at an env://, file:// or tcp:// URL, and assembly of the agent.

Rules:
- Workers of one user on one host meet in a directory that only this user can enter, named after the URL. The first
  worker creates the secret there. So no port is opened, and no other user can take part.
- Workers on several hosts share a secret from their user (RPCBENCH_SECRET_FILE). Rank 0 listens with TLS at the host
  and port of the URL. Each other rank connects to it, and listens on the interface that leads there or on
  RPCBENCH_BIND. Workers on one host still use its directory among themselves.
- Ranks may write the address of rank 0 in different ways: a name, an alias, a number, a forwarded port.
- Each worker removes its socket file when it leaves. The directory and the secret stay for later worlds: the fastest
  worker of the next world may read the secret before the slowest worker of this one has left.
- A restarted process must not be taken for an earlier process with its rank. Before its first message as a member it
  requests its incarnation, which the leader assigns in the handshake and never twice.
"""

from __future__ import annotations

import contextlib
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
from rpcbench.base.rebuild import format_traceback, format_value
from rpcbench.rpc import api, backend_registry
from rpcbench.rpc.agent import RpcAgent
from rpcbench.rpc.backend_registry import BackendType
from rpcbench.rpc.constants import DEFAULT_NUM_WORKER_THREADS
from rpcbench.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpcbench.rpc.rref import RRef
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.deadlocks import Watchdog
from rpcbench.runtime.members import NO_RECORDS, LaunchRecords, WorkerInfo
from rpcbench.runtime.publisher import Health, Publisher
from rpcbench.runtime.timers import keep_freed_memory
from rpcbench.transport import hosts, listeners, run_dir
from rpcbench.transport.addresses import Opener
from rpcbench.transport.base import Link
from rpcbench.transport.handshake import NO_INCARNATION, Identity
from rpcbench.transport.hosts import host_id
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.transport.run_dir import shared_directory, shared_secret

_PAUSE = 0.05  # seconds between two requests for an incarnation
# After a hang-up or a refusal: the peer may be leaving, and the process that holds this rank may have been killed.
_BUSY_SECONDS = 1.0
"""Seconds that members may take to notice that a process has ended."""


def request_incarnation(config: WorldConfig, may_found: bool, deadline: float) -> WorldConfig:
    """Return the configuration with the leader's id and this process's incarnation; a founder is its own leader.

    Raises IncompleteWorldError where no leader answers before `deadline` (of time.monotonic); RefusedError;
    AuthenticationError.
    """
    me = Identity(config.cluster, config.id, config.name, NO_INCARNATION, host_id())
    patience, since = time.monotonic() + _BUSY_SECONDS, time.time()
    while True:
        try:
            leader = _first_answer(config, me)
            return replace(config, led_by=leader.id, incarnation=leader.offer)
        except NotConnectedError as error:
            if may_found:
                return replace(config, led_by=config.id, incarnation=0)
            why: RpcError = error
            # In a world of fixed size worker 0 records its failure in the rendezvous: the others then stop waiting.
            if config.world_size is not None and (
                failure := Rendezvous(Path(config.directory)).founding_failure(since)
            ):
                raise IncompleteWorldError(f"{config.name}: worker 0 could not found the world: {failure}") from error
        except RefusedError as error:
            if not error.again and time.monotonic() > patience:  # the old holder of the rank may have just died
                raise
            why = error
        except AuthenticationError as error:  # a peer that hangs up during the handshake may be leaving its world
            if time.monotonic() > patience:
                raise
            why = error
        if time.monotonic() > deadline:
            other = config.world_size is None and config.leader
            nor = ", nor a worker on the same host that leads it now" if other else ""
            raise IncompleteWorldError(f"{config.name} cannot reach worker 0 of its world{nor}: {why}") from why
        time.sleep(_PAUSE)  # polls: no event reports that a leader has begun to listen


def _first_answer(config: WorldConfig, me: Identity) -> Identity:
    """Return the identity of the first leader that answers. Raises NotConnectedError where none listens."""
    meeting, opener = Rendezvous(Path(config.directory)), Opener(config.secret)
    finders: Iterable[Callable[[], str]] = (meeting.find_leader, *([lambda: config.leader] if config.leader else []))
    failed = ""
    for finder in finders:
        try:
            stream, leader = opener.dial_peer(finder(), me)
        except OSError as error:
            failed = f"nobody answers at {config.leader or meeting.path}: {error.strerror or error}"
        else:
            stream.close_descriptor()
            return leader
    raise NotConnectedError(failed)


class RendezvousUrl(NamedTuple):
    """The contents of a rendezvous URL, completed from the environment."""

    key: str  # the same for all workers of the world on one host
    rank: int  # -1: not given
    world_size: int | None
    leader: str = ""  # host:port of rank 0 where workers on other hosts may join; else empty


def resolve_config(
    name: str, url: str, rank: int, world_size: int | None, rpc_timeout: float, threads: int
) -> WorldConfig:
    """Return the configuration of this worker. Raises ValueError or RuntimeError that names the missing part."""
    check_name(name)
    place = _resolve_url(url, rank, world_size)
    if place.rank < 0:
        scheme = urlsplit(url).scheme
        raise ValueError(f"{scheme}:// rendezvous: rank parameter missing: pass rank= to init_rpc for {name}")
    shared = run_dir.load_secret()
    if place.leader and shared is None:
        if urlsplit(f"//{place.leader}").hostname != socket.gethostname().lower():
            raise run_dir.missing_secret_error(place.leader)
        place = place._replace(leader="", key=place.key.replace("tls:", "tcp:"))  # it is this host's own name
    # file:// may name a shared file system, so its key holds for all hosts; other keys hold for one host.
    directory = shared_directory(place.key if place.key.startswith("file:") else f"{place.key} on {host_id()}")
    return WorldConfig(
        name=name,
        id=place.rank,
        # Between hosts the address that a worker dials chooses the world, however it is written.
        cluster=hashlib.sha256(b"tls:" if place.leader else place.key.encode()).hexdigest()[:16],
        directory=str(directory),
        secret=shared or shared_secret(directory),
        world_size=place.world_size,
        rpc_timeout=rpc_timeout,
        threads=threads,
        leader=f"tls://{place.leader}" if place.leader else "",
        remote=_remote_address(place) if place.leader else "",
        launched=False,
        bind=hosts.bind_address(),
    )


def may_found(config: WorldConfig, url: str) -> bool:
    """Return whether this process founds the world if it finds none."""
    # As in torch: rank 0 owns the port of a tcp:// URL, while any rank of an open world may create the file.
    return config.id == 0 or (config.world_size is None and urlsplit(url).scheme == "file")


def _remote_address(place: RendezvousUrl) -> str:
    """Return the address under which workers on other hosts reach this one, unless it founds an open world."""
    if place.rank == 0 and place.world_size is not None:
        return f"tls://{place.leader}"
    return hosts.address_towards(place.leader)


def _resolve_url(url: str, rank: int, world_size: int | None) -> RendezvousUrl:
    parts = urlsplit(url)
    if parts.scheme == "env":
        return _from_environment(rank, world_size)
    query = {key: int(values[-1]) for key, values in parse_qs(parts.query).items() if key in ("rank", "world_size")}
    rank = rank if rank >= 0 else query.get("rank", -1)
    world_size = world_size if world_size is not None else query.get("world_size")
    if parts.scheme == "file":
        if not parts.path:
            raise ValueError(f"file:// rendezvous: path missing: {url!r} names no file; write file:///path")
        return RendezvousUrl(f"file://{os.path.abspath(parts.path)}", rank, world_size)  # noqa: PTH100  (may not exist)
    if parts.scheme == "tcp":
        return _on_network(parts.hostname or "", parts.port, rank, world_size)
    raise RuntimeError(
        f"No rendezvous handler for {parts.scheme}://: init_method {url!r} is not known; use env://, file:///path or "
        "tcp://host:port"
    )


def _from_environment(rank: int, world_size: int | None) -> RendezvousUrl:
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


def _on_network(host: str, port: int | None, rank: int, world_size: int | None) -> RendezvousUrl:
    if port is None:
        raise ValueError("tcp:// rendezvous: port number missing: write one, as in tcp://localhost:29500")
    if listeners.is_loopback(host):
        return RendezvousUrl(f"tcp://localhost:{port}", rank, world_size)
    leader = listeners.join_address(host.lower(), port)
    return RendezvousUrl(f"tls://{hosts.canonical_name(host)}:{port}", rank, world_size, leader)


def start_agent(
    config: WorldConfig,
    link: Link | None = None,
    timeout: float = JOIN_SECONDS,
    parts: Sequence[Callable[[Agent], object]] = (),
    records: LaunchRecords = NO_RECORDS,
) -> RpcAgent:
    """Return a started agent, with these parts, that is ready to serve.

    Raises RpcError where the world refuses it or stays incomplete; ValueError on all members where the device maps of
    one of them are wrong.
    """
    keep_freed_memory()
    agent = RpcAgent(config, RRef.from_existing, link, records)
    agent.calls.values.recorder = AutogradRecorder(agent)
    for part in (Publisher, Watchdog, Health, *parts):
        agent.part(part)
    agent.links.bus.on_watch.append(lambda: _torch_collectives(agent))
    current.start_agent(agent, timeout)
    if problem := agent.calls.values.routes.device_map_error(config.world_size is not None):
        # Graceful: the peers find the same problem, but must have seen a complete world first.
        agent.shutdown()
        raise ValueError(problem)
    return agent


def _torch_collectives(agent: Agent) -> None:
    """Begin or end to report the collectives of torch itself, as the member is watched or not."""
    from rpcbench.distributed.torch_collectives import TorchCollectives  # here: not all programs need it

    agent.part(TorchCollectives).watch_changed()


def join_open_world(
    config: WorldConfig,
    founder: bool,
    deadline: float,
    link: Link | None = None,
    parts: Sequence[Callable[[Agent], object]] = (),
    records: LaunchRecords = NO_RECORDS,
) -> RpcAgent:
    """As `start_agent`, for a process that no launcher started: find the leader of an open world, or found the world.

    Raises IncompleteWorldError where no worker leads it before `deadline` (of time.monotonic); RefusedError;
    AuthenticationError.
    """
    while True:
        if config.world_size is None or not founder:
            config = request_incarnation(config, founder, deadline)
        try:
            return start_agent(config, link, deadline - time.monotonic(), parts, records)
        except TurnedAwayError:  # the leader of an open world may have changed, or the world ended, since the request
            if config.world_size is not None or time.monotonic() > deadline:
                raise


_Part = Callable[[Agent], object]
_LONG_SECONDS = 10.0  # until the log reports that the world is not complete
_CAUSE_SECONDS = 2.0  # that a process lives on after it lost a peer; see `_delay_exit`
_FIRST = 100  # priority of a multiprocessing finalizer: it runs before those of multiprocessing itself
_log = logging.getLogger("rpcbench")
_ONE_HOST = (
    "With this init_method all workers must be on one host, here {!r}; for workers on several hosts use "
    "init_method='tcp://ADDRESS:PORT', with an address of worker 0's host that the others reach"
)


def is_available() -> bool:
    """Return whether RPC can be used: always True."""
    return True


def init_rpc(
    name: str,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join a world of workers; returns when it is complete and this process serves calls.

    Args:
        name: Name of this worker, unique in the world.
        backend: A member of `BackendType`; by default the backend of the options.
        rank: Id of this worker; worker 0 leads.
        world_size: Number of workers to wait for, after which no other may join; None for an open world, which
            workers may join and leave at any time.
        rpc_backend_options: Rendezvous URL, timeout in seconds, threads, device maps.

    Raises:
        TypeError: `backend` or the options have a wrong type, or the options belong to no backend (torch's texts).
        RuntimeError: This process is in a world already, or the world refuses it.
        ValueError: Rank, host or port are missing, or the device maps of a worker do not fit.

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
    """As `init_rpc`; with a store, the workers meet through it instead of the options' init_method."""
    if api._is_current_rpc_agent_set():
        raise RuntimeError("RPC is already initialized in this process; call rpc.shutdown() first")
    backend = backend or _TENSORPIPE
    for argument, value, kind in (("name", name, str), ("rank", rank, int), ("world_size", world_size, int | None)):
        if not isinstance(value, kind):
            raise RuntimeError(f"Argument {argument} must be of type {kind} but got type {type(value)}: {value!r}")
    options = rpc_backend_options or backend_registry.construct_rpc_backend_options(backend)
    made = backend_registry.init_backend(
        backend, store=store, name=name, rank=rank, world_size=world_size, rpc_backend_options=options
    )
    api._init_rpc_states(made)


def join_world(
    store: Store | None,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
    link: Link | None = None,
) -> Agent:
    """Return a started agent in the world of these options; for backends."""
    threads = getattr(rpc_backend_options, "num_worker_threads", DEFAULT_NUM_WORKER_THREADS)
    url, timeout = rpc_backend_options.init_method, rpc_backend_options.rpc_timeout
    place = url if store is None else _place_in(store, rank, world_size)
    # held: the agent serves no call before `_init_rpc_states` has made it the current agent.
    met = replace(resolve_config(name, place, rank, world_size, timeout, threads), held=True)
    config = rpc_backend_options._complete_config(met)
    try:
        with _log_missing_workers(name) as waits:
            parts = (_tell_errors, _log_losses, waits)
            deadline = time.monotonic() + max(JOIN_SECONDS, timeout)
            return join_open_world(config, may_found(config, place), deadline, link, parts)
    except IncompleteWorldError as error:
        if config.leader:
            raise
        raise IncompleteWorldError(f"{error}. {_ONE_HOST.format(socket.gethostname())}") from error


def _place_in(store: Store, rank: int, world_size: int | None) -> str:
    """Return a rendezvous URL that only users of this store can read: one per closed world, one for all open worlds."""
    if world_size is None:  # compare_set: the first worker decides, whatever its rank
        return f"file:///{store.compare_set('rpcbench/place', '', secrets.token_hex(16)).decode()}"
    key = f"rpcbench/place/{store.add(f'rpcbench/comings/{rank}', 1)}"
    if rank == 0:
        store.set(key, secrets.token_hex(16))
    return f"file:///{store.get(key).decode()}"


@contextlib.contextmanager
def _log_missing_workers(name: str) -> Iterator[_Part]:
    """Log after `_LONG_SECONDS` which workers are missing; yield a function that takes the agent, once there is one."""
    # A user who started only some workers, or one with a wrong address, learns it long before the error.
    agents: list[Agent] = []

    def tell() -> None:
        census = agents[-1].links.members.describe_members() if agents else "only 0 came: not even member 0 answered"
        _log.warning("%s waits for its world; %s", name, census)

    timer = threading.Timer(_LONG_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield lambda agent: agents.append(agent)
    finally:
        timer.cancel()


def _log_losses(agent: Agent) -> None:
    """Log lost members: a script may have no call in flight that would raise WorkerLostError."""

    def tell(kind: str, who: WorkerInfo, reason: str) -> None:
        if kind == "lost":
            _log.warning("%s: %s is lost: %s", agent.name, who.name, reason)
            _delay_exit()

    agent.on_member(tell)


def _delay_exit() -> None:
    """Delay the end of this process until `_CAUSE_SECONDS` after the loss of a peer."""
    # An error that ends this process now is probably a consequence of the loss. torch.multiprocessing and torchrun show
    # the first error that they see, so the peer, whose error is the cause, must end first.
    until = time.monotonic() + _CAUSE_SECONDS
    # Not atexit: that does not run in the forked children of multiprocessing.
    Finalize(None, lambda: time.sleep(max(0.0, until - time.monotonic())), exitpriority=_FIRST)


def _tell_errors(agent: Agent) -> None:
    """Write errors of served functions to this process's stderr as well as to the caller."""

    def tell(error: BaseException) -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed; the caller gets the error anyway
            who = f"WorkerInfo(id={agent.id}, name={agent.name})"
            sys.stderr.write(f"On {who}:\n{format_value(error)}\n{format_traceback(error)}")

    agent.hooks.on_error.append(tell)


def _join_tensorpipe(rpc_backend_options: RpcBackendOptions, store: Store | None, **kwargs: Any) -> Agent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not {rpc_backend_options!r}")
    if store is not None and not isinstance(store, Store):
        raise TypeError(f"`store` must be a c10d::Store, not {store!r}")
    return join_world(rpc_backend_options=rpc_backend_options, store=store, **kwargs)


_TENSORPIPE = backend_registry.register_backend("TENSORPIPE", TensorPipeRpcBackendOptions, _join_tensorpipe)
