"""The autograd panel in a real browser: what stands in the page is what the view says."""

from __future__ import annotations

import pytest
from pictures import gpipe, part, record, release, world
from shown import busy_world

pytestmark = pytest.mark.browser

KEY = str(1 << 48)
THEN = " \N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK} "
CARD = ".rb-autograd .rb-card"


def trip(workers=2, until="forward"):
    """The notebook sends x to each worker in turn. `until`: forward, half of backward, or all of it."""
    at = world(workers)
    ways = [way for w in range(1, workers + 1) for way in ((2 * w - 1, 0, w), (2 * w, w, 0))]
    record(at, 0, [(n, source, to) for n, source, to in ways], dict.fromkeys(range(workers + 1), 0))
    graphs = [member["tables"]["graphs"]["0"] for member in at.values()]
    graphs[0]["parts"] = [part([1], [], "leaf x")]
    graphs[0]["parts"] += [part([2 * w + 1], [2 * w], "Mul") for w in range(1, workers)]
    for w in range(1, workers + 1):
        graphs[w]["parts"] = [part([2 * w], [2 * w - 1], "Linear net.0", "Relu")]
    if until != "forward":
        back_runs(at, workers if until == "all" else 1)
    if until == "half":
        one = {"pass": "0.1", "state": "running", "needed": 2, "arrived": 1, "waiting": 1}
        at[0]["tables"]["contexts"]["0"]["passes"] = [one]
    return at


def back_runs(at, count):
    """The loss and the last workers have run backward, this number of workers."""
    workers = len(at) - 1
    here = at[0]["tables"]["graphs"]["0"]
    loss = part([-1], [2 * workers], "Sub", "Pow", "Mean", ran=(9.0, 9.002))
    here["parts"] = [*here["parts"], loss]
    for n in range(count):
        w, begin = workers - n, 9.01 + 0.01 * n
        for id_, message in ((w, 2 * w), (0, 2 * w - 1)):
            graph = at[id_]["tables"]["graphs"]["0"]
            graph["sends"] = [{**one, "back": begin} if one["message"] == message else one for one in graph["sends"]]
            ran = [begin, begin + 0.0015]
            graph["parts"] = [{**one, "ran": ran} if message in one["sends"] else one for one in graph["parts"]]
        held = at[w]["tables"]["graphs"]["0"]
        held["leaves"] = [{"name": "net.0.weight", "shape": "[64, 64]", "bytes": 16384}]
        held["gradients"] = at[w]["tables"]["contexts"]["0"]["gradients"] = 1


def legend(shown):
    return shown.texts(".rb-legend > span")


def test_a_panel_that_was_opened_late_does_not_say_that_there_was_none(show):
    (hint,) = show("autograd", world(2)).texts(".rb-hint")
    assert hint.startswith("Autograd contexts appear here from now on. Open one: ")


def test_a_lane_for_each_worker_with_its_operations_in_order(show):
    shown = show("autograd", trip())
    lanes = shown.page.eval_on_selector_all(".rb-lane", "all => all.map(one => one.dataset.member)")
    assert lanes == ["0", "1", "2"]
    for worker, texts in {0: ["x", "Mul"], 1: [f"Linear{THEN}Relu"], 2: [f"Linear{THEN}Relu"]}.items():
        assert shown.texts(f".rb-block[data-worker='{worker}'] .rb-chip-text") == texts
    lefts = "all => all.map(one => [Number(one.querySelector('.rb-edge').getAttribute('x')), one.dataset.worker])"
    order = shown.page.eval_on_selector_all(f"{CARD} .rb-block:not(.rb-empty)", lefts)
    assert [worker for _, worker in sorted(order)] == ["0", "1", "0", "2"], "x, worker1, Mul, worker2"


def test_gradients_go_back_along_the_messages_and_what_ran_stays_with_its_time(show):
    shown = show("autograd", trip())
    assert [shown.count(f"{CARD} {kind}") for kind in (".rb-forward", ".rb-back", ".rb-ran")] == [4, 0, 0]
    assert shown.count(".rb-empty") == 1, "the loss is not known yet"
    before = legend(shown)
    shown.move(trip(until="half"))
    assert (shown.count(f"{CARD} .rb-back"), shown.count(f"{CARD} .rb-ran")) == (3, 3)
    assert shown.count(f"{CARD} .rb-back.rb-flight") == 1, "that of worker1's result"
    shown.move(trip(until="all"))
    assert shown.count(f"{CARD} .rb-back") == 4 and shown.count(f"{CARD} .rb-flight") == 0
    done = trip(until="all")
    release(done, 0)
    shown.move(done)
    assert sorted(shown.texts(f"{CARD} .rb-time")) == ["1.5 ms"] * 4 + ["2.0 ms"]
    assert shown.texts(".rb-gradients") == ["1 gradient", "1 gradient"]
    assert shown.texts(".rb-leaf-line") == ["net.0.weight [64, 64]"] * 2
    gained = set(legend(shown)) - set(before)
    assert gained == {"has run backward, with its time", "its gradient came back", "gradient held in the context"}
    assert "message in flight" not in legend(shown)


