"""The pipeline panel in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pictures import gpipe, world
from shown import busy_world

from rpcbench.pipeline.timeline import trace

pytestmark = pytest.mark.browser

BLOCKS = ".rb-picture .rb-op:not(.rb-pale)"


def drawn(shown):
    shown.page.evaluate("drawn()")


def press(shown, name):
    shown.page.get_by_role("button", name=name).click()
    drawn(shown)


def slider(shown):
    return shown.page.get_by_label("Step shown")


def steps(shown):
    """The step in the head line, and what the slider says of itself."""
    return shown.texts(".rb-stat")[0].split()[1], slider(shown).get_attribute("aria-valuetext")


def ticks(shown):
    return shown.texts(".rb-top .rb-axis text")


def train(at, *numbers, start=0.0, workers=2, batches=4, loss=None):
    """Complete steps, one after the other; only the last four are kept, as by a view."""
    for number in numbers:
        start = gpipe(at, number, workers, batches, start) + 0.001
        for worker in range(1, workers + 1):
            tables = at[worker]["tables"]
            tables["steps"][f"s{number}.w{worker}"] |= {"samples": 64} | ({} if loss is None else {"loss": loss})
            for rows in (tables["ops"], tables["steps"]):
                for key in [key for key, row in rows.items() if row["step"] <= number - 4]:
                    del rows[key]
    return start


def evaluate(at, number, start):
    """A complete step of two workers that does not train."""
    gpipe(at, number, 2, 4, start)
    for worker in (1, 2):
        ops, part = at[worker]["tables"]["ops"], at[worker]["tables"]["steps"][f"s{number}.w{worker}"]
        part |= {"ideal": None, "plan": part["plan"][:4]}
        for key in [key for key, row in ops.items() if row["step"] == number and row["op"] == "B"]:
            del ops[key]


# ---- which step


def test_the_last_finished_step_is_shown_and_the_running_one_on_request(show):
    shown = show("pipeline", busy_world())  # step 4 is complete, step 5 runs
    for step, finished in ((4, True), (5, False), (4, True)):
        ops = [op for op in shown.view["ops"].values() if op["step"] == step]
        for kind in "FB":
            assert shown.count(f"{BLOCKS}.rb-op-{kind}") == sum(op["op"] == kind for op in ops) > 0
        assert shown.count(".rb-runs") == sum(op["end"] is None for op in ops)
        assert (shown.count(".rb-pale") == 0) == finished
        assert (shown.count(".rb-front:not([style])") == 0) == finished
        assert shown.texts(".rb-stat")[0] == f"step {step} {'finished' if finished else ''}"
        assert "of all pipelines" in str(shown.page.locator(".rb-stat").first.get_attribute("title"))
        assert shown.count(".rb-lane") == 3
        press(shown, "Live cursor")


def test_evaluation_does_not_displace_the_step_that_trained_last(show):
    at = world(2)
    end = train(at, 1, 2)
    shown = show("pipeline", at)
    for number in range(3, 9):
        evaluate(at, number, end)
        end += 0.1
        shown.move(at)
        assert shown.texts(".rb-stat")[0] == "step 2 finished"
    slider(shown).press("End")
    drawn(shown)
    assert shown.texts(".rb-stat")[0] == "step 8 evaluation"


def test_the_slider_goes_back_by_keys_and_stays_there_until_it_follows_again(show):
    at = world(2)
    end = train(at, 1, 2)
    shown = show("pipeline", at)
    for number in range(3, 9):
        end = train(at, number, start=end)
        shown.move(at)
    assert steps(shown) == ("8", "step 8, latest")
    slider(shown).press("ArrowLeft")
    slider(shown).press("ArrowLeft")
    drawn(shown)
    assert steps(shown) == ("6", "step 6")
    blocks = "[data-op^='s6.']"
    assert shown.count(blocks) == shown.count(BLOCKS) == 16
    for number in range(9, 14):
        end = train(at, number, start=end)
        shown.move(at)
    assert steps(shown) == ("6", "step 6")
    assert shown.count(blocks) == 16, "a step that is looked at stays, though the runtime has dropped it"
    slider(shown).press("End")
    drawn(shown)
    assert steps(shown) == ("13", "step 13, latest")
    slider(shown).press("Home")
    drawn(shown)
    assert steps(shown) == ("1", "step 1")
    shown.page.get_by_role("button", name="Latest").press("Enter")
    drawn(shown)
    train(at, 14, start=end)
    shown.move(at)
    assert steps(shown) == ("14", "step 14, latest")


def test_one_step_alone_has_no_slider(show):
    at = world(2)
    train(at, 1)
    shown = show("pipeline", at)
    assert not slider(shown).is_visible()
    shown.move(world(2))
    assert shown.page.locator(".rb-hint").is_visible() and not shown.page.locator(".rb-bar").is_visible()


def test_a_step_whose_end_was_not_seen_is_not_kept(show):
    at = world(2)
    gpipe(at, 1, 2, 4, 0.0, until=0.02)
    shown = show("pipeline", at)
    assert shown.texts(".rb-stat")[:2] == ["step 1 ", "19 ms so far"]
    late = world(2)
    train(late, 7, 8, start=1.0)
    shown.move(late)
    slider(shown).press("Home")
    drawn(shown)
    assert steps(shown) == ("7", "step 7")


# ---- the picture


def test_blocks_stand_in_their_lane_at_their_time_and_the_step_fills_the_width(show):
    at = world(2)
    end = gpipe(at, 0, 2, 4, 10.0)
    shown = show("pipeline", at)
    boxes = {}
    for block in shown.page.locator(BLOCKS).all():
        words = block.locator("title").text_content()
        boxes[words.split(",")[0] + words.split(",")[1]] = block.locator("rect").bounding_box()
    first, second = boxes["forward of micro-batch 0 stage 0"], boxes["forward of micro-batch 1 stage 0"]
    other = boxes["forward of micro-batch 0 stage 1"]
    back = boxes["backward of micro-batch 0 stage 0"]
    assert first["y"] == second["y"] < back["y"] < other["y"]
    assert first["y"] + first["height"] < back["y"] + back["height"] < other["y"]
    zero = shown.page.locator(".rb-picture .rb-axis line").first.bounding_box()["x"]
    assert first["x"] == pytest.approx(zero, abs=0.6)
    per_second = (second["x"] - first["x"]) / 0.003
    assert other["x"] - first["x"] == pytest.approx(0.0034 * per_second, abs=1)
    assert back["width"] - first["width"] == pytest.approx(0.002 * per_second, abs=1)
    ground = shown.page.locator(".rb-ground").bounding_box()
    assert ground["width"] == pytest.approx((end - 10.0) * per_second, abs=2)


def test_the_axis_keeps_its_scale_while_steps_come_and_then_fits_the_last_one(show):
    at = world(2)
    end = train(at, 1)
    shown = show("pipeline", at)
    opened, seen = ticks(shown), []
    held = "window.later = setTimeout; window.setTimeout = act => { window.due = act; return 0; }"
    shown.page.evaluate(f"() => {{ {held} }}")  # the axis fits a step that has been the last one for a while
    for number in range(2, 6):
        end = train(at, number, start=end)
        shown.move(at)
        assert shown.texts(".rb-stat")[0] == f"step {number} finished"
        seen.append(ticks(shown))
    assert seen == [seen[0]] * 4 and seen[0] != opened, "rounded up while steps come"
    shown.page.evaluate("() => { window.setTimeout = later; due(); }")
    at_rest = "wanted => document.querySelector('.rb-top').textContent === wanted"
    shown.page.wait_for_function(at_rest, arg="".join(opened))


def test_a_step_that_fills_keeps_the_scale_of_the_one_before(show):
    at = world(3)
    end = gpipe(at, 0, 3, 8, 0.0)
    shown = show("pipeline", at)
    press(shown, "Live cursor")
    seen = []
    for part in (0.01, 0.03, 0.06):
        gpipe(at, 1, 3, 8, end + 0.01, until=end + 0.01 + part)
        shown.move(at)
        assert shown.texts(".rb-stat")[0] == "step 1 "
        seen.append(ticks(shown))
    assert seen[0] == seen[1] == seen[2]


def test_a_running_row_says_what_it_waits_for_and_what_it_holds(show):
    at = world(2)
    gpipe(at, 1, 2, 4, 0.0, until=0.0145)  # the first stage has run all its forwards
    shown = show("pipeline", at)
    lane = shown.page.locator(".rb-lane[data-worker='1']")
    assert lane.get_attribute("data-next") == "0B0"
    assert lane.locator("text").all_text_contents()[1:3] == ["stage 0, waits for …", "peak 1.2 MB"]
    assert "stage 0, waits for B0" in lane.locator("title").text_content()
    assert "holds 1.2 MB, 1.2 MB at most" in lane.locator("title").text_content()
    assert shown.count(".rb-picture .rb-memory") == shown.count(".rb-picture .rb-waits") == 2
    assert "runs" in shown.page.locator(".rb-sentence").inner_text()


def test_a_failed_operation_and_those_of_other_schedules_are_told_apart(show):
    at = world(2)
    gpipe(at, 1, 2, 8, 0.0)
    rows = at[1]["tables"]["ops"]
    for key, (_, row) in zip("IWR?", list(rows.items()), strict=False):
        row["op"] = key
    rows["s1.w1.9"]["failed"] = True
    at[1]["tables"]["steps"]["s1.w1"]["state"] = "failed"
    shown = show("pipeline", at)
    for kind in ("I", "W", "R", "other"):
        assert shown.count(f".rb-picture .rb-op-{kind}") == 1
    kinds = ["Fforward", "Bbackward", "Iinput gradient", "Wweight gradients", "Rrecomputed forward", "?other"]
    assert shown.texts(".rb-legend > span")[:6] == kinds
    assert shown.texts("[data-op='s1.w1.9'] .rb-number") == ["!B1"]
    assert "failed after" in shown.page.locator("[data-op='s1.w1.9'] title").text_content()
    assert shown.texts(".rb-stat")[1].endswith("until it failed")
    for row in at[1]["tables"]["steps"].values(), at[2]["tables"]["steps"].values():
        for each in row:
            each["state"] = "interrupted"
    shown.move(at)
    assert shown.texts(".rb-stat")[1].endswith("until it was interrupted")
    assert shown.page.locator(".rb-sentence").inner_text() == "The step was interrupted: it has no bubble."


@pytest.mark.parametrize("workers", [2, 8, 16])
def test_labels_stand_within_their_blocks_at_any_size(show, workers):
    at = world(workers)
    train(at, 1, workers=workers, batches=24)
    shown = show("pipeline", at)
    for _ in range(4):
        overhang = shown.page.locator(BLOCKS).evaluate_all("""all => all.flatMap(one => {
          const [block, text] = ['rect', '.rb-number'].map(what => one.querySelector(what)?.getBoundingClientRect());
          const [left, right] = text ? [block.left - text.left, text.right - block.right] : [0, 0];
          return text ? [Math.max(left, right, text.height - block.height - 6)] : [];
        })""")
        assert max(overhang, default=0) <= 0
        press(shown, "Zoom in (+)")
    assert overhang or workers == 16


# ---- the bubble


def test_the_bubble_is_divided_by_its_causes_and_each_row_says_for_whom_it_waited(show):
    at = world(2)
    gpipe(at, 1, 2, 4, 0.0)
    for row in at[2]["tables"]["ops"].values():  # each backward of worker2 is twice as slow
        index = row["microbatch"]
        if row["op"] == "B":
            row["begin"], row["end"] = 0.02 + 0.01 * index, 0.03 + 0.01 * index
    for row in at[1]["tables"]["ops"].values():
        if row["op"] == "B":
            row["begin"] = 0.0305 + 0.01 * row["microbatch"]
            row["end"] = row["begin"] + 0.0048
    shown = show("pipeline", at)
    bubble = shown.view["steps"]["1"]["bubble"]
    words = shown.page.locator(".rb-sentence").inner_text()
    assert words.startswith(f"Bubble {100 * bubble:.0f} %, minimum 20 %: ")
    points = [int(part.split()[0]) for part in words.partition(": ")[2].split(", ")]
    assert sum(points) + 20 == round(100 * bubble) and "points waiting for worker2" in words
    first = shown.page.locator(".rb-lane[data-worker='1'] text").all_text_contents()
    busy = shown.view["lanes"]["1/1"]["busy"]
    assert f"{100 * busy:.0f} %" in first and any(text.endswith("% worker2") for text in first)
    assert words in shown.page.locator(".rb-picture > desc").text_content()


def test_a_row_and_the_sentence_name_the_same_worker_however_far_away(show):
    at = world(4)
    slow = {0: 0.003, 1: 0.009, 2: 0.003, 3: 0.003}
    ends = {}
    gpipe(at, 1, 4, 6, 0.0)
    rows = [row for worker in (1, 2, 3, 4) for row in at[worker]["tables"]["ops"].values()]
    clock = dict.fromkeys(slow, 0.0)
    order = {"F": lambda row: (row["microbatch"], row["stage"]), "B": lambda row: (row["microbatch"], -row["stage"])}
    for kind, before in (("F", -1), ("B", 1)):
        for row in sorted((row for row in rows if row["op"] == kind), key=order[kind]):
            stage, batch = row["stage"], row["microbatch"]
            row["begin"] = max(clock[stage], ends.get((kind, stage + before, batch), 0.0))
            row["end"] = clock[stage] = ends[kind, stage, batch] = row["begin"] + slow[stage] * (1 + (kind == "B"))
    shown = show("pipeline", at)
    assert "points waiting for worker2" in shown.page.locator(".rb-sentence").inner_text()
    notes = [shown.texts(f".rb-lane[data-worker='{worker}'] text.rb-note.rb-end") for worker in (1, 3, 4)]
    assert all(any(text.endswith("% worker2") for text in own) for own in notes), notes


def test_the_legend_names_what_is_drawn_and_nothing_else(show):
    at = world(2)
    end = gpipe(at, 1, 2, 4, 0.0)
    shown = show("pipeline", at)
    own = ["Fforward", "Bbackward", "waits", "activations held"]
    ideal = ["ideal: equal stages, free transfers", "end of the ideal"]
    assert shown.texts(".rb-legend > span") == own + ideal
    fills = "all => all.map(one => getComputedStyle(one).fill)"
    stripes = shown.page.locator(".rb-legend .rb-ghost path").evaluate_all(fills)
    assert stripes == shown.page.locator(".rb-picture .rb-ghost g:first-child path").evaluate_all(fills)
    press(shown, "Ideal")
    assert shown.texts(".rb-legend > span") == own
    gpipe(at, 2, 2, 4, end + 0.01, until=end + 0.04)
    shown.move(at)
    press(shown, "Live cursor")
    assert shown.texts(".rb-legend > span") == [*own, "now", "Fstill to come, as in the step before"]


def test_the_ideal_is_a_pale_row_beneath_each_lane_until_it_is_switched_off(show):
    at = world(2)
    gpipe(at, 1, 2, 4, 0.0)
    shown = show("pipeline", at)
    ghosts = ".rb-picture .rb-ghost path"
    assert shown.count(ghosts) == 4, "a path for each kind in each row"
    end = shown.page.locator(".rb-picture .rb-ideal-end").bounding_box()["x"]
    ground = shown.page.locator(".rb-ground").bounding_box()
    busy = sum(op["end"] - op["begin"] for op in shown.view["ops"].values())
    step = shown.view["steps"]["1"]
    share = busy / 2 / (1 - step["minimum"]) / (step["end"] - step["begin"])
    assert end - ground["x"] == pytest.approx(share * ground["width"], abs=2)
    press(shown, "Ideal")
    assert shown.count(ghosts) == 0 and not shown.page.locator(".rb-picture .rb-ideal-end").is_visible()


# ---- zoom, and one micro-batch


def test_zoom_by_keys_buttons_and_wheel_and_all_of_it_again(show):
    at = world(2)
    end = train(at, 1)
    shown = show("pipeline", at)
    whole = ticks(shown)
    body, place = shown.page.locator(".rb-body"), shown.page.locator(".rb-ground").bounding_box()
    middle = (place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)

    def scale():
        return shown.page.locator("[data-op='s1.w1.0'] rect").evaluate("one => Number(one.getAttribute('width'))")

    before = scale()
    body.press("+")
    drawn(shown)
    assert scale() == pytest.approx(1.5 * before, rel=0.1) and ticks(shown) != whole
    near = ticks(shown)
    body.press("ArrowRight")
    drawn(shown)
    assert ticks(shown) != near
    train(at, 2, start=end)
    shown.move(at)
    assert steps(shown) == ("1", "step 1"), "a step that is zoomed into stays"
    body.press("0")
    drawn(shown)
    assert steps(shown) == ("2", "step 2, latest")
    shown.page.mouse.move(*middle)
    shown.page.mouse.wheel(0, -200)
    drawn(shown)
    assert shown.count(".rb-zoomed") == 0, "the wheel alone scrolls the page"
    for modifier in ("Control", "Alt"):
        shown.page.keyboard.down(modifier)
        shown.page.mouse.wheel(0, -200)
        shown.page.keyboard.up(modifier)
        shown.page.locator(".rb-zoomed").wait_for()
        press(shown, "Fit")
        assert shown.count(".rb-zoomed") == 0
        shown.page.mouse.move(*middle)
    press(shown, "Zoom in (+)")
    near = ticks(shown)
    shown.page.mouse.move(*middle)
    shown.page.mouse.down()
    shown.page.mouse.move(middle[0] - 80, middle[1], steps=4)
    shown.page.mouse.up()
    drawn(shown)
    assert ticks(shown) != near and shown.count(".rb-on") == 0, "dragging moves, and is no click"


def test_one_micro_batch_is_lit_by_pointer_click_and_choice(show):
    at = world(3)
    train(at, 1, workers=3)
    shown = show("pipeline", at)
    lit, arrows = ".rb-blocks .rb-on", ".rb-flows .rb-flow"
    bubble = shown.page.locator(".rb-sentence").inner_text()
    block = shown.page.locator("[data-op='s1.w1.2']")  # F2
    block.hover()
    assert (shown.count(lit), shown.count(arrows)) == (6, 5)
    assert shown.page.locator(".rb-sentence").inner_text().startswith("Micro-batch 2: 6 operations in ")
    shown.page.mouse.move(2, 2)
    assert shown.count(lit) == shown.count(arrows) == 0
    assert shown.page.locator(".rb-sentence").inner_text() == bubble
    block.click()
    shown.page.mouse.move(2, 2)
    drawn(shown)
    choice = shown.page.get_by_label("Micro-batch", exact=True)
    assert (shown.count(lit), choice.input_value()) == (6, "2")
    assert "to the operation that uses its result" in shown.texts(".rb-legend > span")
    choice.select_option("3")
    drawn(shown)
    numbers = shown.page.locator(lit).evaluate_all("all => all.map(one => one.dataset.microbatch)")
    assert numbers == ["3"] * 6
    shown.page.locator(".rb-body").press("Escape")
    drawn(shown)
    assert shown.count(lit) == 0 and choice.input_value() == ""


def test_the_colour_is_that_of_the_kind_or_of_the_micro_batch(show):
    at = world(2)
    train(at, 1)
    shown = show("pipeline", at)

    def colours():
        return shown.page.locator(f"{BLOCKS} rect").evaluate_all("all => all.map(one => getComputedStyle(one).fill)")

    assert len(set(colours())) == 2
    shown.page.get_by_label("Colour").select_option("by micro-batch")
    drawn(shown)
    assert len(set(colours())) == 4
    assert "a colour for each micro-batch" in shown.texts(".rb-legend > span")


# ---- curves and files


def test_curves_show_the_steps_seen_and_a_click_opens_one(show):
    at = world(2)
    end = train(at, 1, loss=2.0)
    shown = show("pipeline", at)
    for number in range(2, 9):
        end = train(at, number, start=end, loss=2.0 / number)
        shown.move(at)
    assert shown.texts(".rb-line > text") == [
        "loss 0.500", f"step time {shown.texts('.rb-stat')[1].partition(' step time')[0]}",
        f"bubble {100 * shown.view['steps']['8']['bubble']:.0f} % ┄ minimum 20 %",
        f"samples/s {64 / (shown.view['steps']['8']['end'] - shown.view['steps']['7']['end']):,.0f}",
    ]  # fmt: skip
    assert "0.500 to 4.00 in 8 steps" in shown.page.locator(".rb-line").first.get_attribute("aria-label")
    for x, step in ((10, "1"), (240, "8")):
        shown.page.locator(".rb-line").first.click(position={"x": min(x, 240), "y": 40})
        drawn(shown)
        assert steps(shown)[0] == step


def test_names_of_curves_have_room_on_a_narrow_page(show, page):
    at = world(2)
    end = train(at, 1, loss=2.0)
    train(at, 2, start=end, loss=1.0)
    page.evaluate("document.body.style.width = '404px'")
    shown = show("pipeline", at)
    curves = [shown.page.locator(".rb-line").nth(n) for n in range(4)]
    for curve in curves:
        room, name = curve.bounding_box(), curve.locator("text").bounding_box()
        assert name["x"] + name["width"] <= room["x"] + room["width"]
    assert len({curve.bounding_box()["y"] for curve in curves}) == 2, "rows"


def test_without_a_loss_there_is_no_curve_of_it(show):
    at = world(2)
    train(at, 1, 2)
    shown = show("pipeline", at)
    assert [text.split()[0] for text in shown.texts(".rb-line > text")] == ["step", "bubble", "samples/s"]


def saved(shown, name):
    with shown.page.expect_download() as download:
        shown.page.get_by_role("button", name=name, exact=True).click()
    return Path(download.value.path()).read_text(encoding="utf-8")


def test_a_saved_trace_is_the_one_that_python_writes(show):
    at = world(2)
    train(at, 1, 2)
    shown = show("pipeline", at)
    made = json.loads(saved(shown, "Perfetto"))
    wanted = json.loads(json.dumps(trace(shown.view["ops"].values(), {1: "worker1", 2: "worker2"})))
    assert made["displayTimeUnit"] == wanted["displayTimeUnit"]
    assert sorted(made["traceEvents"], key=json.dumps) == sorted(wanted["traceEvents"], key=json.dumps)


def test_a_saved_picture_needs_no_style_sheet(show):
    at = world(2)
    train(at, 1)
    shown = show("pipeline", at)
    text = saved(shown, "SVG")
    picture = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    styles = [one.get("style") or "" for one in picture.iter(f"{name}rect")]
    fills = {style.partition("fill: ")[2].partition(";")[0] for style in styles}
    assert {"rgb(0, 114, 178)", "rgb(230, 159, 0)"} <= fills
    words = {one.text for one in picture.iter(f"{name}text")}
    assert {"worker1", "F0", "B3"} <= words and any(word.startswith("Step 1, ") for word in words if word)
    assert "class=" not in text and "var(" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_keys_reach_every_control_and_all_have_names(show):
    at = world(2)
    train(at, 1, 2)
    shown = show("pipeline", at)
    names = shown.page.locator(".rb-bar :is(button, select, input)").evaluate_all(
        "all => all.map(one => one.ariaLabel || one.labels?.[0]?.textContent || one.textContent)"
    )
    assert len(names) == len({*names}) == 11 and all(names)
