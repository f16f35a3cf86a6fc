"""A notebook that will be killed: it has two kernel workers; one is busy, the other has started a process.

With the kernel spec "mine", the provisioner of these tests launches the kernels, and no process guards them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import elsewhere_provisioner
import psutil
from jupyter_client.provisioning import KernelProvisionerFactory

import rpcbench
from rpcbench.cells.runner import Cell, run_cell


def main() -> None:
    spec = sys.argv[1]
    KernelProvisionerFactory.instance().provisioners["elsewhere"] = elsewhere_provisioner.ENTRY_POINT
    cluster = rpcbench.Cluster(2, kind="kernel", kernel=spec)
    started = Cell(1, "import subprocess\nsubprocess.Popen(['sleep', '600']).pid", value=True)
    child = cluster.rpc_sync("worker1", run_cell, (started,))[""] if spec == "python3" else os.getpid()
    busy = cluster.rpc_async("worker2", run_cell, (Cell(2, "while True:\n    pass"),))
    processes = [child, *(process.pid for process in psutil.Process(os.getpid()).children(recursive=True))]
    print(json.dumps({"processes": processes, "directory": str(Path(cluster.connection_file("worker1")).parent)}))
    sys.stdout.flush()
    signal.pause()
    busy.wait()


if __name__ == "__main__":
    main()
