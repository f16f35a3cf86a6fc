"""An RRef that is sent to its owner in a call: it goes as a name, since the caller holds it until the result."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import until, world

from rpcbench.base.errors import ProtocolError, RpcError, WorkerLostError
from rpcbench.rpc import RRef, remote, rpc_async, rpc_sync
from rpcbench.rpc.rref_proxy import run_method_there
from rpcbench.runtime.agent import Agent
from rpcbench.serialization.pickler import _REDUCERS


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made


class Box:
    """A value that can be distinguished from others."""


def same(first: Any, second: Any) -> bool:
    return first is second


def where(value: Any) -> tuple[bool, bool]:
    """Whether an RRef, or the first in a list of them, is at its owner; and whether it holds a Box."""
    rref = value[0] if isinstance(value, list) else value
    return rref.is_owner(), isinstance(rref.local_value(), Box)


def passed(value: Any) -> Any:
    return value


def told(agent: Agent) -> list[tuple[str, str]]:
    """The messages of the protocol from now on, except acknowledgements and notices."""
    found: list[tuple[str, str]] = []

    def tell(how: str, other: int, seq: int, message: Any) -> None:
        if type(message).__name__ not in ("Seen", "Notice"):
            found.append((how, type(message).__name__))

    agent.machine.read_node(lambda node: node.set_observers(None, tell))
    return found


def until_quiet(agents: list[Agent]) -> None:
    until(
        lambda: not any(agent.machine.read_node(lambda node: node.delivery.describe_unfinished()) for agent in agents),
        "all acknowledged",
    )


def made(agents: list[Agent]) -> Any:
    """An RRef of a Box on worker1, with no message in flight."""
    box = remote("worker1", Box)
    box.to_here()
    until_quiet(agents)
    return box


@pytest.mark.parametrize("nested", [False, True])
def test_an_rref_to_its_owner_takes_one_call_and_one_result(agents: list[Agent], nested: bool) -> None:
    """There is no fork, and no message about one."""
    box = made(agents)
    words = told(agents[0])
    assert rpc_sync("worker1", where, ([box] if nested else box,)) == (True, True)
    until_quiet(agents)
    assert words == [("sent", "Call"), ("received", "Result")]
    words.clear()
    assert remote("worker1", where, ([box] if nested else box,)).to_here() == (True, True)
    until_quiet(agents)
    assert [word for word in words if word[0] == "sent"][:2] == [("sent", "Create"), ("sent", "Fetch")]
    assert ("received", "ChildAccept") not in words


def test_an_rref_that_is_passed_twice_is_one_object_at_its_owner(agents: list[Agent]) -> None:
    box = made(agents)
    assert rpc_sync("worker1", same, (box, box))
    assert not rpc_sync("worker1", same, (box, made(agents)))
    assert rpc_sync("worker1", same, (box,), {"second": box})


def test_a_call_with_an_rref_waits_until_the_value_exists(agents: list[Agent]) -> None:
    Gate.opened.clear()
    late = remote("worker1", Gate.box)
    asked = rpc_async("worker1", where, (late,))
    Gate.opened.set()
    assert asked.wait() == (True, True)


class Gate:
    opened = threading.Event()

    @classmethod
    def wait(cls) -> bool:
        return cls.opened.wait(10)

    @classmethod
    def box(cls) -> Box:
        assert cls.wait()
        return Box()


@pytest.mark.parametrize("how", [rpc_async, remote])
@pytest.mark.parametrize("let_go", [lambda box: None, RRef.release], ids=["deleted", "released"])
def test_a_queued_call_keeps_the_value_of_its_rref(
    agents: list[Agent], how: Callable[..., Any], let_go: Callable[[RRef[Any]], object]
) -> None:
    Gate.opened.clear()
    box, other, pool = made(agents), made(agents), agents[1].calls.pool
    busy = [rpc_async("worker1", Gate.wait) for _ in range(pool.limit)]
    until(lambda: pool.busy == pool.limit, "no room")
    asked = how("worker1", where, ([box],))
    until(lambda: len(pool._queue) == 1, "a call that has not begun")
    gone, kept = other._rref, box._rref
    let_go(box), let_go(other)
    del box, other
    gc.collect()
    until(lambda: not agents[1].machine.read_node(lambda node: gone in node.rrefs.owned), "the other's value has gone")
    assert agents[1].machine.read_node(lambda node: kept in node.rrefs.owned)
    Gate.opened.set()
    assert all(future.wait() for future in busy)
    assert (asked.wait() if how is rpc_async else asked.to_here()) == (True, True)
    until(lambda: not agents[1].machine.read_node(lambda node: kept in node.rrefs.owned), "so has this one's")


def test_an_rref_in_a_result_is_sent_as_a_fork(agents: list[Agent]) -> None:
    """No member would hold it while a name is in flight."""
    own = RRef(Box())
    words = told(agents[1])
    back = rpc_sync("worker1", passed, (own,))
    assert back.is_owner() and back.local_value() is own.local_value()
    until_quiet(agents)
    assert ("received", "ChildAccept") in words


def test_an_rref_of_another_incarnation_of_the_owner_is_refused(agents: list[Agent]) -> None:
    box = made(agents)
    agents[0].machine.read_node(lambda node: setattr(node.rrefs.users[box._fork], "owner_incarnation", 7))
    with pytest.raises(WorkerLostError, match="was lost with the worker that held it"):
        rpc_sync("worker1", where, (box,))


def test_a_name_of_a_freed_value_raises_and_does_not_wait(agents: list[Agent]) -> None:
    """For example in a call that has begun when its caller cancels it and releases the value."""
    box = made(agents)
    name = (*box._rref, 0, "")
    assert agents[1].calls.values.make_named_handle(*name)._rref == box._rref
    box.release()
    until(lambda: not agents[1].machine.read_node(lambda node: node.rrefs.owned), "the value has gone")
    for ask in (
        agents[1].calls.values.make_named_handle,
        lambda *name: rpc_sync("worker1", run_method_there, (*name[:3], "__str__")),
    ):
        with pytest.raises(RpcError, match="has been released"):
            ask(*name)
    assert agents[1].calls.values._kept == {}


class Renamed(RRef[Any]):
    """An RRef with a reducer of its own."""


@pytest.mark.parametrize("nested", [False, True])
def test_a_reducer_of_the_rrefs_class_takes_precedence(
    agents: list[Agent], nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = made(agents)
    box.__class__ = Renamed
    monkeypatch.setitem(_REDUCERS, Renamed, lambda rref: (str, ("reduced",)))
    assert rpc_sync("worker1", passed, ([box] if nested else box,)) == (["reduced"] if nested else "reduced")


def test_a_call_with_a_released_rref_fails_with_its_reason(agents: list[Agent]) -> None:
    box = made(agents)
    box.release()
    for value in (box, [box]):
        with pytest.raises(RuntimeError, match="has been released"):
            rpc_sync("worker1", where, (value,))


@pytest.mark.parametrize("name", [(1, 2, 3, "0", ""), (1, 2, True, 0, ""), (1, 2, 3, 0, None)])
def test_an_invalid_name_of_an_rref_is_refused(agents: list[Agent], name: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError, match="an invalid name of an RRef"):
        agents[1].calls.values.make_named_handle(*name)
