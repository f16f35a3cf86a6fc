"""What a page asks of a kernel, through a real one: it is heard and answered while a cell runs."""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import signal
import time
import uuid

import pytest
from kinds import kernel_is_long
from worlds import PATIENCE

pytestmark = pytest.mark.process

VIEW = "application/vnd.jupyter.widget-view+json"


class Page:
    """A page with a subshell, as JupyterLab has one for the comms of a target."""

    def __init__(self, kernel):
        self.client = kernel.client
        self.subshell = self._control("create_subshell")["subshell_id"]
        self.kept = []

    def _control(self, kind, **content):
        asked = self.client.session.msg(f"{kind}_request", content)
        self.client.control_channel.send(asked)
        while (message := self.client.get_control_msg(timeout=PATIENCE))["msg_type"] != f"{kind}_reply":
            pass
        return message["content"]

    def open(self, **data):
        comm = uuid.uuid4().hex
        self._send("comm_open", {"comm_id": comm, "target_name": "rpcbench", "data": data})
        return comm

    def close(self, comm):
        self._send("comm_close", {"comm_id": comm, "data": {}})

    def _send(self, kind, content):
        message = self.client.session.msg(kind, content)
        message["header"]["subshell_id"] = self.subshell
        self.client.session.send(self.client.shell_channel.socket, message)

    def hears(self, comm, wanted=lambda data: True, kind="comm_msg"):
        """The next thing that the kernel says to this comm and that is wanted; what it says to others is kept."""
        deadline = time.monotonic() + PATIENCE
        for message in self._messages(deadline):
            content = message["content"]
            if message["msg_type"] == kind and content["comm_id"] == comm and wanted(content["data"]):
                self.kept.remove(message)
                return content["data"]
        raise AssertionError(f"nothing like that was said: {[message['content'] for message in self.kept]}")

    def _messages(self, deadline):
        yield from list(self.kept)
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                message = self.client.get_iopub_msg(timeout=0.1)
                if message["msg_type"].startswith("comm_"):
                    self.kept.append(message)
                    yield message

    def asks(self, **data):
        """What comes of a deed."""
        return self.hears(self.open(**data), kind="comm_close")

    def acts(self, action, target, of="main"):
        return self.asks(do="act", of=of, action=action, target=target)

    def leave(self):
        self._control("delete_subshell", subshell_id=self.subshell)


@pytest.fixture
def page(kernel):
    page = Page(kernel)
    yield page
    page.leave()


@contextlib.contextmanager
def busy(kernel, folder, where=""):
    """The kernel runs a cell meanwhile."""
    go = folder / "go"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.02)"
    cell = kernel.client.execute(where + code)
    try:
        yield
    finally:
        go.touch()
    assert kernel.answer(cell)["status"] == "ok"


def workers(state):
    return {
        worker["name"]: (worker["state"], worker["note"], worker["start"]) for worker in state["clusters"][0]["workers"]
    }


@kernel_is_long
def test_a_page_sees_a_worker_die_and_starts_it_again_while_a_cell_runs(kernel, page, tmp_path):
    pid = int(kernel.value("cluster.pid('worker2')"))
    start = int(kernel.value("cluster.status()[1].incarnation")) + 1
    with busy(kernel, tmp_path):
        watch = page.open(do="watch")
        state = page.hears(watch)
        assert workers(state)["worker2"] == ("ready", "", start)
        assert (state["clusters"][0]["name"], state["clusters"][0]["current"], state["doing"]) == ("main", True, [])
        assert {"rrefs", "autograd", "pipeline"} <= {*state["panels"]}
        os.kill(pid, signal.SIGKILL)
        page.hears(watch, lambda seen: workers(seen)["worker2"] == ("lost", "killed by SIGKILL", start))
        answer = page.acts("restart", "worker2")
        assert answer == {"text": "Started again: worker2. Its variables are lost."}
        page.hears(watch, lambda seen: workers(seen)["worker2"] == ("ready", "", start + 1) and not seen["doing"])
        assert page.asks(do="stay", watch=watch) == {"there": True}
    page.close(watch)


