"""A comm on a worker and its proxy in the notebook, without processes: both see the same messages in the same order."""

from __future__ import annotations

import itertools
import json
import signal
from types import SimpleNamespace

import comm
import pytest
from comm.base_comm import BaseComm, CommManager
from hypothesis import given
from hypothesis import strategies as st

from rpcbench.cells.output import ReorderBuffer
from rpcbench.cells.widgets import COMM, CommProxies, WorkerComms, decode_message, encode_message
from rpcbench.runtime.interceptors import AgentHooks


class Front(BaseComm):
    """The kernel's comm, and the front end behind it."""

    said: list = []

    def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
        self.said.append((msg_type, self.comm_id, data, metadata, [bytes(b) for b in buffers or ()], keys))

    def says(self, data, buffers=()):
        self.handle_msg({"content": {"data": data}, "metadata": {"m": 1}, "buffers": list(buffers)})


class Agent:
    """The notebook's agent; the test delivers its notices."""

    def __init__(self):
        self.hooks, self.sent, self.watchers = AgentHooks(), [], []

    def on_member(self, handler):
        self.watchers.append(handler)

    def submit(self, job):
        job()

    def notify(self, worker, channel, notice):
        assert (worker, channel) == (1, COMM)
        self.sent.append(notice)


class Sides:
    """A worker and a notebook; each has its own manager of comms."""

    def __init__(self, patch):
        self._patch = patch
        self.managers = {"worker": CommManager(), "notebook": CommManager()}
        self.output_stream = []
        self.cell = SimpleNamespace(has_running_cell=True, send_to_last_client=self.keep_content)
        self.comms = WorkerComms(self.cell)
        self.agent = Agent()
        self.mirrors = CommProxies(self.agent)
        # A class for each test: comms of another test may be collected only now, and send a close.
        self.front_end = type("FrontEnd", (Front,), {"said": []})
        self.on("worker")

    def keep_content(self, kind, content):
        self.output_stream.append(content)

    def on(self, side, shell=None):
        """From now on, this process acts as that side."""
        self._patch.setattr(comm, "get_comm_manager", lambda: self.managers[side])
        self._patch.setattr(comm, "create_comm", self.front_end)
        if side == "worker":
            self.comms.install_comms(shell)

    def deliver(self, order=list):
        """Deliver the messages of the worker to the notebook."""
        self.on("notebook")
        for content in order(self.output_stream):
            self.mirrors.receive_message(1, content)
        self.output_stream.clear()

    def front(self, made):
        return self.managers["notebook"].comms[made.comm_id]

    def reply(self, order=list):
        """Deliver the messages of the front end to the worker."""
        self.on("worker")
        for notice in order(self.agent.sent):
            self.comms.message_received(0, notice)
        self.agent.sent.clear()


@pytest.fixture
def sides(monkeypatch):
    return Sides(monkeypatch)


@given(st.permutations(range(6)))
def test_a_reorder_buffer_restores_the_order_of_sending(order):
    turns = ReorderBuffer()
    assert list(itertools.chain.from_iterable(turns.add_item(n, str(n)) for n in order)) == list("012345")


def test_buffers_and_bytes_are_encoded_as_text_and_a_set_is_refused():
    parts = memoryview(b"\x00\xff" * 3).cast("H")
    back = decode_message(encode_message({"kind": "comm_msg", "data": {"raw": b"\xff"}, "buffers": [parts, b""]}))
    assert back["data"] == {"raw": "/w=="}
    assert [bytes(buffer) for buffer in back["buffers"]] == [b"\x00\xff" * 3, b""]
    with pytest.raises(TypeError, match="holds a set"):
        encode_message({"data": {1, 2}, "buffers": None})


@pytest.mark.parametrize("order", [list, reversed])
def test_messages_of_a_worker_reach_the_front_end_in_order(sides, order):
    made = comm.create_comm(target_name="t", data={"a": 1}, metadata={"version": "2"}, buffers=[b"xy"])
    made.send({"b": 2}, buffers=[b"z"])
    made.close({"c": 3})
    sides.deliver(order)
    keys = {"target_name": "t", "target_module": None}
    assert sides.front_end.said == [
        ("comm_open", made.comm_id, {"a": 1}, {"version": "2"}, [b"xy"], keys),
        ("comm_msg", made.comm_id, {"b": 2}, {}, [b"z"], {}),
        ("comm_close", made.comm_id, {"c": 3}, {}, [], {}),
    ]
    assert sides.managers["notebook"].comms == {}
    assert sides.mirrors._proxies == {}


