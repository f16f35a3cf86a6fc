"""How workers that were asked to end are stopped: waited for, then terminated (SIGTERM), then killed (SIGKILL).

Those that end in time run their `atexit` functions, finalizers and flushes of logs. Ctrl-C ends the wait, not the rest:
when `stopped` returns or raises, every worker has ended or was killed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rpcbench.base.conditions import Changes
from rpcbench.launch.base import Handle

_TERM_SECONDS = 0.5
_KILL_SECONDS = 5.0


def stopped(running: Callable[[], Sequence[Handle]], changes: Changes, grace: float) -> list[str]:
    """Wait until none of the workers `running` is left, `grace` seconds at most; then end those that are. Returns the
    names of these. `changes` tells of each end."""

    def all_ended() -> bool:
        return not running()

    late: list[str] = []
    try:
        changes.wait_for(all_ended, grace)
    finally:
        late = [handle.name for handle in running()]
        try:
            for handle in running():
                handle.terminate()
            changes.wait_for(all_ended, _TERM_SECONDS)
        finally:  # also at a second Ctrl-C
            for handle in running():
                handle.kill()
            changes.wait_for(all_ended, _KILL_SECONDS)
    return late


def complaint(late: Sequence[str], grace: float) -> str:
    """The warning that names workers which had to be terminated."""
    names, were = ", ".join(late), "was" if len(late) == 1 else "were"
    return (
        f"{names} had not ended {grace:g} s after being asked to, and {were} terminated: "
        f"atexit functions and finalizers there may not have run. Cluster(2, grace=10), in a notebook %cluster start 2 "
        f"--grace 10, waits longer."
    )
