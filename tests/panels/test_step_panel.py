"""The step panel: what it shows is what is held, in order; clicks and keys ask for what they say."""

from __future__ import annotations

import comm
import pytest
from comm.base_comm import BaseComm
from shown import NASTY

import rpcbench.panels as panels
from rpcbench.base.errors import RpcError
from rpcbench.panels.step import StepPanel, step_view
from rpcbench.testing.stepper import Held


def message(n, sender="worker1", to="worker2", kind="Call", label="divmod", **ids):
    return Held(n, sender, to, kind, label, {name: str(value) for name, value in ids.items()})


class Steps:
    """A stepper that notes what it is asked."""

    def __init__(self, *held):
        self.held = list(held)
        self.asked = []
        self.is_on, self.delivered, self.dropped, self.passed = True, 0, 0, 0.0
        self.wakes = []

    def subscribe(self, wake):
        self.wakes.append(wake)
        return lambda: self.wakes.remove(wake)

    def submit(self, job):
        job()

    def deliver(self, n=None):
        self.asked.append(("deliver", n))
        if n == 99:
            raise ValueError("no message 99 is held")
        if n == 98:
            raise RpcError("worker2 is gone")

    def drop(self, n=None):
        self.asked.append(("drop", n))

    def delay(self, n=None):
        self.asked.append(("delay", n))

    def go(self):
        self.asked.append(("go",))

    def pass_time(self, seconds):
        self.asked.append(("time", seconds))


class Still:
    def open_viewer(self, viewer, source):
        pass

    def close_viewer(self, viewer):
        pass


@pytest.fixture
def panel(monkeypatch):
    class Silent(BaseComm):
        def publish_msg(self, *args, **keys):
            pass

    monkeypatch.setattr(comm, "create_comm", Silent)
    made = StepPanel(Steps(message(3, call=7)), publisher=Still())
    yield made
    made.close()


def click(panel, **content):
    panel.comm.handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    return panel._stepper.asked


def test_the_view_has_each_message_and_their_order(panel):
    view = step_view(panel._source.world())
    assert view["stepper"]["0"] == {"on": True, "delivered": 0, "dropped": 0, "passed": 0.0, "order": [3]}
    row = {
        "n": 3,
        "sender": "worker1",
        "to": "worker2",
        "kind": "Call",
        "words": "call divmod",
        "family": "call",
        "about": "Call · call 7",
    }
    assert view["held"] == {"3": row}
    assert step_view({})["stepper"]["0"]["order"] == []


def test_clicks_are_deeds_and_anything_else_is_nothing(panel):
    click(panel, kind="deliver", n=3)
    click(panel, kind="drop", n=3)
    click(panel, kind="delay", n=None)
    click(panel, kind="time", seconds=1)
    click(panel, kind="time", seconds=1e9)
    click(panel, kind="go")
    click(panel, kind="go_away", n=3)
    click(panel, kind="deliver", n="3")
    click(panel, kind="close", n=3)
    deeds = [("deliver", 3), ("drop", 3), ("delay", None), ("time", 1), ("time", 60.0), ("go",)]
    assert panel._stepper.asked == deeds


def test_a_click_on_what_has_gone_does_no_harm(panel, caplog):
    assert click(panel, kind="deliver", n=99) == [("deliver", 99)]
    assert caplog.messages == []
    click(panel, kind="deliver", n=98)
    assert caplog.messages == ["a click had no effect: worker2 is gone"]


def test_its_text_is_that_of_its_view(panel):
    first, line = str(panel).splitlines()
    assert first == "1 message held; 0 delivered, 0 dropped"
    assert line.split() == ["3", "worker1", "→", "worker2", "call", "divmod"]


# -- drawn
@pytest.fixture
def shown(show, monkeypatch):
    monkeypatch.setitem(panels.ALL_PANELS, "step", StepPanel)
    return lambda *held, on=True: show("step", world(*held, on=on))


def world(*held, on=True, delivered=0, passed=0.0):
    state = {"on": on, "delivered": delivered, "dropped": 0, "passed": passed, "order": [row.n for row in held]}
    return {0: state, **{row.n: row._asdict() for row in held}}


