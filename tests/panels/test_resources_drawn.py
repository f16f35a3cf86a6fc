"""The panels of resources and of traffic in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

import pytest
from pictures import flow, sample, world

from rpcbench.panels import PANELS
from rpcbench.telemetry.svg import Snapshot

pytestmark = pytest.mark.browser

AT = 1_800_000_000
MODE, SPAN = "How members are drawn", "Minutes that are shown"


def busy(seconds=60, members=3):
    """A minute of figures; worker2 has none after half of it, and then worker1 is started again."""
    at = world(members)
    for second in range(seconds):
        there = [i for i in range(members + 1) if i != 2 or second < seconds // 2]
        cpu = {i: 0.25 * i for i in there}
        sample(at, AT + second, cpu, began=(1,) if second == seconds // 2 + 5 else ())
        if second % 5 == 4:
            sample(at, AT + second, cpu, step=5)
    at[2]["state"] = "lost"
    return at


def table(shown):
    """The words of the table by the name of a row."""
    rows = shown.page.locator(".rb-resources tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


def test_charts_and_table_have_the_figures(show):
    shown = show("resources", busy())
    titles = shown.texts(".rb-chart > .rb-name")
    assert titles == ["CPU", "memory", "bytes/s"]
    assert table(shown) == {
        "all": ["100 %", "900 MB", "7.0 MB/s"], "notebook": ["0 %", "300 MB", "1.0 MB/s"],
        "worker1": ["25 %", "300 MB", "2.0 MB/s"], "worker2": ["\N{EN DASH}"] * 3,
        "worker3": ["75 %", "300 MB", "4.0 MB/s"],
    }  # fmt: skip
    assert shown.texts(".rb-stat") == ["2 ready", "1 lost"]
    assert shown.count(".rb-chart .rb-began") == shown.count(".rb-chart .rb-lost") == 3
    assert "worker1 was started again before" in shown.texts(".rb-began title")[0]
    assert shown.count(".rb-of-cpu .rb-limit") == 1, "four cores are near 150 %"
    assert shown.count(".rb-of-bytes .rb-limit") == 0
    assert "100 % of 400 %, at most 150 %" in shown.texts(".rb-of-cpu .rb-note")
    assert "CPU 100 %" in shown.page.locator(".rb-picture > desc").text_content()


def test_one_control_draws_a_line_for_each_member(show):
    shown = show("resources", busy())
    assert shown.count(".rb-of-cpu.rb-is-stack path.rb-member") == 3, "the notebook needs no CPU"
    shown.page.get_by_label(MODE).select_option("lines")
    shown.page.evaluate("drawn()")
    lines = shown.page.locator(".rb-of-cpu.rb-is-lines path.rb-member").all()
    assert len(lines) == 4 and shown.count(".rb-limit") == 0
    ends = [float(line.get_attribute("d").rpartition("L")[2].split()[0]) for line in lines]
    assert ends[2] < ends[1] == ends[3], "that of the lost worker ends"


def test_the_row_under_the_pointer_marks_its_member(show):
    shown = show("resources", busy())
    shown.page.locator("tr[data-member='3']").hover()
    lit = "all => all.map(one => one.dataset.member)"
    assert shown.page.eval_on_selector_all(".rb-lit", lit) == ["3"] * 3
    shown.move(busy(59))
    assert shown.page.eval_on_selector_all(".rb-lit", lit) == ["3"] * 3, "also in the next picture"
    shown.page.mouse.move(2, 2)
    assert shown.page.eval_on_selector_all(".rb-lit", lit) == []


def test_the_window_and_a_gap_in_it(show):
    at = busy()
    for second in range(100, 130):
        sample(at, AT + second, {1: 1.0}, step=5 if second % 5 == 4 else 1)
    shown = show("resources", at)
    shown.page.get_by_label(SPAN).select_option("5")
    shown.page.evaluate("drawn()")
    path = shown.page.locator(".rb-of-cpu path.rb-member[data-member='1']").get_attribute("d")
    assert path.count("M") == path.count("Z") == 2
    assert "\N{MINUS SIGN}4 min" in shown.texts(".rb-of-cpu .rb-note")
    shown.page.get_by_label(SPAN).select_option("1")
    shown.page.evaluate("drawn()")
    assert "\N{MINUS SIGN}45 s" in shown.texts(".rb-of-cpu .rb-note")


def test_keys_move_through_time_and_escape_follows_the_latest(show):
    shown = show("resources", busy())
    body = shown.page.locator(".rb-body")
    time = shown.page.locator(".rb-time")
    assert time.inner_text().startswith("latest, ")
    body.focus()
    body.press("ArrowLeft")
    shown.page.evaluate("drawn()")
    assert time.inner_text().endswith(", 1 s before") and shown.count(".rb-cursor line") == 3
    body.press("Home")
    shown.page.evaluate("drawn()")
    assert table(shown)["worker2"][0] == "50 %" and time.inner_text().endswith(", 59 s before")
    assert "CPU 150 %" in shown.page.locator("[role=status]").last.inner_text()
    at = busy()
    for second in range(60, 63):
        sample(at, AT + second, {1: 1.0})
    shown.move(at)
    assert time.inner_text().startswith("latest"), "the time that was read has left the picture"
    body.press("End")
    body.press("Escape")
    shown.page.evaluate("drawn()")
    assert time.inner_text().startswith("latest") and shown.count(".rb-cursor line") == 0


def test_the_pointer_reads_and_a_click_keeps(show):
    shown = show("resources", busy())
    chart = shown.page.locator(".rb-of-cpu .rb-ground")
    time = shown.page.locator(".rb-time")
    box = chart.bounding_box()
    at = (box["x"] + box["width"] / 2, box["y"] + 20)
    shown.page.mouse.move(*at)
    shown.page.evaluate("drawn()")
    assert time.inner_text().endswith("30 s before")
    shown.page.mouse.click(*at)
    shown.page.mouse.move(2, 2)
    shown.page.evaluate("drawn()")
    assert time.inner_text().endswith("30 s before")
    shown.page.mouse.click(*at)
    shown.page.mouse.move(2, 2)
    shown.page.evaluate("drawn()")
    assert time.inner_text().startswith("latest")


@pytest.mark.parametrize("name", ["resources", "traffic"])
@pytest.mark.parametrize("members", [1, 3, 16, 64])
@pytest.mark.parametrize("width", [370, 700, 1100])
def test_any_number_of_members_at_any_width(show, page, name, members, width):
    at = busy(20, members) if members > 1 else world(1)
    for i in range(members + 1):
        flow(at, i, {j: (j, 10 * j, 1000 * j, 0) for j in range(members + 1) if j != i})
        sample(at, AT + 30, dict.fromkeys(range(members + 1), 0.5))
    page.set_viewport_size({"width": width, "height": 700})
    shown = show(name, at)
    wide, room, tall = shown.page.eval_on_selector(
        ".rb-body", "body => [body.scrollWidth, body.clientWidth, body.clientHeight]"
    )
    page.set_viewport_size({"width": 1000, "height": 700})
    assert wide <= room or (name == "traffic" and members > 15), "many squares scroll"
    assert 80 < tall <= 460


# ---- traffic


def talk(silent=False):
    at = world(3)
    flow(at, 0, {1: (1_000_000, 500_000, 9_000_000, 8_100_000), 2: (0, 10_000, 20_000, 0)})
    flow(at, 1, {0: (2_000, 1_000, 50_000, 0)}, silent=silent)
    flow(at, 2, {3: (0, 0, 4_000, 0)}, host="another")
    return at


def words(shown):
    return shown.page.locator(".rb-traffic .rb-words p").all_inner_texts()


def test_squares_have_the_bytes_of_ten_seconds_and_edges_the_sums(show):
    shown = show("traffic", talk())
    assert shown.texts("[data-sender='0'] .rb-number") == ["500 kB/s", "10.0 kB/s"]
    assert [one[-1] for one in (shown.texts(f"[data-sender='{i}'] text") for i in range(4))] == [
        "510 kB/s", "1.0 kB/s", "0 B/s", "\N{EN DASH}",
    ]  # fmt: skip
    assert shown.texts(".rb-sums text") == ["all", "1.0 kB/s", "500 kB/s", "10.0 kB/s", "0 B/s", "511 kB/s"]
    opacities = [float(one.get_attribute("fill-opacity")) for one in shown.page.locator(".rb-rows .rb-square").all()]
    assert max(opacities) == 0.66 and len(opacities) == 3
    assert shown.texts(".rb-stat") == ["3 ready", "511 kB/s between all", "3 busy pairs"]
    assert words(shown)[0].startswith(
        "notebook → worker1: 1.0 MB/s in the last second, 500 kB/s in the last 10 s, 9.0 MB"
    )
    assert words(shown)[1] == "8.1 MB of it (90 %) through shared memory, the rest through a socket"


def test_the_select_chooses_the_time(show):
    shown = show("traffic", talk())
    select = shown.page.get_by_label("Time that is shown")
    select.select_option("0")
    shown.page.evaluate("drawn()")
    assert shown.texts("[data-sender='0'] .rb-number") == ["1.0 MB/s"]
    select.select_option("2")
    shown.page.evaluate("drawn()")
    assert shown.texts("[data-sender='0'] .rb-number") == ["9.0 MB", "20.0 kB"]
    assert shown.texts("[data-sender='2'] .rb-number") == ["4.0 kB"]


def test_keys_and_clicks_choose_a_pair(show):
    shown = show("traffic", talk(silent=True))
    body = shown.page.locator(".rb-body")
    body.focus()
    body.press("ArrowDown")  # from the busiest pair
    shown.page.evaluate("drawn()")
    assert words(shown) == ["worker1 sent 1.0 kB/s in the last 10 s", "worker1 was sent 500 kB/s in the last 10 s"]
    body.press("ArrowLeft")
    shown.page.evaluate("drawn()")
    assert words(shown)[0].startswith("worker1 → notebook: 2.0 kB/s")
    assert words(shown)[1:] == ["through a socket on one host", "worker1 has not answered of late: its figures are old"]
    assert shown.count(".rb-silent") == 1 and "no answer of late" in shown.texts(".rb-legend")[0]
    body.press("Escape")
    shown.page.evaluate("drawn()")
    assert words(shown)[0].startswith("notebook → worker1") and shown.count(".rb-ring rect") == 0
    grid = shown.page.locator("[data-sender='2'] .rb-ground").bounding_box()
    shown.page.mouse.click(grid["x"] + grid["width"] - 10, grid["y"] + 10)
    shown.page.evaluate("drawn()")
    assert words(shown)[0].startswith("worker2 → worker3: 0 B/s")
    assert shown.count(".rb-ring rect") == 1


def test_a_sender_that_has_not_reported_and_a_pair_that_sent_nothing(show):
    shown = show("traffic", talk())
    body = shown.page.locator(".rb-body")
    body.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        body.press(key)
    shown.page.evaluate("drawn()")
    assert words(shown) == ["worker3 has not reported yet"]
    body.press("ArrowUp")
    shown.page.evaluate("drawn()")
    assert words(shown) == ["worker2 has sent worker1 nothing"]


def test_before_anything_was_sent_it_says_what_sends(show):
    at = world(2)
    flow(at, 0, {})
    shown = show("traffic", at)
    assert "rpc.rpc_sync(" in shown.page.locator(".rb-hint").inner_text()


def test_stills_have_charts_and_squares():
    pytest.importorskip("quickjs", reason="needs quickjs-ng, which the extra `lab` installs")
    made = Snapshot({"workers": {}, "samples": {}})
    assert "Nothing is here" in made.svg
    at = busy()
    made = Snapshot(PANELS["resources"].look(at))
    assert made.svg.count("rb-chart rb-of-") == 3 and "at most 150 %" in made.svg and len(made.svg) < 60_000
    assert made.text.startswith("4 members, 72 samples in 60 s\n  CPU 100 % of 400 % (at most 150 %): worker3 75 %")
    made = Snapshot(PANELS["traffic"].look(talk()))
    assert "500 kB" in made.svg and "8.1 MB of it" in made.svg