def test_a_released_context_keeps_its_last_numbers_with_nothing_in_flight(show):
    at = trip(until="all")
    at[2]["tables"]["contexts"]["0"]["recvs"] = []
    at[2]["tables"]["graphs"]["0"]["recvs"] = []
    shown = show("autograd", at)
    assert "1 in flight" in shown.texts(".rb-stat") and shown.count(f"{CARD} .rb-forward.rb-flight") == 1
    release(at := trip(until="all"), 0)
    shown.move(at)
    stats = ["context released", "4 of 4 received", "4 gradients back", "2 held until the release"]
    assert shown.texts(".rb-stat")[:4] == stats
    assert shown.count(f"{CARD}.rb-gone") == 1 and shown.count(f"{CARD} .rb-flight") == 0
    shown.move(world(2))  # the members' rows have gone
    assert shown.texts(".rb-stat")[:2] == ["context released", "4 of 4 received"]


def test_a_message_that_is_under_way_is_dashed_and_the_legend_says_so(show):
    at = trip()
    at[1]["tables"]["contexts"]["0"]["recvs"] = []
    shown = show("autograd", at)
    assert shown.count(f"{CARD} .rb-forward.rb-flight") == 1
    assert "message in flight" in legend(shown) and "never received" not in legend(shown)


@pytest.mark.parametrize("first", [(1,), (2, 3)])
def test_the_last_picture_of_a_context_is_whole_whoever_tells_of_its_end_first(show, first):
    """Of a record that was made before rows told of the end."""
    at = busy_world()
    shown = show("autograd", at)
    for worker in first:
        at[worker]["tables"]["contexts"].clear()
    shown.move(at)
    shown.move(world(3))
    assert shown.count(".rb-card.rb-gone") == 1
    assert shown.texts(".rb-gradients") == ["4 gradients", "4 gradients", "2 gradients"]
    assert shown.count(f"{CARD} .rb-back.rb-flight") == 0, "nothing is in flight after the end"


def test_many_messages_fold_to_a_block_for_each_worker_with_counts(show):
    shown = show("autograd", busy_world())
    assert shown.texts(".rb-count-there") == ["8", "8"]
    assert shown.texts(".rb-count-back") == ["2 / 8", "4 / 8"]
    assert shown.texts(".rb-left") == ["6 to come", "4 to come", "2 to come"]
    assert shown.texts(".rb-block[data-worker='1'] .rb-chip-text") == [f"Linear{THEN}Relu \N{MULTIPLICATION SIGN}8"]
    assert shown.page.locator(".rb-block[data-worker='1']").get_attribute("data-state") == "partly"


def test_a_step_of_a_pipeline_is_a_block_for_each_stage(show):
    at = world(3)
    record(at, 7, [(w * 10 + m, w, w + 1) for w in (1, 2) for m in range(4)], {1: 2, 2: 2, 3: 2})
    gpipe(at, 5, 3, 4, 100.0)
    for worker in (1, 2, 3):
        graph = at[worker]["tables"]["graphs"]["7"]
        sends = [{**send, "label": f"F{m} for stage {worker}"} for m, send in enumerate(graph["sends"])]
        graph |= {"step": 5, "stages": {str(worker - 1): ["Linear", "ReLU"]}, "sends": sends, "parts": []}
    release(at, 7)
    shown = show("autograd", at)
    assert shown.texts(f"{CARD} .rb-chip-text") == [f"stage {n}{THEN}Linear{THEN}ReLU" for n in range(3)]
    assert shown.texts(".rb-count-there") == shown.texts(".rb-count-back") == ["4", "4"]
    assert [text.split(",")[0] for text in shown.texts(f"{CARD} .rb-time")] == ["4 of 4 back"] * 3
    assert shown.texts(".rb-stat")[0] == "step 5 released"


def choose(shown, context):
    shown.page.get_by_label("Context shown").select_option(context)
    shown.page.evaluate("drawn()")


def shown_context(shown):
    return shown.page.locator(CARD).get_attribute("data-context")


