"""Still pictures: drawn by the panels' code where no browser is, and safe and readable wherever they are shown."""

from __future__ import annotations

import base64
import re
from collections import Counter
from xml.etree import ElementTree

import addresses
import nbformat
import pytest
from nbclient import NotebookClient
from pictures import (
    ask,
    compare,
    gpipe,
    launch,
    meet,
    own,
    record,
    run_backward,
    send,
    shard,
    tell,
    use,
    value,
    watch,
    world,
)
from shown import busy_world
from sizes import long

from rpcbench.base import charts
from rpcbench.panels import PANELS
from rpcbench.telemetry import svg
from rpcbench.telemetry.drawing import package_text
from rpcbench.telemetry.svg import Snapshot

pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
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


def elements(made, kind):
    """The elements with all these classes."""
    found = ElementTree.fromstring(made.svg).iter()
    return [one for one in found if set(kind.split()) <= set(one.get("class", "").split())]


def words(made):
    root = ElementTree.fromstring(made.svg)
    said = " ".join(text for child in root if "foreignObject" in child.tag for text in child.itertext())
    return re.sub(r"\s+", " ", said)


@pytest.mark.parametrize("name", PANELS)
@pytest.mark.parametrize("names", [None, ["notebook", NASTY, "</svg><script>", "a" * 300]])
def test_it_is_one_whole_picture_without_scripts_or_addresses(name, names):
    made = still(name, busy(names))
    tags = {one.tag.partition("}")[2] for one in ElementTree.fromstring(made.svg).iter()}
    assert not tags & {"script", "img", "image", "a", "button", "input", "select"}
    assert not re.search(r"https?:(?!//www\.w3\.org/(2000/svg|1999/xhtml)\")", made.svg) and "url(" not in made.svg
    assert not re.search(r"<[^>]*\son\w+=", made.svg)
    assert all(int(size) >= 13 for size in re.findall(r"font[^;}]*?(\d+)px", made.svg)), "large enough to read"
    assert made.html.count("<") == 1 and "prefers-color-scheme: dark" in made.svg
    image = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', made.html)
    assert base64.b64decode(image[1]).decode() == made.svg


@pytest.mark.parametrize("name", PANELS)
def test_an_empty_world_has_a_picture_too(name):
    assert made_of(name) in words(still(name, world(2))) and made_of(name) in words(still(name, {}))


def made_of(name):
    titles = {"rrefs": "RRefs", "autograd": "Autograd contexts", "shards": "Sharding", "compare": "Comparison"}
    return titles.get(name, name.capitalize())


def test_workers_and_what_they_do():
    at = world(3)
    tell(at, 0)
    tell(at, 1, cells=1, busy=2, waiting=3, queued=4, cpu=0.5, peers={"0": [3_000_000, 1_500_000]})
    launch(at, 1, log="first\nlast words")
    launch(at, 3, state="killed by SIGKILL")
    at[3]["state"] = "lost"
    ask(at, "restart", "worker3", error="RuntimeError: no way")
    made = still("workers", at)
    said = ("worker1", "process 101", "runs a cell", "50 %", "20.0 MB", "↑ 3.0 MB ↓ 1.5 MB", "last words", "no way")
    assert [one for one in said if one not in words(made)] == [] and "first" not in words(made)
    assert len(elements(made, "rb-squares")) == 1, "of the worker whose threads are busy"


def test_rrefs_links_of_contexts_and_steps():
    made = still("rrefs", busy())
    assert len(elements(made, "rb-row")) == 2 and len(elements(made, "rb-owner rb-failed")) == 1
    made = still("autograd", busy())
    assert str(1 << 48) in words(made) and len(elements(made, "rb-message")) == 2
    made = still("pipeline", busy())
    assert len(elements(made, "rb-op rb-ended")) == 3 * 8 and "Bubble 41 %, minimum 33 %" in words(made)


def test_each_context_and_each_model_is_drawn():
    at = world(3)
    for n in range(3):
        record(at, (1 << 48) + n, [(1, 1, 2)], {0: 0, 1: 4, 2: 4})
    watch(at, 1, 0, 1, model="one")
    watch(at, 2, 0, 1, model="two")
    assert len(elements(still("autograd", at), "rb-message")) == 3
    assert {"one", "two"} <= set(words(still("shards", at)).split())


