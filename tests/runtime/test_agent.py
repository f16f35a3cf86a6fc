"""Real agents over real sockets, several in this process."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import address_of, config, nothing_left, until, world

from rpcbench.base.errors import (  # fmt: skip
    CallCancelled,
    NotConnectedError,
    ProtocolError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    SerializationError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpcbench.base.rebuild import MOST_TEXT
from rpcbench.protocol import effects as fx
from rpcbench.rpc import RRef, remote, rpc_sync
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import connections, current
from rpcbench.runtime.acceptor import Acceptor
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.connections import ConnectionManager
from rpcbench.runtime.locked_node import EffectTable
from rpcbench.runtime.members import WorkerInfo
from rpcbench.transport.addresses import Opener
from rpcbench.wire import messages as m


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 3) as made:
        yield made


def add(a: Any, b: Any = 1) -> Any:
    return a + b


def who() -> tuple[str, int]:
    return current.current_agent().name, current.caller_id()


def down(levels: int, here: str, there: str) -> int:
    return 0 if levels == 0 else 1 + rpc_sync(there, down, (levels - 1, there, here))


def fetch(rref: RRef[Any]) -> Any:
    return rref.to_here()


def forward(rref: RRef[Any], to: str) -> Any:
    return rpc_sync(to, fetch, (rref,))


def give_back(rref: RRef[Any]) -> RRef[Any]:
    return rref


class TwoArguments(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


def fail(kind: str) -> None:
    if kind == "value":
        raise ValueError(r"not \x41")
    if kind == "two":
        raise TwoArguments(7, "seven")
    if kind == "exit":
        raise SystemExit(3)
    raise KeyError("k")


def test_a_call_runs_on_its_worker_and_knows_its_caller(agents: list[Agent]) -> None:
    assert agents[0].call("worker1", who).wait() == ("worker1", 0)
    assert agents[2].call(1, who).wait() == ("worker1", 2)
    assert agents[1].call("worker1", who).wait() == ("worker1", 1)
    assert torch.equal(agents[0].call("worker2", torch.add, (torch.ones(3), 2)).wait(), torch.full((3,), 3.0))


def test_a_call_of_a_member_to_itself_copies_its_arguments(agents: list[Agent]) -> None:
    mine = torch.zeros(3)
    agents[0].call(0, torch.Tensor.add_, (mine, 1)).wait()
    assert torch.equal(mine, torch.zeros(3))


def test_calls_can_nest_deeper_than_the_size_of_the_pool(agents: list[Agent]) -> None:
    assert agents[0].call("worker1", down, (40, "worker1", "worker2"), timeout=30).wait() == 40


def test_an_error_keeps_its_type_and_text_and_has_the_remote_traceback_as_cause(agents: list[Agent]) -> None:
    with pytest.raises(ValueError, match=r"^not \\x41$") as caught:
        agents[0].call("worker1", fail, ("value",)).wait()
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError) and cause.worker == "worker1" and "in fail" in cause.traceback
    with pytest.raises(KeyError):
        agents[0].call("worker1", fail, ("key",)).wait()


def test_an_error_keeps_its_type_if_its_init_takes_other_arguments(agents: list[Agent]) -> None:
    future = agents[0].call("worker1", fail, ("two",))
    for _ in range(2):  # each wait raises a copy
        with pytest.raises(TwoArguments, match=r"^7: seven$") as caught:
            future.wait()
        assert (caught.value.code, caught.value.reason) == (7, "seven")


def look_up(rref: RRef[Any]) -> None:
    {}[rref]


def test_an_rref_in_an_error_is_replaced_by_its_repr(agents: list[Agent]) -> None:
    rref = remote("worker1", list)
    with pytest.raises(KeyError, match="UserRRef") as caught:
        agents[0].call("worker2", look_up, (rref,)).wait()
    assert type(caught.value.args[0]) is str


def fail_at_length() -> None:
    raise TwoArguments(7, "x" * (200 << 20))


def test_an_error_of_200_mb_is_cut_and_keeps_its_type(agents: list[Agent]) -> None:
    with pytest.raises(TwoArguments) as caught:
        agents[0].call("worker1", fail_at_length).wait()
    assert len(str(caught.value)) < MOST_TEXT + 100 and len(str(caught.value.__cause__)) < MOST_TEXT + 200


def test_a_system_exit_in_a_call_becomes_an_rpc_error(agents: list[Agent]) -> None:
    with pytest.raises(RpcError, match="SystemExit"):
        agents[0].call("worker1", fail, ("exit",)).wait()
    assert agents[0].call("worker1", add, (1,)).wait() == 2


def test_a_call_past_its_deadline_raises_a_timeout(agents: list[Agent]) -> None:
    release = threading.Event()
    _releases.append(release)
    future = agents[0].call("worker1", _hold, (len(_releases) - 1,), timeout=0.2)
    with pytest.raises(RpcTimeoutError, match=r"RPC ran for more than set timeout \(200 ms\).*_hold on worker1"):
        future.wait()
    release.set()


def test_a_call_whose_deadline_passes_before_it_is_sent_raises_a_timeout(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine, where the thread of the caller is delayed."""
    caller, feed, release = agents[0], agents[0].machine.feed_event, threading.Event()
    _releases.append(release)
    first = iter([True])

    def late(event: Any, may_wait: bool = False) -> None:
        if threading.current_thread() is threading.main_thread() and next(first, False):
            time.sleep(0.01)
            until(lambda: not len(caller.calls.pending.deadlines), "the keeper finds what is due already")
        feed(event, may_wait)

    monkeypatch.setattr(caller.machine, "feed_event", late)
    future = caller.call("worker1", _hold, (len(_releases) - 1,), timeout=0.001)
    with pytest.raises(RpcTimeoutError):
        future.wait()
    release.set()


