"""A notebook with workers that srun starts on the hosts given as arguments; it reports their states as lines of JSON.

It reports "up", waits for a call to worker2, reports the outcome of that call, evaluates lines of Python from standard
input, and reports "over" when its cluster has shut down.
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
    # As with a cut cable, the worker does not learn that the command has hung up.
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
