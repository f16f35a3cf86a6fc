"""Where the workers of a script meet: env://, file:// and tcp:// URLs.

Workers of one user on one host meet in a directory that only this user can enter, named after the URL; the first
comer makes the secret there. So no port is opened, and no other user can take part.

Each worker removes its socket file when it leaves. The directory and the secret stay, for the worlds to come: the
quickest worker of the next one may have read the secret before the slowest of this one has gone.
"""

from __future__ import annotations

import hashlib
import os
import socket
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from rpcbench.transport.rundir import shared_directory, shared_secret
from rpcbench.words.config import WorldConfig
from rpcbench.words.ids import check_name

_LOOPBACK = {"localhost", "127.0.0.1", "::1", ""}


class Place(NamedTuple):
    """What a URL says: a key that all its workers share, and rank and size where it (or the environment) has them."""

    key: str
    rank: int
    world_size: int | None


def meet(name: str, url: str, rank: int, world_size: int | None, rpc_timeout: float, threads: int) -> WorldConfig:
    """The configuration of this worker. ValueError or RuntimeError that says what is missing."""
    check_name(name)
    place = _resolve(url, rank, world_size)
    if place.rank < 0:
        raise RuntimeError(f"{name} has no rank: pass rank= to init_rpc, or set RANK")
    directory = shared_directory(place.key)
    return WorldConfig(
        name=name,
        id=place.rank,
        cluster=hashlib.sha256(place.key.encode()).hexdigest()[:16],
        directory=str(directory),
        secret=shared_secret(directory),
        world_size=place.world_size,
        rpc_timeout=rpc_timeout,
        threads=threads,
    )


def _resolve(url: str, rank: int, world_size: int | None) -> Place:
    parts = urlsplit(url)
    if parts.scheme == "env":
        return _from_environment(rank, world_size)
    query = {key: int(values[-1]) for key, values in parse_qs(parts.query).items() if key in ("rank", "world_size")}
    rank = rank if rank >= 0 else query.get("rank", -1)
    world_size = world_size if world_size is not None else query.get("world_size")
    if parts.scheme == "file":
        if not parts.path:
            raise ValueError(f"{url!r} names no file; write file:///path")
        return Place(f"file://{os.path.abspath(parts.path)}", rank, world_size)  # noqa: PTH100  (no such file needed)
    if parts.scheme == "tcp":
        return Place(_local_key(parts.hostname or "", parts.port), rank, world_size)
    raise ValueError(f"init_method {url!r} is not known; use env://, file:///path or tcp://localhost:port")


def _from_environment(rank: int, world_size: int | None) -> Place:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"env:// needs the environment variable(s) {', '.join(missing)}")
    if rank < 0:
        rank = int(os.environ.get("RANK", "-1"))
    if world_size is None and "WORLD_SIZE" in os.environ:
        world_size = int(os.environ["WORLD_SIZE"])
    return Place(_local_key(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), rank, world_size)


def _local_key(host: str, port: int | None) -> str:
    if host not in _LOOPBACK and host != socket.gethostname():
        raise NotImplementedError(f"workers on several hosts are not supported yet, and {host!r} is not this host")
    if port is None:
        raise ValueError("a tcp:// URL needs a port: tcp://localhost:29500")
    return f"tcp://localhost:{port}"
