"""What stands in the page is what the runtime's tables say, at moments held in the midst of work, and at rest.

Real members, the real collector and widgets; between widget and page a list of messages stands in for the notebook.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter

import comm
import pytest
import torch
from comm.base_comm import BaseComm
from drawn import CONTEXTS, STEPS, contexts, latest_step
from torch import nn
from torch.nn import functional
from worlds import PATIENCE, until

from benchmarks.panel_frames import CHROMIUM, FLAGS, HOST
from rpcbench import autograd, panels
from rpcbench.panels.base import PanelFeed
from rpcbench.pipeline import Pipeline, split
from rpcbench.rpc import remote, rpc_sync
from rpcbench.runtime import current, events
from rpcbench.telemetry.collector import Collector

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

# Where work stops, one place after the other: it says where it is, and waits to be told to go on.
_at, _go = queue.SimpleQueue(), queue.SimpleQueue()


def stop(place):
    _at.put(place)
    assert _go.get(timeout=4 * PATIENCE)


def stops():
    """Places at which work stops, each once all that is not stopped has come to rest; goes on after each."""
    while (place := _at.get(timeout=PATIENCE)) != "end":
        yield place
        _go.put(True)


class Live:
    """A panel of a collector, and a page that gets its messages."""

    def __init__(self, page, name, collector, sent):
        self._page, self._sent, self._next = page, sent, len(sent)
        self.panel = panels.PANELS[name](collector, PanelFeed(period=0.02))
        opened = self.panel.get_state()
        page.evaluate("([...all]) => open_(...all)", [str(self.panel._esm), str(self.panel._css), opened["state"]])
        page.evaluate("view", 0)

    def settles(self, read, expected):
        """Wait until the page shows what is expected, both looked at anew each time."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._pass_on()
            shown, wanted = self._page.evaluate(read), expected()
            if shown == wanted or time.monotonic() > deadline:
                assert shown == wanted
                return
            time.sleep(0.02)

    def _pass_on(self):
        while self._next < len(self._sent):
            data = self._sent[self._next]
            self._next += 1
            if data.get("method") == "custom":
                self._page.evaluate("m => { models[0].say('msg:custom', m); return drawn(); }", data["content"])
            elif "state" in data.get("state", {}) and data.get("method") == "update":
                self._page.evaluate("s => { models[0].change('state', s); return drawn(); }", data["state"]["state"])


@pytest.fixture
def show(agents, monkeypatch):
    """`show(name)`: a panel of this world in a page."""
    sent, opened = [], []

    class Recorded(BaseComm):
        def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
            sent.append(data)

    monkeypatch.setattr(comm, "create_comm", Recorded)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1000, "height": 700})
        page.set_content("<!doctype html><body></body>")
        page.evaluate(HOST)

        def open_(name):
            opened.append(Live(page, name, agents[0].part(Collector), sent))
            return opened[-1]

        yield open_
        for live in opened:
            live.panel.close()
        browser.close()


def beside(agent, work):
    """Run `work` on a thread of its own as that agent; it ends with the place "end"."""
    errors = []

    def run():
        try:
            with current.use_agent(agent):
                work()
        except BaseException as error:  # raised again below
            errors.append(error)
        _at.put("end")

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def everywhere(agents):
    return {agent.id: agent.tables() for agent in agents}


# ---- autograd


class Server:
    """Its forwards and backwards stop."""

    def __init__(self, name):
        self.name = name
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.bias = nn.Parameter(torch.ones(2))

    def forward(self, x):
        stop(f"forward at {self.name}")
        x.register_hook(lambda _: stop(f"backward at {self.name}"))
        return x @ self.weight + self.bias


def forward(server, x):
    return server.local_value().forward(x)


