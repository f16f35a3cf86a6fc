"""Where a library that is a danger to others is measured: in namespaces of its own, of processes and of the network.

Whom it ends by a pattern is in there with it, a port that it opens to all hosts is reached from there only, and all of
it is gone when the measurement ends. Where such namespaces cannot be made it is not measured: BenchError.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import peers
from benchmarks.pairs import BenchError
from benchmarks.peer_notebook import PEERS, Peer, Plan

_NAMESPACES = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
_LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_SECONDS = 900.0


def measure(peer: Peer, plan: Plan) -> dict[str, str]:
    """What was seen in each row. BenchError where two workers cannot even be started, or not without danger."""
    if not peer.fenced:
        return peers.measure(peer, plan)
    if why := obstacle():
        raise BenchError(f"it is a danger to others, and {why}")
    said = run([sys.executable, "-m", __name__, peer.name, json.dumps(plan)])
    seen: dict[str, str] = json.loads(said)
    return seen


def obstacle() -> str:
    """Why namespaces cannot be made; empty if they can."""
    if absent := [name for name in (_NAMESPACES[0], "ip") if shutil.which(name) is None]:
        return f"namespaces need {' and '.join(absent)}, of util-linux and iproute2"
    try:
        run(["true"])
    except BenchError as error:
        return f"no namespaces can be made: {error}"
    return ""


def run(command: Sequence[str]) -> str:
    """What this command prints when it runs inside. BenchError where it fails."""
    try:
        done = subprocess.run([*_NAMESPACES, *_LOOPBACK, *command], capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise BenchError(f"it did not end in {_SECONDS:g} s") from None
    if done.returncode:
        raise BenchError((done.stderr or done.stdout).strip())
    return done.stdout


def _inside(name: str, plan: str) -> None:
    try:
        print(json.dumps(peers.measure(PEERS[name], Plan(*json.loads(plan)))))
    except BenchError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _inside(*sys.argv[1:])