def test_a_call_waits_for_a_peer_that_is_too_busy_to_accept_connections(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one host, silence is no sign of a loss, even before the first connection."""
    monkeypatch.setattr(connections, "LOCAL_HANDSHAKE_SECONDS", 0.1)
    busy, knocks = threading.Event(), []
    let_in, first_answer = Acceptor._let_in, ConnectionManager._first_answer

    def later(self: Acceptor, *peer: Any) -> None:
        busy.wait()
        let_in(self, *peer)

    def counted(self: ConnectionManager, *how: Any) -> Any:
        knocks.append(None)
        if len(knocks) > 2:
            busy.set()
        return first_answer(self, *how)

    monkeypatch.setattr(Acceptor, "_let_in", later)
    monkeypatch.setattr(ConnectionManager, "_first_answer", counted)
    assert agents[1].call(2, max, (1, 2)).wait() == 2
    assert len(knocks) > 2


@pytest.mark.parametrize("broken", [ConnectionResetError, BrokenPipeError])
def test_a_call_dials_again_where_the_peer_has_given_up_a_handshake(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch, broken: type[OSError]
) -> None:
    """The peer closes a connection on which this busy process has not spoken in time."""
    first_answer, broke = ConnectionManager._first_answer, []

    def closed(self: ConnectionManager, *how: Any) -> Any:
        if not broke:
            broke.append(broken(0, "closed"))
            raise NotConnectedError("nobody answers") from broke[0]
        return first_answer(self, *how)

    monkeypatch.setattr(ConnectionManager, "_first_answer", closed)
    assert agents[1].call(2, max, (1, 2)).wait() == 2
    assert broke


def test_a_cancelled_call_raises_call_cancelled(agents: list[Agent]) -> None:
    release = threading.Event()
    _releases.append(release)
    future = agents[0].call("worker1", _hold, (len(_releases) - 1,))
    assert future.cancel()
    with pytest.raises(CallCancelled):
        future.wait()
    release.set()
    assert not future.cancel()


_releases: list[threading.Event] = []


def _hold(index: int) -> None:
    _releases[index].wait(30)


def test_a_call_to_an_unknown_worker_lists_the_known_ones(agents: list[Agent]) -> None:
    with pytest.raises(UnknownWorkerError, match=r"name worker9: did you mean .* There are notebook, worker1, worker2"):
        agents[0].call("worker9", add, (1,))
    with pytest.raises(
        ValueError, match=r"Cannot get WorkerInfo from name 3\.2: give a worker's name, id or WorkerInfo"
    ):
        agents[0].call(3.2, add, (1,))  # type: ignore[arg-type]


def test_an_unpicklable_argument_fails_at_the_caller_and_leaks_nothing(agents: list[Agent]) -> None:
    held = remote("worker1", add, (1,))
    with pytest.raises(SerializationError, match=r"^args\[1\]: cannot pickle '_thread.lock'"):
        agents[0].call("worker2", add, (held, threading.Lock()))
    assert held.to_here() == 2
    with pytest.raises(SerializationError, match="lock"):
        agents[0].call("worker2", threading.Lock).wait()
    del held
    nothing_left(agents)


# -- RRefs
def test_an_rref_can_be_shared_with_its_owner_and_between_users(agents: list[Agent]) -> None:
    created = remote("worker1", add, (torch.ones(2), 1))
    assert torch.equal(created.to_here(), torch.full((2,), 2.0))
    assert torch.equal(rpc_sync("worker1", fetch, (created,)), torch.full((2,), 2.0))  # user to owner
    own = RRef({"a": 1})
    assert rpc_sync("worker1", fetch, (own,)) == {"a": 1}  # owner to user
    assert torch.equal(rpc_sync("worker2", fetch, (created,)), torch.full((2,), 2.0))  # user to user
    assert rpc_sync("worker2", forward, (own, "worker1")) == {"a": 1}
    returned = rpc_sync("worker2", give_back, (created,))
    assert torch.equal(returned.to_here(), torch.full((2,), 2.0))
    del created, own, returned
    nothing_left(agents)


def test_an_rref_knows_whether_it_is_the_owner(agents: list[Agent]) -> None:
    rref = remote("worker1", add, (1,))
    assert rref.owner() == agents[0].member("worker1") and not rref.is_owner()
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user .*name=notebook.*owner .*name=worker1"):
        rref.local_value()
    own = RRef(3)
    assert own.is_owner() and own.local_value() == own.to_here() == 3
    to_self = remote("notebook", add, (4,))
    assert to_self.is_owner() and to_self.local_value() == 5
    with pytest.raises(RuntimeError, match="Can not pickle rref"):
        pickle.dumps(own)
    del rref, own, to_self
    nothing_left(agents)


def test_a_failed_creation_raises_its_error_on_each_use(agents: list[Agent]) -> None:
    rref = remote("worker1", fail, ("value",))
    for _ in range(2):
        with pytest.raises(ValueError, match="not"):
            rref.to_here()
    with pytest.raises(ValueError, match="not"):
        rpc_sync("worker2", fetch, (rref,))
    del rref
    nothing_left(agents)


def test_rref_proxies_run_methods_on_the_owner(agents: list[Agent]) -> None:
    rref = remote("worker1", list, ([3, 1, 2],))
    rref.rpc_sync().sort()
    assert rref.rpc_async().index(3).wait() == 2
    assert rref.remote().copy().to_here() == [1, 2, 3]
    with pytest.raises(AttributeError, match="no_such"):
        rref.rpc_sync().no_such()


# -- death
def test_a_lost_worker_fails_the_calls_to_it_by_name_and_its_forks_are_freed(agents: list[Agent]) -> None:
    release = threading.Event()
    _releases.append(release)
    waiting = agents[0].call("worker1", _hold, (len(_releases) - 1,))
    theirs = remote("worker1", add, (1,))
    theirs.to_here()
    own = RRef([1])
    _kept.append(rpc_sync("worker1", _run, (own,)))
    agents[1].links.peers.close()
    with pytest.raises(WorkerLostError, match="worker1 was lost") as lost:
        waiting.wait()
    with pytest.raises(WorkerLostError, match="worker1 is gone") as gone:
        theirs.to_here()
    assert lost.value.maybe_executed and not gone.value.maybe_executed
    agents[0].links.members._found = {"worker1": WorkerInfo("worker1", 1)}  # cached just before
    with pytest.raises(WorkerLostError, match=r"worker1 is gone \(.*; start it again"):
        rpc_sync("worker1", add, (1,))
    release.set()
    assert agents[0].call("worker2", add, (1,)).wait() == 2
    del theirs, own
    nothing_left([agents[0], agents[2]])
    _kept.clear()


def test_a_call_that_is_refused_for_a_dead_rref_keeps_none_of_its_values(agents: list[Agent]) -> None:
    dead = remote("worker1", add, (1,))
    dead.to_here()
    agents[1].links.peers.close()
    with pytest.raises(WorkerLostError):
        dead.to_here()
    own = RRef([1])
    with pytest.raises(WorkerLostError, match="cannot be passed on"):
        rpc_sync("worker2", divmod, (dead, own))
    assert not agents[0].calls.values._kept and agents[0].tables()["owned"] == {}
    assert rpc_sync("worker2", _ask, (own,)) == [1], "it can be shared later"
    del dead, own
    nothing_left([agents[0], agents[2]])


def _ask(rref: RRef[Any]) -> Any:
    return rref.to_here()


_kept: list[Any] = []


def _run(rref: RRef[Any]) -> None:
    _kept.append(rref)


# -- strangers
class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 20, b"\0" * 600, b"\xff" * 600, b"x"])
def test_invalid_data_on_the_socket_is_refused_and_never_unpickled(
    agents: list[Agent], tmp_path: Path, data: bytes
) -> None:
    canary = tmp_path / "canary"
    before = agents[0].links.peers.acceptor.refusals.count
    stranger = Opener(agents[0].config.secret).connect_stream(address_of(agents[0]), time.monotonic() + 5)
    stranger.write([memoryview(data + pickle.dumps(Canary(str(canary))))], True)
    stranger.shut_down()
    until(lambda: agents[0].links.peers.acceptor.refusals.count == before + 1, "the stranger to be refused")
    stranger.close_descriptor()
    assert not canary.exists()
    assert agents[0].call("worker1", add, (1,)).wait() == 2


def test_a_process_with_a_wrong_secret_cannot_join(agents: list[Agent], tmp_path: Path) -> None:
    with pytest.raises(RpcError, match="secret"):
        start_agent(config(tmp_path, 7, secret=b"wrong" * 6), timeout=5)
    assert [info.id for info in agents[0].members()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"name": "worker1"}, "is not unique"), ({"world_size": 4}, "closed")],
)
def test_a_process_that_does_not_fit_the_world_cannot_join(
    agents: list[Agent], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RpcError, match=reason):
        start_agent(config(tmp_path, 7, **changes), timeout=10)


def test_an_incomplete_world_fails_with_the_names_of_present_and_missing_members(tmp_path: Path) -> None:
    with pytest.raises(RpcError, match=r"waited for a world of 2 workers, but only 1 came: notebook; missing: rank 1$"):
        start_agent(config(tmp_path, 0, world_size=2), timeout=0.3)


# -- notices and telemetry
def test_notices_arrive_in_order(agents: list[Agent]) -> None:
    heard: list[Any] = []
    agents[1].on_notice("talk", lambda source, data: heard.append((source, data)))
    for number in range(200):
        agents[0].notify(1, "talk", number)
    until(lambda: len(heard) == 200)
    assert heard == [(0, number) for number in range(200)]


def test_a_snapshot_with_the_later_changes_equals_the_tables(agents: list[Agent]) -> None:
    from rpcbench.base.ids import apply_change

    agents[1].listen(True)
    _, tables = agents[1].snapshot()
    rrefs = [remote("worker1", add, (n,)) for n in range(5)]
    for rref in rrefs:
        rpc_sync("worker2", fetch, (rref,))
    del rrefs[3:], rref
    until(lambda: [row["ready"] for row in agents[1].tables()["owned"].values()] == [True] * 3)
    batch = agents[1].links.bus.drain_changes(10_000)
    for table, rows in batch.rows.items():
        for key, row in rows.items():
            apply_change(tables, table, key, row)
    assert batch.dropped == 0 and tables["owned"] == agents[1].tables()["owned"]


def test_an_agent_without_listeners_records_no_changes(agents: list[Agent]) -> None:
    remote("worker1", add, (1,)).to_here()
    assert agents[1].links.bus.drain_changes(10).rows == {}


# -- life
def test_shutdown_waits_for_calls_in_flight(tmp_path: Path) -> None:
    with world(tmp_path, 2) as (first, second):
        future = first.call(1, time.sleep, (0.2,))
        first.shutdown()
        assert future.wait() is None
        assert second.links.closing.wait(10), "the world ends with member 0"


def test_a_stopped_world_leaves_no_threads_and_no_sockets(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with world(tmp_path, 2) as (first, _):
        first.call(1, add, (1,)).wait()
    until(lambda: set(threading.enumerate()) <= before, "the threads of the agents to end")
    assert not list(tmp_path.glob("*.sock"))


def test_a_value_on_the_own_member_can_be_shared_before_it_is_made(agents: list[Agent]) -> None:
    for _ in range(20):
        rref = remote("notebook", add, (torch.ones(2), 1))
        assert rref.rpc_sync().sum() == 4
        assert rpc_sync("worker1", fetch, (remote("notebook", add, (1,)),)) == 2
    del rref
    nothing_left(agents)


def test_an_owner_keeps_no_value_without_users(agents: list[Agent]) -> None:
    release = threading.Event()
    _releases.append(release)
    dropped = remote("worker1", _hold, (len(_releases) - 1,))
    until(lambda: bool(agents[1].tables()["owned"]))
    del dropped
    until(lambda: not agents[1].tables()["owned"], "the owner to let go before the value is made")
    release.set()
    own = RRef([1])
    for _ in range(3):
        assert rpc_sync("worker1", fetch, (own,)) == [1]
    del own
    until(lambda: not any(agent.calls.values._kept for agent in agents), "the values to be let go")


def test_an_effect_has_one_handler_and_names_itself_without_one() -> None:
    sent: list[Any] = []
    table = EffectTable(lambda effect, may_wait: sent.append((effect, may_wait)))
    woken: list[fx.Wake] = []
    table.register(fx.Wake, woken.append)
    send = fx.Send(1, 0, m.Notice("a", b""))
    for effect in send, fx.Wake():
        table.perform(effect, True)
    assert sent == [(send, True)] and woken == [fx.Wake()]
    with pytest.raises(ProtocolError, match=r"no part of this agent carries out ForgetContext\(context=1\)"):
        table.perform(fx.ForgetContext(1), False)
    with pytest.raises(AssertionError, match="two parts of one agent carry out Wake"):
        table.register(fx.Wake, woken.append)
