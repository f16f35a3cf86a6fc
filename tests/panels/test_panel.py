"""Panels as widgets: whole state once, deltas after it, late browsers served, nothing asked when nobody looks."""

from __future__ import annotations

import base64
import json
import re
import threading
from pathlib import Path
from unittest.mock import Mock

import comm
import pytest
from comm.base_comm import BaseComm
from pictures import gpipe, own, use, world

import rpcbench.panels as panels
from rpcbench.panels.base import MOST_STILL_BYTES, Panel, StillOutputs, still_output
from rpcbench.telemetry.collector import Phase
from rpcbench.telemetry.recording import Still as StillWorld
from rpcbench.telemetry.summary import summarize_view
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.trace import chrome_trace
from rpcbench.telemetry.views import patch_view, rref_view


class Source:
    def __init__(self):
        self.at = world(2)
        self.wakes = []

    def subscribe(self, wake):
        self.wakes.append(wake)
        return lambda: self.wakes.remove(wake)

    def world(self):
        return self.at


class Still:
    """A publisher that shows nothing by itself."""

    def __init__(self):
        self.viewers = []

    def open_viewer(self, viewer, source):
        if viewer not in self.viewers:
            self.viewers.append(viewer)

    def close_viewer(self, viewer):
        if viewer in self.viewers:
            self.viewers.remove(viewer)


@pytest.fixture
def sent(monkeypatch):
    """Everything that widgets made in this test send to browsers."""
    messages = []

    class Recorded(BaseComm):
        def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
            messages.append((msg_type, data))

    monkeypatch.setattr(comm, "create_comm", Recorded)
    return messages


@pytest.fixture
def rrefs(sent):
    made = panels.RRefPanel(Source(), Still())
    yield made
    made.close()


def deltas(sent):
    return [data["content"] for _, data in sent if data.get("method") == "custom"]


def updates(sent):
    return [data["state"] for _, data in sent if data.get("method") == "update"]


def test_a_comparison_without_a_cluster_is_told_to_be_shown_by_its_report():
    with pytest.raises(RuntimeError, match=r"not been initialized.* `display\(report\)`, or `report` as the last line"):
        panels.panel("compare")


def test_browsers_get_one_whole_and_then_deltas_that_add_up(rrefs, sent):
    opened = next(data["state"]["state"] for _, data in sent if "state" in data.get("state", {}))
    at = world(2)
    for i in range(3):
        own(at, 1, f"0.{2 * i}")
        use(at, 0, f"0.{2 * i + 1}", f"0.{2 * i}", 1)
        assert rrefs.show_world(at)
    view = opened["view"]
    for n, message in enumerate(deltas(sent), start=opened["version"] + 1):
        assert message["version"] == n
        view = patch_view(view, message["delta"])
    assert view == rref_view(at)
    assert updates(sent) == []
    assert set(deltas(sent)[-1]["delta"]["rrefs"]["set"]) == {"0.4"}


def test_what_stands_still_is_there_before_anybody_publishes_it(sent):
    at = world(2)
    own(at, 1, "0.0")
    made = panels.RRefPanel(StillWorld(at), Still())
    try:
        assert made.view == rref_view(at) and "0.0" in str(made)
        opened = next(data["state"]["state"] for _, data in sent if "state" in data.get("state", {}))
        assert made.show_world(at), "browsers draw the first version that is sent"
        assert patch_view(opened["view"], deltas(sent)[-1]["delta"]) == rref_view(at)
    finally:
        made.close()


def test_no_change_is_not_sent(rrefs, sent):
    assert rrefs.show_world(world(2))
    count = len(sent)
    assert not rrefs.show_world(world(2))
    assert len(sent) == count


def test_the_first_look_is_sent_even_if_the_world_is_empty(rrefs, sent):
    assert rrefs.show_world({})
    assert [message["version"] for message in deltas(sent)] == [1]


def test_a_browser_that_opens_later_gets_the_present_view(rrefs, sent):
    at = world(2)
    own(at, 1, "0.0")
    rrefs.show_world(at)
    present = {"version": 1, "view": rref_view(at)}
    assert rrefs.get_state()["state"] == present
    rrefs.comm.handle_msg({"content": {"data": {"method": "request_state"}}, "buffers": []})
    assert updates(sent)[-1]["state"] == present
    rrefs.send_whole_view()
    assert updates(sent)[-1] == {"state": present}


