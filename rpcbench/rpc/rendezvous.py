"""Where the workers of a script meet: env://, file:// and tcp:// URLs.

Workers of one user on one host meet in a directory that only this user can enter, named after the URL; the first
comer makes the secret there. So no port is opened, and no other user can take part.

Workers on several hosts share a secret that their user gives them (RPCBENCH_SECRET_FILE). Rank 0 listens at the host
and port of the URL, with TLS; each other rank dials it, and listens on the interface that leads there, or on
RPCBENCH_BIND. Those on one host still use its directory among themselves.

Each worker removes its socket file when it leaves. The directory and the secret stay, for the worlds to come: the
quickest worker of the next one may have read the secret before the slowest of this one has gone.
"""

from __future__ import annotations

import hashlib
import os
import socket
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from rpcbench.base.config import WorldConfig
from rpcbench.base.ids import check_name
from rpcbench.transport import addresses, listeners, run_dir
from rpcbench.transport.addresses import host_id
from rpcbench.transport.run_dir import shared_directory, shared_secret


class Place(NamedTuple):
    """What a URL says: a key that all its workers share, and rank and size where it (or the environment) has them.

    `leader`: host:port of rank 0, where others than those on this host may come; "" where they may not.
    """

    key: str
    rank: int
    world_size: int | None
    leader: str = ""


def meet(name: str, url: str, rank: int, world_size: int | None, rpc_timeout: float, threads: int) -> WorldConfig:
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
        bind=addresses.bind_address(),
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
    return addresses.address_towards(place.leader)


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
