"""A notebook that will be killed: it has two workers, a fork that has exited, and one that keeps its descriptors."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace

import psutil

from rpcbench.base.config import WorldConfig
from rpcbench.launch.process import ProcessLauncher
from rpcbench.transport.run_dir import RunDirectory


def main(mode: str, output: str) -> None:
    directory = RunDirectory()
    launcher = ProcessLauncher(directory, start=mode, entry="launch_entries:main")
    idle = WorldConfig(
        "w1", 1, "idle", output, bytes(32), stop_seconds=0.5
    )  # not a member, so it does not end by itself
    configs = [idle, replace(idle, name="w2", id=2)]
    workers = [launcher.start(config).pid for config in configs]
    with launcher._servers_lock:  # another thread may hold it at that moment
        leaver = os.fork()
        if leaver == 0:
            launcher.close()
            sys.exit()
    os.waitpid(leaver, 0)
    holder = os.fork()
    if holder == 0:
        time.sleep(60)
        os._exit(0)
    server = psutil.Process(workers[0]).ppid()
    print(json.dumps({"workers": workers, "fork_server": server, "holder": holder, "directory": str(directory.path)}))
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
