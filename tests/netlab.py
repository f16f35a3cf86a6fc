"""Two hosts for tests: network namespaces joined by one cable. Needs root and `ip`; tests without them are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SECONDS = 60.0


class Host:
    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"10.231.7.{number}"

    def ip(self, *command: str) -> None:
        """Run `ip` inside."""
        _run("ip", "-n", self.name, *command)

    def cut(self) -> None:
        """Pull the cable: what is sent is lost, and nobody is told."""
        self.ip("link", "set", "e0", "down")

    def mute(self, other: Host) -> None:
        """Nothing of this host reaches the other one any more; what comes from there still arrives."""
        self.ip("route", "add", "blackhole", f"{other.address}/32")

    def start(self, script: Path, *arguments: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """A Python script on this host."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-W", "ignore", str(script), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env={**os.environ, **env}, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    one, other = (Host(f"rb{os.getpid()}-{number}", number) for number in (1, 2))
    made: list[Host] = []
    try:
        try:
            for host in (one, other):
                _run("ip", "netns", "add", host.name)
                made.append(host)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        _run("ip", "link", "add", "e0", "netns", one.name, "type", "veth", "peer", "name", "e0", "netns", other.name)
        for host in (one, other):
            host.ip("link", "set", "lo", "up")
            host.ip("addr", "add", f"{host.address}/24", "dev", "e0")
            host.ip("link", "set", "e0", "up")
        yield one, other
    finally:
        for host in made:
            _run("ip", "netns", "del", host.name)
