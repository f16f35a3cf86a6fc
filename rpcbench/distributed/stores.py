"""The rendezvous store of a process group: parsing of init methods, and connection to the store or its creation.

Guarantees
- A store at a port listens on the named address only. It lives as long as its process, so one address serves any number
  of worlds in turn. On the workers of a cluster it has a port of its own, and leaves MASTER_PORT to torch.
- A rank that comes before the store's host waits for it, and Ctrl-C ends that wait.
- An invalid init method is refused with a message that names a valid one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import DistError

from rpcbench.base.conditions import Condition
from rpcbench.base.config import RANK_NAMES, STORE_PORT
from rpcbench.base.errors import CollectiveError, RpcTimeoutError
from rpcbench.transport.hosts import is_this_host

_REQUEST_TIMEOUT = timedelta(seconds=20)
"""The timeout of one request to the store."""
_CONNECT_TIMEOUT = timedelta(seconds=1)
"""The timeout of one try to connect to a store that has just accepted a connection."""
_stores: dict[tuple[str, int], Store] = {}  # by address and port: reused by the next world


@dataclass(frozen=True, slots=True)
class InitMethod:
    """A parsed init method: a file, or an address and port."""

    file: str = ""  # empty: address and port are used
    address: str = ""
    port: int = 0
    rank: int = -1  # -1: assigned in the order of arrival
    world_size: int = -1  # -1: not given
    hosts_store: bool | None = None  # whether this process hosts the store; None: the first process that can
    store: Store | None = None  # one that the program has given, in place of an address
    names: tuple[str, ...] = ()  # of the workers, by rank; empty: not known
    generation: str = ""  # of the cluster, see `launch.ranks`


def parse_init_method(method: str, rank: int, world_size: int) -> InitMethod:
    """Parse `env://`, `tcp://host:port` or `file:///path`. Raises CollectiveError for others and for missing parts."""
    return _parse_and_check(lambda: _parse_method(method, rank, world_size), method)


def init_method_of_store(store: Store, rank: int, world_size: int) -> InitMethod:
    """Return the place of a store that the program has given. Raises CollectiveError without its number of ranks."""
    return _parse_and_check(lambda: InitMethod(rank=rank, world_size=world_size, store=store), "store")


def _parse_and_check(parse: Callable[[], InitMethod], method: str) -> InitMethod:
    try:
        place = parse()
    except CollectiveError:
        raise
    except (OSError, ValueError) as error:  # a host without an address; a text that is not a number
        raise CollectiveError(
            f"{method} is not valid ({error}): use env:// with numbers in RANK, WORLD_SIZE and MASTER_PORT, "
            "tcp://HOST:PORT or file:///PATH"
        ) from error
    if place.world_size < 1:
        raise CollectiveError(f"{method} does not give the number of ranks: pass world_size=, at least 1")
    if not -1 <= place.rank < place.world_size:
        raise CollectiveError(f"a world of {place.world_size} has ranks 0 to {place.world_size - 1}, not {place.rank}")
    return place


def _parse_method(method: str, rank: int, world_size: int) -> InitMethod:
    parts = urlsplit(method)
    query = {key: int(values[0]) for key, values in parse_qs(parts.query).items() if key in ("rank", "world_size")}
    if {key for key, given in (("rank", rank), ("world_size", world_size)) if given >= 0} & query.keys():
        raise CollectiveError(f"rank and world_size are given by {method!r} and as arguments, too: leave one out")
    rank, world_size = query.get("rank", rank), query.get("world_size", world_size)
    if parts.scheme == "env":
        return _parse_environment(rank, world_size)
    if parts.scheme == "file":
        return InitMethod(file=_parse_file(method, parts.netloc, parts.path), rank=rank, world_size=world_size)
    if parts.scheme == "tcp":
        return _parse_address(method, parts.hostname or "", parts.port or 0, rank, world_size)
    raise CollectiveError(f"there is no init method {method!r}: use env://, tcp://HOST:PORT or file:///PATH")


def _parse_environment(rank: int, world_size: int) -> InitMethod:
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    missing = [name for name, value in given.items() if value < 0 and name not in os.environ]
    missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise CollectiveError(
            f"env:// needs {', '.join(missing)} in the environment. torchrun, `rpcbench launch` and each worker of a "
            "cluster set them; elsewhere use tcp://HOST:PORT or file:///PATH with world_size="
        )
    rank, world_size = (int(os.environ[name]) if value < 0 else value for name, value in given.items())
    port = os.environ["MASTER_PORT"]
    theirs, _, ours = os.environ.get(STORE_PORT, "").partition(":")
    port = ours if theirs == port else port  # else the program has set another MASTER_PORT
    # torchrun's agent hosts a store at this port itself.
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosts_store = rank == 0 and not agents
    names = rank_names()
    return InitMethod(
        "", os.environ["MASTER_ADDR"], int(port), rank, world_size, hosts_store,
        names=names if len(names) == world_size else (), generation=cluster_generation(),
    )  # fmt: skip


def rank_names() -> tuple[str, ...]:
    """Return the names of the cluster's workers, by rank; one empty name on other processes."""
    return tuple(os.environ.get(RANK_NAMES, "").split(","))