def test_a_page_that_leaves_while_a_cell_runs_is_forgotten(kernel, page, tmp_path):
    """Also when the last that it was told was said while that cell ran."""
    watch = page.open(do="watch")
    assert workers(page.hears(watch))["worker1"][0] == "ready"
    with busy(kernel, tmp_path, "%%remote worker1\n"):
        page.hears(watch, lambda seen: workers(seen)["worker1"][0] == "busy")
        page.close(watch)
        deadline = time.monotonic() + PATIENCE
        while page.asks(do="stay", watch=watch)["there"]:
            assert time.monotonic() < deadline, "what the page says waits for the cell"


def test_a_panel_is_drawn_in_a_page_while_a_cell_runs_and_goes_with_its_tab(kernel, page, tmp_path):
    panels = "sum(type(w).__name__ == 'RRefPanel' for w in __import__('ipywidgets').Widget.widgets.values())"
    before = int(kernel.value(panels))
    with busy(kernel, tmp_path):
        tab = page.open(do="panel", name="rrefs", of="main")
        bundle = page.hears(tab)["bundle"]
        page.hears(bundle[VIEW]["model_id"], lambda data: data["state"].get("_esm"), kind="comm_open")
        assert page.hears(page.open(do="panel", name="nope", of="main"), kind="comm_close")["error"].startswith(
            "no panel is called"
        )
    assert int(kernel.value(panels)) == before + 1
    page.close(tab)
    deadline = time.monotonic() + PATIENCE
    while int(kernel.value(panels)) > before:
        assert time.monotonic() < deadline, "the panel is left open"


def test_a_page_that_is_loaded_again_finds_the_messages_of_before_and_what_is_held(kernel, page):
    last = "[w for w in __import__('ipywidgets').Widget.widgets.values() if type(w).__name__ == 'MessagesPanel'][-1]"
    tab = page.open(do="panel", name="messages", of="main")
    page.hears(tab)
    kernel.run("import rpcbench.rpc\nrpcbench.rpc.rpc_sync('worker1', abs, (-1,))")
    kernel.run("from rpcbench.testing import Stepper\nstepper = Stepper.on()")
    kernel.run("held = rpcbench.rpc.rpc_async('worker1', pow, (2, 3))\nstepper.wait() and None")
    first = kernel.value(f"{last}.text()")
    page.close(tab)
    again = page.open(do="panel", name="messages", of="main")
    page.hears(again)
    assert kernel.value(f"{last}.text()") == first and "1 in flight" in first and "call abs" in first
    kernel.run("stepper.go()")
    assert kernel.value("held.wait()") == "8"
    page.close(again)
    parts = "from rpcbench.runtime.current import current_agent\nfrom rpcbench.telemetry.last_trace import LastTrace\n"
    kernel.run(f"{parts}current_agent().part(LastTrace).end()")  # for tests that wait until nobody listens


@kernel_is_long
def test_workers_come_and_go_by_a_page(kernel, page):
    more = page.acts("scale", "3")
    assert more["text"].splitlines()[-1] == "3 workers: worker1, worker2, worker3."
    assert page.acts("interrupt", "all")["text"].startswith("worker1, worker2, worker3 run no cell of this notebook. ")
    assert page.acts("scale", "2") == {"text": "2 workers: worker1, worker2."}
    assert kernel.value("cluster.workers") == "['worker1', 'worker2']"


def test_a_cluster_is_started_used_and_stopped_beside_another(kernel, page):
    kernel.run("%cluster start 1 --name other")
    assert page.asks(do="use", of="main")["text"] == "main: 2 workers: worker1, worker2."
    watch = page.open(do="watch")
    state = page.hears(watch)
    assert {one["name"]: one["current"] for one in state["clusters"]} == {"main": True, "other": False}
    tab = page.open(do="panel", name="workers", of="other")
    model = page.hears(tab)["bundle"][VIEW]["model_id"]
    page.hears(model, lambda data: data.get("state", {}).get("cluster") == "other")
    page.close(tab)
    refused = page.hears(page.open(do="panel", name="workers", of="gone"), kind="comm_close")
    assert refused["error"] == "no cluster gone runs"
    assert page.acts("stop", "all", of="other")["text"].startswith("other: The cluster is stopped. The current")
    page.hears(watch, lambda seen: [one["name"] for one in seen["clusters"]] == ["main"])
    assert "1 worker: worker1." in page.asks(do="start", size=1, name="other")["text"]
    page.hears(watch, lambda seen: [one["name"] for one in seen["clusters"]] == ["main", "other"])
    page.acts("stop", "all", of="other")
    page.close(watch)
    assert kernel.value("cluster.workers") == "['worker1', 'worker2']"


