"""Two hosts for the bench: network namespaces joined by one cable, made and removed here. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

_SECONDS = 10.0


class Host(NamedTuple):
    """A network namespace and its address on the cable."""

    name: str
    address: str

    def command(self) -> list[str]:
        """What to put before a command to run it there."""
        return ["ip", "netns", "exec", self.name]


def obstacle() -> str:
    """Why two hosts cannot be made; empty if they can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    probe = f"rpcbench-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"
    return ""


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """They are there inside the `with`."""
    one, other = (Host(f"rpcbench-{os.getpid()}-{number}", f"10.231.8.{number}") for number in (1, 2))
    with contextlib.ExitStack() as made:
        for host in (one, other):
            _ip("netns", "add", host.name)
            made.callback(_ip, "netns", "del", host.name)
        _ip("link", "add", "e0", "netns", one.name, "type", "veth", "peer", "name", "e0", "netns", other.name)
        for host in (one, other):
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "e0")
            _ip("-n", host.name, "link", "set", "e0", "up")
        yield one, other


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_SECONDS)