def test_it_is_followed_while_a_browser_shows_it(rrefs):
    def hear(kind, eye):
        data = {"method": "custom", "content": {"kind": kind, "eye": eye}}
        rrefs.comm.handle_msg({"content": {"data": data}, "buffers": []})
        return rrefs in rrefs._publisher.viewers

    assert hear("opened", "a")
    assert hear("opened", "b")
    assert hear("closed", "a")
    assert not hear("closed", "b")
    assert not hear("closed", "b")
    assert hear("opened", "c")


def test_a_closed_panel_is_followed_no_more(rrefs):
    publisher = rrefs._publisher
    assert publisher.viewers == [rrefs]
    rrefs.close()
    rrefs.close()
    assert publisher.viewers == []


def test_a_failure_is_shown_in_the_picture(rrefs, sent):
    rrefs.show_error(ValueError("cannot draw"))
    assert updates(sent) == [{"problem": "ValueError: cannot draw"}]


def test_the_text_of_a_saved_notebook_is_a_sentence_that_stays(rrefs):
    data, _ = rrefs._repr_mimebundle_()
    before = data["text/plain"]
    own(rrefs._source.at, 1, "0.0")
    rrefs.show_world(rrefs._source.at)
    assert rrefs._repr_mimebundle_()[0]["text/plain"] == before
    assert before.endswith("Run the cell to see the panel.")
    assert "application/vnd.jupyter.widget-view+json" in data
    assert str(rrefs).splitlines()[0] == "3 members, 1 RRef, 0 forks"


def test_a_panel_moves_by_itself(sent):
    source = Source()
    made = panels.panel("rrefs", source)
    try:
        changed = threading.Event()
        made.observe(lambda change: "0.0" in change["new"]["view"]["rrefs"] and changed.set(), "state")
        own(at := world(2), 1, "0.0")
        source.at = at
        source.wakes[0]()
        assert changed.wait(20)
    finally:
        made.close()
    assert source.wakes == []


def test_a_panel_exports_what_its_source_holds(rrefs, tmp_path):
    gpipe(rrefs._source.at, 0, 2, 3, 100.0)
    saved = json.loads(rrefs.export(tmp_path / "trace.json").read_text())
    assert saved == json.loads(json.dumps(chrome_trace(rrefs._source.at)))
    assert sum(event["ph"] == "X" for event in saved["traceEvents"]) == 12


@pytest.mark.parametrize("name", panels.PANELS)
def test_each_name_makes_a_panel_with_its_own_code(name, sent):
    made = panels.panel(name, Source())
    try:
        assert isinstance(made, Panel)
        assert f'panel("{name}", ' in made._esm
        assert made._esm.index("class Live") < made._esm.index("export default")
        assert f".rb-{name} " in made._css
        assert ".rb-panel {" in made._css
    finally:
        made.close()


def test_an_unknown_name_lists_the_panels():
    with pytest.raises(ValueError, match=r"'rref': there are workers, .*rrefs, autograd, pipeline"):
        panels.panel("rref", Source())


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("pipeline", 3, "this panel does not show 3: .* a result of rpcbench.simulate"),
        ("messages", 3, "does not show 3: .* a result of rpcbench.simulate"),
        ("shards", "model", "does not show 'model': .* a result of rpcbench.simulate"),
        ("rrefs", [1, 2], r"does not show \[1, 2\]: it shows the current cluster, and needs nothing more"),
        ("compare", 3, "does not show 3: .* a result of cluster.compare"),
        ("plan", Source(), "does not show .*: .* the result of rpcbench.plan"),
        ("plan", None, "a cluster has no plan to show: .* the result of rpcbench.plan"),
    ],
)
def test_what_a_panel_does_not_show_is_refused_with_what_it_takes(name, given, words):
    with pytest.raises(TypeError, match=words):
        panels.panel(name, given)


class Handles:
    """Stands in for IPython's handle of an output; notes what is shown in all of them."""

    shown: list[tuple[str, dict]]

    def display(self, bundle, raw):
        self.shown.append(("display", bundle))

    def update(self, bundle, raw):
        self.shown.append(("update", bundle))


class Shell:
    def __init__(self):
        self.events = self
        self.callbacks = []

    def register(self, event, callback):
        self.callbacks.append((event, callback))

    def cell_ends(self):
        for event, callback in self.callbacks:
            assert event == "post_run_cell"
            callback(None)


