"""Joins and departures: messages that arrive before members know each other, and cleanup for the next world."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from worlds import address_of, config, until, world

from rpcbench.base.errors import RpcError, WorkerLostError
from rpcbench.rpc import rpc_sync, wait_for
from rpcbench.rpc.init import start_agent
from rpcbench.runtime import current
from rpcbench.runtime.agent import Agent
from rpcbench.runtime.handles import RRefHandle
from rpcbench.runtime.members import LaunchRecords, WorkerInfo, _OrderedHandler
from rpcbench.transport.base import Link
from rpcbench.transport.rendezvous import Rendezvous
from rpcbench.wire.messages import Message, Notice, View


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[Agent]]:
    with world(tmp_path, 2) as made:
        yield made


class Late(Link):
    """Holds views until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.other = threading.Event()  # another message has arrived meanwhile

    def handle_incoming(self, source: int, seq: int, message: Message) -> None:
        if isinstance(message, View):
            threading.Thread(target=self._pass_on, args=(source, seq, message), daemon=True).start()
            return
        self.other.set()
        super().handle_incoming(source, seq, message)

    def _pass_on(self, source: int, seq: int, message: Message) -> None:
        assert self.go.wait(20)
        super().handle_incoming(source, seq, message)


def members() -> list[str]:
    return [info.name for info in current.current_agent().members()]


def test_a_call_that_arrives_before_the_first_view_waits_for_it(tmp_path: Path) -> None:
    with world(tmp_path, 1) as (first,):
        link = Late()
        joining = threading.Thread(target=lambda: start_agent(config(tmp_path, 1), link))
        joining.start()
        until(lambda: len(first.members()) == 2)
        names = first.call(1, members)
        assert link.other.wait(20)
        link.go.set()
        assert names.wait() == ["notebook", "worker1"]
        joining.join(20)
        for agent in list(current._started):
            if agent is not first:
                agent.stop()


_over = threading.Event()


def until_over() -> None:
    assert _over.wait(20)


def make_at_home() -> RRefHandle:
    return current.current_agent().create(0, int, ("7",))


def test_a_returned_value_that_was_never_made_is_an_error_when_its_creator_is_lost(tmp_path: Path) -> None:
    """The value has no other users by then, so only the call of the lost member refers to it."""
    with world(tmp_path, 2, threads=1) as (first, second):
        second.call(0, until_over)  # no other call runs there meanwhile
        until(lambda: first.calls.pool.busy == 1)
        home = first.call(1, make_at_home).wait()
        second.stop()
        until(lambda: len(first.members()) == 1)
        until(home._value.done)
        _over.set()
        with pytest.raises(WorkerLostError):
            home._value.value()


def test_a_value_that_exists_is_not_replaced_by_a_late_error(agents: list[Agent]) -> None:
    first, _ = agents
    home = first.calls.values.make_owner_handle("still here")
    first.calls.values.fail_value(home._rref, WorkerLostError("who had it made is gone"))
    assert home._value is not None and home._value.wait() == "still here"


def test_member_0_founds_its_world_before_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(config(tmp_path, 0), RRefHandle)
    seen: list[list[WorkerInfo]] = []
    monkeypatch.setattr(agent.links.peers, "start_accepting", lambda: seen.append(agent.members()))
    agent.start()
    agent.stop()
    assert seen == [[WorkerInfo("notebook", 0)]]


def test_a_world_that_stops_does_not_remove_the_socket_of_the_next_world(agents: list[Agent]) -> None:
    """Member 0 stops listening when its world closes; the next world may use the address before it has stopped."""
    path = meeting_file(agents[0])
    agents[0].links.peers.acceptor.close()
    assert not path.exists()
    following = Agent(config(path.parent, 0), RRefHandle)
    following.links.peers.acceptor.bind_listeners(world=7)
    agents[0].stop()
    assert path.exists()
    following.links.peers.close()
    assert not path.exists()


def meeting_file(agent: Agent) -> Path:
    """The file where the other members look for the leader."""
    return Rendezvous(Path(agent.config.directory)).path


