"""Monarch behind the names of an RPC module: the callee is an actor in a process of its own, which runs functions.

Monarch has nothing like an RRef: a result comes back. That process is not stopped while the other side is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _callee() -> Any:
    from monarch.actor import Actor, endpoint

    class Callee(Actor):  # type: ignore[misc]
        @endpoint  # type: ignore[untyped-decorator]
        def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            return function(*args)

    return Callee


class _Future:
    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> Any:
        return self._future.get()


class _Monarch:
    def __init__(self) -> None:
        from monarch.actor import this_host

        self._processes = this_host().spawn_procs(per_host={"gpus": 1})
        self._callee = self._processes.spawn("callee", _callee())

    def rpc_async(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> _Future:
        return _Future(self._callee.run.call_one(function, args))

    def rpc_sync(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return self.rpc_async(to, function, args).wait()

    def shutdown(self) -> None:
        self._processes.stop().get()


class _Nobody:
    """Rank 1: Monarch starts the process of the callee itself."""

    def shutdown(self) -> None:
        pass


def join(rank: int, url: str) -> Any:
    return _Nobody() if rank else _Monarch()
