"""`--collapse` and `--tabs`: other ways to show what several workers write, through a real kernel and by themselves."""

from __future__ import annotations

import json
import sys
import threading

import pytest
from IPython.core.error import UsageError
from worlds import until

from rpcbench.notebook import require_extra
from rpcbench.notebook.async_cells import tabbed_areas

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.process
def test_equal_outputs_are_shown_once_and_others_as_ever(kernel):
    reply = kernel.run("%%remote all --collapse\nprint('hello')\n{'k': 7}")
    assert reply.text.splitlines() == ["[worker1-2] hello", "[worker1-2] {'k': 7}"]
    reply = kernel.run("%%remote all --collapse\nprint(get_ipython().compile.worker)")
    assert reply.text.splitlines() == ["[worker1] worker1", "[worker2] worker2"]


@pytest.mark.process
def test_what_failed_workers_wrote_is_collapsed_too(kernel):
    # Else the error of one worker is reported on its own where the other one is late.
    kernel.run("import rpcbench.cells.client as client\ndelay = client._REPORT_DELAY_SECONDS")
    assert not kernel.run("client._REPORT_DELAY_SECONDS = 60 + delay").ename
    reply = kernel.run("%%remote all --collapse\nprint('before')\n1 / 0")
    kernel.run("client._REPORT_DELAY_SECONDS = delay")
    assert (reply.ename, reply.text) == ("ZeroDivisionError", "[worker1-2] before\n")


@pytest.mark.process
def test_tabs_hold_what_each_worker_shows_and_end_as_text_too(kernel):
    reply = kernel.run("%%remote all --tabs\nprint(get_ipython().compile.worker)\n7")
    assert [kind for kind, _ in reply.outputs] == ["display_data", "update_display_data"]
    (_, first), (_, last) = reply.outputs
    assert WIDGET in first["data"]
    assert first["data"]["text/plain"] == "In tabs: worker1, worker2."
    assert first["transient"] == last["transient"]
    assert first["data"][WIDGET] == last["data"][WIDGET]
    assert last["data"]["text/plain"] == "[worker1] worker1\n[worker1] 7\n[worker2] worker2\n[worker2] 7"
    kernel.run(f"from ipywidgets import Widget\ntab = Widget.widgets[{first['data'][WIDGET]['model_id']!r}]")
    assert kernel.value("tab.titles") == "('worker1', 'worker2')"
    kernel.run("text = lambda output: output.get('text') or output['data']['text/plain']")
    texts = kernel.value("[[text(output) for output in sheet.outputs] for sheet in tab.children]")
    assert texts == str([["worker1\n", "7"], ["worker2\n", "7"]])


@pytest.mark.process
def test_an_interrupted_cell_leaves_its_tabs_with_all_that_was_shown(kernel, tmp_path):
    ready = f"print('ready')\npathlib.Path({str(tmp_path)!r}, rpc.get_worker_info().name).touch()"
    stop = threading.Thread(target=lambda: (until(lambda: len([*tmp_path.iterdir()]) == 2), kernel.interrupt()))
    stop.start()
    imports = "import pathlib, time\nfrom rpcbench import rpc"
    reply = kernel.run(f"%%remote all --tabs\n{imports}\n{ready}\nwhile True:\n    time.sleep(0.01)")
    stop.join()
    assert reply.ename == "KeyboardInterrupt"
    last = [content for kind, content in reply.outputs if kind == "update_display_data"][-1]
    assert last["data"]["text/plain"] == "[worker1] ready\n[worker2] ready"


class Screen:
    """Shows nothing, keeps the texts of bundles."""

    def __init__(self):
        self.texts = []

    def display_bundle(self, bundle, update=False):
        self.texts.append(bundle["data"]["text/plain"])

    def call_in_context(self, emit):
        emit()


def bundle(text, **transient):
    return json.dumps({"data": {"text/plain": text}, "metadata": {}, "transient": transient})


def test_a_tab_is_like_the_output_of_a_cell():
    screen = Screen()
    one, two = tabbed_areas(screen, ["worker1", "worker2"], True)
    one.show_item("stdout", "wiped out")
    one.show_item("clear", "false")
    one.show_item("stdout", "a")
    one.show_item("stdout", "b\n")
    one.show_item("display", bundle("old", display_id="d"))
    one.show_item("update", bundle("new", display_id="d"))
    two.show_item("display", bundle("kept until there is more"))
    two.show_item("clear", "true")
    two.show_item("stderr", "more\n")
    one.finish_output()
    assert len(screen.texts) == 1, "told when all are through"
    two.finish_output()
    assert screen.texts[1] == "[worker1] ab\n[worker1] new\n[worker2] more"


def test_a_missing_part_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(UsageError, match="--tabs needs ipywidgets: pip install ipywidgets"):
        tabbed_areas(Screen(), ["worker1"], False)


def test_what_is_missing_besides_is_not_hidden():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), require_extra("a panel", "ipywidgets"):
        import no_such_module  # noqa: F401


def test_a_panel_says_what_it_needs(monkeypatch, made_magics):
    monkeypatch.delitem(sys.modules, "rpcbench.panels", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    for name in [name for name in sys.modules if name.startswith("rpcbench.panels.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match="a panel needs anywidget: pip install ipywidgets anywidget"):
        made_magics.panel("rrefs")


@pytest.fixture
def made_magics():
    from rpcbench.notebook.magics import ClusterMagics

    return ClusterMagics(None)
