"""What a process must know to join a world, and the figures the runtime works with.

A `WorldConfig` travels to a new worker over a pipe, never on a command line: it holds the secret.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

PROTOCOL = 3
"""What two processes say to each other; another number, where they would not understand."""
DEFAULT_TIMEOUT = 60.0
UNSET_TIMEOUT = -1.0
DEFAULT_THREADS = 16
HANDSHAKE_SECONDS = 5.0
JOIN_SECONDS = 60.0
FLUSH_SECONDS = 20.0
LAST_WORDS_SECONDS = 1.0
STOP_SECONDS = 5.0
NOTEBOOK = "notebook"


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """Everything one member needs: who it is, where member 0 listens, and the secret both must know.

    `directory` is shared by the members on one host, that of the identity `host` where there may be several. `leader`
    and `remote` are for worlds on several hosts: where member 0 is found from the others, and where this member is
    (port 0: a free one); `bind` is the host to listen on, where that differs. `world_size` None means an open world,
    where members come and go; a number closes it at that many. `led_by`: the id of the member that leads when this one
    comes; its own where it founds the world. `launched`: member 0 starts the others, and the world ends with it; else
    processes come by themselves. `device_maps`: name of a callee -> device here -> device there. `devices`: those this
    member uses; none: all. `same_modes`: its calls take grad mode and autocast along. `held`: calls of others wait
    until the maker of the agent sets `agent.ready`. `stop_seconds`: so long a worker may take to end once it is asked
    to, or its world is over; then it is terminated.

    Of a member on another host nothing is heard: after `suspect_seconds` that is told, after `lost_seconds` it is lost,
    after `stuck_seconds` even if its host still answers. A broken connection may stand again in `grace_seconds`.
    """

    name: str
    id: int
    cluster: str
    directory: str
    secret: bytes = field(repr=False)
    incarnation: int = 0
    world_size: int | None = None
    led_by: int = 0
    launched: bool = True
    rpc_timeout: float = DEFAULT_TIMEOUT
    threads: int = DEFAULT_THREADS
    leader: str = ""
    remote: str = ""
    bind: str = ""
    host: str = ""
    device_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    same_modes: bool = False
    held: bool = False
    stop_seconds: float = STOP_SECONDS
    suspect_seconds: float = 3.0
    lost_seconds: float = 4.0
    stuck_seconds: float = 60.0
    grace_seconds: float = 5.0

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "secret": self.secret.hex()})

    @staticmethod
    def from_json(text: str) -> WorldConfig:
        fields = json.loads(text)
        secret, devices = bytes.fromhex(fields["secret"]), tuple(fields["devices"])
        return WorldConfig(**{**fields, "secret": secret, "devices": devices})


def seconds_of(timeout: float, default: float) -> float | None:
    """A timeout as torch counts it: -1 the default, 0 none. ValueError for another negative number."""
    if timeout == UNSET_TIMEOUT:
        timeout = default
    if timeout < 0:
        raise ValueError(f"a timeout is a number of seconds, 0 for none, or -1 for the default; not {timeout}")
    return timeout or None
