"""A notebook whose workers srun has started on the hosts that are its arguments; it tells of what becomes of them.

It says "up", waits for a call to worker2, says how that has ended, does what it is told by lines of Python on standard
input, and says "over" when its cluster is shut down.
"""

from __future__ import annotations

import json
import sys
import time

import rpcbench
from rpcbench.base.errors import WorkerLostError
from rpcbench.launch import command


def say(**facts: object) -> None:
    print(json.dumps({"at": time.monotonic(), **facts}), flush=True)


def main(*hosts: str) -> None:
    # As with a cable that is cut: that the command has hung up does not reach the worker.
    hang_up, command._Command._hang_up = command._Command._hang_up, lambda self: None
    options = {"template": "srun -w {host} -N1 -n1 {cmd}", "hosts": hosts}
    with rpcbench.Cluster(len(hosts), launcher="command", options=options) as cluster:
        waiting = cluster.rpc_async("worker2", time.sleep, (600,), timeout=0)
        say(up={row.name: row.pid for row in cluster.status()})
        try:
            waiting.wait()
        except WorkerLostError as error:
            say(lost=str(error), states={row.name: row.state for row in cluster.status()}, left=cluster.workers)
        command._Command._hang_up = hang_up
        for line in sys.stdin:
            say(did=repr(eval(line)))
    say(over=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
