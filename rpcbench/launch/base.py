"""What every way of starting workers offers: a `Launcher` starts workers and hands out one `Handle` for each.

Rules
- An exit status is as `subprocess` has it: the code, or minus the number of the signal that ended the worker; or
  UNKNOWN, where nobody can tell.
- A launcher knows processes and nothing of RPC: it says that a worker's process ended, others say what that means.
- All methods may be called from any thread.

A launcher is found by its name (see `kinds`): a callable `(directory: RunDirectory, **options) -> Launcher`. One that
is `far` may start workers on other hosts: the cluster listens there as well, with TLS, and each config names where
(`leader`); the worker works out itself where it is (`far.main`). Its handles are of what launches workers, and no
signal of this host reaches those: an interrupt, and the pid that users see, go through the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from rpcbench.base.config import WorldConfig

UNKNOWN = 256
"""The exit status of a worker that has ended nobody knows how; no process has it."""


class Handle(Protocol):
    """One started worker."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """The exit status; None while the worker runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, waited for `timeout` seconds at most (None: until it is there); then TimeoutError."""

    def terminate(self) -> None:
        """Send SIGTERM to the worker, and to what it started as far as that can be reached. Does not wait."""

    def kill(self) -> None:
        """End the worker, and what it started, at once. Does not wait; harmless on a worker that has ended."""

    def interrupt(self) -> None:
        """Send SIGINT to the worker's process alone. Harmless on a worker that has ended, or may be on another host."""

    def last_words(self) -> str:
        """The last lines that the worker wrote outside any cell or call; empty if it wrote none."""


ExitCallback = Callable[[Handle, int], object]
"""(handle, exit status): called once, after `handle.poll()` knows it, on a thread of the launcher: must be brief."""


class Launcher(Protocol):
    """A way of starting workers. `far`: they may be on other hosts."""

    far: bool

    def warm(self) -> None:
        """Begin, in the background, whatever makes the first `start` quick."""

    def start(self, config: WorldConfig, on_exit: ExitCallback | None = None) -> Handle:
        """Start one worker and return when its process is there (it has not joined yet).

        Errors: RpcError if it cannot be started, ShutdownError after `close`.
        """

    def close(self) -> None:
        """End all workers, within a bounded time. May be called again."""


@runtime_checkable
class Gang(Launcher, Protocol):
    """One that starts several workers as one: all of them or none."""

    def start_all(self, configs: Sequence[WorldConfig], on_exit: ExitCallback | None = None) -> Sequence[Handle]:
        """As `start`, for all of these."""


@runtime_checkable
class Inseparable(Gang, Protocol):
    """One whose workers come and go together. `inseparable` says why none of them is started or ended alone."""

    inseparable: str