@pytest.mark.parametrize("order", [list, reversed])
def test_messages_of_the_front_end_reach_the_callbacks_in_order(sides, order):
    made, heard = comm.create_comm(), []
    made.on_msg(lambda m: heard.append((m["content"]["data"], [bytes(b) for b in m["buffers"]])))
    made.on_close(lambda m: heard.append("closed"))
    sides.deliver()
    front = sides.front(made)
    front.says({"n": 1}, [memoryview(b"x")])
    front.says({"n": 2})
    closing = {"content": {"comm_id": made.comm_id}, "metadata": {}, "buffers": []}
    sides.managers["notebook"].comm_close(None, None, closing)
    sides.reply(order)
    assert heard == [({"n": 1}, [b"x"]), ({"n": 2}, []), "closed"]
    assert sides.managers["worker"].comms == {}


@pytest.mark.parametrize(("kind", "there"), [("process", True), ("kernel", False)])
def test_a_kernel_worker_forwards_only_the_comms_of_the_notebooks_cells(sides, kind, there):
    sides.on("worker", SimpleNamespace(kernel=True) if kind == "kernel" else None)
    during = comm.create_comm()
    sides.cell.has_running_cell = False
    beside = comm.create_comm()
    sides.deliver()
    assert (during.comm_id in sides.managers["notebook"].comms) is True
    assert (beside.comm_id in sides.managers["notebook"].comms) is there


def test_an_interrupt_during_a_send_loses_no_message(sides, monkeypatch):
    made = comm.create_comm()
    say = made._say

    def interrupted(content):
        signal.raise_signal(signal.SIGINT)
        say(content)

    monkeypatch.setattr(made, "_say", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.send({"n": 1})
    monkeypatch.setattr(made, "_say", say)
    made.send({"n": 2})
    sides.deliver()
    assert [data for kind, _, data, *_ in sides.front_end.said if kind == "comm_msg"] == [{"n": 1}, {"n": 2}]


def test_messages_for_a_closed_comm_are_dropped(sides):
    made = comm.create_comm()
    sides.deliver()
    sides.front(made).says({"n": 1})
    sides.on("worker")
    made.on_msg(lambda m: pytest.fail("it was closed"))
    made.close()
    sides.reply()


def test_an_error_in_a_callback_is_logged_and_the_next_message_is_handled(sides, caplog):
    made, heard = comm.create_comm(), []
    made.on_msg(lambda m: heard.append(m["content"]["data"]["n"]) or 1 / (m["content"]["data"]["n"] - 1))
    sides.deliver()
    for n in (1, 2):
        sides.front(made).says({"n": n})
    sides.reply()
    assert heard == [1, 2]
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("end", ["lost", "left", "the cluster's"])
def test_comms_are_closed_when_their_worker_or_the_cluster_ends(sides, end):
    gone, kept = comm.create_comm(), comm.create_comm()
    own, sides.output_stream = (
        [c for c in sides.output_stream if gone.comm_id in c],
        [c for c in sides.output_stream if kept.comm_id in c],
    )
    sides.on("notebook")
    sides.mirrors.receive_message(1, own[0])
    sides.mirrors.receive_message(2, sides.output_stream[0])
    if end == "the cluster's":
        (job,) = sides.agent.hooks.on_end
        job()
    else:
        sides.agent.watchers[0]("joined", SimpleNamespace(id=1), "")
        assert len(sides.managers["notebook"].comms) == 2
        sides.agent.watchers[0](end, SimpleNamespace(id=1), "why")
    closed = {said[1] for said in sides.front_end.said if said[0] == "comm_close"}
    assert closed == ({gone.comm_id, kept.comm_id} if end == "the cluster's" else {gone.comm_id})


def test_an_error_of_the_front_end_is_logged_and_not_raised(sides, monkeypatch, caplog):
    comm.create_comm()
    monkeypatch.setattr(Front, "publish_msg", lambda *_, **__: json.loads("no"))
    sides.deliver()
    assert "could not be shown" in caplog.text