def cluster_generation() -> str:
    """Return the generation of the cluster, as a text that differs between any two; empty on other processes."""
    return os.environ.get(STORE_PORT, "")


def _parse_file(method: str, host: str, path: str) -> str:
    if host or not path.startswith("/"):
        raise CollectiveError(f"{method} names no absolute path: write file:///path, with three slashes")
    if not Path(path).parent.is_dir():
        raise CollectiveError(f"there is no directory for {path}: create it first, where all ranks can reach it")
    return path


def _parse_address(method: str, host: str, port: int, rank: int, world_size: int) -> InitMethod:
    if not host or not port:
        raise CollectiveError(f"{method} names no address and port: write tcp://HOST:PORT, those of rank 0")
    if _is_multicast(host):
        raise CollectiveError(
            f"{host} is a multicast address, and torch no longer supports those: use tcp://HOST:PORT with the "
            "address of rank 0 (ranks without a number still get one), or file:///PATH of a file that all reach"
        )
    # Several ranks without a number on one host: the first that binds the port hosts the store.
    hosts_store = is_this_host(host) and rank in (-1, 0)
    return InitMethod("", host, port, rank, world_size, None if hosts_store and rank < 0 else hosts_store)


def _is_multicast(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False


def store_at(place: InitMethod, seconds: float, check: Callable[[], object] = lambda: None) -> Store:
    """Return the store that the ranks at this place share. Raises RpcTimeoutError where none is hosted in time.

    `check` is called while this waits, and ends that by raising an error.
    """
    if place.store is not None:
        return place.store
    if place.file:
        return FileStore(place.file, -1)
    at = place.address, place.port
    if at not in _stores or not _is_alive(_stores[at]):
        kept = _host_store(place) if place.hosts_store is not False else None
        _stores[at] = kept or _connect_to_store(place, seconds, check)
    return _stores[at]


def host_store_at(address: str) -> int:
    """Host a store at a free port of this address until `forget_store`, and return the port."""
    store = _host_store(InitMethod(address=address, hosts_store=True))
    assert isinstance(store, TCPStore)
    _stores[address, store.port] = store
    return store.port


def _is_alive(store: Store) -> bool:
    try:
        store.check([""])  # any request: it fails where the connection has ended
    except RuntimeError:
        return False
    return True


def check_host(store: Store) -> None:
    """Raise OSError if nothing listens where a store of torch's is hosted: `clone` would try for half an hour."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        socket.create_connection((store.host, store.port), timeout=_REQUEST_TIMEOUT.total_seconds()).close()


def forget_store(address: str, port: int) -> None:
    """Release a store that no later world will use."""
    _stores.pop((address, port), None)


def _host_store(place: InitMethod) -> Store | None:
    """Return a store hosted by this process; None where another process hosts it already."""
    # Our own listener: TCPStore would listen on all addresses, and could not report that the port is taken.
    try:
        family, kind, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            port = listener.detach()
    except OSError as error:
        if place.hosts_store is None:
            return None
        raise CollectiveError(
            f"rank 0 cannot open the store at {place.address}:{place.port}: {error.strerror}; choose another port, "
            "or end the process group of torch.distributed that uses this one"
        ) from error
    return TCPStore(
        place.address, place.port, None, True, _REQUEST_TIMEOUT, wait_for_workers=False, master_listen_fd=port
    )


def _connect_to_store(place: InitMethod, seconds: float, check: Callable[[], object]) -> Store:
    # Plain connects first: TCPStore itself would wait in C++, where Ctrl-C does not interrupt it. It may have to wait
    # even then, where the host ends between the two, so each of its tries is short.
    found: list[Store] = []
    met = ""  # at the last try

    def try_connection() -> bool:
        nonlocal met
        check()
        try:
            socket.create_connection((place.address, place.port), timeout=1.0).close()
            found.append(TCPStore(place.address, place.port, None, False, _CONNECT_TIMEOUT, wait_for_workers=False))
        except (OSError, DistError) as error:
            met = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            return False
        return True

    if not wait_until(try_connection, seconds):
        raise RpcTimeoutError(
            f"no store has answered at {place.address}:{place.port} for {seconds:g} s ({met}): rank 0 has not come, or "
            "a firewall keeps this process from that port"
        )
    found[0].set_timeout(_REQUEST_TIMEOUT)
    return found[0]


def wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition that another process causes, for at most `seconds`; return whether it has become true."""
    deadline, pause = time.monotonic() + seconds, 0.005  # the pause doubles up to 0.1 s
    while not reached():
        if time.monotonic() >= deadline:
            return False
        Condition().wait_for(lambda: False, pause)  # a sleep that Ctrl-C ends
        pause = min(2 * pause, 0.1)
    return True
