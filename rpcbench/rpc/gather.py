"""All workers, or some, exchange an object each and wait for one another: `_all_gather`, `_barrier`.

One of them leads: for all workers the one that leads the world, else the one whose name sorts first. It counts rounds,
so that workers which have come later, and threads that gather at once, agree on who belongs together: a contribution
goes into the oldest round that has none of that worker yet. A round of all is complete when everyone who is in the
world by then has given something; a round of some fails when one of them goes.

How many RRefs there are, as torch counts them, and whether all are gone at the end. At a graceful end every worker lets
go of what it uses, wherever Python still holds it; then no worker uses anything, and every owner is left with nothing.
What is left is a leak.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import RpcError, RpcTimeoutError, ShutdownError, WorkerLostError
from rpcbench.base.futures import blocked
from rpcbench.protocol.node import Node
from rpcbench.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import WorkerInfo

_PATIENCE = timedelta(seconds=100)


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts: RRefs owned here, their forks, forks held here that are not confirmed, and forks on their way."""
    return current.current().machine.ask(_counts)


def _counts(node: Node) -> dict[str, str]:
    counts = {
        "num_owner_rrefs": len(node.rrefs.owned),
        "num_pending_users": sum(not user.confirmed for user in node.rrefs.users.values()),
        "num_forks": sum(len(owned.forks) for owned in node.rrefs.owned.values()),
        "num_pending_futures": len(node.rrefs.children),
    }
    return {name: str(count) for name, count in counts.items()}


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta = _PATIENCE) -> None:
    """Let go of all RRefs used here; returns when none is used or owned here any more, or after `timeout`."""
    agent = current.current()
    empty = Flag()

    def watch(node: Node) -> bool:
        node.rrefs.on_empty = empty.set
        return not (node.rrefs.owned or node.rrefs.users)

    for hold in list(agent.holds):
        if (handle := hold()) is not None:
            handle.release()
    if not agent.machine.ask(watch):
        empty.wait(timeout.total_seconds())


def check_leaks(agent: Agent) -> None:
    """RpcError that lists the RRefs owned here although the world is over, and where those held here were made."""
    leaks = agent.machine.ask(_leaks)
    if leaks:
        head = f"{agent.name} has {len(leaks)} RRef(s) left at its end; let go of them before shutdown:"
        raise RpcError("\n".join([head, *leaks, *_held_here(agent)]))


def _held_here(agent: Agent) -> list[str]:
    handles = [handle for hold in list(agent.holds) if (handle := hold()) is not None and not handle._released]
    return [f"Held here: RRef {h._rref}, made at {h._site or 'no line of this program'}" for h in handles]


def _leaks(node: Node) -> list[str]:
    held = node.leaks + node.rrefs.held_by()
    return [f"Leaking RRef {h.rref}, a {h.type or 'value'}: {node.name(h.holder)} holds fork {h.fork}" for h in held]


logger = logging.getLogger(__name__)
_ALL: frozenset[str] = frozenset()
_Key = frozenset[str]


class AllGatherStates:
    """One round: what was given so far, by name of the giver; `proceed_signal` is set when there will be no more."""

    def __init__(self, leader: str = "") -> None:
        self.leader = leader
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = Flag()
        self.error: Exception | None = None

    def end(self, objects: dict[str, Any] | Exception) -> None:
        if isinstance(objects, Exception):
            self.error = objects
        else:
            self.gathered_objects = objects
        self.proceed_signal.set()


