"""Still pictures: made where no browser is, from the views alone, and safe and readable wherever they are shown."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

import addresses
import nbformat
import pytest
from nbclient import NotebookClient
from pictures import ask, gpipe, launch, own, record, run_backward, send, tell, use, world
from sizes import long

from rpcbench.base import charts
from rpcbench.panels import PANELS, base
from rpcbench.telemetry import svg as stills
from rpcbench.telemetry.svg import Snapshot
from rpcbench.telemetry.views import TYPE_COLOURS, type_colour

NASTY = "<img src=x onerror='alert(1)'>&amp;\x00\ud800"


def busy(names=None):
    at = world(3, names)
    own(at, 1, "0.2", "Linear")
    use(at, 0, "0.3", "0.2", 1)
    use(at, 2, "0.4", "0.2", 1, "pending", parent=0)
    use(at, 3, "0.5", "0.2", 1, "deleting")
    own(at, 2, "0.9", failed=True)
    record(at, 1 << 48, [(1, 1, 2), (2, 2, 3)], {0: 0, 1: 4, 2: 4, 3: 2})
    run_backward(at, 1 << 48, "1.0", 2, 8, 2)
    gpipe(at, 4, 3, 4, 100.0)
    send(at, 0, 1, "Call", 5.0, took=0.5, call=1, label="train")
    send(at, 0, 2, "Call", 5.1, took=0.1, call=2, label="train")
    send(at, 2, 2, "Call", 5.3, call=2)
    send(at, 1, 0, "Result", 5.9, took=None, call=1)
    send(at, 1, 0, "Notice", 5.95)
    return at


def still(name, at):
    return Snapshot(PANELS[name].look(at))


def shapes(svg, name):
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def words(svg):
    return [text.text for text in shapes(svg, "text")]


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.parametrize("names", [None, ["notebook", NASTY, "</svg><script>", "a" * 300]])
def test_it_is_one_whole_picture_without_scripts_or_addresses(name, names):
    made = still(name, busy(names))
    assert shapes(made.svg, "script") == shapes(made.svg, "img") == shapes(made.svg, "image") == []
    assert "http" not in made.svg.replace('xmlns="http://www.w3.org/2000/svg"', "") and "url(" not in made.svg
    assert not re.search(r"<[^>]*\son\w+=", made.svg)
    assert all(int(size) >= 13 for size in re.findall(r"font[^;}]*?(\d+)px", made.svg)), "large enough to read"
    assert made.html.count("<") == 1 and "prefers-color-scheme:dark" in made.svg
    image = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', made.html)
    assert base64.b64decode(image[1]).decode() == made.svg


@pytest.mark.parametrize("name", PANELS)
def test_an_empty_world_has_a_picture_too(name):
    assert words(still(name, world(2)).svg) and words(still(name, {}).svg)


def test_a_mark_for_each_owner_and_holder():
    made = still("rrefs", busy())
    view = PANELS["rrefs"].look(busy())
    assert len(shapes(made.svg, "circle")) == len(view["forks"]) == 3
    squares = [shape for shape in shapes(made.svg, "rect") if shape.get("width") == "14"]
    assert [square.get("class") for square in squares] == ["f-teal", "f-red"]
    assert "0.2" in words(made.svg) and "failed" in words(made.svg)


def test_a_block_for_each_operation_in_its_lane():
    made = still("pipeline", busy())
    blocks = [shape for shape in shapes(made.svg, "rect") if shape.get("class") in ("f-blue", "f-amber")]
    assert len(blocks) == 3 * 8 and len({block.get("y") for block in blocks}) == 3
    assert {"F0", "B3", "worker3"} <= {*words(made.svg)}


def test_the_still_of_a_pipeline_is_of_the_last_finished_step():
    at = world(2)
    end = gpipe(at, 1, 2, 4, 10.0)
    gpipe(at, 2, 2, 4, end + 0.01, until=end + 0.02)
    assert any(word.startswith("step 1 (complete)") and "bubble" in word for word in words(still("pipeline", at).svg))
    assert any(word.startswith("step 2 (running)") for word in words(still("pipeline", running_alone()).svg))


def running_alone():
    at = world(2)
    gpipe(at, 2, 2, 4, 10.0, until=10.02)
    return at


def test_a_row_for_each_worker_in_words_and_bars():
    at = world(3)
    tell(at, 0)
    tell(at, 1, cells=1, busy=2, waiting=3, queued=4, cpu=0.5, peers={"0": [3_000_000, 1_500_000]})
    tell(at, 2, busy=9)
    at[3]["state"] = "lost"
    launch(at, 1, log="first\nlast words")
    launch(at, 3, state="killed by SIGKILL")
    ask(at, "restart", "worker3", error="RuntimeError: no way")
    made = still("workers", at)
    said = words(made.svg)
    assert {"notebook", "worker1", "runs a cell", "50 %", "20.0 MB", "4", "↑ 3.0 MB ↓ 1.5 MB", "last words"} <= {*said}
    assert {"idle", "runs a call", "lost: killed by SIGKILL", "restart worker3 failed: RuntimeError: no way"} <= {*said}
    assert "first" not in said
    squares = [shape.get("class") for shape in shapes(made.svg, "rect") if shape.get("width") == "8"]
    assert (squares.count("f-green"), squares.count("line s-green")) == (2 + 6, 2) and "+3" in said
    halves = [shape.get("width") for shape in shapes(made.svg, "rect") if shape.get("class") == "f-blue"]
    assert "20" in halves, "half of a bar for half of a core"


def test_links_and_counts_of_a_context():
    made = still("autograd", busy())
    assert words(made.svg).count("1 sent, 1 received") == 2 and words(made.svg).count("4 gradients") == 2
    assert words(made.svg).count("Linear, Relu") == 2 and words(made.svg).count("1 gradient back") == 1
    assert str(1 << 48) in words(made.svg)


def test_messages_in_their_order_slope_where_something_came_between():
    made = still("messages", busy())
    lines = [shape for shape in shapes(made.svg, "line") if "line" in shape.get("class").split()]
    level = [shape.get("y1") == shape.get("y2") for shape in lines]
    assert level == [False, True, True] and "dashed" in lines[2].get("class")
    assert "result of train" in words(made.svg) and "in flight" in words(made.svg) and "Notice" not in words(made.svg)


def test_of_many_the_first_are_drawn_and_the_others_counted():
    at = world(2)
    for n in range(200):
        own(at, 1, f"0.{n}")
        send(at, 0, 1, "Call", float(n))
    for name in ("rrefs", "messages"):
        assert f"… and {200 - stills.MOST} more, not drawn" in words(still(name, at).svg)


def test_what_has_no_drawing_is_shown_in_words(monkeypatch):
    monkeypatch.delitem(stills._DRAWINGS, "rrefs")
    made = still("rrefs", busy())
    assert [line for line in words(made.svg) if line in made.text.splitlines()] == made.text.splitlines()


def test_a_snapshot_is_saved_as_a_page_or_a_picture(tmp_path):
    made = still("rrefs", busy())
    assert made.save(tmp_path / "a.svg").read_text() == made.svg
    assert made.html in made.save(tmp_path / "a.html").read_text()
    with pytest.raises(ValueError, match=r"saved as \.svg or \.html"):
        made.save(tmp_path / "a.png")


def test_types_of_lessons_and_pipelines_have_colours_of_their_own():
    common = ["Tensor (N=2)", "StageWorker", "LocalOptimizer", "list", "Sequential", "Linear"]
    assert [type_colour(each) for each in common] == [*TYPE_COLOURS]


def test_colours_are_those_of_the_live_panels():
    css = (base._HERE / "common.css").read_text()
    light, dark = css.partition("@media")[0].split("[data-jp-theme-light")
    for colours, rules in ((charts.LIGHT, light), (charts.DARK, light + dark)):
        live = dict(re.findall(r"--rb-([a-z-]+): (?:var\([^,]+, )?(#[0-9a-f]{6})", rules))
        assert {name: live[name] for name in colours} == colours


@pytest.mark.process
@pytest.mark.parametrize("end", ["c.shutdown()", *long("pass")])
def test_below_a_panel_stands_its_last_picture_in_a_notebook_that_ran_without_a_browser(end):
    cells = [
        "import rpcbench\nfrom rpcbench import rpc\nc = rpcbench.Cluster(1, grace=60)\nrpcbench.panel('rrefs')",
        "r = rpc.remote('worker1', int)\nr.to_here()",
        end,
        "c.shutdown()",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    NotebookClient(book, timeout=120, config=addresses.kernel_config()).execute()
    live, still = book.cells[0].outputs
    assert "application/vnd.jupyter.widget-view+json" in live["data"] and "text/html" not in live["data"]
    image = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', still["data"]["text/html"])
    assert "1 RRef, 1 fork" in base64.b64decode(image[1]).decode(), "as it was when the cluster was stopped"
    assert [len(cell.outputs) for cell in book.cells[1:]] == [1, 0, 0]


@pytest.mark.long
@pytest.mark.process
def test_it_is_in_a_notebook_that_ran_without_a_browser():
    begin = "import rpcbench\nfrom rpcbench import rpc\nc = rpcbench.Cluster(1)"
    made = f"{begin}\nr = rpc.remote('worker1', int)\nr.to_here()"
    code = f"{made}\ntry:\n    s = rpcbench.panel('rrefs').snapshot()\nfinally:\n    c.shutdown()\ns"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(book, timeout=120, config=addresses.kernel_config()).execute()
    (output,) = book.cells[0].outputs
    assert output["data"]["text/plain"].startswith("2 members, 1 RRef, 1 fork\n")
    assert output["data"]["text/html"].startswith("<img alt=")