MODES = {  # name: the cell that begins it, its text, and the beginning of the reply to the request that ends it
    "chaos": ("%chaos drop=30% delay=50ms", "drop 30 %, delay 0\N{EN DASH}50 ms", "Faults are off."),
    "held": ("%%step --hold Call worker1\n6 * 7", "%%step is on, none held", "No messages are held any more."),
    "record": ("%record {folder}/lesson.json", "recording lesson.json", "{folder}/lesson.json: record of"),
    "autoremote": ("%autoremote worker1", "cells run on worker1", "Cells run here again, in the notebook."),
}


@pytest.mark.parametrize("name", MODES)
def test_a_page_shows_what_stays_on_and_ends_it_while_a_cell_runs(kernel, page, tmp_path, name):
    cell, text, reply = (part.format(folder=tmp_path) for part in MODES[name])
    watch = page.open(do="watch")
    assert page.hears(watch)["modes"] == []
    done = kernel.run(cell)
    page.kept += done.comms + done.strays  # what the page was told meanwhile
    (mode,) = page.hears(watch, lambda seen: seen["modes"])["modes"]
    assert (mode["name"], mode["text"]) == (name, text)
    with busy(kernel, tmp_path):
        assert page.asks(**mode["end"])["text"].startswith(reply)
        page.hears(watch, lambda seen: seen["modes"] == [])
        assert "error" not in page.asks(**mode["end"]), "a second click is no mistake"
    page.close(watch)


def test_the_number_of_held_messages_is_shown_until_they_are_released(kernel, page):
    kernel.run("import rpcbench.rpc as rpc")
    kernel.run('%%step --hold Call\nrpc.rpc_sync("worker1", abs, (-1,))')
    watch = page.open(do="watch")
    page.hears(watch, lambda seen: [mode["text"] for mode in seen["modes"]] == ["1 message held"])
    reply = kernel.run("_.go()")
    assert reply.status == "ok"
    page.kept += reply.comms + reply.strays
    page.hears(watch, lambda seen: seen["modes"] == [])
    page.close(watch)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (
            {"do": "act", "of": "main", "action": "restart", "target": "worker9"},
            "destination name worker9: did you mean",
        ),
        ({"do": "act", "of": "main", "action": "reload", "target": "os"}, "unknown action 'reload'"),
        ({"do": "act", "of": "gone", "action": "restart", "target": "worker1"}, "no cluster gone runs"),
        ({"do": "restart", "of": "main", "words": ["worker1"]}, "has no 'restart'"),
        ({"do": "end", "mode": "sleep", "of": "main"}, "there is no mode 'sleep'"),
        ({"do": "end", "mode": "chaos", "of": "gone"}, "no cluster gone runs"),
        ({"do": "start", "size": "2; import os"}, "has no 'start'"),
        ({}, "has no None"),
    ],
)
def test_what_cannot_be_done_is_told_to_the_page(page, asked, complaint):
    assert complaint in page.asks(**asked)["error"]


def test_what_failed_for_a_page_stands_in_the_workers_panel_too(kernel, page):
    told = "__import__('rpcbench').panel('workers').snapshot()"
    error = page.acts("interrupt", "worker9")["error"]
    shown = kernel.value(f"[line for line in str({told}).splitlines() if 'failed' in line]")
    assert f"  interrupt worker9 failed: UnknownWorkerError: {error}" in ast.literal_eval(shown)


@kernel_is_long
def test_a_kernel_that_forgets_the_magics_says_so_to_the_pages(kernel, page):
    watch = page.open(do="watch")
    page.hears(watch)
    reply = kernel.run("%unload_ext rpcbench")
    page.kept += reply.comms + reply.strays
    assert page.hears(watch, kind="comm_close") == {}
    assert page.asks(do="start", size=2) == {}
    started = kernel.run(f"%load_ext rpcbench\n%cluster start 2 --kind {kernel.kind}")
    assert started.status == "ok", started.traceback
