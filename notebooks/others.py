"""Starts jobs of torchrun for lesson 38, in processes of their own that know nothing of this notebook."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import rpcbench

PROGRAM = Path(__file__).parent / "others_job.py"
RANKS, PATIENCE = 4, 120.0


class Run:
    """A job of four ranks under torchrun. `address`: that of its debug server. `folder`: where it leaves files."""

    def __init__(self, fault: str, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lesson38-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        own = ["--port", str(port), "--folder", str(self.folder), "--fault", fault, "--seed", str(seed)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        # The variables of a cluster's worker, and of this notebook, are none of its business.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*torchrun, str(PROGRAM), *own], stdout=log, stderr=log, env=environment, start_new_session=True
            )
        print("torchrun", *torchrun[-1:], PROGRAM.name, shlex.join(["--fault", fault, "--seed", str(seed)]))

    def wait_until_stuck(self) -> None:
        """Wait until ranks are in a collective that one has not come to. Somebody would see: no progress, no error."""
        for _ in self._looks():
            if not (self.folder / "stuck").exists():
                continue
            with contextlib.suppress(ConnectionError):  # its server still starts
                if [*rpcbench.attach(self.address).collectives().describe_unfinished()]:
                    return

    def wait(self) -> None:
        """Wait until the job has ended."""
        for _ in self._looks():
            if self._process.poll() is not None:
                break
        if self._process.returncode:
            raise RuntimeError(f"the job has failed:\n{(self.folder / 'log').read_text()}")

    def _looks(self) -> Iterator[None]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            yield
            time.sleep(0.3)
        raise TimeoutError(f"nothing has happened for {PATIENCE:.0f} s:\n{(self.folder / 'log').read_text()}")

    def stop(self) -> None:
        """End all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()


def start(fault: str, seed: int) -> Run:
    """Start a job with a fault: "hang" or "slow"."""
    return Run(fault, seed)