def test_one_context_is_chosen_and_stays_so_after_its_release(show):
    at = world(3)
    first, second = KEY, str(int(KEY) + 1)
    for context in (first, second):
        record(at, int(context), [(1, 1, 2)], {1: 1, 2: 0})
    shown = show("autograd", at)
    choose(shown, second)
    assert shown_context(shown) == second
    release(at, int(second))
    shown.move(at)
    assert shown_context(shown) == second and shown.count(".rb-card.rb-gone") == 1
    assert f"context {second}, released" in shown.texts(".rb-choose option")
    choose(shown, first)
    assert shown_context(shown) == first and shown.count(".rb-card.rb-gone") == 0


def test_in_training_the_last_context_that_has_ended_stands_still(show):
    at = world(2)
    shown = show("autograd", at)
    shown.page.evaluate("() => { const now = performance.now(); performance.now = () => now; }")  # the clock stands
    for step in range(1, 5):
        record(at, step, [(step, 0, 1)], {0: 0, 1: 1})
        if step > 1:
            release(at, step - 1)
            at[0]["tables"]["graphs"].pop(str(step - 2), None)
        shown.move(at)
        assert shown_context(shown) == "1", "it was there first, and is shown for a while"
    shown.page.evaluate("delete performance.now")
    shown.page.wait_for_selector(f"{CARD}[data-context='4']")  # no other one has come


def test_details_are_said_for_the_block_or_arrow_that_the_pointer_or_a_key_chooses(show):
    shown = show("autograd", trip(until="all"))
    detail = shown.page.locator(".rb-detail")
    shown.page.locator(".rb-block[data-worker='1']").hover()
    assert detail.text_content() == "worker1: Linear (net.0), Relu. Backward has run: 1.5 ms."
    shown.page.locator(".rb-message .rb-grip").first.dispatch_event("pointerover", {"bubbles": True})
    assert detail.text_content() == "notebook → worker1: forward, [8, 64], 2.0 kB; received; gradient came back."
    shown.page.mouse.move(0, 0)
    shown.page.locator(".rb-body").focus()
    shown.page.keyboard.press("ArrowRight")
    first = shown.page.locator(".rb-chosen title").text_content()
    shown.page.keyboard.press("ArrowRight")
    assert shown.count(".rb-chosen") == 1
    assert shown.page.locator(".rb-chosen title").text_content() == detail.text_content() != first


def test_before_backward_the_panel_says_when_the_loss_is_known(show):
    shown = show("autograd", trip())
    assert "appear when backward begins" in shown.texts(".rb-detail")[0]
    shown.move(trip(until="half"))
    assert "appear when backward begins" not in shown.texts(".rb-detail")[0]


@pytest.mark.parametrize("width", [1000, 1440])
@pytest.mark.parametrize("workers", [2, 8])
def test_blocks_and_texts_do_not_overlap(show, width, workers):
    shown = show("autograd", world(1))
    shown.page.set_viewport_size({"width": width, "height": 700})
    shown.move(trip(workers, "all"))
    overlaps = """() => {
      const all = [...document.querySelectorAll('.rb-block .rb-edge')].map(one => one.getBoundingClientRect());
      const hit = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      return all.filter((one, i) => all.slice(i + 1).some(other => hit(one, other))).length;
    }"""
    assert shown.page.evaluate(overlaps) == 0
    inside = """() => [...document.querySelectorAll('.rb-block')].every(block => {
      const edge = block.querySelector('.rb-edge').getBoundingClientRect();
      return [...block.querySelectorAll('.rb-chip-text')].every(text => {
        const {left, right} = text.getBoundingClientRect();
        return left >= edge.left - 1 && right <= edge.right + 1;
      });
    })"""
    assert shown.page.evaluate(inside)
    wide, room = shown.page.eval_on_selector(".rb-body", "body => [body.scrollWidth, body.clientWidth]")
    assert wide <= room
    shown.page.set_viewport_size({"width": 1000, "height": 700})


def test_of_a_lost_worker_nothing_is_said_that_it_has_not_told(show):
    at = trip(until="all")
    release(at, 0)
    for name in ("contexts", "graphs"):
        at[2]["tables"][name] = {}
    at[2]["state"] = "lost"
    shown = show("autograd", at)
    shown.page.wait_for_function("document.querySelector('.rb-autograd .rb-card')")  # after a while: it may come yet
    said = "".join(shown.texts("title"))
    assert "worker2 is gone and does not tell whether it has received" in said, said
    assert "0 of 1 received" not in said and shown.count(".rb-lost") == 0
    assert "received, by what is known" in "".join(shown.texts(".rb-stat"))
