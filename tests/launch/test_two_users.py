"""Two users of one host, as under JupyterHub: neither can reach the workers of the other, or read their data.

The second user is a process of root that has given up all rights: it needs no home, and no Python of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys

import pytest

from rpcbench import Cluster

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else"),
]

NOBODY = 65534
STRANGER = """
import json, os, sys, time
from pathlib import Path
from rpcbench.transport.addresses import Opener
from rpcbench.transport.handshake import Identity
from rpcbench.transport.question_socket import ask_question

asked = json.loads(sys.argv[1])
directory, members, workers = Path(asked["directory"]), asked["members"], asked["workers"]
opener, me = Opener(bytes.fromhex(asked["guess"])), Identity("a", 9, "mallory", 0)


def outcome(attempt, *arguments):
    try:
        attempt(*arguments)
    except Exception as error:
        return type(error).__name__
    return "done"


def knock(address):
    opener.connect_stream(address, time.monotonic() + 10).close_descriptor()


def attempts():
    return {
        "look into the directory": outcome(os.listdir, directory),
        "read a log": outcome(Path(asked["log"]).read_bytes),
        "ask for the state": outcome(ask_question, directory, "name", 60.0),
        "leave a file there": outcome((directory / f"mine{os.geteuid()}").touch),
        **{f"knock at {name}": outcome(knock, address) for name, address in members.items()},
        **{f"enter {name}": outcome(opener.dial_peer, address, me) for name, address in members.items()},
        **{f"signal {name}": outcome(os.kill, pid, 0) for name, pid in workers.items()},
        **{f"variables of {name}": outcome(Path(f"/proc/{pid}/environ").read_bytes) for name, pid in workers.items()},
        **{f"memory of {name}": outcome(open, f"/proc/{pid}/mem", "rb") for name, pid in workers.items()},
    }


found = {"root": attempts()}
os.setgroups([])
os.setgid(asked["uid"])
os.setuid(asked["uid"])
found["stranger"] = attempts()
print(json.dumps(found))
"""


def tried(cluster):
    """The outcomes of all attempts, by root and by another user, without the secret."""
    members = cluster.agent.machine.read_node(lambda node: list(node.members.members.values()))
    directory = cluster.agent.config.directory
    asked = {
        "directory": directory,
        "log": f"{directory}/worker1.0.log",
        "members": {member.name: member.address for member in members},
        "workers": {name: cluster.pid(name) for name in cluster.workers},
        "guess": secrets.token_hex(32),
        "uid": NOBODY,
    }
    command = [sys.executable, "-c", STRANGER, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


REFUSED = {"PermissionError", "AuthenticationError"}


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_another_user_cannot_enter_a_world_or_read_its_data(monkeypatch, transport):
    monkeypatch.setenv("RPCBENCH_TRANSPORT", transport)
    with Cluster(2) as cluster:
        found = tried(cluster)
        assert cluster.run("all", "1") == {"worker1": 1, "worker2": 1}, "the workers still serve"
    root, stranger = found["root"], found["stranger"]
    entering = {f"enter {name}" for name in ("notebook", "worker1", "worker2")}
    knocks = {f"knock at {name}" for name in ("notebook", "worker1", "worker2")}
    if transport == "tcp":  # there a knock shows whether the process has the secret
        entering |= knocks
    assert entering < set(root) and len(root) == 4 + 6 + 6
    assert {what for what, how in root.items() if how != "done"} == entering, "root can do all else"
    assert {root[what] for what in entering} <= REFUSED, "no process enters without the secret"
    assert set(stranger.values()) <= REFUSED, stranger
    if transport == "unix":
        assert set(stranger.values()) == {"PermissionError"}
