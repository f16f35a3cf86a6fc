"""What a worker runs that may be on another host than the notebook: it finds out where it is, and works like any other.

On the notebook's host it meets the others in their directory, by unix sockets; elsewhere it has one of its own, and is
found on the interface that leads to the notebook, or on RPCBENCH_BIND. It ends within seconds of its world, also while
a cell runs: behind a cut cable nobody reaches it, or the command that has started it, for hours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from rpcbench.base.config import WorldConfig
from rpcbench.launch import worker
from rpcbench.transport import hosts
from rpcbench.transport.hosts import host_id
from rpcbench.transport.run_dir import RunDirectory


def main(config: WorldConfig) -> None:
    """As `worker.main`. RpcError where no interface of this host leads to the notebook."""
    with settled(config) as here:
        worker.main(here, alone=True)


@contextlib.contextmanager
def settled(config: WorldConfig) -> Iterator[WorldConfig]:
    """The configuration with what only this host knows; its directory goes at the end of the block."""
    here = replace(
        config, remote=hosts.address_towards(config.leader.removeprefix("tls://")), bind=hosts.bind_address()
    )
    if here.host == host_id():
        yield here
        return
    directory = RunDirectory()
    try:
        yield replace(here, directory=str(directory.path), host=host_id())
    finally:
        directory.remove()
