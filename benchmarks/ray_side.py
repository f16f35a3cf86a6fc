"""Ray behind the names of an RPC module: the callee is an actor in a process of its own, which runs what it is sent.

Ray's own processes are not stopped while the other side is measured, and their CPU time is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Callee:
    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return function(*args)


class _Future:
    def __init__(self, ray: Any, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def wait(self) -> Any:
        return self._ray.get(self._reference)

    to_here = wait


class _Object:
    """An object that lives in an actor: Ray's way to a method of it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def rpc_sync(self) -> _Object:
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._actor, name)
        return lambda *args: self._ray.get(method.remote(*args))


class _Ray:
    def __init__(self) -> None:
        import ray

        self._ray: Any = ray
        ray.init(include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        self._callee = ray.remote(num_cpus=0)(_Callee).remote()

    def rpc_async(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> _Future:
        return _Future(self._ray, self._callee.run.remote(function, args))

    def rpc_sync(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        return self.rpc_async(to, function, args).wait()

    def remote(self, to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> Any:
        if isinstance(function, type):
            return _Object(self._ray, self._ray.remote(num_cpus=0)(function).remote(*args))
        return self.rpc_async(to, function, args)

    def shutdown(self) -> None:
        self._ray.shutdown()


class _Nobody:
    """Rank 1: Ray starts the process of the callee itself."""

    def shutdown(self) -> None:
        pass


def join(rank: int, url: str) -> Any:
    return _Nobody() if rank else _Ray()
