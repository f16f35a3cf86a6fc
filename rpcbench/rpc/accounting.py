"""How many RRefs there are, and whether all are gone at the end: counts as torch gives them, and the leak check.

At a graceful end every worker lets go of what it uses, wherever Python still holds it; then nobody uses anything, and
every owner is left with nothing. What is left is a leak.
"""

from __future__ import annotations

from datetime import timedelta

from rpcbench.base.conditions import Flag
from rpcbench.base.errors import RpcError
from rpcbench.protocol.node import Node
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent

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
