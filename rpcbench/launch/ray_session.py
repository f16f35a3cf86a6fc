"""The session in Ray that this process has: the user's own, or one that launchers begin, share, and end together.

Rule: without a session, Ray begins one with whatever is asked of it. So what may come late goes through `tell`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from rpcbench.base.errors import RpcError
from rpcbench.launch.ray_actor import HOOK

_lock = threading.Lock()
_ours: str | None = None  # the name of a session that launchers have begun
_users = 0  # launchers in that


def enter(address: str | None) -> str | None:
    """Have a session; its name where it is ours, to be left. RpcError where Ray cannot be joined or started."""
    global _ours, _users
    with _lock:
        if not ray.is_initialized():
            try:
                with _own_breakpoints():
                    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # Ray raises plain ones, too
                raise RpcError(f"Ray cannot be joined or started: {error}") from error
            _ours, _users = name(), 0
        elif _ours is None or _ours != name():
            return None
        _users += 1
        return _ours


@contextlib.contextmanager
def _own_breakpoints() -> Iterator[None]:
    """Ray would have `breakpoint()` be its own, here and in all that is started from here."""
    before = os.environ.get(HOOK)
    try:
        yield
    finally:
        os.environ.pop(HOOK, None)
        if before is not None:
            os.environ[HOOK] = before


def leave(ours: str | None) -> None:
    """What `enter` has returned is needed no more. A session that the user has begun since is none of ours."""
    global _ours, _users
    with _lock:
        if ours is None or ours != _ours:
            return
        _users -= 1
        if not _users:
            _ours = None
            if name() == ours:
                ray.shutdown()


def name() -> str:
    """That of the session, which no other one has; "" where there is none."""
    with contextlib.suppress(RayError, RuntimeError, AttributeError):  # it ends just now
        if ray.is_initialized():
            here = ray.get_runtime_context()
            return f"{here.get_session_name()} {here.get_job_id()}"
    return ""


def check() -> None:
    """RpcError where the session has been ended."""
    if not ray.is_initialized():
        raise RpcError("Ray was shut down, and with it what started these workers: make a new cluster")


def tell(act: Callable[..., Any], *arguments: Any) -> None:
    """Tell Ray something, unless it is gone, or the session that this was about: then all of that is over."""
    if ray.is_initialized():  # else Ray would begin a session
        with contextlib.suppress(RayError):
            act(*arguments)
