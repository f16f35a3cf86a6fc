"""Widgets made on a worker, through a real kernel: a front end sees them, and what it says gets there."""

from __future__ import annotations

import time

import pytest
from worlds import PATIENCE

pytestmark = pytest.mark.process

VIEW = "application/vnd.jupyter.widget-view+json"
SLIDER = """%%remote worker1
from ipywidgets import IntSlider
slider = IntSlider(5, description='speed')
seen = []
slider.observe(lambda change: (print('moved to', change['new']), seen.append(change['new'])), 'value')
slider"""


def shown(kernel):
    """The slider, as a front end knows it: the id of its model."""
    reply = kernel.run(SLIDER)
    assert reply.status == "ok", reply.traceback
    model = reply.results[0][VIEW]["model_id"]
    opened = {m["content"]["comm_id"]: m["content"] for m in reply.comms if m["msg_type"] == "comm_open"}
    state = opened[model]["data"]["state"]
    assert (opened[model]["target_name"], state["value"], state["description"]) == ("jupyter.widget", 5, "speed")
    assert state["layout"].removeprefix("IPY_MODEL_") in opened, "what a widget is made of comes, too"
    return model


def move(kernel, model, value, **how):
    kernel.say(model, {"method": "update", "state": {"value": value}, "buffer_paths": []}, **how)


def until(kernel, code, wanted):
    """Wait until an expression on worker1 has this value."""
    deadline = time.monotonic() + PATIENCE
    while (found := kernel.value(f"%remote worker1 {code}")) != wanted and time.monotonic() < deadline:
        pass
    assert found == wanted


def logged(kernel, text):
    """Wait until worker1 has written this while no cell ran there."""
    deadline = time.monotonic() + PATIENCE
    while text not in (log := kernel.run("%cluster logs worker1").text) and time.monotonic() < deadline:
        pass
    assert text in log


def models(kernel):
    """The comms that the kernel would name to a page that is loaded anew."""
    return kernel.value("sorted(__import__('comm').get_comm_manager().comms)")


def test_a_slider_moves_both_ways_while_the_worker_rests(kernel):
    model = shown(kernel)
    move(kernel, model, 8)
    logged(kernel, "moved to 8")
    until(kernel, "(slider.value, seen)", "(8, [8])")
    reply = kernel.run("%%remote worker1\nslider.value = 3")
    updates = [m["content"]["data"]["state"] for m in reply.comms if m["content"]["comm_id"] == model]
    assert {"value": 3} in updates


def test_a_thread_moves_it_while_no_cell_runs(kernel, tmp_path):
    model, go = shown(kernel), tmp_path / "go"
    mover = f"""%%remote worker1
import pathlib, threading, time
def move():
    while not pathlib.Path({str(go)!r}).exists():
        time.sleep(0.01)
    slider.value = 2
threading.Thread(target=move).start()"""
    assert kernel.run(mover).status == "ok"
    go.touch()
    said, deadline = [], time.monotonic() + PATIENCE
    while {"value": 2} not in said and time.monotonic() < deadline:
        reply = kernel.run("%cluster status")  # no cell of the worker
        ours = [m for m in (*reply.comms, *reply.strays) if m["content"].get("comm_id") == model]
        said += [m["content"]["data"]["state"] for m in ours]
    assert {"value": 2} in said


def test_a_callback_runs_while_the_cell_runs_and_prints_there(kernel):
    """Also while the notebook waits for that cell, where the front end has a subshell for its comms."""
    model = shown(kernel)
    kernel.client.control_channel.send(kernel.client.session.msg("create_subshell_request"))
    while (message := kernel.client.get_control_msg(timeout=PATIENCE))["msg_type"] != "create_subshell_reply":
        pass
    subshell = message["content"]["subshell_id"]
    code = "print('begun')\nimport time\nwhile not seen:\n    time.sleep(0.01)\nprint('seen', seen)"
    moved = []

    def begun():
        moved.append(move(kernel, model, 9, subshell=subshell))

    reply = kernel.run(f"%%remote worker1\n{code}", when={"begun\n": begun})
    assert (reply.status, len(moved)) == ("ok", 1)
    assert "moved to 9\n" in reply.text
    kernel.client.control_channel.send(kernel.client.session.msg("delete_subshell_request", {"subshell_id": subshell}))


def test_an_error_in_a_callback_is_told_in_the_log(kernel):
    model = shown(kernel)
    kernel.run("%%remote worker1\nslider.observe(lambda change: 1 / 0, 'value')")
    move(kernel, model, 8)
    logged(kernel, "ZeroDivisionError")


def test_buffers_go_both_ways(kernel):
    there = """%%remote worker1
from ipywidgets import DOMWidget
from traitlets import Any
class Raw(DOMWidget):
    raw = Any(b'abc').tag(sync=True)
raw = Raw()
raw.model_id"""
    reply = kernel.run(there)
    model = reply.results[-1]["text/plain"].strip("'")  # not of its text, which late calls add to
    opened = {m["content"]["comm_id"]: m for m in reply.comms if m["msg_type"] == "comm_open"}[model]
    assert [bytes(buffer) for buffer in opened["buffers"]] == [b"abc"]
    update = {"method": "update", "state": {}, "buffer_paths": [["raw"]]}
    kernel.say(model, update, buffers=[b"\x00\xff"])
    until(kernel, "bytes(raw.raw)", r"b'\x00\xff'")


def test_bars_of_tqdm_are_widgets_in_the_cell(kernel):
    reply = kernel.run("%%remote worker1\nfrom tqdm.notebook import tqdm\nfor i in tqdm(range(4)):\n    pass")
    assert reply.status == "ok", reply.traceback
    assert VIEW in reply.results[0]
    states = [m["content"]["data"].get("state", {}) for m in reply.comms]
    assert 4 in [state.get("value") for state in states]
    assert "success" in [state.get("bar_style") for state in states]


def test_plain_bars_of_tqdm_go_on_in_their_line(kernel):
    code = "import sys\nfrom tqdm import tqdm\nfor i in tqdm(range(4), mininterval=0, file=sys.stdout):\n    pass"
    reply = kernel.run(f"%%remote worker1\n{code}")
    parts = reply.text.split("\r")
    assert parts[0] == ""
    assert "100%" in parts[-1]
    assert parts[-1].endswith("\n")
    assert not any("\n" in part for part in parts[:-1])
    lines = kernel.run(f"%%remote all\n{code}").text.replace("\r", "\n").split("\n")
    assert all(line.startswith(("[worker1] ", "[worker2] ")) for line in lines if line)


def test_what_is_closed_there_is_closed_here(kernel):
    model = shown(kernel)
    assert model in models(kernel)
    reply = kernel.run("%%remote worker1\nslider.close()")
    assert ("comm_close", model) in [(m["msg_type"], m["content"]["comm_id"]) for m in reply.comms]
    assert model not in models(kernel)


def test_with_its_worker_a_widget_goes(kernel):
    code = "%%remote worker2\nfrom ipywidgets import IntSlider\nother = IntSlider()\nother.model_id"
    other = kernel.run(code).results
    model, kept = shown(kernel), other[0]["text/plain"].strip("'")
    kernel.run("%cluster restart worker1")
    deadline = time.monotonic() + PATIENCE
    while model in (there := models(kernel)) and time.monotonic() < deadline:
        pass
    assert model not in there
    assert kept in there
    assert shown(kernel) != model