def test_a_closed_world_releases_its_address_before_its_members_leave(tmp_path: Path) -> None:
    made: list[Agent] = []
    joining = threading.Thread(target=lambda: made.append(start_agent(config(tmp_path, 1, world_size=2))))
    joining.start()
    first = start_agent(config(tmp_path, 0, world_size=2))
    joining.join(20)
    there: list[bool] = []

    class ProcessSampler(threading.Event):
        def set(self) -> None:
            there.append(meeting_file(first).exists())
            super().set()

    class Dawdles(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return super().wait(20) and made[0].links.closing.wait(20)

    made[0].links.closing, first.links.closing = ProcessSampler(), Dawdles()
    leaving = [threading.Thread(target=agent.shutdown) for agent in (first, *made)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(20)
    assert there[0] is False


def test_an_error_in_the_handling_of_a_message_is_reported_and_ends_its_connection(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
    deliver = agents[0].dispatcher.deliver_message

    def fail(source: int, seq: int, message: Message) -> None:
        if isinstance(message, Notice):
            raise KeyError("a mistake of ours")
        deliver(source, seq, message)

    monkeypatch.setattr(agents[0].links.interceptors, "incoming", fail)
    agents[1].notify(0, "any", None)
    until(lambda: len(agents[0].members()) == 1)
    with pytest.raises(WorkerLostError, match="a message from it could not be handled"):
        agents[0].call("worker1", members)
    until(lambda: [type(error) for error in told] == [KeyError], "the thread to end by it")


def test_another_member_at_the_address_of_a_member_is_refused(agents: list[Agent], tmp_path: Path) -> None:
    wrong = address_of(agents[1])
    with pytest.raises(Exception, match="worker1 answers at the address of worker 7"):
        agents[0].links.peers.connect_to_member(7, [wrong])


# -- waiting for others
def test_a_wait_for_members_names_the_missing_ones_and_ends_when_they_join(tmp_path: Path) -> None:
    records = LaunchRecords(expected=lambda: ["worker1", "worker2", "worker3"])
    first, second = start_agent(config(tmp_path, 0), records=records), start_agent(config(tmp_path, 1))
    made: list[Agent] = [first, second]
    try:
        first.wait_for(2, 60)
        missing = "notebook waited 0.05 s for 4 members, but only 2 came: notebook, worker1; missing: worker2, worker3"
        with pytest.raises(RpcError, match=missing):
            first.wait_for(4, 0.05)
        joining = threading.Timer(0.1, lambda: made.append(start_agent(config(tmp_path, 2))))
        joining.start()
        with current.use_agent(first):
            wait_for(3, 60)
        joining.join()
    finally:
        for agent in reversed(made):
            agent.stop()


def test_a_wait_for_members_of_an_ended_world_fails_at_once(tmp_path: Path) -> None:
    with world(tmp_path, 2) as (first, second):
        first.stop()
        with pytest.raises(RpcError, match="not even member 0"):
            second.wait_for(3, 600)


def test_members_can_join_and_leave_while_others_call(tmp_path: Path) -> None:
    """Row 29 of the fault table: each process that returns under its name is another incarnation."""
    told: list[tuple[str, str]] = []
    with world(tmp_path, 2) as (first, _):
        first.on_member(lambda kind, who, reason: told.append((kind, who.name)))
        over = threading.Event()
        answers: list[list[str]] = []

        def call() -> None:
            while not over.is_set():
                answers.append(first.call("worker1", members).wait())

        calling = threading.Thread(target=call)
        calling.start()
        for incarnation in range(3):
            third = start_agent(config(tmp_path, 2, incarnation=incarnation))
            first.wait_for(3, 20)
            assert first.call("worker2", members).wait()[-1] == "worker2"
            assert third.call("worker1", members).wait()[0] == "notebook"
            third.shutdown()
            until(lambda: len(first.members()) == 2)
        until(lambda: len(answers) > 3)
        over.set()
        calling.join(20)
        until(lambda: len(told) == 6)
        # Its announcement and the end of its connection may come in either order.
        assert sorted(kind == "joined" for kind, name in told if name == "worker2") == [False] * 3 + [True] * 3
        assert {"notebook", "worker1"} <= set(answers[-1])


def test_a_process_can_have_several_worlds_in_turn_and_two_at_once(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        with world(tmp_path / str(number), 2) as (first, _):
            assert rpc_sync("worker1", members) == ["notebook", "worker1"]
    with world(tmp_path / "0", 2) as (first, _), world(tmp_path / "1", 3) as (other, *_):
        assert len(rpc_sync("worker1", members)) == 3
        with current.use_agent(first):
            assert len(rpc_sync("worker1", members)) == 2
            with current.use_agent(other):
                assert len(rpc_sync("worker1", members)) == 3
            assert len(rpc_sync("worker1", members)) == 2


def test_a_watcher_gets_changes_one_at_a_time_in_their_order() -> None:
    jobs: list[Callable[[], object]] = []
    seen: list[str] = []

    def handler(kind: str, member: WorkerInfo, reason: str) -> None:
        seen.append(kind)
        if kind == "lost":
            watcher.queue_event("joined", member, "")  # while this one is handled
            raise RuntimeError("of the handler")

    watcher = _OrderedHandler(handler, jobs.append)
    watcher.queue_event("suspect", WorkerInfo("worker1", 1), "silent")
    watcher.queue_event("lost", WorkerInfo("worker1", 1), "silent")
    (job,) = jobs
    job()
    with pytest.raises(RuntimeError, match="of the handler"):
        jobs[1]()
    jobs[2]()
    assert seen == ["suspect", "lost", "joined"] and len(jobs) == 3


def test_a_change_that_comes_as_the_handling_of_the_last_one_ends_is_handled_once() -> None:
    jobs: list[Callable[[], None]] = []
    handled: list[str] = []
    watcher = _OrderedHandler(lambda kind, who, reason: handled.append(reason), jobs.append)
    lock, more = watcher._lock, ["second"]

    class Lock:
        """As a lock, after whose release another thread runs."""

        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            if handled and more:
                watcher.queue_event("lost", WorkerInfo("worker1", 1), more.pop())

    watcher.queue_event("joined", WorkerInfo("worker1", 1), "first")
    watcher._lock = Lock()  # type: ignore[assignment]
    while jobs:
        jobs.pop()()
    assert handled == ["first", "second"]