def test_a_backward_that_is_held_stands_in_the_page_as_in_the_tables(agents, show):
    live = show("autograd")
    servers = [remote(name, Server, (name,)) for name in ("worker1", "worker2")]
    x = torch.ones(4, 3, requires_grad=True)

    def step():
        with autograd.context() as context:
            outputs = [rpc_sync(f"worker{i + 1}", forward, (server, x * 2)) for i, server in enumerate(servers)]
            autograd.backward(context, [(outputs[0] * outputs[1]).sum()])
            stop("after backward")

    thread, errors = beside(agents[0], step)
    places, left = [], []
    for place in stops():
        until(lambda: threads_rest(agents), "the others to rest")
        live.settles(CONTEXTS, lambda: contexts(everywhere(agents)))
        places.append(place)
        left.append(sum(part[0] for card in contexts(everywhere(agents)).values() for part in card["passes"].values()))
    thread.join(PATIENCE)
    assert errors == []
    assert sorted(places[:2]) == ["forward at worker1", "forward at worker2"]
    assert sorted(places[2:]) == ["after backward", "backward at worker1", "backward at worker2"]
    assert places[-1] == "after backward" and left[-1] == 0 < max(left)
    live.settles(CONTEXTS, dict)
    assert contexts(everywhere(agents)) == {}


def threads_rest(agents):
    """Whether two looks at all tables find the same."""
    before = [agent.tables() for agent in agents]
    time.sleep(0.05)  # what would move has moved by then, or is seen by the wait that follows
    return before == [agent.tables() for agent in agents]


# ---- pipeline


class Stops(nn.Module):
    """Stops in the forward of the second micro-batch, and in the backward of the first."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            stop("forward")
        y = x * 2
        if self.calls == 1:
            y.register_hook(lambda _: stop("backward"))
        return y


def loss(output, target):
    stop("loss")
    return functional.cross_entropy(output, target)


def test_a_step_that_is_held_stands_in_the_page_as_in_the_tables(agents, show):
    layers = [nn.Linear(6, 16), Stops(), nn.Linear(16, 16), nn.Linear(16, 4)]
    pipe = Pipeline(split(layers, ["worker1", "worker2"], balance=[2, 2]), "gpipe", 3, loss)
    live = show("pipeline")

    def step():
        with pipe.batch(torch.rand(12, 6), torch.zeros(12, dtype=torch.long)):
            pass

    thread, errors = beside(agents[0], step)
    places, waits = [], set()
    for place in stops():
        until(lambda: threads_rest(agents), "the others to rest")
        live.settles(STEPS, lambda: latest_step(everywhere(agents)))
        waits |= {lane[4] for lane in latest_step(everywhere(agents))["lanes"].values()}
        places.append(place)
    thread.join(PATIENCE)
    assert errors == []
    assert Counter(places) == {"forward": 1, "loss": 3, "backward": 1}
    assert {"0B0"} < waits
    live.settles(STEPS, lambda: latest_step(everywhere(agents)))
    assert all(lane[0] == lane[1] == 6 for lane in latest_step(everywhere(agents))["lanes"].values())


# ---- left out


def left_out(agents):
    return sum(member["left_out"] for member in agents[0].part(Collector).world().values())


def test_what_is_dropped_is_counted_in_the_page_and_holds_nobody_up(agents, show, monkeypatch):
    live = show("rrefs")
    live.settles("() => document.querySelectorAll('.rb-row').length", lambda: 0)
    monkeypatch.setattr(events, "CAPACITY", 4)
    kept = [remote("worker1", int, (number,)) for number in range(200)]
    assert [rref.to_here() for rref in kept[::50]] == [0, 50, 100, 150]
    del kept[8:]  # all of them in sight
    rows = "() => [...document.querySelectorAll('[data-rref]')].map(row => row.dataset.rref).sort()"
    until(lambda: len(agents[1].tables()["owned"]) == 8)
    live.settles(rows, lambda: sorted(agents[1].tables()["owned"]))
    warning = "() => document.querySelector('.rb-stat.rb-warn')?.textContent ?? ''"  # drawn with the first count
    live.settles(warning, lambda: f"{left_out(agents)} left out")
    assert left_out(agents) > 0
    del kept
