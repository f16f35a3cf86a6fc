"""Slurm for tests: munged and slurmctld on the notebook's host, slurmd on another one, in the foreground.

All of their files are in a folder of the test, and they end with the block. The node is node1 with CPUS CPUs, whatever
the machine has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from launch_bench import until
from netlab import Host

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "squeue", "sinfo", "scancel")
CPUS = 4
_FOLDERS = f"{os.environ['PATH']}:/usr/sbin"  # Debian's PATH of a user lacks that folder
_CONFIG = """
ClusterName=test
SlurmctldHost={name}({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=node1 NodeAddr={node} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster of one node; its commands run on the notebook's host."""

    def __init__(self, host: Host, node: Host, env: dict[str, str]) -> None:
        self.host = host
        self.node = node
        self.env = env
        self.slurmd = 0  # its process id

    def lines(self, *command: str) -> list[str]:
        """Run a command of Slurm to its end, and return the lines of its output."""
        command = (*self.host.entry, *command)
        done = subprocess.run(command, env=self.env, check=True, capture_output=True, text=True, timeout=60)
        return done.stdout.splitlines()

    def jobs(self) -> set[str]:
        """The numbers of the jobs, those that wait as well."""
        return {*self.lines("squeue", "--noheader", "--format=%i")}

    def steps(self) -> list[str]:
        """The running steps, as "JOB.STEP"."""
        return [line for line in self.lines("squeue", "--noheader", "--steps", "--format=%i") if line[-1].isdigit()]

    def others(self) -> set[int]:
        """The processes on the node but for slurmd."""
        return {*self.node.processes()} - {self.slurmd}


def skip_unless_installed() -> None:
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_FOLDERS) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


@contextlib.contextmanager
def slurm(host: Host, node: Host, folder: Path) -> Iterator[Slurm]:
    """A running Slurm, whose node is idle."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))
    name = socket.gethostname().partition(".")[0]
    fields = {"name": name, "controller": host.address, "node": node.address, "folder": folder, "cpus": CPUS}
    (folder / "slurm.conf").write_text(_CONFIG.format(**fields))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused; to look for one fails in a namespace
    env = {"PATH": _FOLDERS, "SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1"}
    made = Slurm(host, node, {**os.environ, **env})
    with contextlib.ExitStack() as running:
        _start(made, folder, running)
        yield made


def _start(made: Slurm, folder: Path, running: contextlib.ExitStack) -> None:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    # --force: the folder is private to this user, and munged wants one that all users may enter.
    munged = ["munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in files.items())]
    running.callback(made.host.end)
    running.callback(made.node.end)
    running.enter_context(_daemon(made, made.host, munged, folder))
    until((folder / "munge.socket").exists)
    running.enter_context(_daemon(made, made.host, ["slurmctld", "-D"], folder))
    slurmd = running.enter_context(_daemon(made, made.node, ["slurmd", "-D", "-N", "node1"], folder))
    made.slurmd = slurmd.pid
    until(lambda: (folder / "slurmctld.log").read_text().count("Running as primary controller"))
    until(lambda: made.lines("sinfo", "--noheader", "--format=%T") == ["idle"])


@contextlib.contextmanager
def _daemon(made: Slurm, host: Host, command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{command[0]}.log").open("wb") as said:
        entry = [*host.entry, *command]
        with subprocess.Popen(entry, env=made.env, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as process:
            try:
                yield process
            finally:
                process.kill()