def test_messages_in_their_order_and_the_last_of_a_collective():
    at = busy()
    made = still("messages", at)
    assert len(elements(made, "rb-message rb-is-received")) == 3 and len(elements(made, "rb-is-under-way")) == 2
    assert "result of train" in words(made) and "in flight" in words(made) and "Notice" not in made.svg
    meet(at, 1, {1: 6.0, 2: 6.5, 3: 6.2}, 7.0)
    made = still("messages", at)
    assert len(elements(made, "rb-dot")) == 3 + 2 and len(elements(made, "rb-dot rb-last")) == 1 + 1, "and the legend's"


def test_of_a_comparison_the_rows_around_the_first_difference_are_drawn_and_its_step_is_named():
    at = world(2)
    values = [value("forward", f"blocks.{n}", "wrong" if n > 92 else "right", step=1) for n in range(120)]
    compare(at, *values, first="93")
    made = still("compare", at)
    assert len(elements(made, "rb-square rb-first")) == 1 and len(elements(made, "rb-row")) == 46
    assert "value (rows 73 to 118 of 122)" in words(made) and "step 1: has the first difference" in words(made)


def test_of_many_the_first_are_drawn():
    at = world(2)
    for n in range(200):
        send(at, 0, 1, "Call", float(n))
        shard(at, 1, f"model/p{n}", n, [4], [0], [4], [])
    made = still("messages", at)
    assert "the rest is not drawn" in words(made) and 50 < len(elements(made, "rb-message")) < 90
    watch(at, 1, 0, 1, parameters=200)
    assert "… and 142 more, not drawn" in words(still("shards", at)), "of these and two of the model"


@pytest.mark.parametrize("name", PANELS)
def test_it_is_as_high_as_a_browser_needs(page, name):
    several = world(3)
    for n in range(3):
        record(several, (1 << 48) + n, [(1, 1, 2)], {0: 0, 1: 4, 2: 4})
    for at in (busy(), busy_world(), world(20), several):
        made = still(name, at)
        page.set_content(f'<body style="margin:0">{made.svg}')
        height, needed = page.evaluate(
            "[document.querySelector('svg').height.baseVal.value,"
            " [...document.querySelectorAll('.rb-panel')].at(-1).getBoundingClientRect().bottom]"
        )
        assert needed <= height <= needed + 40


@pytest.mark.parametrize("name", ["rrefs", "autograd", "pipeline", "messages"])
def test_it_has_the_texts_of_the_live_panel(show, page, name):
    show(name, world(1))
    more = page.evaluate("document.querySelector('.rb-body').clientWidth - 800")
    page.evaluate("more => { document.body.style.marginRight = `${8 + more}px`; }", more)
    shown = show(name, busy_world())
    picture = next(one for one in elements(still(name, busy_world()), "rb-picture"))
    texts = ["".join(one.itertext()) for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    live = shown.page.locator(".rb-picture text").all_text_contents()
    assert Counter(one.strip() for one in texts) == Counter(one.strip() for one in live)


def test_without_the_engine_it_is_its_text(monkeypatch):
    monkeypatch.setattr(svg, "find_engine", lambda: None)
    made = still("rrefs", busy())
    lines = [text.text for text in ElementTree.fromstring(made.svg).iter("{http://www.w3.org/2000/svg}text")]
    assert lines[1:] == made.text.splitlines() and "needs quickjs-ng" in lines[0]


def test_a_snapshot_is_saved_as_a_page_or_a_picture(tmp_path):
    made = still("rrefs", busy())
    assert made.save(tmp_path / "a.svg").read_text() == made.svg
    assert made.html in made.save(tmp_path / "a.html").read_text()
    with pytest.raises(ValueError, match=r"saved as \.svg or \.html"):
        made.save(tmp_path / "a.png")


def test_the_colours_of_charts_are_those_of_the_panels():
    css = package_text("common", ".css")
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
