"""What a script's process asks before it is anybody: who leads the world, and which incarnation of its rank it is.

A process that comes under the rank of one before it must not be taken for that one, so it learns its incarnation before
its first word as a member. Who leads gives it out in the handshake, and never twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from rpcbench.base.config import WorldConfig
from rpcbench.base.errors import AuthenticationError, IncompleteWorldError, NotConnectedError, RefusedError, RpcError
from rpcbench.transport.addresses import Opener, host_id
from rpcbench.transport.handshake import UNBORN, Identity
from rpcbench.transport.rendezvous import Rendezvous

_PAUSE = 0.05
_NEWS = 1.0
"""Seconds until an end has been heard of: who hangs up may be leaving, who has this rank may have been killed."""


def ask(config: WorldConfig, may_found: bool, deadline: float) -> WorldConfig:
    """The configuration with the id of who leads, which is this process's own where it founds, and its incarnation.

    IncompleteWorldError where nobody answers until `deadline` (of time.monotonic); RefusedError, AuthenticationError.
    """
    me = Identity(config.cluster, config.id, config.name, UNBORN, host_id())
    patience, since = time.monotonic() + _NEWS, time.time()
    while True:
        try:
            leader = _first_answer(config, me)
            return replace(config, led_by=leader.id, incarnation=leader.offer)
        except NotConnectedError as error:
            if may_found:
                return replace(config, led_by=config.id, incarnation=0)
            why: RpcError = error
            if config.world_size is not None and (failure := Rendezvous(Path(config.directory)).failure(since)):
                raise IncompleteWorldError(f"{config.name}: worker 0 could not found the world: {failure}") from error
        except RefusedError as error:
            if not error.again and time.monotonic() > patience:
                raise
            why = error
        except AuthenticationError as error:
            if time.monotonic() > patience:
                raise
            why = error
        if time.monotonic() > deadline:
            raise IncompleteWorldError(f"{config.name} cannot reach {_whom(config)}: {why}") from why
        time.sleep(_PAUSE)  # nothing can tell us when somebody begins to lead


def _whom(config: WorldConfig) -> str:
    if config.world_size is not None or not config.leader:
        return "worker 0 of its world"
    return "worker 0 of its world, nor one on the same host who leads it now"


def _first_answer(config: WorldConfig, me: Identity) -> Identity:
    """NotConnectedError where nobody listens."""
    meeting, opener = Rendezvous(Path(config.directory)), Opener(config.secret)
    ways: Iterable[Callable[[], str]] = (meeting.find, *([lambda: config.leader] if config.leader else []))
    failed = ""
    for way in ways:
        try:
            stream, leader = opener.dial(way(), me)
        except OSError as error:
            failed = f"nobody answers at {config.leader or meeting.path}: {error.strerror or error}"
        else:
            stream.release()
            return leader
    raise NotConnectedError(failed)