@pytest.fixture
def stills(monkeypatch, rrefs):
    """The stills of a shell; `Handles.shown` has what they show."""
    Handles.shown = []
    monkeypatch.setattr("IPython.display.DisplayHandle", Handles)
    made, shell = StillOutputs(), Shell()
    monkeypatch.setattr("rpcbench.panels.base.STILLS", made)
    made.add_panel(rrefs, shell)
    return shell


def drawn(bundle):
    return base64.b64decode(re.search(r'base64,([^"]+)"', bundle["text/html"])[1]).decode()


def test_the_still_below_a_panel_follows_at_the_end_of_each_cell(stills, rrefs):
    ((how, first),) = Handles.shown
    assert how == "display" and 'class="rb-still ' in first["text/html"]
    stills.cell_ends()
    assert len(Handles.shown) == 1, "nothing has changed"
    own(rrefs._source.at, 1, "0.7")
    stills.cell_ends()
    stills.cell_ends()
    _, (how, second) = Handles.shown
    assert how == "update" and "0.7" in drawn(second) and "0.7" not in drawn(first)
    assert second["text/plain"] == first["text/plain"], "stored outputs are compared by it"
    rrefs.close()
    own(rrefs._source.at, 1, "0.9")
    stills.cell_ends()
    assert len(Handles.shown) == 2, "a closed panel keeps its still"


def test_a_still_stays_where_its_source_has_forgotten_everything(stills, rrefs):
    own(rrefs._source.at, 1, "0.7")
    rrefs.show_world(rrefs._source.at)
    stills.cell_ends()
    rrefs._source.at = {}  # as a collector without a subscriber
    stills.cell_ends()
    assert len(Handles.shown) == 2


def test_a_still_that_cannot_be_drawn_disturbs_one_cell_only(stills, rrefs, monkeypatch, caplog):
    monkeypatch.setattr(rrefs._source, "world", Mock(side_effect=ValueError("no world")))
    stills.cell_ends()
    stills.cell_ends()
    assert caplog.text.count("ValueError: no world") == 1


def test_a_large_still_is_its_text():
    at = world(2)
    for n in range(20):
        own(at, 1, f"0.{n}", kind="Tensor" * 40)
    made = Snapshot(rref_view(at))
    small = still_output(made)["text/html"]
    assert "base64," in small and len(small) < MOST_STILL_BYTES
    made.html += "x" * MOST_STILL_BYTES
    large = still_output(made)["text/html"]
    assert "base64," not in large and "20 RRefs" in large and len(large) < 10_000


def test_a_panel_keeps_the_last_picture_of_a_cluster_that_has_stopped(rrefs, sent):
    own(rrefs._source.at, 1, "0.7")
    assert rrefs.phase == {"name": "live", "at": 0.0}
    rrefs.show_world(rrefs._source.at)
    rrefs._source.phase = Phase("stopped", 1.0e9)
    assert not rrefs.show_world({}), "nobody looked at the end"
    assert "0.7" in rrefs.view["rrefs"]
    assert updates(sent)[-1] == {"phase": {"name": "stopped", "at": 1.0e9}}
    first, second, *_ = str(rrefs).splitlines()
    assert first.startswith("Stopped at ") and second == "3 members, 1 RRef, 0 forks"


def test_a_snapshot_goes_to_the_page_that_asks_or_to_the_cell(rrefs, sent):
    own(rrefs._source.at, 1, "0.7")
    rrefs.show_world(rrefs._source.at)

    def ask(page):
        content = {"kind": "snapshot", "eye": "a", "page": page}
        rrefs.comm.handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})

    ask(page=True)
    answer = deltas(sent)[-1]
    assert (answer["kind"], answer["eye"], answer["model"]) == ("snapshot", "a", rrefs.model_id)
    assert "0.7" in drawn(answer["data"]) and "1 RRef" in answer["data"]["text/plain"]
    rrefs._cell = Mock()
    ask(page=False)
    assert rrefs._cell.display_bundle.call_args.args[0]["data"] == answer["data"]
    assert deltas(sent)[-1] is answer


def test_nothing_is_loaded_from_elsewhere():
    for suffix in (".js", ".css"):
        for file in Path(panels.__file__).parent.glob(f"*{suffix}"):
            words = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http" not in words and "import" not in words and "innerHTML" not in words, file


def test_a_panel_that_is_printed_at_once_says_what_there_is(rrefs):
    assert not rrefs.view["workers"]  # nothing has looked at the source yet
    assert str(rrefs) == summarize_view(rref_view(Source().world()))
    assert "0 members" not in str(rrefs)
