"""A record as a page of its own: what it draws is what the views say, escaped, bounded, and nothing is fetched."""

from __future__ import annotations

import copy
import json
import re

import nbformat
import pytest
from nbclient import NotebookClient
from pictures import own, send, use, world

from benchmarks.panel_frames import CHROMIUM, FLAGS
from rpcbench.panels import PANELS, replay
from rpcbench.telemetry.recording import FORMAT, VERSION, Player, Record, flatten_world
from rpcbench.telemetry.views import diff_views, patch_view

NASTY = "</script><img src=x onerror='parent.hit = 1'>&lt;\u2028"


def recorded(*changes, names=()):
    """A record with a frame after each change."""
    at, frames, before = world(2), [], {}
    for member in at.values():
        member["epoch"] = 1e9  # when its clock was 0
    for n, change in enumerate(changes):
        change(at)
        sections = copy.deepcopy(flatten_world(at))  # rows of a real world never change
        frames.append((n / 2, diff_views(before, sections), names[n] if n < len(names) else ""))
        before = sections
    return Record({"format": FORMAT, "version": VERSION, "holds": {}, "leaves_out": []}, tuple(frames))


@pytest.fixture
def record():
    return recorded(
        lambda at: None,
        lambda at: own(at, 1, "0.1", NASTY),
        lambda at: use(at, 0, "0.2", "0.1", 1),
        lambda at: send(at, 0, 1, "Call", 5.0, label=NASTY),
        lambda at: own(at, 2, "0.3"),
        names=["begin", "", NASTY],
    )


@pytest.mark.parametrize("name", PANELS)
def test_each_frame_has_the_view_of_that_frame(record, name):
    played, player, view = replay.playback_data(record, PANELS[name]), Player(record), {}
    assert (played["seconds"], played["note"]) == (2.0, "")
    for at, frame in enumerate(json.loads(json.dumps(played))["frames"]):
        player.go_to_frame(at)
        view = patch_view(view, frame["delta"])
        assert view == json.loads(json.dumps(PANELS[name].look(player.world())))
        assert (frame["time"], frame["name"]) == (at / 2, record.frames[at][2])
    assert at == 4


@pytest.mark.parametrize("name", PANELS)
def test_what_workers_say_is_no_markup(record, name):
    made = replay.html_page(record, PANELS[name])
    data = re.search(r'id="record">(.*?)</script>', made)[1]
    assert "<" not in data and json.loads(data) == json.loads(json.dumps(replay.playback_data(record, PANELS[name])))
    assert made.count("</script>") == 2 and "onerror" not in made.replace(data, "")
    assert re.findall(r"https?://[^\s\"']+", made) == ["http://www.w3.org/2000/svg"]
    inside = replay.folded_page(record, PANELS[name])
    assert inside.count("<iframe") == 1 and 'sandbox="allow-scripts"' in inside and "<img" not in inside


def test_a_long_record_leaves_frames_out_but_none_with_a_name(monkeypatch):
    changes = [lambda at, n=n: own(at, 1, f"0.{n}") for n in range(100)]
    long = recorded(*changes, names=[f"mark {n}" if n in (7, 41) else "" for n in range(100)])
    monkeypatch.setattr(replay, "MOST_FRAMES", 10)
    played = replay.playback_data(long, PANELS["rrefs"])
    assert {"mark 7", "mark 41", ""} == {frame["name"] for frame in played["frames"]}
    assert len(played["frames"]) == 13 and played["note"].startswith("87 of 100 frames are left out")
    assert len(played["frames"][-1]["delta"]["rrefs"]["set"]) > 0 and played["frames"][-1]["time"] == 49.5
    monkeypatch.setattr(replay, "MOST_BYTES", 5000)
    shorter = replay.playback_data(long, PANELS["rrefs"])
    assert 1 <= len(shorter["frames"]) < 13 and len(json.dumps(shorter)) < 8000


def test_a_record_of_many_rows_has_fewer_frames(monkeypatch):
    changes = [lambda at, n=n: own(at, 1, f"0.{n}") for n in range(60)]
    monkeypatch.setattr(replay, "MOST_ROWS", 300)
    assert len(replay.playback_data(recorded(*changes), PANELS["rrefs"])["frames"]) <= 6


def test_an_empty_record_is_a_page_too():
    played = replay.playback_data(Record({}, ()), PANELS["rrefs"])
    assert [frame["name"] for frame in played["frames"]] == ["empty"]


DRAWN = "all => all.map(one => [one.dataset.rref, one.dataset.owner, one.querySelector('.rb-kind').textContent])"


@pytest.mark.long
@pytest.mark.browser
@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_static_page_of_a_notebook_plays_it_without_a_kernel(record, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    nbconvert = pytest.importorskip("nbconvert", reason="needs nbconvert")
    file = record.save(tmp_path / "lesson.json")
    code = f"import rpcbench\nplayer = rpcbench.replay({str(file)!r}, 'rrefs')\nplayer"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    NotebookClient(notebook, kernel_name="python3").execute()
    html, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    (tmp_path / "book.html").write_text(html, encoding="utf-8")
    wrong, asked = [], []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        book = browser.new_page(viewport={"width": 1000, "height": 900})
        book.route(re.compile("^https?:"), lambda route: route.abort_step())  # what nbconvert's own page asks for
        book.on("pageerror", lambda error: wrong.append(str(error)))
        book.on("request", lambda request: asked.append(request.url) if request.frame.parent_frame else None)
        book.goto((tmp_path / "book.html").as_uri(), wait_until="domcontentloaded")
        inside = book.frame_locator("iframe")
        rows, step = inside.locator("[data-rref]"), inside.get_by_role("button", name="Step", exact=True)
        inside.get_by_text("2.00 s of 2.00 s").wait_for()  # the last frame, as nobody plays it
        rows.nth(1).wait_for()
        inside.get_by_role("slider").fill("0")
        inside.get_by_text("0.00 s of 2.00 s, begin").wait_for()
        inside.get_by_text("Nothing is here at this moment of the record.").wait_for()
        assert inside.locator(".rb-chip").inner_text() == "Record" and not inside.locator(".rb-camera").is_visible()
        step.click()
        rows.first.wait_for()
        assert rows.evaluate_all(DRAWN)[0][:2] == ["0.1", "1"]
        assert inside.locator(".rb-age").count() == 0  # it would be that of the day when the page is read
        inside.get_by_role("button", name="Play", exact=True).click()
        rows.nth(1).wait_for()
        inside.get_by_text("2.00 s of 2.00 s").wait_for()
        inside.locator("[data-rref='0.3']").wait_for()  # drawn with the next frame of the browser
        assert [row[:2] for row in rows.evaluate_all(DRAWN)] == [["0.1", "1"], ["0.3", "2"]]
        inside.get_by_role("slider").fill("0")
        rows.first.wait_for(state="detached")
        assert book.evaluate("window.hit") is None and inside.locator("img").count() == 0
        browser.close()
    assert [url for url in asked if not url.startswith(("about:srcdoc", "data:"))] == []
    assert [error for error in wrong if "require" not in error] == []  # nbconvert's own page wants its loader
