"""A record played in panels: each frame is what the panel showed then, by slider, buttons and lines of code."""

from __future__ import annotations

import copy

import comm
import pytest
from comm.base_comm import BaseComm
from pictures import own, send, use, world

import rpcbench
from rpcbench.panels import PANELS
from rpcbench.panels.replay import format_moment
from rpcbench.telemetry.recording import FORMAT, VERSION, Record, flatten_world
from rpcbench.telemetry.views import diff_views


@pytest.fixture(autouse=True)
def no_front_end(monkeypatch):
    class Silent(BaseComm):
        def publish_msg(self, msg_type, data=None, metadata=None, buffers=None, **keys):
            pass

    monkeypatch.setattr(comm, "create_comm", Silent)


@pytest.fixture
def file(tmp_path):
    """Four frames: nothing, one RRef, it and its user, a message besides."""
    at = world(2)
    frames, before = [], {}
    for n, change in enumerate(
        [
            lambda: None,
            lambda: own(at, 1, "0.1"),
            lambda: use(at, 0, "0.2", "0.1", 1),
            lambda: send(at, 0, 1, "Call", 5.0, label="f"),
        ]
    ):
        change()
        sections = copy.deepcopy(flatten_world(at))  # rows of a real world never change
        frames.append((n / 2, diff_views(before, sections), "used" if n == 2 else ""))
        before = sections
    about = {"format": FORMAT, "version": VERSION, "holds": {}, "leaves_out": []}
    return Record(about, tuple(frames)).save(tmp_path / "lesson.json")


@pytest.fixture
def player(file):
    made = rpcbench.replay(file)
    yield made
    made.close()


def shown(player):
    return [line.strip() for line in str(player).splitlines()]


def test_its_controls_wrap_where_there_is_no_room_and_none_is_squeezed(player):
    controls = player.children[0]
    assert controls.layout.flex_flow == "row wrap"
    assert {(one.layout.flex, one.layout.max_width) for one in controls.children} == {("none", "100%")}


def test_it_opens_at_the_last_frame_and_goes_by_steps(player):
    play, slider, *_ = player.children[0].children
    assert player.player.at == play.value == slider.value == 3
    assert shown(player)[0] == "3 members, 1 RRef, 1 fork" and player.children[1].value == "1.50 s of 1.50 s"
    player.go(0)
    assert shown(player) == ["3 members, 0 RRefs, 0 forks"]
    player.step()
    assert shown(player)[0] == "3 members, 1 RRef, 0 forks"
    player.step()
    assert "used by notebook" in shown(player)[1]
    player.step(-2)
    assert shown(player) == ["3 members, 0 RRefs, 0 forks"]
    player.go(99)
    assert player.player.at == 3
    player.step()
    assert player.player.at == 3


def test_a_long_record_is_told_in_minutes():
    assert [format_moment(one) for one in (1.5, 59.994, 59.996, 123.5)] == [
        "1.50 s",
        "59.99 s",
        "1:00.00 min",
        "2:03.50 min",
    ]


def test_slider_and_buttons_do_the_same(player):
    _, slider, back, on, which = player.children[0].children
    slider.value = 2
    assert player.player.at == 2 and player.children[1].value == "1.00 s of 1.50 s, used"
    on.click()
    assert player.player.at == slider.value == 3
    back.click()
    assert player.player.at == slider.value == 2
    before = player.panel
    which.value = "messages"
    assert player.children[-1] is player.panel is not before and before.comm is None
    on.click()
    assert shown(player)[0] == "3 members, 1 message"


@pytest.mark.parametrize("name", PANELS)
def test_any_panel_plays_it(file, name):
    player = rpcbench.replay(file, name)
    try:
        assert isinstance(player.panel, PANELS[name])
        player.go(3)
        assert str(player).startswith("3 members")
    finally:
        player.close()


def test_a_panel_that_is_not_there_is_told_of(file):
    with pytest.raises(ValueError, match="no panel is called 'rref'"):
        rpcbench.replay(file, "rref")


def test_its_panel_says_that_it_plays_a_record(player):
    assert player.panel.phase["name"] == "record"


def test_what_a_saved_notebook_shows_is_a_sentence(player):
    assert player._repr_mimebundle_()["text/plain"].endswith("Run the cell to see it.")


def test_beside_the_widget_stands_a_page_of_its_own(player, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    player._ipython_display_()
    widget, alone = shown
    assert widget["application/vnd.jupyter.widget-view+json"]["model_id"] == player.model_id
    assert alone["text/html"].startswith("<details ") and "srcdoc=" in alone["text/html"]


def test_a_record_of_nothing_is_shown_as_that(tmp_path):
    about = {"format": FORMAT, "version": VERSION, "holds": {}, "leaves_out": []}
    player = rpcbench.replay(Record(about, ()).save(tmp_path / "x.json"))
    assert shown(player) == ["0 members, 0 RRefs, 0 forks"]
    player.close()