def asked(page):
    return [one for one in page.evaluate("sent") if one["kind"] not in ("opened", "closed", "seen")]


@pytest.mark.browser
def test_what_is_held_stands_there_in_order(shown):
    rows = [
        message(3),
        message(4, kind="Result", sender="worker2", to="worker1"),
        message(5, kind="ForkRequest", label="", rref="0.4"),
        message(6, kind="Fetch", label="to_here", rref="0.4"),
    ]
    drawn = shown(*rows)
    assert drawn.texts(".rb-held .rb-n") == ["3", "4", "5", "6"]
    words = ["call divmod", "result of divmod", "new user of RRef 0.4", "fetch RRef 0.4"]
    assert drawn.texts(".rb-held .rb-what") == words
    assert drawn.texts(".rb-held .rb-who")[1] == "worker2 → worker1"
    drawn.move(world(rows[2], rows[0], delivered=1, passed=1.5))
    assert drawn.texts(".rb-held .rb-n") == ["5", "3"]
    stats = [text.strip() for text in drawn.texts(".rb-stat")]
    assert stats == ["2 held", "1 delivered", "0 dropped", "1.5 s advanced"]
    drawn.move(world(on=False, delivered=3))
    assert drawn.count(".rb-held") == 0 and drawn.count(".rb-bar button:enabled") == 0
    assert drawn.texts(".rb-hint") == ["Messages are no longer held."]


@pytest.mark.browser
def test_buttons_and_keys_ask(shown, page):
    drawn = shown(message(3), message(4), message(5))
    page.evaluate("sent.length = 0")
    page.get_by_role("button", name="Deliver next").click()
    page.locator(".rb-held[data-n='5']").get_by_role("button", name="Drop").click()
    page.locator(".rb-held[data-n='4']").get_by_role("button", name="Later").click()
    page.get_by_role("button", name="Advance 1 s").click()
    page.get_by_role("button", name="Release all").click()
    page.locator(".rb-held[data-n='3']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Delete")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("l")
    assert asked(page) == [
        {"kind": "deliver", "n": 3}, {"kind": "drop", "n": 5}, {"kind": "delay", "n": 4},
        {"kind": "time", "seconds": 1}, {"kind": "go"},
        {"kind": "deliver", "n": 4}, {"kind": "drop", "n": 5}, {"kind": "delay", "n": 4},
    ]  # fmt: skip
    assert drawn.texts(".rb-said") == ["Delayed 4: call divmod from worker1 to worker2."]


@pytest.mark.browser
def test_the_focus_stays_with_the_list_when_its_message_goes(shown, page):
    drawn = shown(message(3), message(4), message(5))
    focused = "document.activeElement.dataset.n"
    page.locator(".rb-held[data-n='4']").focus()
    drawn.move(world(message(4), message(5), message(6)))
    assert page.evaluate(focused) == "4"
    drawn.move(world(message(5), message(4), message(6)))
    assert page.evaluate(focused) == "4"
    drawn.move(world(message(5), message(6)))
    assert page.evaluate(focused) == "6"
    assert drawn.count(".rb-held[tabindex='0']") == 1


@pytest.mark.browser
def test_names_are_never_markup(shown, page):
    drawn = shown(message(1, sender=NASTY[1], to=NASTY[2], label=NASTY[3], kind="Call", call=NASTY[1]))
    assert drawn.texts(".rb-held .rb-who") == [f"{NASTY[1]} → {NASTY[2]}"]
    assert page.evaluate("window.hurt") is None


@pytest.mark.browser
def test_a_narrow_frame_has_room_for_the_words_and_buttons_of_a_message(shown, page):
    page.set_viewport_size({"width": 280, "height": 700})
    shown(message(3, call=7), message(4, "worker2", "notebook", "Create", "torch.nn.Linear", rref="0.4"))
    assert page.eval_on_selector(".rb-body", "one => one.scrollWidth - one.clientWidth") == 0
    for box in (one.bounding_box() for one in page.locator(".rb-held :is(.rb-what, button)").all()):
        assert box["width"] > 40 and box["x"] + box["width"] <= 280
    page.set_viewport_size({"width": 1000, "height": 700})
