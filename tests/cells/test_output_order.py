"""Output arrives in any order and is shown in the order of writing."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rpcbench.cells.display import CallArea, OrderedOutput, OutputBuffer, OutputRouter
from rpcbench.cells.runner import OUTPUT, SHOWN

END = json.dumps({"error": None, "traceback": []})


def numbered(*items):
    return [{"cell": 3, "n": n, "kind": kind, "content": content} for n, (kind, content) in enumerate(items)]


class Pane:
    def __init__(self):
        self.shown = []

    def show_item(self, kind, content):
        if content == "bad":
            raise ValueError("I/O operation on closed file")
        self.shown.append((kind, content))


def taken(kind, content):
    return kind == "input"


class Agent:
    def __init__(self):
        self.handlers, self.told, self.watchers = {}, [], []

    def on_notice(self, channel, handler):
        self.handlers[channel] = handler

    def on_member(self, handler):
        self.watchers.append(handler)

    def notify(self, to, channel, notice):
        self.told.append((to, channel, notice))


ITEMS = [("stdout", "a"), ("part", "b"), ("part", "c"), ("display", "d"), ("stderr", "e"), ("end", END)]


@given(st.permutations(numbered(*ITEMS)))
def test_output_that_arrives_in_any_order_is_put_in_the_order_of_writing(notices):
    order = OrderedOutput()
    items = [item for notice in notices for item in order.add_notice(notice)]
    assert items == [("stdout", "a"), ("display", "bcd"), ("stderr", "e"), ("end", END)]
    assert order.ordered_count == len(notices)


def test_a_cell_is_over_only_when_all_output_before_its_end_was_shown():
    output_buffer = OutputBuffer(Pane(), taken)
    first, second, end = numbered(("stdout", "a"), ("stdout", "b"), ("end", END))
    for notice in (end, second):
        output_buffer.receive_notice(notice)
        assert not output_buffer.over.is_set()
    output_buffer.receive_notice(first)
    assert output_buffer.over.is_set()
    assert output_buffer.end.error is None


def test_a_cell_ends_even_if_some_output_cannot_be_shown(caplog):
    output_buffer = OutputBuffer(Pane(), taken)
    for notice in numbered(("stdout", "bad"), ("stdout", "good"), ("end", END)):
        output_buffer.receive_notice(notice)
    assert output_buffer.over.is_set()
    assert output_buffer.output_area.shown == [("stdout", "good")]
    assert "closed file" in caplog.text


def test_output_is_routed_by_worker_and_cell_and_acknowledged_to_its_worker():
    agent = Agent()
    relay = OutputRouter(agent, lambda *_: None)
    one, other = OutputBuffer(Pane(), taken), OutputBuffer(Pane(), taken)
    relay.open_buffer(1, 3, one)
    relay.open_buffer(2, 3, other)
    for notice in numbered(("stdout", "a"), ("stdout", "b")):
        agent.handlers[OUTPUT](1, notice)
    agent.handlers[OUTPUT](2, numbered(("stdout", "c"))[0])
    agent.handlers[OUTPUT](1, {**numbered(("stdout", "of an earlier cell"))[0], "cell": 2})
    assert one.output_area.shown == [("stdout", "a"), ("stdout", "b")]
    assert other.output_area.shown == [("stdout", "c")]
    assert [notice["shown"] for to, channel, notice in agent.told if (to, channel) == (1, SHOWN)] == [1, 2]


def test_a_lost_worker_ends_only_its_own_output_buffers():
    agent = Agent()
    relay = OutputRouter(agent, lambda *_: None)
    lost, kept = OutputBuffer(Pane(), taken), OutputBuffer(Pane(), taken)
    relay.open_buffer(1, 3, lost)
    relay.open_buffer(2, 3, kept)
    member = type("Member", (), {"name": "worker1", "id": 1})
    agent.watchers[0]("joined", member, "")
    assert not lost.over.is_set()
    agent.watchers[0]("lost", member, "killed")
    assert lost.over.is_set()
    assert lost.end is None
    assert not kept.over.is_set()


class Screen:
    def __init__(self):
        self.shown = ""

    def write_text(self, stream, text):
        self.shown += text


def test_output_of_calls_is_put_in_order_call_by_call_and_its_end_is_acknowledged():
    agent, screen = Agent(), Screen()
    OutputRouter(agent, lambda worker: OutputBuffer(CallArea(screen, f"worker{worker}"), lambda *_: False))
    first, half, end = ({**notice, "cell": -5} for notice in numbered(("stdout", "a\n"), ("stdout", "b"), ("end", END)))
    for notice in (end, half):
        agent.handlers[OUTPUT](1, notice)
    agent.handlers[OUTPUT](1, {**first, "cell": -6})
    assert screen.shown == "[worker1] a\n"
    agent.handlers[OUTPUT](1, first)
    assert screen.shown == "[worker1] a\n[worker1] a\n[worker1] b\n"
    assert agent.told[-1] == (1, SHOWN, {"cell": -5, "shown": 3})


def test_the_line_that_a_call_has_begun_stays_in_its_cell():
    one, other = Screen(), Screen()
    area = CallArea(one, "worker1")
    area.show_item("stdout", "half")
    area.move_to_display(other)
    area.show_item("stdout", "a line\n")
    assert (one.shown, other.shown) == ("[worker1] half\n", "[worker1] a line\n")
