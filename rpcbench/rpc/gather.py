"""All-gather and barrier of Python objects over RPC (`_all_gather`, `_barrier`), and counts of RRefs for leak checks.

One worker leads a gather: for all workers the leader of the world, else the worker with the smallest name. It forms
the rounds, so that workers that joined later, and threads that gather at the same time, agree on which contributions
belong together: a contribution joins the oldest round that has none from that worker yet. A round of all workers is
complete when every current member has contributed; a round of some workers fails when one of them leaves.

At a graceful shutdown every worker releases the RRefs that it uses, even those that Python still holds. Then no worker
uses any RRef, and every owner drops its values. Any RRef that is left is a leak.
"""
# One round, led by w1. A follower numbers its waits, by which the result finds the thread; it drops a late result.
#     w2                         w1 (leader)                       w3
#      | _gather_to_leader(b, 7) ─> | give                          |
#      |                          | <── _gather_to_leader(c, 4) ─── |
#      |                     _all_gather(a): the round is complete  |
#      | <─ _broadcast_to_followers(7, {w1: a, w2: b, w3: c})       |
#      |            _broadcast_to_followers(4, {w1: a, …}) ───────> |

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rpcbench.base.conditions import Event
from rpcbench.base.errors import RpcError, RpcTimeoutError, ShutdownError, WorkerLostError
from rpcbench.base.futures import Future, release_slot
from rpcbench.base.ids import Counter
from rpcbench.protocol.node import Node
from rpcbench.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.members import GONE, WorkerInfo

_LABEL = "all_gather"  # of calls, in errors
_PATIENCE = timedelta(seconds=100)  # for owners and users of RRefs at shutdown


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return counts: RRefs owned here, their forks, unconfirmed forks held here, and forks in transit."""
    return current.current_agent().machine.read_node(_count_rrefs)


def _count_rrefs(node: Node) -> dict[str, str]:
    counts = {
        "num_owner_rrefs": len(node.rrefs.owned),
        "num_pending_users": sum(not user.is_confirmed for user in node.rrefs.users.values()),
        "num_forks": sum(len(owned.forks) for owned in node.rrefs.owned.values()),
        "num_pending_futures": len(node.rrefs.children),
    }
    return {name: str(count) for name, count in counts.items()}


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta = _PATIENCE) -> None:
    """Release all RRefs used here; return when none is used or owned here any more, or after `timeout`."""
    agent = current.current_agent()
    empty = Event()

    # One step under the node's lock: the last RRef cannot vanish between the test and the registration.
    def watch(node: Node) -> bool:
        node.rrefs.on_empty = empty.set
        return not (node.rrefs.owned or node.rrefs.users)

    for hold in list(agent.holds):
        if (handle := hold()) is not None:
            handle.release()
    if not agent.machine.read_node(watch):
        empty.wait(timeout.total_seconds())


def check_leaks(agent: Agent) -> None:
    """Raise RpcError if RRefs are owned here after the world's end; list them, and where those held here were made."""
    leaks = agent.machine.read_node(_describe_leaks)
    if leaks:
        head = f"{agent.name} has {len(leaks)} RRef(s) left at its end; let go of them before shutdown:"
        handles = [handle for hold in list(agent.holds) if (handle := hold()) is not None and not handle._released]
        here = [f"Held here: RRef {h._rref}, made at {h._site or 'no line of this program'}" for h in handles]
        raise RpcError("\n".join([head, *leaks, *here]))


def _describe_leaks(node: Node) -> list[str]:
    held = node.leaks + node.rrefs.forks_held_by()
    return [
        f"Leaking RRef {h.rref}, a {h.type or 'value'}: {node.member_name(h.holder)} holds fork {h.fork}" for h in held
    ]


logger = logging.getLogger(__name__)
_ALL: frozenset[str] = frozenset()  # the key of rounds of all workers
_Key = frozenset[str]  # names of the workers of a round


class AllGatherStates:
    """One round of an all-gather; the attributes that torch has keep its names."""

    def __init__(self, leader: str = "") -> None:
        self.leader = leader
        self.gathered_objects: dict[str, Any] = {}  # by name of the contributor
        self.proceed_signal = Event()  # set when the round is complete or has failed
        self.error: Exception | None = None  # the reason that it failed
        self.number = 0  # of a follower's wait
        self.numbers: dict[str, int] = {}  # of the contributors' waits, on the leader

    def finish_round(self, objects: dict[str, Any] | Exception) -> None:
        if isinstance(objects, Exception):
            self.error = objects
        else:
            self.gathered_objects = objects
        self.proceed_signal.set()