class _Gathering:
    """What one agent knows of rounds: those it leads, and those it waits for."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._rounds: dict[_Key, int] = {}  # numbers that were given out
        self._led: dict[tuple[_Key, int], AllGatherStates] = {}  # not complete yet
        self._followed: dict[tuple[str, _Key, int], AllGatherStates] = {}  # by the leader's name, too
        agent.on_member(self._changed)
        agent.on_end.append(self._over)

    def leader(self, key: _Key) -> str:
        return min(key) if key else self._agent.member(self._agent.machine.ask(lambda node: node.members.leader)).name

    # -- the leader
    def give(self, key: _Key, giver: str, value: Any) -> int:
        """Put a contribution into a round; its number."""
        with self._lock:
            number = next((n for k, n in self._led if k == key and giver not in self._led[k, n].gathered_objects), None)
            if number is None:
                number = self._rounds.get(key, 0)
                self._rounds[key] = number + 1
                self._led[key, number] = AllGatherStates(self._agent.name)
            self._led[key, number].gathered_objects[giver] = value
            if giver == self._agent.name:
                self._followed[giver, key, number] = self._led[key, number]
        self._end_complete()
        return number

    def _end_complete(self) -> None:
        everyone = {info.name for info in self._agent.members()}
        with self._lock:
            for (key, number), states in list(self._led.items()):
                if (key or everyone) <= states.gathered_objects.keys():
                    del self._led[key, number]
                    states.proceed_signal.set()

    def _changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        """Somebody has come or gone."""
        if kind != "joined":
            error = WorkerLostError(f"{who.name} has gone while others waited for it in _all_gather: {reason}")
            with self._lock:
                hopeless = [
                    place for place, states in self._led.items()
                    if who.name in place[0] and who.name not in states.gathered_objects
                ]  # fmt: skip
                ended = [self._led.pop(place) for place in hopeless]
                ended += [states for states in self._followed.values() if states.leader == who.name]
            for states in ended:
                states.end(error)
        self._end_complete()

    def _over(self) -> None:
        """The agent stops: nobody waits on."""
        with self._lock:
            waiting = [*self._led.values(), *self._followed.values()]
        for states in waiting:
            states.end(ShutdownError(f"{self._agent.name} has shut down while others were waited for in _all_gather"))

    # -- followers
    def round(self, leader: str, key: _Key, number: int) -> AllGatherStates:
        with self._lock:
            return self._followed.setdefault((leader, key, number), AllGatherStates(leader))

    def forget(self, leader: str, key: _Key, number: int) -> None:
        with self._lock:
            self._followed.pop((leader, key, number), None)
            self._led.pop((key, number), None)


# -- what runs on other workers
def _gather_to_leader(key: _Key, giver: str, value: Any) -> int:
    return current.current().part(_Gathering).give(key, giver, value)


def _broadcast_to_followers(leader: str, key: _Key, number: int, objects: dict[str, Any] | Exception) -> None:
    current.current().part(_Gathering).round(leader, key, number).end(objects)


# -- API
def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """What every worker gives, by name; returns when all of `worker_names` (by default all there are) have given.

    `timeout` in seconds bounds each message and the wait; by default the wait has no end, and messages the agent's
    timeout. RpcTimeoutError, and WorkerLostError where one that is waited for, or the one who leads, is gone.
    """
    agent = current.current()
    gathering = agent.part(_Gathering)
    key = frozenset(worker_names) if worker_names else _ALL
    waiting = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    leader = gathering.leader(key)
    if leader == agent.name:
        number = gathering.give(key, agent.name, obj)
    else:
        number = agent.call(leader, _gather_to_leader, (key, agent.name, obj), timeout=timeout).wait()
    states = gathering.round(leader, key, number)
    try:
        agent.member(leader)  # should it go now, the round is told; had it gone before, this raises
        with blocked():
            ended = states.proceed_signal.wait(waiting)
        if not ended:
            states.error = RpcTimeoutError(
                f"{agent.name} timed out in _all_gather after {timeout:.2f} seconds: {leader}, which leads it, did not "
                "have all"
            )
        if leader == agent.name:
            _tell(agent, key, number, states, timeout)
    finally:
        gathering.forget(leader, key, number)
    if states.error is not None:
        raise states.error
    return states.gathered_objects


def _tell(agent: Agent, key: _Key, number: int, states: AllGatherStates, timeout: float) -> None:
    """The leader passes on what was gathered; followers that have gone since need it no more."""
    there = {info.name for info in agent.members()} - {agent.name}
    told = states.error or states.gathered_objects
    sent = {
        name: agent.call(name, _broadcast_to_followers, (agent.name, key, number, told), timeout=timeout)
        for name in there & states.gathered_objects.keys()
    }
    errors: dict[str, Exception] = {}
    for name, future in sent.items():
        try:
            future.wait()
        except WorkerLostError:
            continue
        except RpcError as error:
            errors[name] = error
    if errors:
        seconds = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        raise RpcTimeoutError(
            f"Followers {sorted(errors)} timed out in _all_gather after {seconds:.2f} seconds. The first exception is "
            f"{next(iter(errors.values()))}"
        )


def _barrier(worker_names: Iterable[str]) -> None:
    """Returns when all these workers have called it, or will not; as in torch, only the log says so then."""
    agent, names = current.current(), sorted(worker_names)
    try:
        _all_gather(None, names)
    except RuntimeError:
        logger.exception("%s goes on without having met all of %s in _barrier", agent.name, ", ".join(names))


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Returns when all workers have called it. Errors as `_all_gather`."""
    _all_gather(None, timeout=timeout)
