"""The configuration that a process needs to join a world, and the runtime's default limits.

A `WorldConfig` is sent to a new worker over a pipe, never on a command line: it holds the secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

PROTOCOL = 7
"""Version of the wire protocol; processes with different numbers refuse each other."""
DEFAULT_TIMEOUT = 60.0  # seconds, as in torch
UNSET_TIMEOUT = -1.0  # as in torch: use the default
DEFAULT_THREADS = 16  # of the thread pool, as in torch
HANDSHAKE_SECONDS = 5.0  # the longest time to open a connection, with its handshake
LOCAL_HANDSHAKE_SECONDS = 30.0  # the same within one host, where only a busy machine is late
JOIN_SECONDS = 60.0  # until a world must be complete
FLUSH_SECONDS = 20.0  # the longest wait for acknowledgements at shutdown
LAST_WORDS_SECONDS = 1.0  # the same, at a shutdown that is not graceful
STOP_SECONDS = 5.0
START_SECONDS = 60.0  # for a worker to join, after its launcher is asked for it
NOTEBOOK = "notebook"  # the name of member 0 in a notebook's cluster
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # the variable that CUDA reads when a process first uses it
RANK_NAMES = "RPCBENCH_RANKS"  # the variable with the workers by rank: worker1,worker3
STORE_PORT = "RPCBENCH_STORE_PORT"  # the variable MASTER_PORT:PORT: ranks of `distributed` meet at PORT in its place
FORK_MARK = "[a fork of "  # begins a line of a worker's log that the runtime has written for a fork of the worker


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """The configuration of one member: its identity, the address of member 0, the shared secret, and its options."""

    name: str
    id: int
    cluster: str
    directory: str  # shared by the members on one host
    secret: bytes = field(repr=False)
    incarnation: int = 0
    world_size: int | None = None  # None: an open world; a number closes it at that many members
    led_by: int = 0  # id of the leader when this member joins; its own if it founds the world
    launched: bool = True  # member 0 starts the others, and the world ends with it
    rpc_timeout: float = DEFAULT_TIMEOUT
    threads: int = DEFAULT_THREADS
    leader: str = ""  # with several hosts: the address of member 0 for the others
    remote: str = ""  # with several hosts: the address of this member (port 0: a free one)
    bind: str = ""  # the host to listen on, if it differs from `remote`
    host: str = ""  # identity of the host that shares `directory`, if there may be several
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)  # callee → device here → device there
    devices: tuple[str, ...] = ()  # those that this member uses; empty: all
    gpu: str = ""  # the only one that CUDA shows to it, as in CUDA_VISIBLE_DEVICES; empty: those of its environment
    environ: dict[str, str] = field(default_factory=dict)  # variables of its process, beside those of its host
    same_modes: bool = False  # calls from here run with autocast as it is here
    held: bool = False  # calls of other members wait until the creator of the agent sets `Bootstrap.ready`
    start_seconds: float = START_SECONDS  # for its launcher to start it, and for it to join
    stop_seconds: float = STOP_SECONDS  # for a worker to end, on request or after its world; then it is terminated
    suspect_seconds: float = 3.0  # of silence until a member on another host is reported as suspect,
    lost_seconds: float = 4.0  # until it is lost,
    stuck_seconds: float = 60.0  # and until it is lost although its host still acknowledges data
    grace_seconds: float = 5.0  # for a broken connection to be restored

    def pinned_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return this environment with the member's variables, and with its GPU if it has one of its own."""
        return {**environ, **self.environ, **({VISIBLE_GPUS: self.gpu} if self.gpu else {})}

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "secret": self.secret.hex()})

    @staticmethod
    def from_json(text: str) -> WorldConfig:
        fields = json.loads(text)
        secret, devices = bytes.fromhex(fields["secret"]), tuple(fields["devices"])
        return WorldConfig(**{**fields, "secret": secret, "devices": devices})
