"""OpenSSH for tests: an sshd on each host of a lab, in the foreground, with keys, names and folders of its own.

`nodes` gives hosts named node1, node2, … with an sshd each, and the environment in which `ssh node1` reaches them: an
`ssh` first on PATH that reads a configuration of the test alone. On a node the login shell sets LOGIN_SHELL, and ports
are taken from PORTS.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launch_bench import until
from netlab import Host

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"  # Debian's PATH of a user lacks that folder
PORTS = range(40000, 40100)
PROGRAMS = ("ssh", "ssh-keygen", "iptables")
# /run, /etc/profile.d: folders of this node's own, as `ip netns exec` has given it mounts of its own.
_NODE = """
hostname {name}
mount -t tmpfs none /run && mkdir -m 755 /run/sshd
mount -t tmpfs none /etc/profile.d && echo 'export LOGIN_SHELL=yes' >/etc/profile.d/test.sh
echo {ports} >/proc/sys/net/ipv4/ip_local_port_range
exec {sshd} -D -e -f {config}
"""
_SSHD = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
_SSH = """
Host keyless
  IdentityFile {folder}/stranger
Host forged
  UserKnownHostsFile {folder}/forged
Host * !keyless
  IdentityFile {folder}/user
Host *
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile none
  IdentitiesOnly yes
  IdentityAgent none
"""


class Node:
    """A host that ssh reaches by `name`."""

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self.name = name
        self.sshd = 0  # its process id

    def others(self) -> list[int]:
        """The processes on this host but for its sshd."""
        return [pid for pid in self.host.processes() if pid != self.sshd]


def skip_unless_installed() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or not os.access(SSHD, os.X_OK):
        pytest.skip(f"not installed: {', '.join(missing or ['sshd'])}")


@contextlib.contextmanager
def nodes(hosts: Sequence[Host], folder: Path) -> Iterator[tuple[list[Node], dict[str, str]]]:
    """Nodes with an sshd each, and the environment of a notebook that reaches them."""
    made = [Node(host, f"node{number}") for number, host in enumerate(hosts, 1)]
    env = _prepare(made, folder)
    with contextlib.ExitStack() as running:
        for node in made:
            running.callback(node.host.end)
            running.enter_context(_sshd(node, folder))
        yield made, env


def _prepare(made: Sequence[Node], folder: Path) -> dict[str, str]:
    for key in ("host", "user", "stranger"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    for known, key in (("known", "host"), ("forged", "stranger")):
        kind, public, *_ = (folder / f"{key}.pub").read_text().split()
        (folder / known).write_text("".join(f"{node.host.address} {kind} {public}\n" for node in made))
    (folder / "sshd.conf").write_text(_SSHD.format(folder=folder))
    named = [(node.name, node.host.address) for node in made]
    named += [(name, made[0].host.address) for name in ("keyless", "forged")]
    hosts = "".join(f"Host {name}\n  HostName {address}\n" for name, address in named)
    (folder / "ssh.conf").write_text(hosts + _SSH.format(folder=folder))
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh.conf "$@"\n')
    (bin_ / "ssh").chmod(0o755)
    return {"PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def _sshd(node: Node, folder: Path) -> Iterator[None]:
    script = _NODE.format(name=node.name, sshd=SSHD, config=folder / "sshd.conf", ports=f"{PORTS[0]} {PORTS[-1]}")
    log = folder / f"{node.name}.log"
    with log.open("w") as said:
        command = [*node.host.entry, "unshare", "--uts", "sh", "-ec", script]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as process:
            node.sshd = process.pid
            try:
                until(lambda: process.poll() is not None or "Server listening" in log.read_text())
                assert process.poll() is None, log.read_text()
                yield
            finally:
                process.kill()
