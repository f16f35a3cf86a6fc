"""Where the ranks of a world find each other: the store that an init method names.

Guarantees
- A store at a port hears on the address that was named, and no other; it stays as long as the process that keeps it, so
  a world can be founded there again and again.
- Who comes before the one that keeps the store waits for it, and Ctrl-C ends that wait.
- What cannot be is refused with a sentence that says what to use.
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

import psutil
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from rpcbench.base.conditions import Changes
from rpcbench.base.errors import CollectiveError, RpcTimeoutError

_WORD = timedelta(seconds=20)
"""What an answer of the store may take."""
_at_ports: dict[tuple[str, int], Store] = {}


@dataclass(frozen=True, slots=True)
class Place:
    """An init method, read: a file, or an address and port. -1: given by nobody, or handed out to ranks as they come.

    `keeper`: who keeps the store at the port: this process, another one, or (None) whoever can first.
    """

    file: str = ""
    address: str = ""
    port: int = 0
    rank: int = -1
    world_size: int = -1
    keeper: bool | None = None


def read(method: str, rank: int, world_size: int) -> Place:
    """What `env://`, `tcp://host:port` or `file:///path` says. CollectiveError for any other, or if some is missing."""
    parts = urlsplit(method)
    query = {key: int(values[0]) for key, values in parse_qs(parts.query).items() if key in ("rank", "world_size")}
    if {key for key, given in (("rank", rank), ("world_size", world_size)) if given >= 0} & query.keys():
        raise CollectiveError(f"rank and world_size are given by {method!r} and as arguments, too: leave one out")
    rank, world_size = query.get("rank", rank), query.get("world_size", world_size)
    if parts.scheme == "env":
        place = _environment(rank, world_size)
    elif parts.scheme == "file":
        place = Place(file=_file(method, parts.netloc, parts.path), rank=rank, world_size=world_size)
    elif parts.scheme == "tcp":
        place = _address(method, parts.hostname or "", parts.port or 0, rank, world_size)
    else:
        raise CollectiveError(f"there is no init method {method!r}: use env://, tcp://HOST:PORT or file:///PATH")
    return _checked(place, method)


def _checked(place: Place, method: str) -> Place:
    if place.world_size < 1:
        raise CollectiveError(f"{method} does not tell how many ranks there are: pass world_size=, from 1 up")
    if not -1 <= place.rank < place.world_size:
        raise CollectiveError(f"a world of {place.world_size} has ranks 0 to {place.world_size - 1}, not {place.rank}")
    return place


def _environment(rank: int, world_size: int) -> Place:
    given = {"RANK": rank, "WORLD_SIZE": world_size}
    missing = [name for name, value in given.items() if value < 0 and name not in os.environ]
    missing += [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise CollectiveError(
            f"env:// needs {', '.join(missing)} in the environment. torchrun, `rpcbench launch` and each worker of a "
            "cluster set them; elsewhere use tcp://HOST:PORT or file:///PATH with world_size="
        )
    rank, world_size = (int(os.environ[name]) if value < 0 else value for name, value in given.items())
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeper = rank == 0 and not agents
    return Place("", os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world_size, keeper)


def _file(method: str, host: str, path: str) -> str:
    if host or not path.startswith("/"):
        raise CollectiveError(f"{method} names no absolute path: write file:///path, with three slashes")
    if not Path(path).parent.is_dir():
        raise CollectiveError(f"there is no directory for {path}: make it first, where all ranks see it")
    return path


def _address(method: str, host: str, port: int, rank: int, world_size: int) -> Place:
    if not host or not port:
        raise CollectiveError(f"{method} names no address and port: write tcp://HOST:PORT, those of rank 0")
    if _is_multicast(host):
        raise CollectiveError(
            f"{host} is a multicast address, and torch has dropped that way to meet: use tcp://HOST:PORT with the "
            "address of rank 0 (ranks are still handed out if you name none), or a file that all see by file:///PATH"
        )
    keeper = _is_here(host) and rank in (-1, 0)
    return Place("", host, port, rank, world_size, None if keeper and rank < 0 else keeper)


def _is_multicast(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_multicast
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    """Whether an address is one of this host's."""
    known = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    return any(str(found[4][0]) in known for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))


def store_at(place: Place, seconds: float) -> Store:
    """The store that the ranks at this place share. RpcTimeoutError where nobody keeps one for so long."""
    if place.file:
        return FileStore(place.file, -1)
    at = place.address, place.port
    if at not in _at_ports or not _answers(_at_ports[at]):
        kept = _kept(place) if place.keeper is not False else None
        _at_ports[at] = kept or _reached(place, seconds)
    return _at_ports[at]


def _answers(store: Store) -> bool:
    """Whether who keeps it is still there."""
    try:
        store.check([""])
    except RuntimeError:
        return False
    return True


def forget(address: str, port: int) -> None:
    """Let go of a store that no world is founded at any more."""
    _at_ports.pop((address, port), None)


def _kept(place: Place) -> Store | None:
    """A store kept by this process; None where another one keeps it already."""
    family, kind, _, _, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen()
        except OSError as error:
            if place.keeper is None:
                return None
            raise CollectiveError(
                f"rank 0 cannot keep the store at {place.address}:{place.port}: {error.strerror}; name another port"
            ) from error
        return TCPStore(
            place.address, place.port, None, True, _WORD, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _reached(place: Place, seconds: float) -> Store:
    def answers() -> bool:
        try:
            socket.create_connection((place.address, place.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    if not polled(answers, seconds):
        raise RpcTimeoutError(
            f"nobody has kept a store at {place.address}:{place.port} for {seconds:g} s: rank 0 has not come"
        )
    return TCPStore(place.address, place.port, None, False, _WORD, wait_for_workers=False)


def polled(reached: Callable[[], bool], seconds: float) -> bool:
    """Look until it is so, for at most `seconds`: another process brings it about, and nothing here is told of it."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not reached():
        if time.monotonic() >= deadline:
            return False
        Changes().wait_for(lambda: False, pause)  # as a sleep, but Ctrl-C ends it
        pause = min(2 * pause, 0.1)
    return True
