"""Hosts for tests: network namespaces, joined by cables. Needs root and `ip`; tests without them are skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
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
        """Run `ip` in this namespace."""
        _run("ip", "-n", self.name, *command)

    def up(self) -> None:
        """Connect this host by the cable e0."""
        self.ip("addr", "add", f"{self.address}/24", "dev", "e0")
        self.ip("link", "set", "e0", "up")

    @property
    def entry(self) -> tuple[str, ...]:
        """The beginning of a command that runs on this host."""
        return ("ip", "netns", "exec", self.name)

    def run(self, *command: str) -> str:
        """Run a command on this host to its end, and return its output."""
        return _run(*self.entry, *command)

    def processes(self) -> list[int]:
        """The ids of the processes on this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]

    def end(self) -> None:
        """Kill the processes on this host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)

    def cut(self) -> None:
        """Disconnect the cable: packets are lost without an error."""
        self.ip("link", "set", "e0", "down")

    def mute(self, other: Host) -> None:
        """Drop the packets from this host to the other one; packets from there still arrive."""
        self.ip("route", "add", "blackhole", f"{other.address}/32")

    def start(self, script: Path, *arguments: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a Python script on this host."""
        command = [*self.entry, sys.executable, "-W", "ignore", str(script), *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env={**os.environ, **env}, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, timeout=SECONDS).stdout.decode()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, connected by a cable."""
    with _made(2) as (one, other):
        _run("ip", "link", "add", "e0", "netns", one.name, "type", "veth", "peer", "name", "e0", "netns", other.name)
        for host in (one, other):
            host.up()
        yield one, other


@pytest.fixture
def lab() -> Iterator[list[Host]]:
    """Four hosts, the notebook's and three others, each with a cable to a separate switch."""
    with connected(4) as hosts:
        yield hosts


@contextlib.contextmanager
def connected(count: int) -> Iterator[list[Host]]:
    """`count` hosts, each with a cable to a separate switch."""
    with _made(count + 1) as (switch, *hosts):
        switch.ip("link", "add", "b0", "type", "bridge")
        switch.ip("link", "set", "b0", "up")
        for number, host in enumerate(hosts):
            port = f"p{number}"
            host.ip("link", "add", "e0", "type", "veth", "peer", "name", port, "netns", switch.name)
            switch.ip("link", "set", port, "master", "b0", "up")
            host.up()
        yield hosts


@contextlib.contextmanager
def _made(count: int) -> Iterator[list[Host]]:
    """`count` network namespaces with loopback only."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made: list[Host] = []
    try:
        try:
            for number in range(1, count + 1):
                host = Host(f"rb{os.getpid()}-{number}", number)
                _run("ip", "netns", "add", host.name)
                made.append(host)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for host in made:
            host.ip("link", "set", "lo", "up")
        yield made
    finally:
        for host in made:
            _run("ip", "netns", "del", host.name)