class _GatherRounds:
    """The rounds of one agent: those that it leads, and those for which its threads wait."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._led: dict[AllGatherStates, _Key] = {}  # led here, not complete yet; oldest first
        self._followed: dict[int, AllGatherStates] = {}  # by number of the wait
        self._numbers = Counter(1)
        agent.on_member(self._member_changed)
        agent.hooks.on_end.append(self._agent_stopped)

    def round_leader(self, key: _Key) -> str:
        return (
            min(key)
            if key
            else self._agent.member(self._agent.machine.read_node(lambda node: node.members.leader)).name
        )

    # -- the leader
    def add_contribution(self, key: _Key, sender: str, value: Any, number: int = 0) -> AllGatherStates:
        """Put a contribution into a round, and return the round. `number`: of the giver's wait."""
        with self._lock:
            open_ = (states for states, k in self._led.items() if k == key and sender not in states.gathered_objects)
            states = next(open_, None) or AllGatherStates(self._agent.name)
            self._led[states] = key
            states.gathered_objects[sender] = value
            states.numbers[sender] = number
        self._end_complete()
        return states

    def _end_complete(self) -> None:
        everyone = {info.name for info in self._agent.members()}
        with self._lock:
            for states, key in list(self._led.items()):
                if (key or everyone) <= states.gathered_objects.keys():
                    del self._led[states]
                    states.proceed_signal.set()

    def _member_changed(self, kind: str, who: WorkerInfo, reason: str) -> None:
        """End the rounds that a lost worker would have completed or led; complete those that wait for it no more."""
        if kind in GONE:
            error = WorkerLostError(f"{who.name} has left while others waited for it in _all_gather: {reason}")
            with self._lock:
                ended = [s for s, key in self._led.items() if who.name in key and who.name not in s.gathered_objects]
                for states in ended:
                    del self._led[states]
                ended += [states for states in self._followed.values() if states.leader == who.name]
            for states in ended:
                states.finish_round(error)
        self._end_complete()  # a round of all workers may have waited for that one only

    def _agent_stopped(self) -> None:
        """End all rounds when the agent stops, so that no thread waits on."""
        with self._lock:
            waiting = [*self._led, *self._followed.values()]
        for states in waiting:
            states.finish_round(
                ShutdownError(f"{self._agent.name} has shut down while it waited for others in _all_gather")
            )

    # -- followers
    def follow_round(self, leader: str) -> AllGatherStates:
        """Register a wait for a round. If the leader leaves from now on, `_member_changed` ends it."""
        states = AllGatherStates(leader)
        states.number = self._numbers.next()
        with self._lock:
            self._followed[states.number] = states
        return states

    def forget_round(self, states: AllGatherStates) -> None:
        with self._lock:
            self._followed.pop(states.number, None)
            self._led.pop(states, None)


# -- functions that run on other workers
def _gather_to_leader(key: _Key, sender: str, value: Any, number: int) -> None:
    current.current_agent().part(_GatherRounds).add_contribution(key, sender, value, number)


def _broadcast_to_followers(number: int, objects: dict[str, Any] | Exception) -> None:
    if (
        states := current.current_agent().part(_GatherRounds)._followed.get(number)
    ) is not None:  # it has not timed out
        states.finish_round(objects)


# -- API
def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchange one object with other workers, and return the objects of all by name.

    Args:
        obj: The contribution of this worker.
        worker_names: The workers that take part; by default all members of the world.
        timeout: Seconds for each message and for the wait. By default the wait has no limit, and messages have the
            agent's timeout.

    Raises:
        RpcTimeoutError: The timeout has passed.
        WorkerLostError: The leader, or a worker for which the round waits, is lost or has left.
    """
    agent = current.current_agent()
    rounds = agent.part(_GatherRounds)
    key = frozenset(worker_names) if worker_names else _ALL
    waiting = None if timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT) else timeout
    leader = rounds.round_leader(key)
    leads = leader == agent.name
    states = rounds.add_contribution(key, leader, obj) if leads else rounds.follow_round(leader)
    try:
        if not leads:
            contribution = (key, agent.name, obj, states.number)
            agent.call(leader, _gather_to_leader, contribution, timeout=timeout, label=_LABEL).wait()
        with release_slot():
            ended = states.proceed_signal.wait(waiting)
        if not ended:
            states.error = RpcTimeoutError(
                f"{agent.name} timed out in _all_gather after {timeout:.2f} seconds: its leader {leader} has not "
                "received all contributions"
            )
        if leads:
            _send_result(agent, states, timeout)
    finally:
        rounds.forget_round(states)
    if states.error is not None:
        raise states.error
    return states.gathered_objects


def _send_result(agent: Agent, states: AllGatherStates, timeout: float) -> None:
    """Send the result of a round from its leader to the followers that are still there."""
    there = {info.name for info in agent.members()} - {agent.name}
    result = states.error or states.gathered_objects
    sent: dict[str, Future[Any]] = {}
    for name in there & states.numbers.keys():
        with contextlib.suppress(WorkerLostError):  # it has left since
            arguments = (states.numbers[name], result)
            sent[name] = agent.call(name, _broadcast_to_followers, arguments, timeout=timeout, label=_LABEL)
    errors: dict[str, Exception] = {}
    for name, future in sent.items():
        try:
            future.wait()
        except WorkerLostError:
            pass
        except RpcError as error:
            errors[name] = error
    if errors:
        seconds = agent.calls.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else timeout
        raise RpcTimeoutError(
            f"Followers {sorted(errors)} timed out in _all_gather after {seconds:.2f} seconds. The first exception is "
            f"{next(iter(errors.values()))}"
        )


def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all these workers have called it; if one cannot, log that and return, as torch does."""
    agent, names = current.current_agent(), sorted(worker_names)
    try:
        _all_gather(None, names)
    except RuntimeError:
        logger.exception("%s continues although not all of %s have reached _barrier", agent.name, ", ".join(names))


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called it. Raises the errors of `_all_gather`."""
    _all_gather(None, timeout=timeout)
